"""Groups by id: neither the kind of the ids nor the order of the samples changes a number."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.advantages import ADVANTAGES, gdpo, grpo, mo_grpo, rloo
from grpo_nb.core import Groups, group_stats

NAN = float("nan")
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
