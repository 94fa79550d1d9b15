"Scheduler, shares and feedback: records of Trinity-RFT, defects known in public, exact resume, recipes."

import json
import pickle
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import cases, wanted

from grpo_nb.config import build_config
from grpo_nb.core import Rollout
from grpo_nb.lab.recipe import GRPOConfig, open_stream
from grpo_nb.scheduler import SELECTOR_METRIC, PassRateCalculator, TasksetScheduler
from grpo_nb.selectors import TaskSelectorConfig
from grpo_nb.stream import Shares, _make_shares
from grpo_nb.tasks import Task

pytestmark = pytest.mark.filterwarnings("ignore:difficulty_based with tau")
CASES = cases("scheduler_trinity")


class Table:
    "Rows with numeric columns."

    def __init__(self, size, features=None):
        self.size, self.features = size, features or {}

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"row": range(self.size)[i]}

    def column(self, name):
        return np.array(self.features[name], float)


def pairs(batch):
    return [(t["taskset_id"], t["index"]) for t in batch]


def build(case):
    p, data, selectors = case["params"], [], []
    for t in case["inputs"]["tasksets"]:
        features, kwargs = t.get("features") or {}, dict(t.get("kwargs") or {})
        if t["selector"] == "difficulty_based":
            kwargs |= {"c_range": None}  # no limit of the interpolation; the earlier name
            kwargs |= {"method": "parity"} if "torch_stream" in case["tags"] else {}
        data.append(Table(t["size"], features))
        selectors += [TaskSelectorConfig(t["selector"], t.get("seed", 42), list(features), kwargs)]
    end = {"total_epochs": p["total_epochs"], "total_steps": p["total_steps"]}
    return TasksetScheduler(data, p["batch_size"], selectors, **end)


@pytest.mark.parametrize("case", CASES)
def test_scheduler_records(case):
    p, want = case["params"], wanted(case)
    s, every = build(case), p["rebuild_every"]
    # rebuilt from Trinity-RFT's state the estimator is lost; ours must give the uninterrupted stream
    if case["name"] == "difficulty_feedback_rebuild":
        want = next(c for c in CASES if c.id == "difficulty_feedback").values[0]["expected"]
    got, cursors = [], []
    while True:
        try:
            batch = pairs(s.read())
        except StopIteration:
            break
        got.append([list(x) for x in batch])
        step = len(got) - 1
        cursors.append([x.state_dict()["current_index"] for x in s.selectors])
        if p["feedback_reward"]:
            feedback = {}
            for k, i in batch:
                f = feedback.setdefault(k, {"indices": [], "values": []})
                f["indices"].append(i)
                f["values"].append(((7 * i + 3 * k + step) % 17) / 16)
            s.update({SELECTOR_METRIC: feedback})
        if every and len(got) % every == 0:
            state = pickle.loads(pickle.dumps(s.state_dict()))
            s = build(case)
            s.load_state_dict(state)
    assert got == want["batches"]
    assert len(got) == want.get("num_steps", case["expected"]["num_steps"]) == s.max_steps
    if "states" in want:
        assert cursors == want["states"]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.sampled_from([None, 3]),
)
def test_every_epoch_serves_each_taskset_exactly(sizes, batches, seed):
    data = [Table(n) for n in sizes]
    s = TasksetScheduler(data, 1, "shuffle", total_epochs=None, seed=seed)
    drawn = [x for b in batches for x in pairs(s.read(b))]
    assert len(drawn) == sum(batches) == s.cursor
    epochs = sum(batches) // sum(sizes) or 1
    whole = TasksetScheduler(data, 1, "shuffle", total_epochs=epochs, seed=seed)
    per = Counter(x for b in whole for x in pairs(b))
    assert len(per) == sum(sizes) and {*per.values()} == {epochs}  # each task once per epoch


def test_the_reward_that_decides_in_training_reaches_the_operator_and_its_own_goes_first():
    mask, tasks = torch.ones(2, 1).bool(), [Task("", {}, 0, 0)] * 2
    r = Rollout(torch.zeros(2).long(), tasks, {}, mask, torch.zeros(2, 1))
    r = r.replace(rewards_NR=torch.tensor([[1, 0.5]] * 2), reward_names=("correct", "format"))
    for own in ({}, {"reward": "format"}):
        operator = {"name": "pass_rate_calculator", "args": own}
        s = TasksetScheduler([Table(1)], 1, operators=[operator])
        for passed, want in ((None, 1.0), (["correct"], 1.0), (["correct", "format"], 0.5)):
            m = s.observe(r, passed)
            assert m[SELECTOR_METRIC][0]["values"] == [0.5 if own else want]


def recipe(path, **tasks):
    entry = {"name": "a", "path": str(path), "selector": "shuffle"}
    tree = {"train_batch_size": 2, "tasks": {"tasksets": [entry | tasks.pop("entry", {})]}}
    return build_config(GRPOConfig, tree | {"tasks": tree["tasks"] | tasks})


def test_a_recipe_opens_its_tasksets_or_names_its_mistake(tmp_path):
    rows = [{"question": f"{i}+1", "solution": str(i + 1), "rate": i / 10} for i in range(6)]
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(r) for r in rows))
    easiest = {"selector_type": "offline_easy2hard", "feature_keys": ["rate"]}
    own = {"prompt": "question", "rename": {"solution": "answer"}}
    s = open_stream(recipe(path, entry=own | {"selector": easiest}, epochs=1))
    assert isinstance(s.operators[0], PassRateCalculator) and s.max_steps == 3
    first = s.read()[0]
    assert (first.taskset_id, first.index, first.prompt, first["answer"]) == ("a", 5, "5+1", "6")
    twice = [{"name": "a", "path": str(path)}] * 2
    stages = {"kind": "stages", "stages": [{"weights": {"b": 1}}]}
    for wrong, match in (
        ({"tasksets": twice}, "different names"),
        ({"entry": own | {"selector": {"selectr_type": "x"}}}, "Did you mean 'selector_type'"),
        ({"entry": own, "shares": stages}, "Unknown taskset 'b'"),
        ({"entry": own, "operators": ["pass_rates"]}, "Unknown experience operator"),
        ({"tasksets": []}, "No training tasks"),
    ):
        with pytest.raises(ValueError, match=match):
            open_stream(recipe(path, **wrong))


WRONG = (
    ({"operators": [PassRateCalculator]}, "Did you mean"),
    ({"operators": [{"name": "pass_rate_calculator", "args": [1]}]}, "needs a mapping"),
    ({"operators": [{"name": "pass_rate_calculator", "args": {"x": 1}}]}, "Available: reward"),
    ({"selectors": {"selector_type": "offline_easy2hard", "feature_keys": ["x"]}}, "no column 'x'"),
)
WRONG_SHARES = (
    (3, "shares: weights must be"),
    ([], "one for each of 1 tasksets"),
    ({"kind": "stages", "stages": [{"weights": []}]}, "one for each of 1 tasksets"),
    ({"kind": "weights"}, "weights=None do not fit"),
    ({"kind": "size", "weights": [1]}, "do not fit"),
    ({"kind": "stages", "stages": [{"samples": "4"}, {}]}, r"stages\[0\].samples must be a whole"),
    ({"kind": "stages", "stages": 3}, "list of Stage"),
)


@pytest.mark.parametrize(
    "call,match",
    [
        (lambda: TasksetScheduler([Table(1)], 0), "batch_size must be"),
        (lambda: _make_shares({"kind": "stages", "stage": []}, ["a"], [5], None), "'stages'"),
        (lambda: Shares([5, 7], stages=[{"weights": [0, 0]}]), "not all zero"),
        (lambda: Shares([5, 7], stages=[]), "at least one stage"),
        (lambda: Shares([5, 7], stages=[{"weights": [1, 0]}] * 2), "samples >= 1"),
        (lambda: Shares([5], stages=[{"samples": 6, "weights": [1]}]), "leave out its samples"),
        (lambda: TasksetScheduler([Table(1)], 1, operators=[{"nam": ""}]), "name and maybe args"),
        *((lambda k=k: TasksetScheduler([[1]], 1, **k), match) for k, match in WRONG),
        *((lambda s=s: _make_shares(s, ["a"], [5], None), m) for s, m in WRONG_SHARES),
    ],
)
def test_refused_arguments(call, match):
    with pytest.raises(ValueError, match=match):
        call()
