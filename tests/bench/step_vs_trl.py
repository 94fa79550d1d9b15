"""Processor seconds per training step and what is learned, ours beside TRL's GRPOTrainer, in one alternating run.

    make trl
    python tests/bench/step_vs_trl.py --peer-python .venv-trl/bin/python [--seeds 0 1 2]

The recipe is quickstart.yaml: 32 tasks x 8 samples of at most 10 tokens, lr 1e-4 with 10 warm-up steps, token-mean loss, no KL,
AdamW, gradient clipping 1, fp32, one optimizer step per rollout. Both start from the same files and run one after the other in
fresh processes of one thread, in alternating order; ratios are taken per pair. Both trained models are judged here, alike.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, child, environment_of, median, peak_mb, save

PEER = Path(__file__).parent / "peers" / "trl_step.py"
LEVEL = 0.6  # mean training reward of ten steps


def quickstart(*changes):
    from grpo_nb.all import GRPO, load_config

    fixed = ["threads=1", "max_seconds=null", "run.dir=null", "run.progress=false"]
    return GRPO.from_config(load_config("data:recipes/quickstart.yaml", [*fixed, *changes]))


def ours(a):
    trainer, rows = quickstart(f"steps={a.steps}", f"seed={a.seed}"), []
    for _ in range(a.steps):
        start = time.process_time()
        reward = trainer.step()["reward"]
        rows.append([time.process_time() - start, None, reward])
    trainer.policy.model.save_pretrained(a.out)
    trainer.policy.tokenizer.save_pretrained(a.out)
    print(json.dumps({"steps": rows, "peak_mb": round(peak_mb())}))


def judge(folder) -> dict:
    "Accuracy on the 200 held-out sums, greedy and of 8 samples each."
    scores = quickstart(f"policy.model={folder}").evaluate().values
    return {k: round(v[0], 4) for k, v in scores.items()}


def cost(run) -> float:
    "Processor seconds of a step: the median of all but the first five."
    return median(s[0] for s in run["steps"][5:])


def row(seed, who, run) -> dict:
    "A line of the table."
    seconds, rewards = [s[0] for s in run["steps"]], [s[2] for s in run["steps"]]
    ends = range(10, len(rewards) + 1)
    hit = next((i for i in ends if sum(rewards[i - 10 : i]) / 10 >= LEVEL), None)
    spent = f"{sum(seconds[:hit]):.1f} ({hit})" if hit else "-"
    facts = {"seed": seed, "who": who, "CPU s/step": f"{cost(run):.3f}"}
    facts |= {f"CPU s (step) to reward {LEVEL}": spent}
    facts |= {f"held-out {k}": v for k, v in run["held_out"].items()}
    return facts | {"peak MB": run["peak_mb"]}


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--mode", default="", help=argparse.SUPPRESS)
    ap.add_argument("--out", help=argparse.SUPPRESS)
    ap.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    ap.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ap.add_argument("--steps", type=int, default=150)
    ap.add_argument("--peer-python")
    a = ap.parse_args()
    if a.mode:
        return ours(a)
    env, rows, pairs = environment_of(a.peer_python or sys.executable, "trl"), [], []
    same = ["--model", ROOT / "data/tiny-llama", "--rows", ROOT / "data/tasks/middle_train.jsonl"]
    for turn, seed in enumerate(a.seeds):
        jobs, pair = {"ours": [sys.executable, __file__, "--mode", "ours"]}, {"seed": seed}
        jobs |= {"TRL": [a.peer_python, PEER, *same]} if a.peer_python else {}
        for who in sorted(jobs, reverse=bool(turn % 2)):
            with tempfile.TemporaryDirectory() as out:
                job = [*jobs[who], "--steps", a.steps, "--seed", seed, "--out", out]
                pair[who] = child(job, cwd=ROOT)
                pair[who]["held_out"] = judge(out)
            rows.append(row(seed, who, pair[who]))
            print(rows[-1], flush=True)
        pairs.append(pair)
    notes = f"{a.steps} steps, one thread; medians over all steps but the first five. Rewards: mean training reward of ten steps. "
    notes += "Held-out: 200 unseen sums, greedy and 8 samples each. Our warm-up ends at step 10, TRL's at step 11."
    if a.peer_python:
        ratios = ", ".join(f"{cost(p['TRL']) / cost(p['ours']):.2f}" for p in pairs)
        notes += f" TRL's processor seconds per step over ours, by seed: {ratios}."
    save("step_vs_trl", "Training steps, ours and TRL's", rows, env, notes, pairs)


if __name__ == "__main__":
    main()
