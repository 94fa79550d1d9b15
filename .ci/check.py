"""Everything that must hold before a change lands; the counted line of pytest comes last.

python .ci/check.py [--only clean,lint,notebooks,docs,tests]
"""

import argparse
import filecmp
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
os.environ.update(
    OMP_NUM_THREADS="1", WANDB_MODE="disabled", HF_HUB_OFFLINE="1", WANDB_SILENT="true"
)


def run(*cmd, cwd=ROOT, **kw):
    subprocess.run([str(c) for c in cmd], cwd=cwd, check=True, **kw)


def tracked():
    "Files of the working tree that git tracks or would add."
    out = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [f for f in out.stdout.split("\0") if f and (ROOT / f).is_file()]


def clean():
    "Cleaning, exporting and rebuilding the README change nothing. Done in a copy: your files stay as they are."
    if not (ROOT / ".git").exists():
        return print("a downloaded archive, no checkout: not asked")
    with tempfile.TemporaryDirectory() as tmp:
        copy = Path(tmp) / "copy"
        files = tracked()
        for f in files:
            if f.startswith("data/") and f.endswith(".safetensors"):
                continue
            (copy / f).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / f, copy / f)
        env = dict(os.environ, PYTHONPATH=str(copy))
        run("nbdev_clean", cwd=copy, env=env)
        run("nbdev_export", cwd=copy, env=env)
        run(sys.executable, ".ci/build_readme.py", cwd=copy, env=env)
        stale = [
            f
            for f in files
            if (copy / f).exists() and not filecmp.cmp(ROOT / f, copy / f, shallow=False)
        ]
        new = {
            str(p.relative_to(copy))
            for p in (copy / "grpo_nb").rglob("*.py")
            if "__pycache__" not in str(p)
        } - set(files)
        if stale or new:
            sys.exit(
                "Not in sync (run `make fmt`, `python .ci/build_readme.py`, and commit): "
                + ", ".join(sorted([*stale, *new]))
            )


def lint():
    run("ruff", "format", "--check", ".")
    run("ruff", "check", ".")


def notebooks():
    quiet = subprocess.DEVNULL if os.environ.get("QUIET") else None
    run(sys.executable, ".ci/test_notebooks.py", stdout=quiet)


def docs():
    run(sys.executable, ".ci/build_docs.py")


def tests(beside):
    "The exit code of pytest; what it prints comes after what the others print."
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    command += ["--no-loadscope-reorder", "--durations=5", "tests"]
    with tempfile.NamedTemporaryFile("w+") as said:
        pytest = subprocess.Popen(command, cwd=ROOT, stdout=said, stderr=subprocess.STDOUT)
        wait(beside)
        print("== tests", flush=True)
        with open(said.name) as said_so_far:
            while pytest.poll() is None:
                print(said_so_far.read(), end="", flush=True)
                time.sleep(0.5)
            print(said_so_far.read(), end="", flush=True)
    return pytest.returncode


STEPS = dict(clean=clean, lint=lint, docs=docs, notebooks=notebooks)


def carry_out(names):
    for name in names:
        start = time.time()
        print(f"== {name}", flush=True)
        try:
            STEPS[name]()
        except subprocess.CalledProcessError as e:
            sys.exit(f"== {name} failed: {' '.join(map(str, e.cmd))} (exit code {e.returncode})")
        print(f"== {name} ok, {time.time() - start:.0f} s", flush=True)


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--only", default=",".join([*STEPS, "tests"]), help="steps, in order")
    names = ap.parse_args().only.split(",")
    short = [n for n in names if n not in ("notebooks", "tests")]
    # side by side: what takes one core, the notebooks, and the tests, which often wait for processes and deadlines
    with ThreadPoolExecutor(3) as pool:
        beside = [pool.submit(carry_out, short)]
        beside.append(pool.submit(carry_out, [n for n in names if n == "notebooks"]))
        last = pool.submit(tests, beside) if "tests" in names else None
        for lane in beside:
            lane.result()
    if last is not None and last.result():
        sys.exit("== tests failed")


if __name__ == "__main__":
    main()
