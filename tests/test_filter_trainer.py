"Dynamic sampling inside the training loop, on the embedded model: counters, feedback, limits, order."

import logging
import math

import pytest
import test_trainer
import torch
from test_trainer import RIGHT, SIZE, weights

from grpo_nb.all import Taskset, data_path, group_stats, load_config
from grpo_nb.collector import FilterCapError, GroupCollector
from grpo_nb.config import override
from grpo_nb.filter_groups import FilterGroupsConfig, decide
from grpo_nb.optimizer import learning_rate
from grpo_nb.stream import TaskStream

TASKS = Taskset.load(data_path("tasks/middle_train.jsonl"))[:1000]
FILTER = ("filter_groups.enable=true", "filter_groups.log_format=null", "threads=1")


def make(*over, reward=RIGHT, tasks=TASKS, **kw):
    rewards = reward if isinstance(reward, dict) else {"acc": reward}
    return test_trainer.make(*FILTER, *over, rewards=rewards, tasks=tasks, **kw)


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


def constant_groups(rollout):
    return (group_stats(rollout.rewards_NR[:, 0], rollout.group_N).spread == 0).sum().item()


def test_what_is_generated_and_what_is_trained_is_counted_apart_and_the_stream_hears_of_all():
    stream = Watched(TASKS)
    t = make("steps=3", "optimizer.schedule=linear", "optimizer.warmup=2", tasks=stream).fit()
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
    passes = {"update.num_epochs": 2, "update.minibatch_size": 8, "steps": 1}
    row = make(*(f"{k}={v}" for k, v in passes.items())).fit().history[-1]
    assert row["optimizer_steps"] == 6 and row["forward_tokens"] == 2 * rows[0]["forward_tokens"]
    expected = [learning_rate(t.config.optimizer, s, 3) for s in range(3)]
    assert [r["learning_rate"] for r in rows] == expected
    assert [r.num_groups for r in stream.told] == stream.asked
    dropped = sum(stream.asked) - sum(r["filter/kept"] for r in rows)
    assert sum(map(constant_groups, stream.told)) == dropped > 0
    order = [task.index for r in stream.told for task in r.tasks[::4]]
    assert order == [task.index for task in TaskStream(TASKS).read(len(order))]  # once, in order


VERL = """
algorithm:
  filter_groups:
    _target_: verl.trainer.config.FilterGroupsConfig
    enable: False # We try to avoid forgetting to set enable
    metric: null # acc / score / seq_reward / seq_final_reward / ...
    max_num_gen_batches: 0 # Non-positive values mean no upper limit
"""


def test_a_row_speaks_of_what_was_trained():
    t = make("steps=1", "filter_groups.action=mask").fit()
    row, kept_N = t.history[-1], t.last.rollout.taken_N
    assert 0 < row["filter/kept"] == row["filter/groups_trained"] < t.last.rollout.num_groups
    assert row["n_rollouts_trained"] == kept_N.sum() and row["completions/min_length"] > 0
    stop = "update.kl_stop.target=1e-12", "update.minibatch_size=8", "optimizer.lr=0.001"
    row = make("steps=1", "update.num_epochs=9", *stop).fit().history[-1]  # after one of 27 updates
    assert (row["optimizer_steps"], row["n_rollouts_trained"]) == (1, 8)
    assert row["ratio/mean"] == pytest.approx(1)
    t = make("steps=2", "rewards.kl_in_reward=1", "optimizer.lr=0.001").fit()
    assert t.history[-1]["rewards/kl/mean"] < 0
    assert t.history[-1]["reward"] == pytest.approx(t.last.rollout.rewards.mean().item())


def test_the_block_of_verl_can_be_pasted(tmp_path):
    recipe, there = tmp_path / "recipe.yaml", "algorithm.filter_groups."
    recipe.write_text(VERL)
    off = load_config(recipe)
    assert not off.filter_groups.enable and make(config=off).collector is None
    over = [f"{there}enable=True", f"{there}metric=[acc,length]"]
    on = load_config(recipe, [*over, "train_batch_size=4", "num_generations=4", "steps=1"])
    f = on.filter_groups
    assert f.enable and f.metrics == ("acc", "length")
    assert load_config(recipe, [f"{there}min_spread=0.2"]).filter_groups.min_spread == 0.2
    short = lambda completions, **columns: [float(len(c) < 20) for c in completions]
    row = make(config=on, reward={"acc": only(()), "length": short}).fit().history[-1]
    assert row["frac_reward_zero_std"] == 0  # acc never varies
    assert row["filter/groups_trained"] == 4
    with pytest.raises(ValueError, match="Did you mean '.*max_num_gen_batches'"):
        load_config(recipe, [f"{there}max_gen_batches=3"])


@pytest.mark.parametrize("metric", [None, "acc", "seq_reward"])
def test_a_sample_without_a_step_has_no_part_in_anything(metric):
    t = make("filter_groups.enable=false", "steps=2")
    rollout = t.collect(TASKS[:2])
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
    return make(config=config)


def test_a_function_is_an_estimator_and_a_rule():
    found = own().collect(TASKS[:4])
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
def test_what_a_function_does_wrong_is_told_with_its_name_and_no_update_is_broken_off(
    mode, rule, told, capsys
):
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
    t = make("steps=2", *cap, reward=only(()))
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
    t = make("steps=3", *carry, "optimizer.lr=1e-3", "optimizer.warmup=0")
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
    trainer = make(*cap, reward=nothing)
    with pytest.raises(FilterCapError, match="0 of 6 groups collected, 12 of 12 .* 12 all low"):
        trainer.fit()
    assert trainer.step_done == 0 and trainer.stream.cursor == 12
    trainer.close()
    told = "All 6 groups of a generation batch were filtered. Likely cause: "
    assert told in capsys.readouterr().err and told in (tmp_path / "run/train.log").read_text()
