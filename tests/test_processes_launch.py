"""Launched by torchrun, or as it does: what is printed and written once, interrupts, a process that is killed, and launches that are refused."""

import os
import runpy
import signal
import socket
import subprocess
import sys
import time

import forked
import pytest
from torch.distributed import run as torchrun

from grpo_nb.cli import main
from grpo_nb.files import read_jsonl
from grpo_nb.lab.record import Run
from grpo_nb.tasks import data_path

RECIPE = str(data_path("recipes/quickstart.yaml"))
SMALL = ["train_batch_size=4", "num_generations=4", "eval.limit=2", "eval.samples=1", "checkpoint.every=1", "threads=1", "tasks.train=data:tasks/middle_dev.jsonl"]  # fmt: skip
OURS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR")
ENV = {k: v for k, v in os.environ.items() if k not in OURS}
ENV |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def train(folder):
    "The command line of a training, and its arguments."
    return ["train", RECIPE, *SMALL, f"run.dir={folder}/run", "steps=200"]


def goes_on(folder, capsys):
    "One process, this one, makes one step more."
    done = len(read_jsonl(folder / "run" / "metrics.jsonl")[0])
    more = f"run.dir={folder}/run", f"steps={done + 1}", "run.if_exists=resume"
    assert main(["train", RECIPE, *SMALL, *more]) == 0
    assert "The checkpoint is of 2 process(es), now there are 1" in str(capsys.readouterr())
    rows = read_jsonl(folder / "run" / "metrics.jsonl")[0]
    assert [r["step"] for r in rows] == list(range(1, done + 2))
    assert [p.name for p in folder.glob("run*")] == ["run"]


def wait_for_step(folder, n, alive):
    "Until a step has its row."
    file, until = folder / "run" / "metrics.jsonl", time.monotonic() + 240
    while not (file.exists() and len(read_jsonl(file)[0]) >= n):
        assert time.monotonic() < until and alive(), [p.read_text() for p in folder.glob("*.txt")]
        time.sleep(0.05)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_process_is_gone_or_hangs_and_the_run_goes_on(tmp_path, how, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        at = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    at |= {"WORLD_SIZE": "2", "GRPO_NB_TIMEOUT": "12"}
    first, lost = (
        forked.start(tmp_path / f"{r}.txt", main, train(tmp_path), env=at | {"RANK": str(r)})
        for r in range(2)
    )
    wait_for_step(tmp_path, 2, first.is_alive)
    os.kill(lost.pid, how)
    first.join(120)
    lost.kill()
    assert first.exitcode not in (0, None)
    said = (tmp_path / "0.txt").read_text()
    assert said.count("2 processes work together.") == 1
    assert said.count("grpo-nb: ") == said.count("One of 2 processes is gone") == 1, said
    assert Run.open(tmp_path / "run").status["state"] == "failed"
    goes_on(tmp_path, capsys)


def test_an_interrupt_stops_all_with_one_checkpoint_and_one_process_goes_on(tmp_path, capsys):
    command = "--nproc-per-node=2 --start-method=fork --run-path", runpy.__file__, "grpo_nb"
    command = [*command[0].split(), *command[1:], *train(tmp_path), "policy.shard=true"]
    agent = forked.start(tmp_path / "out.txt", torchrun.main, command)
    wait_for_step(tmp_path, 2, agent.is_alive)
    os.kill(agent.pid, signal.SIGINT)  # torchrun passes it on
    agent.join(120)
    said = (tmp_path / "out.txt").read_text()
    assert said.count("finishing this step") == said.count("fit() goes on from here") == 1, said
    assert Run.open(tmp_path / "run").status["state"] == "interrupted"
    goes_on(tmp_path, capsys)


@pytest.mark.parametrize(
    "env, command, said",
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "train", "torchrun --nproc-per-node 2 -m grpo_nb train"),
        ({"WORLD_SIZE": "2"}, "demo", "only train and eval work in several processes"),
    ],
)  # fmt: skip
def test_processes_that_do_not_know_each_other_are_refused(
    tmp_path, env, command, said, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert main([command]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and said in told and not list(tmp_path.iterdir())


def test_accelerate_that_starts_one_process_of_two_is_refused(tmp_path):
    pytest.importorskip("accelerate")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    launch += ["-m", "grpo_nb", "train"]
    got = subprocess.run(launch, env=ENV, cwd=tmp_path, capture_output=True, text=True)
    assert got.returncode != 0 and "this process knows of no other one" in got.stderr
