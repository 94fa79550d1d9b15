"""K epochs over one rollout: what must not move, what must, and the early stop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_processes import Table

from grpo_nb.core import seeded
from grpo_nb.losses import POLICY_LOSSES, LossConfig
from grpo_nb.tasks import Task
from grpo_nb.update import KLStop, UpdateConfig, update

GOOD = ("fixed", "progressive", "previous_epoch")


def case(seed=0):
    policy = Table(seed=seed)
    tasks = [Task("", {"index": i}) for i in range(3)]
    r = policy.sample(tasks, 6, seeded(seed, "sampling"))
    adv = torch.randn(len(r), generator=seeded(seed, "adv"), dtype=torch.float64)
    return policy, r, adv


def run(config, seed=0, lr=0.5, optimizer=torch.optim.SGD, **kw):
    policy, r, adv = case(seed)
    step = optimizer(policy.parameters(), lr)
    got = update(policy, r, adv, step, config, generator=seeded(0, "mb"), **kw)
    return policy.logits.detach(), got


def test_the_first_gradient_is_the_policy_gradient_by_finite_differences():
    policy, r, adv = case()
    logp = lambda z: z[r.states["task"]].log_softmax(-1).gather(-1, r.states["action"][..., None])
    f = lambda z: -(adv[:, None] * logp(z)[..., 0])[r.mask_NS].mean()
    start, eps = policy.logits.detach().clone(), 1e-6
    sgd = torch.optim.SGD(policy.parameters(), 1.0)
    update(policy, r, adv, sgd, UpdateConfig(max_grad_norm=None))
    step = start - policy.logits.detach()
    for index in ((0, 0, 0), (1, 1, 2), (2, 2, 3)):
        d = torch.zeros_like(start)
        d[index] = eps
        slope = (f(start + d) - f(start - d)) / (2 * eps)
        assert step[index].item() == pytest.approx(slope.item(), abs=1e-9)


@settings(max_examples=25, deadline=None)
@given(
    target=st.floats(1e-12, 1.0),
    lr=st.floats(1e-3, 10.0),
    size=st.sampled_from([None, 6]),
    least=st.integers(1, 4),
    scheme=st.sampled_from(GOOD),
)
def test_the_stop_never_yields_zero_updates_and_never_steps_from_too_far(
    target, lr, size, least, scheme
):
    stop = KLStop(target, min_updates=least)
    got = run(UpdateConfig(4, size, scheme=scheme, kl_stop=stop), lr=lr)[1]
    assert min(least, got.planned) <= got.done <= got.planned == 4 * (3 if size else 1)
    for i, row in enumerate(got.rows):
        assert row["stopped"] == (i >= least and row["kl_old/k3"] > 1.5 * target)
    assert bool(got.reason) == (got.done < got.planned) == got.rows[-1]["stopped"]


def test_the_stopped_update_leaves_parameters_and_optimizer_alone():
    config = UpdateConfig(num_epochs=30, kl_stop=KLStop(0.01))
    moved, got = run(config, optimizer=torch.optim.AdamW, lr=0.05)
    assert got.rows[-1]["stopped"]
    same, full = run(UpdateConfig(got.done), optimizer=torch.optim.AdamW, lr=0.05)
    assert torch.equal(moved, same) and full.done == got.done


def test_samples_of_older_policies_are_not_held_against_the_first_ratio():
    policy, r, adv = case()
    old = torch.arange(len(r)) % 2
    mixed = r.replace(old_logp_NS=r.old_logp_NS - 0.3 * old[:, None], info={"age": old})
    row = update(policy, mixed, adv, torch.optim.SGD(policy.parameters(), 0.5)).rows[0]
    assert row["upd/first_logp_diff"] == 0 and row["ratio/max"] > 1.3


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    budget=st.sampled_from([None, 1, 4, 9]),
    scheme=st.sampled_from(GOOD),
    kl=st.sampled_from([0.0, 0.2]),
    mode=st.sampled_from(["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]),
    skip=st.booleans(),
    dead=st.booleans(),
)
def test_micro_batches_order_and_skipping_change_nothing(
    seed, budget, scheme, kl, mode, skip, dead
):
    ends = []
    for i in range(2):
        policy, r, adv = case(seed)
        adv = torch.where(torch.arange(len(r)) < 6, 0.0, adv)
        mixed = torch.randperm(len(r), generator=seeded(seed, "order"))
        order = mixed if i else torch.arange(len(r))
        config = UpdateConfig(
            3,
            micro_tokens=budget if i else None,
            scheme=scheme,
            loss=LossConfig(kl_coef=kl, aggregation=mode),
            skip_zero_advantage=skip if i else False,
            kl_on_dead_groups=dead,
        )
        sgd = torch.optim.SGD(policy.parameters(), 0.5)
        update(policy, r[order], adv[order], sgd, config, Table(seed=9))
        ends.append(policy.logits.detach())
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-9)


def test_without_a_limit_the_policy_says_how_large_a_pass_is():
    def run(room):
        policy, r, adv = case()
        seen, logp = [], policy.logp
        policy.logp = lambda x: seen.append(int(x.mask_NS.sum())) or logp(x)
        if room:
            policy.micro_tokens = lambda rollout: room
        update(policy, r, adv, torch.optim.SGD(policy.parameters(), 0.5), UpdateConfig(2))
        return policy.logits.detach(), max(seen), int(r.lengths_N.max())

    whole, widest, longest = run(None)
    parts, narrow, _ = run(5)
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-12)
    assert narrow <= max(5, longest) < widest


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean"])
def test_truncated_samples_leave_numerator_and_denominator(aggregation):
    loss = LossConfig(aggregation=aggregation)
    (policy, r, adv), (alone, _, _) = case(), case()
    r.info["truncated"] = cut = torch.arange(len(r)) % 3 == 0
    sgd = lambda p: torch.optim.SGD(p.parameters(), 0.5)
    got = update(policy, r, adv, sgd(policy), UpdateConfig(loss=loss, mask_truncated=True))
    want = update(alone, r[~cut], adv[~cut], sgd(alone), UpdateConfig(loss=loss))
    torch.testing.assert_close(policy.logits, alone.logits, atol=1e-12, rtol=0)
    assert got.rows[0]["loss"] == pytest.approx(want.rows[0]["loss"], abs=1e-12)


def test_all_truncated_moves_nothing_and_a_policy_that_does_not_say_is_refused():
    policy, r, adv = case()
    sgd = torch.optim.SGD([policy.logits], 1.0)
    with pytest.raises(ValueError, match="needs info\\['truncated'\\]"):
        update(policy, r, adv, sgd, UpdateConfig(mask_truncated=True))
    before = policy.logits.detach().clone()
    r.info["truncated"] = torch.ones(len(r), dtype=torch.bool)
    config = UpdateConfig(mask_truncated=True, loss=LossConfig(kl_coef=0.1))
    got = update(policy, r, adv, sgd, config, Table(seed=5))
    assert torch.equal(policy.logits, before) and got.rows[0]["loss"] == 0


def test_a_loss_of_ones_own_may_ask_for_a_maximum_where_nothing_is_run(monkeypatch):
    def peak(log_ratio_NS, advantage_NS, logp_NS):
        return -advantage_NS / advantage_NS.abs().max() * logp_NS

    monkeypatch.setitem(POLICY_LOSSES, "peak", peak)
    policy, r, adv = case()
    adv[6:] = 0  # two of three minibatches
    config = UpdateConfig(minibatch_size=6, loss=LossConfig("peak"), scheme="progressive")
    sgd = torch.optim.SGD([policy.logits], 1.0)
    got = update(policy, r, adv, sgd, config, generator=seeded(0, "mb"))
    assert sorted(row["n_scored"] for row in got.rows) == [0, 0, 6] and got.done == 3
    assert got.frame()["kl_anchor/k3"].isna().sum() == 2  # not 0, which a mean would count
    dead = {"kl_on_dead_groups": False, "skip_zero_advantage": False, "check_tol": None}
    config = UpdateConfig(1, 6, loss=LossConfig(kl_coef=0.1), **dead)
    got = update(policy, r, adv, sgd, config, Table(seed=5), seeded(0, "mb"))
    assert got.frame().kl.isna().sum() == 2


@pytest.mark.parametrize(
    "logp, message",
    [
        (lambda x: x.detach(), "requires_grad False"),
        (lambda x: x[:, 0], r"numbers \(18, 3\) with gradients; got \(18,\)"),  # would be spread
        (lambda x: x[:, :, None], r"got \(18, 3, 1\)"),
    ],
)
def test_log_probs_of_another_shape_or_without_gradients_are_refused(logp, message):
    policy, r, adv = case()
    own = policy.logp
    policy.logp = lambda rollout: logp(own(rollout))
    with pytest.raises(ValueError, match=message):
        update(policy, r, adv, torch.optim.SGD(policy.parameters(), 0.1), UpdateConfig())
