"""Launched by torchrun: what is printed and written once, interrupts, a process that is killed, and launches that are refused."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from grpo_nb.cli import main
from grpo_nb.files import read_jsonl
from grpo_nb.lab.record import Run
from grpo_nb.tasks import data_path

RECIPE = str(data_path("recipes/quickstart.yaml"))
SMALL = ["train_batch_size=4", "num_generations=4", "eval.limit=2", "eval.samples=1", "checkpoint.every=1", "threads=1"]  # fmt: skip
OURS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR")
ENV = {k: v for k, v in os.environ.items() if k not in OURS}
ENV |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]


def start(folder, *more, wait="60"):
    "A training on two processes in a session of its own; its output goes to a file."
    command = [*TORCHRUN, "2", "-m", "grpo_nb", "train", RECIPE, *SMALL, *more, "steps=200"]
    command.append(f"run.dir={folder}/run")
    with open(folder / "out.txt", "w") as out:
        how = {"stdout": out, "stderr": out, "env": ENV | {"GRPO_NB_TIMEOUT": wait}}
        return subprocess.Popen(command, **how, start_new_session=True)


def goes_on(folder, capsys):
    "One process, this one, makes one step more."
    done = len(read_jsonl(folder / "run" / "metrics.jsonl")[0])
    more = f"run.dir={folder}/run", f"steps={done + 1}", "run.if_exists=resume"
    assert main(["train", RECIPE, *SMALL, *more]) == 0
    assert "The checkpoint is of 2 process(es), now there are 1" in str(capsys.readouterr())
    rows = read_jsonl(folder / "run" / "metrics.jsonl")[0]
    assert [r["step"] for r in rows] == list(range(1, done + 2))
    assert [p.name for p in folder.glob("run*")] == ["run"]


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


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_one_process_is_gone_or_hangs_and_the_run_goes_on(tmp_path, how, capsys):
    training = start(tmp_path, wait="25")
    wait_for_step(tmp_path, 2, training)
    lost, since = ranks(training)[1], time.monotonic()
    lost.send_signal(how)
    while "One of 2 processes is gone" not in (tmp_path / "out.txt").read_text():
        assert time.monotonic() - since < 120, (tmp_path / "out.txt").read_text()
        time.sleep(0.1)
    with contextlib.suppress(psutil.NoSuchProcess):
        lost.kill()  # torchrun gives a process that hangs 30 s to end
    assert training.wait(120) != 0
    said = (tmp_path / "out.txt").read_text()
    assert said.count("2 processes work together.") == 1
    assert said.count("grpo-nb: ") == said.count("One of 2 processes is gone") == 1, said
    assert Run.open(tmp_path / "run").status["state"] == "failed"
    goes_on(tmp_path, capsys)


def test_an_interrupt_stops_all_with_one_checkpoint_and_one_process_goes_on(tmp_path, capsys):
    training = start(tmp_path, "policy.shard=true")
    wait_for_step(tmp_path, 2, training)
    os.killpg(training.pid, signal.SIGINT)  # as a terminal does; torchrun passes it on once more
    training.wait(120)
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
