"The training loop on the embedded model: rewards that fail, interrupts, recipes, groups; dynamic sampling inside it."

import itertools
import logging
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
from grpo_nb.all import GRPO, RewardRunner, TasksetScheduler, TokenPolicy, exact_answer, group_stats
from grpo_nb.cli import _open_block, _read_block, main
from grpo_nb.collector import FilterCapError, GroupCollector
from grpo_nb.config import override
from grpo_nb.files import read_jsonl
from grpo_nb.filter_groups import FilterGroupsConfig, decide
from grpo_nb.lab.checkpoint import _check_seal, latest
from grpo_nb.lab.frames import flat_keys
from grpo_nb.lab.recipe import GRPOConfig, load_config
from grpo_nb.lab.runs import Spec
from grpo_nb.optimizer import learning_rate
from grpo_nb.rewards import REWARDS
from grpo_nb.stream import TaskStream
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
    want = compute_advantages(rollout.rewards[:, 0] - 0.5 * kl_N, rollout.group_N).values
    torch.testing.assert_close(values, want, atol=1e-5, rtol=1e-5)
    same = make("rewards.kl_in_reward=0.5", "advantage.mode=gdpo", rewards={"one": lambda prompts: [1.0] * len(prompts)})  # fmt: skip
    assert same.step()["adv/max"] == 0 and same.reference is not None and make().reference is None
    few = {"some": lambda completions: [None, 1.0, 0.8, 0.8] * (len(completions) // 4)}
    half = make("rewards.kl_in_reward=0.5", "num_generations=4", rewards=few)
    half.reference.logp = lambda rollout, f=half.reference.logp: time.sleep(0.5) or f(rollout)
    row = half.step()
    assert row["adv/invalid_rows"] > 0 == half.last.advantages[0] and row["train_seconds"] > 0.5


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


def test_a_recipe_that_is_no_mapping_is_told_at_once(tmp_path):
    (tmp_path / "list.yaml").write_text("- steps: 3\n")
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="list.yaml must be a mapping"):
        load_config(tmp_path / "list.yaml")
    with pytest.raises(ValueError, match="binary.yaml cannot be read"):
        load_config(tmp_path / "binary.yaml")
    with pytest.raises(ValueError, match="cannot be read: .*directory"):
        load_config(tmp_path)


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
    trainer = make("steps=3", folder, callbacks=[stop]).fit()
    trainer.close()
    said = capsys.readouterr().out
    assert "then saving a checkpoint" in said
    assert f"A new process goes on with GRPO.load('{trainer.run.dir}')" in said
    GRPO.load(trainer.run.dir, rewards={"right": RIGHT}).close()


def test_a_second_interrupt_in_an_update_leaves_the_checkpoint_and_says_so(tmp_path, capsys):
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


# dynamic sampling inside the training loop: counters, feedback, limits, order

PROMPTS = Taskset.load(data_path("tasks/middle_train.jsonl"))[:1000]
FILTER = ("filter_groups.enable=true", "filter_groups.log_format=null", "threads=1")


def filtered(*over, reward=RIGHT, tasks=PROMPTS, **kw):
    rewards = reward if isinstance(reward, dict) else {"acc": reward}
    return make(*FILTER, *over, rewards=rewards, tasks=tasks, **kw)


class Watched(TaskStream):
    "A stream that remembers what it was told."

    def __init__(self, tasks, seed=0):
        super().__init__(tasks, seed)
        self.told, self.asked = [], []

    def read(self, n):
        self.asked.append(n)
        return super().read(n)

    def feedback(self, rollout):
        self.told.append(rollout)


def test_what_is_generated_and_what_is_trained_is_counted_apart_and_the_stream_hears_of_all():
    stream = Watched(PROMPTS)
    t = filtered("steps=3", "optimizer.schedule=linear", "optimizer.warmup=2", tasks=stream).fit()
    rows, last = t.history, t.history[-1]
    for row in rows:
        assert row["frac_reward_zero_std"] == row["filter/age_max"] == 0
        n, kept = 6 * row["filter/num_gen_batches"], row["filter/kept"]
        assert row["train/filter_rate"] == pytest.approx(1 - kept / n)
        assert row["train/num_kept_prompts"] == kept == 6 + row["filter/surplus"]
        assert row["filter/samples_per_trained"] == pytest.approx(n / 6)
        dead = row["filter/frac_all_high"] + row["filter/frac_all_low"]
        assert dead == pytest.approx(row["train/filter_rate"])
        assert 0 < row["train/mean_metric_std"] < 0.5
    batches = sum(r["train/num_gen_batches"] for r in rows)
    assert batches > 3 == t.step_done == t.policy_version == last["optimizer_steps"]
    assert t.collector.gen_steps == last["filter/gen_steps"] == batches
    assert last["n_rollouts_generated"] == batches * 24 > last["n_rollouts_trained"] == 72
    assert sum(stream.asked) == last["n_prompts"] == stream.cursor == batches * 6
    assert 0 < last["forward_tokens"] <= last["tokens_trained"] < last["tokens_generated"]
    prompts = sum(int(r.states["prompt_len"].sum()) for r in stream.told)
    assert last["num_tokens"] == last["tokens_generated"] + prompts
    row = filtered("steps=1", "update.num_epochs=2", "update.minibatch_size=8").fit().history[-1]
    assert row["optimizer_steps"] == 6 and row["forward_tokens"] == 2 * rows[0]["forward_tokens"]
    expected = [learning_rate(t.config.optimizer, s, 3) for s in range(3)]
    assert [r["learning_rate"] for r in rows] == expected
    assert [r.num_groups for r in stream.told] == stream.asked
    dropped = sum(stream.asked) - sum(r["filter/kept"] for r in rows)
    spreads = [group_stats(r.rewards_NR[:, 0], r.group_N).spread for r in stream.told]
    assert sum((x == 0).sum().item() for x in spreads) == dropped > 0
    order = [task.index for r in stream.told for task in r.tasks[::4]]
    assert order == [task.index for task in TaskStream(PROMPTS).read(len(order))]  # once, in order


VERL = """
algorithm:
  filter_groups:
    _target_: verl.trainer.config.FilterGroupsConfig
    enable: False # We try to avoid forgetting to set enable
    metric: null # acc / score / seq_reward / seq_final_reward / ...
    max_num_gen_batches: 0 # Non-positive values mean no upper limit
"""


def test_a_row_speaks_of_what_was_trained():
    t = filtered("steps=1", "filter_groups.action=mask").fit()
    row, kept_N = t.history[-1], t.last.rollout.taken_N
    assert 0 < row["filter/kept"] == row["filter/groups_trained"] < t.last.rollout.num_groups
    assert row["n_rollouts_trained"] == kept_N.sum() and row["completions/min_length"] > 0
    stop = "update.kl_stop.target=1e-12", "update.minibatch_size=8", "optimizer.lr=0.001"
    row = filtered("steps=1", "update.num_epochs=9", *stop).fit().history[-1]  # 1 of 27 updates
    assert (row["optimizer_steps"], row["n_rollouts_trained"]) == (1, 8)
    assert row["ratio/mean"] == pytest.approx(1)
    t = filtered("steps=2", "rewards.kl_in_reward=1", "optimizer.lr=0.001").fit()
    assert t.history[-1]["rewards/kl/mean"] < 0
    assert t.history[-1]["reward"] == pytest.approx(t.last.rollout.rewards.mean().item())


def test_the_block_of_verl_can_be_pasted(tmp_path):
    recipe, there = tmp_path / "recipe.yaml", "algorithm.filter_groups."
    recipe.write_text(VERL)
    off = load_config(recipe)
    assert not off.filter_groups.enable and filtered(config=off).collector is None
    over = [f"{there}enable=True", f"{there}metric=[acc,length]"]
    on = load_config(recipe, [*over, "train_batch_size=4", "num_generations=4", "steps=1"])
    f = on.filter_groups
    assert f.enable and f.metrics == ("acc", "length")
    assert load_config(recipe, [f"{there}min_spread=0.2"]).filter_groups.min_spread == 0.2
    short = lambda completions, **columns: [float(len(c) < 20) for c in completions]
    row = filtered(config=on, reward={"acc": only(()), "length": short}).fit().history[-1]
    assert row["frac_reward_zero_std"] == 0  # acc never varies
    assert row["filter/groups_trained"] == 4
    with pytest.raises(ValueError, match="Did you mean '.*max_num_gen_batches'"):
        load_config(recipe, [f"{there}max_gen_batches=3"])


@pytest.mark.parametrize("metric", [None, "acc", "seq_reward"])
def test_a_sample_without_a_step_has_no_part_in_anything(metric):
    t = filtered("filter_groups.enable=false", "steps=2")
    rollout = t.collect(PROMPTS[:2])
    acc = torch.tensor([1.0, 0, 1, -99, 1, 1, 1, -99])
    rejected = torch.tensor([3, 7])
    mask = rollout.mask_NS.clone()
    mask[rejected] = False
    token = torch.zeros(mask.shape)
    token[:, 0] = acc  # of a rejected sample beside the mask
    info = rollout.info | {"token_level_scores": token}
    rollout = rollout.replace(rewards_NR=acc[:, None], mask_NS=mask, info=info)
    values, metrics = t.advantages(rollout)
    assert values[rejected].tolist() == [0, 0] and (values[4:] == 0).all()
    whole = [i for i in range(8) if i not in rejected]
    assert torch.equal(values[whole], t.advantages(rollout[whole])[0])
    assert metrics["adv/invalid_rows"] == 2 and metrics["reward"] == pytest.approx(5 / 6)
    filters = FilterGroupsConfig(enable=True, metric=metric, log_format=None)
    assert decide(rollout, filters).keep_P.tolist() == [True, False]
    collector = GroupCollector(filters, 1)
    assert collector.collect(lambda n: rollout).metrics["filter/invalid"] == 2
    assert t.step(rollout)["adv/invalid_rows"] == 2
    assert t.last[2].rows[0]["n_zero_advantage"] == 5


def minus_mean(rewards, group_ids):
    means = torch.stack([rewards[group_ids == g].mean() for g in group_ids])
    return (rewards.sum(1) - means).tolist()


def own(mode=None, rule=None):
    over = ["filter_groups.on_cap=train_partial", "filter_groups.max_num_gen_batches=1", "steps=1"]
    config = load_config(None, [*SIZE, *FILTER, *over])
    config.advantage.mode, config.filter_groups.rule = mode or "grpo", rule
    return filtered(config=config)


def test_a_function_is_an_estimator_and_a_rule():
    found = own().collect(PROMPTS[:4])
    want, got = (own(mode).advantages(found)[0] for mode in ("dr_grpo", minus_mean))
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    kept = own(rule=lambda r, config: group_stats(r.rewards[:, 0], r.group_N).spread > 0).fit()
    assert kept.last[0].num_groups == own().fit().last[0].num_groups
    late = own()  # a configuration that is replaced is used by all parts
    late.config = override(late.config, {"filter_groups.rule": lambda r, c: [True] * r.num_groups})
    assert late.fit().last[0].num_groups == late.config.train_batch_size


@pytest.mark.parametrize(
    "mode,rule,told",
    [
        (lambda rewards: rewards, None, "estimator '<lambda>' is called with .*too many"),
        (lambda x, ids, beta: x, None, "estimator '<lambda>' .*missing a required .*: 'beta'"),
        (lambda x, ids: x, None, r"one number per sample, \(\d+,\); got \(\d+, 1\)"),
        (None, lambda r, c: [math.nan] * 6, "one bool per group"),
    ],
)
def test_what_a_function_does_wrong_is_told_and_no_update_is_broken_off(mode, rule, told, capsys):
    with pytest.raises(ValueError, match=told):
        own(mode, rule).fit()
    assert "broken off" not in capsys.readouterr().out


def only(indices):
    "Rewards that vary for some tasks only."

    def acc(completions, answer, **columns):
        return [float(i % 2) if int(a) % 10 in indices else 0.0 for i, a in enumerate(answer)]

    return acc


def test_a_skipped_step_trains_nothing_and_says_so():
    cap = ("filter_groups.max_num_gen_batches=2", "filter_groups.on_cap=skip_step")
    t = filtered("steps=2", *cap, reward=only(()))
    start = weights(t)
    t.fit()
    assert t.step_done == 2 and torch.equal(weights(t), start)
    assert t.collector.gen_steps == 4 and t.policy_version == 0
    for row in t.history:
        assert math.isnan(row["loss"]) and row["train/filter_rate"] == 1
        assert row["optimizer_steps"] == 0 and row["n_rollouts_trained"] == 0
    assert "all samples are wrong" in t.collector.warnings["cap"]


def test_carried_groups_keep_the_log_probs_of_the_policy_that_sampled_them():
    carry = ("filter_groups.surplus=carry", "filter_groups.max_staleness=1")
    t = filtered("steps=3", *carry, "optimizer.lr=1e-3", "optimizer.warmup=0")
    sampled, trained = {}, []
    sample = t.sample

    def remember(tasks):
        r = sample(tasks)
        for i, task in enumerate(r.tasks[::4]):
            rows = slice(4 * i, 4 * i + 4)
            sampled[task.index] = (t.step_done, r.old_logp_NS[rows], r.mask_NS[rows])
        return r

    t.sample = remember
    t.callbacks.append(lambda t, row: trained.append((row, t.last[0])))
    t.fit()
    old = 0
    for step, (row, r) in enumerate(trained):
        ages = r.info["age"]
        assert row["filter/age_max"] == ages.max() <= 1
        for i, task in enumerate(r.tasks[::4]):
            born, logp, mask = sampled[task.index]
            mine = r.mask_NS[4 * i : 4 * i + 4]
            assert ages[4 * i] == step - born
            assert torch.equal(r.old_logp_NS[4 * i : 4 * i + 4][mine], logp[mask])
            old += step > born
    assert old and trained[0][0]["filter/carried"] > 0


def test_a_warning_of_a_run_with_a_folder_reaches_the_terminal(tmp_path, monkeypatch, capsys):
    "With a file as its only handler the logger would stay silent."
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    nothing = lambda completions, **columns: [0.0] * len(completions)
    cap = ("filter_groups.max_num_gen_batches=2", f"run.dir={tmp_path / 'run'}", "steps=1")
    trainer = filtered(*cap, reward=nothing)
    with pytest.raises(FilterCapError, match="0 of 6 groups collected, 12 of 12 .* 12 all low"):
        trainer.fit()
    assert trainer.step_done == 0 and trainer.stream.cursor == 12
    trainer.close()
    told = "All 6 groups of a generation batch were filtered. Likely cause: "
    assert told in capsys.readouterr().err and told in (tmp_path / "run/train.log").read_text()
