"""Weights sharded by FSDP2 over two processes: the numbers, checkpoints and files of whole ones."""

import copy
import functools

import pytest
import torch
from test_processes import on_processes

from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.tasks import data_path
from grpo_nb.trainer import GRPO

TINY = data_path("tiny-llama")
TASKS = [{"prompt": f"{k} plus {k + 3} is ", "index": k} for k in range(5)]
KEYS = {"train_batch_size": 5, "num_generations": 3, "optimizer.warmup": 0, "steps": 2}
KEYS |= {"update.num_epochs": 2, "update.loss.kl_coef": 0.1, "update.micro_tokens": 25}
KEYS |= {"update.max_grad_norm": 0.05, "eval.samples": 2, "run.progress": False}


def digits(completion, **_):
    return sum(c.isdigit() for c in completion) / 10


def make(shard, lr=1e-4, **options):
    policy = TokenPolicy.from_pretrained(TINY, max_new_tokens=8, shard=shard, **options)
    return GRPO(policy, TASKS, {"digits": digits}, KEYS | {"optimizer.lr": lr}, eval_tasks=TASKS)


def train(shard, folder, **options):
    "What two steps come to, a third one before and after the state went to a new trainer, and the files."
    trainer = make(shard, lr=1.0, **options)
    trainer.optimizer = torch.optim.SGD(trainer.policy.parameters(), 1.0)  # steps are gradients
    trainer.fit()
    rows = [x for r in trainer.history for x in (r["loss"], r["grad_norm"], r["reward"], r["kl"])]
    weights, drawn = trainer.state_dict()["policy"], trainer.last.rollout.outputs
    trainer.policy.save_pretrained(folder)
    return rows, drawn, weights, trainer.evaluate().values, type(trainer.policy.parameters()[0])


def resume():
    "The third step of a run, and of one that goes on from the state after the second."
    trainer, again = make(True), make(True)
    trainer.fit()
    state = copy.deepcopy(trainer.state_dict())
    held = state["optimizer"]["state"].values()
    moments = {type(x) for told in held for x in told.values()}
    want = trainer.step()
    again.load_state_dict(state)
    got = again.step()
    assert len(held) == len(trainer.policy.parameters())
    return [(r["loss"], r["grad_norm"], r["reward"]) for r in (want, got)], moments


def test_sharded_weights_give_the_numbers_of_whole_ones(tmp_path):
    job = lambda name, shard, **more: functools.partial(train, shard, str(tmp_path / name), **more)
    jobs = {"whole": job("whole", False), "sharded": job("sharded", True)}
    jobs["again"] = job("again", True, gradient_checkpointing=True)
    check(on_processes(jobs | {"resume": resume}), tmp_path)


def check(found, tmp_path):
    for ranks in found.values():
        assert not any(isinstance(got, str) for got in ranks), found
    (rows, drawn, weights, scores, kind), _ = found["whole"]
    assert kind is torch.nn.Parameter
    for name in ("sharded", "again"):
        for own, same, cut, scored, kind in found[name]:
            assert kind.__name__ == "DTensor" and same == drawn and scored == scores
            assert own == pytest.approx(rows, rel=1e-4, abs=1e-6)
            for k, x in weights.items():
                torch.testing.assert_close(cut[k], x, rtol=0, atol=2e-6)  # of 5e-2 moved
        loaded = TokenPolicy.from_pretrained(tmp_path / name).state_dict()
        assert loaded.keys() == weights.keys()
        assert all(torch.equal(x, found[name][0][2][k]) for k, x in loaded.items())
    for (want, got), moments in found["resume"]:
        assert want == got and moments == {torch.Tensor}
