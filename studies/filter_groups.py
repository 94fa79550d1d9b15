"""Filtering on and off on easy and middle sums: the studies that filter_groups.ipynb reads.

    OMP_NUM_THREADS=1 python studies/filter_groups.py             what is missing of both, and the pools
    OMP_NUM_THREADS=1 python studies/filter_groups.py middle      one of them

A study is one call of `compare`: both arms get the same samples, and the same learning rates to choose from, tried on two
other seeds and judged on problems that are neither trained on nor reported: the last of each training set are kept back. Start, order
of tasks and held-out problems are shared by seed. A run that is finished is not run again (both: 738 processor seconds of training).
What this leaves out: tuning of anything but the learning rate, other models, longer training.
"""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np

from grpo_nb.core import seeded
from grpo_nb.files import read_jsonl
from grpo_nb.filter_groups import keep_groups
from grpo_nb.lab.compare import compare
from grpo_nb.lab.recipe import load_config, open_policy
from grpo_nb.lab.study import Samples
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO
from grpo_nb.verifiers import exact_answer

HERE = Path(__file__).parent
ON = {"enable": True, "sizing": "adaptive", "log_format": None}
ARMS = {"off": {}, "on": {f"filter_groups.{k}": v for k, v in ON.items()}}
LRS = [6.25e-6, 1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4]
BUDGET = {"easy": 4800, "middle": 6400}  # samples generated per run
KEPT_BACK = {"easy": 30, "middle": 200}  # problems that only choose the rate
G = 8  # samples per task
KEEP = ("reward", "frac_reward_zero_std", "filter/filter_rate", "filter/kept")
KEEP += ("filter/frac_all_high", "filter/frac_all_low", "train/num_gen_batches")


def base(level: str) -> dict:
    "What both arms share."
    return {
        "train_batch_size": 16,
        "num_generations": G,
        "policy": {"model": "data:tiny-llama", "max_new_tokens": 10},
        "tasks": {"train": level, "eval": "reported"},
        "optimizer": {"warmup": 5},
        "eval": {"samples": 8 if level == "easy" else 4, "greedy": False},
    }


def sums_trainer(config) -> GRPO:
    "Trained on a level without what is kept back; judged on that, or on the held-out problems that are reported."
    level, judged = config.tasks.train, config.tasks.eval
    rows = list(read_jsonl(data_path(f"tasks/{level}_train.jsonl"))[0])
    cut = len(rows) - KEPT_BACK[level]
    held_out = data_path(f"tasks/{level}_eval.jsonl") if judged == "reported" else rows[cut:]
    rewards = {"exact_answer": exact_answer(extract="marker", marker="</think>")}
    parts = open_policy(config.policy), rows[:cut], rewards, config, held_out
    return GRPO(*parts, opened=["policy", "tasks", "eval_tasks"])


def study(level: str, dir: str | Path = "runs"):
    "On and off at equal samples; trained only where the store has no answer."
    return compare(
        ARMS,
        base=base(level),
        seeds=range(5),
        budget=Samples(BUDGET[level]),
        eval_every=Samples(BUDGET[level] / 4),
        tune={"optimizer.lr": LRS},
        tune_seeds=[100, 101],
        tune_tasks="kept back",
        tune_budget=Samples(BUDGET[level] / 2),
        make=sums_trainer,
        dir=Path(dir) / f"filter_groups_{level}",
        store=HERE / f"filter_groups_{level}.json",
        keep=KEEP,
        if_changed="raise",
    )


def pool(level: str, tasks: int = 120, samples: int = 32) -> dict:
    "Right answers of the starting policy out of `samples`, for the first tasks of a training set; and its groups of G."
    config = load_config(None, ["num_generations=8", "policy.max_new_tokens=10", "threads=1"])
    trainer = GRPO.from_config(config)
    some = Taskset.load(data_path(f"tasks/{level}_train.jsonl"))[:tasks]
    draw = lambda n, name: trainer.rewards(trainer.policy.sample(some, n, seeded(0, name)))
    right = draw(samples, "pool").rewards_NR.view(len(some), samples).sum(1).int()
    fresh = draw(G, "groups")
    found = Counter(keep_groups(fresh.rewards_NR, fresh.group_N).reasons)
    return {"samples": samples, "right": right.tolist(), "groups": found}


def pools(file: Path = HERE / "filter_groups_pools.json") -> dict:
    "The three pools, sampled once."
    if not file.exists():
        found = {level: pool(level) for level in (*BUDGET, "hard")}
        rows = [f' "{k}": {json.dumps(v)}' for k, v in found.items()]
        file.write_text("{\n" + ",\n".join(rows) + "\n}\n")
    return json.loads(file.read_text())


def p_dead_of(right: np.ndarray, n: int, size: int = G) -> np.ndarray:
    "Unbiased p^G + (1-p)^G of each task from its right answers out of n: both terms as pass@k estimates its own."
    c, i = np.asarray(right)[:, None], np.arange(size)
    both = [np.clip(k - i, 0, None) / (n - i) for k in (c, n - c)]
    return sum(x.prod(1) for x in both)


if __name__ == "__main__":
    for level in sys.argv[1:] or BUDGET:
        print(study(level).table())
    pools()
