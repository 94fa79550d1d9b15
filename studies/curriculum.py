"""Which tasks come next, on sums: the two studies that curriculum.ipynb reads.

    OMP_NUM_THREADS=1 python studies/curriculum.py     trains what is missing of both (training of `dead`: 603 processor seconds)

`levels`: a third of the pool is easy, a third middle, a third hard. One learning rate for all: of 2.5e-5 and 5e-5 the one with the
better held-out score for the blind draw on another seed. `dead`: nine tasks in ten are hard sums that are practically never solved,
and a task comes back four times; every arm chooses among the same learning rates on two tuning seeds and another pool of the kind,
and is judged on the live tasks of its pool, where something can be learned, and beside that on held-out sums of their level. Finished
runs are kept in runs/, and the same command goes on where it stopped. What this leaves out: tuning of the selectors themselves, other models, longer training.
"""

from pathlib import Path

import numpy as np
import torch

from grpo_nb.core import Groups, group_stats
from grpo_nb.files import read_jsonl
from grpo_nb.lab.compare import compare
from grpo_nb.lab.study import Samples
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.scheduler import EXPERIENCE_OPERATORS, reward_per_sample
from grpo_nb.selectors import easy_to_hard
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO
from grpo_nb.verifiers import exact_answer

HERE = Path(__file__).parent
POOL = "pass_rates/mixed_train.jsonl"


@EXPERIENCE_OPERATORS.register("task_profile", force=True)
class TaskProfile:
    "Share of the groups drawn from each bin of the pool, and the same times their pass rate."

    def __init__(self, pool=POOL, bins=12):
        tasks = Taskset.load(data_path(pool))
        level = {"hard": 0.0, "middle": 1.0, "easy": 2.0}
        level = np.array([level[x] for x in tasks.column("level")])
        ease = tasks.column("weak") + tasks.column("strong")
        order = easy_to_hard([level, ease])[::-1]  # the hardest first
        self.bins, self.bin = bins, np.empty(len(order), int)
        self.bin[order] = np.arange(len(order)) * bins // len(order)

    def process(self, rollout):
        groups = Groups.of(rollout.group_N.cpu())
        first = torch.empty(groups.num_groups, dtype=torch.long)
        first[groups.index_N.flip(0)] = torch.arange(len(rollout)).flip(0)
        at = self.bin[[rollout.tasks[i].index for i in first.tolist()]]
        rate = group_stats(reward_per_sample(rollout), groups).mean.numpy()
        share = np.bincount(at, minlength=self.bins) / len(at)
        solved = np.bincount(at, rate, self.bins) / len(at)
        named = {"share": share, "solved": solved}
        return rollout, {
            f"selection/{name}/{b:02d}": x
            for name, v in named.items()
            for b, x in enumerate(v.tolist())
        }


BELIEFS = {"m": 8, "lamb": 0.1, "rho": 0.1, "target_reward": 0.5, "tau": 0, "do_sample": True}
ANCHORS = {"selector_type": "difficulty_based", "feature_keys": ["weak", "strong"]}
SELECTORS = {
    "shuffle": "shuffle",
    "easy to hard": {"selector_type": "offline_easy2hard", "feature_keys": ["strong", "weak"]},
    "difficulty_based": ANCHORS | {"kwargs": BELIEFS},
    "thompson": {"selector_type": "thompson", "kwargs": {"m": 8, "lamb": 0}},
    "greso": {"selector_type": "greso"},
    "learnability": {"selector_type": "learnability", "kwargs": {"m": 8, "lamb": 0, "tau": 0.3}},
}
ON = {"enable": True, "metric": "exact_answer", "sizing": "adaptive", "log_format": None}
FILTER = {f"filter_groups.{k}": v for k, v in ON.items()}
ARMS = {name: {"tasks.selector": s} for name, s in SELECTORS.items()}
ARMS |= {f"{k} + filter": ARMS[k] | FILTER for k in ("shuffle", "difficulty_based")}
BASE = {
    "train_batch_size": 16,
    "num_generations": 8,
    "policy": {"max_new_tokens": 12},
    "tasks": {
        "train": f"data:{POOL}",
        "eval": {k: f"data:tasks/{k}_eval.jsonl" for k in ("easy", "middle", "hard")},
        "operators": ["pass_rate_calculator", "task_profile"],
    },
    "optimizer": {"lr": 2.5e-5, "warmup": 5},
    "eval": {"samples": 4, "limit": 100},
}
TEACHING = ["selection/valid_ratio", "frac_reward_zero_std"]
BINS = [f"selection/{k}/{b:02d}" for k in ("share", "solved") for b in range(12)]


def levels(**how):
    "Six selectors, and the filter with two of them, on a pool of three even levels."
    fixed = {"seeds": range(5), "budget": Samples(5_120), "keep": [*TEACHING, *BINS]}
    fixed |= {"store": HERE / "curriculum.json", "dir": "runs/curriculum"}
    return compare(ARMS, BASE, **fixed | how)


def dead_pool(place: int = 0) -> list[dict]:
    "Of 20 middle and 180 hard sums each, those at a place; each with the pass rates of the two anchors."
    rows = []
    for level, n in (("middle", 20), ("hard", 180)):
        files = [data_path(f"{kind}/{level}_train.jsonl") for kind in ("tasks", "pass_rates")]
        both = [read_jsonl(f)[0][n * place : n * (place + 1)] for f in files]
        rows += [task | rates for task, rates in zip(*both)]
    return rows


def dead_trainer(config):
    "Judged on the live tasks of the pool and on held-out middle sums; tuning has a pool of its own."
    pool = dead_pool(int(config.tasks.eval == "tuning pool"))
    live = [row for row in pool if row["terms"] == 2]
    held_out = {"live": live, "middle": data_path("tasks/middle_eval.jsonl")}
    rewards = {"exact_answer": exact_answer(extract="marker", marker="</think>")}
    policy = TokenPolicy.from_pretrained("data:tiny-llama", max_new_tokens=10)
    return GRPO(policy, pool, rewards, config, held_out, opened=["tasks", "eval_tasks"])


def dead(**how):
    "Three ways to choose, and the filter, on a pool of which nine tasks in ten are dead."
    arms = {k: ARMS[k] for k in ("shuffle", "difficulty_based", "thompson", "shuffle + filter")}
    base = {k: BASE[k] for k in ("train_batch_size", "num_generations")}
    base |= {"tasks": {"eval": "reported pool"}, "optimizer": {"warmup": 5}}
    base |= {"eval": {"samples": 8, "limit": 100, "greedy": False}}
    fixed = {"seeds": range(5), "budget": Samples(6_400), "metric": "eval_live/sampled"}
    fixed |= {
        "tune": {"optimizer.lr": [1.25e-5, 2.5e-5, 5e-5, 1e-4, 2e-4]},
        "tune_seeds": (100, 101),
    }
    fixed |= {"tune_tasks": "tuning pool", "tune_budget": Samples(3_200), "keep": TEACHING}
    fixed |= {"make": dead_trainer, "store": HERE / "curriculum_dead.json"}
    return compare(arms, base, **fixed, **{"dir": "runs/curriculum_dead"} | how)


if __name__ == "__main__":
    for study in (levels, dead):
        print(study().table())
