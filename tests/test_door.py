"What goes in at the door of a training: what is given is used, refused or told, and what ran is what the record says."

import contextlib
import copy
import dataclasses
import functools
import json
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from transformers import BertConfig, BertLMHeadModel, MiniMaxConfig, MiniMaxForCausalLM, MptConfig
from transformers import MptForCausalLM, RobertaConfig, RobertaForCausalLM

from grpo_nb.advantages import compute_advantages, gdpo, grpo, opo
from grpo_nb.all import GRPO, DiffusionPolicy, GroupCollector, RewardRunner, TokenPolicy
from grpo_nb.cli import _open_block, _parse
from grpo_nb.config import given_keys
from grpo_nb.core import sample_in_shares
from grpo_nb.difficulty import PassRateEstimator
from grpo_nb.evaluate import evaluate
from grpo_nb.filter_groups import expected_gen_batches
from grpo_nb.lab import recipe
from grpo_nb.lab.recipe import GRPOConfig, load_config, open_policy, open_rewards, open_stream
from grpo_nb.list_parsing import ListParser
from grpo_nb.losses import POLICY_LOSSES, LossConfig, policy_loss
from grpo_nb.policies.samplers import ddim_sampler, flow_sampler
from grpo_nb.ranking import SafetyOracle, make_relevance_reward
from grpo_nb.scheduler import TasksetScheduler
from grpo_nb.selectors import BaseSelector
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.update import update
from grpo_nb.verifiers import exact_answer, length_target

ROWS = [{"prompt": f"<bos>{i}+1=", "answer": str(i + 1)} for i in range(8)]
SMALL = {"steps": 2, "train_batch_size": 2, "num_generations": 2, "run.progress": False}
RIGHT = {"right": exact_answer()}


def test_functions_of_tensors_take_their_configuration_as_a_mapping():
    reward_NR, x = torch.tensor([[1.0, 0.0], [0.0, 0.5]]), torch.tensor([[0.0], [-0.3]])
    advantage = lambda how: compute_advantages(reward_NR, [0, 0], ["a", "b"], how).values
    loss = lambda how: policy_loss(x, 0 * x, torch.tensor([1.0, -1.0]), x == x, how)[0]
    assert not torch.equal(advantage({"mode": "gdpo"}), advantage(None))
    assert loss({"clip": {"low": 0.1, "high": 0.1}}) != loss(None)
    for f in (advantage, loss):
        with pytest.raises(ValueError, match="Unknown key 'modus'"):
            f({"modus": 1})
        with pytest.raises(ValueError, match="needs a mapping, got 3"):
            f(3)


@pytest.fixture(scope="module")
def policy():
    return TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=6, temperature=0.7)


def even(completions, **columns):
    return [float(len(c) % 2) for c in completions]


class Stream:
    "A stream of one's own: what it holds is seen only as it is read."

    def __init__(self, rows):
        self.rows = Taskset.load(rows, id="elsewhere")

    def read(self, n):
        return self.rows[:n]


PATHS = DiffusionPolicy(torch.nn.Bilinear(2, 1, 2), ddim_sampler(2), shape=(2,))
REFUSED, TOLD, USED = "refused", "told", "used"
KEYS = [
    ("policy.temperature", 1.0, {}, REFUSED),  # the default, said aloud
    ("policy.top_p", 0.5, {}, REFUSED),
    ("policy.lora", {"r": 4}, {}, REFUSED),
    ("policy.dtype", "bfloat16", {}, REFUSED),
    ("policy.model", "data:tiny-llama", {}, USED),
    ("policy.model", "other", {}, TOLD),
    ("policy.temperature", 0.5, {"policy": "data:tiny-llama"}, USED),
    ("tasks.train", "other.jsonl", {}, TOLD),
    ("tasks.tasksets", [{"path": "x"}], {}, TOLD),
    ("tasks.shares", {"kind": "nope"}, {}, REFUSED),
    ("tasks.shares", json, {}, REFUSED),
    ("tasks.selector", "random", {}, USED),
    ("tasks.selector", "random", {"tasks": Stream(ROWS)}, REFUSED),
    ("tasks.shuffle", False, {"tasks": Stream(ROWS)}, REFUSED),
    ("tasks.eval", "data:tasks/middle_eval.jsonl", {}, USED),  # the default, said aloud
    ("tasks.eval", "other.jsonl", {"eval_tasks": ROWS}, TOLD),
    ("rewards.functions", {"exact_answer": {}}, {}, TOLD),
    ("rewards.run.on_none", "raise", {}, USED),
    ("rewards.run.on_none", "raise", {"rewards": RewardRunner(RIGHT)}, REFUSED),
    ("rewards.run.seed", 5, {}, USED),
    ("policy.dtype", "float32", {"policy": PATHS}, USED),  # a default, as printed
    ("rewards.run.timeout_s", 5.0, {}, TOLD),
    ("eval.every", 1, {}, TOLD),
    ("update.loss.kl_kind", "k2", {}, TOLD),
    ("update.kl_stop.factor", 1.2, {}, TOLD),
    ("update.whole_groups", False, {}, TOLD),
    ("checkpoint.best", "eval_greedy", {}, TOLD),
    ("run.wandb", "offline", {}, TOLD),
    ("filter_groups.metric", "right", {}, USED),  # without filtering it says what shaping is
    ("filter_groups.surplus", "carry", {}, TOLD),
    ("filter_groups", {"enable": True, "on_cap": "skip_step"}, {}, TOLD),
    ("filter_groups", {"enable": True, "action": "drop", "max_num_gen_batches": 2}, {}, TOLD),
    ("update.sampling_cap", 2.0, {}, TOLD),
    ("filter_groups", {"enable": True, "action": "drop", "surplus": "carry"}, {}, TOLD),
    ("filter_groups.weights", {"nope": 1}, {}, REFUSED),
    ("update.loss", {"aggregation": "seq-mean-token-sum-norm", "max_length": 6}, {}, USED),
    ("update.loss.count_empty", True, {}, TOLD),
    ("update.scheme", "progressive", {}, TOLD),
    ("update", {"scheme": "progressive", "num_epochs": 2}, {}, USED),
    ("advantage.missing", "zero_in_stats", {}, TOLD),
    ("eval.every", 50, {"eval_tasks": ROWS}, TOLD),
    ("optimizer.warmup", 50, {}, TOLD),
    ("update.minibatch_size", 50, {}, TOLD),
    ("update.sampling_cap", 2.0, {"policy": PATHS}, TOLD),
    ("advantage.eps", 0.1, {}, USED),
]


# objects that no copy can be made of
odd = [json, (i for i in "a"), torch.Generator(), torch.ones(3, requires_grad=True) * 2]
ODD_KEYS = ["advantage.weights", "advantage.weights.even", "advantage.options.eps", "tasks.shares", "policy.lora.r", "update.loss.options.a", "filter_groups.weights.even"]  # fmt: skip


@pytest.mark.parametrize("key", ODD_KEYS)
def test_an_odd_object_in_a_configuration_is_refused_by_its_key(key, policy):
    for value in odd:
        with pytest.raises(ValueError) as e:
            GRPO(policy, ROWS, even, SMALL | {"steps": 1, key: value}).step()
        assert any(part in str(e.value) for part in key.split(".")) and "\n" not in str(e.value)


@dataclasses.dataclass
class Scaled:
    "An estimator and a reward with fields of its own, which have no hash."

    scale: float = 1.0

    def __call__(self, rewards=None, groups=None, completions=None, **columns):
        return even(completions) if rewards is None else rewards[:, 0] * self.scale


def test_a_dataclass_that_is_called_is_a_function_not_a_mapping(tmp_path, policy):
    config = SMALL | {"advantage.mode": Scaled(2.0), "run.dir": str(tmp_path / "run")}
    trainer = GRPO(policy, ROWS, Scaled(), config).fit(1)
    trainer.close()
    told = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert "advantage.mode" in given_keys(trainer.config)
    assert told["advantage"]["mode"].startswith("<passed: test_door.Scaled")


@pytest.mark.parametrize("key, value, parts, outcome", KEYS, ids=lambda x: str(x)[:30])
def test_every_key_that_somebody_sets_is_used_refused_or_told(key, value, parts, outcome, policy):
    parts = {"policy": policy, "tasks": ROWS, "rewards": RIGHT} | parts
    recipe._tell.cache_clear()  # said once in a process
    with warnings.catch_warnings(record=True, action="always") as seen:
        try:
            trainer = GRPO(**parts, config=SMALL | {key: value})
        except ValueError as e:
            assert outcome == REFUSED and key in str(e) and "\n" not in str(e)
            return
    said = [str(w.message) for w in seen if key in str(w.message)]
    assert (outcome == TOLD) == (len(said) == 1) and outcome != REFUSED, said
    assert any(k.startswith(key) for k in given_keys(trainer.config))


def test_estimators_say_which_of_the_general_options_they_do_not_have(policy):
    config = SMALL | {"advantage.mode": "dr_grpo", "advantage.eps": 0.1}
    with pytest.warns(UserWarning, match=r"advantage.eps \('dr_grpo' has none\)"):
        GRPO(policy, ROWS, RIGHT, config)
    with warnings.catch_warnings(action="error"):
        GRPO(policy, ROWS, RIGHT, config)  # the trainers of a study: told once


NoGreedy = type(
    "NoGreedy", (torch.nn.Linear,), {"sample": lambda self, tasks, n, generator: 0, "logp": 0}
)


class Heir(TokenPolicy):
    "Another class samples as it likes, and may have an option of its own."

    def __init__(self, model, tokenizer, mark=None, **options):
        super().__init__(model, tokenizer, **options)
        self.mark = mark


SAMPLING = {"max_new_tokens": 5, "temperature": 0.7, "top_k": 5}


def tiny(kind=TokenPolicy, **options):
    return kind.from_pretrained(data_path("tiny-llama"), **SAMPLING, **options)


def frozen():
    found = tiny()
    found.model.model.layers[0].requires_grad_(False)
    return found


OWN = {  # what is given, of a file of tasks, and what a load asks for
    "folder and file": (lambda file: {"policy": tiny(), "tasks": str(file)}, set()),
    "rows": (lambda file: {"policy": tiny(), "tasks": ROWS}, {"tasks"}),
    "memory": (lambda file: {"policy": TokenPolicy(tiny().model, tiny().tokenizer, **SAMPLING)}, {"policy"}),
    "stops": (lambda file: {"policy": tiny(stop="=")}, {"policy"}),
    "heir": (lambda file: {"policy": tiny(Heir)}, {"policy"}),
    "frozen": (lambda file: {"policy": frozen()}, {"policy"}),
    "stream": (lambda file: {"policy": tiny(), "tasks": TasksetScheduler([Taskset.load(file)], 2, "random")}, {"tasks"}),
    "held-out rows": (lambda file: {"eval_tasks": {"a": ROWS}}, {"eval_tasks"}),
    "rewards": (lambda file: {"rewards": even}, {"rewards"}),
}  # fmt: skip


@pytest.mark.parametrize("case", OWN)
def test_the_record_says_what_ran_and_load_makes_it_again_or_asks(case, tmp_path):
    make, asked = OWN[case]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    parts = {"tasks": tmp_path / "own.jsonl"} | make(tmp_path / "own.jsonl")
    trainer = GRPO.from_config(SMALL | {"run.dir": str(tmp_path / "run")}, **parts).fit(1)
    trainer.close()
    ran, run = trainer.policy, trainer.run
    written = yaml.safe_load((run.dir / "config.yaml").read_text())
    sampled = lambda policy: {k: getattr(policy, k) for k in (*SAMPLING, "top_p")}
    assert sampled(ran).items() <= written["policy"].items()
    assert written["policy"]["model"].startswith("<passed: " if "policy" in asked else "data:tiny")
    told = json.loads((run.dir / "environment.json").read_text())["parts"]
    assert told["policy"]["parameters"] == sum(p.numel() for p in ran.parameters())
    assert "8 tasks" in told["tasks"]["tasks"][0]
    assert list(told["rewards"]) == trainer.rewards.components and told["optimizer"] == "AdamW"
    if asked:
        with pytest.raises(ValueError, match=f"GRPO.load\\(path, {'=..., '.join(asked)}=...\\)"):
            GRPO.load(run.dir)
        with pytest.raises(ValueError, match="pass them again"):  # and as a recipe it asks, too
            GRPO.from_config(load_config(run.dir / "config.yaml"))
    again = GRPO.load(run.dir, **{k: parts[k] for k in asked})
    assert sampled(again.policy) == sampled(ran) and again.fit().step_done == 2
    again.close()


LATE = {  # set after the trainer is made -> what is said
    "policy.temperature": 0.5,
    "filter_groups.enable": True,
    "rewards.run.on_none": "raise",
    "run.dir": "elsewhere",
    "run.name": "other",
    "optimizer.lr": None,  # is read at every step
}


@pytest.mark.parametrize("key", LATE)
def test_what_is_set_later_is_used_and_recorded_or_refused(key, tmp_path, policy):
    old, (section, _, name) = length_target(3), key.rpartition(".")
    trainer = GRPO(policy, ROWS, {"len": old}, SMALL | {"run.dir": str(tmp_path / "run")}).fit(1)
    setattr(functools.reduce(getattr, section.split("."), trainer.config), name, LATE[key] or 0.5)
    if LATE[key]:
        with pytest.raises(ValueError, match=f"{key}=.* after the trainer was made"):
            trainer.fit(1)
        assert "config_changed" not in trainer.run.events().kind.tolist()
        return trainer.close()
    with pytest.warns(UserWarning, match="configuration differs from the run's in: optimizer.lr"):
        trainer.fit(1).close()
    events = trainer.run.events()
    assert events[events.kind == "config_changed"].changes.tolist() == [{key: [1e-4, 0.5]}]
    with pytest.warns(UserWarning, match="rewards.functions.len.reward was .*, and goes on as"):
        GRPO.load(tmp_path / "run", policy=policy, tasks=ROWS, rewards={"len": length_target(9)})


def test_what_is_set_on_the_parts_between_fits_is_in_the_record_and_in_the_checkpoint(tmp_path):
    run = {"run.dir": str(tmp_path / "run"), "tasks.train": "data:tasks/easy_train.jsonl"}
    trainer = GRPO.from_config(load_config(None, SMALL | run | {"tasks.eval": None})).fit(1)
    trainer.policy.temperature, trainer.eval_tasks = 0.5, ROWS
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.25
    trainer.fit(1).close()
    changes = trainer.run.events().set_index("kind").changes.dropna()
    assert changes["config_changed"] == {"policy.temperature": [1.0, 0.5]}
    noted = {*changes["environment_changed"]}
    assert {"parts.eval_tasks", "parts.optimizer_has.weight_decay"} <= noted
    again = GRPO.load(tmp_path / "run", eval_tasks=ROWS)
    decay = again.optimizer.param_groups[0]["weight_decay"]
    assert (again.policy.temperature, decay) == (0.5, 0.25)
    again.policy.stop = 5
    again.fit(1).close()
    with pytest.raises(ValueError, match="stop .5.*policy=..."):
        GRPO.load(tmp_path / "run", eval_tasks=ROWS)


def test_a_file_that_holds_other_tasks_by_now_is_refused_unless_they_are_given(tmp_path):
    file = tmp_path / "own.jsonl"
    config = SMALL | {"run.dir": str(tmp_path / "run"), "tasks.train": str(file)}
    file.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    trainer = GRPO.from_config(config | {"tasks.eval": str(file)})
    file.write_text("")  # what was read is what is recorded
    trainer.fit(1).close()
    file.write_text("".join(json.dumps(r | {"answer": "0"}) + "\n" for r in ROWS))
    with pytest.raises(ValueError, match=r"^tasks of the run were .*own \(8 tasks, \w+\)"):
        GRPO.load(tmp_path / "run")
    with pytest.raises(ValueError, match=r"^held-out tasks of the run were .*own \(8 tasks, \w+\)"):
        GRPO.load(tmp_path / "run", tasks=str(file))
    with pytest.warns(UserWarning, match="the run goes on with"):
        GRPO.load(tmp_path / "run", tasks=str(file), eval_tasks=ROWS).close()
    given = {"tasks": ROWS[::-1], "eval_tasks": ROWS}
    again = GRPO.from_config(config | {"run.if_exists": "resume"}, **given)
    with pytest.warns(UserWarning, match="the run goes on with"):
        again.fit(1).close()


def test_an_application_beside_parts_of_one_s_own_is_told(tmp_path, policy):
    with pytest.warns(UserWarning, match="application .an object is passed instead."):
        trainer = GRPO(policy, ROWS, RIGHT, SMALL | {"application": "motion", "run.dir": tmp_path})
    trainer.fit(1).close()
    assert "application" not in trainer.run.config


def test_functions_of_a_run_are_passed_again_or_replaced(tmp_path, policy):
    by_length = lambda rollout: rollout.lengths_N
    keys = {"advantage.mode": lambda rewards, group_N: rewards.sum(1) - 0.5}
    keys |= {"filter_groups.rule": lambda r, config: torch.ones(r.num_groups, dtype=torch.bool)}
    keys |= {"update.loss.policy_loss": lambda log_ratio, advantage: -log_ratio.exp() * advantage}
    made = SMALL | keys | {"run.dir": tmp_path / "run", "filter_groups.enable": True}
    made |= {"filter_groups.metric": ["seq_reward", by_length]}
    GRPO(policy, ROWS, RIGHT, made, callbacks=[lambda t, row: None]).fit(1).close()
    load = functools.partial(GRPO.load, tmp_path / "run", policy=policy, tasks=ROWS, rewards=RIGHT)
    for given in ({}, ["steps=3"]):
        with pytest.raises(ValueError, match="{'filter_groups.metric.1': f.*{'advantage.mode': f"):
            load(given)
    named = "advantage.mode=grpo update.loss.policy_loss=ppo filter_groups.rule=metric"
    named = [*named.split(), "filter_groups.metric=right"]
    with pytest.warns(UserWarning, match="callbacks of the run are not called: .*lambda"):
        assert load(named).config.advantage.mode == "grpo"
    again = load(keys | {"filter_groups.metric.1": by_length})
    assert again.config.filter_groups.metric == ("seq_reward", by_length)
    assert again.fit().step_done == 2


class Operator:
    def process(self, rollout, passed=None):
        return rollout, {}


class Backwards(BaseSelector):
    def pick(self, batch_size):
        return self.places(batch_size)[::-1]


@pytest.mark.parametrize("key, value", [("operators", [Operator()]), ("selector", Backwards)])
def test_parts_of_the_stream_are_passed_again(key, value, tmp_path, policy):
    keys = {f"tasks.{key}": value}
    GRPO(policy, ROWS, RIGHT, SMALL | keys | {"run.dir": tmp_path / "run"}).fit(1).close()
    load = functools.partial(GRPO.load, tmp_path / "run", policy=policy, tasks=ROWS, rewards=RIGHT)
    with pytest.raises(ValueError, match=f"GRPO.load.path, {{'tasks.{key}.*: function}}"):
        load()
    assert load(keys).fit().step_done == 2


def test_a_reference_of_one_s_own_is_passed_again(tmp_path):
    other = TokenPolicy.from_pretrained(data_path("tiny-llama"), temperature=0.5)
    config = SMALL | {"run.dir": tmp_path / "run", "update.loss.kl_coef": 0.1}
    GRPO("data:tiny-llama", ROWS, RIGHT, config, reference=other).fit(1).close()
    load = functools.partial(GRPO.load, tmp_path / "run", tasks=ROWS, rewards=RIGHT)
    with pytest.raises(ValueError, match="had a reference of its own: pass it again"):
        load()
    load(reference=other).close()


FORM = "prompt: question, rename: {solution: answer}"


@pytest.mark.parametrize(
    "entry, fault",
    [
        (FORM, None),
        (FORM + ", selectr: random", "Did you mean 'selector'"),
        (FORM + ", promt: x", "Did you mean 'prompt'"),
        (FORM + ", weight: 2", "Unknown key 'weight'"),
    ],
)
def test_keys_of_a_taskset_entry_are_used_or_refused(entry, fault, tmp_path):
    path, recipe = tmp_path / "q.jsonl", tmp_path / "r.yaml"
    path.write_text(json.dumps({"question": "1+1=", "solution": "2"}) + "\n")
    recipe.write_text(f"tasks: {{tasksets: [{{name: a, path: {path}, {entry}}}]}}")
    with pytest.raises(ValueError, match=fault) if fault else contextlib.nullcontext():
        assert open_stream(load_config(recipe)).read(1)[0].columns["answer"] == "2"
    recipe.write_text("buffer: {batch_size: 2}")
    with pytest.raises(ValueError, match="grpo-nb train --from trinity"):
        load_config(recipe)


@pytest.mark.parametrize(
    "text",
    [
        "run: {name: '${oc.env:SECRET}'}",
        "x: oc\nrun: {name: '${${x}.env:SECRET}'}",
        "run: {name: 'a ${oc.env:SECRET,none} b'}",
        "run: {name: '${oc.decode:${oc.env:SECRET}}'}",
        "tasks: {operators: [{name: '${oc.env:SECRET}'}]}",
        "steps: 1\ncompare: {title: '${oc.env:SECRET}', variants: {a: {}}}",
    ],
)
def test_a_recipe_reads_nothing_of_the_environment(text, tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "s3cret")
    (tmp_path / "r.yaml").write_text(text)
    with pytest.raises(ValueError, match="asks for something outside the recipe") as e:
        load_config(tmp_path / "r.yaml")
    assert "s3cret" not in str(e.value)
    (tmp_path / "r.yaml").write_text(text.replace("${", "\\${"))  # a text that looks like it
    own = pytest.raises(ValueError, match="Unknown key|Available")
    with own if "x:" in text else contextlib.nullcontext():
        found = str(_open_block(tmp_path / "r.yaml"))
        assert "s3cret" not in found and "SECRET" in found
    asked = load_config(None, ["run.name=${oc.env:SECRET}"])  # one's own command line may
    assert asked.run.name == "s3cret"
    (tmp_path / "r.yaml").write_text("run: {name: '${oc.env:A}', dir: '${oc.select:run.name}'}")
    assert load_config(tmp_path / "r.yaml", ["run.name=x"]).run.dir == "x"  # as the message says


BAD = {
    "too long": ({"prompt": "<bos>" + "1+" * 99}, "exceed the model's 128 positions"),
    "half a character": ({"prompt": "1\ud83d"}, "Half a character"),
    "no tokens": ({"prompt": "\u00e9"}, "has no tokens"),
    "no answer": ({"answer": " "}, "holds no answer"),
    "another kind": ({"answer": {"v": 2}}, r"column 'answer' holds \{'v': 2\} \(dict\)"),
}


@pytest.mark.parametrize("source", "list jsonl parquet table scheduler stream held-out".split())
@pytest.mark.parametrize("fault", BAD)
def test_a_bad_task_is_found_before_it_is_trained_on_and_named(fault, source, tmp_path, policy):
    change, message = BAD[fault]
    if source in ("parquet", "table") and fault in ("another kind", "half a character"):
        return  # Arrow has one kind a column, and UTF-8
    tasks, path, place = [*ROWS, ROWS[0] | change], tmp_path / f"r.{source}", "list, row 8"
    given = {"tasks": tasks, "config": SMALL}
    if source == "jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in tasks))
        given["tasks"], place = path, "r.jsonl, line 9"
    elif source == "parquet":
        pq.write_table(pa.Table.from_pylist(tasks), path)
        given["tasks"], place = path, "r.parquet, row 8"
    elif source == "table":
        given["tasks"], place = pa.Table.from_pylist(tasks), "table, row 8"
    elif source == "scheduler":
        given["config"] = SMALL | {"tasks.selector": "sequential"}
    elif source == "stream":
        given["tasks"], place = Stream(tasks[-2:]), "task "
    elif source == "held-out":
        given |= {"tasks": ROWS, "eval_tasks": tasks}
    trainer = GRPO(policy, rewards=RIGHT, **given)
    with pytest.raises(ValueError, match=message) as e:
        trainer.fit()
    assert trainer.step_done == 0 and place in str(e.value)


def test_ten_thousand_tasks_are_looked_at_together(tmp_path, policy, monkeypatch):
    path, calls = tmp_path / "many.jsonl", []
    path.write_text("".join(json.dumps(ROWS[i % 8]) + "\n" for i in range(10_000)))
    trainer, encode_all = GRPO(policy, path, RIGHT, SMALL), type(policy).encode_all
    count = lambda self, prompts: calls.append(len(prompts)) or encode_all(self, prompts)
    monkeypatch.setattr(type(policy), "encode_all", count)
    trainer.check_tasks()
    assert sum(calls) >= 10_000 and len(calls) <= 10


def test_the_door_takes_what_people_have(tmp_path, policy):
    import datasets
    import pandas as pd

    path = tmp_path / "r.jsonl"
    path.write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    models = ["data:tiny-llama", data_path("tiny-llama"), (policy.model, policy.tokenizer), policy]
    for model in [*models, policy.model]:
        more = {} if model is policy else {"policy.max_new_tokens": 6}
        t = GRPO(model, ROWS, even, SMALL | more)
        assert t.policy.max_new_tokens == 6
    frame = pd.DataFrame(ROWS).assign(x=1).rename(columns={"x": 0})
    for tasks in (path, str(path), ROWS, np.array(ROWS), frame, datasets.Dataset.from_list(ROWS)):
        assert GRPO(policy, tasks, even, SMALL, tasks).stream.read(9)[8]["answer"] in "12345678"
    for reward in (even, [even], {"even": even}, lambda completions, **k: even(completions)):
        assert GRPO(policy, ROWS, reward, SMALL).rewards.components in (["even"], ["reward"])
    own = lambda rewards, group_ids: rewards - rewards.mean()
    nested = {"optimizer.min_lr_ratio": 0.5, "optimizer": {"lr": 1e-5}, "advantage.mode": own}
    trainer = GRPO(policy, ROWS, even, SMALL | nested | {"optimizer.schedule": "cosine"})
    rate = trainer.config.optimizer
    assert (rate.lr, rate.min_lr_ratio, rate.schedule) == (1e-5, 0.5, "cosine")
    assert trainer.sample(ROWS[:2]).tasks[0]["answer"] == "1"


ONES = torch.ones(2, 2)
DR_GRPO = {"update.loss.aggregation": "dr_grpo"}
by_rank = lambda r: r.replace(rewards_NR=None, rewards_NRK=r.rewards[:, :, None].expand(-1, -1, 3))
BERT = dict(num_key_value_heads=1, eos_token_id=2, vocab_size=60, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)  # fmt: skip


@pytest.mark.parametrize(
    "do, message",
    [
        (lambda p: load_config(None, ["num_iterations=2"]), "Here it is 'update.num_epochs'"),
        (lambda p: setattr(GRPOConfig(), "temperature", 1), "Here it is 'policy.temperature'"),
        (lambda p: load_config(None, ["optimiser.lr=1"]), "^Unknown key 'optimiser' in the configuration. Did you mean 'optimizer'"),
        (lambda p: load_config(None, ["update.loss.clip=2"]), r"needs a mapping, such as \{low: "),
        (lambda p: LossConfig(clip=-0.1), r"needs a mapping, such as \{low: 0.2"),
        (lambda p: update(p, GRPO(p, ROWS, even, SMALL).collect(), torch.ones(4), torch.optim.SGD(PATHS.parameters())), "holds no weight of the policy"),
        (lambda p: load_config(None, ["policy.lora=true"]), r"must be a mapping \{key: value\} or null, got True"),
        (lambda p: GRPO(p, ROWS, even, SMALL).fit(2.0), "fit.steps. must be a whole number >= 0, got"),
        (lambda p: GRPO.load(5), "named by its path, got 5"),
        (lambda p: copy.copy(GRPO(p, ROWS, even, SMALL)), "A trainer is not copied"),
        (lambda p: setattr(GRPO(p, ROWS, even, SMALL), "stream", []), "There are no tasks"),
        (lambda p: GRPO(p, ROWS, even, SMALL).sample(2.5), "tasks must be a whole number >= 1"),
        (lambda p: load_config(None, ["advantage.mode=saw", "rewards.kl_in_reward=0.1"]), "goes below low=0 of saw"),
        (lambda p: load_config(None, ["advantage.gates=[{component: a, on: a}]"]), "two different components"),
        (lambda p: load_config(None, ["rewards.functions={no: {reward: exact_answer}}"]), "YAML reads a key .* as False: put it in quotes"),
        (lambda p: GRPO(p, ROWS, even, SMALL).evaluate(ROWS, samples=-1), "evaluate.samples. must be a whole number"),
        (lambda p: gdpo(torch.ones(2, 2), [0, 0], mask_NK=torch.tensor([True] * 3)), "mask_NK must be"),
        (lambda p: gdpo(torch.ones(2, 2), [0, 0], "12"), "a sequence of 2 numbers"),
        (lambda p: compute_advantages(torch.ones(2, 2), [0, 0], ["a", "a"]), "2 different reward_names"),
        (lambda p: policy_loss(ONES, ONES, ONES[0].cfloat(), ONES), "Got torch.complex64: "),
        (lambda p: policy_loss(ONES, ONES, [1.0], ONES), "Got list: rewards, advantages and log-probs are tensors"),
        (lambda p: setattr(p, "temperature", 0), "temperature must be > 0"),
        (lambda p: policy_loss(ONES, ONES, ONES[0], [[1]]), "A mask is a tensor of 0 and 1, got a list"),
        (lambda p: policy_loss(ONES, ONES, ONES[0], ONES, {"entropy_coef": 0.1}), "needs entropy_NS"),
        (lambda p: load_config(None, ["update.clip.low=1"]), "Did you mean 'update.loss.clip'"),
        (lambda p: load_config(None, ["run.wandb=none"]), "^(?!.*Did you mean 'None')"),
        (lambda p: open_policy({"modle": 1}), "Did you mean 'model'"),
        (lambda p: open_stream(load_config(None, ["tasks.shares={kind: nope}"])), "mixes several tasksets"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"advantage.options": {"zz": 1}}), "Unknown option 'zz'"),
        (lambda p: load_config(None, ["advantage.mode=sa_mrpo", "advantage.options.gamma=-1"]), "advantage.options: gamma must be >= 0"),
        (lambda p: open_rewards({"functions": {"exact_answer": {"ignore_case": "no"}}}), "ignore_case must be true or false, got 'no'"),
        (lambda p: flow_sampler(shift=-1), "shift must be > 0"),
        (lambda p: gdpo(torch.ones(2, 1), [0, 0], ddof=-1), "ddof must be a whole number >= 0"),
        (lambda p: gdpo(torch.ones(2, 1), 3), "one id per sample, got 3"),
        (lambda p: opo(torch.ones(2), [0, 0], lengths_N=[1]), "tokens of each of 2 responses"),
        (lambda p: PassRateEstimator(2, np.ones(3), np.ones(3)), "one for each of 2 tasks"),
        (lambda p: PassRateEstimator(4, rho=0).update([4], [0.5]), "0..3"),
        (lambda p: PassRateEstimator(4, rho=0).update([0.5], [0.5]), "integers"),
        (lambda p: PassRateEstimator(4, rho=0).update([0, 1], [0.5]), "one value per index"),
        (lambda p: PassRateEstimator(4, rho=0).update([0], [0.5], [0]), "positive"),
        (lambda p: sample_in_shares(MagicMock(sample=lambda *given: (1, 2)), [0], 2, p), "MagicMock.sample must return a Rollout, got"),
        (lambda p: TasksetScheduler([ROWS], 2, total_epochs=-1), "total_epochs must be >= 0"),
        (lambda p: GroupCollector({}, "two"), "train_batch_size must be a whole number"),
        (lambda p: evaluate(p, ROWS, RIGHT, {"limit": 1.5}), "limit must be a whole number"),
        (lambda p: evaluate(p, ROWS, RIGHT), "rewards is a RewardRunner, such as"),
        (lambda p: load_config(None, {"optimizer": {"lr": 1}, "optimizer.lr": 2}), "optimizer.lr is given twice"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"advantage.scales": {"wrong": 2}}), "Unknown reward 'wrong'"),
        (lambda p: GRPO(p, ROWS, RIGHT, "r.yaml"), "config is a GRPOConfig or a mapping .* load_config reads a recipe, config_from_trl"),
        (lambda p: GRPO(model=p, reward_funcs=even, train_dataset=ROWS), "takes policy, .*: model is policy, reward_funcs is rewards, train_dataset is tasks here"),
        (lambda p: GRPO(p, ROWS, RIGHT, learning_rate=1), "learning_rate is config=.'optimizer.lr': ..."),
        (lambda p: load_config(None, ["batch_size=3"]), "Here it is 'train_batch_size'"),
        (lambda p: GRPO.from_config({"rewards.functions": {"mine": {}}}, p), "reward 'mine'.*python mine.py train"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL | {"advantage.mode": lambda r: r}).step(), "but takes .r.: too many"),
        (lambda p: GRPO(p, ROWS, RIGHT, reference=p), "reference is the policy itself"),
        (lambda p: GRPO(p, "a\nb", RIGHT), r"No file 'a\\nb'"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"tasks.selector": lambda n: [0]}), "is called with .selector, batch_size., but takes"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL).evaluate(ROWS, 2, k=3), "k of pass@k must be"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL).step(["1+1="]), "task 0: a task has a prompt, got '1"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL).load_state_dict({}), "no state of a trainer"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"update.kl_stop.stat": "exact"}), "offers logp_and_kl: use 'k3'"),
        (lambda p: GRPO(PATHS, ROWS, even, {"update.mask_truncated": True}), "needs info..truncated"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL).save(""), "Where to"),
        (lambda p: torch.no_grad()(GRPO(p, ROWS, lambda completions: [*range(len(completions))], SMALL).step)(), "Gradients are off"),
        (lambda p: TokenPolicy("x", p.tokenizer), "got str. TokenPolicy.from_pretrained takes names"),
        (lambda p: exact_answer(extract=len)(completion="x", answer="1"), "extract must return text or None, got int 1"),
        (lambda p: GRPO.from_config({}, processing_class=3), r"is policy=\(model, tokenizer\) here"),
        (lambda p: GRPO(NoGreedy(1, 1), ROWS, RIGHT, SMALL, ROWS[:2]), r"NoGreedy.sample \(greedy=True is for eval.greedy\) is called with"),
        (lambda p: GRPO(p, ROWS), "Rewards are a function, .* got a NoneType"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"tasks.selector": dict}), "selector 'dict' is no selector class"),
        (lambda p: GRPO(p, ROWS, RIGHT, evaltasks=ROWS), "option of GRPO 'evaltasks'. Did you mean 'eval_tasks'"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"steps.x": 1}), "steps must be a whole number"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"advantage.mode": None}), "must be text or a function, got None"),
        (lambda p: GRPO((p.model.model, p.tokenizer), ROWS, RIGHT), "got LlamaModel"),
        (lambda p: GRPO(p, ROWS, RIGHT, {3: 1}), "Unknown key '3'"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"advantage.gates": [{"component": "a", "on": "b", "at_most": 0}]}), "from 1 to 0 never opens"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"advantage.weights": {"right": "x"}}), "a sequence of 1 numbers"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL, {"a": []}), "There are no tasks"),
        (lambda p: TokenPolicy.from_pretrained("none", temprature=1), "Did you mean 'temperature'"),
        (lambda p: GRPO.from_config({"policy.model": "none"}, callback=[]), "Did you mean 'callbacks'"),
        (lambda p: GRPO.from_config({"policy.model": "none", "run.dir": __file__}), "run.dir: .* is no folder"),
        (lambda p: GRPO(p, ["1+1="], RIGHT), "must be a dict|prompt"),
        (lambda p: GRPO(p, ROWS, RIGHT, {"update.loss.policy_loss": lambda x, a: (x * a).mean()}), "must return one number per step, .2, 1.; got .. "),
        (lambda p: GRPO(p, ROWS, RIGHT, {"update.loss.policy_loss": lambda x: x}), "but takes .x.: too many"),
        (lambda p: load_config(None, ["tasks.eval={a: x.jsonl, b: 3}"]), "must be text or {name: text}"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL | DR_GRPO), "got max_length=None: .* up to 6 long"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL | DR_GRPO | {"update.loss.max_length": 5}), "got max_length=5: .* up to 6 long"),
        (lambda p: GRPO.from_config({"policy.model": "none"}, callbacks=["wandb"]), "nothing would call"),
        (lambda p: GRPO(p, ROWS, RIGHT, SMALL, callbacks=[lambda: None]).fit(), r"called with \(trainer, row\)"),
        (lambda p: (t := GRPO(p, ROWS, even, SMALL)).step(by_rank(t.collect())), r"Rewards per rank need states\['item'\]"),
        (lambda p: open_policy({"engine": {"kind": "vllm"}}), "policy.engine: url must be text"),
        (lambda p: TokenPolicy(copy.deepcopy(p.model).to("meta"), p.tokenizer), "are on meta: load it on one device"),
        (lambda p: p.generate("1\ud800"), "Half a character"),
        (lambda p: TokenPolicy(p.model, p.tokenizer, stop=torch.tensor([5, 10**6])), "stop=1000000 is not one token"),
        (lambda p: TokenPolicy(p.model, p.tokenizer, shard="false"), "shard must be true or false or null, got 'false'"),
        (lambda p: TokenPolicy(p.model, p.tokenizer.backend_tokenizer), "tokenizer is one of transformers, got a Tokenizer"),
        (lambda p: TokenPolicy(BertLMHeadModel(BertConfig(**BERT)), p.tokenizer).generate("1"), "BertLMHeadModel cannot be sampled token by token: it keeps no cache"),
        (lambda p: TokenPolicy(MiniMaxForCausalLM(MiniMaxConfig(**BERT | {"num_hidden_layers": 2})), p.tokenizer).generate("1"), "MiniMaxForCausalLM cannot be sampled token by token"),
        (lambda p: TokenPolicy(RobertaForCausalLM(RobertaConfig(**BERT, is_decoder=True)), p.tokenizer).generate("1"), "RobertaForCausalLM cannot be sampled token by token: behind padding"),
        (lambda p: TokenPolicy(MptForCausalLM(MptConfig(d_model=8, n_heads=1, n_layers=1, max_seq_len=4)), p.tokenizer).generate("1"), "exceed the model's 4 positions"),
        (lambda p: (m := copy.deepcopy(p.model), m.model.layers[0].mlp.bfloat16(), TokenPolicy(m, p.tokenizer).generate("1")), "LlamaForCausalLM cannot be sampled token by token: .* dtype"),
    ],
)  # fmt: skip
def test_mistakes_are_told_in_one_line_with_what_to_do(do, message, policy):
    with pytest.raises(ValueError) as e:
        do(policy)
        raise ValueError("nothing was refused") if "(?!" not in message else ValueError("fine")
    assert re.search(message, str(e.value)) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "do, message",
    [
        (lambda t: setattr(t, "learning_rate", 1.0), "here it is config.optimizer.lr"),
        (lambda t: setattr(t, "temperature", 0.5), "here it is policy.temperature"),
        (lambda t: setattr(t, "args", {}), "here it is config"),
        (lambda t: t.optimizer.param_groups[0].update(lr=0.5), "optimizer's lr=0.5 is not used"),
        (lambda t: setattr(t.policy, "stop", [54]), "No sample of a step ended by itself"),
        (lambda t: GRPO(TokenPolicy.from_pretrained(data_path("tiny-llama"), dtype="bfloat16"), ROWS, RIGHT, SMALL | {"optimizer.lr": 1e-3}), "Weights in torch.bfloat16 lose most updates of lr=0.001"),
        (lambda t: LossConfig(kl_coef=0.1, kl_kind="kl"), "this KL term pulls nowhere"),
        (lambda t: _parse(["train", "steps=2", "seed=1", "steps=3"]), "steps is given twice: the last"),
    ],
)  # fmt: skip
def test_what_comes_to_nothing_is_told(do, message, policy):
    trainer = GRPO(copy.copy(policy), ROWS, even, SMALL)
    with pytest.warns(UserWarning, match=message):
        do(trainer)
        trainer.step()


def test_what_is_set_on_a_trainer_goes_through_the_door(policy):
    trainer = GRPO(policy, ROWS, even, SMALL)
    trainer.eval_tasks, trainer.rewards, trainer.note = ROWS[:3], RIGHT, 5
    assert trainer.evaluate().n_tasks == 3 and trainer.rewards.components == ["right"]


def test_adapters_made_in_several_threads_are_those_of_one_alone():
    def adapters(_=None):
        p = TokenPolicy.from_pretrained(data_path("tiny-llama"), lora={"r": 4})
        return [x.flatten() for name, x in p.model.named_parameters() if "lora_A" in name]

    before, alone = torch.get_rng_state(), torch.cat(adapters())
    with ThreadPoolExecutor(4) as pool:
        assert all(torch.equal(torch.cat(x), alone) for x in pool.map(adapters, range(12)))
    assert torch.equal(torch.get_rng_state(), before)


LIST = ListParser(2)
NUMBERS = [
    (lambda x: ddim_sampler(2, eta=x), ".5"),
    (lambda x: expected_gen_batches(x), "1"),
    (lambda x: grpo([0.0, 1.0], [0, 0], eps=x).tolist(), ".5"),
    (lambda x: POLICY_LOSSES["sapo"](torch.ones(2), torch.ones(2), tau_pos=x).tolist(), "2"),
    (lambda x: POLICY_LOSSES["dro"](torch.ones(2), torch.ones(2), torch.ones(2), x).tolist(), "2"),
    (lambda x: make_relevance_reward(LIST, error=x)([""], ["?"], relevant=[["A"]]), "-2"),
    (lambda x: make_relevance_reward(LIST, missing=x)([""], ["1. A (1999)"], relevant=[["A"]]), "-2"),
    (lambda x: make_relevance_reward(LIST, penalties={"duplicate": x})([""], ["1. A (1999)\n2. A (1999)"], relevant=[["A"]]), "2"),
    (lambda x: SafetyOracle({"Heat (1995)": {"gore": x}}, "safe").violates("Heat", 1995, ["gore"]), ".9"),
]  # fmt: skip


@pytest.mark.parametrize("made, text", NUMBERS)
def test_a_number_given_as_text_is_that_number(made, text):
    assert repr(made(text)) == repr(made(float(text)))
