"""Paths that should bend left: the studies that motion_diffusion.ipynb reads.

    OMP_NUM_THREADS=1 python studies/motion.py            trains what is missing of all
    OMP_NUM_THREADS=1 python studies/motion.py epochs     one of them: epochs, drift, apart, longer (the last two: 402 processor seconds of training)

The arms of `epochs` choose their learning rates on two tuning seeds and the goals that are reported; all run on five other seeds,
judged on 256 held-out goals. `apart` and `longer` choose rate and KL coefficient on goals apart from those reported, and report
seeds on which nothing was chosen before. Finished runs are kept in runs/, and the same command goes on where it stopped.
What this leaves out: other networks, tuning of anything but the learning rate, longer training.
"""

import sys
from pathlib import Path

from grpo_nb.applications.motion import motion_config, reach, reach_policy, reach_tasks
from grpo_nb.config import build_config, override
from grpo_nb.core import seeded
from grpo_nb.lab.compare import compare
from grpo_nb.lab.recipe import GRPOConfig
from grpo_nb.lab.study import Samples
from grpo_nb.trainer import GRPO

HERE = Path(__file__).parent
KEEP = ["reward", "kl_old/exact", "clip_ratio/region_mean", "updates_per_rollout"]
TWO_PATHS = {"eval": {"samples": 2, "greedy": False}}
ALIKE = {"seeds": range(5), "budget": Samples(10_240), "eval_every": Samples(1_280)}


def base(**settings):
    "What all arms share."
    return build_config(GRPOConfig, motion_config(**settings) | TWO_PATHS)


def reach_trainer(config, reduce="sum"):
    "Each seed has an imitation and goals of its own; the held-out goals are the same for all."
    policy = reach_policy(config.seed, reduce=reduce)
    tasks = reach_tasks(4096, seeded(config.seed, "train"))
    held_out = reach_tasks(256, seeded(0, "held out"))
    return GRPO(policy, tasks, {"reach": reach}, config, held_out)


REACH = ALIKE | {"metric": "mean_eval_sampled", "make": reach_trainer, "keep": KEEP}


def epochs(**how):
    "One epoch or many, and the ratio to the reference, each with its own learning rate; tuned on the reported goals."
    kl, reference = {"update.loss.kl_coef": 0.1}, {"update.scheme": "reference"}
    arms = {
        "K=1": {},
        "K=4": {"update.num_epochs": 4},
        "K=8": {"update.num_epochs": 8},
        "K=1, KL": kl,
        "K=4, KL": kl | {"update.num_epochs": 4},
        "reference": reference,
        "reference, trajectory": reference | {"make.reduce": "trajectory"},
    }
    rates = {"optimizer.lr": [3e-5, 1e-4, 3e-4, 1e-3, 3e-3]}
    fixed = REACH | {"tune": rates, "tune_seeds": (100, 101), "store": HERE / "motion_epochs.json"}
    return compare(arms, base(), **fixed, **{"dir": "runs/motion_epochs"} | how)


def drift(**how):
    "Eight epochs at a rate that is too large, the same for all."
    stop = {"target": 0.003, "factor": 1.5, "stat": "exact"}
    arms = {
        "K=8, fixed": {},
        "K=8, progressive": {"update.scheme": "progressive"},
        "K=8, early stop": {"update.kl_stop": stop},
    }
    eight = base(lr=3e-4, num_epochs=8)
    fixed = REACH | {"store": HERE / "motion_drift.json"}
    found = compare(arms, eight, **fixed, **{"dir": "runs/motion_drift"} | how)
    arms = {
        "K=8, previous epoch": {"update.scheme": "previous_epoch"}
    }  # ran later, stored by itself
    fixed = REACH | {"store": HERE / "motion_previous.json", "make": None}
    eight = override(eight, {"application": "motion"})
    previous = compare(arms, eight, **fixed, **{"dir": "runs/motion_drift"} | how)
    found.spec["variants"] |= previous.spec["variants"]
    found.runs += previous.runs
    return found


def apart_trainer(config):
    "As `reach_trainer`, but the seeds from 100 on, which tune, have held-out goals of their own."
    tasks = reach_tasks(4096, seeded(config.seed, "train"))
    goals = reach_tasks(256, seeded(config.seed // 100, "goals apart"))
    return GRPO(reach_policy(config.seed), tasks, {"reach": reach}, config, goals)


CHOSEN_APART = {
    "base": base(),
    "make": apart_trainer,
    "keep": KEEP,
    "seeds": range(10, 15),
    "tune": {
        "optimizer.lr": [1e-4, 3e-4, 1e-3, 3e-3],
        "update.loss.kl_coef": [0.03, 0.1, 0.3, 1.0],
    },
    "tune_seeds": (100, 101),
    "eval_every": Samples(1_280),
}


def apart(**how):
    "One epoch or four with a KL term, for 40 rollouts: rate and coefficient chosen on other seeds and goals."
    arms, store = {"K=1, KL": {}, "K=4, KL": {"update.num_epochs": 4}}, HERE / "motion_apart.json"
    fixed = CHOSEN_APART | {"budget": Samples(10_240), "store": store}
    return compare(arms, **fixed, **{"dir": "runs/motion_apart"} | how)


def longer(**how):
    "One epoch for 100 rollouts, chosen for that length."
    fixed = CHOSEN_APART | {"budget": Samples(25_600), "store": HERE / "motion_longer.json"}
    arms = {"K=1, KL, 100 rollouts": {}}
    return compare(arms, **fixed, **{"dir": "runs/motion_longer"} | how)


STUDIES = {f.__name__: f for f in (epochs, drift, apart, longer)}

if __name__ == "__main__":
    for name in sys.argv[1:] or STUDIES:
        print(STUDIES[name](workers=2).table())
