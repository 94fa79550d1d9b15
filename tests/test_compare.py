"Comparisons: equal budgets, statistics, crashes, interruptions, the stored study, exports, workers of others."

import json
import math
import os
import re
import runpy
import shutil
import signal
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import forked
import numpy as np
import pandas as pd
import psutil
import pytest
from resumed import is_timing

from grpo_nb.all import GRPO, Run, Samples, Steps, Study, compare, data_path, load_config
from grpo_nb.evaluate import Scores, two_way_interval
from grpo_nb.files import Lock, RunLocked
from grpo_nb.lab.runs import FailedRun, Spec, plan_runs, run_job
from grpo_nb.lab.study import verdict

COUNTS = ModuleType("counts")  # of a module a function's text holds the name alone
COUNTS.made = 0
ROOT = Path(__file__).resolve().parents[1]


class Fake:
    "A made-up trainer: the score climbs; `batch` samples a step, of which filtering may keep fewer."

    def __init__(self, seed, rate=0.1, batch=64, crash_at=None, ends_at=None, die_at=None):
        COUNTS.made += 1
        self.rng, self.rate, self.batch = np.random.default_rng(seed), rate, batch
        self.crash_at, self.ends_at, self.die_at = crash_at, ends_at, die_at
        self.skill, self.history, self.callbacks = 0.3 + 0.02 * (seed % 10), [], []

    def fit(self, steps):
        for n in range(1, steps + 1):
            if n == self.ends_at:
                return
            if n == self.crash_at:
                raise FloatingPointError("the loss is <not> finite")
            if n == self.die_at:
                os._exit(9)
            self.history.append(self.step(n))
            for callback in self.callbacks:
                callback(self, self.history[-1])

    def step(self, n):
        self.skill += self.rate * (1 - self.skill) * self.rng.uniform(0.5, 1.5)
        row = {"n_rollouts_generated": self.batch * n, "tokens_generated": 5 * self.batch * n}
        row |= {"gen_seconds": 0.25 * n, "reward_seconds": 0.0, "train_seconds": 0.25 * n}
        return row | {"reward": self.skill, "n_rollouts_trained": 32 * n}

    def evaluate(self):
        return {"eval_sampled": self.skill, "eval_greedy": min(1.0, self.skill + 0.1)}


def fake(config, only=None, **options):
    "The trainer of a run; `only`: a seed that alone gets the options."
    return Fake(config.seed, **(options if only in (None, config.seed) else {}))


def by_lr(config, batch=64):
    return Fake(config.seed, config.optimizer.lr, batch)


HELD = {}


class Holder:
    def __init__(self, held):
        self.held = held

    def make(self, config):
        return by_lr(config, self.held)

    __call__ = make


def numbers(runs):
    "What runs have recorded, but for the time that it took."
    untimed = lambda curve: {k: v for k, v in curve.items() if not is_timing(k)}
    return [json.dumps(untimed(r["curve"]), sort_keys=True) for r in runs]  # NaN is NaN


ARMS = {"slow": {"make.rate": 0.05}, "fast": {"make.rate": 0.08}}


def contest(variants=ARMS, **kw):
    return compare(variants, **{"make": fake} | kw)


def interrupted_once(flag, seed, make):
    "A maker that presses Ctrl-C when it first makes a trainer for this seed."

    def stubborn(config):
        if config.seed == seed and not flag.exists():
            flag.write_text("")
            os.kill(os.getpid(), signal.SIGINT)
        return make(config)

    return stubborn


def test_cpu_seconds_are_those_of_training(tmp_path):
    def burn(seconds):
        until = time.thread_time() + seconds
        while time.thread_time() < until:
            pass

    class Busy(Fake):
        def step(self, n):
            burn(0.05)
            time.sleep(0.05)
            return super().step(n)

        def evaluate(self):
            burn(0.1)
            return super().evaluate()

    kw = {"make": lambda config: Busy(config.seed), "seeds": range(2), "budget": Steps(2)}
    here = contest({"a": {}}, dir=tmp_path / "d", **kw)
    with ThreadPoolExecutor(2) as pool:  # of each thread
        there = contest({"a": {}}, dir=tmp_path / "e", executor=pool, **kw)
    for study in (here, there):
        steps = study.curves().pivot(index="step", columns="seed", values="cpu_seconds")
        assert (steps.loc[0] == 0).all() and (steps.loc[1] >= 0.05).all()
        assert ((steps.loc[2] >= 0.1) & (steps.loc[2] < 0.25)).all()  # no sleep, no evaluation
    one = contest({"a": {}}, dir=tmp_path / "f", **kw | {"budget": {"cpu_seconds": 0.01}})
    assert set(one.frame()["step"]) == {1} and set(one.frame()["ended"]) == {"budget"}


def test_a_store_is_loaded_if_it_answers_the_question_and_else_trained_again(tmp_path, capsys):
    kw = {"seeds": range(2), "dir": tmp_path / "runs", "store": tmp_path / "s.json"}
    first = contest(budget=Steps(3), **kw)
    text = (tmp_path / "s.json").read_text()
    assert str(tmp_path) not in text and len(text.splitlines()) > 4 and "<hidden>" not in text
    COUNTS.made = 0
    kw["dir"] = tmp_path / "elsewhere"
    again = contest(budget=Steps(3), **kw)
    assert COUNTS.made == 0 and again.runs == first.runs and not kw["dir"].exists()
    with pytest.raises(ValueError, match=r"another specification \(budget.steps\)"):
        contest(budget=Steps(4), if_changed="raise", **kw)
    contest(budget=Steps(4), **kw)
    assert COUNTS.made == 4 and "training again" in capsys.readouterr().out
    (tmp_path / "s.json").write_text('{"format": 2}')
    with pytest.raises(ValueError, match="format 1"):
        contest(budget=Steps(4), **kw)


def test_another_text_of_a_function_trains_again_and_only_warns_where_nothing_may_train(tmp_path):
    kw = {"seeds": range(2), "budget": Steps(3), "dir": tmp_path / "d", "store": tmp_path / "s"}
    first = contest(make=by_lr, variants={"a": {}}, **kw)
    renamed = lambda config, batch=64: by_lr(config, batch)
    COUNTS.made = 0
    with pytest.warns(UserWarning, match="another text of make: its stored runs are shown"):
        study = contest(make=renamed, variants={"a": {}}, if_changed="raise", **kw)
    assert COUNTS.made == 0 and study.runs == first.runs
    contest(make=renamed, variants={"a": {}}, **kw)
    assert COUNTS.made == 2
    key = lambda make: plan_runs(Spec({"a": {}}, None, 1, Steps(1), make=make), {"a": {}})[0].key
    closed = lambda held: lambda config: by_lr(config, held)
    default = lambda held: lambda config, batch=held: by_lr(config, batch)
    read = lambda held: HELD.update(n=held) or (lambda c: [by_lr(c, HELD["n"]) for _ in "1"][0])
    method, far = lambda held: Holder(held).make, lambda held: Holder([0] * 500 + [held])
    table = lambda held: closed(pd.Series([0] * 99 + [held] + [0] * 99))  # it prints ten
    for hold in (partial(partial, by_lr), closed, default, read, Holder, method, far, table):
        assert key(hold(32)) == key(hold(32)) != key(hold(64))


def test_a_crash_is_reported_and_the_others_go_on(tmp_path):
    arms = ARMS | {"fragile": {"make.only": 1, "make.crash_at": 2}, "short": {"make.ends_at": 3}}
    study = contest(arms, seeds=range(3), budget=Steps(4), dir=tmp_path)
    failed = [r for r in study.runs if r["status"] != "done"]
    assert [(r["variant"], r["seed"]) for r in failed] == [("fragile", 1)]
    error = failed[0]["error"]
    assert "FloatingPointError: the loss is <not> finite" in error
    assert 'File "test_compare.py"' in error and str(tmp_path) not in error
    table = study.table()
    row = table.frame.set_index("variant").loc["fragile"]
    assert row[["n", "missing", "pairs"]].tolist() == [2, 1, 2]
    assert "1 of 12 runs failed" in str(table) and "2 (1 missing)" in str(table)
    assert "3 runs ended before the budget: short seed 0 (tasks)" in str(table)
    assert "the loss is &lt;not&gt; finite" in study.report(tmp_path / "r.html", 3).read_text()
    COUNTS.made = 0  # the failed run is tried again, the others are not
    contest(arms, seeds=range(3), budget=Steps(4), dir=tmp_path)
    assert COUNTS.made == 1


def test_an_interrupted_study_goes_on(tmp_path, capsys):
    make = interrupted_once(tmp_path / "once", 1, fake)
    kw = {"make": make, "seeds": range(3), "budget": Steps(3)}
    study = contest({"a": {}}, dir=tmp_path / "d", **kw)
    assert study.unfinished == 2 and len(study.runs) == 1
    assert "1 of 3 runs are finished" in capsys.readouterr().out
    study.save(tmp_path / "s.json")
    for one in (study, Study.load(tmp_path / "s.json")):
        assert "preliminary" in str(one.table()) and one.certainty() == {}
    COUNTS.made = 0
    study = contest({"a": {}}, dir=tmp_path / "d", **kw)
    assert not study.unfinished and COUNTS.made == 2
    whole = contest({"a": {}}, dir=tmp_path / "w", **kw)
    assert numbers(study.runs) == numbers(whole.runs)


def test_a_study_interrupted_in_its_tuning_is_shown_and_says_later_what_was_chosen(tmp_path):
    slower = lambda config: Fake(config.seed, 0.2 - 0.1 * config.update.skip_zero_advantage)
    make = interrupted_once(tmp_path / "once", 101, slower)
    kw = {"make": make, "seeds": 1, "budget": Steps(2), "dir": tmp_path / "d"}
    kw |= {"tune": {"update.skip_zero_advantage": [True, False]}}
    study = compare({"a": {}}, **kw)
    assert study.certainty() == {} and study.gains().empty and "preliminary" in study._repr_html_()
    assert "  False  " in str(compare({"a": {}}, **kw).table())


def test_a_store_has_what_was_asked_for_and_an_undefined_score_stays_undefined(tmp_path):
    class Odd(Fake):
        def step(self, n):
            return super().step(n) | {"grad_norm": 0.1 * n}

        def evaluate(self):
            by = np.array([self.skill, math.nan])  # a task without a score
            late = math.nan if self.history else 0.3
            scores = {"sampled": (self.skill, 0, 1), "late": (late, 0, 1)}
            return Scores(scores, 2, 1, (), {"sampled": by})

    kw = {"make": lambda config: Odd(config.seed), "seeds": 2, "budget": Steps(3)}
    kw |= {"metric": "grad_norm", "dir": tmp_path / "d"}
    stored = {"store": tmp_path / "s.json", "keep": ["reward"]}
    for how in ({}, stored, stored):
        study = compare({"a": {}}, **kw, **how)
        assert study.scores("grad_norm")["a"] == pytest.approx({0: 0.3, 1: 0.3})
        assert study.scores("eval_late") == {"a": {}} and study.frame()["eval_late"].isna().all()
        assert "2 of 2 runs have no last eval_late" in str(study.table("eval_late"))
        assert [*study.gains()["score"]] == ["sampled"]  # what no run has has no gain
        assert study.profile("eval_sampled") and study.profile("eval_late")


def test_a_score_with_the_name_of_a_column_of_training_ends_the_study(tmp_path):
    for name in ("reward", "step", "n_rollouts_generated"):
        evaluate = lambda trainer, name=name: {name: 0.5, "eval_sampled": 0.5}
        with pytest.raises(ValueError, match=f"score '{name}'.*call it 'eval_{name}'"):
            contest({"a": {}}, evaluate=evaluate, seeds=1, budget=Steps(2), dir=tmp_path / name)


def test_tasks_and_models_that_were_edited_are_trained_again(tmp_path):
    file, weights, keys = tmp_path / "tasks.jsonl", tmp_path / "model" / "weights", []
    weights.parent.mkdir()
    held = {"tasks.eval": "data:tasks/easy_eval.jsonl"}
    own, model = {"tasks.train": str(file)}, {"policy.model": str(weights.parent)}
    for text in ("1+1=", "1+2=", "1+2="):
        file.write_text(json.dumps({"prompt": text, "answer": "3"}))
        weights.write_text(text)
        asked = ((held | own, {}, {}), (held, own, {}), (held | model, {}, {}), (held, {}, own))
        for base, arm, tuned in asked:
            tune = {k: [v] for k, v in tuned.items()}
            spec = Spec({"a": arm}, base, 1, Steps(1), tune=tune, dir=tmp_path)
            (job,) = plan_runs(spec, {"a": tuned})
            keys += [job.key, str(spec.tree()["functions"])]
    assert keys[8:16] == keys[16:] and not {*keys[:8]} & {*keys[8:]}


def test_processes_give_what_one_process_gives_and_survive_a_death(tmp_path):
    kw = {"seeds": range(2), "budget": Steps(3)}
    here = contest(dir=tmp_path / "one", **kw)
    deadly = {"deadly": {"make.only": 0, "make.die_at": 2}}
    there = contest(ARMS | deadly, dir=tmp_path / "two", workers=2, **kw)
    alive = [r for r in there.runs if r["variant"] != "deadly"]
    assert numbers(alive) == numbers(here.runs)
    dead = [r for r in there.runs if r["status"] == "failed"]
    assert [(r["variant"], r["seed"]) for r in dead] == [("deadly", 0)]
    assert "The process of this run died" in dead[0]["error"]


def test_wrong_studies_are_refused_before_anything_is_trained(tmp_path):
    def refused(match, variants=ARMS, **kw):
        given = {"seeds": [0], "budget": Steps(1), "dir": tmp_path / "none"} | kw
        given |= {"make": fake} if variants is ARMS else {}
        with pytest.raises(ValueError, match=match):
            compare(variants, **given)
        assert not (tmp_path / "none").exists()

    refused("no variants", {})
    grid = {"optimizer.lr": [1e-4]}
    refused("sets 'tasks.eval', which is the same", {"a": {"tasks": {"eval": "other.jsonl"}}})
    refused("tune has the section 'optimizer'", {"a": {}}, tune={"optimizer": [{"lr": 1e-4}]})
    refused("tune sets 'steps'", {"a": {}}, tune={"steps": [3, 4]})
    for wrong in (["a"], "a", 3, None, {"a": fake}, {1: {}}, {"a": {3: 1}}):
        refused("variants.* must be", wrong)
    for wrong in (500, "many", {"samples": 3, "steps": 4}):
        refused("eval_every must be one of Samples", eval_every=wrong)
    for wrong in ("ab", 2.5, None, True, [1.5], [True], [-1], [[1]], 0, [], [1, 1]):
        refused("seeds must be a number of seeds", seeds=wrong)
    refused("tune_tasks cannot be read", {"a": {}}, tune=grid, tune_tasks="nowhere.jsonl")
    refused("tasks.eval cannot be read", {"a": {}}, base={"tasks": {"eval": "nowhere.jsonl"}})
    own = {"filter_groups.metric": [len]}  # a function belongs into a variant
    refused("the function .*len in filter_groups.metric.*: make it a variant", {"a": {}}, tune=own)
    refused("no held-out tasks", {"a": {}}, base={"tasks": {"eval": None}})
    refused("base must be a recipe, .* got 3", {"a": {}}, base=3)
    for name in ("workers", "threads"):
        for wrong in (0, "2", 1.5, None):
            refused(f"{name} must be a whole number", **{name: wrong})
    for name in ("make", "evaluate", "metric", "lower_is_better"):
        refused(f"{name} must be", {"a": {}}, **{name: 3})
    refused("Did you mean 'train'", if_changed="trian")
    for text in ("[1]", "text", "", '"study"', '{"format": 1, "spec": 3, "runs": []}'):
        (tmp_path / "s.json").write_text(text)
        refused("not a stored study of format 1", store=tmp_path / "s.json")
    refused("rewards come from make", {"a": {"rewards.functions": {}}}, make=lambda config: None)
    refused("make", {"a": {"make.width": 2}})  # keywords of nothing


def test_a_place_that_cannot_be_written_is_told_before_anything_is_trained(tmp_path, monkeypatch):
    kw = {"seeds": [0], "budget": Steps(1)}
    COUNTS.made = 0
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="dir: .*file is no folder"):
        contest(dir=tmp_path / "file", **kw)
    (tmp_path / "closed").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: path.name != "closed")
    with pytest.raises(ValueError, match="store: .*closed cannot be written to"):
        contest(dir=tmp_path / "d", store=tmp_path / "closed" / "s.json", **kw)
    assert COUNTS.made == 0


@pytest.mark.parametrize("executor", [None, ThreadPoolExecutor(2)])
def test_an_unknown_metric_ends_a_study_before_any_training(tmp_path, executor, monkeypatch):
    monkeypatch.setattr(Fake, "step", lambda *_: pytest.fail("trained"))
    kw = {"seeds": range(3), "budget": Steps(9), "dir": tmp_path / "d", "executor": executor}
    kw |= {"variants": {"a": {}, "b": {}}}
    asked = [{"metric": "eval_samplde"}, {"metric": "mean_eval_samplde", "eval_every": Steps(2)}]
    for wrong in (*asked, {"lower_is_better": ["eval_samplde"]}):
        with pytest.raises(ValueError, match="Unknown metric '.*samplde'. Did you mean 'eval_samp"):
            contest(**kw, **wrong)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="Unknown metric 'rewadr'"):  # known after a step only
        contest(**kw, metric="rewadr")
    assert not list((tmp_path / "d").glob("*/result.json"))  # nothing counts as a run
    study = contest(metric="reward", **kw)  # what every step logs is fine
    assert study.table().metric == "reward"
    with pytest.raises(ValueError, match="Unknown metric 'rewards'"):  # finished runs tell it, too
        contest(metric="rewards", **kw)


def test_a_make_that_ignores_its_configuration_is_found_out(tmp_path):
    recipe = data_path("recipes/quickstart.yaml")
    how = {"seeds": 1, "budget": Steps(1), "dir": tmp_path}
    with pytest.raises(FailedRun, match="make was given optimizer.lr=0.01"):
        made = lambda config: GRPO.from_config(load_config(recipe))
        compare({"a": {"optimizer.lr": 1e-2}}, recipe, make=made, **how)


def test_scores_by_task_are_stored_and_give_an_interval_for_other_tasks(tmp_path):
    small = ["train_batch_size=2", "num_generations=4", "eval.limit=12", "eval.samples=2"]
    base = load_config("data:recipes/quickstart.yaml", [*small, "eval.greedy=false"])
    kw = {"seeds": 2, "budget": Steps(1), "dir": tmp_path / "d", "store": tmp_path / "s.json"}
    study = compare({"a": {}, "b": {"update.num_epochs": 2}}, base, **kw)
    for r in study.reported:
        scores = r["by_task"]["eval_sampled"]
        assert len(scores) == 12
        assert abs(np.mean(scores) - r["curve"]["eval_sampled"][-1]) < 1e-4
    notes = "\n".join(study.table().notes)
    said = r"For other tasks as well as other seeds: a (.*?) \[(.*?), (.*?)\]; b .*difference"
    said = re.search(said, notes)
    mine = [r["by_task"]["eval_sampled"] for r in study.reported if r["variant"] == "a"]
    assert [float(x) for x in said.groups()] == pytest.approx(two_way_interval(mine), abs=6e-4)
    study.runs[-1]["by_task"]["eval_sampled"].pop()  # on tasks of its own
    assert "other tasks" not in str(study.table()) and study.profile()


# the noise of the baseline, in those of the variants
@pytest.mark.parametrize("n, noise", [(5, 0.0), (10, 3.0)])
def test_a_study_of_nothing_finds_nothing_in_95_of_100(n, noise):
    rng, studies, arms = np.random.default_rng(n), 150, 6
    x = rng.normal(size=(studies, arms, n)) - noise * rng.normal(size=(studies, 1, n))
    found = [any(verdict(d, arms) in ("higher", "lower") for d in study) for study in x]
    assert np.mean(found) < 0.1  # three standard errors
    equal = [verdict(d[0] + 1, arms, margin=1.0) == "equal within 1" for d in x]
    assert np.mean(equal) < 0.05  # a true difference of the margin


@pytest.mark.filterwarnings("ignore:Glyph")
def test_reports_escape_what_they_draw(tmp_path):
    odd = [r"$\frac$", "$", "_mine", "<i>&|", "{{ 3 }}", "a_b^{", "\\", "ü 中", "50% #2"]
    arms = {k: {"make.rate": 0.05 * i} for i, k in enumerate(odd, 1)}
    study = contest(arms, seeds=range(2), budget=Steps(3), eval_every=Steps(1), dir=tmp_path / "d")
    assert "<i>" not in study.table()._repr_html_()
    page = study.report(tmp_path / "r.html", r"$\frac$<i>{{ 3 }}").read_text()
    assert "<i>" not in page and "{{ 3 }}" in page and r"$\frac$" in page and study.profile().png()
    shown = study.plot().axes[0].get_legend().get_lines()
    assert len({(x.get_color(), x.get_linestyle()) for x in shown}) == len(odd)


def losing(config, rate=None):
    "It learns to violate less."
    trainer = Fake(config.seed, config.optimizer.lr if rate is None else rate)
    trainer.evaluate = lambda: Fake.evaluate(trainer) | {"svr": 1 - trainer.skill}
    return trainer


def test_where_less_is_better_the_table_asks_for_less(tmp_path):
    arms, store = {"slow": {"make.rate": 0.05}, "fast": {"make.rate": 0.4}}, tmp_path / "s.json"
    kw = {"make": losing, "seeds": range(6), "budget": Steps(3), "dir": tmp_path / "d"}
    study = compare(arms, metric="svr", lower_is_better=True, store=store, **kw)
    table = study.table()
    row = table.frame.set_index("variant").loc["fast"]
    assert row["verdict"] == "lower" and row["better"] == 1 and row["better_low"] > 0.5
    assert "P(lower)" in table._repr_html_() and "Lower svr is better" in str(table)
    old = study.runs[0] | {"status": "failed", "made_by": "older"}  # of the baseline: a pair less
    table = Study(study.spec, [old, *study.runs[1:]], study.environment).table()
    assert [*table.frame["verdict"]] == ["", ""] and "1 runs were made by other code" in str(table)
    page = study.report(tmp_path / "r.html").read_text()  # a start and an end are no course in time
    assert page.count("data:image/png;base64,") == 2 and "seconds of training: mean" not in page
    assert page.count(">P(lower)</th>") == 1 and page.count(">P(higher)</th>") == 2
    # a direction that no tuning has used is up to who looks: the file is as it was
    before = store.read_bytes()
    COUNTS.made = 0
    kw |= {"metric": "svr", "store": store, "if_changed": "raise"}
    assert "P(higher)" in str(compare(arms, **kw).table())
    again = compare(arms, lower_is_better=["svr", "eval_greedy"], **kw)
    assert "P(lower)" in str(again.table("eval_greedy")) and COUNTS.made == 0
    assert store.read_bytes() == before


def test_a_variant_of_which_every_run_failed_raises_and_the_others_are_kept(tmp_path):
    arms = {"fine": {}, "broken": {"make.crash_at": 1}, "empty": {"make.ends_at": 1}}
    kw = {"seeds": 2, "budget": Steps(2), "dir": tmp_path}
    with pytest.raises(FailedRun, match="(?s)run of 'broken' failed; .*is <not> finite.*kept in"):
        contest(arms, store=tmp_path / "s.json", **kw)
    assert not (tmp_path / "s.json").exists()
    COUNTS.made = 0
    del arms["broken"]
    with pytest.raises(FailedRun, match="(?s)run of 'empty' failed; .*Nothing was trained"):
        contest(arms, **kw)
    assert COUNTS.made == 2  # those of the first arm are kept
    result = next(tmp_path.glob("report-fine-s0*")) / "result.json"
    result.write_text(result.read_text().replace('"curve"', '"edited"'))
    kw |= {"tune": {"optimizer.lr": [0.1, 0.2]}, "tune_seeds": [9]}
    with pytest.raises(FailedRun, match="Every tuning run of 'a' failed; .*is <not> finite"):
        contest({"a": {"make.crash_at": 1}}, **kw)
    only = {f"make.{k}": v for k, v in {"only": 0, "crash_at": 1}.items()}
    with pytest.raises(FailedRun, match="Every run of 'a' failed; .*is <not> finite"):
        contest({"a": only}, **kw | {"seeds": 1})  # those of its tuning did not
    assert len(contest({"fine": {}}, seeds=2, budget=Steps(2), dir=tmp_path).frame()) == 2


def test_a_winner_at_the_edge_of_its_grid_is_marked_and_told_once(tmp_path):
    def make(config, batch=64):
        rate = config.optimizer.lr if config.optimizer.lr < 0.15 else 0.01
        return Fake(config.seed, rate=rate, batch=batch)

    arms = {"a": {}, "b": {"make.batch": 64}, "c": {"optimizer.lr": 0.2}}
    kw = {"make": make, "seeds": [0], "budget": Samples(256), "tune_seeds": [9]}
    kw |= {"tune": {"optimizer.lr": [0.05, 0.1, 0.2], "make.batch": [64, 128]}}
    kw |= {"store": tmp_path / "s.json", "dir": tmp_path / "d"}
    with pytest.warns(UserWarning) as told:
        study = compare(arms, **kw)
    (told,) = [t for w in told if "edge" in (t := str(w.message))]
    assert "make.batch=64 of [64, 128] for 'a'" in told and "lr" not in told and "'b'" not in told
    text = str(study.table())
    assert "64 (edge)" in text and "At the edge of the grid of make.batch: a, c." in text
    won = study.tuning().query("chosen").set_index("variant")
    assert won["optimizer.lr"].to_dict() == {"a": 0.1, "b": 0.1, "c": 0.2}
    assert won["edge"].to_dict() == {"a": True, "b": False, "c": True}
    page = study.report(tmp_path / "r.html").read_text()
    assert page.count("<td>True</td>") == 5  # three chosen, two of them at an edge
    with warnings.catch_warnings(action="error"):  # a study from its file says it in the table
        assert "At the edge" in str(compare(arms, **kw).table())


def test_stored_studies_of_the_tutorials_are_read():
    files = [f for f in (ROOT / "studies").glob("*.json") if "spec" in json.loads(f.read_text())]
    for file in files:
        study = Study.load(file)
        assert len(study.frame()) and "P(higher)" in str(study.table())
    assert len(files) > 5


# real runs

BASE = {"train_batch_size": 3, "num_generations": 4, "policy": {"max_new_tokens": 8}}
BASE |= {"eval": {"limit": 6, "samples": 2}}
BASE |= {"tasks": {"train": "data:tasks/middle_dev.jsonl", "eval": "data:tasks/easy_eval.jsonl"}}


def test_real_runs_share_their_start_and_their_tasks(tmp_path):
    arms = {"K=1": {}, "K=2": {"update.num_epochs": 2}}
    study = compare(arms, BASE, seeds=[3], budget=Samples(24), dir=tmp_path)
    frame = study.frame()
    assert frame["n_rollouts_generated"].tolist() == [24, 24] and frame["step"].tolist() == [2, 2]
    assert frame["optimizer_steps"].tolist() == [2, 4]
    states = {Run.open(p).status["state"] for p in tmp_path.glob("report-*/run")}
    assert states == {"finished"}
    one, two = (r["curve"] for r in study.runs)
    assert one["reward"][1] == two["reward"][1]  # the first batch is the same
    assert one["eval_sampled"][0] == two["eval_sampled"][0]
    assert study.spec["base"]["train_batch_size"] == 3 and "seed" not in study.spec["base"]


@pytest.mark.filterwarnings("error::UserWarning")
def test_a_variant_about_rewards_is_judged_by_the_base(tmp_path):
    long = {"rewards.functions.long": {"reward": "length_target", "target": 8}}
    arms = {"base": {"optimizer.lr": 1e-30}, "longer": long | {"optimizer.lr": 1e-30}}
    study = compare(arms, BASE, seeds=[0], budget=Steps(1), dir=tmp_path)
    a, b = study.frame()["eval_sampled"]
    assert a == b  # nothing was learned, and the second reward does not count
    rewards = [r["curve"]["reward"][1] for r in study.runs]
    assert rewards[1] > rewards[0]
    own = {"evaluate": lambda trainer: {"eval_x": sum(trainer.evaluate().metrics().values())}}
    own |= {"metric": "eval_x", "dir": tmp_path / "own", "seeds": [0], "budget": Steps(1)}
    frame = compare(arms, BASE, **own).frame()  # judged as a variant asks, before and after
    assert frame["eval_x"].tolist() == frame["start_eval_x"].tolist()


def test_a_run_that_was_cut_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    def job(folder):
        spec = Spec({"a": {}}, BASE, [0], Steps(4), eval_every=Steps(1), dir=tmp_path / folder)
        return plan_runs(spec, {"a": {}})[0]

    step, count = GRPO.step, []

    def interrupted(self, *args, **kw):
        count.append(1)
        if len(count) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kw)

    monkeypatch.setattr(GRPO, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_job(job("cut"))
    assert not (job("cut").dir / "result.json").exists()
    done = len(count)
    again, whole = run_job(job("cut")), run_job(job("whole"))
    assert again["status"] == "done", again["error"]
    assert len(count) - done <= 4 - 1 + 4  # the first steps were not repeated
    assert not (job("whole").dir / "run" / "checkpoints").exists()  # nothing is left to resume
    for k in ("reward", "eval_sampled", "n_rollouts_generated", "grad_norm", "step"):
        assert whole["curve"][k] == again["curve"][k], k
    spent = again["curve"]["cpu_seconds"]
    assert len(spent) == 5 and spent == sorted(set(spent))  # of both attempts


NOTEBOOK = """
import sys
from functools import partial
from grpo_nb.all import *
from grpo_nb.lab.compare import Workers

SCALE = float(sys.argv[2])

def halved(x):
    return SCALE * x

def mine(rewards, group_N):
    return halved(rewards.sum(1) - 0.5)

@ADVANTAGES.register("registered")
def registered(*args, **kw):
    return ADVANTAGES["grpo"](*args, **kw)

def ends_with_7(completion, end="7"):
    return float(completion.endswith(end))

def five(completion):  # of the base, so all are judged by it
    return 5.0

class Backwards(BaseSelector):
    def pick(self, batch_size):
        return self.num_tasks - 1 - self.places(batch_size)

def any_right(rollout, config):
    return group_stats(rollout.rewards[:, 0], Groups.of(rollout.group_N)).mean > 0

arms = {
    "registered": {"advantage.mode": "registered"},
    "estimator": {"advantage.mode": mine, "update.loss.policy_loss": lambda x, a: -x.exp() * a},
    "reward": {"rewards.functions": {"seven": partial(ends_with_7, end=sys.argv[3])}},
    "selector": {"tasks.selector": Backwards},
    "rule": {"filter_groups.enable": True, "filter_groups.rule": any_right, "filter_groups.log_format": None},
}
if __name__ == "__main__":
    base = {"policy": {"max_new_tokens": 8}, "train_batch_size": 3, "num_generations": 2}
    base |= {"eval": {"limit": 2, "samples": 1, "greedy": False}, "rewards.functions": {"five": five}}
    base |= {"tasks": {"train": "data:tasks/middle_dev.jsonl", "eval": "data:tasks/easy_eval.jsonl"}}
    with Workers(1) as executor:
        executor = executor if sys.argv[4] else None
        study = compare(arms, base, seeds=1, budget=Steps(1), dir=sys.argv[1], executor=executor)
    assert set(study.frame()["eval_sampled"]) == {5.0}
    print(*(r["key"] for r in study.runs))
    print(*(r["curve"]["reward"][1] for r in study.runs))
"""


def test_parts_of_a_notebook_reach_workers_and_only_what_was_edited_is_trained_again(tmp_path):
    "Functions and classes of the main module, in worker processes, by nothing but their variant."

    def study(*given):
        script, argv = tmp_path / "notebook.py", (tmp_path / "d", *given)
        run = (runpy.run_path, str(script), None, "__main__")
        said = forked.run(tmp_path / "out", *run, argv=argv)
        *told, keys, rewards = said.strip().splitlines()
        return keys.split(), rewards.split(), sum(t[0] == "[" for t in told)  # a line a run

    (tmp_path / "notebook.py").write_text(NOTEBOOK)
    keys, _, trained = study("0.5", "7", "in a worker")
    assert trained == 5 and len(set(keys)) == 5
    # what the estimator uses, and what a partial holds, is another
    edited, rewards, trained = study("0.25", "", "")
    assert [a == b for a, b in zip(keys, edited)] == [True, False, False, True, True]
    assert float(rewards[2]) == 1.0 and trained == 2


def sleep_in_workers(where):
    def make(config):
        def fit(steps):
            open(os.path.join(where, f"pid-{os.getpid()}"), "w").close()
            time.sleep(600)

        score = lambda: {"eval_sampled": 0.5}
        return SimpleNamespace(history=[], callbacks=[], fit=fit, evaluate=score)

    compare({"a": {}}, make=make, seeds=2, budget=Steps(1), dir=where + "/d", workers=2)


def processes_of(mark):
    "Living processes whose environment has the mark."
    running = psutil.process_iter(["environ", "status"])
    marked = [p.info for p in running if (p.info["environ"] or {}).get("MARK") == mark]
    return [p for p in marked if p["status"] != psutil.STATUS_ZOMBIE]


@pytest.mark.parametrize(
    "how,when",
    [(signal.SIGKILL, 0.0), (signal.SIGKILL, 1.5), (signal.SIGTERM, None), (signal.SIGINT, None)],
)  # seconds after the first worker has begun; None: in the middle of the runs
def test_no_worker_outlives_the_study(tmp_path, how, when):
    mark = str(tmp_path)
    parent = forked.start(tmp_path / "out", sleep_in_workers, mark, env={"MARK": mark})
    begun = lambda: processes_of(mark) if when is not None else [*tmp_path.glob("pid-*")]
    assert forked.wait_for(lambda: len(begun()) >= 2)  # loky's tracker, a worker
    time.sleep(when or 0)
    os.kill(parent.pid, how)
    parent.join(120)
    assert parent.exitcode is not None
    assert forked.wait_for(lambda: not processes_of(mark))
    assert not list(tmp_path.glob("d/*/result.json"))  # being ended is no result


def test_that_somebody_else_writes_a_run_is_no_result(tmp_path):
    kw = {"variants": {"a": {}}, "base": BASE, "seeds": 2, "budget": Steps(1)}
    kw |= {"dir": tmp_path / "d", "store": tmp_path / "s.json"}
    spec = Spec({"a": {}}, BASE, 2, Steps(1), dir=tmp_path / "d")
    taken = plan_runs(spec, {"a": {}})[1].dir / "run"
    with Run.create(taken), pytest.raises(RunLocked, match="is being written by"):
        compare(**kw)
    assert not (tmp_path / "s.json").exists() and not (taken.parent / "result.json").exists()
    with Lock(tmp_path / "d" / "study.lock"), pytest.raises(RunLocked):  # a study at a time
        compare(**kw)
    shutil.rmtree(taken)
    assert [r["status"] for r in compare(**kw).runs] == ["done", "done"]


# a study carried out by somebody else's workers: the same numbers, and a lost worker is no failed run

RATES = {"slow": 1e-5, "fast": 1e-3}


def rates(folder, variants=("slow", "fast"), **kwargs):
    variants = {name: {"optimizer.lr": RATES[name]} for name in variants}
    return compare(variants, BASE, seeds=[1], budget=Samples(24), dir=folder, **kwargs)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return numbers(rates(tmp_path_factory.mktemp("here")).runs)


def test_workers_of_dask_give_the_same_numbers_also_when_one_is_killed(alone, tmp_path):
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")

    def submit(function, job):
        def die_once(flag):
            if not flag.exists():
                flag.write_text("")
                os.kill(os.getpid(), signal.SIGKILL)
            return function(job)

        return client.submit(die_once, tmp_path / "died")

    how = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        distributed.utils.get_mp_context()
        forked.FORKS.set_forkserver_preload(forked.LOADED.split())  # it had others loaded
        with distributed.LocalCluster(1, **how) as cluster, distributed.Client(cluster) as client:
            before = set(client.run(os.getpid).values())
            there = rates(tmp_path / "study", ["slow"], executor=SimpleNamespace(submit=submit))
            assert set(client.run(os.getpid).values()) != before
            own = rates(tmp_path / "own", ["fast"], executor=client)
    assert [r["status"] for r in there.runs] == ["done"]
    assert numbers([*there.runs, *own.runs]) == alone


def test_jobs_of_submitit_give_the_numbers_of_this_process(alone, tmp_path):
    submitit = pytest.importorskip("submitit")
    executor = submitit.AutoExecutor(folder=tmp_path / "logs", cluster="local")
    executor.update_parameters(timeout_min=5)
    assert numbers(rates(tmp_path / "study", ["fast"], executor=executor).runs) == alone[1:]


class Lossy:
    "An executor that loses the first `losses` jobs it is given."

    def __init__(self, losses):
        self.losses, self.submitted = losses, 0

    def submit(self, function, job):
        self.submitted, future = self.submitted + 1, Future()
        if self.submitted <= self.losses:
            future.set_exception(ConnectionError("the node is gone"))
        else:
            future.set_result(function(job))
        return future


def test_a_lost_run_is_tried_three_times(alone, tmp_path):
    executor = Lossy(2)
    assert numbers(rates(tmp_path / "a", ["slow"], executor=executor).runs) == alone[:1]
    assert executor.submitted == 3
    with pytest.raises(ConnectionError, match="the node is gone"):
        rates(tmp_path / "b", executor=Lossy(99))
