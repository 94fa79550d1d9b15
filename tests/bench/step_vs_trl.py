"""Seconds per training step and the learning curve, ours beside TRL's GRPOTrainer, in one alternating run.

    python tests/bench/step_vs_trl.py --peer-python TRL_ENV/bin/python --peer-script trl_grpo.py [--seeds 0 1 2]

Both start from data/tiny-llama on the middle set: 32 tasks x 8 samples, 10 new tokens, lr 1e-4 with 10 warm-up steps, token-mean
loss, no KL, AdamW, gradient clipping 1, fp32, one optimizer step per rollout, the same number of threads. The clock runs during
training only. For each seed both run one after the other in fresh processes, in alternating order; ratios are taken per pair.
"""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, child, environment, median, peak_mb, save

LEVELS = (0.6, 0.7, 0.8)


def ours(a):
    from grpo_nb.lab.recipe import load_config
    from grpo_nb.tasks import Taskset, data_path
    from grpo_nb.trainer import GRPO

    config = load_config(
        None,
        [
            f"steps={a.steps}",
            f"seed={a.seed}",
            f"threads={a.threads}",
            "policy.max_new_tokens=10",
            "run.progress=false",
            f"optimizer.lr={a.lr}",
        ],
    )
    trainer = GRPO.from_config(config)
    tokenizer, eos = trainer.policy.tokenizer, trainer.policy.tokenizer.eos_token_id
    think = tokenizer.convert_tokens_to_ids("</think>")

    def exact(completions, completion_ids, answer, **columns):
        "The peer script's reward: the text between </think> and <eos> is the answer."
        out = []
        for ids, want in zip(completion_ids, answer):
            ended = eos in ids and think in ids
            got = tokenizer.decode(ids[ids.index(think) + 1 : ids.index(eos)]) if ended else None
            out.append(float(got == want))
        return out

    middle = Taskset.load(data_path("tasks/middle_train.jsonl"))
    trainer = GRPO(trainer.policy, middle, {"exact": exact}, config, trainer.eval_tasks)
    evaluate = lambda: {k: round(v[0], 4) for k, v in trainer.evaluate().values.items()}
    start, evals, curve, total, recent, hit, seconds = evaluate(), [], [], 0.0, [], {}, []
    for i in range(1, a.steps + 1):
        clock = time.perf_counter()
        row = trainer.step()
        seconds.append(time.perf_counter() - clock)
        total += seconds[-1]
        recent = (recent + [row["reward"]])[-10:]
        curve.append(
            [i, round(total, 2), round(row["reward"], 4), round(row["frac_reward_zero_std"], 4)]
        )
        for level in LEVELS:
            if level not in hit and len(recent) == 10 and sum(recent) / 10 >= level:
                hit[level] = {"step": i, "train_s": round(total, 1)}
        if a.eval_every and i % a.eval_every == 0 and i < a.steps:
            evals.append({"step": i, "train_s": round(total, 2), **evaluate()})
    last = trainer.history[-1]
    print(
        json.dumps(
            dict(
                steps=a.steps,
                train_s=round(total, 1),
                step_s_median=round(median(seconds[5:]), 4),
                split_s={
                    k: round(last[k] / a.steps, 4)
                    for k in ("gen_seconds", "reward_seconds", "train_seconds")
                },
                peak_rss_mb=round(peak_mb()),
                eval_start=start,
                eval_end=evaluate(),
                evals=evals,
                seconds_to=hit,
                curve=curve,
            )
        )
    )


def early(run) -> float:
    "Median seconds of steps 6 to 55, the start of training."
    t = [c[1] for c in run["curve"]]
    return statistics.median(b - a for a, b in zip(t[4:54], t[5:55]))


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--mode", default="", help=argparse.SUPPRESS)
    ap.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    ap.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    ap.add_argument("--peer-python")
    ap.add_argument("--peer-script")
    for k, v in dict(steps=250, threads=2, lr=1e-4, eval_every=50).items():
        ap.add_argument("--" + k.replace("_", "-"), dest=k, type=type(v), default=v)
    a = ap.parse_args()
    if a.mode:
        return ours(a)
    env, pairs = environment("trl"), []
    common = ["--steps", a.steps, "--threads", a.threads, "--lr", a.lr]
    with tempfile.TemporaryDirectory() as tmp:
        task = Path(tmp)
        shutil.copytree(ROOT / "data" / "tiny-llama", task / "model")
        for name in ("train", "eval"):
            shutil.copy(ROOT / "data" / "tasks" / f"middle_{name}.jsonl", task / f"{name}.jsonl")
        (task / "meta.json").write_text(json.dumps({"weights_sha256": "data/tiny-llama"}))
        for i, seed in enumerate(a.seeds):
            jobs = {
                "ours": [
                    sys.executable, __file__, "--mode", "ours", "--seed", seed, *common, "--eval-every", a.eval_every
                ],
                "TRL": [
                    a.peer_python, a.peer_script, "--dir", task, "--seed", seed, *common, "--eval_every", a.eval_every
                ],
            }  # fmt: skip
            out = {}
            for name in sorted(jobs, reverse=bool(i % 2)):
                if name == "TRL" and not a.peer_python:
                    continue
                out[name] = child(jobs[name], cwd=ROOT)
                print(
                    seed,
                    name,
                    out[name]["step_s_median"],
                    out[name]["eval_end"],
                    out[name]["seconds_to"],
                    flush=True,
                )
            pairs.append(out)
    rows = []
    show = lambda hit, level: next(
        (f"{v['train_s']} ({v['step']})" for k, v in hit.items() if float(k) == level), "-"
    )
    for seed, pair in zip(a.seeds, pairs):
        for name, r in sorted(pair.items()):
            rows.append(
                {
                    "seed": seed,
                    "who": name,
                    "s/step, steps 6-55": f"{early(r):.3f}",
                    "s/step, all": f"{r['step_s_median']:.3f}",
                    **{
                        f"s (step) to reward {level}": show(r["seconds_to"], level)
                        for level in LEVELS
                    },
                    "held-out greedy": r["eval_end"]["greedy"],
                    "held-out sampled": r["eval_end"]["sampled"],
                    "peak MB": round(r["peak_rss_mb"]),
                }
            )
        if len(pair) == 2:
            rows.append(
                {
                    "seed": seed,
                    "who": "ratio TRL / ours",
                    "s/step, steps 6-55": f"{early(pair['TRL']) / early(pair['ours']):.2f}",
                    "s/step, all": f"{pair['TRL']['step_s_median'] / pair['ours']['step_s_median']:.2f}",
                }
            )
    notes = (
        f"{a.steps} steps, {a.threads} threads. Reward levels: mean training reward of ten steps; '-' is not reached. Held-out: 200 "
        "unseen sums, greedy and 8 samples each. Our warm-up reaches the full learning rate at step 10, TRL's at step 11."
    )
    save(
        "step_vs_trl",
        "Training steps, ours and TRL's",
        rows,
        "python tests/bench/step_vs_trl.py --peer-python … --peer-script …",
        env,
        notes,
        pairs,
    )


if __name__ == "__main__":
    main()
