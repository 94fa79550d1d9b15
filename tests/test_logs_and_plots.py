"""Logs of other trainers as they really are: resumes, totals, nested keys, broken lines, NaN tokens; their samples under other
estimators and filters; what diagnosis says of runs, and what plots draw."""

import json
import math
import re
import time
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from test_processes import Table

from grpo_nb.lab import plots
from grpo_nb.lab.diagnosis import diagnose
from grpo_nb.lab.logs import parse_filter_logs, read_trl, read_verl
from grpo_nb.lab.plots import LivePlot
from grpo_nb.lab.record import Run
from grpo_nb.lab.session import sample_table
from grpo_nb.lab.what_if import _read_samples, what_if
from grpo_nb.tasks import Task

RECORDED = Path(__file__).parent / "recorded"


def drawn(frame):
    return set(plots.PANELS) - set(plots.plot_run(frame).left_out)


def test_trl_trainer_state(tmp_path):
    ratio, difference = "importance_sampling_ratio/mean", "sampling_logp_difference/max"
    names = ["reward", "grad_norm", f"sampling/{ratio}", f"sampling/{difference}"]
    row = dict.fromkeys(names, 0.25) | {"step": 1}
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
    assert drawn(frame) >= {"reward", "sampler", "grad_norm"}
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
def test_a_log_is_the_same_behind_prefixes_and_in_any_encoding(printed, before, encoding, tmp_path):
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
    names = "reward clip entropy length truncation grad_norm loss time "
    names += "dead_groups kl_ref" if "trl" in path else "kl_old"
    assert set(names.split()) <= drawn(run.frame())
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
        "{'eval_runtime': 9.0, 'reward': 7.0}\n"  # Unsloth leaves out an eval_
        "{'train_loss': 0.4, 'rewards/accuracy': 0.5}\n"  # steps after the last that was logged
    )
    with pytest.warns(UserWarning, match="trl.log tells no steps"):
        frame = read_trl(path)
    assert frame["step"].tolist() == [1, 2, 3] and frame["eval_reward"][1] == 7.0
    assert frame["rewards/accuracy/mean"].tolist()[1:] == [1.0, 0.5]
    history = [{"loss": 0.5}, {"eval_loss": 1.0}, {"loss": 0.25}]
    path.write_text(json.dumps({"log_history": history}))
    assert read_trl(path)[["step", "loss"]].values.tolist() == [[1, 0.5], [2, 0.25]]
    rows = [{"loss": 1, "completion_length": k, "global_step/max_steps": f"{k}/9"} for k in (5, 9)]
    path.write_text("\n".join(map(json.dumps, [*rows, {"memory": 7, "log_history": history}])))
    frame = read_trl(path)  # of ms-swift, whose last line has the rows once more
    assert frame[["step", "completions/mean_length"]].dropna().values.tolist() == [[5, 5], [9, 9]]
    path.write_text(("{'loss': 0.5, " + "'x': 1, " * 999)[:4096] + "\n{'loss': 0.25}")  # by wandb
    assert read_trl(path)["loss"].tolist() == [0.5, 0.25]
    cells = "Step", "Training Loss", "reward", "rewards / accuracy"  # as Jupyter shows them
    tables = [
        [cells[:2], (1, 9), (3, 9)],
        [cells, (1, "0.5", "No Log", "-1"), (2, 0.25, 1, "1e-3")],
    ]
    html = ["".join(f"<tr>{''.join(f'<td>{c}</td>' for c in r)}</tr>" for r in t) for t in tables]
    outputs = [{"data": {"text/html": [h]}} for h in html]
    outputs.append({"text": ["step:1 - actor/lr:0.5 - actor/kl_loss:0.25\n"]})
    path = tmp_path / "trl.ipynb"
    path.write_text(json.dumps({"cells": [{"source": []}, {"outputs": outputs}]}))
    told = read_trl(path).set_index("step")[["loss", "reward", "rewards/accuracy/mean"]].T
    assert told.fillna("").to_dict("list") == {1: [0.5, "", -1.0], 2: [0.25, 1.0, 0.001]}
    assert read_verl(path)[["learning_rate", "kl"]].values.tolist() == [[0.5, 0.25]]


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
    path.write_text(("step:1 - critic/kl:0.5 - " + "x" * 4096)[:4090] + ":0.375\nEpoch 1")
    with pytest.warns(UserWarning, match="left out 1 broken: the end of step:1"):  # by wandb
        frame = read_verl(path)
    assert frame.fillna(0).values.tolist() == [[1, 0.5, 0]] and "kl" in frame


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


def test_trl_advantages_are_found_again_and_a_rollout_that_it_trains_twice_counts_once():
    seen = what_if(RECORDED / "trl", ["grpo"])
    assert seen.components == ["right", "short"] and seen.samples["short"].isna().any()
    np.testing.assert_allclose(seen.samples["grpo"], seen.samples["stored"], atol=1e-6)
    frame = _read_samples(RECORDED / "trl")
    assert frame["step"].unique().tolist() == [1, 3, 5, 6]  # 6 holds the samples of an evaluation
    assert frame.groupby("group").size().tolist() == [8] * 16


def test_groups_of_verl_are_neighbours_with_equal_prompts():
    frame = _read_samples(RECORDED / "verl")
    assert frame.attrs["components"] == ["acc", "length"]
    assert set(frame.groupby("group").size()) == {4}
    assert (frame.groupby("group")["prompt"].nunique() == 1).all()
    ids = [f"a{k % 2}_{k}_0" for k in range(len(frame))]  # of newer dumps
    newer = _read_samples(frame.drop(columns="group").assign(step=1, uid=ids))
    assert (newer["group"] == np.arange(len(frame)) % 2).all()


def test_components_that_a_table_lacks_and_rewards_that_are_all_none(tmp_path):
    one = {"step": 1, "prompt": ["p"] * 4, "completion": "", "right": [1.0, 0, 0, 1], "len": 7}
    two = one | {"step": 2, "prompt": ["q"] * 4, "right": [1.0, 1, 1, 1]}
    (folder := tmp_path / "completions").mkdir()
    for k, table in enumerate((one | {"short": [None] * 4}, two)):
        pd.DataFrame(table).to_parquet(folder / f"completions_{k}.parquet")
    log = {"step": 1, "rewards/right/mean": 0.5, "rewards/short/mean": None}  # names no `len`
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [log]}))
    seen = what_if(folder, ["grpo", "gdpo"], "right")
    assert seen.components == ["right", "short"]
    assert seen.groups()["state"].tolist() == ["varied", "all right"]
    assert np.isfinite(seen.samples[["grpo", "gdpo"]]).all(axis=None)


def test_a_run_is_seen_with_its_own_weights_options_and_lengths(tmp_path):
    def logged(folder, columns, **config):
        each = {"group": [0] * 4, "prompt": ["p"] * 4, "completion": [""] * 4}
        with Run.create(folder, config) as run:
            run.log_samples(1, each | columns)
        return run

    rewards = {"rewards/a": [1.0, 0, 0, 1], "rewards/size": [0.0, 6, 2, 1], "advantage": [0.0] * 4}
    run = logged(tmp_path / "a", rewards, advantage={"weights": {"a": 2.0, "size": 0.0}})
    for source in (run, tmp_path / "a"):
        seen = what_if(source, ["grpo"]).samples
        np.testing.assert_allclose(seen["grpo"], [0.866, -0.866, -0.866, 0.866], atol=1e-3)
        assert seen["reward"].tolist() == [2, 0, 0, 2]
    rewards = {"rewards/a": [1.0, 0, 0, 0.5], "length": [1, 2, 3, 4], "advantage": [0.5, 0, 0, 0]}
    own = {"mode": "passk", "options": {"scale": "none"}}
    run = logged(tmp_path / "b", rewards, advantage=own, rewards={"kl_in_reward": 0.1})
    with pytest.warns(UserWarning, match="only stored advantages are with it"):
        seen = what_if(run, ["passk", "opo"]).samples
    assert seen["passk"].tolist() == seen["stored"].tolist()
    np.testing.assert_allclose(seen["opo"], [0.7, -0.3, -0.3, 0.2], atol=1e-6)
    r = Table().sample([Task("p", {"index": 0})] * 2, 2, torch.Generator())
    r = r.replace(reward_names=("a",), rewards_NRK=torch.rand(4, 1, 3))
    with pytest.warns(UserWarning, match="per rank"):
        what_if(logged(tmp_path / "c", sample_table(r, r.rewards[:, 0, 0])), "grpo")


# diagnosis and plots


def healthy(n=200):
    t = np.arange(1, n + 1)
    reward = 0.2 + 0.6 * t / n
    moving = {"reward": reward, "kl": 0.1 * t / n, "entropy": 2 - t / n}
    moving["eval_sampled"] = np.where(t % 10 == 0, reward - 0.02, np.nan)
    flat = {"frac_reward_zero_std": 0.2, "upd/first_logp_diff": 1e-5, "kl_old/k3": 0.004}
    flat |= {"clip_ratio/low_mean": 0.01, "clip_ratio/high_mean": 0.012, "grad_norm": 0.5}
    flat |= {"completions/clipped_ratio": 0.01, "completions/mean_length": 50.0}
    flat |= {"adv/share/acc": 0.55, "adv/share/format": 0.45}
    return pd.DataFrame({"step": t} | moving | flat)


def test_every_panel_draws_what_was_logged():
    more = {"eval_pass@1": 0.4, "reward/acc/n_error": 0.0, "filter/kept": 5.0, "loss": 0.0}
    more |= {"filter/num_gen_batches": 2.0, "selection/valid_ratio": 0.5, "adv/abs_mean": 0.8}
    more |= {"gen_seconds": np.arange(200) * 1.0, "tokens_generated": np.arange(200) * 10}
    frame = healthy().assign(**more | {"ratio/mean": 1.0})
    fig = plots.plot_run(frame)
    assert fig.left_out == {} and len(fig.axes) == len(plots.PANELS) and fig.get_figwidth() <= 9
    by_title = {ax.get_title(loc="left"): ax for ax in fig.axes}
    assert by_title["entropy"].lines[0].get_ydata().tolist() == frame.entropy.tolist()
    assert by_title["throughput"].lines[0].get_ydata().tolist() == [10.0] * 199


def test_live_plot_that_fails_is_reported_once(monkeypatch):
    monkeypatch.delattr("IPython.display.display")
    live = LivePlot(lambda: plots.plot_run(pd.DataFrame({"step": [1], "reward": [1.0]})))
    with pytest.warns(UserWarning, match="the live plot stopped"):
        live.update()
    with warnings.catch_warnings(action="error"):
        live.update()


@pytest.mark.parametrize("name", ["eval_sampled", "eval_greedy", "eval_reward"])
def test_the_held_out_score_has_one_name_for_panel_and_rule(name):
    frame = healthy().rename(columns={"eval_sampled": name})
    assert "held out" in plots.PANELS["reward"](frame).lines
    assert diagnose(frame).verdict[8] == "OK"
    assert diagnose(frame.assign(**{name: frame[name] - 0.5})).verdict[8] == "CRITICAL"


def test_a_panel_that_never_changes_says_so():
    frame = pd.DataFrame({"step": [1, 2], "entropy": [1.5, 1.5], "grad_norm": [1.0, 2.0]})
    axes = plots.plot_run(frame.assign(kl=[-0.5, 0.5])).axes
    assert min(ax.get_ylim()[0] for ax in axes) < -0.5
    notes = {ax.get_title("left"): [t.get_text() for t in ax.texts] for ax in axes}
    assert notes["entropy"] == ["always 1.5"] and notes["grad norm"] == [""]


ODD = [r"$\frac$", "$", "_mine", "<b>&", "a_b^{", "\\", "$x$ and $y", "ü ß 中"]


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_are_drawn_as_they_are(tmp_path):
    names = (part.format(k) for k in ODD for part in ("rewards/{}/mean", "adv/share/{}"))
    fig = plots.plot_run(healthy(40).assign(**dict.fromkeys(names, 0.5)), ["reward", "adv_share"])
    fig.savefig(tmp_path / "x.png")
    shown = [t.get_text().strip() for t in fig.axes[0].get_legend().get_texts()]
    assert {k.replace("$", r"\$") for k in ODD} <= set(shown)


CELLS = [
    "from grpo_nb.lab.record import Run\nimport grpo_nb.lab.plots\nimport tempfile, sys\n"
    "run = Run.create(tempfile.mkdtemp() + '/r')\nrun.log(1, {'reward': 1.0})\nrun.plot();",
    "assert 'matplotlib.pyplot' not in sys.modules\nrun.plot()",
    "import matplotlib.pyplot as plt\nplt.plot([1, 2]);",
    "run.plot();",
    "run.plot()",
    "fig = run.plot()\nfig",
    "plt.plot([2, 1])",
    "1 + 1",
]


def test_a_notebook_shows_every_picture_once(tmp_path):
    import nbformat  # takes a second, which the other files need not wait for
    from nbclient import NotebookClient

    cells = [nbformat.v4.new_code_cell(c) for c in CELLS]
    nb = NotebookClient(nbformat.v4.new_notebook(cells=cells), kernel_name="python3").execute()
    pictures = ["image/png" in o.get("data", ()) for c in nb.cells for o in c.outputs]
    by_cell = [sum("image/png" in o.get("data", ()) for o in c.outputs) for c in nb.cells]
    assert by_cell == [1] * 7 + [0] and sum(pictures) == 7
