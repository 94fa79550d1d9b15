"""The plan of the house holds: imports go down, the method knows nothing of the lab, rooms stay small."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / ".ci"))
import floors  # noqa: E402

MODULES = [p for p in sorted((ROOT / "grpo_nb").rglob("*.py")) if p.name != "_modidx.py"]
NOTEBOOKS = [p for p in sorted((ROOT / "nbs").rglob("*.ipynb")) if "_" != p.name[0]]


def test_imports_only_go_down_and_the_method_never_imports_the_lab():
    assert floors.wrong_arrows() == []
    method = {m for m, (wing, _) in floors.rooms().items() if wing in ("ground", "method")}
    assert [(a, b) for a, b in floors.arrows() if a in method and b not in method] == []


@pytest.mark.parametrize("path", MODULES, ids=lambda p: p.stem)
def test_no_room_is_over_800_lines(path):
    assert len(path.read_text(encoding="utf-8").split("\n")) <= 800


ROOMS = [p for p in NOTEBOOKS if p.parent.name in ("method", "lab", "applications")]


@pytest.mark.parametrize("path", ROOMS, ids=lambda p: p.stem)
def test_a_room_shows_a_picture_early_and_stays_readable(path):
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert len(cells) <= 80
    outputs = [o.get("data", {}) for c in cells[:12] for o in c.get("outputs", [])]
    assert any("image/png" in data for data in outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_imports_stand_in_cells_of_their_own(path):
    "A docs build runs the cells that import, so other code in them would run there too."
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or "nbdev_export" in source or "__name__" in source:
            continue
        lines = [x for x in source.splitlines() if not x.startswith(("%", "!"))]
        body = ast.parse("\n".join(lines)).body
        kinds = [isinstance(n, ast.Import | ast.ImportFrom) for n in body]
        assert all(kinds) or not any(kinds), source


def test_no_stored_output_names_a_folder_of_the_machine_that_made_it():
    for path in NOTEBOOKS:
        assert not re.search(r"/\w[\w./-]*\.py:\d+: \w*Warning", path.read_text("utf-8")), path


def test_nothing_but_the_house_stands_at_the_top():
    "Examples that run there leave files."
    found = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    folders = set("grpo_nb nbs data tests studies .ci".split())
    files = "CHANGELOG.md CONTRIBUTING.md LICENSE MANIFEST.in Makefile README.md constraints.txt pyproject.toml ruff.toml"
    files += " settings.ini setup.py .gitattributes .gitignore"
    assert {name.split("/")[0] for name in found.stdout.split()} <= folders | set(files.split())


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_links_between_notebooks_lead_somewhere(path):
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            for link in re.findall(r"\]\((?!https?:)([^)#]+\.ipynb)", "".join(cell["source"])):
                assert (path.parent / link).exists(), link
