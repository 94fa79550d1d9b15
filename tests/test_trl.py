"""Our components inside TRL, against calls recorded from the real one; `make trl` runs the whole of it"""

import json
from pathlib import Path

import pytest
import torch

from grpo_nb.advantages import AdvantageConfig, compute_advantages
from grpo_nb.integrations import trl as inside

RUNS = json.loads((Path(__file__).parent / "recorded" / "trl_runs.json").read_text())


def test_advantages_of_a_recorded_call_are_trl_s():
    call = RUNS["call"]
    rewards = torch.tensor(call["rewards"])
    assert rewards.isnan().any()  # a reward was None
    config = AdvantageConfig(mode="grpo", weights=[1.0, 1.0])
    got = compute_advantages(rewards, torch.arange(len(rewards)) // 8, ["right", "short"], config)
    torch.testing.assert_close(got.values, torch.tensor(call["advantages"]), atol=1e-6, rtol=0)


def test_the_recorded_curve_is_trl_s_own():
    theirs, ours = RUNS["runs"]["TRL"], RUNS["runs"]["grpo"]
    assert (
        theirs["loss"] == pytest.approx(ours["loss"], abs=1e-6) and theirs["right"] == ours["right"]
    )
    assert RUNS["groups_that_vary"] == 1 and len(ours["loss"]) == 12


def test_without_trl_or_with_another_one_a_line_says_what_to_install():
    if inside._TRLTrainer is object:
        with pytest.raises(ValueError, match="pip install trl==1.16.0"):
            inside.GRPOTrainer()
    with pytest.raises(ValueError, match="use trl==1.16.0, with which this was tried"):
        inside._check_hooks(type("Other", (), {}))
