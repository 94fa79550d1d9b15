"""Launched by torchrun: what is printed and written once, interrupts, a process that is killed, and launches that are refused."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
import torch
from resumed import is_timing

from grpo_nb.files import read_jsonl
from grpo_nb.lab.checkpoint import read_state
from grpo_nb.lab.record import Run
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.tasks import data_path

RECIPE = str(data_path("recipes/quickstart.yaml"))
SMALL = ["train_batch_size=4", "num_generations=4", "eval.limit=2", "eval.samples=1", "checkpoint.every=1", "threads=1"]  # fmt: skip
OURS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR")
ENV = {k: v for k, v in os.environ.items() if k not in OURS}
ENV |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def start(processes, folder, *more, wait="60"):
    "A training in a session of its own; its output goes to a file."
    launcher = [*TORCHRUN, str(processes), "-m"] if processes > 1 else [sys.executable, "-m"]
    command = [*launcher, "grpo_nb", "train", RECIPE, *SMALL, f"run.dir={folder}/run", *more]
    with open(folder / "out.txt", "w") as out:
        how = {"stdout": out, "stderr": out, "env": ENV | {"GRPO_NB_TIMEOUT": wait}}
        return subprocess.Popen(command, **how, start_new_session=True)


def wait_for_step(folder, n, process):
    "Until a step has its row."
    file, until = folder / "run" / "metrics.jsonl", time.monotonic() + 240
    while not (file.exists() and len(read_jsonl(file)[0]) >= n):
        assert time.monotonic() < until and process.poll() is None, (folder / "out.txt").read_text()
        time.sleep(0.05)


def ranks(process):
    "The training processes, by rank."
    found = {}
    for child in psutil.Process(process.pid).children(recursive=True):
        if "grpo_nb" in child.cmdline():
            found[int(child.environ()["RANK"])] = child
    return found


def rows(folder):
    found = read_jsonl(folder / "run" / "metrics.jsonl")[0]
    return [{k: v for k, v in r.items() if not is_timing(k)} for r in found]


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_process_is_gone_or_hangs_and_the_run_goes_on(tmp_path, how):
    training = start(2, tmp_path, "steps=200", wait="15")
    wait_for_step(tmp_path, 2, training)
    lost, since = ranks(training)[1], time.monotonic()
    lost.send_signal(how)
    while "One of 2 processes is gone" not in (tmp_path / "out.txt").read_text():
        assert time.monotonic() - since < 120, (tmp_path / "out.txt").read_text()
        time.sleep(0.1)
    with contextlib.suppress(psutil.NoSuchProcess):
        lost.kill()  # torchrun gives a process that hangs 30 s to end
    assert training.wait(60) != 0
    said = (tmp_path / "out.txt").read_text()
    assert said.count("2 processes work together.") == 1
    assert said.count("grpo-nb: ") == said.count("One of 2 processes is gone") == 1, said
    assert Run.open(tmp_path / "run").status["state"] == "failed"
    if how == signal.SIGSTOP:
        return  # a run that failed goes on alike, whatever the reason
    done = len(rows(tmp_path))
    more = f"steps={done + 1}", "run.if_exists=resume"
    assert start(2, tmp_path, *more).wait(240) == 0, (tmp_path / "out.txt").read_text()
    assert [r["step"] for r in rows(tmp_path)] == list(range(1, done + 2))
    assert [p.name for p in tmp_path.glob("run*")] == ["run"]


def test_an_interrupt_stops_all_with_one_checkpoint_and_one_process_goes_on(tmp_path):
    training = start(2, tmp_path, "steps=200")
    wait_for_step(tmp_path, 2, training)
    os.killpg(training.pid, signal.SIGINT)  # as a terminal does; torchrun passes it on once more
    training.wait(60)
    said = (tmp_path / "out.txt").read_text()
    assert said.count("finishing this step") == said.count("fit() goes on from here") == 1, said
    assert Run.open(tmp_path / "run").status["state"] == "interrupted"
    done = len(rows(tmp_path))
    assert start(1, tmp_path, f"steps={done + 1}", "run.if_exists=resume").wait(240) == 0
    said = (tmp_path / "out.txt").read_text()
    assert "The checkpoint is of 2 process(es), now there are 1" in said
    assert [r["step"] for r in rows(tmp_path)] == list(range(1, done + 2))


def test_a_sharded_run_leaves_a_whole_policy_and_one_process_goes_on(tmp_path):
    assert start(2, tmp_path, "steps=1", "policy.shard=true").wait(240) == 0
    stored = TokenPolicy.from_pretrained(tmp_path / "run" / "policy").state_dict()
    state = read_state(tmp_path / "run" / "checkpoints" / "step_00000001")["policy"]
    assert all(torch.equal(x, state[k]) for k, x in stored.items())
    assert start(1, tmp_path, "steps=2", "run.if_exists=resume").wait(240) == 0
    assert [r["step"] for r in rows(tmp_path)] == [1, 2]


@pytest.mark.parametrize(
    "env, command, said",
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "train", "torchrun --nproc-per-node 2 -m grpo_nb train"),
        ({"WORLD_SIZE": "2"}, "demo", "only train and eval work in several processes"),
    ],
)  # fmt: skip
def test_processes_that_do_not_know_each_other_are_refused(tmp_path, env, command, said):
    run = [sys.executable, "-m", "grpo_nb", command]
    got = subprocess.run(run, env=ENV | env, cwd=tmp_path, capture_output=True, text=True)
    assert got.returncode == 2 and got.stderr.count("\n") == 1 and said in got.stderr
    assert not list(tmp_path.iterdir())


def test_accelerate_that_starts_one_process_of_two_is_refused(tmp_path):
    pytest.importorskip("accelerate")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes"]
    for n, command in (("2", "train"), ("1", "config")):
        launched = [*launch, n, "-m", "grpo_nb", command]
        got = subprocess.run(launched, env=ENV, cwd=tmp_path, capture_output=True, text=True)
        assert (got.returncode != 0) == (n == "2")
        assert ("this process knows of no other one" in got.stderr) == (n == "2")
