"Diffusion policies and motion tasks: samplers, scoring, padding, windows, storage, and runs through the trainer."

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from grpo_nb.all import GRPO, DiffusionPolicy, GRPOConfig, Task, build_config, seeded
from grpo_nb.applications.motion import _new_model, motion_config, reach, reach_policy, reach_tasks
from grpo_nb.lab.session import sample_table
from grpo_nb.metrics import _completion_metrics
from grpo_nb.policies.samplers import ddim_sampler, ddpm_sampler, flow_sampler
from grpo_nb.update import check_on_policy

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "studies"))
from motion_beat import _beat_share, load_basic_motions  # noqa: E402

SAMPLERS = {
    "ddpm": ddpm_sampler(6),
    "ddpm_eps": ddpm_sampler(6, prediction="eps"),
    "ddpm_v": ddpm_sampler(6, prediction="v"),
    "ddim": ddim_sampler(6, 100, eta=0.7),
    "flow": flow_sampler(6),
    "flow_x0": flow_sampler(6, prediction="x0"),
    "flow_shifted": flow_sampler(6, shift=3.0),
}


class Net(nn.Module):
    def __init__(self, frames=4, dtype=torch.float32):
        super().__init__()
        self.inner = nn.Linear(frames * 2 + 4, 16, dtype=dtype)
        self.outer = nn.Linear(16, frames * 2, dtype=dtype)

    def forward(self, x, time, condition, frames=None):
        x_in = x if frames is None else x * frames[:, :, None]
        h = torch.cat([x_in.flatten(1), time[:, None] / 10, condition], 1).to(x.dtype)
        return self.outer(torch.tanh(self.inner(h))).view_as(x)


def make(sampler="ddpm", dtype=torch.float32, **kw):
    return DiffusionPolicy(_new_model(Net, 0, dtype=dtype), SAMPLERS[sampler], (4, 2), "goal", **kw)


TASKS = [Task(f"task {i}", {"goal": [0.5 * i, 1.0, -1.0], "frames": 4 - i}) for i in range(3)]


@pytest.mark.parametrize("name", SAMPLERS)
def test_recomputed_log_probs_equal_the_sampled_ones(name):
    p = make(name)
    r = p.sample(TASKS, 4, seeded(0, "x"))
    assert check_on_policy(p, r) < 1e-4
    assert p.logp_and_kl(r)[1].mean() < 1e-8
    assert not any(v.requires_grad for v in r.columns().values() if isinstance(v, torch.Tensor))
    assert all(v.dtype == torch.float32 for k, v in r.states.items() if k in ("latents", "mean"))


@pytest.mark.parametrize("name", ["ddpm", "ddim", "flow"])
@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_gradient_agrees_with_finite_differences(name, reduce):
    p = make(name, dtype=torch.float64, reduce=reduce)
    r = p.sample(TASKS[:2], 2, seeded(0, "x"))
    w = torch.randn(r.mask_NS.shape, generator=seeded(0, "w"), dtype=torch.float64)
    value = lambda: (p.logp(r) * w).sum()
    params = p.parameters()
    for q, g in zip(params, torch.autograd.grad(value(), params)):
        for i in (0, q.numel() - 1):
            flat, ends = q.data.view(-1), []
            for move in (1e-5, -2e-5):
                flat[i] += move
                ends.append(value().item())
            flat[i] += 1e-5
            want = (ends[0] - ends[1]) / 2e-5
            assert g.view(-1)[i].item() == pytest.approx(want, rel=1e-5, abs=1e-6)


@given(st.integers(1, 60), st.floats(0.01, 5.0))
@example(10, 0.3)  # where 1 + (0.3 - 1) is not 0.3
@settings(max_examples=30)
def test_flow_samplers_run_from_one_to_zero(steps, shift):
    s = flow_sampler(steps, shift=shift)
    assert s.level_T[0] == 1 and s.next_T[-1] == 0 and s.level_T[1:] == s.next_T[:-1]
    assert s.std_T.max() < 100 and (s.std_T[:-1] > 0).all() and s.std_T[-1] == 0


def test_padding_cannot_leak_and_lengths_weigh_fairly():
    p = make(lengths="frames")
    r = p.sample(TASKS, 2, seeded(0, "x"))
    assert [len(o) for o in r.outputs] == [4, 4, 3, 3, 2, 2]
    p.model.outer.bias.data += 0.05
    kl = p.logp_and_kl(r)[1].sum(1)
    assert torch.allclose(kl / torch.tensor([4, 4, 3, 3, 2, 2]), (kl[0] / 4).expand(6), rtol=1e-3)
    q = make(lengths="frames", reduce="mean")
    s = q.sample(TASKS, 2, seeded(0, "x"))
    want = r.old_logp_NS / (2 * r.states["frames"].sum(1, keepdim=True))
    assert torch.allclose(s.old_logp_NS, want, atol=1e-6)


# --- motion tasks


def test_the_trainer_needs_nothing_special(tmp_path):
    config = build_config(GRPOConfig, motion_config(0, 8, 3e-4, 8, 8, num_epochs=2))
    config.run.dir, config.eval.greedy = str(tmp_path / "run"), True
    policy, tasks = reach_policy(0, steps=300), reach_tasks(512, seeded(0, "train"))
    trainer = GRPO(policy, tasks, {"reach": reach}, config, reach_tasks(64, seeded(0, "held out")))
    before = trainer.evaluate(samples=4).values["sampled"][0]
    trainer.fit()
    after = trainer.evaluate(samples=4).values
    assert after["sampled"][0] > before + 0.03 and after["greedy"][0] > before
    rollout, values, _ = trainer.last
    assert _completion_metrics(rollout)["completions/mean_length"] == 9
    table = sample_table(rollout, values)
    assert table["prompt"][0].startswith("reach (") and len(table["completion"]) == len(rollout)
    rows = trainer.history
    assert all(r["upd/first_logp_diff"] < 1e-4 and r["updates_per_rollout"] == 2 for r in rows)
    trainer.close()
    said, facts = trainer.run.config["policy"]["model"], policy.settings()
    assert all(f"{k} {v}" in said for k, v in facts.items()) and facts["scheme"] == "ddpm"
    assert make("flow").settings() != make("flow_shifted").settings()
    parts = {"policy": policy, "tasks": tasks, "rewards": reach, "eval_tasks": trainer.eval_tasks}
    assert GRPO.load(trainer.run.dir, **parts).step_done == 8


def test_missing_recordings_say_how_to_get_them(monkeypatch):
    real = importlib.util.find_spec
    hide = lambda name, *a: None if name == "aeon" else real(name, *a)
    monkeypatch.setattr(importlib.util, "find_spec", hide)
    with pytest.raises(ValueError, match="pip install --no-deps aeon==1.6.0"):
        load_basic_motions()


def test_the_recordings_of_the_wheel():
    try:
        parts = load_basic_motions()
    except ValueError as e:
        pytest.skip(str(e))
    train, test = parts["train"], parts["test"]
    assert train.values.shape == test.values.shape == (30, 100, 6) and train.names[1] == "Running"
    assert torch.allclose(train.values.flatten(0, 1).std(0), torch.ones(6), atol=1e-4)
    clips, _, mask = train.draw(400, seeded(0, "c"))
    assert 0.1 < _beat_share(clips, mask).mean() < 0.3
