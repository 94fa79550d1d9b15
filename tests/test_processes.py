"""Several processes train as one: the same numbers, the same decisions, one record; also with weights sharded by FSDP2, and launched by torchrun."""

import copy
import functools
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import forked
import pytest
import torch
from resumed import check_resume, every, is_timing
from torch.distributed import run as torchrun

from grpo_nb import cli
from grpo_nb.all import ADVANTAGES, GRPO, GRPOConfig, Rollout, TokenPolicy
from grpo_nb.all import reward_function, seeded
from grpo_nb.cli import main
from grpo_nb.files import read_jsonl
from grpo_nb.lab.record import Run
from grpo_nb.losses import AGGREGATIONS
from grpo_nb.processes import place
from grpo_nb.tasks import data_path


class Table:
    "Independent softmax choices in float64, some rollouts shorter than others."

    def __init__(self, draws=4, items=False, seed=0):
        self.logits = torch.randn(6, 3, 4, generator=seeded(seed, "table"), dtype=torch.float64)
        self.logits.requires_grad_()
        self.draws, self.items = draws, items

    def parameters(self):
        return [self.logits]

    def state_dict(self):
        return {"logits": self.logits.detach()}

    def load_state_dict(self, state):
        self.logits.data.copy_(state["logits"])

    def copy(self):
        other = Table(self.draws, self.items)
        other.load_state_dict(self.state_dict())
        return other

    def logp(self, rollout):
        z = self.logits[rollout.states["task"]].log_softmax(-1)
        return z.gather(-1, rollout.states["action"][..., None])[..., 0]

    @torch.no_grad()
    def sample(self, tasks, num_generations, generator, greedy=False):
        assert tasks
        named = [t for t in tasks for _ in range(num_generations)]
        task = torch.tensor([t.columns["index"] for t in named])
        u = torch.rand(len(task), 4, dtype=torch.float64, generator=generator)
        cdf = self.logits[task].softmax(-1).cumsum(-1)
        action = (cdf < u[:, :3, None]).sum(-1).clamp(max=3)
        mask = torch.arange(3) <= (3 * u[:, 3:]).long()
        states = {"task": task, "action": action}
        if self.items:
            states["item"] = torch.where(mask, torch.arange(3).expand_as(action).clamp(max=1), -1)
        r = Rollout(
            group_N=torch.arange(len(tasks)).repeat_interleave(num_generations),
            tasks=named,
            states=states,
            mask_NS=mask,
            old_logp_NS=torch.zeros(mask.shape, dtype=torch.float64),
            outputs=[(a * m).tolist() for a, m in zip(action, mask)],
        )
        return r.replace(old_logp_NS=self.logp(r).where(mask, 0.0))


def total(completion, log_metric=None, **_):
    if sum(completion) > 4:  # on one process more often than on the other
        log_metric("large", sum(completion))
    return sum(completion) / 9


def low(completion, **_):
    return float(completion[0] < 2)


def per_item(completion, **_):
    return [float(completion[0]), float(completion[1] > 1)]


def drawn(completion, sample_seed, **_):
    return sample_seed % 97 / 97


@reward_function(whole_batch=True)
def rank_in_batch(completions, **_):
    return [float(sorted(completions).index(c)) for c in completions]


def item_of_some(completion, index, **_):
    return per_item(completion) if index > 1 else None  # on one process perhaps none


TASKS = [{"prompt": f"task {i}", "index": i} for i in range(6)]
CASES = {f"advantage {k}": {"advantage.mode": k} for k in every(ADVANTAGES)}
CASES |= {
    f"aggregation {k}": {"update.loss.aggregation": k, "update.loss.max_length": 3}
    for k in every(AGGREGATIONS)
    if k not in ("bnpo",)  # depends on the split, also in one process
}
FILTER = {"filter_groups.enable": True, "filter_groups.metric": "low", "num_generations": 3}
CASES |= {
    "per item": {"rewards": {"total": total, "per_item": per_item}, "advantage.mode": "gdpo"},
    "item of some": {"rewards": {"total": total, "some": item_of_some}, "advantage.mode": "gdpo"},
    "rewards": {"rewards": {"total": total, "drawn": drawn, "rank": rank_in_batch}},
    "epochs": {"update.num_epochs": 3, "update.minibatch_size": 6, "update.loss.kl_coef": 0.1},
    "split groups": {"update.num_epochs": 2, "update.minibatch_size": 5, "update.whole_groups": False},
    "one row": {"update.minibatch_size": 1, "update.whole_groups": False},  # one process has none
    "micro": {"update.micro_tokens": 7, "update.scheme": "progressive", "update.num_epochs": 2},
    "kl stop": {"update.num_epochs": 20, "update.kl_stop.target": 0.003},
    "refill": FILTER | {"filter_groups.max_num_gen_batches": 0},
    "carry": FILTER | {"filter_groups.surplus": "carry", "filter_groups.gen_batch_size": 5, "filter_groups.max_staleness": 3},
    "adaptive": FILTER | {"filter_groups.sizing": "adaptive"},  # sometimes one task, so one process has none
    "mask": FILTER | {"filter_groups.action": "mask"},
    "curriculum": {"tasks.selector": "thompson", "eval.passed": "low"},
    "end": {"tasks.epochs": 0.8, "tasks.selector": "sequential", "train_batch_size": 2},
    "own stream": {"draws": None},
}  # fmt: skip


def make(name, **more):
    case = CASES.get(name, {}) | more
    rewards = case.pop("rewards", {"total": total, "low": low})
    policy = Table(case.pop("draws", 4), items="item" in name)
    config = {"steps": 3, "train_batch_size": 3, "num_generations": 4, "update.max_grad_norm": None}
    config |= {"optimizer.warmup": 0, "optimizer.lr": 0.5} | case
    trainer = GRPO(policy, TASKS, rewards, config, eval_tasks=TASKS[:3])
    if name != "resumed":  # a checkpoint's optimizer is that of the configuration
        trainer.optimizer = torch.optim.SGD(policy.parameters(), 1.0)  # steps are gradients
    return trainer


def train(name):
    "What a run comes to: weights, rows, how it ended, the generator, held-out scores, samples."
    trainer = make(name).fit()
    rows = [{k: v for k, v in r.items() if not is_timing(k)} for r in trainer.history]
    reason = trainer.last[2].reason if trainer.last else ""
    state = trainer.generators["sampling"].get_state()
    ends = trainer.policy.logits.detach(), rows, str(trainer.stop), reason, state
    return *ends, trainer.evaluate().values, trainer.last[0].states["action"]


def spoilt(kind):
    "The second process stores wrong log-probs, has a gradient or weight of NaN, a reward that raises, a batch or call of its own."
    trainer = make("spoilt", **{"rewards": {"fails": fails}} if kind == "reward" else {})
    if kind == "weights":
        value, weights = (1, torch.nan)[place()[0]], trainer.policy.logits.data
        trainer.optimizer.register_step_post_hook(lambda *_: weights.mul_(value))
        trainer.fit()
    if kind == "key":
        trainer.config.optimizer.lr = (0.5, 0.6)[place()[0]]
        trainer.fit()
    if kind == "tasks":
        trainer.step(trainer.stream.tasks[place()[0] :])
    if kind == "rollout":
        trainer.step(trainer.collect()[place()[0] :])
    if kind == "call" and place()[0]:
        trainer.evaluate()
    if kind == "old" and place()[0]:
        own, off = trainer.policy.sample, lambda r: r.replace(old_logp_NS=r.old_logp_NS + 0.01)
        trainer.policy.sample = lambda *a, **k: off(own(*a, **k))
    if kind == "gradient" and place()[0]:
        trainer.policy.logits.register_hook(lambda g: g * torch.nan)
    row = trainer.step()
    same = torch.equal(trainer.policy.logits, Table().logits)
    return row["upd/n_done"], row["upd/n_skipped"], same


def fails(completion, **_):
    return 1 / (1 - place()[0])


SPOILT = ("old", "gradient", "reward", "weights", "key", "tasks", "rollout", "call")


def run_jobs(rank, jobs, folder):
    "Each job on both processes; a result or an error, by rank."
    import torch.distributed as dist

    torch.set_num_threads(1)
    how = {"world_size": 2, "rank": rank, "timeout": timedelta(seconds=300)}
    dist.init_process_group("gloo", f"file://{folder}/meet", **how)
    assert place() == (rank, 2)
    found = {}
    for name, f in jobs.items():
        try:
            found[name] = f()
        except Exception as e:
            found[name] = f"{type(e).__name__}: {e}"
    torch.save(found, f"{folder}/{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two_ranks")


@pytest.fixture(scope="module")
def two_ranks(folder):
    "{name: [what came of the job on each process]}: both are started once."
    jobs = {name: functools.partial(train, name) for name in CASES}
    jobs |= {name: functools.partial(spoilt, name) for name in SPOILT}
    jobs |= {name: functools.partial(refused, keys) for name, keys in REFUSED.items()}
    jobs |= {"resume": functools.partial(resumes, str(folder / "resumed"))}
    for name, options in SHARDED.items():
        jobs[name] = functools.partial(train_tokens, str(folder / name), **options)
    jobs |= {"resume shards": functools.partial(resume_shards, str(folder / "shards"))}
    jobs |= {"command": functools.partial(command_with_shards, str(folder))}
    both = [forked.start(folder / f"{r}.out", run_jobs, r, jobs, str(folder)) for r in range(2)]
    assert [p.join() or p.exitcode for p in both] == [0, 0], (folder / "0.out").read_text()
    found = [torch.load(folder / f"{r}.pt", weights_only=False) for r in range(2)]
    return {name: [x[name] for x in found] for name in jobs}


@pytest.mark.parametrize("name", CASES)
def test_two_processes_train_with_the_numbers_of_one(two_ranks, name):
    for found in two_ranks[name]:
        assert not isinstance(found, str), found
    (weights, rows, stop, reason, state, scores, drawn), other = two_ranks[name]
    assert torch.equal(weights, other[0]) and torch.equal(state, other[4])
    assert (stop, reason, scores) == (other[2], other[3], other[5])
    one = train(name)
    assert torch.equal(drawn, other[6])
    if name == "own stream":  # other samples, by the seed and the rank
        assert not torch.equal(drawn[:4], drawn[8:]) and not torch.equal(one[6], drawn)
        return
    assert torch.equal(drawn, one[6]) and torch.equal(state, one[4])
    torch.testing.assert_close(weights, one[0], rtol=0, atol=1e-12)
    assert (stop, reason.split(" > ")[0][:20]) == (one[2], one[3].split(" > ")[0][:20])
    assert len(rows) == len(one[1]) and scores == one[5]
    for row, want in zip(rows, one[1]):
        assert row == pytest.approx(want, rel=1e-9, abs=1e-12, nan_ok=True)


def test_the_cases_are_what_they_are_called(two_ranks):
    rows = {name: two_ranks[name][0][1] for name in CASES}
    assert two_ranks["kl stop"][0][3] and max(r["upd/n_done"] for r in rows["kl stop"]) < 20
    assert two_ranks["end"][0][2].startswith("The tasks have come to their end")
    assert max(r["filter/num_gen_batches"] for r in rows["refill"]) > 1
    assert max(r["filter/carried"] for r in rows["carry"]) > 0
    assert rows["one row"][0]["upd/n_planned"] == 12


def test_what_is_wrong_on_one_process_is_told_to_all(two_ranks):
    assert two_ranks["gradient"] == [(0, 1, True)] * 2
    for said in two_ranks["old"]:
        assert said.startswith("RatioMismatch") and "up to 0.01" in said
    one, two = two_ranks["reward"]
    assert one == two and one.startswith("RewardError: Reward 'fails', sample 8: ZeroDivisionError")
    assert all("weights are not finite since step 1" in said for said in two_ranks["weights"])
    assert all("optimizer.lr is 0.6 on process 1" in said for said in two_ranks["key"])
    assert all("the batch (its size, a checksum" in said for said in two_ranks["tasks"])
    assert all("the rollout (its samples" in said for said in two_ranks["rollout"])
    called = "PeerError: Process 0 is in step and process 1 in evaluate: all processes call"
    assert all(said.startswith(called) for said in two_ranks["call"])


def resumes(folder):
    "A run with a stop is the run without one, bit for bit, on two processes."

    assert GRPO.config_class is GRPOConfig

    def begin(where):
        keys = {"filter_groups.enable": True, "filter_groups.surplus": "carry"}
        keys |= {"filter_groups.max_staleness": 3, "checkpoint.every": 1}
        return make("resumed", **keys, **{"run.dir": where, "run.progress": False})

    Path(folder).mkdir(exist_ok=True)
    parts = {"policy": Table, "tasks": lambda: TASKS, "eval_tasks": lambda: TASKS[:3]}
    parts["rewards"] = lambda: {"total": total, "low": low}
    where = check_resume(begin, 3, folder, **parts)
    again = GRPO.load(where, **{k: made() for k, made in parts.items()})
    again.open_run()  # every process has the rows
    again.close()
    return where.name, len(list(Path(folder).iterdir())), [r["step"] for r in again.history]


def refused(keys, tasks=TASKS):
    "The mistake in a configuration, told before the model is asked for."
    tasks = tasks[place()[0] :] if keys.pop("differ", False) else tasks
    keys = {"policy.model": "no such model"} | keys
    try:
        GRPO.from_config(keys, tasks=tasks, rewards={"total": total})
    except ValueError as e:
        return str(e)


REFUSED = {"batch": {"train_batch_size": 1}, "data": {"differ": True}, "fine": {}}


def test_a_run_on_two_processes_resumes_bit_for_bit_and_differences_are_refused(two_ranks):
    assert two_ranks["resume"] == [("cut2", 3, [1, 2, 3])] * 2  # a folder for each run, no more
    few = "train_batch_size=1 tasks are too few for 2 processes: give each at least one."
    assert two_ranks["batch"] == [few] * 2 and two_ranks["data"][0] == two_ranks["data"][1]
    assert two_ranks["data"][0].startswith("the data is ['list (5 tasks")
    assert "no such model" in two_ranks["fine"][0]


TEXTS = [{"prompt": f"{k} plus {k + 3} is ", "index": k} for k in range(5)]
KEYS = {"train_batch_size": 5, "num_generations": 3, "optimizer.warmup": 0, "steps": 2}
KEYS |= {"update.num_epochs": 2, "update.loss.kl_coef": 0.1, "update.micro_tokens": 25}
KEYS |= {"update.max_grad_norm": 0.05, "eval.samples": 2, "run.progress": False}
SHARDED = {"whole": {"shard": False}, "sharded": {"shard": True, "gradient_checkpointing": True}}


def digits(completion, **_):
    return sum(c.isdigit() for c in completion) / 10


def token_policy(shard, **options):
    return TokenPolicy.from_pretrained("data:tiny-llama", max_new_tokens=8, shard=shard, **options)


def make_tokens(shard, lr=1e-4, **options):
    keys, policy = KEYS | {"optimizer.lr": lr}, token_policy(shard, **options)
    return GRPO(policy, TEXTS, {"digits": digits}, keys, eval_tasks=TEXTS)


def train_tokens(folder, **options):
    "What two steps come to, and the files."
    trainer = make_tokens(lr=1.0, **options)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), 1.0)  # steps are gradients
    trainer.fit()
    rows = [x for r in trainer.history for x in (r["loss"], r["grad_norm"], r["reward"], r["kl"])]
    weights, drawn = trainer.state_dict()["policy"], trainer.last.rollout.outputs
    trainer.policy.save_pretrained(folder)
    return rows, drawn, weights, trainer.evaluate().values, type(trainer.policy.parameters()[0])


def numbers(row):
    return row["loss"], row["grad_norm"], row["reward"]


def resume_shards(folder):
    "The third step of a run, and of one that goes on from the state after the second."
    trainer, again = make_tokens(True), make_tokens(True)
    trainer.fit()
    trainer.save(folder)
    state = copy.deepcopy(trainer.state_dict())
    held = state["optimizer"]["state"].values()
    moments = {type(x) for told in held for x in told.values()}
    want = trainer.step()
    again.load_state_dict(state)
    assert len(held) == len(trainer.policy.parameters())
    return numbers(want), numbers(again.step()), moments


def test_sharded_weights_give_the_numbers_of_whole_ones(two_ranks, folder):
    for name in SHARDED:
        assert not any(isinstance(got, str) for got in two_ranks[name]), two_ranks[name]
    (rows, drawn, weights, scores, kind), _ = two_ranks["whole"]
    assert kind is torch.nn.Parameter
    for own, same, cut, scored, kind in two_ranks["sharded"]:
        assert kind.__name__ == "DTensor" and same == drawn and scored == scores
        assert own == pytest.approx(rows, rel=1e-4, abs=1e-6)
        for k, x in weights.items():
            torch.testing.assert_close(cut[k], x, rtol=0, atol=2e-6)  # of 5e-2 moved
    loaded = TokenPolicy.from_pretrained(folder / "sharded").state_dict()
    assert loaded.keys() == weights.keys()
    assert all(torch.equal(x, two_ranks["sharded"][0][2][k]) for k, x in loaded.items())


def test_a_sharded_run_goes_on_bit_for_bit_and_on_one_process(two_ranks, folder):
    (want, got, moments), _ = two_ranks["resume shards"]
    assert want == got and moments == {torch.Tensor}
    parts = {"policy": token_policy(False), "tasks": TEXTS, "eval_tasks": TEXTS}
    alone = GRPO.load(folder / "shards", rewards={"digits": digits}, **parts)
    assert numbers(alone.step()) == pytest.approx(want, rel=1e-3, abs=1e-6)


def command_with_shards(folder):
    "One step, and one more in the same run."
    keys = f"run.dir={folder}/run", "run.if_exists=resume", "policy.shard=true"
    return [cli.train(RECIPE, [*SMALL, *keys, f"steps={n}"]).step_done for n in (1, 2)]


def test_a_command_with_shards_goes_on_and_ends_with_the_whole_policy_on_the_disk(
    two_ranks, folder
):
    assert two_ranks["command"] == [[1, 2]] * 2, two_ranks["command"]
    state = Run.open(folder / "run").status["state"]
    trained = TokenPolicy.from_pretrained(folder / "run" / "policy").state_dict()
    before = token_policy(False).state_dict()
    assert state == "finished" and any(not torch.equal(x, before[k]) for k, x in trained.items())


# launched: what is printed and written once, interrupts, a process that is killed, and launches that are refused

RECIPE = str(data_path("recipes/quickstart.yaml"))
SMALL = ["train_batch_size=4", "num_generations=4", "eval.limit=2", "eval.samples=1", "checkpoint.every=1", "threads=1", "tasks.train=data:tasks/middle_dev.jsonl"]  # fmt: skip
OURS = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR")
ENV = {k: v for k, v in os.environ.items() if k not in OURS}
ENV |= {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def command_line(folder):
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
        forked.start(tmp_path / f"{r}.txt", main, command_line(tmp_path), env=at | {"RANK": str(r)})
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
    command = [*command[0].split(), *command[1:], *command_line(tmp_path), "policy.shard=true"]
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
