"""Logs of other trainers as they really are: resumes, totals, nested keys, broken lines, NaN tokens."""

import json
import math

import pytest

from grpo_nb.lab import plots
from grpo_nb.lab.log_importers import read_csv, read_tinker, read_trl, read_verl


def test_trl_trainer_state(tmp_path):
    row = {
        "clip_ratio/high_max": 0.0,
        "clip_ratio/high_mean": 0.0,
        "clip_ratio/low_mean": 0.0,
        "clip_ratio/low_min": 0.0,
        "clip_ratio/region_mean": 0.0,
        "completions/clipped_ratio": 0.125,
        "completions/max_length": 12.0,
        "completions/max_terminated_length": 11.0,
        "completions/mean_length": 8.5,
        "completions/mean_terminated_length": 8.0,
        "completions/min_length": 3.0,
        "completions/min_terminated_length": 3.0,
        "entropy": 1.5,
        "epoch": 0.01,
        "frac_reward_zero_std": 0.25,
        "grad_norm": 0.5,
        "kl": 0.001,
        "learning_rate": 1e-06,
        "loss": 0.0,
        "num_tokens": 1000.0,
        "reward": 0.25,
        "reward_std": 0.3,
        "rewards/acc/mean": 0.25,
        "rewards/acc/std": 0.43,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/sampling_logp_difference/max": 0.01,
        "step": 1,
        "step_time": 0.4,
    }
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
        (folder / "trainer_state.json").write_text(
            json.dumps({"global_step": n, "log_history": part})
        )
    frame = read_trl(tmp_path)
    assert frame.step.tolist() == [1, 2, 3] and frame.reward.tolist() == [0.25, 0.5, 0.7]
    assert frame.eval_reward.isna().tolist() == [True, False, True]
    assert frame.attrs["totals"]["train_runtime"] == 9.0 and "train_runtime" not in frame
    assert frame.attrs["unknown_keys"] == []
    drawn = set(plots.PANELS) - set(plots.plot_run(frame).left_out)
    assert drawn >= {
        "reward",
        "dead_groups",
        "clip",
        "kl_ref",
        "sampler",
        "entropy",
        "length",
        "truncation",
        "grad_norm",
        "loss",
        "time",
    }
    assert read_trl(folder / "trainer_state.json").equals(frame)
    with pytest.raises(ValueError, match="log_history"):
        (tmp_path / "x.json").write_text("{}")
        read_trl(tmp_path / "x.json")


def test_trl_names_of_older_versions(tmp_path):
    rows = [
        {"step": 1, "completion_length": 7.0, "rewards/acc": 0.5, "clip_ratio": 0.1, "reward": 0.5}
    ]
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    frame = read_trl(tmp_path)
    assert frame["completions/mean_length"][0] == 7.0 and frame["rewards/acc/mean"][0] == 0.5
    assert frame["clip_ratio/region_mean"][0] == 0.1


def verl_row(step, nested=False):
    data = {
        "actor/entropy": 1.0,
        "actor/grad_norm": 0.2,
        "actor/kl_loss": 0.003,
        "actor/lr": 1e-6,
        "actor/pg_clipfrac": 0.01,
        "actor/pg_clipfrac_lower": 0.0,
        "actor/pg_loss": 0.001,
        "actor/ppo_kl": 0.002,
        "critic/advantages/max": 2.0,
        "critic/advantages/mean": 0.0,
        "critic/advantages/min": -2.0,
        "critic/returns/mean": 0.0,
        "critic/rewards/mean": 0.1 * step - 0.01,
        "critic/score/mean": 0.1 * step,
        "perf/throughput": 100.0,
        "perf/total_num_tokens": 1000,
        "prompt_length/mean": 20.0,
        "response_length/clip_ratio": 0.1,
        "response_length/max": 100.0,
        "response_length/mean": 60.0,
        "response_length/min": 5.0,
        "timing_s/adv": 0.5,
        "timing_s/gen": 4.0,
        "timing_s/old_log_prob": 1.0,
        "timing_s/reward": 0.25,
        "timing_s/step": 10.0,
        "timing_s/update_actor": 3.0,
        "train/num_gen_batches": 2,
        "training/epoch": 0,
        "training/global_step": step,
        "val-core/openai/gsm8k/reward/mean@1": 0.3 if step == 2 else None,
    }
    if not nested:
        return {"step": step, "data": data}
    tree = {}
    for key, value in data.items():
        *path, last = key.split("/")
        at = tree
        for p in path:
            at = at.setdefault(p, {})
        at[last] = value
    return tree


def test_verl_file_logger(tmp_path):
    frames = []
    for name, nested in (("flat", False), ("nested", True)):
        path = tmp_path / f"{name}.jsonl"
        lines = [json.dumps(verl_row(s, nested)) for s in (1, 2, 2, 3)]
        path.write_text("\n".join([*lines, lines[-1][:40]]))
        with pytest.warns(UserWarning, match="left out 1 broken"):
            frames.append(read_verl(path))
    a, b = frames
    assert a.step.tolist() == [1, 2, 3] and a.equals(b[list(a)])
    assert a.reward.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert a["critic/rewards/mean"].tolist() == pytest.approx(
        [0.09, 0.19, 0.29]
    )  # not the raw reward
    assert a.gen_seconds.tolist() == [4, 8, 12] and a.train_seconds.tolist() == [4.5, 9, 13.5]
    assert a.eval_reward.tolist()[1] == 0.3 and a.num_tokens.tolist() == [1000, 2000, 3000]
    assert a.attrs["unknown_keys"] == [] and len(a.attrs["broken_lines"]) == 1
    names = {"kl": 0.003, "upd/kl_old": 0.002, "clip_ratio/region_mean": 0.01, "policy_loss": 0.001}
    assert {k: a[k][0] for k in names} == names
    drawn = set(plots.PANELS) - set(plots.plot_run(a).left_out)
    assert drawn >= {
        "reward",
        "clip",
        "kl_old",
        "kl_ref",
        "entropy",
        "length",
        "truncation",
        "grad_norm",
        "time",
        "refills",
    }


def test_verl_accepts_nan_tokens_and_says_what_it_does_not_know(tmp_path):
    path = tmp_path / "v.jsonl"
    path.write_text(
        '{"step": 1, "data": {"critic/score/mean": NaN, "my/metric": Infinity}}\n{"no": "step"}\n'
    )
    frame = read_verl(path)
    assert math.isnan(frame.reward[0]) and frame.attrs["unknown_keys"] == ["my/metric"]
    assert frame.attrs["rows_without_step"] == 1
    path.write_text('{"critic/score/mean": 1.0}\n')
    with pytest.raises(
        ValueError, match="no row has a step; looked for step, training/global_step"
    ):
        read_verl(path)


def test_tinker_metrics(tmp_path):
    row = {
        "progress/batch": 0,
        "progress/done_frac": 0.0,
        "optim/lr": 4e-5,
        "optim/entropy": 0.4,
        "optim/kl_sample_train_v1": 1e-4,
        "optim/kl_sample_train_v2": 2e-4,
        "env/all/ac_tokens_per_turn": 30.0,
        "env/all/total_episodes": 64,
        "env/all/total_ac_tokens": 1920,
        "env/all/reward/total": 0.5,
        "env/all/by_group/frac_mixed": 0.5,
        "env/all/by_group/frac_all_good": 0.2,
        "env/all/by_group/frac_all_bad": 0.3,
        "kl_policy_base": 0.01,
        "time/total": 12.0,
    }
    lines = [json.dumps({"step": s} | row) for s in (0, 1)]
    lines.append(json.dumps({"step": 1, "test/env/all/reward/total": 0.45}))
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    frame = read_tinker(tmp_path)
    assert frame.step.tolist() == [0, 1] and frame.frac_reward_zero_std.tolist() == [0.5, 0.5]
    assert frame.tokens_generated.tolist() == [1920, 3840] and frame.eval_reward.tolist()[1] == 0.45
    assert frame.attrs["unknown_keys"] == []
    drawn = set(plots.PANELS) - set(plots.plot_run(frame).left_out)
    assert drawn >= {"reward", "dead_groups", "sampler", "entropy", "kl_ref", "length"}


def test_csv_with_names(tmp_path):
    path = tmp_path / "export.csv"
    path.write_text("Step,reward - mean,who\n1,0.5,a\n2,,a\n")
    frame = read_csv(path, {"Step": "step", "reward - mean": "reward"})
    assert frame.reward.isna().tolist() == [False, True]
    assert frame.step.tolist() == [1, 2] and "who" not in frame
