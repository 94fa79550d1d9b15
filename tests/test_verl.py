"""Our components inside verl, against calls recorded from the real one; `make verl` runs the whole of it"""

import json
import os
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch

from grpo_nb.integrations import verl as inside

CALLS = json.loads((Path(__file__).parent / "recorded" / "verl_calls.json").read_text())


class Actor:  # verl's settings of the recorded calls
    clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, 0.1, 0.28, 3.0
    global_batch_info: dict = {}

    class policy_loss:
        dro_beta = 0.5


@pytest.mark.parametrize("mode", CALLS["advantages"])
def test_advantages_of_recorded_batches(mode):
    columns = {k: np.array(v, object) for k, v in CALLS["columns"].items()}
    data = types.SimpleNamespace(non_tensor_batch=columns)  # found where verl's function has it
    assert data.non_tensor_batch
    rewards, mask = map(torch.tensor, CALLS["advantage_inputs"])
    how = {"gdpo_reward_keys": ["acc", "fmt"], "gdpo_reward_weights": [1.0, 0.5]}
    got, _ = inside.make_estimator(mode)(rewards, mask, columns["uid"], how)
    want = torch.tensor(CALLS["advantages"][mode])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert np.isnan(columns["fmt"].astype(float)).any()


@pytest.mark.parametrize("name", CALLS["losses"])
def test_losses_of_recorded_calls_are_verl_s_own(name, monkeypatch):
    core = types.ModuleType("verl.trainer.ppo.core_algos")
    core.agg_loss = lambda loss, mask, mode, **_: (loss * mask).sum() / mask.sum()  # token-mean
    for part in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, core.__name__, core)
    old, logp, advantages, mask = map(torch.tensor, CALLS["loss_inputs"])
    got, metrics = inside.make_loss(name)(old, logp, advantages, mask, "token-mean", Actor)
    assert got.item() == pytest.approx(CALLS["losses"][name], abs=1e-6)
    assert set(metrics) == {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}


def test_without_verl_nothing_is_imported_and_nothing_breaks():
    code = "import sys, grpo_nb.integrations.verl as v; print(v.register(), 'ray' in sys.modules)"
    env = os.environ | {"VERL_USE_EXTERNAL_MODULES": "grpo_nb.integrations.verl"}
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
    assert said.stdout.strip() == "[] False", said.stderr
