"""One epoch or many on diffusion trajectories, three ratio schemes, early stop and KL: the study that motion_diffusion.ipynb reads.

    OMP_NUM_THREADS=1 python nbs/tutorials/studies/motion_diffusion.py                all runs, one after the other
    python nbs/tutorials/studies/motion_diffusion.py --out trial.json --first 4       the first four runs

Every finished run is written at once; the same command again does what is missing. Each seed pretrains its own imitation.
First the arms without a learning rate try the same ones on two tuning seeds, scored by the mean of the held-out curve. Then
each runs with its winner, and the schemes with one learning rate on which long reuse is unstable, on five other seeds. All runs see the same number of rollouts: 40 steps of 16 goals with 16 paths. The runs on real
recordings (40 steps of 8 tasks with 8 clips) are made where the `aeon` wheel is installed: pip install --no-deps aeon==1.6.0.
What this leaves out: tuning of anything but the learning rate, larger networks, guidance.
"""

import argparse
import json
import platform
import time
import warnings
from functools import cache
from importlib import metadata
from pathlib import Path

import torch

from grpo_nb.core import seeded
from grpo_nb.motion import (
    beat,
    beat_policy,
    beat_tasks,
    load_basic_motions,
    motion_config,
    reach,
    reach_policy,
    reach_tasks,
)
from grpo_nb.trainer import GRPO, GRPOConfig, build_config

OUT = Path(__file__).with_suffix(".json")
STOP = {"target": 0.003, "factor": 1.5, "stat": "exact"}
ARMS = {  # name: (settings of the update, how log-probs are reduced, learning rate or None = tuned)
    "K=1": ({"num_epochs": 1}, "sum", None),
    "K=4": ({"num_epochs": 4}, "sum", None),
    "K=8": ({"num_epochs": 8}, "sum", None),
    "K=8 fixed": ({"num_epochs": 8}, "sum", 3e-4),
    "K=8 progressive": ({"num_epochs": 8, "scheme": "progressive"}, "sum", 3e-4),
    "K=8 early stop": ({"num_epochs": 8, "kl_stop": STOP}, "sum", 3e-4),
    "K=1 KL": ({"num_epochs": 1, "loss": {"kl_coef": 0.1}}, "sum", None),
    "K=4 KL": ({"num_epochs": 4, "loss": {"kl_coef": 0.1}}, "sum", None),
    "reference, per step": ({"scheme": "reference"}, "sum", 3e-4),
    "reference, trajectory": ({"scheme": "reference"}, "trajectory", 3e-4),
}
BEATS = {
    "beat K=1": ({"num_epochs": 1, "loss": {"clip": {"low": 2e-3}}}, "mean", None),
    "beat K=4": ({"num_epochs": 4, "loss": {"clip": {"low": 2e-3}}}, "mean", None),
}
SETTINGS = {
    "arms": ARMS | BEATS,
    "lrs": [3e-5, 1e-4, 3e-4, 1e-3, 3e-3],
    "tuning_seeds": [100, 101],
    "seeds": [0, 1, 2, 3, 4],
    "steps": 40,
    "evaluate_every": 5,
    "tasks": 256,  # held out, two paths each
    "score": "mean of the held-out curve",
}


@cache
def start(kind, seed):
    "The imitation of a seed, with held-out and training tasks."
    if kind == "beat":
        parts = load_basic_motions()
        base = beat_policy(parts["train"], seed, reduce="mean")
        tasks = lambda n, name, s: beat_tasks(n, parts["train"], seeded(s, name))
    else:
        base, tasks = reach_policy(seed), lambda n, name, s: reach_tasks(n, seeded(s, name))
    return base, tasks(4096, "train", seed), tasks(SETTINGS["tasks"], "held out", 0)


def make_trainer(arm, seed, lr, settings=SETTINGS):
    "The trainer of one run."
    update, reduce, _ = settings["arms"][arm]
    kind = "beat" if arm.startswith("beat") else "reach"
    base, train, held_out = start(kind, seed)
    policy = base.copy()
    policy.model.requires_grad_(True)
    policy.reduce = reduce
    size = 8 if kind == "beat" else 16
    tree = motion_config(seed, settings["steps"], lr, size, size, **update)
    reward = {"beat": beat} if kind == "beat" else {"reach": reach}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scheme "reference" warns, and is here on purpose
        return GRPO(policy, train, reward, build_config(GRPOConfig, tree), held_out)


def held_out(trainer):
    "Mean reward on the held-out tasks; the same noise every time."
    generator = seeded(0, "evaluation")
    r = trainer.rewards(trainer.policy.sample(trainer.eval_tasks, 2, generator))
    return round(r.rewards_NR.double().mean().item(), 4)


def one_run(job, settings=SETTINGS):
    "Train and evaluate: what the table stores of one run."
    trainer, curve, seconds = make_trainer(job["arm"], job["seed"], job["lr"], settings), [], 0.0
    curve.append(held_out(trainer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(settings["steps"] // settings["evaluate_every"]):
            begin = time.process_time()
            trainer.fit(settings["evaluate_every"])
            seconds += time.process_time() - begin
            curve.append(held_out(trainer))
    mean = lambda k: sum(r.get(k, 0.0) for r in trainer.history) / len(trainer.history)
    return job | {
        "curve": curve,
        "kl_old": round(mean("kl_old/exact"), 6),
        "kl_old_max": round(max(r["kl_old/exact"] for r in trainer.history), 6),
        "clipped": round(mean("clip_ratio/region_mean"), 4),
        "updates": mean("upd/n_done"),
        "cpu_seconds": round(seconds, 1),
    }


def tuned(runs, arm, settings=SETTINGS):
    "The learning rate with the best mean score on the tuning seeds; None if runs are missing."
    score = {
        (r["lr"], r["seed"]): sum(r["curve"]) / len(r["curve"])
        for r in runs
        if r["phase"] == "tune" and r["arm"] == arm
    }
    if len(score) < len(settings["lrs"]) * len(settings["tuning_seeds"]):
        return None
    return max(settings["lrs"], key=lambda lr: sum(v for k, v in score.items() if k[0] == lr))


def jobs(runs, settings=SETTINGS):
    "All runs in order, as far as they are known; reported ones seed by seed."
    s, out = settings, []
    searched = [a for a, (_, _, lr) in s["arms"].items() if lr is None]
    for seed in s["tuning_seeds"]:
        out += [("tune", arm, lr, seed) for arm in searched for lr in s["lrs"]]
    rates = {a: lr or tuned(runs, a, s) for a, (_, _, lr) in s["arms"].items()}
    if all(rates.values()):
        out += [("report", a, rates[a], seed) for seed in s["seeds"] for a in s["arms"]]
    return [dict(zip(("phase", "arm", "lr", "seed"), job)) for job in out]


def environment():
    "Versions and machine."
    versions = {k: metadata.version(k) for k in ("torch", "numpy", "grpo_nb")}
    return {"python": platform.python_version(), "machine": platform.machine()} | versions


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
    ap.add_argument("--first", type=int, help="stop after so many runs of the plan")
    ap.add_argument("--minutes", type=float, default=1e9, help="start no run after so many minutes")
    a = ap.parse_args()
    torch.set_num_threads(1)
    settings = json.loads(json.dumps(SETTINGS))
    command = "OMP_NUM_THREADS=1 python nbs/tutorials/studies/motion_diffusion.py"
    table = {"command": command, "settings": settings, "environment": environment(), "runs": []}
    if a.out.exists():
        old = json.loads(a.out.read_text(encoding="utf-8"))
        if old["settings"] != settings or old["environment"] != table["environment"]:
            raise SystemExit(
                f"{a.out} was made with other settings or versions: move it away first."
            )
        table = old
    key = lambda r: tuple(r[k] for k in ("phase", "arm", "lr", "seed"))
    begin = time.monotonic()
    while time.monotonic() - begin < 60 * a.minutes:
        done = {key(r) for r in table["runs"]}
        left = [j for j in jobs(table["runs"], settings)[: a.first] if key(j) not in done]
        if not left:
            break
        table["runs"].append(one_run(left[0], settings))
        write(a.out, table)
        print(len(table["runs"]), json.dumps(table["runs"][-1]), flush=True)


if __name__ == "__main__":
    main()
