"""Time of group advantages on large batches: grpo_nb against verl, alternating in one process.

    python tests/bench/group_ops.py --verl-python VERL_ENV/bin/python [--sizes 8000 64000 512000] [--result group_ops]

The script runs itself in verl's environment with this repository on the path, so both sides use the same torch, threads and
memory. Each pair starts from the same token rewards (or reward columns) and ends with the same (N, L) token advantages, which
are compared. Without --verl-python, verl's loop is played by the plain loop over groups below. Ratios are medians of per-pair
ratios; a loop is left out where it is projected to take more than --budget_s. `--result` stores table and numbers in results/.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import uuid
import warnings
from collections import defaultdict

from common import ROOT, environment, save, table

CLOCK = {"wall": time.perf_counter, "cpu": time.process_time}


def parse():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--verl-python", help="python of an environment with verl 0.9.1")
    ap.add_argument("--sizes", type=int, nargs="+", default=[8000, 64000, 512000])
    ap.add_argument("--group", type=int, default=8, help="samples per group")
    ap.add_argument("--length", type=int, default=8, help="tokens per sample")
    ap.add_argument("--repeats", type=int, default=7)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--budget_s", type=float, default=20.0)
    ap.add_argument("--clock", choices=CLOCK, default="wall", help="cpu: for a busy machine")
    ap.add_argument("--result", help="name of the files in results/")
    ap.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return ap.parse_args()


def timed(f, clock):
    start = CLOCK[clock]()
    out = f()
    return CLOCK[clock]() - start, out


def pairs(ours, theirs, repeats, clock, long_s=5.0):
    "Times of both, alternating; fewer pairs where one takes long, more where both are short."
    a, b = [], []
    while (len(a) < repeats and sum(b) < long_s) or (len(a) < 5 * repeats and sum(b) < 0.2):
        t, x = timed(theirs, clock)
        b.append(t)
        t, y = timed(ours, clock)
        a.append(t)
    return a, b, x, y


def batch(n, group, length, seed=0):
    "Three reward columns, their sum on the last token, and ids as uuids and as integers."
    import numpy as np
    import torch

    p = n // group
    rng = np.random.default_rng([seed, n])
    rates = rng.random((p, 1, 3)).repeat(group, 1).reshape(p * group, 3)
    columns = (rng.random((p * group, 3)) < rates).astype(np.float32)
    tokens = torch.zeros(p * group, length)
    tokens[:, -1] = torch.from_numpy(columns.sum(1))
    names = np.array([str(uuid.UUID(bytes=rng.bytes(16))) for _ in range(p)], dtype=object)
    return columns, tokens, {"uuid": names.repeat(group), "int": np.arange(p).repeat(group)}


def plain_loop(tokens, mask, ids):
    "GRPO one group at a time, as verl's loop does it."
    import torch

    scores, by_id = tokens.sum(-1), defaultdict(list)
    for i in range(len(ids)):
        by_id[ids[i]].append(scores[i])
    stats = {k: (torch.stack(v).mean(), torch.stack(v).std()) for k, v in by_id.items()}
    for i in range(len(ids)):
        mean, std = stats[ids[i]]
        scores[i] = (scores[i] - mean) / (std + 1e-6)
    return (scores[:, None] * mask,)


def peers():
    "(loop, vectorised or None) for GRPO, and the whitening of the batch stage."
    try:
        from verl.trainer.ppo import core_algos as verl

        loop = verl.compute_grpo_outcome_advantage
        return loop, verl.compute_grpo_vectorized_outcome_advantage, verl.verl_F.masked_whiten
    except ImportError:
        whiten = lambda x, mask: (x - x.mean()) * (x.var() + 1e-8).rsqrt()  # noqa: E731
        return plain_loop, None, whiten


def cases(a, size):
    "name, kind of ids, ours, theirs; GDPO of a peer is its GRPO per reward, added and whitened."
    import torch

    from grpo_nb.advantages import gdpo_verl, grpo, spread_to_tokens

    loop, fast, whiten = peers()
    columns, tokens, all_ids = batch(size, a.group, a.length)
    mask, lengths = torch.ones_like(tokens), torch.full((len(tokens),), a.length)
    for kind, ids in all_ids.items():

        def our_grpo(ids=ids):
            return spread_to_tokens(grpo(tokens.sum(-1), ids, eps=1e-6), mask)

        def our_gdpo(ids=ids):
            values = gdpo_verl(torch.from_numpy(columns), ids, lengths_N=lengths)
            return spread_to_tokens(values, mask)

        for what, f in (("vectorised", fast), ("loop", loop)):
            if f is None:
                continue

            def their_gdpo(f=f, ids=ids):
                total = 0
                for k in range(columns.shape[1]):
                    one = torch.zeros_like(mask)
                    one[:, -1] = torch.from_numpy(columns[:, k])
                    total = total + f(one, mask, ids)[0]
                return whiten(total, mask) * mask

            yield f"GRPO, {what}", kind, our_grpo, lambda f=f, ids=ids: f(tokens, mask, ids)[0]
            yield f"GDPO R=3, {what}", kind, our_gdpo, their_gdpo


def measure(a):
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(a.threads)
    rows, seen, load = [], {}, os.getloadavg()[0]
    for size in a.sizes:
        for name, kind, ours, theirs in cases(a, size):
            before = seen.get((name, kind))
            if before and before[1] * size / before[0] > a.budget_s:
                continue
            ours()
            mine, peer, x, y = pairs(ours, theirs, a.repeats, a.clock)
            assert torch.allclose(x, y, atol=2e-4, rtol=2e-4), (name, kind, size)
            seen[name, kind] = (size, statistics.median(peer))
            rows.append(dict(op=name, ids=kind, n=size, ours=mine, peer=peer))
            print(row(**rows[-1]), file=sys.stderr, flush=True)
    return dict(env=environment("verl") | {"load": round(load, 2)}, rows=rows)


def row(op, ids, n, ours, peer):
    "Medians of the pairs, in milliseconds."
    mid, ratio = statistics.median, statistics.median(p / o for o, p in zip(ours, peer))
    return {
        "operation of the peer": op,
        "ids": ids,
        "N": n,
        "grpo_nb": f"{1e3 * mid(ours):.3g}",
        "peer": f"{1e3 * mid(peer):.3g}",
        "peer / grpo_nb": f"{ratio:.1f}x",
    }


def main():
    a = parse()
    if a.verl_python and not a.child:
        env = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
        env.pop("OMP_NUM_THREADS", None)
        command = [a.verl_python, __file__, *sys.argv[1:], "--child"]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
        result = json.loads(done.stdout.strip().splitlines()[-1])
    else:
        sys.path.insert(0, str(ROOT))
        result = measure(a)
        if a.child:
            print(json.dumps(result))
            return
    rows = [row(**r) for r in result["rows"]]
    if not a.result:
        return print(table(rows))
    notes = (
        f"Milliseconds ({a.clock} clock, {a.threads} threads), medians; ratios are medians of per-pair ratios (alternating runs). Both "
        "sides start from the same token rewards or reward columns and end with the same (N, L) token advantages."
    )
    title = "Group advantages on large batches"
    save(a.result, title, rows, result["env"], notes, result["rows"])


if __name__ == "__main__":
    main()
