"""Losses against numbers recorded from TRL and verl, finite differences, and properties that must hold for every input."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    Clip,
    LossConfig,
    aggregate,
    at_level,
    band_covariance,
    cispo,
    clip_metrics,
    combine,
    covariance,
    drop_truncated,
    high_entropy_mask,
    inside,
    item_mean,
    kl_penalty,
    log_ratio,
    off_policy_keep,
    policy_loss,
    report,
    top_covariance,
    unit_mask,
    vespo,
    window_denominator,
    window_denominators,
)

DATA = Path(__file__).parent / "conformance"
INF = math.inf
pytestmark = pytest.mark.filterwarnings("ignore:A sequence-level ratio")


def cases(name):
    found = json.loads((DATA / name).read_text())["cases"]
    return [pytest.param(c, id=c["name"]) for c in found]


def number(x):
    "float64 tensor of recorded numbers; null is NaN."
    if isinstance(x, torch.Tensor):
        return x.double()
    fill = lambda v: [fill(i) for i in v] if isinstance(v, list) else math.nan if v is None else v
    return torch.tensor(fill(x), dtype=torch.float64)


def tensors(case):
    x = case["inputs"]
    out = {k: number(v) for k, v in x.items() if k != "row_ranges"}
    return out | {"mask": out["mask"].bool()} if "mask" in out else out


def check(got, want, tol):
    torch.testing.assert_close(
        number(got), number(want), rtol=tol["rtol"], atol=tol["atol"], equal_nan=True
    )


def wanted(case):
    return case["expected"] | case.get("expected_right", {})


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
    options = {} if name == "vespo" else {"limit": INF}  # the peer does not bound the log ratio
    extra = {}
    if name == "ppo":
        extra["clip"] = Clip(p["epsilon_low"], p["epsilon_high"])
        extra["ratio_max"] = p["delta"]
    elif name == "cispo":
        extra["ratio_max"] = p["epsilon_high"]
    elif name == "sapo":
        options["tau_pos"] = p.get("sapo_temperature_pos", 1.0)
        options["tau_neg"] = p.get("sapo_temperature_neg", 1.05)
    else:
        options |= {k.removeprefix("vespo_"): v for k, v in p.items() if k.startswith("vespo_")}
        options = {k: v for k, v in options.items() if k != "limit"}
    return LossConfig(
        name,
        level=p["importance_sampling_level"],
        options=options,
        aggregation=mode,
        max_length=p["max_completion_length"],
        count_empty=True,
        kl_coef=p["beta"],
        kl_importance=p["use_bias_correction_kl"],
        **extra,
    )


def trl_denominators(p, mask, config):
    "The peer divides row means by the accumulation steps, and token sums by its share of the generation batch."
    ga = p["ga"] if p["mode"] == "train" else 1
    if TRL[p["loss_type"]][1] == "token_mean":
        steps = p["steps_per_generation"] if p["mode"] == "train" else 1
        d = max(p["num_items"], 1) * ga / steps
    else:
        d = float(window_denominator(mask, config.aggregation, count_empty=True)) * ga
    return {"policy": d, "kl": d}


@pytest.mark.parametrize("case", cases("losses_trl.json"))
def test_trl(case):
    p, x = case["params"], tensors(case)
    if case["name"] == "cispo/relative_looking_cap":
        with pytest.raises(ValueError, match="must enclose 1"):
            logp, ones = x["logp"], x["mask"]
            cispo(logp - x["old_logp"], x["advantages"], ones, logp, ratio_max=0.2)
        want, scale = (
            wanted(case),
            0.2,
        )  # every ratio is cut to the cap: the gradient of reinforce times it
        logp = x["logp"].clone().requires_grad_()
        weight = torch.full_like(logp, scale)
        config = LossConfig("reinforce")
        loss, _ = policy_loss(
            logp, x["old_logp"], x["advantages"], x["mask"], config, weight_NS=weight
        )
        loss.backward()
        check(loss.detach(), want["loss"], case["tolerance"])
        check(logp.grad, want["grad"], case["tolerance"])
        return
    config = trl_config(p)
    logp, mask = x["logp"].clone().requires_grad_(), x["mask"]
    weight = None
    if "off_policy_mask_threshold" in p:
        threshold = p["off_policy_mask_threshold"]
        weight = off_policy_keep(logp, x["old_logp"], x["advantages"], mask, threshold)
    if "top_entropy_quantile" in p:
        weight = high_entropy_mask(x["entropies"], mask, p["top_entropy_quantile"]).double()
    # the KL of the peer is not bounded either
    if case["name"] == "grpo/extreme":
        return check_extreme_kl(case, x)
    loss, metrics = policy_loss(
        logp,
        x.get("old_logp"),
        x["advantages"],
        mask,
        config,
        x.get("ref_logp"),
        weight_NS=weight,
        denominators=trl_denominators(p, mask, config),
    )
    loss.backward()
    want, tol = wanted(case), case["tolerance"]
    check(loss.detach(), want["loss"], tol)
    check(logp.grad, want["grad"], tol)
    got, loose = report(metrics), {"rtol": 1e-6, "atol": 1e-7}  # the peer's metrics are float32
    for name, value in want["metrics"].items():
        if name == "cispo_clip_ratio":
            name = "clip_ratio/high_mean"
        elif name == "vespo/phi_seq_mean" or name == "entropy":
            continue
        check(got[name], value, loose)


def check_extreme_kl(case, x):
    "Our k3 is bounded at a log ratio of 20: finite everywhere, and equal to the unbounded peer where it is not reached."
    logp = x["logp"].clone().requires_grad_()
    config = trl_config(case["params"])
    loss, _ = policy_loss(logp, x["old_logp"], x["advantages"], x["mask"], config, x["ref_logp"])
    loss.backward()
    assert loss.isfinite() and logp.grad.isfinite().all()
    near = ((x["ref_logp"] - x["logp"]) <= 20) & ((x["logp"] - x["ref_logp"]) <= 20)
    want = torch.tensor(case["expected"]["grad"], dtype=torch.float64)
    assert 0 < near.sum() < near.numel()
    torch.testing.assert_close(logp.grad[near], want[near], rtol=1e-8, atol=1e-9)
    kl = kl_penalty(x["logp"], x["ref_logp"], limit=INF)
    check(kl.mean(), case["expected"]["metrics"]["kl"], {"rtol": 1e-6, "atol": 0})
    # with the bound lifted by hand the peer's numbers are ours
    logp = x["logp"].clone().requires_grad_()
    base = LossConfig(clip=config.clip, options=config.options, aggregation="grpo")
    loss, _ = policy_loss(logp, x["old_logp"], x["advantages"], x["mask"], base)
    kl = kl_penalty(logp, x["ref_logp"], limit=INF)
    loss = loss + config.kl_coef * aggregate(kl, x["mask"], "grpo")
    loss.backward()
    check(loss.detach(), case["expected"]["loss"], case["tolerance"])
    check(logp.grad, case["expected"]["grad"], case["tolerance"])


def test_trl_vespo_weight_is_the_recorded_one():
    for param in cases("losses_trl.json"):
        case = param.values[0]
        if case["params"]["loss_type"] != "vespo":
            continue
        x, config = tensors(case), trl_config(case["params"])
        old = x.get("old_logp", x["logp"])
        out = vespo(
            x["logp"] - old, torch.ones(len(old)), x["mask"], torch.ones_like(old), **config.options
        )
        signs = vespo(
            x["logp"] - old,
            -torch.ones(len(old)),
            x["mask"],
            torch.ones_like(old),
            **config.options,
        )
        phi = torch.where((x["advantages"] >= 0)[:, None], -out, signs)
        first = unit_mask(torch.ones_like(x["mask"]), "sequence")
        got = torch.where(x["mask"].any(1, keepdim=True), phi, 1.0)[
            first
        ].mean()  # an empty row has phi 1
        check(got, case["expected"]["metrics"]["vespo/phi_seq_mean"], {"rtol": 1e-6, "atol": 1e-8})


# --------------------------------------------------------------------------------------------------------- verl

VERL = {"vanilla": "ppo", "gpg": "reinforce"}
VERL_OPTIONS = {
    "sapo": {"tau_pos": "tau_pos", "tau_neg": "tau_neg"},
    "dro": {"beta": "dro_beta"},
    "kl_cov": {"coef": "ppo_kl_coef"},
    "dppo_tv": {"low": "clip_ratio_low", "high": "clip_ratio_high", "ratio_max": "clip_ratio_c"},
    "dppo_kl": {"low": "clip_ratio_low", "high": "clip_ratio_high", "ratio_max": "clip_ratio_c"},
}
SEQ_ONLY = ("sapo", "geo_mean")  # the peer ignores the aggregation mode of these


def verl_config(p):
    name = VERL.get(p["loss_mode"], p["loss_mode"])
    options = {k: p[v] for k, v in VERL_OPTIONS.get(name, {}).items() if v in p}
    clip = ratio_max = None
    if name in ("ppo", "gspo", "geo_mean", "clip_cov"):
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


def verl_selected(p, x):
    if p["loss_mode"] not in ("kl_cov", "clip_cov"):
        return None
    cov = covariance(x["logp"], x["advantages"], x["mask"])
    if p["loss_mode"] == "kl_cov":
        return top_covariance(cov, p["kl_cov_ratio"])
    a, ratio = x["advantages"], (x["logp"] - x["old_logp"]).exp()
    low, high = 1 - p["clip_ratio_low"], 1 + p["clip_ratio_high"]
    clipped = ((a > 0) & (ratio > high)) | ((a < 0) & (ratio < low))
    return band_covariance(
        cov, p["clip_cov_lb"], p["clip_cov_ub"], p["clip_cov_ratio"], exclude_NS=clipped
    )


def verl_policy(case):
    p, x = case["params"], tensors(case)
    if "error" in case["expected"]:
        with pytest.raises(ValueError, match="must exceed 1|beta must be positive"):
            policy_loss(x["logp"], x["old_logp"], x["advantages"], x["mask"], verl_config(p))
        return
    config = verl_config(p)
    config.max_length = x["mask"].shape[1]  # the peer's default horizon is the padded width
    # geo_mean alone counts rows without a token
    config.count_empty = p["loss_mode"] == "geo_mean"
    logp = x["logp"].clone().requires_grad_()
    weight, tol = x.get("rollout_is_weights"), case["tolerance"]
    if config.policy_loss == "geo_mean":
        tol = geo_mean_tolerance(x, config, tol)
    elif config.aggregation == "seq-mean-token-mean":
        weight = peer_row_weight(x["mask"]) * (1.0 if weight is None else weight)
    loss, metrics = policy_loss(
        logp,
        x["old_logp"],
        x["advantages"],
        x["mask"],
        config,
        weight_NS=weight,
        selected_NS=verl_selected(p, x),
    )
    loss.backward()
    want = wanted(case)
    check(loss.detach(), want["loss"], tol)
    check(logp.grad, want["grad"], tol)
    verl_metrics(case, x, config, report(metrics))


def peer_row_weight(mask):
    "The peer divides by (steps of the row + 1e-8); with this weight so do we."
    steps = mask.sum(1, keepdim=True).double()
    return (steps / (steps + 1e-8)).expand(mask.shape)


def geo_mean_tolerance(x, config, tol):
    "The same 1e-8 in the mean log ratio, advantage and weight: the recorded tolerance plus what that can change."
    steps = x["mask"].sum(1).clamp(min=1)
    log_r = at_level(x["logp"] - x["old_logp"], x["mask"], "sequence").abs().max().item()
    rows, _ = policy_loss(
        x["logp"], x["old_logp"], x["advantages"].abs(), x["mask"], config,
        weight_NS=x.get("rollout_is_weights"),
    )  # fmt: skip
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
        by_token = clip_metrics(ratio, x["advantages"], x["mask"], config.clip.bounds())
        check(report(by_token)["clip_ratio/region_mean"], want["pg_clipfrac"], loose)
    unbounded = not ({"extreme"} & set(case["tags"])) or case["params"]["loss_mode"] in (
        "gspo",
        "geo_mean",
    )
    if unbounded and case["params"]["loss_mode"] != "kl_cov" and "ppo_kl" in want:
        check(got["kl_old/k1"], want["ppo_kl"], {"rtol": 1e-7, "atol": 3e-8})


def verl_micro_batches(case):
    p, x = case["params"], tensors(case)
    info = p["global_batch_info"]
    config = verl_config(p)
    config.max_length = info["loss_scale_factor"]
    d = window_denominators(x["mask"], config)
    counts = {"token-mean": info["batch_num_tokens"]}
    assert int(d["policy"]) == counts.get(p["agg"], info["global_batch_size"])
    logp, losses = x["logp"].clone().requires_grad_(), []
    for a, b in case["inputs"]["row_ranges"]:
        rows = slice(a, b)
        mask = x["mask"][rows]
        weight = peer_row_weight(mask) if p["agg"] == "seq-mean-token-mean" else None
        loss, _ = policy_loss(
            logp[rows],
            x["old_logp"][rows],
            x["advantages"][rows],
            mask,
            config,
            weight_NS=weight,
            denominators=d,
        )
        loss.backward()
        losses.append(loss.item())
    want, tol = wanted(case), case["tolerance"]
    check([losses], [want["losses"]], tol)
    check(sum(losses), want["loss_sum"], tol)
    check(logp.grad, want["grad"], tol)


def verl_aggregate(case):
    p, x = case["params"], tensors(case)
    kw = {
        "max_length": p.get("loss_scale_factor", x["mask"].shape[1]),
        "ranks": p.get("dp_size", 1),
    }
    counts = {"token-mean": "batch_num_tokens"}.get(p["agg"], "global_batch_size")
    kw["denominator"] = p.get(counts)
    loss_mat = x["loss_mat"].clone().requires_grad_()
    if "error" in case["expected"]:
        with pytest.raises(ValueError):
            aggregate(loss_mat, x["mask"], p["agg"], **kw)
        return
    loss = aggregate(loss_mat, x["mask"], p["agg"], **kw)
    loss.backward()
    want = wanted(case)
    check(loss.detach(), want["loss"], case["tolerance"])
    check(loss_mat.grad, want["grad"], case["tolerance"])


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


@pytest.mark.parametrize("case", cases("losses_verl.json"))
def test_verl(case):
    kinds = {
        "policy_loss": verl_policy,
        "micro_batches": verl_micro_batches,
        "agg_loss": verl_aggregate,
        "kl_penalty": verl_kl,
    }
    kinds[case["params"]["kind"]](case)


def test_our_rule_for_empty_rows_differs_from_geo_mean_of_verl():
    case = next(c.values[0] for c in cases("losses_verl.json") if c.id == "geo_mean/empty_row")
    x, config = tensors(case), verl_config(case["params"])
    loss, _ = policy_loss(x["logp"], x["old_logp"], x["advantages"], x["mask"], config)
    rows, filled = len(x["mask"]), int(x["mask"].any(1).sum())
    assert filled < rows
    assert loss.item() == pytest.approx(case["expected"]["loss"] * rows / filled, rel=4e-8)


# --------------------------------------------------------------------------------------------------- properties

SPLIT_FREE = [k for k in AGGREGATIONS if k not in ("bnpo", "seq_mean_item_mean", "item")]
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
    "clip_cov": {},
    "kl_cov": {},
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
        "old": old,
        "ref": old + spread * normal(n, s),
        "adv": normal(n, s),
        "weight": 2 * torch.rand(n, s, generator=g, dtype=torch.float64),
        "entropy": normal(n, s).abs(),
    }
    item = torch.randint(-1, 3, (n, s), generator=g)
    selected = torch.rand(n, s, generator=g) < 0.3
    if nan_outside:
        bad = torch.tensor([math.nan, INF, -INF], dtype=torch.float64)
        junk = bad[torch.randint(3, (n, s), generator=g)]
        out = {k: torch.where(mask, v, junk) for k, v in out.items()}
    return out | {"mask": mask, "item": item, "selected": selected}


def run(b, config, parts=None, ranks=1):
    "Loss, gradient and metrics of a window in micro-batches."
    logp = b["logp"].clone().requires_grad_()
    d = window_denominators(b["mask"], config)
    total, metrics = 0.0, []
    for i in parts if parts is not None else [slice(None)]:
        loss, m = policy_loss(
            logp[i],
            b["old"][i],
            b["adv"][i],
            b["mask"][i],
            config,
            b["ref"][i],
            item_NS=b["item"][i],
            weight_NS=b["weight"][i],
            entropy_NS=b["entropy"][i],
            selected_NS=b["selected"][i],
            denominators=d,
            ranks=ranks,
        )
        loss.backward()
        total, metrics = total + loss.item(), [*metrics, m]
    return total, logp.grad, report(combine(metrics))


def close(a, b, rtol=1e-9):
    a, b = (torch.as_tensor(v, dtype=torch.float64) for v in (a, b))
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-11, equal_nan=True)


def config_of(name, mode, level):
    if name in ("gspo", "geo_mean", "vespo"):
        level = "token"
    return LossConfig(
        name,
        level=level,
        aggregation=mode,
        max_length=40,
        kl_coef=0.1,
        kl_importance=True,
        entropy_coef=0.01,
        **EVERY_LOSS[name],
    )


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
    pad = lambda v: torch.cat(
        [v, v.new_zeros(n, 2) if not v.is_floating_point() else v.new_full((n, 2), math.nan)], 1
    )
    wide = run({k: pad(v) for k, v in b.items()}, config)
    close(wide[0], total)
    close(wide[1][:, :s], grad)
    close(list(wide[2].values()), list(metrics.values()))
    if mode == "bnpo":
        return
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    other = run(b, config, order.split(size))
    close(other[0], total)
    close(other[1], grad)
    close([other[2][k] for k in metrics], list(metrics.values()))


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 6),
    name=st.sampled_from(sorted(EVERY_LOSS)),
    mode=st.sampled_from(sorted(AGGREGATIONS)),
)
def test_what_lies_outside_the_mask_does_not_matter(seed, n, name, mode):
    config = config_of(name, mode, "token")
    clean, dirty = (draw_batch(seed, n, 5, nan_outside=k) for k in (False, True))
    a, b = run(clean, config), run(dirty, config)
    close(a[0], b[0])
    close(a[1], b[1])
    close(list(a[2].values()), list(b[2].values()))


@settings(max_examples=20, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    name=st.sampled_from(sorted(EVERY_LOSS)),
    mode=st.sampled_from(SPLIT_FREE),
)
def test_two_ranks_with_averaged_gradients_are_one(seed, name, mode):
    b, config = draw_batch(seed, 6, 4), config_of(name, mode, "token")
    total, grad, _ = run(b, config)
    losses = [run(b, config, [half], ranks=2) for half in (slice(0, 2), slice(2, 6))]
    close(sum(x[0] for x in losses) / 2, total)
    close(sum(torch.zeros_like(grad) if x[1] is None else x[1] for x in losses) / 2, grad)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), repeat=st.integers(1, 4))
def test_item_ratio_does_not_depend_on_title_length(seed, repeat):
    b = draw_batch(seed, 3, 5, nan_outside=False)
    x, mask, item = b["logp"] - b["old"], b["mask"], b["item"]
    rep = lambda v: v.repeat_interleave(repeat, 1)
    close(item_mean(rep(x), rep(mask), rep(item))[:, ::repeat], item_mean(x, mask, item))
    got = item_mean(x, mask, item)
    for i in range(3):
        for j in range(5):
            same = [k for k in range(5) if mask[i, k] and item[i, k] == item[i, j]]
            want = sum(x[i, k].item() for k in same) / len(same) if mask[i, j] else 0.0
            assert got[i, j].item() == pytest.approx(want, abs=1e-12)
            first = bool(mask[i, j]) and same[0] == j
            assert bool(unit_mask(mask, "item", item)[i, j]) == first


# --------------------------------------------------------------------------------------------------- gradients


@pytest.mark.parametrize("level", ["token", "sequence", "item"])
@pytest.mark.parametrize("name", ["ppo", "sapo", "dro", "kl_cov", "clip_cov", "reinforce"])
def test_gradient_is_the_finite_difference(name, level):
    b = draw_batch(7, 3, 3, nan_outside=False)
    for mode in ("token_mean", "seq_mean_item_mean"):
        config = config_of(name, mode, level)
        f = lambda x, c=config: policy_loss(
            x,
            b["old"],
            b["adv"],
            b["mask"],
            c,
            b["ref"],
            b["item"],
            b["weight"],
            b["entropy"],
            selected_NS=b["selected"],
        )[0]
        assert torch.autograd.gradcheck(f, b["logp"].clone().requires_grad_(), eps=1e-6)


def test_gradient_of_geo_mean_is_the_finite_difference():
    b = draw_batch(7, 3, 4, nan_outside=False)
    config = LossConfig("geo_mean", aggregation="grpo", clip=Clip(0.2, 0.3))
    f = lambda x: policy_loss(
        x, b["old"], b["adv"][:, 0], b["mask"], config, weight_NS=b["weight"]
    )[0]
    assert torch.autograd.gradcheck(f, b["logp"].clone().requires_grad_(), eps=1e-6)


@pytest.mark.parametrize("name", ["cispo", "vespo", "dppo_tv", "dppo_kl"])
def test_gradient_with_a_frozen_weight_is_weight_times_advantage(name):
    b = draw_batch(11, 5, 6, nan_outside=False)
    x, ones = b["logp"], torch.ones_like(b["logp"])
    config = LossConfig(name, **EVERY_LOSS[name])
    extra = {"logp_NS": ones}  # the value per unit of logp is -weight * advantage
    if name.startswith(
        "dppo"
    ):  # the trust region looks at logp itself: read the weight off the value
        extra = {"logp_NS": x, "old_logp_NS": b["old"]}
    step = POLICY_LOSSES[name](x - b["old"], b["adv"], b["mask"], **extra, **config.arguments())
    frozen = (step / extra["logp_NS"]).detach()
    f = lambda v: aggregate(frozen * v, b["mask"])
    assert torch.autograd.gradcheck(f, x.clone().requires_grad_())
    p, q = x.clone().requires_grad_(), x.clone().requires_grad_()
    policy_loss(p, b["old"], b["adv"], b["mask"], config)[0].backward()
    f(q).backward()
    close(p.grad, q.grad)


def test_gradient_of_gspo_is_that_of_the_sequence_ratio():
    b = draw_batch(5, 6, 5, nan_outside=False)
    for clip in (Clip(0.01), Clip(0.5)):
        grads = []
        for config in (
            LossConfig("gspo", clip=clip, aggregation="grpo"),
            LossConfig("ppo", level="sequence", clip=clip, aggregation="grpo"),
            LossConfig("ppo", level="sequence_token", clip=clip, aggregation="grpo"),
        ):
            p = b["logp"].clone().requires_grad_()
            policy_loss(p, b["old"], b["adv"][:, 0], b["mask"], config)[0].backward()
            grads.append(p.grad)
        close(grads[0], grads[1])
        close(grads[0], grads[2])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
def test_gradient_of_kl_is_the_finite_difference(kind):
    b = draw_batch(3, 3, 4, nan_outside=False)
    for weighted in (False, True):
        f = lambda x, w=weighted: kl_penalty(
            x, b["ref"], kind, b["mask"], x - b["old"] if w else None
        ).sum()
        assert torch.autograd.gradcheck(f, b["logp"].clone().requires_grad_(), eps=1e-6)
    p = b["logp"].clone().requires_grad_()
    kl = kl_penalty(p, b["ref"], kind + "+", b["mask"])
    close(kl.detach(), kl_penalty(b["logp"], b["ref"], kind, b["mask"]))
    kl.sum().backward()
    close(p.grad, torch.where(b["mask"], b["logp"] - b["ref"], 0.0))


@settings(max_examples=40, deadline=None)
@given(
    d=st.floats(-200, 200), kind=st.sampled_from(["k2", "k3", "low_var_kl", "mse", "abs", "k3+"])
)
def test_kl_is_finite_and_not_negative(d, kind):
    for dtype in (torch.float32, torch.float64):
        p = torch.tensor([[-1.0]], dtype=dtype, requires_grad=True)
        kl = kl_penalty(p, p.detach() + d, kind)
        kl.sum().backward()
        assert kl.isfinite().all() and p.grad.isfinite().all()
        assert (kl >= 0).all() or kl.abs() < 1e-6  # float32 rounding of exp(d) - 1 - d near 0


# ------------------------------------------------------------------------------------------- laws of the update


@pytest.mark.parametrize("name", sorted(EVERY_LOSS))
def test_all_losses_agree_on_policy(name):
    b = draw_batch(1, 5, 4, nan_outside=False)
    adv = b["adv"][:, 0]
    config = LossConfig(name, aggregation="grpo", **EVERY_LOSS[name])
    selected = torch.zeros_like(b["mask"])
    p = b["logp"].clone().requires_grad_()
    policy_loss(p, None, adv, b["mask"], config, selected_NS=selected)[0].backward()
    rows = b["mask"].any(1).sum()
    want = -adv[:, None] / b["mask"].sum(1, keepdim=True).clamp(min=1) / rows
    close(p.grad, torch.where(b["mask"], want, 0.0))


@pytest.mark.parametrize("level", ["token", "sequence", "sequence_token", "item"])
def test_zero_step_means_ratio_one(level):
    b = draw_batch(2, 5, 4)
    config = LossConfig(level=level, aggregation="grpo")
    _, m = policy_loss(b["old"], b["old"], b["adv"], b["mask"], config, item_NS=b["item"])
    m = report(m)
    assert m["ratio/min"] == m["ratio/max"] == m["ratio/q50"] == m["ratio/mean"] == 1
    assert m["kl_old/k1"] == m["kl_old/k3"] == m["clip_ratio/region_mean"] == 0


def test_group_baseline_gives_value_zero_and_gradient_not_zero():
    p = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).requires_grad_()
    adv = torch.tensor([1.5, -0.5, -0.5, -0.5])
    loss, _ = policy_loss(p, p.detach().clone(), adv, torch.ones(4, 3))
    loss.backward()
    assert abs(loss.item()) < 1e-7 and p.grad.norm() > 0.1


def test_half_precision_is_computed_in_float32():
    b = draw_batch(4, 4, 5, nan_outside=False)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in b.items()}
    full = {k: v.float() if v.is_floating_point() else v for k, v in half.items()}
    loss, _ = policy_loss(half["logp"], half["old"], half["adv"], b["mask"])
    want, _ = policy_loss(full["logp"], full["old"], full["adv"], b["mask"])
    assert loss.dtype == torch.float32 and loss == want


def test_empty_window_and_empty_batch():
    p = torch.full((2, 3), math.nan, requires_grad=True)
    none = torch.zeros(2, 3)
    for name in EVERY_LOSS:
        for mode in ("token_mean", "grpo", "dr_grpo", "item", "bnpo"):
            config = config_of(name, mode, "token")
            junk = torch.full((2, 3), math.nan)
            loss, m = policy_loss(
                p, junk, junk, none, config, junk, torch.zeros(2, 3).long(), junk, junk,
                selected_NS=none.bool(),
            )  # fmt: skip
            loss.backward()
            assert loss == 0 and (p.grad == 0).all()
            m = report(m)
            assert (
                math.isnan(m["ratio/max"]) and math.isnan(m["ratio/q50"]) and m["ratio/mean"] == 0
            )
    e = torch.zeros(0, 3, requires_grad=True)
    loss, m = policy_loss(e, torch.zeros(0, 3), torch.zeros(0), torch.zeros(0, 3))
    loss.backward()
    assert loss == 0 and report(m)["clip_ratio/region_mean"] == 0


def test_truncated_rows_leave_numerator_and_denominator():
    b = draw_batch(8, 6, 4)
    b["mask"][:, 0] = True
    b = {k: torch.where(b["mask"], v, 0.0) if v.is_floating_point() else v for k, v in b.items()}
    done = torch.tensor([1, 0, 1, 1, 0, 1]).bool()
    for mode in SPLIT_FREE:
        config = LossConfig(aggregation=mode, max_length=4)
        cut = drop_truncated(b["mask"], done)
        a, _ = policy_loss(b["logp"], b["old"], b["adv"], cut, config)
        only = {k: v[done] for k, v in b.items()}
        want, _ = policy_loss(only["logp"], only["old"], only["adv"], only["mask"], config)
        close(a, want)


def test_clip_cov_draws_from_the_given_generator():
    cov = torch.linspace(0.0, 2.0, 100)[None]
    pick = lambda seed: band_covariance(cov, 0.5, 1.5, 0.1, torch.Generator().manual_seed(seed))
    assert (
        pick(0).sum() == 10 and torch.equal(pick(0), pick(0)) and not torch.equal(pick(0), pick(1))
    )
    assert ((cov > 0.5) & (cov < 1.5))[pick(0)].all()


def test_log_ratio_takes_the_difference_in_float32():
    logp = torch.tensor([[-1.0, -20.0]], dtype=torch.float16)
    got = log_ratio(logp, logp.float() - 1e-4, torch.ones(1, 2))
    torch.testing.assert_close(got, torch.full((1, 2), 1e-4), rtol=0.02, atol=0)


def test_shapes_are_checked():
    ok = torch.zeros(2, 3)
    for bad in (torch.zeros(3), torch.zeros(2, 2), torch.zeros(2, 3, 1)):
        with pytest.raises(ValueError, match="for a mask of shape"):
            policy_loss(ok, ok, bad, torch.ones(2, 3))
        with pytest.raises(ValueError, match="for a mask of shape"):
            inside(bad, torch.ones(2, 3))
    with pytest.raises(ValueError, match="requires grad"):
        policy_loss(ok, ok.clone().requires_grad_(), torch.zeros(2), torch.ones(2, 3))
    with pytest.raises(ValueError, match="give the window's denominators"):
        policy_loss(ok, ok, torch.zeros(2), torch.ones(2, 3), ranks=2)
    with pytest.raises(ValueError, match="needs selected_NS"):
        policy_loss(ok, ok, torch.zeros(2), torch.ones(2, 3), LossConfig("kl_cov"))
    with pytest.raises(ValueError, match="needs entropy_NS"):
        policy_loss(ok, ok, torch.zeros(2), torch.ones(2, 3), LossConfig(entropy_coef=0.1))


def test_yaml_style_overrides_reach_the_clip():
    omegaconf = pytest.importorskip("omegaconf")
    base = omegaconf.OmegaConf.structured(LossConfig)
    over = omegaconf.OmegaConf.from_dotlist(["clip.low=0.3", "policy_loss=dro", "options.beta=0.5"])
    with pytest.raises(ValueError, match="Unknown option of 'dro' 'clip'"):
        omegaconf.OmegaConf.to_object(omegaconf.OmegaConf.merge(base, over))
    over = omegaconf.OmegaConf.from_dotlist(["clip.low=0.3"])
    config = omegaconf.OmegaConf.to_object(omegaconf.OmegaConf.merge(base, over))
    assert config.arguments()["clip"].bounds() == pytest.approx((0.7, 1.3))


def test_importance_weighted_kl_takes_its_difference_in_float32():
    b = draw_batch(4, 4, 5, nan_outside=False)
    half = {k: v.bfloat16() if v.is_floating_point() else v for k, v in b.items()}
    full = {k: v.float() if v.is_floating_point() else v for k, v in half.items()}
    config = LossConfig(kl_coef=0.5, kl_importance=True)
    run_on = lambda x: policy_loss(x["logp"], x["old"], x["adv"], b["mask"], config, x["ref"])[0]
    assert run_on(half) == run_on(full)


def test_k3_pulls_back_from_both_sides_however_far():
    "Verl and others bound the log ratio below too, which takes the gradient from a policy far above its reference."
    for d, sign in ((-150.0, 1), (-25.0, 1), (-1.0, 1), (1.0, -1), (19.0, -1)):
        p = torch.tensor([[-1.0]], dtype=torch.float64, requires_grad=True)
        kl_penalty(p, p.detach() + d).sum().backward()
        assert math.copysign(1, p.grad.item()) == sign and abs(p.grad.item()) > 0.5


def test_the_bounds_in_force_are_known():
    both = LossConfig(clip=Clip(0.2, 0.28))
    assert both.bounds() == {"clip/low": 0.8, "clip/high": 1.28}
    assert LossConfig("gmpo", aggregation="grpo").bounds() == pytest.approx(
        {"clip/low": math.exp(-0.4), "clip/high": math.exp(0.4)}
    )
