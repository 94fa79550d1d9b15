"""Losses against numbers recorded from TRL and verl, finite differences, and properties that must hold for every input; K epochs over one rollout: what must not move, what must, and the early stop."""

import inspect
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import cases
from test_processes import Table

from grpo_nb.core import seeded
from grpo_nb.losses import AGGREGATIONS, POLICY_LOSSES, Clip, LossConfig, _clip_metrics, _item_mean
from grpo_nb.losses import _ratio_mask, aggregate, apply_mask, at_level, cispo, kl_penalty
from grpo_nb.losses import minibatch_counts, policy_loss, report
from grpo_nb.tasks import Task
from grpo_nb.update import KLStop, UpdateConfig, update

INF = math.inf
pytestmark = pytest.mark.filterwarnings("ignore:A sequence-level ratio")


def number(x):
    "float64 tensor of recorded numbers; null is NaN."
    return torch.as_tensor(np.asarray(x, np.float64))


def tensors(case):
    x = case["inputs"]
    out = {k: number(v) for k, v in x.items() if k != "row_ranges"}
    return out | {"mask": out["mask"].bool()} if "mask" in out else out


def check(got, want, tol):
    how = {"rtol": tol["rtol"], "atol": tol["atol"], "equal_nan": True}
    torch.testing.assert_close(number(got), number(want), **how)


def wanted(case):
    return case["expected"] | case.get("expected_right", {})


def loss_of(x, config, rows=slice(None), logp=None, **kw):
    "Loss and metrics of some rows; what the loss may look at is taken from the batch."
    at = lambda k: x[k][rows] if k in x else None
    logp = x["logp"] if logp is None else logp
    more = {f"{k}_NS": at(k) for k in ("item", "weight", "entropy")} | kw
    given = (at("old_logp"), at("advantages"), at("mask"), config, at("ref_logp"))
    return policy_loss(logp[rows], *given, **more)


def loss_and_grad(x, config, scale=1.0, **kw):
    "Value, gradient by logp and metrics."
    logp = x["logp"].clone().requires_grad_()
    loss, metrics = loss_of(x, config, logp=logp, **kw)
    (loss * scale).backward()
    return loss.detach() * scale, logp.grad, metrics


def check_both(got, case, tol=None):
    for value, name in zip(got, ("loss", "grad")):
        check(value, wanted(case)[name], tol or case["tolerance"])


# ---------------------------------------------------------------------------------------------------------- TRL

# loss type -> policy loss, aggregation
TRL = {
    "grpo": ("ppo", "seq_mean_token_mean"),
    "bnpo": ("ppo", "bnpo"),
    "dr_grpo": ("ppo", "dr_grpo"),
    "dapo": ("ppo", "token_mean"),
    "luspo": ("ppo", "luspo"),
    "cispo": ("cispo", "token_mean"),
    "sapo": ("sapo", "seq_mean_token_mean"),
    "vespo": ("vespo", "token_mean"),
}


def trl_config(p):
    name, mode = TRL[p["loss_type"]]
    extra = {}
    if name == "ppo":
        extra = {"clip": Clip(p["epsilon_low"], p["epsilon_high"]), "ratio_max": p["delta"]}
    elif name == "cispo":
        extra = {"ratio_max": p["epsilon_high"]}
    else:
        names = {f"{name}_temperature_{k}": f"tau_{k}" for k in ("pos", "neg")}
        names |= {k: k.removeprefix("vespo_") for k in p if k.startswith("vespo_")}
        extra = {"options": {v: p[k] for k, v in names.items() if k in p}}
    return LossConfig(
        name,
        level=p["importance_sampling_level"],
        aggregation=mode,
        max_length=p["max_completion_length"],
        count_empty=True,
        kl_coef=p["beta"],
        kl_importance=p["use_bias_correction_kl"],
        **extra,
    )


def trl_counts(p, mask):
    "Counts of the minibatch, and what the peer divides by besides: row means by the accumulation steps."
    ga = p["ga"] if p["mode"] == "train" else 1
    if TRL[p["loss_type"]][1] != "token_mean":
        return minibatch_counts(mask, count_empty=True), ga
    steps = p["steps_per_generation"] if p["mode"] == "train" else 1
    return torch.full((2, 2), max(p["num_items"], 1) * ga / steps, dtype=torch.float64), 1


def trl_capped_at_a_width(case, x):
    "Read as an absolute cap, 0.2 cuts every ratio: the gradient of reinforce times 0.2. Ours refuses it."
    logp = x["logp"]
    with pytest.raises(ValueError, match="must enclose 1"):
        cispo(logp, logp, logp, ratio_max=0.2)
    weight = torch.full_like(logp, 0.2)
    check_both(loss_and_grad(x, LossConfig("reinforce"), weight_NS=weight), case)


@pytest.mark.parametrize("case", cases("losses_trl"))
def test_trl(case, monkeypatch):
    p, x = case["params"], tensors(case)
    if case["name"] == "cispo/relative_looking_cap":
        return trl_capped_at_a_width(case, x)
    if case["name"] == "grpo/extreme":
        check_extreme_kl(case, x)
    if p["loss_type"] != "vespo":
        monkeypatch.setattr("grpo_nb.losses.LOG_RATIO_MAX", INF)  # the peer does not bound it
    config, mask, weight = trl_config(p), x["mask"], None
    if "off_policy_mask_threshold" in p:
        drift = apply_mask(x["old_logp"] - x["logp"], mask).sum(1) / mask.sum(1).clamp(min=1)
        near = (drift <= p["off_policy_mask_threshold"])[:, None]
        weight = ((apply_mask(x["advantages"], mask) >= 0) | near).double()
    if "top_entropy_quantile" in p:
        bound = x["entropies"][mask.bool()].double().quantile(1 - p["top_entropy_quantile"])
        weight = (x["entropies"] >= bound).double()
    counts, ga = trl_counts(p, mask)
    *got, metrics = loss_and_grad(x, config, 1 / ga, weight_NS=weight, counts=counts)
    check_both(got, case)
    got, loose = report(metrics), {"rtol": 1e-6, "atol": 1e-7}  # the peer's metrics are float32
    for name, value in wanted(case)["metrics"].items():
        if name not in ("vespo/phi_seq_mean", "entropy"):
            name = {"cispo_clip_ratio": "clip_ratio/high_mean"}.get(name, name)
            check(got[name], value, loose)


def check_extreme_kl(case, x):
    "Log ratios are bounded at 20: finite everywhere, and equal to the unbounded peer where that is not reached."
    loss, grad, _ = loss_and_grad(x, trl_config(case["params"]))
    assert loss.isfinite() and grad.isfinite().all()
    near = ((x["ref_logp"] - x["logp"]).abs() <= 20) & ((x["logp"] - x["old_logp"]).abs() <= 20)
    assert 0 < near.sum() < near.numel()
    check(grad[near], number(case["expected"]["grad"])[near], {"rtol": 1e-8, "atol": 1e-9})


# --------------------------------------------------------------------------------------------------------- verl

VERL = {"vanilla": "ppo", "gpg": "reinforce"}
VERL_OPTIONS = {
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "dro": {"beta": "dro_beta"},
    "dppo_tv": {"low": "clip_ratio_low", "high": "clip_ratio_high", "ratio_max": "clip_ratio_c"},
    "dppo_kl": {"low": "clip_ratio_low", "high": "clip_ratio_high", "ratio_max": "clip_ratio_c"},
}
SEQUENCE = ("gspo", "geo_mean")
SEQ_ONLY = ("sapo", "geo_mean")  # the peer ignores the aggregation mode of these


def verl_config(p):
    name = VERL.get(p["loss_mode"], p["loss_mode"])
    options = {k: p[v] for k, v in VERL_OPTIONS.get(name, {}).items() if v in p}
    clip = ratio_max = None
    if name in ("ppo", "gspo", "geo_mean"):
        clip = Clip(p.get("clip_ratio_low", 0.2), p.get("clip_ratio_high"), p.get("clip_ratio_c"))
    elif name == "cispo":  # relative widths there, absolute bounds here
        ratio_max = 1 + p["clip_ratio_high"]
        options["ratio_min"] = 1 - p["clip_ratio_low"]
    return LossConfig(
        name,
        clip=clip,
        ratio_max=ratio_max,
        options=options,
        aggregation="seq_mean_token_mean" if name in SEQ_ONLY else p["agg"],
        max_length=None,
    )


def verl_policy(case):
    p, x = case["params"], tensors(case)
    if "error" in case["expected"]:
        with pytest.raises(ValueError, match="must be > 1|options.beta must be"):
            loss_of(x, verl_config(p))
        return
    config = verl_config(p)
    config.max_length = x["mask"].shape[1]  # the peer's default horizon is the padded width
    # geo_mean alone counts rows without a token
    config.count_empty = p["loss_mode"] == "geo_mean"
    weight, tol = x.get("rollout_is_weights"), case["tolerance"]
    if config.policy_loss == "geo_mean":
        tol = geo_mean_tolerance(x, config, tol)
    elif config.aggregation == "seq-mean-token-mean":
        weight = peer_row_weight(x["mask"]) * (1.0 if weight is None else weight)
    *got, metrics = loss_and_grad(x, config, weight_NS=weight)
    check_both(got, case, tol)
    verl_metrics(case, x, config, report(metrics))


def peer_row_weight(mask):
    "The peer divides by (steps of the row + 1e-8); with this weight so do we."
    steps = mask.sum(1, keepdim=True).double()
    return (steps / (steps + 1e-8)).expand(mask.shape)


def geo_mean_tolerance(x, config, tol):
    "The same 1e-8 in the mean log ratio, advantage and weight: the recorded tolerance plus what that can change."
    steps = x["mask"].sum(1).clamp(min=1)
    log_r = at_level(x["logp"] - x["old_logp"], x["mask"], "sequence").abs().max().item()
    weight = x.get("rollout_is_weights")
    rows, _ = loss_of(x | {"advantages": x["advantages"].abs()}, config, weight_NS=weight)
    change = (4 + log_r) * 1e-8 / steps.min().item()
    return {"rtol": tol["rtol"] + change, "atol": tol["atol"] + change * rows.abs().item()}


def verl_metrics(case, x, config, got):
    "Clip shares and k1 of the peer, where it means the same: over tokens, with 1e-8 in the denominator."
    want, loose = case["expected"]["metrics"], {"rtol": 1e-7, "atol": 3e-8}
    if case["params"]["loss_mode"] == "vanilla":
        check(got["clip_ratio/region_mean"], want["pg_clipfrac"], loose)
        check(got["clip_ratio/dual_mean"], want["pg_clipfrac_lower"], loose)
    elif case["params"]["loss_mode"] == "gspo":  # the peer counts tokens, ours sequences
        ratio = at_level(x["logp"] - x["old_logp"], x["mask"], "sequence")
        by_token = _clip_metrics(ratio, x["advantages"], x["mask"], config.clip.bounds)
        check(report(by_token)["clip_ratio/region_mean"], want["pg_clipfrac"], loose)
    unbounded = "extreme" not in case["tags"] or case["params"]["loss_mode"] in SEQUENCE
    if unbounded and "ppo_kl" in want:
        check(got["kl_old/k1"], want["ppo_kl"], {"rtol": 1e-7, "atol": 3e-8})


def verl_micro_batches(case):
    p, x = case["params"], tensors(case)
    info = p["global_batch_info"]
    config = verl_config(p)
    config.max_length = info["loss_scale_factor"]
    counts = minibatch_counts(x["mask"])
    assert counts[0].tolist() == [info["batch_num_tokens"], info["global_batch_size"]]
    logp, parts = x["logp"].clone().requires_grad_(), []
    for a, b in case["inputs"]["row_ranges"]:
        rows = slice(a, b)
        weight = peer_row_weight(x["mask"][rows]) if p["agg"] == "seq-mean-token-mean" else None
        loss, _ = loss_of(x, config, rows, logp, weight_NS=weight, counts=counts)
        loss.backward()
        parts.append(loss.item())
    want, tol = wanted(case), case["tolerance"]
    check([parts], [want["losses"]], tol)
    check(sum(parts), want["loss_sum"], tol)
    check(logp.grad, want["grad"], tol)


def verl_aggregate(case):
    p, x = case["params"], tensors(case)
    width, ranks = p.get("loss_scale_factor", x["mask"].shape[1]), p.get("dp_size", 1)
    loss_mat = x["loss_mat"].clone().requires_grad_()
    if "error" in case["expected"]:
        if "dp_needs_count" not in case["name"]:  # ours has no rank count that could lack its total
            with pytest.raises(ValueError):
                aggregate(loss_mat, x["mask"], p["agg"])
        return
    tokens, rows = minibatch_counts(x["mask"])[0]
    counts = (p.get("batch_num_tokens", tokens), p.get("global_batch_size", rows))
    loss = aggregate(loss_mat, x["mask"], p["agg"], torch.tensor(counts), width) * ranks
    loss.backward()
    check_both((loss.detach(), loss_mat.grad), case)


def verl_kl(case):
    p, x = case["params"], tensors(case)
    logp = x["logp"].clone().requires_grad_()
    kl = kl_penalty(logp, x["ref_logp"], p["type"])
    kl.sum().backward()
    want_kl, want_grad = (number(case["expected"][k]) for k in ("kl", "grad"))
    d = x["ref_logp"] - x["logp"]
    # the peer cuts k3 at 10, where its gradient vanishes; ours bounds the log ratio only
    k3 = p["type"].removesuffix("+") in ("k3", "low_var_kl")
    cut = (d.clamp(-20, 20).expm1() - d.clamp(-20, 20) > 10) & k3
    assert "deliberate" not in case or cut.any()
    check(kl.detach()[~cut], want_kl[~cut], case["tolerance"])
    free = ~cut | p["type"].endswith("+")
    check(logp.grad[free], want_grad[free], case["tolerance"])
    assert (want_kl[cut] == 10).all() and (kl[cut] > 10).all() and kl.isfinite().all()
    live = cut & (d.abs() < 20)
    if not p["type"].endswith("+"):
        torch.testing.assert_close(logp.grad[live], 1 - d[live].exp(), rtol=1e-9, atol=0)
        assert (want_grad[cut] == 0).all()


GONE = ("clip_cov", "kl_cov")  # recorded; we have no such loss
OURS = [c for c in cases("losses_verl") if c.values[0]["params"].get("loss_mode") not in GONE]


@pytest.mark.parametrize("case", OURS)
def test_verl(case):
    kinds = dict(policy_loss=verl_policy, micro_batches=verl_micro_batches)
    kinds |= dict(agg_loss=verl_aggregate, kl_penalty=verl_kl)
    kinds[case["params"]["kind"]](case)


EVERY_LOSS = {
    "ppo": {"clip": Clip(0.2, 0.28, 3.0)},
    "gspo": {"clip": Clip(0.05)},
    "cispo": {"ratio_max": 1.5},
    "sapo": {},
    "geo_mean": {},
    "vespo": {},
    "reinforce": {},
    "dro": {"options": {"beta": 0.7}},
    "dppo_tv": {},
    "dppo_kl": {},
}


def test_every_registered_loss_is_tested():
    assert {POLICY_LOSSES[k] for k in EVERY_LOSS} == set(POLICY_LOSSES.values())


def draw_batch(seed, n, s, nan_outside=True, spread=0.4):
    g = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    mask = torch.rand(n, s, generator=g) < 0.7  # holes and empty rows included
    old = -normal(n, s).abs()
    out = {
        "logp": old + spread * normal(n, s),
        "old_logp": old,
        "ref_logp": old + spread * normal(n, s),
        "advantages": normal(n, s),
        "weight": 2 * torch.rand(n, s, generator=g, dtype=torch.float64),
        "entropy": normal(n, s).abs(),
    }
    item = torch.randint(-1, 3, (n, s), generator=g)
    if nan_outside:
        bad = torch.tensor([math.nan, INF, -INF], dtype=torch.float64)
        junk = bad[torch.randint(3, (n, s), generator=g)]
        out = {k: torch.where(mask, v, junk) for k, v in out.items()}
    return out | {"mask": mask, "item": item}


def run(b, config, parts=None):
    "Loss, gradient and metrics of a minibatch in micro-batches."
    logp = b["logp"].clone().requires_grad_()
    counts = minibatch_counts(b["mask"])
    total, metrics = 0.0, []
    for i in parts if parts is not None else [slice(None)]:
        loss, m = loss_of(b, config, i, logp, counts=counts)
        loss.backward()
        total, metrics = total + loss.item(), [*metrics, m]
    return total, logp.grad, report(*metrics)


def close(a, b, rtol=1e-9):
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-11, equal_nan=True)


def config_of(name, mode, level):
    level = "token" if name in (*SEQUENCE, "vespo") else level
    terms = {"kl_coef": 0.1, "kl_importance": True, "entropy_coef": 0.01} | EVERY_LOSS[name]
    return LossConfig(name, level=level, aggregation=mode, max_length=40, **terms)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 7),
    s=st.integers(1, 6),
    size=st.integers(1, 7),
    name=st.sampled_from(sorted(EVERY_LOSS)),
    mode=st.sampled_from(sorted(AGGREGATIONS)),
    level=st.sampled_from(["token", "sequence", "sequence_token", "item"]),
)
def test_split_order_and_padding_change_nothing(seed, n, s, size, name, mode, level):
    b, config = draw_batch(seed, n, s), config_of(name, mode, level)
    total, grad, metrics = run(b, config)
    assert math.isfinite(total) and grad.isfinite().all()
    assert (grad[~b["mask"]] == 0).all()
    more = lambda v: v.new_full((n, 2), math.nan) if v.is_floating_point() else v.new_zeros(n, 2)
    pad = lambda v: torch.cat([v, more(v)], 1)
    wide = run({k: pad(v) for k, v in b.items()}, config)
    close(wide[0], total)
    close(wide[1][:, :s], grad)
    close(list(wide[2].values()), list(metrics.values()))
    if mode == "bnpo":
        return  # depends on the split
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    other = run(b, config, order.split(size))
    close(other[0], total)
    close(other[1], grad)
    close([other[2][k] for k in metrics], list(metrics.values()))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), repeat=st.integers(1, 4))
def test_item_ratio_does_not_depend_on_title_length(seed, repeat):
    b = draw_batch(seed, 3, 5, nan_outside=False)
    x, mask, item = b["logp"] - b["old_logp"], b["mask"], b["item"]
    rep = lambda v: v.repeat_interleave(repeat, 1)
    close(_item_mean(rep(x), rep(mask), rep(item))[:, ::repeat], _item_mean(x, mask, item))
    got = _item_mean(x, mask, item)
    for i in range(3):
        for j in range(5):
            same = [k for k in range(5) if mask[i, k] and item[i, k] == item[i, j]]
            want = sum(x[i, k].item() for k in same) / len(same) if mask[i, j] else 0.0
            assert got[i, j].item() == pytest.approx(want, abs=1e-12)
            first = bool(mask[i, j]) and same[0] == j
            assert bool(_ratio_mask(mask, "item", item)[i, j]) == first


@pytest.mark.parametrize("level", ["token", "sequence", "item"])
@pytest.mark.parametrize("name", ["ppo", "sapo", "dro", "reinforce", "geo_mean"])
def test_gradient_is_the_finite_difference(name, level):
    b = draw_batch(7, 3, 3, nan_outside=False)
    for mode in ("token_mean", "seq_mean_item_mean"):
        config = config_of(name, mode, level)
        f = lambda x, c=config: loss_of(b, c, logp=x)[0]
        assert torch.autograd.gradcheck(f, b["logp"].clone().requires_grad_(), eps=1e-6)


@pytest.mark.parametrize("name", ["cispo", "vespo", "dppo_tv", "dppo_kl"])
def test_gradient_with_a_frozen_weight_is_weight_times_advantage(name):
    b = draw_batch(11, 5, 6, nan_outside=False)
    x, mask = b["logp"], b["mask"]
    config = LossConfig(name, **EVERY_LOSS[name])
    given = {"logp_NS": x, "old_logp_NS": b["old_logp"], "mask_NS": mask}
    asked = inspect.signature(POLICY_LOSSES[name]).parameters
    given = {k: v for k, v in given.items() if k in asked} | config.arguments()
    masked = (apply_mask(v, mask) for v in (x - b["old_logp"], b["advantages"]))
    step = POLICY_LOSSES[name](*masked, **given)
    frozen = (step / x).detach()  # the value per unit of logp is -weight * advantage
    f = lambda v: aggregate(frozen * v, b["mask"])
    assert torch.autograd.gradcheck(f, x.clone().requires_grad_())
    p, q = x.clone().requires_grad_(), x.clone().requires_grad_()
    policy_loss(p, b["old_logp"], b["advantages"], b["mask"], config)[0].backward()
    f(q).backward()
    close(p.grad, q.grad)


@settings(max_examples=40, deadline=None)
@given(st.floats(-200, 200), st.sampled_from(["k2", "k3", "low_var_kl", "mse", "abs", "k3+"]))
def test_kl_is_finite_and_not_negative(d, kind):
    for dtype in (torch.float32, torch.float64):
        p = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
        kl = kl_penalty(p, p.detach() + d, kind)
        kl.sum().backward()
        assert kl.isfinite().all() and p.grad.isfinite().all()
        assert (kl >= 0).all() or kl.abs() < 1e-6  # float32 rounding of exp(d) - 1 - d near 0


def test_half_precision_is_computed_in_float32():
    b = draw_batch(4, 4, 5, nan_outside=False)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in b.items()}
    full = {k: v.float() if v.is_floating_point() else v for k, v in half.items()}
    half["old_logp"] = full["old_logp"]  # stored when sampled
    for config in (LossConfig(), LossConfig(kl_coef=0.5, kl_importance=True)):
        low, same = loss_of(half, config)[0], loss_of(full, config)[0]
        assert low.dtype == torch.float32 and low == same


def test_empty_minibatch_and_empty_batch():
    p = torch.full((2, 3), math.nan, requires_grad=True)
    none = torch.zeros(2, 3)
    for name in EVERY_LOSS:
        for mode in ("token_mean", "grpo", "dr_grpo", "item", "bnpo"):
            config = config_of(name, mode, "token")
            junk = torch.full((2, 3), math.nan)
            more = (config, junk, torch.zeros(2, 3).long(), junk, junk)
            loss, m = policy_loss(p, junk, junk, none, *more)
            loss.backward()
            assert loss == 0 and (p.grad == 0).all()
            m = report(m)
            assert np.isnan([m["ratio/max"], m["ratio/q50"]]).all() and m["ratio/mean"] == 0
    e = torch.zeros(0, 3, requires_grad=True)
    loss, m = policy_loss(e, torch.zeros(0, 3), torch.zeros(0), torch.zeros(0, 3))
    loss.backward()
    assert loss == 0 and report(m)["clip_ratio/region_mean"] == 0


# the update

GOOD = ("fixed", "progressive", "previous_epoch")


def case(seed=0):
    policy = Table(seed=seed)
    tasks = [Task("", {"index": i}) for i in range(3)]
    r = policy.sample(tasks, 6, seeded(seed, "sampling"))
    adv = torch.randn(len(r), generator=seeded(seed, "adv"), dtype=torch.float64)
    return policy, r, adv


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
    policy, r, adv = case()
    how = UpdateConfig(4, size, scheme=scheme, kl_stop=KLStop(target, min_updates=least))
    sgd = torch.optim.SGD(policy.parameters(), lr)
    got = update(policy, r, adv, sgd, how, generator=seeded(0, "mb"))
    assert min(least, got.planned) <= got.done <= got.planned == 4 * (3 if size else 1)
    for i, row in enumerate(got.rows):
        assert row["stopped"] == (i >= least and row["kl_old/k3"] > 1.5 * target)
    assert bool(got.reason) == (got.done < got.planned) == got.rows[-1]["stopped"]


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


def test_all_truncated_moves_nothing():
    policy, r, adv = case()
    sgd = torch.optim.SGD([policy.logits], 1.0)
    before = policy.logits.detach().clone()
    r.info["truncated"] = torch.ones(len(r), dtype=torch.bool)
    config = UpdateConfig(mask_truncated=True, loss=LossConfig(kl_coef=0.1))
    got = update(policy, r, adv, sgd, config, Table(seed=5)).metrics()
    assert torch.equal(policy.logits, before) and got["loss"] == 0
    assert math.isnan(got["clip_ratio/region_mean"])  # no share of nothing


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
