"""The plan of the house holds: imports go down, the method knows nothing of the lab, rooms stay small."""

import ast
import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import floors  # noqa: E402

MODULES = sorted((ROOT / "grpo_nb").rglob("*.py"))
NOTEBOOKS = [p for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if "_" != p.name[0]]


def test_imports_only_go_down():
    assert floors.wrong_arrows() == []


def test_the_method_never_imports_the_lab():
    wing = {m: w for m, (w, _) in floors.rooms().items()}
    assert [
        (a, b)
        for a, b in floors.arrows()
        if wing[a] in ("ground", "method") and wing[b] not in ("ground", "method")
    ] == []


@pytest.mark.parametrize(
    "path", [p for p in MODULES if p.name != "_modidx.py"], ids=lambda p: p.stem
)
def test_no_room_is_over_800_lines(path):
    assert len(path.read_text(encoding="utf-8").split("\n")) <= 800


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_component_shows_a_picture_or_a_result_early_and_stays_readable(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    if not any("#| export" in "".join(c["source"]) for c in cells):
        return
    assert len(cells) <= 80
    shown = [i for i, c in enumerate(cells) if c.get("outputs")]
    assert shown and shown[0] <= 12


def test_every_function_of_the_step_fits_a_screen():
    tree = ast.parse((ROOT / "grpo_nb" / "trainer.py").read_text(encoding="utf-8"))
    step = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "step")
    assert step.end_lineno - step.body[0].lineno + 1 <= 40
