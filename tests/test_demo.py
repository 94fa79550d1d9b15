"""The demo from end to end, with two updates a run: what it writes, and what it says."""

import json
import re
from functools import lru_cache, partial

from grpo_nb.applications import motion
from grpo_nb.cli import main

TINY = "train_batch_size=2 num_generations=4 eval.limit=4 eval.samples=1 compare.seeds=2"


def test_a_demo_leaves_pictures_a_report_and_three_sentences(tmp_path, capsys, monkeypatch):
    imitation = lru_cache(partial(motion.reach_policy, steps=50))
    monkeypatch.setattr(motion, "_imitation", imitation)
    tiny = [*TINY.split(), "compare.eval_every={samples: 8}", "compare.budget={steps: 2}"]
    tiny += ["--dir", str(tmp_path / "demo"), "--workers", "1"]
    assert main(["demo", *tiny]) == 0
    said, folder = capsys.readouterr().out, tmp_path / "demo"
    for name in ("Difference", "Null", "Cost"):
        assert len(re.findall(rf"^{name}: .*\d", said, re.M)) == 1
    assert "The factor 30 is deliberate. The learning rates are fixed" in said
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "Difference: " in page
    for link in re.findall(r'href="([^"]+)"', page):
        assert (folder / link).exists()
    assert {"motion.png", "sums.png"} <= {p.name for p in folder.iterdir()}
    # the numbers of the sentences are those of the stored studies
    sums = json.loads((folder / "sums" / "study.json").read_text())
    runs = [r["curve"] for r in sums["runs"] if r["variant"] == "GRPO"]
    last = [curve["eval_sampled/exact_answer"][-1] for curve in runs]
    assert f"takes GRPO from {sum(last) / 2:.3f} to" in said
    # a finished demo is left alone
    monkeypatch.setattr("grpo_nb.cli._demo", lambda dir, *_, **__: dir == tmp_path / "demo-2")
    assert main(["demo", *tiny]) == 0
