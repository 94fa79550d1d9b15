"""GRPO and GDPO on sums with three rewards, at equal and at mismatched scales: the study that grpo_vs_gdpo.ipynb reads.

    OMP_NUM_THREADS=1 python nbs/tutorials/studies/grpo_vs_gdpo.py                 all runs, one after the other
    python nbs/tutorials/studies/grpo_vs_gdpo.py --out trial.json --steps 2 --first 4     the first four runs, two steps each

Every finished run is written at once; the same command again does what is missing. First each arm (advantage mode x scale
of the short reward) tries its learning rates, scored on a development set: all of them on the first tuning seed, the better
half on the second. Then it runs with the winner on the reported seeds, scored on held-out problems. Arms with the
same seed start from the same weights, see the same tasks and draw from the same random numbers. Under GDPO the scale does
not reach the advantages, so it is tuned at one scale and repeats the other on one seed only, as a check; the runs saved go to
a control: GRPO at the mismatched scale with the learning rate of GDPO.
What this leaves out: tuning of anything but the learning rate, other models, longer training.
"""

import argparse
import json
import platform
import re
import time
from importlib import metadata
from pathlib import Path

import torch

from grpo_nb.core import seeded
from grpo_nb.rewards import exact_answer, reward_function
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO, load_config

OUT = Path(__file__).with_suffix(".json")
SETTINGS = {
    "model": "tiny-llama",
    "train": "middle_train",
    "tuned_on": "middle_dev",
    "reported_on": "middle_eval",
    "modes": ["grpo", "gdpo"],
    "scales": [1, 30],  # what the short reward pays
    "weights": {"correct": 1.0, "format": 0.5, "short": 0.1},
    "short_tokens": 7,  # <think>71</think>17<eos>
    "steps": 40,
    "train_batch_size": 16,
    "num_generations": 8,
    "max_new_tokens": 10,
    "warmup": 5,
    "lrs": [2.5e-5, 5e-5, 1e-4, 2e-4],
    "tuning_seeds": [100, 101],
    "seeds": [0, 1, 2, 3, 4],
    "samples": 4,  # per problem in the evaluations, beside a greedy one
    "primary": "sampled accuracy",
    "margin": 0.03,  # accuracies closer than this would count as equivalent; fixed beforehand
}


def rewards(scale, short_tokens=SETTINGS["short_tokens"]):
    "Right answer; thought that is the answer backwards; at most so many tokens, paid `scale`."

    def thought_is_answer(completion, **columns):
        m = re.fullmatch(r"<think>(\d+-?)</think>(-?\d+)", completion)
        return float(m is not None and m[1] == m[2][::-1])

    @reward_function(form="single", name="short")
    def short(completion_ids, **columns):
        return scale * float(len(completion_ids) <= short_tokens)

    correct = exact_answer(extract="marker", marker="</think>")
    return {"correct": correct, "format": thought_is_answer, "short": short}


def make_trainer(mode, scale, lr, seed, settings=SETTINGS):
    "The trainer of one run."
    s = settings
    over = {
        "seed": seed,
        "threads": 1,
        "steps": s["steps"],
        "train_batch_size": s["train_batch_size"],
        "num_generations": s["num_generations"],
        "policy.model": f"data:{s['model']}",
        "policy.max_new_tokens": s["max_new_tokens"],
        "tasks.train": f"data:tasks/{s['train']}.jsonl",
        "tasks.eval": "null",
        "advantage.mode": mode,
        "optimizer.lr": lr,
        "optimizer.warmup": s["warmup"],
        "run.progress": "false",
    }
    over |= {f"advantage.weights.{k}": w for k, w in s["weights"].items()}
    config = load_config(None, [f"{k}={v}" for k, v in over.items()])
    start = GRPO.from_config(config)
    return GRPO(start.policy, start.stream.tasks, rewards(scale, s["short_tokens"]), config)


def evaluate(trainer, split, scale, samples):
    "Means of the components in units of 0 to 1, sampled and greedy, and the length, on held-out problems."
    problems = Taskset.load(data_path(f"tasks/{split}.jsonl"))
    problems, out = [problems[i] for i in range(len(problems))], {}
    for name, n, greedy in (("sampled", samples, False), ("greedy", 1, True)):
        generator = seeded(trainer.config.seed, "held out")
        r = trainer.rewards(trainer.policy.sample(problems, n, generator, greedy=greedy))
        correct, form, short = (
            r.rewards_NR.double().mean(0) / torch.tensor([1, 1, scale])
        ).tolist()
        out |= {f"{name} accuracy": correct, f"{name} format": form, f"{name} short": short}
        out[f"{name} tokens"] = r.lengths_N.double().mean().item()
    return {k: round(v, 5) for k, v in out.items()}


def curve(trainer, scale, width=5):
    "What training saw: component means over `width` steps each."
    rows = [
        [h["rewards/correct/mean"], h["rewards/format/mean"], h["rewards/short/mean"] / scale]
        for h in trainer.history
    ]
    cut = torch.tensor(rows)[: len(rows) // width * width].view(-1, width, 3).mean(1)
    return [[round(v, 3) for v in row] for row in cut.tolist()]


def one_run(job, settings=SETTINGS):
    "Train and evaluate: what the table stores of one run."
    phase, mode, scale, lr, seed = (job[k] for k in ("phase", "mode", "scale", "lr", "seed"))
    start = time.process_time()
    trainer = make_trainer(mode, scale, lr, seed, settings)
    if phase != "start":
        trainer.fit()
    split = settings["tuned_on" if phase == "tune" else "reported_on"]
    out = job | evaluate(trainer, split, scale, settings["samples"])
    if phase in ("report", "control"):
        out["curve"] = curve(trainer, scale)
        out["samples trained on"] = trainer.counters.row()["n_rollouts_generated"]
    return out | {"cpu_seconds": round(time.process_time() - start, 1)}


def tuned_at(mode, scale, settings=SETTINGS):
    "Whose tuning runs an arm uses: GDPO's advantages do not depend on the scale, so it tunes once."
    return (mode, settings["scales"][0] if mode == "gdpo" else scale)


def race(runs, mode, scale, settings=SETTINGS):
    "Tuning of one arm: its runs as (lr, seed) as far as they are known, and the winner or None."
    s, arm = settings, (mode, scale)
    tuning = [r for r in runs if r["phase"] == "tune" and (r["mode"], r["scale"]) == arm]
    score = {(r["lr"], r["seed"]): r[s["primary"]] for r in tuning}
    left, plan = list(s["lrs"]), []
    for i, seed in enumerate(s["tuning_seeds"]):
        plan += [(lr, seed) for lr in left]
        if any((lr, seed) not in score for lr in left):
            return plan, None
        total = {lr: sum(score[lr, x] for x in s["tuning_seeds"][: i + 1]) for lr in left}
        best = sorted(left, key=total.get, reverse=True)
        left = [lr for lr in left if lr in best[: max(len(left) // 2, 1)]]
    return plan, best[0]


def jobs(runs, settings=SETTINGS):
    "All runs in order; reported ones once tuned, seed by seed, so that a study cut short has whole seeds."
    s, made = settings, ("phase", "mode", "scale", "lr", "seed")
    arms = [(mode, scale) for scale in s["scales"] for mode in s["modes"]]
    races = {arm: race(runs, *arm, s) for arm in dict.fromkeys(tuned_at(*arm, s) for arm in arms)}
    out = [("start", s["modes"][0], s["scales"][0], 0.0, s["seeds"][0])]
    out += [("tune", *arm, *at) for arm, (plan, _) in races.items() for at in plan]
    if all(winner for _, winner in races.values()):
        chosen = {arm: races[tuned_at(*arm, s)][1] for arm in arms}
        for seed in s["seeds"]:
            own = [arm for arm in arms if arm in races or seed == s["seeds"][0]]
            out += [("report", *arm, chosen[arm], seed) for arm in own]
            out += [("control", "grpo", s["scales"][-1], chosen["gdpo", s["scales"][0]], seed)]
    return [dict(zip(made, job)) for job in out]


def environment():
    "Versions and machine."
    names = ("torch", "transformers", "numpy", "grpo_nb")
    return {"python": platform.python_version(), "machine": platform.machine(), "threads": 1} | {
        k: metadata.version(k) for k in names
    }


def write(path, table):
    "One run per line, so that a difference can be read."
    head = {k: v for k, v in table.items() if k != "runs"}
    lines = ",\n".join("  " + json.dumps(r) for r in table["runs"])
    text = json.dumps(head, indent=1)[:-2] + f',\n "runs": [\n{lines}\n ]\n}}\n'
    path.with_suffix(".tmp").write_text(text, encoding="utf-8")
    path.with_suffix(".tmp").replace(path)


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--out", type=Path, default=OUT)
    ap.add_argument("--steps", type=int, default=SETTINGS["steps"])
    ap.add_argument("--first", type=int, help="stop after so many runs of the plan")
    a = ap.parse_args()
    settings = SETTINGS | {"steps": a.steps}
    command = "OMP_NUM_THREADS=1 python nbs/tutorials/studies/grpo_vs_gdpo.py"
    table = {"command": command, "settings": settings, "environment": environment(), "runs": []}
    if a.out.exists():
        old = json.loads(a.out.read_text(encoding="utf-8"))
        if old["settings"] != settings or old["environment"] != table["environment"]:
            raise SystemExit(
                f"{a.out} was made with other settings or versions: move it away first."
            )
        table = old
    key = lambda r: tuple(r[k] for k in ("phase", "mode", "scale", "lr", "seed"))
    while True:
        done = {key(r) for r in table["runs"]}
        left = [j for j in jobs(table["runs"], settings)[: a.first] if key(j) not in done]
        if not left:
            break
        run = one_run(left[0], settings)
        table["runs"].append(run)
        write(a.out, table)
        shown = {k: v for k, v in run.items() if k != "curve"}
        print(len(table["runs"]), json.dumps(shown), flush=True)


if __name__ == "__main__":
    main()
