"""Time of group advantages on large batches: grpo_nb against verl, alternating in one process.

    python tests/bench/group_ops.py --verl-python VERL_ENV/bin/python [--sizes 8000 64000 512000] [--out FILE]

The script runs itself in verl's environment with this repository on the path: `grpo_nb.core` and `grpo_nb.advantages` need
only torch and numpy, so both sides use the same torch, threads and memory. Each pair starts from the same token rewards (or
reward columns) and ends with the same (N, L) token advantages, which are compared. Ratios are medians of per-pair ratios;
verl's loops are left out where they are projected to take more than --budget_s. Without --verl-python only our side and the
time to copy the arrays are measured. The table goes to stdout and to --out.
"""

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import uuid
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def parse():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    ap.add_argument("--verl-python", help="python of an environment with verl 0.9.1")
    ap.add_argument("--sizes", type=int, nargs="+", default=[8000, 64000, 512000])
    ap.add_argument("--group", type=int, default=8, help="samples per group")
    ap.add_argument("--length", type=int, default=8, help="tokens per sample")
    ap.add_argument("--repeats", type=int, default=7)
    ap.add_argument("--threads", type=int, default=2)
    ap.add_argument("--budget_s", type=float, default=20.0)
    ap.add_argument("--copy_size", type=int, default=1_000_000)
    ap.add_argument(
        "--clock",
        choices=["wall", "cpu"],
        default="wall",
        help="cpu: processor seconds of all threads, for a machine that is busy otherwise",
    )
    ap.add_argument("--out", type=Path)
    ap.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return ap.parse_args()


CLOCK = {"wall": time.perf_counter, "cpu": time.process_time}


def timed(f, clock="wall"):
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
    import numpy as np
    import torch

    p = n // group
    rng = np.random.default_rng([seed, n])
    rates = rng.random((p, 1, 3)).repeat(group, 1).reshape(p * group, 3)
    columns = (rng.random((p * group, 3)) < rates).astype(np.float32)
    tokens = torch.zeros(p * group, length)
    tokens[:, -1] = torch.from_numpy(columns.sum(1))
    names = np.array([str(uuid.UUID(bytes=rng.bytes(16))) for _ in range(p)], dtype=object)
    ids = {"uuid": names.repeat(group), "int": np.arange(p).repeat(group)}
    return columns, tokens, torch.ones(p * group, length), ids


def against_verl(a, rows):
    import numpy as np
    import torch
    from verl.trainer.ppo import core_algos as verl

    from grpo_nb.advantages import gdpo, grpo, spread_to_tokens

    seen = {}
    for size in a.sizes:
        columns, tokens, mask, all_ids = batch(size, a.group, a.length)
        n = len(columns)
        lengths = mask.sum(1).long()
        extra = dict(
            prompts=torch.zeros(n, 1, dtype=torch.long),
            attention_mask=torch.ones(n, 1 + a.length, dtype=torch.long),
        )
        table = {f"r{k}": columns[:, k] for k in range(3)}
        for kind, ids in all_ids.items():

            def our_grpo(ids=ids, tokens=tokens, mask=mask):
                return spread_to_tokens(grpo(tokens.sum(-1), ids, eps=1e-6), mask)

            def our_gdpo(r, ids=ids, lengths=lengths, mask=mask, table=table):
                x = torch.from_numpy(np.stack([table[f"r{k}"] for k in range(r)], 1))
                kw = dict(eps=1e-6, level="token", single="whiten", lengths_N=lengths)
                return spread_to_tokens(gdpo(x, ids, **kw), mask)

            def verl_gdpo(r, ids=ids, tokens=tokens, mask=mask, table=table, extra=extra):
                config = dict(gdpo_reward_keys=[f"r{k}" for k in range(r)])
                f = verl.compute_gdpo_outcome_advantage
                kw = dict(config=config, non_tensor_batch=table, batch=extra)
                return f(tokens, mask, ids, **kw)[0]

            loop, fast = (
                verl.compute_grpo_outcome_advantage,
                verl.compute_grpo_vectorized_outcome_advantage,
            )

            def verl_gdpo_fast(columns=columns, ids=ids, mask=mask, fast=fast):
                "verl's GDPO with its vectorised function per reward instead of the loop."
                total = 0
                for k in range(columns.shape[1]):
                    one = torch.zeros_like(mask)
                    one[:, -1] = torch.from_numpy(columns[:, k])
                    total = total + fast(one, mask, ids)[0]
                return verl.verl_F.masked_whiten(total, mask) * mask

            cases = [
                ("GRPO, verl vectorised", our_grpo, lambda f=fast: f(tokens, mask, ids)[0]),  # noqa: B023
                (
                    "GDPO R=3, verl vectorised per reward",
                    lambda r=3: our_gdpo(r),  # noqa: B023
                    verl_gdpo_fast,
                ),
                ("GRPO, verl loop", our_grpo, lambda f=loop: f(tokens, mask, ids)[0]),  # noqa: B023
            ]
            cases += [
                (f"GDPO R={r}, verl loop", lambda r=r: our_gdpo(r), lambda r=r: verl_gdpo(r))  # noqa: B023
                for r in (1, 2, 3)
            ]
            for name, ours, theirs in cases:
                key = (name, kind)
                guess = seen[key][1] * n / seen[key][0] if key in seen else 0.0
                if guess > a.budget_s:
                    mine = statistics.median(timed(ours, a.clock)[0] for _ in range(a.repeats))
                    rows.append(dict(op=name, ids=kind, n=n, ours=mine, skipped=guess))
                    continue
                ours()
                mine, peer, x, y = pairs(ours, theirs, a.repeats, a.clock)
                assert torch.allclose(x, y, atol=2e-4, rtol=2e-4), (name, kind, n)
                seen[key] = (n, statistics.median(peer))
                ratio = statistics.median(p / m for p, m in zip(peer, mine))
                row = dict(op=name, ids=kind, n=n, ours=statistics.median(mine))
                rows.append(row | dict(peer=statistics.median(peer), ratio=ratio, pairs=len(mine)))
                print(rows[-1], file=sys.stderr, flush=True)


def against_copy(a, rows):
    import torch

    from grpo_nb.advantages import gdpo, grpo, mo_grpo
    from grpo_nb.core import Groups, blocks_of, group_stats

    n = a.copy_size
    x = torch.rand(n, 4, generator=torch.Generator().manual_seed(0))
    x[:, :2] = (x[:, :2] < 0.5).float()
    ids = torch.arange(n // a.group).repeat_interleave(a.group)
    out = torch.zeros(n)
    perm = torch.randperm(n, generator=torch.Generator().manual_seed(1))

    def copy():
        return x.clone(), ids.clone(), out.clone()

    ops = [("grpo", grpo), ("mo_grpo", mo_grpo), ("gdpo", gdpo), ("group_stats", group_stats)]
    cases = [(f"{name} R=4", lambda f=f: f(x, ids)) for name, f in ops]
    moved, moved_ids = x[perm], ids[perm]
    layout = lambda x, ids: [b.lanes(x) for b in blocks_of(Groups.of(ids), 4)]
    cases.append(("float64 blocks of R=4, no arithmetic", lambda: layout(x, ids)))
    cases += [
        (f"{f.__name__} R=4, shuffled rows", lambda f=f: f(moved, moved_ids)) for f in (grpo, gdpo)
    ]
    cases.append(("float64 blocks, shuffled rows", lambda: layout(moved, moved_ids)))
    for name, ours in cases:
        ours()
        mine, peer, *_ = pairs(ours, copy, 3 * a.repeats, a.clock)
        ratio = statistics.median(m / p for p, m in zip(peer, mine))
        row = dict(op=name, n=n, ours=statistics.median(mine), copy=statistics.median(peer))
        rows.append(row | dict(ratio=ratio))
        print(rows[-1], file=sys.stderr, flush=True)


def cpu_name():
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(s.split(":")[1].strip() for s in lines if s.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def measure(a):
    import numpy
    import torch

    warnings.filterwarnings("ignore")
    torch.set_num_threads(a.threads)
    verl_rows, copy_rows, load = [], [], os.getloadavg()[0]
    against_copy(a, copy_rows)
    version = None
    if a.child:
        from importlib.metadata import version as of

        version = of("verl")
        against_verl(a, verl_rows)
    env = dict(
        date=datetime.date.today().isoformat(),
        cpu=f"{cpu_name()}, {os.cpu_count()} cores, {a.threads} threads",
        load=f"{load:.1f} before, {os.getloadavg()[0]:.1f} after",
        torch=torch.__version__,
        numpy=numpy.__version__,
        verl=version,
        python=platform.python_version(),
    )
    return dict(env=env, verl=verl_rows, copy=copy_rows)


def markdown(result, a):
    env = result["env"]
    ms = lambda s: f"{1e3 * s:.3g}"
    out = ["# Group advantages on large batches", ""]
    out += [f"{k}: {v}  " for k, v in env.items() if v]
    sizes = " ".join(map(str, a.sizes))
    out += [
        f"command: `python tests/bench/group_ops.py --verl-python VERL_ENV/bin/python --sizes {sizes} --group {a.group} "
        f"--length {a.length} --repeats {a.repeats} --threads {a.threads} --clock {a.clock} --budget_s {a.budget_s:g}`  ",
        "",
        f"Milliseconds ({a.clock} clock), medians; ratios are medians of per-pair ratios (alternating runs). Both sides start from the same token "
        "rewards or reward columns and end with the same (N, L) token advantages.",
        "",
    ]
    if result["verl"]:
        out += [
            "| operation | ids | N | grpo_nb | verl | verl / grpo_nb |",
            "|---|---|---|---|---|---|",
        ]
        for r in result["verl"]:
            if "peer" in r:
                last = f"{ms(r['peer'])} | {r['ratio']:.1f}x"
            else:
                last = f"skipped, projected {r['skipped']:.0f} s | -"
            out.append(f"| {r['op']} | {r['ids']} | {r['n']} | {ms(r['ours'])} | {last} |")
        out.append("")
    n = a.copy_size
    out += [
        f"N = {n}, float32, groups of {a.group}; copying the arrays = `clone()` of rewards, ids and result into memory that the "
        "process holds already. The blocks without arithmetic are what finding the groups and laying siblings side by side in "
        "float64 costs before any formula: a plain copy moves 7 bytes per reward, this reads 4 with a stride and writes 8.",
        "",
        "| operation | grpo_nb | copy | grpo_nb / copy |",
        "|---|---|---|---|",
    ]
    out += [
        f"| {r['op']} | {ms(r['ours'])} | {ms(r['copy'])} | {r['ratio']:.1f} |"
        for r in result["copy"]
    ]
    return "\n".join(out) + "\n"


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
    text = markdown(result, a)
    print(text)
    if a.out:
        a.out.parent.mkdir(parents=True, exist_ok=True)
        a.out.write_text(text)


if __name__ == "__main__":
    main()
