"""Run notebooks and store their outputs, then clean them.

    python .ci/save_outputs.py [--flags "slow gpu"] [NOTEBOOK ...]     (default: every notebook under nbs/)

Cells marked `#| eval: false`, or with a flag that was not asked for, keep the output they have. The first error stops
the run and leaves that notebook as it was.
"""

import argparse
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TQDM_DISABLE", "1")
ROOT = Path(__file__).resolve().parents[1]


def run_notebook(path: Path, flags: set[str]) -> str:
    import time

    from execnb.nbio import read_nb, write_nb
    from execnb.shell import CaptureShell
    from nbdev.config import get_config
    from nbdev.process import NBProcessor, nb_lang
    from nbdev.processors import FrontmatterProc

    start = time.time()
    processed = NBProcessor(path, procs=FrontmatterProc, process=True).nb
    front = getattr(processed, "frontmatter_", {}) or {}
    if nb_lang(processed) != "python" or front.get("skip_exec"):
        return f"skipped {path}"
    known = set(get_config().tst_flags.split())

    def skip(cell):
        d = getattr(cell, "directives_", {})
        if cell.cell_type != "code" or "nbdev_export(" in cell.source:
            return True
        if d.get("eval:", [""])[0].lower() == "false":
            return True
        return bool((known & d.keys()) - flags)

    class Keep(Exception):
        pass

    shell = CaptureShell(path, mpl_format="png")
    old = {c.id: c for c in read_nb(path).cells}
    for cell in processed.cells:
        if cell.cell_type == "code":
            cell[
                "outputs"
            ] = []  # a cell that prints nothing any more must not keep what it printed
    here = os.getcwd()
    os.chdir(path.parent)
    sys.path.insert(0, str(ROOT))
    os.environ["SAVING_OUTPUTS"] = "1"
    try:
        shell.run_all(processed, exc_stop=True, preproc=skip)
    finally:
        os.chdir(here)
    nb = read_nb(path)
    for new, cell in zip(processed.cells, nb.cells):
        if cell.cell_type == "code":
            kept = skip(new)
            cell["outputs"] = old[cell.id].get("outputs", []) if kept else new.get("outputs", [])
    write_nb(nb, path)
    return f"{time.time() - start:6.1f} s  {path.relative_to(ROOT)}"


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("notebooks", nargs="*", type=Path)
    ap.add_argument("--flags", default="")
    ap.add_argument("--n_workers", type=int, default=2)
    ap.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.one:  # a process per notebook: a kernel leaves traces in its interpreter
        print(run_notebook(a.notebooks[0], set(a.flags.split())))
        return
    paths = [p.resolve() for p in a.notebooks] or sorted(
        p
        for p in (ROOT / "nbs").rglob("*.ipynb")
        if not re.search(r"(^|/)[._]", str(p.relative_to(ROOT)))
    )

    def job(path):
        cmd = [sys.executable, __file__, "--one", "--flags", a.flags, str(path)]
        p = subprocess.run(cmd, capture_output=True, text=True)
        lines = (p.stdout if not p.returncode else p.stderr).strip().splitlines()
        print(
            "\n".join(lines[-1:] if not p.returncode else [f"FAILED {path}", *lines[-12:]]),
            flush=True,
        )
        return p.returncode

    with ThreadPoolExecutor(max(1, a.n_workers)) as ex:
        failed = sum(map(bool, ex.map(job, paths)))
    from nbdev.clean import nbdev_clean

    for p in paths:
        nbdev_clean(p)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
