"""Layouts of groups: every fast path gives the numbers of the general one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import grpo_nb.core as core
from grpo_nb.advantages import ADVANTAGES, batch_norm, gdpo, grpo, mo_grpo, rloo
from grpo_nb.core import Groups, blocks_of, group_stats
from grpo_nb.filter_groups import keep_groups

NAN = float("nan")
RUN = settings(max_examples=25, deadline=None)
KINDS = {
    "int64": lambda v: torch.tensor(v),
    "int32": lambda v: torch.tensor(v, dtype=torch.int32),
    "numpy int16": lambda v: np.array(v, dtype=np.int16),
    "numpy uint8": lambda v: np.array(v, dtype=np.uint8),
    "list": list,
    "negative": lambda v: torch.tensor(v) - 1000,
    "huge": lambda v: torch.tensor(v) * 10**14 - 7 * 10**14,
    "far from 0": lambda v: torch.tensor(v) + 10**17,
    "strided": lambda v: torch.tensor([[x, 0] for x in v])[:, 0],
    "numpy strided": lambda v: np.array([[x, 0] for x in v])[:, 0],
    "strings": lambda v: [f"id {x}" for x in v],
    "shared objects": lambda v: np.array([f"id {x}" for x in range(20)], dtype=object)[v],
    "strided objects": lambda v: np.array([[f"id {x}", "."] for x in v], dtype=object)[:, 0],
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
    if g.block:
        assert index == [i // g.block for i in range(len(ids))]


@RUN
@given(st.lists(st.integers(-3, 12), min_size=1, max_size=40))
def test_samples_by_size_of_their_group_then_position(ids):
    g = Groups.of(torch.tensor(ids))
    groups_P, samples_N = g.by_size
    size, index = g.size_P.tolist(), g.index_N.tolist()
    assert groups_P.tolist() == sorted(range(len(size)), key=lambda p: (size[p], p))
    want = sorted(range(len(ids)), key=lambda i: (size[index[i]], index[i], i))
    assert samples_N.tolist() == want
    rows = [i for b in blocks_of(g) for i in torch.arange(len(ids))[b.rows].tolist()]
    assert sorted(rows) == list(range(len(ids)))


def test_empty_ids():
    for ids in (torch.zeros(0, dtype=torch.int32), np.zeros(0, np.int64), np.zeros(0, "U3")):
        g = Groups.of(ids)
        assert (len(g), g.num_groups, blocks_of(g)) == (0, 0, [])
        assert group_stats(torch.zeros(0, 2), g).mean.shape == (0, 2)
        assert [v.tolist() for v in g.by_size] == [[], []]
    assert grpo(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)).shape == (0,)


@pytest.mark.parametrize("at", [0, 1, 7, 8, 15])
def test_a_missing_or_fractional_id_is_refused_wherever_it_stands(at):
    ids = ["a"] * 8 + ["b"] * 8
    for bad in (None, "c"):
        ids[at] = bad
        if bad is None:
            with pytest.raises(ValueError, match="one id per sample"):
                Groups.of(ids)
            with pytest.raises(ValueError, match="one id per sample"):
                Groups.of(np.array(ids, dtype=object))
    assert Groups.of(ids).num_groups == 3
    with pytest.raises(ValueError, match="shape"):
        Groups.of(np.array([["a"], ["b"]]))
    with pytest.raises(ValueError, match="integers or strings"):
        Groups.of([0.0, 1.0])


def test_long_first_run_and_returning_ids():
    first = torch.cat([torch.zeros(1 << 17), torch.ones(1 << 17)]).long()
    assert Groups.of(first).size_P.tolist() == [1 << 17] * 2
    back = torch.arange(4).repeat_interleave(4)
    back[-4:] = 0
    assert (Groups.of(back).block, Groups.of(back).size_P.tolist()) == (None, [8, 4, 4])
    assert Groups.of(torch.tensor([2**63 - 1, -(2**63), 2**63 - 1])).index_N.tolist() == [1, 0, 1]


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


# with 48 numbers a block the batch falls in many blocks; group sizes meet their borders in every way
@pytest.mark.parametrize("layout", ["side by side", "shuffled", "uneven"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@settings(max_examples=15, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 3), st.integers(0, 10**6))
def test_statistics_do_not_depend_on_layout_or_blocks(layout, dtype, size, count, width, seed):
    rng = np.random.default_rng(seed)
    ids = np.arange(count).repeat(rng.integers(1, 9, count) if layout == "uneven" else size)
    if layout != "side by side":
        ids = rng.permutation(ids)
    x = torch.from_numpy(rng.integers(0, 4, (len(ids), width)) / 10).to(dtype)
    x[rng.random(x.shape) < 0.1] = NAN
    before = x.clone()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "CACHE_VALUES", 48)
        s = group_stats(x, ids)
    assert torch.equal(x.nan_to_num(9), before.nan_to_num(9))
    got = torch.stack([s.mean, s.std, s.min, s.max, s.count.double()], -1).numpy()
    index = Groups.of(ids).index_N.numpy()
    np.testing.assert_allclose(got, stats_by_group(x.double().numpy(), index, 1), atol=1e-12)
    constant = (s.min == s.max) & (s.count > 1)
    assert (s.std[constant] == 0).all() and torch.equal(s.mean[constant], s.min[constant])


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
@settings(max_examples=6, deadline=None)
@given(st.integers(1, 6), st.integers(2, 12), st.booleans(), st.integers(0, 10**6))
def test_advantages_do_not_depend_on_blocks_or_order(name, size, count, missing, seed):
    rng = np.random.default_rng(seed)
    size = max(size, 2) if name == "passk" else size
    n = size * count
    x = torch.from_numpy(rng.integers(0, 5, (n, 2)) / 10).float()
    if missing:
        x[rng.random(x.shape) < 0.1] = NAN
    ids, perm = torch.arange(count).repeat_interleave(size), torch.from_numpy(rng.permutation(n))
    lengths = torch.from_numpy(rng.integers(1, 5, n))
    f = ADVANTAGES[name]
    run = lambda x, ids, rows: f(
        x, ids, **({"lengths_N": lengths[rows]} if name == "opo" else {}), dtype=torch.float64
    )
    whole = run(x, ids, slice(None))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "CACHE_VALUES", 24)
        torch.testing.assert_close(run(x, ids, slice(None)), whole, atol=1e-12, rtol=1e-12)
        moved = run(x[perm], ids[perm], perm)
    torch.testing.assert_close(moved, whole[perm], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("f", [grpo, mo_grpo, rloo, gdpo])
def test_the_result_is_the_float64_one_rounded_once(f):
    x = torch.rand(6000, 3, generator=torch.Generator().manual_seed(0))
    ids = torch.arange(1000).repeat_interleave(6)
    for rows in (torch.arange(6000), torch.randperm(6000)):
        precise = f(x[rows], ids[rows], [1, 0.5, 2], dtype=torch.float64)
        assert torch.equal(f(x[rows], ids[rows], [1, 0.5, 2]), precise.float())
        half = f(x[rows], ids[rows], [1, 0.5, 2], dtype=torch.bfloat16)
        assert torch.equal(half, precise.bfloat16())


@pytest.mark.parametrize("f", [grpo, mo_grpo, rloo, gdpo])
def test_rewards_of_any_stride_and_kind(f):
    g = torch.Generator().manual_seed(1)
    x = torch.rand(24, 3, generator=g, dtype=torch.float64)
    ids = torch.arange(6).repeat_interleave(4)
    want = f(x, ids)
    wide = torch.rand(48, 6, generator=g, dtype=torch.float64)
    wide[::2, ::2] = x
    for other in (x.t().contiguous().t(), wide[::2, ::2], x.clone().requires_grad_(), x.numpy()):
        assert torch.equal(f(other, ids), want)
    assert torch.equal(f(x, ids.view(6, 4).t().contiguous().t().reshape(-1)), want)
    one = x[:1].expand(24, 3)
    assert (f(one, ids) == 0).all() and torch.equal(one[5], x[0])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("f", [grpo, mo_grpo, rloo, gdpo])
def test_short_floats_give_the_numbers_of_float64(f, dtype):
    g = torch.Generator().manual_seed(3)
    for size in (1, 2, 3, 7, 8, 49, 1000):
        ids = torch.arange(3).repeat_interleave(size)
        x = (torch.randn(3 * size, 2, generator=g) * 1e3).to(dtype)
        x[:size] = x[0]  # one constant group
        for columns in (x, x[:, :1]):
            got = f(columns, ids, dtype=torch.float64)
            want = f(columns.double(), ids, dtype=torch.float64)
            torch.testing.assert_close(got, want, atol=1e-10, rtol=1e-10)
            assert f is gdpo or (got[:size] == 0).all()


def test_lone_samples_in_every_layout():
    x = torch.rand(9, 2, generator=torch.Generator().manual_seed(2))
    for ids in (torch.arange(9), torch.randperm(9), torch.tensor([0, 1, 1, 2, 3, 3, 4, 5, 5])):
        size = torch.bincount(ids)[ids]
        for f in (grpo, mo_grpo):
            assert (f(x, ids)[size == 1] == 0).all()
            raw = f(x, ids, singleton="raw", eps=0)
            torch.testing.assert_close(raw[size == 1], x.sum(1)[size == 1])
    assert keep_groups(x[:, 0], torch.arange(9)).counts() == {"single": 9}


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 200), st.integers(0, 10**6))
def test_positive_weights_need_no_mask(n, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 1, generator=g, dtype=torch.float64)
    w = torch.randint(1, 9, (n, 1), generator=g)
    masked = batch_norm(x, torch.ones(n, 1).bool(), weight_NK=w)
    torch.testing.assert_close(batch_norm(x, weight_NK=w), masked, atol=1e-12, rtol=1e-12)
    w[: n // 2] = 0
    out = batch_norm(x, weight_NK=w)
    assert (out[: n // 2] == 0).all()
    torch.testing.assert_close(out[n // 2 :], batch_norm(x[n // 2 :], weight_NK=w[n // 2 :]))


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 30), st.integers(1, 5), st.integers(0, 10**6))
def test_filter_decision_is_the_same_for_every_kind_of_id(count, size, seed):
    rng = np.random.default_rng(seed)
    metric = (rng.random(count * size) < 0.7).astype(np.float32)
    metric[rng.random(len(metric)) < 0.05] = NAN
    ids = np.arange(count).repeat(size)
    want = keep_groups(metric, ids)
    perm = rng.permutation(len(ids))
    names = np.array([f"id {i}" for i in range(count)], dtype=object)
    for other in (names[ids], [f"id {i}" for i in ids], ids * 10**15, ids.astype(np.int32) - 5):
        got = keep_groups(torch.from_numpy(metric), other)
        assert torch.equal(got.keep_N, want.keep_N) and got.counts() == want.counts()
    moved = keep_groups(metric[perm].astype(np.float64), names[ids[perm]])
    assert torch.equal(moved.keep_N, want.keep_N[perm]) and moved.counts() == want.counts()
