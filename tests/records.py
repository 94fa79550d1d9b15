"Calls recorded from other libraries: the files in `conformance`."

import json
from pathlib import Path

import numpy as np
import pytest


def cases(name, but=()):
    "The parameters of a test, by their names."
    path = Path(__file__).parent / "conformance" / f"{name}.json"
    found = json.loads(path.read_text())["cases"]
    return [pytest.param(c, id=c["name"]) for c in found if c["name"] not in but]


def wanted(case):
    "What was recorded, or the right result where that is not."
    return case["expected_right"] if "expected_right" in case else case["expected"]


def agree(got, want, tolerance):
    "Numbers are those that were recorded; null is none."
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    keep = ~np.isnan(want)
    bound = tolerance["atol"] + tolerance["rtol"] * np.abs(want[keep])
    assert (np.abs(got[keep] - want[keep]) <= bound).all(), (got, want)
