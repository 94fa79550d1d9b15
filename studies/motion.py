"""Paths that should bend left: the studies that motion_diffusion.ipynb and the tables of second tasks read.

    OMP_NUM_THREADS=1 python studies/motion.py            trains what is missing of all five (about half an hour)
    OMP_NUM_THREADS=1 python studies/motion.py epochs     one of them: epochs, longer, drift, scales, filter

Every arm chooses its learning rate, and with a KL term its weight too, on two tuning seeds and on goals of their own; the winner
runs on five other seeds, judged on 256 held-out goals. Finished runs are kept in runs/, and the same command goes on where it stopped.
What this leaves out: other networks, tuning of anything else, longer training of any arm but one epoch.
"""

import copy
import sys
from functools import lru_cache
from pathlib import Path

import torch

from grpo_nb.applications.motion import motion_config, reach, reach_parts, reach_policy, reach_tasks
from grpo_nb.core import seeded
from grpo_nb.lab.budgets import Samples
from grpo_nb.lab.compare import compare
from grpo_nb.trainer import GRPO

HERE = Path(__file__).parent
GOALS = "tuning goals"  # the name of those that tuning is judged on
KEEP = ["reward", "kl_old/exact", "clip_ratio/region_mean", "updates_per_rollout"]
TWO_PATHS = {"eval": {"samples": 2, "greedy": False}}
RATES = {"optimizer.lr": [3e-5, 1e-4, 3e-4, 1e-3]}
WEIGHTS = {"update.loss.kl_coef": [0.03, 0.1, 0.3]}
ALIKE = {"seeds": range(5), "budget": Samples(10_240), "eval_every": Samples(1_280)}
TUNED = {"tune": RATES, "tune_seeds": (100, 101), "tune_tasks": GOALS}


_imitation = lru_cache(64)(reach_policy)  # a process that runs many studies learns each once


def _parts(config, **options):
    "Each seed has an imitation and goals of its own; the held-out goals are the same for all."
    tasks = reach_tasks(4096, seeded(config.seed, "train"))
    name = GOALS if config.tasks.eval == GOALS else "held out"
    policy = copy.deepcopy(_imitation(config.seed, **options))
    return policy, tasks, reach_tasks(256, seeded(0, name))


def reach_trainer(config, reduce="sum"):
    "The distance to a path that bends left, as one graded reward."
    policy, tasks, held_out = _parts(config, reduce=reduce)
    return GRPO(policy, tasks, {"reach": reach}, config, held_out)


def _hits(test):
    "A reward function: 1 for paths that pass the test, else 0."
    parts = lambda paths, goal: reach_parts(torch.stack(list(paths)), torch.tensor(goal))
    return lambda completions, goal, **columns: test(parts(completions, goal)).float().tolist()


def hit_trainer(config):
    "Two rewards of 0 or 1 that exclude each other: bends left and arrives, and runs straight."
    policy, tasks, held_out = _parts(config)
    left = _hits(lambda p: ((p["bend"] - 0.4).abs() < 0.1) & (p["miss"] < 0.2))
    functions = {"left": left, "straight": _hits(lambda p: p["bend"].abs() < 0.15)}
    functions = {k: functions[k] for k in config.advantage.weights}
    return GRPO(policy, tasks, functions, config, held_out)


def hit_scores(trainer):
    "Shares of the held-out paths, two of each goal, that earn either reward at its own scale."
    found = trainer.evaluate().metrics()
    names = trainer.config.advantage.weights
    return {k: found.get(f"eval_sampled/{k}", found["eval_sampled"]) for k in names}


SHORT = {"tune_budget": Samples(5_120)}
HITS = {"make": hit_trainer, "evaluate": hit_scores}


def epochs(**how):
    "One epoch or many, and the ratio to the reference, each with its own learning rate."
    no_kl = {"update.loss.kl_coef": 0.0}
    arms = {f"K={k}": no_kl | {"update.num_epochs": k} for k in (1, 4, 8)}
    arms |= {f"K={k}, KL": {"update.num_epochs": k} for k in (1, 4)}
    arms["reference"] = no_kl | {"update.scheme": "reference"}
    arms["reference, trajectory"] = arms["reference"] | {"make.reduce": "trajectory"}
    fixed = ALIKE | TUNED | {"tune": RATES | WEIGHTS, "metric": "mean_eval_sampled"}
    fixed |= {"make": reach_trainer, "keep": KEEP, "store": HERE / "motion_epochs.json"}
    return compare(
        arms, motion_config() | TWO_PATHS, **fixed, **{"dir": "runs/motion_epochs"} | how
    )


def longer(**how):
    "One epoch for more than the processor seconds of four: three times the paths, tuned for these."
    arms = {"K=1, longer": {"update.loss.kl_coef": 0.0}, "K=1, KL, longer": {}}
    tune = {"optimizer.lr": [1e-4, 3e-4, 1e-3]} | WEIGHTS
    fixed = ALIKE | TUNED | {"tune": tune, "budget": Samples(30_720), "metric": "mean_eval_sampled"}
    fixed |= {"make": reach_trainer, "keep": KEEP, "store": HERE / "motion_longer.json"}
    return compare(
        arms, motion_config() | TWO_PATHS, **fixed, **{"dir": "runs/motion_longer"} | how
    )


def drift(**how):
    "Eight epochs at a rate that is too large, the same for all."
    stop = {"target": 0.003, "factor": 1.5, "stat": "exact"}
    arms = {
        "K=8, fixed": {},
        "K=8, previous epoch": {"update.scheme": "previous_epoch"},
        "K=8, progressive": {"update.scheme": "progressive"},
        "K=8, early stop": {"update.kl_stop": stop},
    }
    base = motion_config(lr=3e-4, num_epochs=8) | TWO_PATHS
    fixed = ALIKE | {"metric": "mean_eval_sampled", "make": reach_trainer, "keep": KEEP}
    fixed |= {"store": HERE / "motion_drift.json"}
    return compare(arms, base, **fixed, **{"dir": "runs/motion_drift"} | how)


def scales(**how):
    "GRPO and GDPO with a side reward that contradicts, on equal scale and 30 times too large."
    arms = {m.upper(): {"advantage.mode": m} for m in ("gdpo", "grpo")}
    arms |= {f"{k}, 30x": v | {"advantage.scales.straight": 30} for k, v in arms.items()}
    base = motion_config() | TWO_PATHS
    base["advantage"] = {"weights": {"left": 1, "straight": 0.1}}
    fixed = ALIKE | TUNED | SHORT | {"metric": "left", **HITS, "keep": KEEP[:1]}
    fixed |= {"store": HERE / "motion_scales.json"}
    return compare(arms, base, **fixed, **{"dir": "runs/motion_scales"} | how)


def filter(**how):
    "Groups that agree dropped and sampled again, or not."
    on = {"enable": True, "sizing": "adaptive", "log_format": None}
    arms = {"off": {}, "on": {f"filter_groups.{k}": v for k, v in on.items()}}
    base = motion_config(tasks=32, samples=8) | TWO_PATHS  # small groups often agree
    base["advantage"] = {"weights": {"left": 1}}
    keep = ["reward", "frac_reward_zero_std"]
    fixed = ALIKE | TUNED | SHORT | {"metric": "left", **HITS, "keep": keep}
    fixed |= {"store": HERE / "motion_filter.json"}
    return compare(arms, base, **fixed, **{"dir": "runs/motion_filter"} | how)


STUDIES = {f.__name__: f for f in (epochs, longer, drift, scales, filter)}

if __name__ == "__main__":
    for name in sys.argv[1:] or STUDIES:
        print(STUDIES[name](workers=2).table())
