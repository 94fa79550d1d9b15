"The package as users get it: light imports, a wheel of the package only, safe loading, and the demo from end to end."

import ast
import importlib
import json
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import zipfile
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path

import forked
from packaging.specifiers import SpecifierSet

from grpo_nb.applications import motion
from grpo_nb.cli import main
from grpo_nb.config import describe
from grpo_nb.lab.recipe import GRPOConfig

ROOT = Path(__file__).resolve().parents[1]
OWN_PROCESSES = ("reward_workers.py", "runs.py")  # they start the senders


def test_pure_modules_and_the_record_load_with_torch_and_numpy_only():
    code = "import sys, grpo_nb.core, grpo_nb.advantages, grpo_nb.losses, grpo_nb.filter_groups; "
    code += "import grpo_nb.lab.record; print(*sys.modules)"
    p = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    heavy = {"transformers", "wandb", "datasets", "pandas", "matplotlib", "scipy", "yaml"}
    assert "torch" in p.stdout.split() and not heavy & set(p.stdout.split()), p.stderr


def test_every_pin_is_made_for_the_lowest_python_that_is_named():
    "With one that is not, pip searches for hours instead of saying so."
    pins = dict(x.split("==") for x in (ROOT / "constraints.txt").read_text().split() if "==" in x)
    pinned = [d for d in metadata.distributions() if pins.get(d.name) == d.version]
    needs = {d.name: v for d in pinned if (v := d.metadata.get("Requires-Python"))}
    assert len(needs) > 150
    assert not [k for k, v in needs.items() if not SpecifierSet(v).contains("3.11.0")]


def test_the_wheel_holds_the_package_with_its_data_and_runs_in_an_empty_folder(tmp_path):
    "Built from a copy, without the network."
    names = "setup.py pyproject.toml settings.ini README.md MANIFEST.in LICENSE CHANGELOG.md"
    for name in names.split():
        shutil.copy(ROOT / name, tmp_path)
    for folder in ("grpo_nb", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_x.py").write_text("")
    code = "import sys; from setuptools import build_meta; print(build_meta.build_wheel('dist'))"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (path,) = (tmp_path / "dist").glob("*.whl")
    wheel = zipfile.ZipFile(path)
    info = path.name.split("-py3")[0] + ".dist-info"
    assert {n.split("/")[0] for n in wheel.namelist()} == {"grpo_nb", info}
    manifest = json.loads((ROOT / "data/manifest.json").read_text())
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "grpo_nb").rglob("*.py")}
    assert modules | {f"grpo_nb/data/{n}" for n in manifest["files"]} <= set(wheel.namelist())
    assert "grpo-nb = grpo_nb.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    meta = wheel.read(f"{info}/METADATA").decode()
    assert all(x in meta for x in ("Requires-Dist: torch", "License", "Requires-Python: >=3.11"))
    wheel.extractall(tmp_path / "site")
    (tmp_path / "empty").mkdir()
    options = "steps=1 train_batch_size=2 num_generations=2 eval.samples=1 eval.limit=2".split()
    argv = ["train", "data:recipes/quickstart.yaml", *options]
    forked.run(tmp_path / "out", forked.run_installed, tmp_path, argv=argv)
    assert (tmp_path / "empty/runs/quickstart").is_dir()


def define_again(modules):
    for name in modules:
        runpy.run_module(name, run_name="__main__", alter_sys=False)
        importlib.reload(importlib.import_module(name))


def test_notebooks_and_their_modules_may_share_a_process(tmp_path):
    "nbdev_test runs several notebooks in one process: a module and the same definitions in `__main__`, in any order."
    modules = sorted(
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for p in (ROOT / "grpo_nb").rglob("*.py")
        if p.name != "cli.py" and not p.name.startswith("_")  # that one is a command
    )
    forked.run(tmp_path / "out", define_again, modules)


def test_the_package_is_the_command():
    python = shlex.quote(sys.executable)
    line = f"{python} -m grpo_nb.cli config steps=3 | grep -m 1 steps:"  # closes the pipe
    p = subprocess.run(line, shell=True, cwd=ROOT, capture_output=True, text=True)
    assert p.stderr == "" and p.stdout.startswith("steps: 3  #")


def test_nothing_is_unpickled():
    "No pickle in exported code but for processes we start ourselves (reward workers, runs of a comparison); torch.load only with weights_only=True."
    for path in sorted((ROOT / "grpo_nb").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = getattr(node.func.value, "id", "")
                if owner == "torch" and node.func.attr == "load":
                    kw = {k.arg: getattr(k.value, "value", None) for k in node.keywords}
                    assert kw.get("weights_only") is True, f"{path.name}:{node.lineno}"
                if owner in ("pickle", "cloudpickle", "joblib") and "load" in node.func.attr:
                    assert path.name in OWN_PROCESSES, f"{path.name}:{node.lineno}"
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert node.value.value is False, f"{path.name}:{node.value.lineno}"


def test_the_exported_modules_name_their_notebooks():
    for path in (ROOT / "grpo_nb").rglob("*.py"):
        told = "AUTOGENERATED! DO NOT EDIT!" in path.read_text(encoding="utf-8")[:600]
        assert told or path.name in ("__init__.py", "_modidx.py"), path.name


def test_the_page_of_keys_is_that_of_the_configuration():
    cell = json.loads((ROOT / "nbs/configuration.ipynb").read_text(encoding="utf-8"))["cells"][-1]
    page = "".join(cell["outputs"][0]["data"]["text/markdown"]).replace("\\|", "|")
    rows = describe(GRPOConfig)
    assert len(rows) > 90 and len({r["key"] for r in rows}) == len(rows)
    plain = ("int", "float", "int or null", "float or null")  # every number has a range
    assert [r["key"] for r in rows if r["accepts"] in plain or not r["meaning"]] == []
    for row in rows:
        key = row["key"].rpartition(".")[2]
        line = f"| `{key}` | {row['accepts']} | `{row['default']}` | {row['meaning']} |"
        assert line in page, f"{row['key']}: run .ci/save_outputs.py nbs/configuration.ipynb"


TINY = "train_batch_size=2 num_generations=4 eval.limit=4 eval.samples=1 compare.seeds=2"


def test_a_demo_leaves_pictures_a_report_and_three_sentences(tmp_path, capsys, monkeypatch):
    imitation = lru_cache(partial(motion.reach_policy, steps=50))
    monkeypatch.setattr(motion, "_imitation", imitation)
    tiny = [*TINY.split(), "compare.eval_every={samples: 8}", "compare.budget={steps: 2}"]
    tiny += ["--dir", str(tmp_path / "demo"), "--workers", "1"]
    assert main(["demo", *tiny]) == 0
    said, folder = capsys.readouterr().out, tmp_path / "demo"
    for name in ("Where a difference is expected", "Where none is expected", "Cost"):
        assert len(re.findall(rf"^{name}: .*\d", said, re.M)) == 1
    assert "The factor 30 is deliberate. The learning rates are fixed" in said
    page = (folder / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "Where none is expected: " in page
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
