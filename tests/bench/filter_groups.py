"""Time of the filter decision on large batches: `keep_groups` against the loop that trainers use.

    python tests/bench/filter_groups.py [--samples 8000 64000 1000000] [--G 8] [--pairs 5] [--result filter_groups]

The loop collects the values of each id in a dictionary, takes `numpy.std` of each list, and keeps the ids whose deviation
is above 0 or which hold one value. CPU seconds of both are taken in turn (loop, ours, loop, ours, ...) in one process
with one thread; the ratio is the median over the pairs. Both decisions are compared. `--result` stores table and numbers
in results/ beside this file.
"""

import argparse
import os
import statistics
import time
import uuid
from collections import defaultdict

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch

from common import environment, save, table
from grpo_nb.filter_groups import keep_groups


def keep_by_loop(ids, metric):
    "Rows of the groups whose metric has a deviation above 0, one sample and one group at a time."
    values = defaultdict(list)
    for name, value in zip(ids, metric):
        values[name].append(value)
    alive = {name for name, v in values.items() if len(v) == 1 or np.std(v) > 0}
    return [row for row, name in enumerate(ids) if name in alive]


def keep_by_index(ids, metric):
    "The same rows from the exported function."
    return keep_groups(metric, ids).keep_N.nonzero()[:, 0]


def seconds(f, *args):
    "CPU seconds of one call: both run on one thread, and other processes do not count."
    start = time.process_time()
    out = f(*args)
    return time.process_time() - start, out


def measure(n, G, kind, pairs, seed):
    rng = np.random.default_rng([seed, n])
    groups = n // G
    rate = np.repeat(rng.random(groups), G)
    metric = (rng.random(groups * G) < rate).astype(np.float32)
    ids = np.repeat(np.arange(groups), G)
    if kind == "int64, shuffled":
        order = rng.permutation(len(ids))
        ids, metric = ids[order], metric[order]
    if kind == "uuid strings":
        names = [str(uuid.UUID(bytes=rng.bytes(16), version=4)) for _ in range(groups)]
        ids = np.array(names, dtype=object)[ids]
    ours_ids, ours_metric = ids, torch.from_numpy(metric)
    if kind != "uuid strings":
        ours_ids = torch.from_numpy(ids)
    keep_by_index(ours_ids, ours_metric)
    loop, ours = [], []
    for _ in range(pairs):
        t, want = seconds(keep_by_loop, ids, metric)
        loop.append(t)
        t, got = seconds(keep_by_index, ours_ids, ours_metric)
        ours.append(t)
        if got.tolist() != want:
            raise SystemExit(f"The decisions differ for {n} samples with {kind} ids.")
    return {"samples": n, "ids": kind, "loop": loop, "ours": ours}


def row(samples, ids, loop, ours):
    "Medians of the pairs."
    mid, ratio = statistics.median, statistics.median(a / b for a, b in zip(loop, ours))
    return {
        "samples": f"{samples:,}",
        "ids": ids,
        "loop, CPU s": f"{mid(loop):.4f}",
        "keep_groups, CPU s": f"{mid(ours):.5f}",
        "loop / keep_groups": f"{ratio:.0f}",
    }


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--samples", type=int, nargs="+", default=[8_000, 64_000, 1_000_000])
    ap.add_argument("--G", type=int, default=8)
    ap.add_argument("--pairs", type=int, default=5)
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument("--result", help="name of the files in results/")
    a = ap.parse_args()
    torch.set_num_threads(1)
    kinds = ("int64", "int64, shuffled", "uuid strings")
    raw = [measure(n, a.G, kind, a.pairs, a.seed) for n in a.samples for kind in kinds]
    rows = [row(**r) for r in raw]
    if not a.result:
        return print(table(rows))
    notes = f"Medians over {a.pairs} alternating pairs in one process, one thread; the ratio is the median of the pairs' ratios. Both keep the same rows."
    title = "The filter decision against a loop over samples and groups"
    save(a.result, title, rows, environment(), notes, raw)


if __name__ == "__main__":
    main()
