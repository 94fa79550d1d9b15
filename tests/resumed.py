"Is a run that was stopped and resumed the same as one that never was, bit for bit?"

import functools
import json
import re
from pathlib import Path

import numpy as np
import torch

from grpo_nb.files import leaves, pack, read_jsonl, unpack
from grpo_nb.processes import of_first
from grpo_nb.tasks import Task
from grpo_nb.trainer import GRPO


def is_timing(name):
    "True for metrics that measure time and so differ between two runs of the same computation."
    return bool(re.search(r"(_seconds|_per_second|_time|_ms)$|^(time|timing_s|perf)/", name))


def state_differences(a, b, where=""):
    "Places where two states differ, bit for bit; times are passed over."

    def timed(key):
        return any(is_timing(k) or k in ("seconds", "seconds_trained") for k in key.split("."))

    a, b = ({k: v for k, v in leaves(x) if not timed(k)} for x in (a, b))
    return [f"{where}.{k}" for k in a | b if k not in a or k not in b or _bits(a[k]) != _bits(b[k])]


def _bits(value):
    if not isinstance(value, (torch.Tensor, np.ndarray)):
        return type(value), repr(value)
    x = torch.as_tensor(value).detach().cpu().clone(memory_format=torch.contiguous_format)
    return type(value), x.dtype, x.shape, x.flatten().view(torch.uint8).numpy().tobytes()


def through_a_checkpoint(state):
    "What is read of a state that was written: tensors and arrays keep their bytes, all else goes through JSON."
    tensors = {}
    text = json.dumps(pack(state, "_", tensors))
    return unpack(json.loads(text), tensors, Task)


def row_differences(*folders):
    "What differs between the metrics and samples of two run directories."
    found = []
    for name in ("metrics", "samples"):
        rows = [read_jsonl(folder / f"{name}.jsonl")[0] for folder in folders]
        found += state_differences(*rows, name)
    return found


def differences(one, other):
    "What differs between two trainers: state, metrics and samples."
    found = state_differences(one.state_dict(), other.state_dict())
    if one.run is not None and other.run is not None:
        found += row_differences(one.run.dir, other.run.dir)
    return found


def check_resume(make, steps, folder, cuts=None, **parts):
    "Train once without a stop and once with a stop after each cut; the last run directory that was cut."
    folder = Path(folder)
    whole = make(str(folder / "whole")).fit(steps)
    for cut in range(1, steps) if cuts is None else cuts:
        first = make(str(folder / f"cut{cut}")).fit(cut)
        first.close()
        where = of_first(functools.partial(getattr, first.run, "dir", None))
        second = GRPO.load(where, **{k: f() for k, f in parts.items()}).fit(steps - cut)
        odd = differences(whole, second)
        second.close()
        assert not odd, f"Stopped after step {cut}, these differ: {', '.join(odd[:8])}"
    whole.close()
    return where


def every(registry):
    "One name of each entry."
    return sorted({registry[k]: k for k in registry}.values())
