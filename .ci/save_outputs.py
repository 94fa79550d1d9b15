"""Run notebooks and store their outputs, then clean them.

    python .ci/save_outputs.py [--flags "slow gpu"] [NOTEBOOK ...]     (default: every notebook under nbs/)

Cells marked `#| eval: false`, or with a flag that was not asked for, keep the output they have. The first error stops
the run and leaves that notebook as it was.
"""

import argparse
import os
import re
import sys
from concurrent.futures import ProcessPoolExecutor
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
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("notebooks", nargs="*", type=Path)
    ap.add_argument("--flags", default="")
    ap.add_argument("--n_workers", type=int, default=2)
    a = ap.parse_args()
    paths = [p.resolve() for p in a.notebooks] or sorted(
        p
        for p in (ROOT / "nbs").rglob("*.ipynb")
        if not re.search(r"(^|/)[._]", str(p.relative_to(ROOT)))
    )
    flags = set(a.flags.split())
    failed = []
    with ProcessPoolExecutor(max(1, min(a.n_workers, len(paths)))) as ex:
        jobs = {p: ex.submit(run_notebook, p, flags) for p in paths}
        for p, job in jobs.items():
            try:
                print(job.result(), flush=True)
            except Exception as e:  # noqa: BLE001 - reported, and the exit code says so
                failed.append(p)
                print(f"FAILED {p}\n{e}", flush=True)
    from nbdev.clean import nbdev_clean

    for p in paths:
        nbdev_clean(p)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
