import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from records import agree, cases, wanted

from grpo_nb.advantages import ADVANTAGES, AdvantageConfig, compute_advantages, dr_grpo, gate, gdpo
from grpo_nb.advantages import gdpo_verl, gpg, grpo, mo_grpo, opo, passk, reinforce_pp_baseline
from grpo_nb.advantages import rloo, spread_to_tokens
from grpo_nb.core import Groups, group_stats
from grpo_nb.filter_groups import varies

NAN = float("nan")
pytestmark = pytest.mark.filterwarnings("ignore:GDPO's batch stage over a single group")


F64 = dict(dtype=torch.float64)

# Conformance. Where a record is not matched in the estimators' default form, the reason stands here.
# - trl: frac_reward_zero_std: ours is always the share of groups in which every raw component is
#   constant; TRL takes the weighted sum (so components that cancel count as constant), or a
#   property of the batch under scale_rewards='batch' and under GDPO; counted over groups with a
#   valid reward
# - trl: one reward under normalize_then_sum: TRL whitens the batch even with one reward; ours is
#   plain GRPO by default, TRL's numbers come with single='whiten'
# - verl: one-sample groups: verl returns the raw reward (no baseline); ours is 0 by default, verl's
#   numbers come with singleton='raw' (except rloo_vectorized, which is 0 in verl too)
# - verl: token whitening: verl's batch stage counts every token, so long answers set mean and
#   scale; ours counts responses by default, verl's numbers come with gdpo_verl
# - verl: zero-length row: its reward belongs to the group's statistics as in verl unless the caller
#   masks the row (mask_NK), which also takes it out of the baseline
# - verl: gdpo/single_token_total: verl raises when the batch holds a single token; ours is 0
# - multireward: gate: theirs opens at exactly 1, ours from `at_least` on; the records are met with
#   at_most=1
# - multireward: subgroup: theirs returns rewards centred over the passers, ours takes the others
#   out of the statistics (NaN); the centred values are those of dr_grpo

# where TRL's frac_reward_zero_std may be another one
EXPLAINED = {"batch", "normalize_then_sum", "float_noise", "cancel", "none"}


def trl_config(params):
    if params["multi_objective_aggregation"] == "normalize_then_sum":
        return AdvantageConfig("gdpo", params["reward_weights"], options=dict(single="whiten"))
    mode = {"group": "grpo", "batch": "grpo_batch", "none": "dr_grpo"}[params["scale_rewards"]]
    return AdvantageConfig(mode, params["reward_weights"])


@pytest.mark.parametrize("case", cases("advantages_trl"))
def test_trl(case):
    rewards = np.array(case["inputs"]["rewards"], dtype=np.float64)
    group_N = np.arange(len(rewards)) // case["params"]["num_generations"]
    out = compute_advantages(rewards, group_N, config=trl_config(case["params"]))
    agree(out.values, wanted(case)["advantages"], case["tolerance"])
    assert not out.values.isnan().any()
    if "expected_right" in case:
        assert (out.values == 0).all()
    for name, value in case["expected"]["metrics"].items():
        if name == "frac_reward_zero_std" and not math.isclose(out.metrics[name], value):
            assert EXPLAINED & {*case["tags"], *map(str, case["params"].values())}
        elif value is None:
            assert math.isnan(out.metrics[name])
        else:
            agree([out.metrics[name]], [value], dict(rtol=1e-5, atol=1e-5))


@pytest.mark.parametrize("case", cases("advantages_multireward"))
def test_multireward(case):
    params, expected = case["params"], case["expected"]
    rewards = torch.tensor(case["inputs"]["rewards"], dtype=torch.float64)
    estimate, what = advantages, "advantages"
    if params["op"] == "conditioning":
        estimate, what = conditioned, "rewards"
    with pytest.raises(ValueError) if "error" in expected else nullcontext():
        got = estimate(rewards, params)
        agree(got.flatten(), np.ravel(expected[what]), case["tolerance"])


def advantages(rewards, params):
    group_N = torch.zeros(len(rewards), dtype=torch.long)
    if params["op"] == "advantage_batch":
        group_N = torch.arange(len(rewards)).repeat_interleave(rewards.shape[1])
        rewards = rewards.flatten(0, 1)
    kw = dict(eps=params["eps"], ddof=0, **F64)
    if params["mode"] == "single":
        return grpo(rewards[:, 0], group_N, **kw)
    mode = {"na": "mo_grpo", "an": "grpo"}.get(params["mode"], params["mode"])
    return ADVANTAGES[mode](rewards, group_N, params["weights"], **kw)


def conditioned(rewards, params):
    if params["impl"] == "none":
        return rewards
    at = params["conditioned"]
    got = gate(rewards, at, params["gate"], at_least=1, at_most=1, how=params["impl"]).clone()
    if params["impl"] == "subgroup":
        got[:, at] = ADVANTAGES["dr_grpo"](got[:, at], [0] * len(got), **F64)
    return got


def verl_call(case):
    inputs, params = case["inputs"], case["params"]
    eps, name = params["epsilon"], params["estimator"]
    by_std = params.get("norm_adv_by_std", True)
    dtype = torch.float32 if params["dtype"] == "float32" else torch.float64
    lengths = inputs["lengths"]
    if "mask" in inputs:
        lengths = np.array(inputs["mask"]).sum(1).tolist()
    raw, groups = dict(singleton="raw", **F64), inputs["group_ids"]
    if name == "gdpo":
        by_key = [inputs["rewards_by_key"][k] for k in params["reward_keys"]]
        rewards = torch.tensor(by_key, dtype=dtype).t()
        kw = dict(eps=eps, norm_adv_by_std=by_std, lengths_N=lengths, **raw)
        return gdpo_verl(rewards, groups, params["reward_weights"], **kw)
    rewards = torch.tensor(inputs["rewards"], dtype=dtype)
    if name in ("grpo", "grpo_vectorized"):
        return grpo(rewards, groups, eps=eps, **raw) if by_std else dr_grpo(rewards, groups, **raw)
    if name == "rloo":
        return rloo(rewards, groups, **raw)
    if name == "rloo_vectorized":
        return rloo(rewards, groups, **F64)
    if name == "opo":
        return opo(rewards, groups, lengths_N=lengths, **raw)
    if name == "gpg":
        return gpg(rewards, groups, **raw)
    if name == "grpo_passk":
        scale = "group" if by_std else "none"
        return passk(rewards, groups, scale=scale, eps=eps, **F64)
    if name == "reinforce_plus_plus_baseline":
        return reinforce_pp_baseline(rewards, groups, level="token", lengths_N=lengths, **raw)
    raise AssertionError(name)


@pytest.mark.parametrize("case", cases("advantages_verl"))
def test_verl(case):
    want = wanted(case)
    if case["name"] == "gdpo/single_token_total":
        assert verl_call(case).tolist() == [0.0]
        return
    if "error" in want:
        with pytest.raises(ValueError):
            verl_call(case)
        return
    got = verl_call(case)
    compare, tolerance = np.array(want["compare"]), case["tolerance"]
    agree(got.numpy()[compare], np.array(want["advantages"])[compare], tolerance)
    if "expected_right" in case:
        zero = np.array(want["advantages"]) == 0.0
        assert (got.numpy()[zero] == 0).all()
    if "token_advantages" in want and "mask" not in case["inputs"]:
        steps = torch.arange(case["inputs"]["max_length"])
        mask = steps < torch.tensor(case["inputs"]["lengths"])[:, None]
        tokens = spread_to_tokens(got, mask)
        agree(tokens, want["token_advantages"], tolerance)
    if "pre_norm" in want and case["params"].get("norm_adv_by_std"):
        inputs = case["inputs"]
        rewards = [inputs["rewards_by_key"][k] for k in case["params"]["reward_keys"]]
        weights = case["params"]["reward_weights"]
        kw = dict(eps=case["params"]["epsilon"], singleton="raw", **F64)
        pre = mo_grpo(torch.tensor(rewards).t(), inputs["group_ids"], weights, **kw)
        agree(pre.numpy()[compare], np.array(want["pre_norm"])[compare], tolerance)


# Loops, straight from the formulas


def slow_z(column, groups, least=0.0):
    "Deviations of a group's values by its standard deviation; 0 for those that vary no more than `least`."
    out = np.zeros(len(column))
    for g in set(groups):
        rows = [i for i, h in enumerate(groups) if h == g and not math.isnan(column[i])]
        values = [float(column[i]) for i in rows]
        if len(values) < 2 or max(values) - min(values) <= least:
            continue
        mean = math.fsum(values) / len(values)
        std = math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))
        for i in rows:
            out[i] = (column[i] - mean) / (std + 1e-4)
    return out


def slow_gdpo(x, groups, weights):
    s = sum(w * slow_z(x[:, k], groups) for k, w in enumerate(weights))
    s[np.isnan(x).all(1)] = NAN
    return slow_z(s, [0] * len(x), least=1e-12)


reward = st.sampled_from([0.0, 1.0, 0.1, 0.7, 0.35, -1.5, 3.25, 100.0]) | st.floats(-5, 5)
RUN = settings(max_examples=20, deadline=None)


@st.composite
def batches(draw, missing=True, min_rows=1):
    n, r = draw(st.integers(min_rows, 12)), draw(st.integers(1, 3))
    value = st.one_of(reward, st.just(NAN)) if missing else reward
    x = np.array(draw(st.lists(st.lists(value, min_size=r, max_size=r), min_size=n, max_size=n)))
    groups = draw(st.lists(st.integers(0, 3), min_size=n, max_size=n))
    weights = draw(st.lists(st.sampled_from([1.0, 0.5, 2.0]), min_size=r, max_size=r))
    return x.reshape(n, r), groups, weights


@RUN
@given(batches())
def test_gdpo_and_grpo_equal_the_loops(batch):
    x, groups, weights = batch
    got = gdpo(x, groups, weights, single="whiten", **F64).numpy()
    np.testing.assert_allclose(got, slow_gdpo(x, groups, weights), atol=1e-7)
    total = np.where(np.isnan(x).all(1), NAN, (np.nan_to_num(x) * weights).sum(1))
    got = grpo(x, groups, weights, **F64).numpy()
    np.testing.assert_allclose(got, slow_z(total, groups), atol=1e-7)


@RUN
@given(batches(missing=False), st.floats(0.1, 50), st.floats(-20, 20))
def test_affine_invariance_and_sign_flip(batch, a, b):
    x, groups, weights = batch
    # a spread that the transformation cannot lose to rounding
    std = group_stats(torch.from_numpy(x), groups).std
    assume(bool(((std > 1e-3) | ~(std > 0)).all()))
    kw = dict(eps=0, single="whiten", **F64)
    y = x.copy()
    y[:, 0] = a * x[:, 0] + b
    base = gdpo(x, groups, weights, **kw)
    torch.testing.assert_close(gdpo(y, groups, weights, **kw), base, atol=1e-6, rtol=1e-6)
    y[:, 0] = -a * x[:, 0] + b
    flipped = gdpo(x, groups, [-weights[0], *weights[1:]], **kw)
    torch.testing.assert_close(gdpo(y, groups, weights, **kw), flipped, atol=1e-6, rtol=1e-6)


@RUN
@given(batches(missing=False), st.floats(0.1, 50))
def test_common_weight_factor_and_copies(batch, factor):
    x, groups, weights = batch
    kw = dict(eps_batch=0, single="whiten", **F64)
    base = gdpo(x, groups, weights, **kw)
    # sums that cancel to rounding have no scale to be invariant to
    assume(base.abs().max() == 0 or mo_grpo(x, groups, weights, **F64).abs().max() > 1e-6)
    scaled = gdpo(x, groups, [factor * w for w in weights], **kw)
    torch.testing.assert_close(scaled, base, atol=1e-7, rtol=1e-6)
    one, three = (gdpo(np.repeat(x[:, :1], n, 1), groups, **kw) for n in (1, 3))
    torch.testing.assert_close(three, one, atol=1e-7, rtol=1e-6)


@RUN
@given(batches(missing=False))
def test_sums_over_a_group_vanish(batch):
    x, groups, weights = batch
    index = Groups.of(groups).index_N
    for f in (grpo, rloo, mo_grpo, ADVANTAGES["dr_grpo"], ADVANTAGES["grpo_batch"]):
        a = f(x, groups, weights, **F64)
        sums = torch.zeros(len(x), dtype=torch.float64).index_add_(0, index, a)
        assert sums.abs().max() < 1e-8


def random_layout(seed, dtype):
    "Uneven groups in any order, 0/1 or real rewards with gaps, up to 3 ranks; groups 0 and 1 are constant."
    rng = np.random.default_rng(seed)
    ids = rng.permutation(np.arange(6).repeat(rng.integers(2, 9, 6)))
    shape = (len(ids), rng.integers(1, 4), *rng.integers(1, 4, rng.integers(0, 2)))
    kinds = (rng.random(shape), (rng.random(shape) < 0.4) * 1.0, rng.integers(0, 10, shape) / 10)
    x = kinds[rng.integers(3)]
    for g in (0, 1):
        x[ids == g] = rng.choice([0, 1, 0.1, 0.7, 1 / 3], shape[1:])
    gaps = rng.random(shape) < rng.choice([0, 0.2])
    for g in (0, 1):  # what applies to some siblings only makes their sums differ
        gaps[ids == g] = gaps[ids == g][:1]
    x[gaps] = NAN
    weights = rng.choice([1, 0.5, 0.3, 2, 0.7, 0, -1], shape[1]).tolist()
    return torch.from_numpy(x).to(dtype), ids, weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**9))
def test_a_constant_group_among_living_ones_is_zero_to_the_bit(name, dtype, seed):
    x, ids, weights = random_layout(seed, dtype)
    run = lambda c: compute_advantages(x, ids, config=c, lengths_N=[3] * len(ids))
    out = run(AdvantageConfig(name, weights))
    constant = np.isin(ids, [0, 1])
    assert (out.values[constant] == 0).all() and out.values.isfinite().all()
    # the estimator, its metrics and the filter mean the same groups
    used = x[:, [w != 0 for w in weights]]
    w = torch.tensor([w for w in weights if w], dtype=torch.float64)
    total = torch.einsum("nr...,r->n...", used.double().nan_to_num(0), w)
    total[used.isnan().all(1)] = NAN
    s, t = group_stats(used, ids), group_stats(total, ids)
    has = t.count > 0
    still = has & ~(s.spread > 0).any(1) & ~(t.spread > 1e-12)
    if has.any():
        share = (still.sum() / has.sum()).item()
        assert out.metrics["frac_reward_zero_std"] == pytest.approx(share)
        assert out.metrics["adv/dead_groups"] >= out.metrics["frac_reward_zero_std"] - 1e-12
        if x.ndim == 2 and not x.isnan().any():
            assert torch.equal(varies(used, ids), has & ~still)


def test_a_reward_of_weight_0_is_only_looked_at():
    x, ids = [[1, 0.3], [1, 0.7], [0, 0.2], [0, 0.9]], [0, 0, 1, 1]
    for name in sorted(ADVANTAGES):
        out = compute_advantages(x, ids, config=AdvantageConfig(name, [1, 0]), lengths_N=[1] * 4)
        assert (out.values == 0).all() and out.metrics["frac_reward_zero_std"] == 1
        assert out.metrics["adv/dead_groups"] == 1 and out.metrics["rewards/r1/mean"] > 0
    x, ids = torch.arange(36.0).sin().abs().view(12, 3), torch.arange(12) // 4
    for name, w in itertools.product(sorted(ADVANTAGES), ([0.5, 0, 2], [0, 0, 1])):
        used = [k for k, weight in enumerate(w) if weight]
        logged = torch.where(torch.tensor(w) == 0, -9 * x, x)  # outside of every range
        both = [(logged, w), (x[:, used], [w[k] for k in used])]
        found = [
            compute_advantages(x, ids, config=AdvantageConfig(name, w), lengths_N=[1] * 12).values
            for x, w in both
        ]
        assert torch.equal(*found), name
    alone = [[1, 0.3], [NAN, 0.7], [0, 0.2]]  # nothing that has a weight applies to the second
    out = compute_advantages(alone, [0, 0, 0], config=AdvantageConfig("dr_grpo", [1, 0]))
    assert out.values.tolist() == [0.5, 0, -0.5] and out.metrics["adv/invalid_rows"] == 1


@RUN
@given(batches())
def test_ranks(batch):
    x, groups, weights = batch
    x = torch.from_numpy(x)
    for f in (grpo, gdpo, mo_grpo, rloo):
        one = f(x[:, :, None], groups, weights)
        assert one.shape == (len(x), 1) and torch.equal(one[:, 0], f(x, groups, weights))
    # ranks never mix before the batch stage, and rows that do not exist are like NaN
    both = torch.stack([x, x.flip(0)], 2)
    a = mo_grpo(both, groups, weights)
    assert torch.equal(a[:, 0], mo_grpo(x, groups, weights))
    assert torch.equal(a[:, 1], mo_grpo(x.flip(0), groups, weights))
    mask = torch.arange(len(x)) % 3 != 0
    hidden = torch.where(mask[:, None], x, NAN)
    assert torch.equal(gdpo(x, groups, weights, mask_NK=mask), gdpo(hidden, groups, weights))


# groups by id: neither the kind of the ids nor the order of the samples changes a number

KINDS = {
    "int64": lambda v: torch.tensor(v),
    "numpy int16": lambda v: np.array(v, dtype=np.int16),
    "list": list,
    "huge": lambda v: torch.tensor(v) * 10**14 - 7 * 10**14,
    "far from 0": lambda v: torch.tensor(v) + 10**17,
    "strided": lambda v: torch.tensor([[x, 0] for x in v])[:, 0],
    "strings": lambda v: [f"id {x}" for x in v],
    "shared objects": lambda v: np.array([f"id {x}" for x in range(20)], dtype=object)[v],
    "fixed width": lambda v: np.array([f"id {x}" for x in v]),
    "bytes": lambda v: np.array([b"id %d" % x for x in v]),
    "tuples": lambda v: object_array([(x, "a") for x in v]),
}
RUNS = st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), min_size=1, max_size=8)


def object_array(items):
    out = np.empty(len(items), dtype=object)
    out[:] = items
    return out


def by_appearance(ids):
    seen = {}
    return [seen.setdefault(x, len(seen)) for x in ids]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(RUNS)
def test_groups_are_those_of_equal_ids(kind, runs):
    ids = [x for x, n in runs for _ in range(n)]
    g = Groups.of(KINDS[kind](ids))
    index = g.index_N.tolist()
    assert by_appearance(index) == by_appearance(ids)
    assert g.size_P.tolist() == np.bincount(index).tolist()
    assert len(g) == len(ids) and g.num_groups == len(set(ids))


def test_the_differences_of_ids_may_overflow():
    ids = [-(2**62), 2**61, 2**63 - 1] * 4  # as hashes are; each difference wraps to a positive one
    assert Groups.of(ids).index_N.tolist() == [0, 1, 2] * 4


def test_empty_ids():
    for ids in (torch.zeros(0, dtype=torch.int32), np.zeros(0, np.int64), np.zeros(0, "U3")):
        g = Groups.of(ids)
        assert (len(g), g.num_groups) == (0, 0)
        assert group_stats(torch.zeros(0, 2), g).mean.shape == (0, 2)
    assert grpo(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize(
    "ids", [[0, 0.4, 1, 1.9], [True, False, True, False], [[0], [0], [1], [1]]]
)
def test_ids_of_the_wrong_kind_are_refused(ids):
    for same in (ids, np.array(ids), torch.tensor(ids)):
        with pytest.raises(ValueError, match="Group ids"):
            grpo([1.0, 0, 1, 0], same)


def stats_by_group(x, index, ddof):
    "The definition, one group and column at a time."
    out = []
    for p in range(index.max() + 1):
        for c in range(x.shape[1]):
            v = x[index == p, c]
            v = v[~np.isnan(v)]
            std = NAN if len(v) <= ddof else 0.0 if v.min() == v.max() else v.std(ddof=ddof)
            row = [v.mean(), std, v.min(), v.max()] if len(v) else [NAN] * 4
            out.append(row + [len(v)])
    return np.array(out).reshape(-1, x.shape[1], 5)


@pytest.mark.parametrize("layout", ["side by side", "shuffled", "uneven"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 3), st.integers(0, 10**6))
def test_statistics_are_those_of_the_definition(layout, dtype, size, count, width, seed):
    rng = np.random.default_rng(seed)
    ids = np.arange(count).repeat(rng.integers(1, 9, count) if layout == "uneven" else size)
    if layout != "side by side":
        ids = rng.permutation(ids)
    x = torch.from_numpy(rng.integers(0, 4, (len(ids), width)) / 10).to(dtype)
    x[rng.random(x.shape) < 0.1] = NAN
    before = x.clone()
    s = group_stats(x, ids)
    assert torch.equal(x.nan_to_num(9), before.nan_to_num(9))
    got = torch.stack([s.mean, s.std, s.min, s.max, s.count.double()], -1).numpy()
    index = Groups.of(ids).index_N
    want = stats_by_group(x.double().numpy(), index.numpy(), 1)
    np.testing.assert_allclose(got, want, atol=1e-12)
    constant = (s.spread == 0) & (s.count > 1)
    assert (s.std[constant] == 0).all() and torch.equal(s.mean[constant], s.min[constant])
    want = x.double() - s.mean[index]
    torch.testing.assert_close(s.distance, want, atol=1e-12, rtol=0, equal_nan=True)


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 6), st.integers(2, 12), st.booleans(), st.integers(0, 10**6))
def test_advantages_follow_their_rows(name, size, count, missing, seed):
    rng = np.random.default_rng(seed)
    size = max(size, 2) if name == "passk" else size
    n = size * count
    x = torch.from_numpy(rng.integers(0, 5, (n, 2)) / 10).float()
    if missing:
        x[rng.random(x.shape) < 0.1] = NAN
    ids, perm = torch.arange(count).repeat_interleave(size), torch.from_numpy(rng.permutation(n))
    lengths = torch.from_numpy(rng.integers(1, 5, n))

    def run(rows):
        kw = {"lengths_N": lengths[rows]} if name in ("opo", "gdpo_verl") else {}
        return ADVANTAGES[name](x[rows], ids[rows], [1, 0.3], dtype=torch.float64, **kw)

    whole = run(torch.arange(n))
    torch.testing.assert_close(run(perm), whole[perm], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("f", [grpo, mo_grpo, rloo, gdpo])
def test_the_result_is_the_float64_one_rounded_once(f):
    x = torch.rand(6000, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(1000).repeat_interleave(6)
    for rows in (torch.arange(6000), torch.randperm(6000)):
        precise = f(x[rows], ids[rows], [1, 0.5, 2], dtype=torch.float64)
        assert torch.equal(f(x[rows], ids[rows], [1, 0.5, 2]), precise.float())
        half = f(x[rows], ids[rows], [1, 0.5, 2], dtype=torch.bfloat16)
        assert torch.equal(half, precise.bfloat16())
