"""Seconds and peak memory of the updates over one rollout: K epochs, micro-batches and chunks, ours beside TRL's num_iterations.

    python tests/bench/update_cost.py [--rounds 2] [--models tiny]
    python tests/bench/update_cost.py --peer-python TRL_ENV/bin/python

Two models: the shipped Llama (55 tokens in the vocabulary), and one of the same width and depth with 16384, made here from a seed,
for which the logits are what fills the memory. Both sides start from the same files and take the same batch size, completion
length, learning rate, K and number of threads; the loss is DAPO's token mean, beta 0, fp32. The reward is a number that any text
gets, so that no group is without an advantage, except in the rows `sums`, where it is the right answer, as in training.

Counted is the CPU time (wall time is stored beside it) of the update alone, from the rewarded rollout to the last optimizer step. Peak memory is the highest resident set during
it minus that just before it, after the heap was trimmed. Each measurement is a fresh process that does K = 1, 2, 4 one after the
other, `cycles` rollouts each after one to warm up; the sides alternate. With --models only these are measured, and the stored rows of the other stay.
"""

import argparse
import ctypes
import json
import shutil
import sys
import tempfile
import time
from pathlib import Path

from common import RESULTS, ROOT, child, environment_of, median, peak_mb, reset_peak, rss_mb, save

SHAPES = {
    "tiny": dict(prompts=32, generations=8, tokens=10),
    "wide": dict(prompts=4, generations=4, tokens=32),
}
# label -> model, who, options of the side
ROWS = {
    "tiny": {
        "ours": {},
        "ours, all samples": {"skip": 0},
        "ours, sums": {"reward": "sums"},
        "ours, micro_tokens 512": {"micro": 512},
        "TRL": {},
    },
    "wide": {
        "ours": {},
        "ours, chunk_tokens 64": {"chunk": 64},
        "ours, micro_tokens 128": {"micro": 128},
        "TRL": {},
        "TRL, 4 rows a pass": {"micro": 4},
    },
}


def any_text(text, answer):
    return sum(ord(c) % 7 for c in text) / (7 * max(len(text), 1))


def right_answer(text, answer):
    return float(text.split("</think>")[-1].strip() == str(answer))


def ours(a):
    import torch

    from grpo_nb.advantages import grpo
    from grpo_nb.core import seeded
    from grpo_nb.policies.tokens import TokenPolicy
    from grpo_nb.tasks import Taskset
    from grpo_nb.update import UpdateConfig, update

    torch.set_num_threads(a.threads)
    tasks = list(Taskset.load(Path(a.dir) / "tasks.jsonl"))
    reward, runs = right_answer if a.reward else any_text, []
    for k in a.epochs:
        model, chunk = Path(a.dir) / "model", a.chunk or None
        policy = TokenPolicy.from_pretrained(model, max_new_tokens=a.tokens, chunk_tokens=chunk)
        optimizer = torch.optim.AdamW(policy.parameters(), a.lr, weight_decay=0.0)
        config = UpdateConfig(k, micro_tokens=a.micro or None, skip_zero_advantage=bool(a.skip))
        seconds, cpu, peaks, steps = [], [], [], 0
        for cycle in range(a.cycles + 1):
            batch = tasks[cycle * a.prompts :][: a.prompts]
            rollout = policy.sample(batch, a.generations, seeded(cycle))
            pairs = zip(rollout.outputs, rollout.tasks)
            rewards = torch.tensor([reward(o, t.columns["answer"]) for o, t in pairs])
            ctypes.CDLL("libc.so.6").malloc_trim(0)
            base = rss_mb()
            reset_peak()
            start, cpu_start = time.perf_counter(), time.process_time()
            advantages = grpo(rewards, rollout.group_N)
            done = update(policy, rollout, advantages, optimizer, config).done
            seconds.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
            peaks.append(peak_mb() - base)
            steps = max(steps, done)
        facts = {"seconds": seconds[1:], "cpu": cpu[1:], "peak_mb": median(peaks[1:])}
        runs.append({"K": k, "updates": steps} | facts)
    print(json.dumps({"runs": runs}))


def make_folder(folder: Path, vocab: int | None):
    "Model files and tasks that both sides read."
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    source = ROOT / "data" / "tiny-llama"
    shutil.copytree(source, folder / "model")
    shutil.copy(ROOT / "data" / "tasks" / "middle_train.jsonl", folder / "tasks.jsonl")
    if vocab:
        torch.manual_seed(0)
        config = LlamaConfig.from_pretrained(source, vocab_size=vocab)
        LlamaForCausalLM(config).save_pretrained(folder / "model")


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--mode", default="", help=argparse.SUPPRESS)
    ap.add_argument("--dir", default="", help=argparse.SUPPRESS)
    ap.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 4])
    ap.add_argument("--models", nargs="+", default=list(ROWS))
    ap.add_argument("--peer-python")
    ap.add_argument("--peer-script", default=Path(__file__).parent / "peers" / "trl_update.py")
    ap.add_argument("--rounds", type=int, default=2)
    for k, v in dict(prompts=32, generations=8, tokens=10, micro=0, chunk=0, skip=1).items():
        ap.add_argument("--" + k, type=int, default=v, help=argparse.SUPPRESS)
    ap.add_argument("--reward", default="", help=argparse.SUPPRESS)
    for k, v in dict(cycles=1, seed=0, threads=1, lr=1e-4, vocab=16384).items():
        ap.add_argument("--" + k, type=type(v), default=v)
    a = ap.parse_args()
    if a.mode:
        return ours(a)
    env, found = environment_of(a.peer_python or sys.executable, "trl"), []
    with tempfile.TemporaryDirectory() as tmp:
        for model in a.models:
            make_folder(Path(tmp) / model, a.vocab if model == "wide" else None)
        for turn in range(a.rounds):
            jobs = [(m, label) for m in a.models for label in ROWS[m]]
            for model, label in jobs[:: -1 if turn % 2 else 1]:
                peer = label.startswith("TRL")
                if peer and not a.peer_python:
                    continue
                front = (
                    [a.peer_python, a.peer_script]
                    if peer
                    else [sys.executable, __file__, "--mode", "ours"]
                )
                options = (
                    SHAPES[model] | ROWS[model][label] | {"cycles": a.cycles, "threads": a.threads}
                )
                options |= {"lr": a.lr, "seed": a.seed, "dir": Path(tmp) / model}
                more = [x for k, v in options.items() for x in (f"--{k}", v)]
                out = child([*front, *more, "--epochs", *a.epochs], cwd=ROOT)["runs"]
                found += [{"model": model, "who": label, "round": turn} | r for r in out]
                show = {r["K"]: (round(median(r["cpu"]), 3), round(r["peak_mb"])) for r in out}
                print(turn, model, label, show, flush=True)
    stored = RESULTS / "update_cost.json"
    if stored.exists():
        found += [r for r in json.loads(stored.read_text()) if r["model"] not in a.models]
    write(a, env, found)


def write(a, env, found):
    "The table: medians over rounds and cycles; ratios of TRL's seconds to ours within each round."
    pick = lambda model, who, k: [
        r for r in found if (r["model"], r["who"], r["K"]) == (model, who, k)
    ]
    rows = []
    models = [m for m in SHAPES if any(r["model"] == m for r in found)]
    for model in models:
        for who in [w for w in ROWS[model] if pick(model, w, a.epochs[0])]:
            row = {"model": model, "who": who}
            for k in a.epochs:
                got, peer = pick(model, who, k), pick(model, "TRL", k)
                row[f"s, K={k}"] = f"{median(x for r in got for x in r['cpu']):.2f}"
                if peer and who != "TRL":
                    ratios = [median(p["cpu"]) / median(r["cpu"]) for p, r in zip(peer, got)]
                    row[f"TRL / this, K={k}"] = f"{median(ratios):.2f}"
            for k in a.epochs:
                row[f"MB, K={k}"] = round(median(r["peak_mb"] for r in pick(model, who, k)))
            rows.append(row)
    size = lambda m: (
        f"{m}: {SHAPES[m]['prompts']} x {SHAPES[m]['generations']} samples of up to {SHAPES[m]['tokens']} tokens"
    )
    notes = (
        "Seconds of CPU time (one thread; other work shares the cores) and peak memory above the resident set, of all K updates over "
        f"one rollout. {'; '.join(map(size, models))}. "
        f"{a.threads} thread, {a.rounds} alternating rounds of fresh processes, {a.cycles} rollout each after one to warm up; medians, and medians of "
        f"the ratios of the rounds. lr {a.lr:g}. `tiny` is data/tiny-llama; `wide` has a vocabulary of {a.vocab} and random weights. "
        "`all samples`: those with advantage 0 are run too; `sums`: the reward is the right answer, so that many groups are all right "
        "or all wrong and need no pass (TRL runs them). On a CPU TRL's fused kernels are not available: this says nothing about a GPU."
    )
    save("update_cost", "Cost of an update: epochs and chunks", rows, env, notes, found)


if __name__ == "__main__":
    main()
