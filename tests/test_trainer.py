"The training loop on the embedded model: rewards that fail, interrupts, recipes, groups."

import dataclasses
import itertools
import math
import os
import signal
import time
import warnings
from collections import deque
from contextlib import closing

import psutil
import pytest
import torch
from resumed import differences

from grpo_nb.advantages import compute_advantages
from grpo_nb.all import GRPO, RewardRunner, TasksetScheduler, TokenPolicy, exact_answer
from grpo_nb.cli import _open_block, _read_block, main
from grpo_nb.config import describe, override
from grpo_nb.files import read_jsonl
from grpo_nb.lab.checkpoint import _check_seal, latest
from grpo_nb.lab.frames import flat_keys
from grpo_nb.lab.recipe import GRPOConfig, load_config
from grpo_nb.lab.runs import Spec
from grpo_nb.rewards import REWARDS
from grpo_nb.tasks import Taskset, data_path

TASKS = Taskset.load(data_path("tasks/middle_dev.jsonl"))
RIGHT = exact_answer(extract="marker", marker="</think>")


SIZE = ["train_batch_size=6", "num_generations=4", "run.progress=false"]


def make(*over, rewards=None, tasks=TASKS, config=None, **kw):
    config = config or load_config(None, [*SIZE, *over])
    policy = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=10)
    return GRPO(policy, tasks, rewards or {"right": RIGHT}, config, **kw)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.policy.parameters()])


def test_kl_in_the_reward_is_taken_off_before_the_advantage():
    reference = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=10)
    trainer = make("rewards.kl_in_reward=0.5", "optimizer.lr=1e-3", reference=reference)
    trainer.step()
    rollout = trainer.collect()
    values, _ = trainer.advantages(rollout)
    with torch.no_grad():
        kl_NS = trainer.policy.logp(rollout) - reference.logp(rollout)
    kl_N = kl_NS.where(rollout.mask_NS, 0.0).sum(1)
    assert kl_N.abs().max() > 0.01
    total = rollout.rewards[:, 0] - 0.5 * kl_N
    want = compute_advantages(total, rollout.group_N).values
    torch.testing.assert_close(values, want, atol=1e-5, rtol=1e-5)
    same = make("rewards.kl_in_reward=0.5", "advantage.mode=gdpo", rewards={"one": lambda prompts: [1.0] * len(prompts)})  # fmt: skip
    assert same.step()["adv/max"] == 0 and same.reference is not None and make().reference is None
    few = {"some": lambda completions: [None, 1.0, 0.8, 0.8] * (len(completions) // 4)}
    half = make("rewards.kl_in_reward=0.5", "num_generations=4", rewards=few)
    assert half.step()["adv/invalid_rows"] > 0 == half.last.advantages[0]


def test_hanging_crashing_and_silent_rewards_do_not_stop_training():
    tasks = TASKS[:3]
    unlucky = tasks[0].prompt

    def hangs(completion, prompt, **columns):
        if prompt == unlucky:
            time.sleep(600)
        return float(len(completion))

    def crashes(completion, prompt, **columns):
        if prompt == unlucky:
            os._exit(3)
        return 1.0

    before = {p.pid for p in psutil.Process().children(recursive=True)}
    functions = {"right": RIGHT, "hangs": hangs, "crashes": crashes}
    functions["silent"] = lambda completion: None
    options = {"workers": 2, "timeout_s": 1.0, "on_error": "skip", "chunk_size": 1}
    with RewardRunner(functions, max_error_share=1.0, **options) as runner:
        size = ("steps=2", "train_batch_size=3", "num_generations=3")
        trainer = make(*size, rewards=runner, tasks=tasks)
        start = weights(trainer)
        with warnings.catch_warnings(action="ignore"):
            rows = trainer.fit().history
    assert len(rows) == 2 and not torch.equal(weights(trainer), start)
    for row in rows:
        assert row["reward/right/n_ok"] == 9 and row["reward/silent/n_none"] == 9
        assert math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"])
        assert row["reward/hangs/n_timeout"] == 3 and row["reward/crashes/n_error"] == 3
    left = [p for p in psutil.Process().children(recursive=True) if p.pid not in before]
    assert not psutil.wait_procs(left, timeout=60)[1]


def test_evaluation_leaves_training_alone():
    a, b = make("steps=3"), make("steps=3")
    a.fit(1)
    a.evaluate(Taskset.load(data_path("tasks/middle_eval.jsonl"))[:20], samples=2)
    a.fit()
    assert torch.equal(weights(a), weights(b.fit()))


def test_every_shipped_recipe_is_valid():
    recipes = sorted(data_path("recipes").glob("*.yaml"))
    assert len(recipes) >= 2
    for recipe in recipes:
        assert isinstance(load_config(recipe), GRPOConfig)
        config, block = _open_block(recipe)
        if block:  # and so is what it compares
            asked = _read_block(block)
            base = override(config, flat_keys(asked.pop("base", {})))
            Spec(base=base, **{k: v for k, v in asked.items() if k in Spec.__dataclass_fields__})


def test_rewards_per_rank_need_to_know_the_rank_of_a_token():
    t = GRPO.from_config(load_config(None, ["policy.max_new_tokens=4", "train_batch_size=2"]))
    r = t.collect()
    with pytest.raises(ValueError, match=r"Rewards per rank need states\['item'\]"):
        t.step(dataclasses.replace(r, rewards_NR=None, rewards_NRK=r.rewards[:, :, None].expand(-1, -1, 3)))  # fmt: skip


def test_a_recipe_that_is_no_mapping_is_told_at_once(tmp_path):
    (tmp_path / "list.yaml").write_text("- steps: 3\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="list.yaml must be a mapping"):
        load_config(tmp_path / "list.yaml")
    with pytest.raises(ValueError, match="binary.yaml cannot be read"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(ValueError, match="cannot be read: .*directory"):
        load_config(tmp_path)


def test_every_number_of_the_configuration_has_a_range_and_a_meaning():
    rows = describe(GRPOConfig)
    assert len(rows) > 90 and len({r["key"] for r in rows}) == len(rows)
    plain = ("int", "float", "int or null", "float or null")
    assert [r["key"] for r in rows if r["accepts"] in plain or not r["meaning"]] == []


def test_a_callback_that_would_never_be_called_is_refused_before_anything_is_loaded():
    config = load_config(None, ["policy.model=never/loaded"])
    with pytest.raises(ValueError, match="nothing would call"):
        GRPO.from_config(config, callbacks=["wandb"])
    trainer = make("steps=1")
    trainer.callbacks.append(lambda: None)
    with pytest.raises(ValueError, match="with"):
        trainer.fit()
    assert trainer.step_done == 0


def test_the_command_line_says_what_the_defaults_are(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small = ["steps=1", "train_batch_size=2", "num_generations=8", "policy.max_new_tokens=4"]
    small += ["rewards.functions={format_match: {pattern: '<think>.[0-5].*'}}"]
    small += ["eval.limit=2", "eval.samples=1", "run.progress=false", "run.dir=r"]
    assert main(["train", *small]) == 0
    judged = [e for e in read_jsonl("r/events.jsonl")[0] if e["kind"].startswith("eval")]
    assert [(e["kind"], e["step"]) for e in judged] == [("eval_before", 0), ("eval_after", 1)]
    assert "The defaults (no recipe is given): 1 steps of 2 x 8 samples" in capsys.readouterr().out


def press_twice(trainer, at):
    "Ctrl-C during the `at`-th optimizer step, and once more: the second one interrupts at once."
    calls = itertools.count(1)

    def press(*_):
        if next(calls) == at:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)

    return trainer.optimizer.register_step_post_hook(press)


def test_without_a_directory_an_interrupt_does_not_speak_of_saving(capsys, tmp_path):
    stop = lambda t, row: os.kill(os.getpid(), signal.SIGINT) if t.step_done == 1 else None
    make("steps=3", callbacks=[stop]).fit()
    said = capsys.readouterr().out
    assert "then stopping without a checkpoint" in said and "saving" not in said
    assert "Nothing is on the disk" in said and "trainer.save(folder)" in said
    folder = f"run.dir={tmp_path / 'run'}"
    make("steps=3", folder, "checkpoint.at_end=false", callbacks=[stop]).fit().close()
    said = capsys.readouterr().out
    assert "no checkpoint, so a new process" in said
    trainer = make("steps=3", folder, callbacks=[stop]).fit()
    trainer.close()
    said = capsys.readouterr().out
    assert "then saving a checkpoint" in said
    assert f"A new process goes on with GRPO.load('{trainer.run.dir}')" in said
    GRPO.load(trainer.run.dir, rewards={"right": RIGHT}).close()


def test_a_second_interrupt_inside_an_update_says_what_is_left_and_keeps_the_checkpoint(
    tmp_path, capsys
):
    options = ["steps=3", "update.num_epochs=3", "checkpoint.every=1"]
    one = make(*options, f"run.dir={tmp_path / 'one'}").fit()
    cut = make(*options, f"run.dir={tmp_path / 'cut'}")
    press_twice(cut, 5)  # the second of three optimizer steps of step 2
    with pytest.raises(KeyboardInterrupt):
        cut.fit()
    said = capsys.readouterr().out
    assert "neither those of step 1 nor of step 2, so they are not trained on and not saved" in said
    checkpoint = latest(tmp_path / "cut" / "checkpoints")
    assert _check_seal(checkpoint)["step"] == 1 and f"GRPO.load({str(checkpoint)!r})" in said
    for go_on in (cut.fit, cut.save, cut.step):
        with pytest.raises(ValueError, match="was broken off in the middle"):
            go_on()
    cut.close("interrupted")
    again = GRPO.load(checkpoint, rewards={"right": RIGHT}, policy=make().policy)
    again.fit()
    assert differences(one, again) == []
    one.close(), again.close()


class Impatient:
    "Interrupts each step, and its saving twice."

    def on_step_end(self, trainer, row):
        os.kill(os.getpid(), signal.SIGINT)

    def on_save(self, trainer, path):
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            os.kill(os.getpid(), signal.SIGINT)


def test_interrupts_while_saving_leave_a_run_that_is_called_interrupted(tmp_path):
    trainer = make("steps=3", f"run.dir={tmp_path}", callbacks=[Impatient()])
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    trainer.close()
    assert trainer.run.status["state"] == "interrupted" and trainer.step_done == 1


def test_what_is_taken_back_is_not_counted_and_an_operator_is_heard():
    class Lengths:
        def process(self, rollout):
            return rollout, {"mine/length": rollout.lengths_N.double().mean()}

    trainer = make("steps=2", tasks=TasksetScheduler([TASKS], 6, operators=[Lengths()])).fit(1)
    good, trainer.advantages = trainer.advantages, lambda rollout: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.fit(1)
    trainer.advantages = good
    row = trainer.fit(1).history[-1]
    assert row["reward_calls"] == row["n_rollouts_generated"] == 48
    assert row["reward/right/n_ok"] == 24
    assert row["mine/length"] == pytest.approx(row["completions/mean_length"])


def test_an_update_that_fails_before_its_first_step_leaves_the_weights(capsys):
    trainer = make("steps=3").fit(1)
    before = weights(trainer)
    trainer.optimizer.register_step_pre_hook(lambda *_: None)
    good, trainer.policy.logp = trainer.policy.logp, lambda rollout: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer.fit(1)
    assert "weights and optimizer are those of step 1" in capsys.readouterr().out
    assert torch.equal(before, weights(trainer))
    trainer.policy.logp = good
    assert trainer.fit(1).step_done == 2


def test_a_run_that_is_there_is_refused_with_what_the_caller_can_do(tmp_path):
    folder = f"run.dir={tmp_path / 'run'}"
    make("steps=2", folder).fit(1).close()
    with pytest.raises(FileExistsError) as e:
        make("steps=2", folder, "run.if_exists=raise").fit()
    for remedy in (f"GRPO.load({str(tmp_path / 'run')!r})", "if_exists=resume", "if_exists=number"):
        assert remedy in str(e.value)
    make("steps=2", folder, "run.if_exists=resume").fit().close()  # the first remedy
    make("steps=2", f"run.dir={tmp_path / 'other'}").fit(1).close()
    load = lambda name, *over: GRPO.load(tmp_path / name, over, rewards={"right": RIGHT})
    with pytest.raises(FileExistsError, match="a new trainer with run.if_exists=resume"):
        load("other", folder, "run.if_exists=raise").fit()  # this one has other steps
    load("run", "steps=3").fit().close()
    numbered = load("other", folder).fit()
    numbered.close()
    assert numbered.run.dir.name == "run-2"


def test_weights_that_are_not_finite_end_training_and_are_never_saved(tmp_path):
    trainer = make("steps=3", f"run.dir={tmp_path}/r", "checkpoint.every=1")
    trainer.fit(2)
    real = trainer.optimizer.step

    def poisoned():
        real()
        next(iter(trainer.policy.parameters())).data.view(-1)[0] = math.nan

    trainer.optimizer.step = poisoned
    with pytest.raises(FloatingPointError, match="weights are not finite since step 3"):
        trainer.fit()
    trainer.close()
    assert len(trainer.history) == 3 and trainer.run.status["state"] == "failed"
    assert _check_seal(latest(trainer.run.dir / "checkpoints"))["step"] == 2


def test_the_history_of_a_long_run_is_whole_and_memory_keeps_a_window(tmp_path):
    loss = []
    keep = lambda t, row: loss.append(row["loss"])
    trainer = make("steps=5", f"run.dir={tmp_path}/r", callbacks=[keep])
    trainer.history.recent = deque(maxlen=2)
    trainer.fit()
    assert len(trainer.history.recent) == 2
    assert [row["loss"] for row in trainer.history] == loss
    assert [trainer.history[i]["loss"] for i in (0, -1)] == [loss[0], loss[-1]]
    assert [row["loss"] for row in trainer.history[1:4]] == loss[1:4]
    trainer.close()


OPTIONS = {"soft_overlong": {"max_length": 6, "buffer": 2}, "length_target": {"target": 4}, "format_match": {"pattern": "."}}  # fmt: skip


@pytest.mark.parametrize("name", REWARDS)
def test_every_reward_of_the_registry_trains_a_step(name):
    tasks = "gym:chain_sum" if name == "reasoning_gym_score" else "data:tasks/easy_train.jsonl"
    small = {"train_batch_size": 2, "num_generations": 2, "policy.max_new_tokens": 6}
    named = {"tasks.train": tasks, "rewards.functions": {name: OPTIONS.get(name)}}
    with closing(GRPO.from_config(small | named)) as trainer:
        assert trainer.step()["reward_calls"] == 4
