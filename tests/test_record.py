"""The run directory under faults: torn lines, full disks, kills, two writers, resumes, a mirror that fails."""

import gc
import itertools
import math
import os
import shutil
import signal
import sys
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import MagicMock

import forked
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.files import Lock, RunLocked, _json_line, _repair_tail, read_jsonl, write_atomic
from grpo_nb.lab import record
from grpo_nb.lab.diagnosis import diagnose
from grpo_nb.lab.frames import _metric_row
from grpo_nb.lab.plots import plot_run
from grpo_nb.lab.recipe import load_config
from grpo_nb.lab.record import Run


@pytest.fixture(autouse=True)
def no_wandb_mode(monkeypatch):
    monkeypatch.delenv("WANDB_MODE", raising=False)


NAME = st.text(min_size=1, max_size=5).filter(lambda k: k != "step")
NUMBER = st.one_of(st.floats(), st.integers(-(2**60), 2**60), st.booleans(), st.none())


@settings(max_examples=25, deadline=None)
@given(st.lists(st.dictionaries(NAME, NUMBER, max_size=4), max_size=6))
def test_rows_survive_writing_and_reading(tmp_path_factory, metrics):
    path = tmp_path_factory.mktemp("rows") / "m.jsonl"
    path.write_bytes(b"".join(_json_line(_metric_row(i, m)) for i, m in enumerate(metrics)))
    rows, broken = read_jsonl(path)
    assert not broken and len(rows) == len(metrics)
    for i, (row, m) in enumerate(zip(rows, metrics)):
        lost = {k for k, v in m.items() if isinstance(v, float) and not math.isfinite(v)}
        assert repr(row) == repr({"step": i} | {k: None if k in lost else v for k, v in m.items()})


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 200))
def test_a_file_cut_anywhere_keeps_every_whole_row(tmp_path_factory, n, cut):
    lines = [_json_line({"step": i, "text": "x" * i}) for i in range(n)]
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    data = b"".join(lines)[:cut]
    path.write_bytes(data)
    last, _ = _repair_tail(path)
    rows, broken = read_jsonl(path)
    # a line whose newline is missing is whole too
    expected = [i for i in range(n) if sum(map(len, lines[: i + 1])) - 1 <= len(data)]
    assert not broken and [r["step"] for r in rows] == expected
    assert (last and last["step"]) == (expected[-1] if expected else None)


class Faulty:
    "A file whose disk is full for some calls, which write a part all the same."

    def __init__(self, file, fails):
        self.file, self.fails, self.calls = file, fails, 0
        self.fileno, self.close = file.fileno, file.close

    def write(self, data):
        self.calls += 1
        if self.calls not in self.fails:
            return self.file.write(data)
        n = self.file.write(data[:7])
        if self.calls % 2:
            return n
        raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fails", [{1}, {2}, {1, 2, 3}, {5, 6}, range(99)], ids=str)
def test_rows_that_a_full_disk_refused_are_written_when_they_can_be(tmp_path, fails):
    with Run.create(tmp_path / "whole") as whole:
        for step in range(1, 7):
            whole.log(step, {"reward": step / 7})
    run = Run.create(tmp_path / "r")
    for name in ("metrics", "events"):
        run._files[name].file = Faulty(run._files[name].file, fails)
    with pytest.warns(UserWarning, match=r"metrics.jsonl cannot be written \(.*\): its rows wait"):
        for step in range(1, 7):
            run.log(step, {"reward": step / 7})
            with warnings.catch_warnings(action="error"):
                assert read_jsonl(tmp_path / "r/metrics.jsonl")[1] == []  # never half a line
            run.event("note", step=step)
    if 98 in fails:  # to the end: that is told
        with pytest.raises(OSError, match="(No space|bytes fitted).*jsonl"):
            run.close()
        assert Run.create(tmp_path / "r", if_exists="resume")._last is None  # and the lock is free
        return
    run.close()
    both = [(tmp_path / d / "metrics.jsonl").read_bytes() for d in ("r", "whole")]
    assert both[0] == both[1]
    assert [e for e in run.events().step.dropna()][:6] == [1, 2, 3, 4, 5, 6]


def die_at(n, folder):
    "Killed at the n-th file that is replaced."
    replace, calls = record.write_atomic, itertools.count(1)

    def deadly(*args):
        if next(calls) == n:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(*args)

    record.write_atomic = deadly
    Run.create(folder, {"seed": 3}, name="mine")


def test_a_run_killed_while_it_was_laid_out_is_completed(tmp_path):
    for n in range(1, 5):  # status, configuration, environment, status
        child = forked.start(tmp_path / "out", die_at, n, tmp_path / str(n))
        child.join()
        assert child.exitcode == -signal.SIGKILL
        with Run.create(tmp_path / str(n), {"seed": 3}, "mine", "resume") as run:
            run.log(1, {"x": 1})
        assert run.config == {"seed": 3} and run.environment["seeds"] == 3
        assert (run.name, run.status["state"]) == ("mine", "finished") and run.status["started"]


def test_runs_that_begin_at_once_get_numbers_and_lost_files_are_said(tmp_path, monkeypatch):
    free = record._free_folder
    late = iter([tmp_path / "r"])  # another has taken it since it was looked at
    monkeypatch.setattr(record, "_free_folder", lambda *a: next(late, None) or free(*a))
    with Lock(tmp_path / "r/lock"):
        run = Run.create(tmp_path / "r", if_exists="number")
    assert run.dir.name == "r-2"
    run.log(0, {"x": 0})
    edited = shutil.copy(run.dir / "metrics.jsonl", tmp_path / "edited")
    os.replace(edited, run.dir / "metrics.jsonl")  # as an editor saves
    run.log(1, {"x": 1})
    assert len(run.frame()) == 2
    shutil.rmtree(run.dir)
    with pytest.warns(UserWarning, match="metrics.jsonl cannot be written .* it was deleted"):
        run.log(2, {"x": 1})


def test_resume_reports_what_changed_in_the_configuration(tmp_path):
    f = "<passed: {}.mine 0123456789ab>".format  # the same function of a script, and imported
    config = {"lr": 1.0, "loss": {"clip": 0.2}, "reward": f("__main__")}
    Run.create(tmp_path / "r", config).close()
    with pytest.warns(UserWarning, match="differs from the run's in: loss.clip$"):
        config |= {"loss": {"clip": 0.3}, "reward": f("a.b")}
        run = Run.create(tmp_path / "r", config, if_exists="resume")
    run._note_changes(config | {"loss": {"clip": 0.2}}, {})  # as it was
    run.close()
    changed = run.events().query("kind == 'config_changed'").changes.tolist()
    assert changed == [{"loss.clip": [0.2, 0.3]}, {}] and run.config["loss"]["clip"] == 0.2


@pytest.mark.parametrize("cut", range(0, 8))
def test_resume_at_every_step_gives_the_same_bytes(tmp_path, cut):
    def log(run, steps):
        for step in steps:
            run.log(step, {"reward": step / 7, "kl": [0.1 * step, math.nan]})
            run.log_samples(step, [dict(group=0, prompt="p", completion=str(step), reward=1.0)])

    with Run.create(tmp_path / "whole") as whole:
        log(whole, range(1, 8))
    with Run.create(tmp_path / "cut") as run:
        log(run, range(1, min(cut + 3, 8)))  # logged further than the checkpoint
    with open(tmp_path / "cut/metrics.jsonl", "ab") as f:
        f.write(b'{"step":9,"rewa')
    with Run.open(tmp_path / "cut") as run:
        run.truncate_after(cut)
        log(run, range(cut + 1, 8))
    for name in ("metrics.jsonl", "samples.jsonl"):
        cut_bytes, whole_bytes = ((tmp_path / d / name).read_bytes() for d in ("cut", "whole"))
        assert cut_bytes == whole_bytes
    assert not list((tmp_path / "cut").glob(".*"))


def test_reading_takes_no_lock_and_writes_nothing(tmp_path):
    with Run.create(tmp_path / "r") as run:
        run.log(1, {"reward": 1.0})
        run.log_samples(1, [dict(prompt="p", completion="c", reward=1.0, advantage=0.0)])
    before = {p.name: p.read_bytes() for p in run.dir.iterdir()}
    again = Run.open(run.dir)
    again.frame(), again.events(), again.samples(), again.config, again.status
    plot_run(again), diagnose(again), repr(again)
    assert {p.name: p.read_bytes() for p in run.dir.iterdir()} == before


@pytest.mark.parametrize("text", ["update: [1]", "update: {kl_stop: true}", "update: {kl_stop: {target: x}}", "[" * 3000, "{a: ["])  # fmt: skip
def test_a_configuration_of_another_shape_stops_no_reading(tmp_path, text):
    with Run.create(tmp_path / "r") as run:
        run.log(1, {"reward": 1.0})
    deep = "[" * 100_000
    for name, damage in {"config.yaml": text, "status.json": deep, "events.jsonl": deep}.items():
        (run.dir / name).write_text(damage)
    with warnings.catch_warnings(action="ignore"):
        assert Run.open(run.dir).frame().reward.tolist() == [1.0] and len(run.events()) == 0


def test_checkpoints_that_lead_into_another_run_are_left_alone(tmp_path):
    Run.create(tmp_path / "a").close()
    Run.create(tmp_path / "b").close()
    (tmp_path / "b/checkpoints").symlink_to(tmp_path / "a/checkpoints")
    with pytest.raises(ValueError, match="leads into the run"):
        Run.create(tmp_path / "b", if_exists="resume")


def test_missing_and_doubled_rows_are_said(tmp_path):
    with Run.create(tmp_path / "r") as run:
        run.log(1, {"x": 1})
        with pytest.warns(UserWarning, match="after step 5, but its metrics end at 1"):
            run.truncate_after(5)
        run._files["metrics"].write([{"step": 1, "x": 2}])  # as an editor would
        with pytest.warns(UserWarning, match="several rows of a step"):
            run.truncate_after(1)
    assert run.events().about.dropna().tolist() == ["missing_rows", "twice"]
    assert run.rows()[0] == [{"step": 1, "x": 2}]


def write(folder):
    run = Run.create(folder, {"a": 1})
    for step in itertools.count(1):
        run.log(step, {f"m{i}": step / 7 for i in range(60)})


@pytest.mark.parametrize("wait", [0.0, 0.021])
def test_kill_while_writing(tmp_path, wait):
    child = forked.start(tmp_path / "out", write, tmp_path / "r")
    file = tmp_path / "r/metrics.jsonl"
    begun = lambda: file.exists() and len(read_jsonl(file)[0]) >= 20
    assert forked.wait_for(lambda: begun() or not child.is_alive()) and child.is_alive()
    with pytest.raises(RunLocked, match=f"process {child.pid}"):
        Run.open(tmp_path / "r").log(10**9, {})
    time.sleep(wait)
    child.kill()
    child.join()
    with open(file, "ab") as f:
        f.write(b'{"step":999999,"m0":0.1')  # the kill came in the middle of a line
    with pytest.warns(UserWarning, match=r"left out 1 broken: line \d+ \(the last\)"):
        n = len(Run.open(tmp_path / "r").frame())
    assert n >= 20
    with Run.create(tmp_path / "r", if_exists="resume") as run:
        run.log(n + 1, {"m0": 0.0})
    frame = run.frame()
    assert frame.step.tolist() == list(range(1, n + 2)) and not frame.attrs["broken_lines"]
    kinds = run.events().query("kind != 'environment_changed'").kind.tolist()  # other threads
    assert kinds == ["start", "resume", "broken_line", "close"]
    assert run.events().was[1] == "running"  # nobody closed it


def test_lock_goes_with_the_object(tmp_path):
    run = Run.create(tmp_path / "r")
    del run  # a notebook variable that was overwritten
    gc.collect()
    with Run.create(tmp_path / "r", if_exists="resume") as run:
        assert run.events().kind.tolist() == ["start", "resume"]


def test_any_thread_writes_and_closes_a_run(tmp_path):
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(Run.create, tmp_path / "r").result()
        run.log(1, {"x": 1})
        pool.submit(run.log, 2, {"x": 2}).result()
    run.close()
    with Run.create(tmp_path / "r", if_exists="resume") as run:
        assert len(run.frame()) == 2 and run.events().kind.tolist()[-2:] == ["close", "resume"]


def test_threads_may_replace_one_file_at_once(tmp_path):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: write_atomic(tmp_path / "x", bytes([i]) * 1000), range(200)))
    assert len(set((tmp_path / "x").read_bytes())) == 1 and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("if_exists", ["raise", "resume"])
def test_a_place_that_is_no_folder_is_named(tmp_path, if_exists):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("later")
    for name in ("file", "file/run", "loop", "x" * 300):
        with pytest.raises(ValueError, match="^run.dir: .* (is no folder|cannot be made)"):
            Run.create(tmp_path / name, if_exists=if_exists)
    Run.create(tmp_path / "link", if_exists=if_exists).close()
    assert (tmp_path / "later/status.json").exists()


def has_a_child(folder):
    run = Run.create(folder)
    if not (pid := os.fork()):
        sys.exit(0)
    os.waitpid(pid, 0)
    with pytest.raises(RunLocked):
        Run.open(run.dir).log(1, {})
    print("held")


def test_a_forked_child_does_not_release_the_lock(tmp_path):
    assert forked.run(tmp_path / "out", has_a_child, tmp_path / "r") == "held\n"
    with Run.create(tmp_path / "r", if_exists="resume") as run:  # released when the parent ended
        run.log(1, {})


@pytest.mark.parametrize("fails", ["init", "log", "finish", None])
def test_failing_wandb_never_stops_training(tmp_path, monkeypatch, fails):
    stub = MagicMock(id="abc")
    stub.init.return_value, stub.Table = stub, lambda columns, data, **_: (columns, data)
    if fails:
        getattr(stub, fails).side_effect = ConnectionError("gone")
    monkeypatch.setitem(sys.modules, "wandb", stub)
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    with warnings.catch_warnings(record=True, action="always") as caught:
        with Run.create(tmp_path / "r", {"a": 1}, wandb="offline") as run:
            for step in (1, 2, 3):
                run.log(step, {"reward": 0.5, "kl_old": [0.1, 0.2]})
                run.log_samples(step, [dict(group=0, completion="c", rewards={"acc": 1.0})])
    assert len(run.frame()) == 3 and run.status["state"] == "finished"
    told = [str(w.message) for w in caught if "wandb" in str(w.message)]
    assert len(told) == (1 if fails else 0) == (run.events().kind == "warning").sum()
    told = {k: stub.init.call_args.kwargs[k] for k in ("project", "reinit")}
    assert told == {"project": "mine", "reinit": "create_new"}  # not that of another run
    if fails is None:
        sent = [call.args[0] for call in stub.log.call_args_list]
        assert sent[0]["kl_old/1"] == 0.2 and run.status["wandb_id"] == "abc"
        assert sent[1]["samples"][0] == ["step", "group", "completion", "rewards/acc"]


def test_tensorboard_shows_each_step_once_also_after_a_resume(tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with Run.create(tmp_path / "r", tensorboard=True) as run:
        for step in (1, 2, 3):
            run.log(step, {"reward": step / 4, "kl_old": [0.1, 0.2], "none": float("nan")})
    with Run.create(tmp_path / "r", if_exists="resume", tensorboard=True) as run:
        run.truncate_after(2)
        run.log(3, {"reward": 9.0})
    shown = EventAccumulator(str(tmp_path / "r/tensorboard")).Reload()
    assert [(x.step, x.value) for x in shown.Scalars("reward")] == [(1, 0.25), (2, 0.5), (3, 9.0)]
    assert shown.Tags()["scalars"] == ["reward", "kl_old/0", "kl_old/1"]
    shutil.rmtree(tmp_path / "r/tensorboard")  # killed before it wrote
    (tmp_path / "r/status.json").write_text('{"state": "running"}')
    with Run.create(tmp_path / "r", if_exists="resume", tensorboard=True) as run:
        run.truncate_after(2)
    shown = EventAccumulator(str(tmp_path / "r/tensorboard")).Reload()
    assert [x.step for x in shown.Scalars("reward")] == [1, 2]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ValueError, match="pip install tensorboard"):
        Run.create(tmp_path / "s", tensorboard=True)
    with pytest.raises(ValueError, match="pip install tensorboard"):  # before a model is loaded
        load_config(None, ["policy.model=nowhere", "run.tensorboard=true"])
    assert not (tmp_path / "s").exists()


def fail_with_secrets(folder):
    os.chdir(folder)
    config = {"judge": {"api_key": "k3y value"}, "url": "https://me:p4ssw0rd@host"}
    config |= {"seed": {"pwd": "s33d"}}
    with Run.create("r", config, "token=n4mevalue", wandb="offline") as run:
        run.log(1, {"reward": 1.0})
        run.log_samples(1, [dict(group=0, prompt="p", completion="<b>", reward=1.0)])
        run.warn("judge", "401: key k3y value refused", tried=["--token", "fl4gvalue"])
        raise RuntimeError("https://me:p4ssw0rd@host said no to k3y value")


def test_a_run_directory_holds_no_secret_and_no_person(tmp_path):
    "Of the configuration, the command line, the environment and what errors say; wandb's files too."
    given = {"env": {"MY_SECRET": "s3cret-value", "WANDB_MODE": "offline"}}
    given |= {"argv": ["api_key=c0mmandline"]}
    forked.start(tmp_path / "out", fail_with_secrets, tmp_path, **given).join()
    run = Run.open(tmp_path / "r")
    assert "RuntimeError" in (tmp_path / "out").read_text() and run.status["state"] == "failed"
    assert run.events().about.dropna().tolist() == ["judge"]  # and nothing about wandb
    files = [p for p in (tmp_path / "r").rglob("*") if p.is_file()]
    assert find_spec("wandb") is None or any(p.suffix == ".wandb" for p in files)
    secrets = "k3y value,p4ssw0rd,s3cret-value,c0mmandline,n4mevalue,s33d,fl4gvalue".split(",")
    for path in files:
        home = [] if "wandb" in path.parts else [str(Path.home()) + "/"]  # where wandb keeps tables
        for secret in (*secrets, *home):
            assert secret.encode() not in path.read_bytes(), (path, secret)
