"""Film lists, relevance against safety: the studies that safe_ranking.ipynb reads, and lists that need no training.

    pip install --no-deps recbole==1.2.1
    OMP_NUM_THREADS=1 python data/build/movielens_task.py --out .cache/movielens
    OMP_NUM_THREADS=1 python studies/safe_ranking.py        trains what is missing of both (957 processor seconds of training)

`safety`: one sum, two normalised rewards, and controls. `credit`: what a rank is paid for, itself, itself and later hits, or the
whole list. Every arm of a study chooses among the same learning rates on two tuning seeds and users of their own, and runs on five
other seeds. Finished runs are kept in runs/, and the same command goes on where it stopped. It also writes the data's checksums and
the scores of lists of popular films. What is stored are numbers: no titles, no ratings, no weights.
"""

import functools
import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from grpo_nb.applications.movielens import MovieTask, RankingPolicy, load_task, rank_reward
from grpo_nb.core import seeded
from grpo_nb.lab.compare import compare
from grpo_nb.lab.recipe import GRPOConfig
from grpo_nb.lab.study import Samples
from grpo_nb.list_parsing import ParsedList, film_key, parse_rollout
from grpo_nb.ranking import (
    _hit_matrix,
    _violation_matrix,
    discounts,
    ranking_metrics,
)
from grpo_nb.trainer import GRPO

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data" / "build"))

from movielens_task import Movies, load_movies, split_users  # noqa: E402

LISTS = Path(__file__).with_name("safe_ranking_lists.json")
VALIDATION = 100  # last training rows, of users of their own: only for choosing learning rates
BASE = {
    "train_batch_size": 8,
    "num_generations": 8,
    "policy": {"max_new_tokens": 24},  # a film is three tokens: no list can be longer than eight
    "tasks": {"train": ".cache/movielens", "eval": "test users"},
    "update": {"loss": {"level": "item", "aggregation": "seq_mean_item_mean"}},
    "optimizer": {"warmup": 5},
    "eval": {"samples": 4},
}
# what is paid: repeated, malformed, seen and unknown films cost 0.5 at their rank, an unreadable list earns the worst at every rank
COST = dict.fromkeys(("malformed", "duplicate", "seen", "unknown"), 0.5)
RELEVANCE = {"variant": "exp_inf", "error": -0.5, "penalties": COST}
SAFE = RELEVANCE | {"lambda_safe": 1.0, "error": -1.5}  # relevance + safety
LOUD = RELEVANCE | {"lambda_safe": 3.0, "error": -3.5}  # relevance + 3 x safety
paid = lambda **rewards: {"rewards.functions": rewards}
ARMS = {
    "GRPO": paid(safe=SAFE),
    "GDPO": paid(relevance=RELEVANCE, safety={"variant": "exp_inf"}) | {"advantage.mode": "gdpo"},
    "no safety": paid(relevance=RELEVANCE),
    "GRPO, 3x penalty": paid(safe=LOUD),
}
WHOLE = "whole list"
CREDIT = {k: paid(safe=SAFE | {"variant": k}) for k in (WHOLE, "log_decay", "exp_inf")}
SCORES = "ndcg@8 recall@8 svr@8 duplicate malformed seen out_of_catalogue length".split()


def held_out(
    task: MovieTask,
    who: str,  # "test users" or "validation users"
) -> tuple[list, list]:  # rows to train on, rows to judge on: of other users
    "Rows of users that never meet."
    train, validation = task.train[:-VALIDATION], task.train[-VALIDATION:]
    if {t["user"] for t in train} & {t["user"] for t in validation}:
        raise ValueError(f"VALIDATION={VALIDATION} cuts a user in two: take another number.")
    return train, {"test users": task.eval, "validation users": validation}[who]


def whole_list(reward):
    "Every rank is paid what the ranks of the list earn together."

    @functools.wraps(reward)  # the columns that it asks for
    def paid(*args, **columns):
        x_NK = np.array(reward(*args, **columns), float)
        return np.where(np.isnan(x_NK), np.nan, np.nansum(x_NK, 1, keepdims=True)).tolist()

    return paid


def film_reward(task: MovieTask, name: str, options: Mapping):
    "A reward function of a configuration; the number of safety is the same for every variant of the relevance."
    if options.get("variant") == WHOLE:
        return whole_list(rank_reward(task, name, options | {"variant": "exp_inf"}))
    drop = ("variant",) if name == "safety" else ()
    return rank_reward(task, name, {k: v for k, v in options.items() if k not in drop})


def film_trainer(
    config: GRPOConfig,  # tasks.train is the folder of the task, rewards.functions what is paid
) -> GRPO:
    "The trainer of a configuration, from the warm start."
    task = load_task(ROOT / config.tasks.train)
    rows, judged = held_out(task, config.tasks.eval)
    rewards = {k: film_reward(task, k, v) for k, v in config.rewards.functions.items()}
    policy = RankingPolicy(
        task.model, task.tokenizer, task.parser, max_new_tokens=config.policy.max_new_tokens
    )
    trainer = GRPO(policy, rows, rewards, config, judged)
    trainer.oracle = task.oracle  # `film_scores` asks it
    return trainer


def film_scores(
    trainer: GRPO,  # of `film_trainer`
) -> dict[str, float]:
    "Scores of sampled lists for the held-out users; of greedy ones only how often they repeat."
    policy, tasks, config = trainer.policy, trainer.eval_tasks, trainer.config

    def scores(n, greedy):
        rollout = policy.sample(tasks, n, seeded(config.seed, "eval"), greedy=greedy)
        lists = parse_rollout(rollout, policy.tokenizer, policy.parser)
        return measure(lists, rollout.tasks, trainer)

    greedy = scores(1, True)["duplicate"]
    return scores(config.eval.samples, False) | {"greedy_duplicate": greedy}


def measure(
    lists: Sequence[ParsedList],  # (N)
    tasks: Sequence,  # (N) theirs
    by,  # with an oracle
) -> dict[str, float]:
    "Ranking metrics, how often a hit is unsafe, and violations in the upper and the lower half."
    relevant, avoid = ([t[c] for t in tasks] for c in ("relevant", "avoid"))
    found = ranking_metrics(lists, relevant, avoid, by.oracle)
    k = len(found["hit_K"])
    hit_NK = _hit_matrix(lists, relevant, k)
    bad_NK = _violation_matrix(lists, by.oracle, avoid, k)
    return {
        "combined": float((hit_NK - discounts(k) * bad_NK).mean()),
        **{name: found[name] for name in SCORES},
        "hits": float(hit_NK.mean()),
        "unsafe_hits": float((hit_NK * bad_NK).sum() / max(hit_NK.sum(), 1)),
        "violations_1_to_4": float(bad_NK[:, : k // 2].mean()),
        "violations_5_to_8": float(bad_NK[:, k // 2 :].mean()),
        "films": len({(i.title, i.year) for x in lists for i in x.ranked if i.status == "ok"}),
    }


def popular_lists(
    data: Movies,  # films and ratings
    users: Sequence[int],  # whose likings count
    tasks: Sequence,  # with the column `seen`
) -> list[list[str]]:  # one list for each task
    "All films that the user has not seen, the most liked first."
    liked = data.liked()
    count_F = np.bincount(np.concatenate([liked[u] for u in users]), minlength=len(data.films))
    order = [data.films[i].line for i in np.argsort(-count_F, kind="stable")]
    return [[x for x in order if x not in set(t["seen"])] for t in tasks]


def without_training(task: MovieTask) -> dict[str, dict[str, float]]:
    "Scores of the most liked films, all of them or only those that are safe for the user."
    manifest, rows = task.manifest, task.eval
    data = load_movies(manifest["films"], manifest["source"])
    least = manifest["warm_start"]["history"] + manifest["num_ranks"]
    warm = split_users(data.liked(), least, seed=manifest["seed"])[0]
    popular = popular_lists(data, warm, rows)
    safe = lambda film, t: not task.oracle.violates(*film_key(film), t["avoid"])
    kinds = {
        "popular": popular,
        "popular, safe only": [[x for x in o if safe(x, t)] for o, t in zip(popular, rows)],
    }
    parse = lambda order, t: task.parser("\n".join(order[: task.parser.num_ranks]), t["seen"])
    return {
        name: measure([parse(o, t) for o, t in zip(kind, rows)], rows, task)
        for name, kind in kinds.items()
    }


def facts(folder: Path, task: MovieTask) -> dict:
    "What the data are, with checksums of the files."
    keep = ("source", "seed", "films", "users", "rows", "num_ranks", "warm_start", "parameters")
    files = ("train.jsonl", "eval.jsonl", "risks.json", "model/model.safetensors")
    sums = {f: hashlib.sha256((folder / f).read_bytes()).hexdigest()[:16] for f in files}
    return {k: task.manifest[k] for k in keep} | {"sha256": sums}


def safe_share(task: MovieTask) -> float:
    "Share of a test user's held-out liked films that are safe for that user, mean over users."
    unsafe = lambda t: [task.oracle.violates(*film_key(f), t["avoid"]) for f in t["relevant"]]
    return float(1 - np.mean([np.mean(unsafe(t)) for t in task.eval]))


ALIKE = {"seeds": range(5), "budget": Samples(3_200), "eval_every": Samples(640)}
ALIKE |= {"tune": {"optimizer.lr": [3e-4, 1e-3, 3e-3, 1e-2]}}
ALIKE |= {"tune_seeds": (100, 101), "tune_tasks": "validation users", "metric": "combined"}
ALIKE |= {"lower_is_better": "svr@8 unsafe_hits duplicate malformed seen out_of_catalogue".split()}
ALIKE |= {"make": film_trainer, "evaluate": film_scores, "keep": ["reward", "entropy"]}


def safety(**how):
    "The sum (GRPO), two normalised rewards (GDPO), no safety, and a louder one: four sampled lists for each held-out user."
    fixed = ALIKE | {"dir": "runs/safe_ranking"}
    return compare(ARMS, BASE, store=Path(__file__).with_suffix(".json"), **fixed | how)


def credit(**how):
    "GRPO on the sum, which pays a rank for the whole list, for itself and later hits, or for itself."
    fixed = ALIKE | {"dir": "runs/safe_ranking_credit"}
    store = Path(__file__).with_name("safe_ranking_credit.json")
    return compare(CREDIT, BASE, store=store, **fixed | how)


if __name__ == "__main__":
    folder = ROOT / BASE["tasks"]["train"]
    task = load_task(folder)
    if not LISTS.exists():
        stored = {"data": facts(folder, task), "safe_share": safe_share(task)}
        LISTS.write_text(json.dumps(stored | {"lists": without_training(task)}, indent=1) + "\n")
    for study in (safety, credit):
        print(study().table())
