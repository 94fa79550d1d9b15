"""The claims of two tutorials on another task, paths of the reach task with rewards of 0 or 1: what their tables of a second task read.

    OMP_NUM_THREADS=1 python studies/second_tasks.py     trains what is missing of both (298 processor seconds of training)

`scales`: one reward is for paths that bend left and arrive, the other, which contradicts it, for straight ones, on equal scale and
30 times too large. `filter`: the first reward alone, with groups that agree dropped and sampled again, or not. Every arm of a study
chooses among the same learning rates on two tuning seeds, half of the paths and goals of their own, and runs on five other seeds,
judged on 256 held-out goals, two paths each. Finished runs are kept in runs/, and the same command goes on where it stopped.
What this leaves out: other networks, tuning of anything but the learning rate, longer training.
"""

import copy
from functools import lru_cache
from pathlib import Path

import torch

from grpo_nb.applications.motion import motion_config, reach_parts, reach_policy, reach_tasks
from grpo_nb.core import seeded
from grpo_nb.lab.compare import compare
from grpo_nb.lab.study import Samples
from grpo_nb.trainer import GRPO

HERE = Path(__file__).parent
GOALS = "tuning goals"  # the name of those that tuning is judged on
_imitation = lru_cache(16)(reach_policy)  # a process that carries out many runs learns each once


def _hits(test):
    "A reward function: 1 for paths that pass the test, else 0."
    parts = lambda paths, goal: reach_parts(torch.stack(list(paths)), torch.tensor(goal))
    return lambda completions, goal, **columns: test(parts(completions, goal)).float().tolist()


def hit_trainer(config):
    "Each seed has an imitation and goals of its own; the held-out goals are the same for all."
    tests = {
        "left": lambda p: ((p["bend"] - 0.4).abs() < 0.1) & (p["miss"] < 0.2),
        "straight": lambda p: p["bend"].abs() < 0.15,
    }
    rewards = {k: _hits(tests[k]) for k in config.advantage.weights}
    tasks = reach_tasks(4096, seeded(config.seed, "train"))
    held_out = reach_tasks(256, seeded(0, GOALS if config.tasks.eval == GOALS else "held out"))
    return GRPO(copy.deepcopy(_imitation(config.seed)), tasks, rewards, config, held_out)


def hit_scores(trainer):
    "Shares of the held-out paths that earn each reward."
    found = trainer.evaluate().metrics()
    names = trainer.config.advantage.weights
    return {k: found.get(f"eval_sampled/{k}", found["eval_sampled"]) for k in names}


ALIKE = {"seeds": range(5), "budget": Samples(10_240), "eval_every": Samples(2_560)}
RATES = [3e-5, 1e-4, 3e-4, 1e-3, 3e-3]
ALIKE |= {"tune": {"optimizer.lr": RATES}, "tune_seeds": (100, 101), "tune_tasks": GOALS}
ALIKE |= {"tune_budget": Samples(5_120), "metric": "left"}
ALIKE |= {"make": hit_trainer, "evaluate": hit_scores}


def _base(weights, **groups):
    return motion_config(**groups) | {
        "eval": {"samples": 2, "greedy": False},
        "advantage": {"weights": weights},
    }


def scales(**how):
    "GRPO and GDPO with a side reward that contradicts, on equal scale and 30 times too large."
    arms = {m.upper(): {"advantage.mode": m} for m in ("gdpo", "grpo")}
    arms |= {f"{k}, 30x": v | {"advantage.scales.straight": 30} for k, v in arms.items()}
    fixed = ALIKE | {"keep": ["reward"], "store": HERE / "second_scales.json"}
    fixed |= {"tune": {"optimizer.lr": [1e-5, *RATES, 1e-2]}}
    return compare(arms, _base({"left": 1, "straight": 0.1}), **fixed, **{"dir": "runs/second_scales"} | how)  # fmt: skip


def filter(**how):
    "Groups of eight that agree dropped and sampled again, or not."
    on = {"enable": True, "sizing": "adaptive", "log_format": None}
    arms = {"off": {}, "on": {f"filter_groups.{k}": v for k, v in on.items()}}
    keep = ["reward", "frac_reward_zero_std"]
    fixed = ALIKE | {"keep": keep, "store": HERE / "second_filter.json"}
    base = _base({"left": 1}, tasks=32, samples=8)
    return compare(arms, base, **fixed, **{"dir": "runs/second_filter"} | how)


if __name__ == "__main__":
    for study in (scales, filter):
        print(study(workers=2).table())
