"""What diagnosis says of healthy and sick runs, what plots draw, and what a live plot does when it fails."""

import contextlib
import warnings

import numpy as np
import pandas as pd
import pytest

from grpo_nb.config import build_config
from grpo_nb.lab import plots
from grpo_nb.lab.diagnosis import diagnose
from grpo_nb.lab.plots import LivePlot
from grpo_nb.lab.recipe import GRPOConfig
from grpo_nb.lab.record import Run
from grpo_nb.trainer import GRPO


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
    assert fig.left_out == {} and len(fig.axes) == len(plots.PANELS)
    assert fig.get_size_inches()[0] <= 9
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


def test_a_run_of_ones_own_has_a_held_out_line(tmp_path):
    run = {"dir": str(tmp_path / "r"), "samples_rows": 37, "samples_every": 2}
    base = {"train_batch_size": 8, "num_generations": 5, "steps": 2, "run": run}
    base |= {"policy": {"max_new_tokens": 4}, "eval": {"every": 1, "limit": 2, "samples": 2}}
    with contextlib.closing(GRPO.from_config(build_config(GRPOConfig, base))) as trainer:
        trainer.fit()
    run = Run.open(tmp_path / "r")
    assert len(plots.PANELS["reward"](run.frame()).lines["held out"]) == 2
    assert diagnose(run).verdict[8] != "SKIPPED"
    assert run.samples().groupby(["step", "group"]).size().tolist() == [5] * 14  # none is cut


def test_a_panel_that_never_changes_says_so():
    frame = pd.DataFrame({"step": [1, 2], "entropy": [1.5, 1.5], "grad_norm": [1.0, 2.0]})
    axes = plots.plot_run(frame).axes
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
