"The group filter and collector: recorded peers, properties, caps, carry-over, resume, logs."

import json
import logging
import math
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from records import cases, wanted
from resumed import through_a_checkpoint

from grpo_nb.collector import FilterCapError, GroupCollector
from grpo_nb.config import build_config
from grpo_nb.core import Groups, Rollout
from grpo_nb.files import pack
from grpo_nb.filter_groups import FilterGroupsConfig, UnknownFilterMetric, decide, keep_groups
from grpo_nb.filter_groups import resolve_metric
from grpo_nb.lab.logs import format_summary, parse_filter_logs
from grpo_nb.tasks import Task

CASES = cases("filter_groups_verl")
QUIET = dict(enable=True, metric="acc", log_format=None)
DEAD, LIVE = [1, 1], [0, 1]
nan = float("nan")


def rollout_of(uids, values, **info):
    n = len(uids)
    return Rollout(
        group_N=Groups.of(uids).index_N,
        tasks=list(uids),
        states={"ids": torch.arange(n)},
        mask_NS=torch.ones(n, 2, dtype=torch.bool),
        old_logp_NS=torch.rand(n, 2, generator=torch.Generator().manual_seed(n)),
        rewards_NR=torch.tensor(values, dtype=torch.float64).view(n, 1),
        reward_names=("acc",),
        info={"row": torch.arange(n)} | info,
    )


def groups_of(*groups, start=0):
    uids = [f"g{start + i}" for i, g in enumerate(groups) for _ in g]
    return rollout_of(uids, [v for g in groups for v in g])


class Script:
    "Generation batches from a list, whatever size is asked for; None at the end."

    def __init__(self, *batches):
        self.batches, self.asked = list(batches), []

    def __call__(self, num_prompts):
        self.asked.append(num_prompts)
        if not self.batches:
            return None
        batch = self.batches.pop(0)
        return batch if isinstance(batch, Rollout) else groups_of(*batch)


class Source:
    "Groups of tasks with random pass rates from its own generator."

    def __init__(self, seed=0, G=4):
        self.rng, self.G, self.given = torch.Generator().manual_seed(seed), G, 0

    def __call__(self, num_prompts):
        p = torch.rand(num_prompts, 1, generator=self.rng)
        hits = torch.rand(num_prompts, self.G, generator=self.rng) < p
        self.given += num_prompts
        return groups_of(*hits.double().tolist(), start=self.given - num_prompts)


def recorded(op):
    return [c for c in CASES if c.values[0]["params"]["op"] == op]


@pytest.mark.parametrize("case", recorded("filter"))
def test_conformance_filter(case):
    uids, want = case["inputs"]["uids"], wanted(case)
    d = keep_groups(case["inputs"]["metric"], uids)
    rows = d.keep_N.nonzero()[:, 0].tolist()
    assert rows == want["kept_rows"]
    assert list(dict.fromkeys(uids[i] for i in rows)) == want["kept_uids"]


@pytest.mark.parametrize("case", recorded("accumulate"))
def test_conformance_accumulate(case):
    params, want = case["params"], wanted(case)
    batches = [
        rollout_of(b["uids"], b["metric"], gen=torch.full((len(b["uids"]),), i))
        for i, b in enumerate(case["inputs"]["gen_batches"])
    ]
    script, total = Script(*batches), len(batches)
    config = FilterGroupsConfig(**QUIET, max_num_gen_batches=params["max_num_gen_batches"])
    c = GroupCollector(config, params["train_batch_size"])
    steps, left, error = [], [], None
    while True:
        try:
            s = c.collect(script)
        except FilterCapError:
            error = {"at_gen_batch": total - len(script.batches) - 1}
            error |= {"num_gen_batches": c.tally["batches"], "kept_prompts": c.num_held}
            break
        if s.outcome == "end":
            break
        r = s.rollout
        rows = [list(x) for x in zip(r.info["gen"].tolist(), r.info["row"].tolist())]
        batches, surplus = (s.metrics[f"filter/{k}"] for k in ("num_gen_batches", "surplus"))
        steps.append((batches, list(dict.fromkeys(r.tasks)), rows, surplus))
    if error is None:
        left = s.metrics["filter/surplus"]
    told = ("num_gen_batches", "prompts", "rows", "surplus_prompts")
    assert steps == [tuple(w[k] for k in told) for w in want["steps"]]
    if "error" in want:
        assert error.items() <= want["error"].items() and want["error"]["error"] == "ValueError"
    else:
        assert error is None and left == len(want["left_over_prompts"])


# Where the right result is not the peer's: a deviation of 1e-17 is rounding, not variance, and a batch is cut between
# groups, not after train_batch_size * n rows.
DIFFERENT = {f"constant/{x}" for x in "0.1x3 0.1x6 0.2x6 0.35x3 0.7x3 0.7x6 0.95x7".split()}
DIFFERENT |= {"float_noise", "interleaved_rows", "uneven_groups"}


def test_every_record_was_compared_and_every_difference_has_a_reason():
    assert len(CASES) == len(recorded("filter")) + len(recorded("accumulate")) == 36
    right = {c.id: c.values[0] for c in CASES if "expected_right" in c.values[0]}
    assert right.keys() == DIFFERENT
    assert all(c["expected_right"] != c["expected_verl"] for c in right.values())


metric_values = st.sampled_from([0.0, 1.0, 0.1, 0.35, -2.0, 0.1 + 1e-16, nan])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), metric_values), min_size=1, max_size=40), st.randoms())
def test_matches_the_definition_and_ignores_order(rows, rnd):
    def kept(rows):
        d = keep_groups([v for _, v in rows], [f"u{g}" for g, _ in rows])
        return {g for (g, _), k in zip(rows, d.keep_N.tolist()) if k}

    want = set()
    for g in {g for g, _ in rows}:
        valid = [v for h, v in rows if h == g and not math.isnan(v)]
        if len(valid) == 1 or (len(valid) > 1 and max(valid) != min(valid)):
            want.add(g)
    assert kept(rows) == want
    shuffled = list(rows)
    rnd.shuffle(shuffled)
    assert kept(shuffled) == want


def test_bad_options_are_refused_by_their_key():
    for bad in (dict(on_cap="ignore"), dict(min_spread=nan), dict(metric=[3]), dict(rule="metric")):
        with pytest.raises(ValueError, match=next(iter(bad))):
            FilterGroupsConfig(**bad)


def test_a_rollout_without_rewards_is_refused_and_an_old_key_is_read():
    with pytest.raises(UnknownFilterMetric, match="no rewards"):
        resolve_metric(groups_of([1, 0]).replace(rewards_NR=None, reward_names=()), "seq_reward")
    assert build_config(FilterGroupsConfig, {"memory": 0.25}).filter_rate_ema == 0.25


def test_rank_rewards_are_dead_only_if_every_cell_is_constant():
    cells = torch.zeros(4, 2, 3)
    cells[3, 1, 2] = 1
    ranks = dict(rewards_NR=None, rewards_NRK=cells, reward_names=("rel", "safe"))
    r = groups_of([0, 0], [0, 0]).replace(**ranks)
    assert decide(r, FilterGroupsConfig()).keep_P.tolist() == [False, True]
    assert decide(r, FilterGroupsConfig(rule="combined")).keep_P.tolist() == [False, True]
    assert decide(r, FilterGroupsConfig(metric="rel")).keep_P.tolist() == [False, False]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.sampled_from([(1, 1), (0, 0), (0, 1), (1, 0, 1), (1,)]), min_size=1, max_size=40),
    st.lists(st.integers(1, 7), min_size=1, max_size=8),
    st.integers(1, 5),
)
def test_carry_over_equals_a_stream_however_it_is_cut(stream, sizes, B):
    "The batches are the kept groups in order, B at a time, whatever the generation batches were."
    kept = [i for i, g in enumerate(stream) if len(g) == 1 or len(set(g)) > 1]
    batches, at, k = [], 0, 0
    while at < len(stream):
        n = sizes[k % len(sizes)]
        batches.append(groups_of(*map(list, stream[at : at + n]), start=at))
        at, k = at + n, k + 1
    config = FilterGroupsConfig(**QUIET, surplus="carry", max_staleness=10**6)
    c, script, out = GroupCollector(config, B), Script(*batches), []
    while (s := c.collect(script)).outcome == "full":
        out.append([int(t[1:]) for t in dict.fromkeys(s.rollout.tasks)])
    assert out == [kept[i : i + B] for i in range(0, len(kept) - B + 1, B)]


def test_every_state_refuses_what_does_not_fit_it():
    c = GroupCollector(FilterGroupsConfig(**QUIET), 1)
    with pytest.raises(ValueError, match="The step is closed"):
        c.take()
    c.begin()
    with pytest.raises(ValueError, match="The step is open, with 0 of 1 groups"):
        c.take()
    with pytest.raises(ValueError, match="empty generation batch"):
        c.add(groups_of(LIVE)[:0])
    c.add(groups_of(LIVE))
    assert c.needed == 0
    with pytest.raises(ValueError, match="the step is full"):
        c.add(groups_of(LIVE))
    with pytest.raises(ValueError, match="num_generations=1"):
        GroupCollector(FilterGroupsConfig(**QUIET), 4, num_generations=1)


def test_the_filter_sees_rewards_as_they_are_trained_unless_it_names_its_own():
    rewards_NR, off = torch.tensor([[1.0, 1], [1, 0]]).double(), {"weights": [1, 0]}
    r = groups_of([1, 0]).replace(rewards_NR=rewards_NR, reward_names=("acc", "len"))
    for how, own, kept in (
        (None, None, 1),
        (off, None, 0),
        (off, {"len": 1.0}, 1),
        ({"scales": {"len": 0}}, None, 0),
        ({"gates": [{"component": "len", "on": "acc", "at_least": 2}]}, None, 0),
    ):
        config = FilterGroupsConfig(enable=True, weights=own, log_format=None, action="drop")
        c = GroupCollector(config, 1, advantage=how)
        c.begin()
        c.add(r)
        assert c.num_held == kept and c.config is config


def test_a_batch_that_waits_for_its_rewards_is_in_the_state():
    source, c = Source(seed=4), GroupCollector(FilterGroupsConfig(**QUIET), 8)
    with pytest.raises(ZeroDivisionError):
        c.collect(source, lambda r: 1 / 0)
    d = GroupCollector(FilterGroupsConfig(**QUIET), 8)
    d.load_state_dict(c.state_dict())
    whole = GroupCollector(FilterGroupsConfig(**QUIET), 8).collect(Source(seed=4))
    again = d.collect(source, lambda r: r)
    assert again.rollout.tasks == whole.rollout.tasks
    assert torch.equal(again.rollout.old_logp_NS, whole.rollout.old_logp_NS)
    assert json.dumps(again.metrics) == json.dumps(whole.metrics)


def test_a_state_with_packed_rollouts_as_checkpoints_had_it_is_read():
    source, c = Source(seed=4), GroupCollector(FilterGroupsConfig(surplus="carry", **QUIET), 8)
    c.collect(source, lambda r: r)
    state, tensors = c.state_dict(), {}
    old = state | {"format": 2, "tally": dict(state["tally"]) | {"reasons": state["reasons"]}}
    for name in ("held", "carried", "unrewarded"):
        each = [(f"{name}.{i}", r) for i, r in enumerate(state[name])]
        old[name] = [{k: pack(v, f"{i}.{k}", tensors) for k, v in r.items()} for i, r in each]
    d = GroupCollector(c.config, 8)
    d.load_state_dict({"json": old, "tensors": tensors})
    assert tensors and repr(d.state_dict()) == repr(state)
    with pytest.raises(ValueError, match="another format"):
        d.load_state_dict({})


def test_state_is_a_snapshot():
    c = GroupCollector(FilterGroupsConfig(**QUIET), 4)
    c.begin()
    c.add(groups_of(LIVE, DEAD))
    state = c.state_dict()
    text = repr(state)
    c.add(groups_of(LIVE, LIVE))
    c.held[0].mask_NS.zero_()
    assert repr(state) == text


def test_rollout_state_of_all_kinds():
    task = Task([{"role": "user"}], {"n": np.int64(3)}, "a", 0)
    info = {"s": np.array(["x", "yy"]), "o": np.array([None, 1], dtype=object)}
    r = groups_of([1, 0]).replace(
        tasks=[task, task],
        states={"t": torch.ones(2, dtype=torch.bfloat16)},
        old_logp_NS=torch.tensor([[0.1, 0], [nan, 0]]),
        outputs=[{"text": "a", "ids": torch.tensor([1, 2])}, {"ids": torch.tensor([3])}],
        info=info | {"u8": np.arange(2, dtype=np.uint8)},
    )
    c = GroupCollector(FilterGroupsConfig(**QUIET), 4)
    c.carried = [r]
    c.load_state_dict(through_a_checkpoint(c.state_dict()))
    back = c.carried[0]
    assert back.tasks == [task, task] and back.tasks[0] is back.tasks[1]
    assert torch.equal(back.old_logp_NS.isnan(), r.old_logp_NS.isnan())
    assert back.outputs[1]["ids"].tolist() == [3] and back.outputs[0]["text"] == "a"
    assert (back.info["s"].dtype, back.info["u8"].dtype) == (r.info["s"].dtype, np.uint8)
    assert back.info["o"].tolist() == [None, 1] and back.states["t"].dtype == torch.bfloat16
    c.carried = [r.replace(outputs=[object(), object()])]
    with pytest.raises(ValueError, match="carried.0.outputs.0 holds a object"):
        pack(c.state_dict(), "_", {})


def log_of(*kept, size=1024):
    "The lines of one step that keeps so many of `size` groups in each of its batches."
    lines, total = [], 0
    for i, k in enumerate(kept, 1):
        total += k
        lines += [f"Generated batch {i}, {size} prompts, {8 * size} trajectories"]
        lines += [f"Filtered: {size - k} prompts with std=0", f"Kept: {k} prompts with std>0"]
        lines += [f"num_prompt_in_batch={total} {'<' if total < size else '>='} prompt_bsz={size}"]
        lines += [f"num_gen_batches={i}. Keep generating..."] * (total < size)
    return lines


STEP = log_of(424, 420, 415)


VERL = """\
(TaskRunner pid=42) num_prompt_in_batch=3 < prompt_bsz=8
(TaskRunner pid=42) num_gen_batches=1. Keep generating...
(TaskRunner pid=42) num_prompt_in_batch=5 < prompt_bsz=8
(TaskRunner pid=42) ValueError: num_gen_batches=2 >= max_num_gen_batches=2. Generated too many.
"""


@pytest.mark.parametrize(
    "old,new",
    [
        ("pid=42) ValueError", "ip=10.0.0.1) ray::TaskRunner.run() (pid=42, ip=::1)\nValueError"),
        ("(TaskRunner pid=42) ValueError", "ValueError"),
        ("(TaskRunner pid=42) ", ""),
        (" >= max", " > max"),
        (" >= max", " >= self.config.filter_groups.max"),
        ("=3 < prompt", "=3 <= prompt"),
        ("=1. Keep", "=1 < max_num_gen_batches=2. Keep"),
        ("=5 <", "=np.int64(5) <"),
        ("batches=2 >", "batches=np.int64(2) >"),
        ("generating...\n(TaskRunner pid=42)", "generating..."),  # two messages on a line
        ("=5 <", "=tensor(5, device='cuda:0') \t<"),
        ("(TaskRunner pid=42) ", "日本\0\0 \x1b[36m(TaskRunner pid=42)\x1b[0m\xa0 "),
        ("\n", "\r"),
    ],
)
@pytest.mark.parametrize("encoding", "utf-8-sig utf-16 utf-16-le utf-16-be".split())
def test_the_same_step_in_other_words(tmp_path, old, new, encoding):
    (tmp_path / "log").write_text(VERL.replace(old, new), encoding)
    frame, s = parse_filter_logs(tmp_path / "log")
    assert s["outcomes"] == {"cap": 1} and s["num_gen_batches"] == 2 and s["unread"] == []
    assert frame["accumulated"].tolist() == [3, 5]


def test_what_looks_like_filtering_and_is_not_understood_is_shown():
    for line in (
        "Dropped 3 of 8 groups",
        "skipping group 3: reward std is 0",
        "5/8 groups filtered out",
        "Dynamic sampling: 12 < 32 prompts",
        "Rejected 12 groups with std 0",
        "5 of 16 prompts survived filtering",
        "filtered_prompts: 4",
        "valid: 12 < 32. Keep generating (1/10)",
        "step:1 - training/filter_groups/evicted_samples:12 - x:1",  # verl's V1 trainer
    ):
        noise = ["max_num_gen_batches: 10", "filter_overlong_prompts: 1", "will be removed in v5"]
        s = parse_filter_logs("\n".join([*STEP, line, *noise]))[1]
        assert s["unread"] == [line] and f"not understood: {line}" in format_summary(s)
    said = "Generated batch 1, 1,024 prompts\nFiltered (std=0): 1,000\nAccumulated: 24 / 1,024\n"
    cut = "Generated batch 1,\n1024 prompts\nFiltered (std=0): 1_000\nAccumulated: 24 /\n 1024\n"
    for text in (said, said.upper(), cut):
        frame, s = parse_filter_logs(text)
        found = frame[["prompts", "filtered", "kept", "accumulated", "target"]].values.tolist()
        assert found == [[1024, 1000, 24, 24, 1024]] and not s["issues"]
    two = "num_prompt_in_batch=3 < prompt_bsz=8 num_prompt_in_batch=8 >= prompt_bsz=8"
    assert parse_filter_logs(two)[1]["num_gen_batches"] == 2
    start = time.process_time()  # what a completion may hold, printed
    noise = ["[151644, " * 20_000, "kept " * 40_000, "np.sum(" + "ha " * 60_000]
    parse_filter_logs("\n".join([*STEP, *noise]))
    assert time.process_time() - start < 20
    s = parse_filter_logs("train/num_gen_batches:2.0e+00 - train/filter_rate:2.5e-01\n")[1]
    assert s["num_gen_batches"] == 2 and s["steps"][0]["outcome"] == "full"


def test_interleaved_workers_and_rubbish():
    a = [f"(Worker pid=1, ip=10.0.0.1) {x}" for x in STEP]
    b = [f"\x1b[36m(Worker pid=2)\x1b[0m {x}" for x in log_of(404, 409, 419)]
    rubbish = ["Training:  10%|█   | 1/10 [00:01<00:09]", "loss=0.3"]
    frame, s = parse_filter_logs("\n".join(x for pair in zip(a, b) for x in (*pair, *rubbish)))
    got = {w: f["filtered"].tolist() for w, f in frame.groupby("worker")}
    assert got == {"Worker pid=1, ip=10.0.0.1": [600, 604, 609], "Worker pid=2": [620, 615, 605]}
    assert s["num_steps"] == 2 and s["issues"] == []


def test_lost_and_garbled_lines():
    read = lambda lines: parse_filter_logs("\n".join(lines))
    frame, s = read(x for x in STEP if "Kept: 420" not in x and "Filtered: 609" not in x)
    assert (s["filtered"], s["kept"]) == (1813, 1259)
    marked = [set(x.split(",")) & {"kept", "filtered"} for x in frame["inferred"]]
    assert marked == [set(), {"kept"}, {"filtered"}]
    frame, s = read(x.replace("Filtered: 604 prompts", "Filtered: 6") for x in STEP)
    assert len(s["unread"]) == 1 and s["filtered"] == 1813  # from the kept count
    s = read(x for x in STEP if "Generated batch 2" not in x)[1]
    assert (s["num_gen_batches"], s["kept"], s["num_steps"]) == (3, 1259, 1)
    s = read(STEP[:5] + STEP[10:])[1]  # a whole batch
    assert (s["num_gen_batches"], s["missing_batches"], s["num_steps"]) == (3, 1, 1)
    s = read([x for x in VERL.splitlines() + STEP if "Keep" in x])[1]  # nothing else was kept
    assert (s["num_gen_batches"], s["missing_batches"], s["num_steps"]) == (3, 3, 2)
    frame, s = read(VERL.replace("=5 <", "=3 <").splitlines())  # the second kept nothing
    assert (frame["kept"].tolist(), s["num_gen_batches"], s["num_steps"]) == ([3, 0], 2, 1)
    s = read(VERL.splitlines()[-1:])[1]  # the cap alone tells of them
    assert (s["num_gen_batches"], s["missing_batches"], s["outcomes"]) == (2, 2, {"cap": 1})


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(STEP + VERL.splitlines()), st.integers(0, 99))))
def test_the_reader_survives_any_damage(picks):
    frame, s = parse_filter_logs("\n".join(line[:cut] for line, cut in picks) + "\n")
    assert len(frame) <= len(picks) and isinstance(format_summary(s), str)
    assert (frame["filter_rate"].dropna() <= 1).all() or s["issues"]


def test_what_is_written_is_read_back(caplog):
    limit = {"max_num_gen_batches": 2, "on_cap": "train_partial"}
    c = GroupCollector(FilterGroupsConfig(enable=True, metric="acc", **limit), 16)
    source = Source(seed=6)
    with caplog.at_level(logging.INFO, "grpo_nb.collector"):
        steps = [c.collect(source) for _ in range(12)]
    frame, s = parse_filter_logs("\n".join(caplog.messages))
    for name in ("num_gen_batches", "kept", "surplus", "filter_rate"):
        assert [x[name] for x in s["steps"]] == [t.metrics[f"filter/{name}"] for t in steps]
    assert frame["target"].unique() == [16]
    assert [x["outcome"] for x in s["steps"]] == [t.outcome for t in steps]
    assert {"full", "partial"} == set(s["outcomes"]) and s["issues"] == s["unread"] == []


def test_warnings_come_once_and_survive_a_resume(caplog):
    config = FilterGroupsConfig(**QUIET, on_cap="skip_step", max_num_gen_batches=1)
    c, d = GroupCollector(config, 1), GroupCollector(config, 1)
    with caplog.at_level(logging.WARNING, "grpo_nb.collector"):
        c.collect(Script([DEAD, DEAD]))
        c.collect(Script([DEAD, DEAD]))
        d.load_state_dict(c.state_dict())
        d.collect(Script([DEAD, DEAD]))
    assert len(caplog.messages) == 2 == len(d.warnings)
    assert "all samples are right" in d.warnings["all filtered: all_high"]


def test_a_rule_of_ones_own_is_logged_and_counted_as_one(caplog):
    "It keeps a constant group and drops one that varies, and nothing says std."

    def calm(rollout, config):
        return torch.tensor([True, False])

    c = GroupCollector(FilterGroupsConfig(rule=calm), 1)
    c.begin()
    with caplog.at_level(logging.INFO, "grpo_nb.collector"):
        c.add(rollout_of(["a", "a", "b", "b"], [1.0, 1.0, 0.0, 1.0]))
    said = [r.getMessage() for r in caplog.records]
    assert "Filtered: 1 prompts by rule 'calm' (50.0%)" in said and "Kept: 1 prompts" in said
    assert c.tally["kept_without_signal"] == c.tally["dropped_with_signal"] == 1
    (step,) = parse_filter_logs("\n".join(said))[1]["steps"]
    assert step["kept"] == 1
