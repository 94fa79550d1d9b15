"""Time and memory of one selection and one update, ours and Trinity-RFT's, in one alternating run.

    python tests/bench/task_selectors.py --peer_python PEER/bin/python [--sizes 1000000 10000000] [--rounds 3]

PEER is an environment that holds trinity-rft 0.6.0. Both sides run in it, as fresh processes one after the other (ours,
theirs, ours, ...), on the same arrays and with the same number of torch threads; without --peer_python only ours is
measured, in this environment. Results go to tests/bench/results/selectors.md.
"""

import argparse
import datetime
import json
import logging
import os
import platform
import subprocess
import sys
import time
import types
import warnings
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
ANCHORS = {"feature_keys": ["lo", "hi"]}
COMMON = {"m": 8, "target_reward": 0.5}
CASES = {
    "sequential": ("sequential", {}),
    "shuffle": ("shuffle", {}),
    "random": ("random", {}),
    "offline_easy2hard": ("offline_easy2hard", ANCHORS),
    "difficulty_based top-k": (
        "difficulty_based",
        {**ANCHORS, "kwargs": {**COMMON, "tau": 0, "do_sample": False}},
    ),
    "difficulty_based top-k of draws": (
        "difficulty_based",
        {**ANCHORS, "kwargs": {**COMMON, "tau": 0, "do_sample": True}},
    ),
    "difficulty_based softmax": (
        "difficulty_based",
        {**ANCHORS, "kwargs": {**COMMON, "tau": 0.1, "do_sample": False}},
    ),
    "difficulty_based softmax of draws": (
        "difficulty_based",
        {**ANCHORS, "kwargs": {**COMMON, "tau": 0.1, "do_sample": True}},
    ),
}
OURS_ONLY = {name: (name, {}) for name in ("thompson", "greso", "learnability")}


def resident(field: str) -> float:
    "VmRSS or VmHWM of this process in MB; NaN where the system does not tell."
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next(int(x.split()[1]) / 1024 for x in lines if x.startswith(field))


def reset_peak() -> None:
    "Start a new high-water mark."
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pass


def worker(side: str, n: int, labels: list[str], batch: int, calls: int) -> list[dict]:
    "Measure one side in this process."
    import numpy as np

    warnings.filterwarnings("ignore")
    logging.disable(logging.INFO)
    if side == "ours":
        sys.path.insert(0, str(ROOT))
        from grpo_nb.selectors import SELECTORS, TaskSelectorConfig
    else:
        from trinity.buffer.selector import SELECTORS
        from trinity.common.config import DataSelectorConfig as TaskSelectorConfig
    rng = np.random.default_rng(0)
    lo = rng.random(n) * 0.6
    hi = np.minimum(1.0, lo + rng.random(n) * 0.4)
    source = types.SimpleNamespace(dataset={"lo": lo, "hi": hi}, dataset_size=n)
    out = []
    for label in labels:
        name, options = (CASES | OURS_ONLY)[label]
        make = SELECTORS[name] if side == "ours" else SELECTORS.get(name)
        config = TaskSelectorConfig(selector_type=name, seed=0, **options)
        reset_peak()
        before, start = resident("VmRSS"), time.perf_counter()
        s = make(source, config)
        build = time.perf_counter() - start
        get, update = [], []
        for _ in range(calls):
            start = time.perf_counter()
            idx = s.get_indices(batch)
            get.append(time.perf_counter() - start)
            idx = idx.tolist() if hasattr(idx, "tolist") else list(idx)
            values = (rng.integers(0, 9, batch) / 8).tolist()
            start = time.perf_counter()
            s.feedback(idx, values)
            update.append(time.perf_counter() - start)
        peak, held = resident("VmHWM"), resident("VmRSS")
        row = {
            "side": side,
            "label": label,
            "n": n,
            "build_s": build,
            "first_ms": get[0] * 1e3,
        }
        row |= {"get_ms": median(get[1:]) * 1e3, "update_ms": median(update[1:]) * 1e3}
        row |= {"peak_mb": peak - before, "held_mb": held - before}
        row["worst_ms"] = max(a + b for a, b in zip(get[1:], update[1:])) * 1e3
        # an order made once per epoch is shared by its n / batch selections
        once = build * 1e3 + get[0] * 1e3 if name == "shuffle" else 0.0
        row["step_ms"] = row["get_ms"] + row["update_ms"] + once * batch / n
        out.append(row)
        del s
    return out


def versions(python: str) -> str:
    "What the environment holds."
    names = "numpy torch trinity-rft"
    code = (
        "import importlib.metadata as m, platform; got = ['Python ' + platform.python_version()]\n"
        f"for x in {names.split()!r}:\n"
        "    try: got.append(x + ' ' + m.version(x))\n"
        "    except m.PackageNotFoundError: pass\n"
        "print(', '.join(got))"
    )
    return subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def cpu() -> str:
    "Model and number of CPUs."
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(x.split(":", 1)[1].strip() for x in lines if x.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor() or platform.machine()
    return f"{model}, {os.cpu_count()} cores"


def run(python: str, side: str, n: int, labels: list[str], a) -> list[dict]:
    "One fresh process."
    job = {"side": side, "n": n, "labels": labels, "batch": a.batch, "calls": a.calls}
    env = {**os.environ, "OMP_NUM_THREADS": str(a.threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [python, __file__, "--job", json.dumps(job)],
        capture_output=True,
        text=True,
        env=env,
    )
    if done.returncode:
        raise SystemExit(f"{side} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    for r in rows:
        print(
            f"{side:5} {r['n']:>9} {r['label']:34} build {r['build_s']:7.2f} s  step {r['step_ms']:9.3f} ms",
            flush=True,
        )
    return rows


def table(rows: list[dict], n: int) -> list[str]:
    "Markdown lines for one size."
    pick = lambda side, label: [
        r for r in rows if r["side"] == side and r["label"] == label and r["n"] == n
    ]
    mid = lambda found, key: median(r[key] for r in found)
    lines = [
        "| selector | build s | get + update ms | worst ms | memory MB | peer: build s | peer: get + update ms | peer: memory MB | build x | step x |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for label in CASES | OURS_ONLY:
        ours, theirs = pick("ours", label), pick("peer", label)
        if not ours:
            continue
        line = f"| {label} | {mid(ours, 'build_s'):.3f} | {mid(ours, 'step_ms'):.3f} | {mid(ours, 'worst_ms'):.2f} | {mid(ours, 'peak_mb'):.0f} |"
        if theirs:
            pairs = list(zip(ours, theirs))
            ratio = lambda key, p=pairs: median(t[key] / max(o[key], 1e-6) for o, t in p)
            build = f"{ratio('build_s'):.1f}" if mid(ours, "build_s") > 0.001 else ""
            line += f" {mid(theirs, 'build_s'):.2f} | {mid(theirs, 'step_ms'):.3f} | {mid(theirs, 'peak_mb'):.0f} | {build} | {ratio('step_ms'):.1f} |"
        else:
            line += " - | - | - | | |"
        lines.append(line)
    return lines


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--peer_python", default=None)
    ap.add_argument("--sizes", type=int, nargs="+", default=[1_000_000, 10_000_000])
    ap.add_argument("--rounds", type=int, default=3)
    ap.add_argument("--calls", type=int, default=12)
    ap.add_argument("--batch", type=int, default=512)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--slow_once", type=int, default=500_000, help="above this size the peer's offline_easy2hard is built in the first round only")  # fmt: skip
    ap.add_argument("--out", type=Path, default=ROOT / "tests/bench/results/selectors.md")
    ap.add_argument("--job", default=None, help=argparse.SUPPRESS)
    a = ap.parse_args()
    if a.job:
        print(json.dumps(worker(**json.loads(a.job))))
        return
    python, rows, loads = a.peer_python or sys.executable, [], []
    for n in a.sizes:
        for r in range(a.rounds):
            loads.append(os.getloadavg()[0])
            for label in CASES | OURS_ONLY:
                rows += run(python, "ours", n, [label], a)
                slow = label == "offline_easy2hard" and n > a.slow_once and r > 0
                if a.peer_python and label in CASES and not slow:
                    rows += run(python, "peer", n, [label], a)
    text = [
        "# Selecting tasks: time and memory of one selection and one update",
        "",
        f"{datetime.date.today()}, {cpu()}, {a.threads} threads; {versions(python)}.",
        f"Load when the rounds began: {', '.join(f'{x:.1f}' for x in loads)} (other work shared the machine where this is above {a.threads}).",
        "",
        "```",
        f"python tests/bench/task_selectors.py --peer_python PEER/bin/python --sizes {' '.join(map(str, a.sizes))} --rounds {a.rounds} --calls {a.calls} --batch {a.batch}",
        "```",
        "",
        f"A fresh process for each selector and side, in turn; {a.rounds} rounds of {a.calls} steps (the first step apart); medians over rounds, ratios are medians of the pairs (peer / ours). A step is",
        "`get_indices` and `feedback` of one batch; `shuffle` includes its share of making the order of an epoch. Memory is the peak above the features while",
        "building and stepping. Of the draws of `difficulty_based` numpy's beta variates alone take some 40 ns a task.",
    ]
    for n in a.sizes:
        text += ["", f"## {n:,} tasks, batch {a.batch}", "", *table(rows, n)]
    a.out.parent.mkdir(parents=True, exist_ok=True)
    a.out.write_text("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
