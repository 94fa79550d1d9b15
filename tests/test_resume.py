"Checkpoints and resume of the real trainer: every cut, every fault, kills."

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from unittest.mock import MagicMock

import forked
import kill_train
import pytest
import torch
from resumed import differences

from grpo_nb.evaluate import Scores
from grpo_nb.files import RunLocked, read_jsonl
from grpo_nb.lab import checkpoint, progress, record, session
from grpo_nb.lab.checkpoint import CheckpointError, _check_seal, checkpoints, latest
from grpo_nb.lab.checkpoint import read_state
from grpo_nb.lab.recipe import load_config
from grpo_nb.processes import ProcessLost
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO

SMALL = ["run.progress=false", "policy.max_new_tokens=6", "num_generations=4", "train_batch_size=4", "steps=5", "run.samples_every=1",
         "tasks.train=data:tasks/middle_dev.jsonl", "tasks.eval=data:tasks/easy_eval.jsonl"]  # fmt: skip


def thirds(completion, **columns):
    return (len(completion) % 3) / 2


MADE = weakref.WeakSet()


@pytest.fixture(autouse=True)
def close_all():
    yield
    for trainer in list(MADE):
        trainer.close()


def make(folder, *more, **parts):
    config = load_config(None, [*SMALL, *more, *([f"run.dir={folder}"] if folder else [])])
    MADE.add(trainer := GRPO.from_config(config, **{"rewards": {"thirds": thirds}} | parts))
    return trainer


def load(folder, overrides=(), **parts):
    MADE.add(trainer := GRPO.load(folder, overrides, rewards={"thirds": thirds}, **parts))
    return trainer


def at_sample(n, act):
    "A reward that does something at its n-th sample; a step has 16."
    calls = itertools.count(1)

    def reward(completion, **columns):
        if next(calls) == n:
            act()
        return thirds(completion)

    return {"thirds": reward}


def press(name="SIGINT"):
    os.kill(os.getpid(), getattr(signal, name))


def fail(error):
    raise error


def test_the_state_of_another_optimizer_is_refused_before_anything_changes():
    held, trainer = make(None).fit(1).state_dict(), make(None)
    before = [p.detach().clone() for p in trainer.policy.parameters()]
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), 1.0)
    with pytest.raises(ValueError, match="of another optimizer: only one of the two has amsgrad"):
        trainer.load_state_dict(held)
    assert all(map(torch.equal, before, trainer.policy.parameters()))
    trainer = make(None)
    trainer.optimizer = torch.optim.AdamW([*trainer.policy.parameters()][:3])
    with pytest.raises(ValueError, match=r"only one of the two has groups of \[\d+\] weights, gr"):
        trainer.load_state_dict(held)


SUMS = Taskset.load(data_path("tasks/middle_train.jsonl"))


class Counts:
    n = 0

    def on_step_end(self, trainer, row):
        self.n += 1

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


def test_what_cannot_go_on_is_told_or_refused(tmp_path):
    more, stream = type("More", (Counts,), {}), SimpleNamespace(read=lambda n: SUMS[:n])
    made = make(tmp_path / "r", callbacks=[Counts(), more()], tasks=stream).fit(1)
    made.close()
    with pytest.raises(ValueError, match=r"were \['Counts', 'More'\], and are now \['More'\]"):
        load(tmp_path / "r", callbacks=[more()], tasks=stream)
    with pytest.warns(UserWarning, match="has no state_dict and load_state_dict, so it does not"):
        assert load(tmp_path / "r", callbacks=[Counts(), more()], tasks=stream).callbacks[0].n == 1
    offers = "sample", "logp", "parameters"
    made.policy = SimpleNamespace(**{k: getattr(made.policy, k) for k in offers})
    with pytest.raises(CheckpointError, match="has no state_dict: a checkpoint would hold no weig"):
        made.save(tmp_path / "other")


def rows(trainer):
    return read_jsonl(trainer.run.dir / "metrics.jsonl")[0]


def test_resuming_twice_and_with_another_batch_size(tmp_path):
    whole = make(tmp_path / "whole").fit()
    make(tmp_path / "cut").fit(1).close()
    for _ in range(2):  # steps 2 and 3
        load(tmp_path / "cut").fit(1).close()
    with pytest.warns(UserWarning, match="effect: run.if_exists"):
        last = load(tmp_path / "cut", ["run.name=other", "run.if_exists=raise"]).fit()
    assert differences(whole, last) == [] and last.run.name == "other"
    a = make(None).fit(2)
    other = make(None, "train_batch_size=7")
    other.load_state_dict(a.state_dict())
    drawn = [t.index for t in other.stream.read(7)]
    assert drawn == [t.index for t in make(None).stream.read(15)][8:]  # none twice, none left out


@pytest.mark.parametrize("made, now, said", [
    ("seed=0", "seed=7", "^seed=7: the run goes on with the generators of its own, seed=0"),
    ("tasks.epochs=null", "tasks.epochs=9", "of another kind of stream: give tasks.selector"),
    ("tasks.selector=random", "tasks.selector=null", "of another kind of stream"),
    ("tasks.selector=random", "tasks.selector=greso", "holds no p, streak, tasks, walk"),
])  # fmt: skip
def test_what_a_checkpoint_decides_is_refused(made, now, said, tmp_path):
    make(tmp_path / "r", made).fit(1).close()
    with pytest.raises(ValueError, match=said):
        load(tmp_path / "r", [now])
    with pytest.raises(ValueError, match=said):
        make(tmp_path / "r", now, "run.if_exists=resume").fit()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_the_signals_stop_between_steps_and_fit_goes_on(tmp_path, name):
    t = make(tmp_path / "r", rewards=at_sample(20, lambda: press(name))).fit()
    assert (t.step_done, t.interrupted) == (2, name)
    assert _check_seal(latest(t.run.dir / "checkpoints"))["step"] == 2
    t.fit()
    assert t.step_done == 5 and t.interrupted is None
    whole = make(tmp_path / "whole").fit()
    assert torch.equal(*(x.policy.state_dict()["lm_head.weight"] for x in (t, whole)))


def test_a_reward_ends_its_own_processes_and_may_leave_without_a_folder(tmp_path, monkeypatch):
    def leave():
        child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
        child.start()
        time.sleep(0.5)  # before that Python has no handlers there
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        (tmp_path / "gone").mkdir()
        monkeypatch.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()

    t = make(tmp_path / "r", rewards=at_sample(20, leave)).fit()
    assert (t.interrupted, _check_seal(latest(t.run.dir / "checkpoints"))["step"]) == (None, 5)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="not written to .*: call open_run"):
        make(tmp_path / "own").step()


def test_a_signal_that_comes_while_processes_agree_is_not_lost(monkeypatch):
    t = make(None)

    def slow_gather(value):
        t.stop = "SIGINT"
        return [value]

    monkeypatch.setattr("grpo_nb.trainer.gather", slow_gather)
    assert (t._agree(), t._agree()) == (True, False)
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("grpo_nb.trainer.gather", MagicMock(side_effect=ProcessLost))
    with pytest.raises(ProcessLost):
        t.fit()
    os.kill(os.getpid(), signal.SIGTERM)  # as a launcher does: there is still something to say
    t.session.around.close()
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_finished_run_has_nothing_left_to_do(tmp_path, capsys):
    make(tmp_path / "r").fit().close()
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "r" / "checkpoints").rglob("*")}
    again = make(tmp_path / "r", "run.if_exists=resume")
    with pytest.warns(UserWarning, match="of the weights before the run in .*open_run"):
        again.evaluate([{"prompt": "<bos>1="}], 1)
    with warnings.catch_warnings(action="error"):
        again.fit().evaluate([{"prompt": "<bos>1="}], 1)
    assert "Nothing left to do: 5 of 5" in capsys.readouterr().out
    again.close()
    assert len(rows(again)) == 5 and all(p.stat().st_mtime_ns == t for p, t in before.items())
    longer = load(tmp_path / "r", ["steps=6"]).fit()
    assert [r["step"] for r in rows(longer)] == [1, 2, 3, 4, 5, 6]


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path):
    t = make(tmp_path / "r", "checkpoint.every=1", "checkpoint.keep_last=3").fit()
    t.close()
    newest, before, _ = checkpoints(tmp_path / "r" / "checkpoints")
    f = newest / "policy.safetensors"
    f.write_bytes(f.read_bytes()[:-5])
    with pytest.warns(UserWarning, match="policy.safetensors has .* bytes instead of"):
        again = load(tmp_path / "r")
    assert again.step_done == 4
    again.fit().close()
    assert differences(t, again) == [] and newest.exists()
    data = bytearray((before / "optimizer.safetensors").read_bytes())
    data[-1] ^= 1
    (before / "optimizer.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="optimizer.safetensors was changed"):
        load(before)
    (before / "manifest.json").unlink()
    with pytest.raises(ValueError, match="No whole checkpoint"):
        load(before)


def test_the_best_checkpoint_is_kept_though_no_other_was_due(tmp_path, monkeypatch):
    scores = iter([0.1, 0.9, 0.3])
    one = lambda *a: Scores({"sampled": (next(scores),) * 3}, 1, 1)
    monkeypatch.setattr(GRPO, "evaluate", one)
    best = "eval.every=1", "checkpoint.keep_best=1", "checkpoint.keep_last=1"
    kept = checkpoints(make(tmp_path / "a", *best).fit(3).run.dir / "checkpoints")
    assert [p.name[-1] for p in kept] == ["3", "2"]
    with pytest.warns(UserWarning, match="best names none of .*eval_greedy"):
        make(tmp_path / "b", *best, "checkpoint.best=eval_sampled/thirds")  # the only reward


@pytest.mark.parametrize("fault", ["full disk", "no folder", "removal", "rows"])
def test_a_checkpoint_that_fails_is_an_error_at_the_end(fault, tmp_path, monkeypatch, request):
    limits, seen = resource.getrlimit(resource.RLIMIT_FSIZE), []
    request.addfinalizer(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limits))
    t = make(tmp_path / "r", "checkpoint.every=1", callbacks=[lambda t, row: seen.append(1)])
    t.open_run()
    root = t.run.dir / "checkpoints"
    if fault == "full disk":  # really: safetensors writes on its own
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    elif fault == "no folder":
        root.write_text("in the way")
    elif fault == "removal":
        monkeypatch.setattr(session, "prune", lambda *a: io.FileIO("/dev/full", "wb").write(b"x"))
    else:
        real = t.run._files["metrics"].file
        full = MagicMock(write=io.FileIO("/dev/full", "wb").write, fileno=real.fileno)
        monkeypatch.setattr(t.run._files["metrics"], "file", full)
    with pytest.warns(UserWarning, match="Training goes on"):
        with pytest.raises((CheckpointError, OSError), match="written|No space"):
            t.fit(2)
    events = read_jsonl(t.run.dir / "events.jsonl")[0]
    assert sum(e["kind"] == "checkpoint_failed" for e in events) == 2  # after every step
    assert t.step_done == len(seen) == 2 and t.run.status["state"] == "failed"
    t.config.checkpoint.on_error = "raise"
    with pytest.raises((CheckpointError, OSError), match="written|No space"):
        t.fit(1)
    if fault != "no folder":
        assert fault != "full disk" or not list(root.iterdir())  # nothing half
        monkeypatch.undo()
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert _check_seal(t.save())["step"] == t.step_done
        assert [r["step"] for r in rows(t)] == list(range(1, t.step_done + 1))
    t.close()
    assert t.run.status["state"] == "failed"


def test_what_cannot_be_stored_ends_no_training(tmp_path):
    odd = MagicMock(state_dict=lambda: {"seen": object()})
    t = make(tmp_path / "r", "checkpoint.every=1", callbacks=[odd])
    fails = pytest.raises(CheckpointError, match="seen holds a object, which cannot be stored")
    with fails, pytest.warns(UserWarning, match="Training goes on"):
        t.fit(2)
    assert t.step_done == 2


def test_options_that_are_no_data_and_a_mask_are_saved(tmp_path):
    config = load_config(None, [*SMALL, f"run.dir={tmp_path / 'r'}"])
    config.policy.lora = {"target_modules": {"q_proj"}}
    t = GRPO.from_config(config, rewards={"thirds": thirds})
    t.policy.model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    assert t.fit(1).save().exists()
    t.close()


@pytest.mark.parametrize("what", ["policy", "optimizer"])
def test_a_state_that_is_not_finite_is_no_checkpoint(what, tmp_path):
    def ruin(t, row):  # the weights themselves, or what only the next update would show
        p = t.policy.parameters()[0]
        held = p.data if what == "policy" else t.optimizer.state[p]["exp_avg"]
        held.view(-1)[3:4].fill_(float("inf"))

    t = make(tmp_path / "r", callbacks=[ruin])
    good = t.save()
    with pytest.raises(CheckpointError, match=f"1 is not finite .{what}.*stays the newest"):
        t.fit(1)
    t.close()
    assert list(good.parent.iterdir()) == [good] and t.run.status["state"] == "failed"


def test_a_run_killed_while_a_checkpoint_was_sealed_goes_on_elsewhere(tmp_path):
    "One lock per run: what a dead host has left stops neither the run nor its checkpoints."
    t = make(tmp_path / "r", "checkpoint.every=1").fit(2)
    t.close()
    root = t.run.dir / "checkpoints"
    here = json.dumps({"pid": 1, "host": "a host that is gone"})
    for lock in (tmp_path / "r" / "lock", root / "lock"):  # the second is of older versions
        lock.write_text(here)
    (root / ".step_00000003.ab").mkdir()
    (root / ".step_00000003.ab" / "manifest.json").write_text("{}")
    (root / "step_00000001").mkdir(exist_ok=True)
    # killed while it was removed
    (root / "step_00000001" / "manifest.json").unlink(missing_ok=True)
    make(tmp_path / "other").fit(1).close()
    (theirs,) = checkpoints(tmp_path / "other" / "checkpoints")
    os.symlink(theirs, root / "step_00000000")
    again = make(tmp_path / "r", "run.if_exists=resume", "checkpoint.every=1")
    with pytest.warns(UserWarning, match="step_00000001' has no manifest.json"):
        again.fit()
    left = sorted(p.name for p in root.iterdir() if p.is_dir())
    assert left == ["step_00000000", "step_00000004", "step_00000005"]
    assert _check_seal(theirs)["step"] == 1 and len(list(theirs.iterdir())) > 1


DAMAGE = {"empty": b"", "torn": b'{"a": [1', "binary": bytes(range(256)), "a list": b"[1, 2]\n"}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_named_and_does_not_stop_a_resume(damage, tmp_path):
    make(tmp_path / "r", "checkpoint.every=1").fit(3).close()
    newest, *_ = checkpoints(tmp_path / "r" / "checkpoints")
    names = ["status.json", "config.yaml", "environment.json"]
    for path in (*(tmp_path / "r" / n for n in names), newest / "manifest.json"):
        path.write_bytes(DAMAGE[damage])
    with open(tmp_path / "r" / "metrics.jsonl", "ab") as f:
        f.write(DAMAGE[damage])
    with warnings.catch_warnings(record=True, action="always") as told:
        t = load(tmp_path / "r")
        assert t.step_done == 2
        t.fit(2).close()
    for name in (*names, f"{newest.name}/manifest.json"):
        assert any(name in str(w.message) and "\n" not in str(w.message) for w in told), name
    assert [r["step"] for r in rows(t)] == [1, 2, 3, 4] and t.run.status["state"] == "stopped"
    assert t.run.config["steps"] == 5 and t.run.environment["seeds"] == 0


def broken_pipe():
    closed, out = os.pipe()
    os.close(closed)
    return open(out, "w")


@pytest.mark.parametrize("mode", ["lines", "terminal"])
@pytest.mark.parametrize("output", [broken_pipe, lambda: open("/dev/full", "w")])
def test_output_never_ends_training(output, mode, tmp_path, monkeypatch):
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, output())
    monkeypatch.setattr(progress, "display_mode", lambda: mode)
    t = make(tmp_path / "r", "run.progress=true", rewards=at_sample(36, press)).fit()  # it prints
    t.fit()
    t.fit()  # nothing is left to do
    t.close()
    assert [r["step"] for r in rows(t)] == [1, 2, 3, 4, 5]
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.close()


def test_a_relative_folder_stays_that_of_the_start_and_lost_rows_are_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    t = make("r", callbacks=[lambda t, row: os.chdir("/")])
    os.chdir("/usr")
    t.fit(3).close()
    path = tmp_path / "r/metrics.jsonl"
    assert len(rows(t)) == 3 and t.run.dir == tmp_path / "r"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[2])
    os.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    again = load("~/r")
    os.chdir("/")
    with pytest.warns(UserWarning, match="its metrics have 2 rows of 3 steps"):
        again.fit(1).close()
    assert [r["step"] for r in rows(again)] == [1, 3, 4]


def test_the_state_that_was_is_what_close_writes(tmp_path):
    def end(name, steps=None, **parts):
        t = make(tmp_path / name, "run.if_exists=resume", **parts)
        with contextlib.suppress(ValueError, KeyboardInterrupt):
            t.fit(steps)
        t.close()
        return t.run.status["state"]

    assert end("a", rewards=at_sample(20, press)) == "interrupted"
    t = make(tmp_path / "a", "run.if_exists=resume")
    t.open_run()  # looked at, and closed again
    t.close()
    assert t.run.status["state"] == "interrupted"
    assert end("a", 1) == "stopped" and end("a") == "finished"
    for error, state in ((ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted")):
        assert end(state, rewards=at_sample(20, lambda error=error: fail(error))) == state
    t = make(tmp_path / "d")
    t.open_run()
    t.step()
    t.close()
    assert t.run.status["state"] == "stopped"


def test_other_versions_are_told_and_another_policy_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as old:
        old.setattr(checkpoint, "versions", lambda: {"torch": "1.0"})
        make(tmp_path / "r").fit(1).close()
    with pytest.warns(UserWarning, match="torch 1.0 -> "):
        load(tmp_path / "r")
    with pytest.raises(ValueError, match="another policy"):
        other = make(None)
        state = other.state_dict()
        state["policy"] = {k: v[..., :1] for k, v in state["policy"].items()}
        other.load_state_dict(state)


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (tmp_path / ".new").mkdir()
    (tmp_path / ".new" / "policy.safetensors").write_bytes(pickle.dumps(Evil()))
    (tmp_path / ".new" / "state.json").write_text(json.dumps({"policy": {"tensor": "_"}}))
    checkpoint._seal(tmp_path / ".new", tmp_path / "step_1", {"step": 1, "order": 1})
    for read in (read_state, GRPO.load):
        with pytest.raises(Exception, match="[Hh]eader"):
            read(tmp_path / "step_1")
    assert not (tmp_path / "ran").exists()


def test_fit_goes_on_after_close_and_in_a_cell_that_is_run_again_with_its_name(tmp_path):
    for steps in (1, 2):
        t = make(tmp_path / "r", "run.if_exists=resume", f"steps={steps}")
        t.fit()
    t.close()
    t.fit(1)
    assert [r["step"] for r in rows(t)] == [1, 2, 3]


def test_steps_before_the_record_are_in_it_and_a_callback_trains_nothing_inside_a_step(tmp_path):
    t = make(tmp_path / "r")
    t.step()
    assert [r["step"] for r in rows(t.fit(1))] == [1, 2]
    t.callbacks.append(lambda t, row: t.fit(1))
    with pytest.raises(ValueError, match="under way: a callback cannot call it"):
        t.fit(1)
    t.callbacks[-1] = MagicMock(on_collect=lambda trainer, rollout: trainer.save(tmp_path / "c"))
    with pytest.raises(ValueError, match="A step is under way"):
        t.fit(1)
    assert not (tmp_path / "c").exists()


def test_the_log_of_a_run_holds_nothing_of_another(tmp_path):
    first, second = (make(tmp_path / name, "filter_groups.enable=true") for name in "ab")
    first.fit(1)  # stays open
    size = (tmp_path / "a/train.log").stat().st_size
    with ThreadPoolExecutor(2) as pool:
        both = pool.submit(second.fit, 1), pool.submit(make(tmp_path / "c").fit, 2)
        assert [f.result().step_done for f in both] == [1, 2]
    assert size and (tmp_path / "a/train.log").stat().st_size == size
    assert (tmp_path / "b/train.log").stat().st_size and not (tmp_path / "c/train.log").exists()


VARIANTS = "epochs filter curriculum workers ranking diffusion".split()
KILLS = 10 if os.environ.get("GRPO_NB_FUZZ") else 3  # `make fuzz` draws more moments


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    "One process forks, kills and compares for all variants, so that libraries are imported once."
    folder = tmp_path_factory.mktemp("killed")
    said = forked.run(folder / "out", kill_train.main, folder, KILLS, VARIANTS)
    told = [json.loads(x) for x in said.splitlines() if x.startswith("{")]
    return {t["variant"]: t for t in told}


@pytest.mark.parametrize("variant", VARIANTS)
def test_killed_at_random_moments(variant, killed):
    t = killed[variant]
    assert t["kills"] >= KILLS and t["in_save"] >= 1 and t["resumed_from"] >= 2


def test_gradients_that_are_not_finite_are_skipped_counted_and_stop_training(tmp_path):
    halves = lambda completions, **columns: [float(i % 2) for i in range(len(completions))]
    t = make(tmp_path / "r", "steps=10", "max_bad_steps=3", rewards={"halves": halves})
    t.fit(1)
    good = {k: v.clone() for k, v in t.policy.state_dict().items()}
    weight = t.policy.parameters()[0]
    handle = weight.register_hook(lambda g: g * float("nan"))
    why = "3 steps in a row .* stopped after step 4.*learning rate"
    with pytest.raises(FloatingPointError, match=why):
        t.fit()
    assert all(torch.equal(v, good[k]) for k, v in t.policy.state_dict().items())
    assert [r["upd/n_skipped"] for r in rows(t)] == [0, 1, 1, 1]
    assert _check_seal(latest(t.run.dir / "checkpoints"))["step"] == 4
    handle.remove()
    t.fit(1)
    assert t.bad_steps == 0
    assert not torch.equal(*(x["lm_head.weight"] for x in (t.policy.state_dict(), good)))


def test_a_run_none_of_whose_checkpoints_can_be_read_is_left_as_it_is(tmp_path):
    t = make(tmp_path / "r").fit(3)
    t.close()
    path = latest(tmp_path / "r" / "checkpoints")
    told = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(told | {"format": 0}))
    again = make(tmp_path / "r", "run.if_exists=resume")
    with pytest.warns(UserWarning, match="format 0, this version reads 2"):
        with pytest.raises(CheckpointError, match="the run is left as it is"):
            again.fit(1)
    assert [r["step"] for r in rows(t)] == [1, 2, 3]


def test_an_interrupt_in_an_evaluation_keeps_the_row_and_the_reward_counts(tmp_path):
    cut = at_sample(36, lambda: fail(KeyboardInterrupt()))  # two steps, then the evaluation
    t = make(tmp_path / "r", "eval.every=2", "eval.limit=4", rewards=cut)
    with pytest.raises(KeyboardInterrupt):
        t.fit()
    assert t.rewards.state_dict()["batches"] == 2
    t.fit()
    assert [r["step"] for r in rows(t)] == [1, 2, 3, 4, 5]


def test_the_time_between_two_calls_of_fit_belongs_to_no_step(tmp_path):
    t = make(tmp_path / "r", rewards=at_sample(20, lambda: fail(ValueError("once"))))
    with pytest.raises(ValueError, match="once"):
        t.fit()
    t.counters.since -= 1000.0  # the person comes back later
    t.fit(1)
    assert t.history[-1]["step_time"] < 500


def test_a_callback_is_told_and_its_state_is_saved(tmp_path):
    counting = MagicMock(state_dict=lambda: {"seen": counting.on_step_end.call_count})
    make(tmp_path / "r", callbacks=[counting]).fit(2).close()
    again = MagicMock()
    load(tmp_path / "r", callbacks=[again])
    again.load_state_dict.assert_called_once_with({"seen": 2})


def test_a_copy_elsewhere_does_not_replace_the_last_checkpoint_of_the_run(tmp_path):
    t = make(tmp_path / "r", callbacks=[lambda t, row: t.save(tmp_path / "copy")]).fit(2)
    t.close()
    assert _check_seal(latest(tmp_path / "r" / "checkpoints"))["step"] == 2


def test_overrides_count_when_a_run_is_loaded(tmp_path):
    make(tmp_path / "r").fit(1).close()
    overrides = ["optimizer.weight_decay=0.5", "optimizer.betas=[0.8,0.9]", f"run.dir={tmp_path / 'new'}"]  # fmt: skip
    t = load(tmp_path / "r", overrides)
    group = t.optimizer.param_groups[0]
    assert (group["weight_decay"], group["betas"]) == (0.5, (0.8, 0.9))
    t.fit(1)
    assert t.run.dir == tmp_path / "new" and [r["step"] for r in rows(t)] == [2]
    assert [r["step"] for r in read_jsonl(tmp_path / "r" / "metrics.jsonl")[0]] == [1]


def test_a_run_that_another_process_moved_on_is_read_after_the_lock(tmp_path):
    a = make(tmp_path / "r").fit(2)
    b = make(tmp_path / "r", "run.if_exists=resume")
    with pytest.raises(RunLocked, match="written by this process: close that trainer"):
        b.fit(1)
    a.fit(2)
    a.close()
    b.fit(1)
    assert [r["step"] for r in rows(b)] == [1, 2, 3, 4, 5] and b.step_done == 5


@pytest.mark.parametrize("where, what", [(record.Run, "_describe"), (session, "_sweep")])
@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_laying_out_a_run_changes_nothing(tmp_path, monkeypatch, where, what, error):
    folder = tmp_path / "run"
    for begun in (False, True):
        trainer = make(folder, "run.if_exists=resume") if begun else make(folder)
        with monkeypatch.context() as broken, pytest.raises(error):
            broken.setattr(where, what, MagicMock(side_effect=error))
            trainer.fit(1)
        assert folder.exists() == begun
        if begun:
            told = record.Run(folder)
            assert told.status["state"] == "stopped"
            assert told.events()["kind"].tolist()[-2:] == ["stop", "close"]
        trainer = make(folder, "run.if_exists=resume") if begun else make(folder)
        trainer.fit(1).close()
        assert trainer.run.dir == folder and trainer.step_done == 1 + begun
