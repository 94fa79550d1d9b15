"""Logs of other trainers as they really are: resumes, totals, nested keys, broken lines, NaN tokens."""

import json
import math
import re
import time
from pathlib import Path

import pandas as pd
import pytest

from grpo_nb.lab import plots
from grpo_nb.lab.diagnosis import diagnose
from grpo_nb.lab.logs import parse_filter_logs, read_trl, read_verl
from grpo_nb.lab.record import Run

RECORDED = Path(__file__).parent / "recorded"

TRL = """
clip_ratio/high_max clip_ratio/high_mean clip_ratio/low_mean clip_ratio/low_min clip_ratio/region_mean
completions/clipped_ratio completions/max_length completions/max_terminated_length completions/mean_length
completions/mean_terminated_length completions/min_length completions/min_terminated_length entropy epoch
frac_reward_zero_std grad_norm kl learning_rate loss num_tokens reward reward_std rewards/acc/mean rewards/acc/std
sampling/importance_sampling_ratio/mean sampling/sampling_logp_difference/max step step_time
"""


def drawn(frame):
    return set(plots.PANELS) - set(plots.plot_run(frame).left_out)


def test_trl_trainer_state(tmp_path):
    row = dict.fromkeys(TRL.split(), 0.25) | {"step": 1}
    history = [
        row,
        row | {"step": 2, "reward": 0.5, "grad_norm": math.nan},
        {"step": 2, "epoch": 0.02, "eval_reward": 0.4, "eval_loss": 0.0, "eval_runtime": 1.0},
        row | {"step": 3, "reward": 0.6},
        row | {"step": 3, "reward": 0.7},  # written again after a resume
        {"step": 3, "epoch": 0.03, "train_runtime": 9.0, "train_loss": 0.0, "total_flos": 0.0},
    ]
    for n, part in ((2, history[:2]), (10, history)):  # 10 comes after 2, not before
        folder = tmp_path / f"checkpoint-{n}"
        folder.mkdir()
        state = {"global_step": n, "log_history": part}
        (folder / "trainer_state.json").write_text(json.dumps(state))
    frame = read_trl(tmp_path)
    assert frame.step.tolist() == [1, 2, 3] and frame.reward.tolist() == [0.25, 0.5, 0.7]
    assert frame.eval_reward.isna().tolist() == [True, False, True]
    assert "train_runtime" not in frame
    names = "reward dead_groups clip kl_ref sampler entropy length truncation grad_norm loss time"
    assert drawn(frame) >= set(names.split())
    assert read_trl(folder / "trainer_state.json").equals(frame)


PAIRS = {  # what a program prints, and the file it writes beside it
    "trl/console.txt": "trl/trainer_state.json",
    "verl/console.txt": "verl/file_logger.jsonl",
}


@pytest.mark.parametrize("printed", PAIRS)
def test_what_was_printed_is_what_was_written(printed):
    console, file = (Run.open(RECORDED / p).frame() for p in (printed, PAIRS[printed]))
    assert set(console) == set(file) and len(console) == len(file) > 5
    for name in file:
        want = pytest.approx(file[name].tolist(), rel=2e-3, abs=2e-3, nan_ok=True)
        assert console[name].tolist() == want, name


BEFORE = [
    "\x1b[36m(TaskRunner pid=7, ip=::1)\x1b[0m ",
    "2026-01-02T03:04:05.678Z stdout F (main pid=7) ",
    "[rank0]: {step} ",
    "Training:   1%|▌| 1/20 [00:01<00:20, 1.2it/s]",
]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("printed", PAIRS)
def test_a_log_is_the_same_behind_prefixes_and_in_other_encodings(
    printed, before, encoding, tmp_path
):
    text = "".join(f"{before}{x}\r\n" for x in (RECORDED / printed).read_text().splitlines())
    (tmp_path / "log").write_bytes(text.encode(encoding))
    got, want = (Run.open(p).frame() for p in (tmp_path / "log", RECORDED / printed))
    pd.testing.assert_frame_equal(got, want)


def test_numbers_of_every_kind_torn_lines_and_what_is_no_log(tmp_path):
    path = tmp_path / "log"
    row = "{'loss': nan, 'reward': np.float64(0.25), 'kl': tensor(1e-1, device='cuda:0'), 'x': -inf}\n"
    path.write_text(row + "{'loss': 0.1, oops}{'loss': 0.1, 're\n" + row.replace("0.25", "0.5"))
    frame = read_trl(path)
    assert frame.reward.tolist() == [0.25, 0.5] and frame.kl.tolist() == [0.1, 0.1]
    path.write_text("step:1 - critic/score/mean:1024 - actor/lr:tensor(5.0e-1)\nstep:2 - crit")
    assert read_verl(path)[["reward", "learning_rate"]].values.tolist()[0] == [1024, 0.5]
    row = '{"data": {"critic/score/mean": NaN, "my/metric": Infinity}, "step": 1}\n{"no": "step"}\n'
    odd = '{"step": "x"}\n{"step": [1]}\n'
    path.write_text(row + row.replace("NaN", "1").replace("1}", "2}") + odd)
    path = path.rename(tmp_path / "log.jsonl")
    frame = Run.open(path).frame()
    assert frame.reward.fillna(-9).tolist() == [-9, 1] and "my/metric" in frame
    for wrong in (b"hello\n", b"\x1f\x8b\x08", b"BZh9", bytes(range(256))):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match="log.jsonl(: no row has a step| is compressed)"):
            read_verl(path)
    with pytest.raises(ValueError, match="1.jsonl holds samples"):
        Run.open(RECORDED / "verl" / "1.jsonl").frame()
    for odd in ("null", '"x"', "[1, 2]", '["step"]'):
        path.write_text(f'{{"log_history": {odd}}}')
        with pytest.raises(ValueError, match="log.jsonl is not a trainer state"):
            read_trl(path)


@pytest.mark.parametrize("path", [*PAIRS, *PAIRS.values()])
def test_recorded_runs_are_drawn_and_diagnosed(path):
    run = Run.open(RECORDED / path)
    assert {"reward", "clip", "length", "grad_norm"} <= drawn(run.frame())
    found = diagnose(run).set_index("rule")
    assert len(found) == 10 and set(found.verdict) <= {"OK", "WARN", "CRITICAL", "SKIPPED"}
    skipped = found[found.verdict == "SKIPPED"].evidence
    assert len(skipped) and all("missing" in e or "needs" in e for e in skipped), skipped.tolist()
    assert found.verdict["D6 length"] != "SKIPPED"


def test_what_is_no_log_is_refused_and_a_log_is_not_written_to(tmp_path):
    (tmp_path / "notes.txt").write_text("step 1: all well")
    for odd in ("notes.txt", "nothing", "."):
        with pytest.raises(FileNotFoundError, match="No run in"):
            Run.open(tmp_path / odd)
    with pytest.raises(ValueError, match="nothing is added"):
        Run.open(RECORDED / "verl" / "console.txt").event("note")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt"]


def test_what_trl_printed_as_json_or_on_cut_lines_is_read(tmp_path):
    "Neither has steps: every loss is one."
    path, row = tmp_path / "trl.log", {"loss": 0.5, "kl": float("nan")}
    path.write_text(
        f"{json.dumps(row)}\n{{'loss': 0.25,\n'rewards/accu\nracy': 1.0}}\n"
        "{'train_loss': 0.4, 'rewards/accuracy': 0.5}\n"  # steps after the last that was logged
    )
    frame = read_trl(path)
    assert frame["step"].tolist() == [1, 2, 3]
    assert frame["rewards/accuracy"].tolist()[1:] == [1.0, 0.5]
    history = [{"loss": 0.5}, {"eval_loss": 1.0}, {"loss": 0.25}]
    path.write_text(json.dumps({"log_history": history}))
    assert read_trl(path)[["step", "loss"]].values.tolist() == [[1, 0.5], [2, 0.25]]


def test_lines_that_a_console_cut_are_one_row_of_verl(tmp_path):
    path = tmp_path / "verl.log"
    first = "step:1 - critic/score/mean:0.5 - actor/pg_lo\nss:-0.25 -\nactor/lr:1e-06\n- a/b:2\n"
    last = "epoch: 3\nstep:2 - val-core/A - b:x/acc/mean@3:0.7 - on:True - a/b:3"
    path.write_text(first + last + " - actor/entropy:1.5 - actor/entropy_loss:1.25\n")
    last = read_verl(path).iloc[1]  # a name of verl's data sets may hold what stands between pairs
    names = ["val-core/A - b:x/acc/mean@3", "eval_reward", "on", "entropy", "actor/entropy_loss"]
    assert last[names].tolist() == [0.7, 0.7, 1, 1.5, 1.25]
    found = read_verl(path)[["reward", "policy_loss", "learning_rate", "a/b"]].values.tolist()
    assert found[0] == [0.5, -0.25, 1e-06, 2.0] and found[1][3] == 3.0


def test_a_long_log_takes_linear_time_and_nested_metrics_are_read():
    row = "{'train': {" + "'x/mean': .123, " * 40 + "'num_gen_batches': 2}}\n"
    noise = "step 1: loading batch 7 of x, filter\n" * 20
    start = time.process_time()
    found = [parse_filter_logs((noise + row) * n)[1]["num_gen_batches"] for n in (1, 1000)]
    assert found == [2, 2000] and time.process_time() - start < 10


def test_one_process_number_on_two_nodes_is_two_workers():
    line = "(T pid=12{}) num_prompt_in_batch={} < prompt_bsz=16\n"
    nodes = ["", ", ip=10.0.0.2"] * 2
    text = "".join(map(line.format, nodes, (5, 7, 16, 18)))
    text += "ray::T.run() (pid=12, ip=10.0.0.1, actor_id=1)\nnum_gen_batches=2 >= max_num_gen_batches=2\n"
    frame, summary = parse_filter_logs(text)
    assert frame["accumulated"].tolist() == [5, 16, 7, 18]
    assert [(s["worker"], s["outcome"]) for s in summary["steps"]][0] == ("T pid=12", "cap")
    alone = re.sub(r"\(T pid=12.*?\) ", "", text)  # no line says whose it is
    assert {s["worker"] for s in parse_filter_logs(alone)[1]["steps"]} == {""}
