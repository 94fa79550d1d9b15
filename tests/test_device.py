"""A stand-in for a GPU: computed on the CPU, but its tensors never meet the CPU's, and it has no float64 (as Apple's)."""

import copy

import pytest
import torch
from test_processes import Table
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from grpo_nb.applications.motion import _reach_paths, pretrain, reach, reach_policy, reach_tasks
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.trainer import GRPO

DEVICE = torch.device("mps", 0)
ATEN = torch.ops.aten
BETWEEN = (ATEN._to_copy.default, ATEN.copy_.default)  # from one device to the other
INDEXED = (ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default)  # also by the CPU's
there = lambda d: str(d).startswith(("mps", "meta"))


class There(torch.Tensor):
    "To torch's own code a tensor without data, to ours one on DEVICE."

    @staticmethod
    def __new__(cls, x):
        if x.dtype == torch.float64:
            raise TypeError("The device has no float64")
        facts = {k: getattr(x, k) for k in ("dtype", "layout", "requires_grad")}
        facts |= {"strides": x.stride(), "storage_offset": x.storage_offset(), "device": "meta"}
        return torch.Tensor._make_wrapper_subclass(cls, x.size(), **facts)

    def __init__(self, x):
        self.x = x.detach()

    device = property(lambda self: DEVICE)
    __tensor_flatten__ = lambda self: (["x"], None)  # so that `to` keeps tied weights tied
    __tensor_unflatten__ = staticmethod(lambda inner, *_: There(inner["x"]))
    tolist = lambda self: self.detach().x.tolist()
    data_ptr = lambda self: self.detach().x.data_ptr()
    new_tensor = lambda self, data: torch.tensor(data, dtype=self.dtype, device=DEVICE)
    __torch_dispatch__ = classmethod(lambda cls, f, _, args=(), keys=None: run(f, args, keys or {}))

    def __deepcopy__(self, memo):
        return torch.nn.Parameter(There(self.detach().x.clone()), self.requires_grad)

    def __getitem__(self, at):
        cells = (
            [torch.tensor(v) if isinstance(v, list) else v for v in at]
            if type(at) is tuple
            else [at]
        )
        return super().__getitem__(tuple(cells))

    def numpy(self):
        raise TypeError("can't convert device tensor to numpy")


def run(f, args, keys):
    "One operation, on the CPU."
    tensors = [x for x in tree_leaves((args, keys)) if isinstance(x, torch.Tensor)]
    ours = [x for x in tensors if isinstance(x, There)]
    by_index = f in INDEXED and isinstance(args[0], There)
    mixed = any(x.dim() for x in tensors if not isinstance(x, There)) and not by_index
    if ours and mixed and f not in BETWEEN:
        raise RuntimeError(f"Expected all tensors to be on the same device ({f})")
    plain = lambda v: v.x if isinstance(v, There) else "cpu" if there(v) else v
    out = f(*tree_map(plain, args), **tree_map(plain, keys))
    to = keys.get("device")
    if not (ours if to is None else there(to)):
        return out
    names = [a.name for a in f._schema.arguments if a.alias_info and a.alias_info.is_write]
    given = dict(zip((a.name for a in f._schema.arguments), args)) | keys
    if names and f._schema.returns:  # in place
        return given[names[0]] if len(names) == 1 else [given[k] for k in names]
    return tree_map(lambda v: There(v) if type(v) is torch.Tensor else v, out)


class Emulated(TorchDispatchMode):
    def __torch_dispatch__(self, f, _, args=(), keys=None):
        keys = keys or {}
        ours = any(isinstance(x, There) for x in tree_leaves((args, keys)))
        return run(f, args, keys) if ours or there(keys.get("device")) else f(*args, **keys)


@pytest.fixture
def device():
    torch._C._set_only_lift_cpu_tensors(True)
    with Emulated():
        yield DEVICE
    torch._C._set_only_lift_cpu_tensors(False)


class Own(Table):
    "A policy of one's own whose rollouts lie where its weights do."

    copy = copy.deepcopy

    def __init__(self, device):
        super().__init__(items=True)
        self.logits = self.logits.detach().float().to(device).requires_grad_()

    def sample(self, *args, **keys):
        here = Table(items=True)
        here.logits = self.logits.detach().cpu().double()
        r = here.sample(*args, **keys)
        info = {"truncated": r.states["action"][:, 0] == 0}
        old_logp_NS = r.old_logp_NS.float()
        return r.replace(old_logp_NS=old_logp_NS, info=info).to(self.logits.device)


def ones(completions, **columns):
    return [[float(c.count(1)), float(c.count(3))] for c in completions]


def short(completions, **columns):
    return [float(len(set(c)) % 3) for c in completions]


TASKS = [{"prompt": f"{i}+{i}=", "index": i % 6} for i in range(8)]
SIZE = {"steps": 2, "train_batch_size": 4, "num_generations": 4}


def trained(policy, rewards, tasks=TASKS, **config):
    "Loss, gradient norm, rewards of the last row; the trainer."
    t = GRPO(
        policy, tasks, rewards, SIZE | {k.replace("__", "."): v for k, v in config.items()}
    ).fit()
    return [t.history[-1][k] for k in ("loss", "grad_norm", "reward")], t


KL = {"update__loss__kl_coef": 0.1, "update__num_epochs": 2, "update__minibatch_size": 8}
FILTER = {"filter_groups__enable": True, "filter_groups__max_num_gen_batches": 4}
CUT = {"update__mask_truncated": True, "update__micro_tokens": 9, "rewards__kl_in_reward": 0.1}
STOP = {"update__scheme": "progressive", "update__num_epochs": 3, "update__kl_stop__target": 1e-3}


@pytest.mark.parametrize("config", [KL, FILTER, CUT, STOP])
def test_rollouts_of_a_policy_of_ones_own_may_lie_on_its_device(device, config):
    want, _ = trained(Own("cpu"), short, **config)
    assert trained(Own(device), short, **config)[0] == pytest.approx(want, abs=1e-6)


def test_rewards_per_rank_reach_their_tokens_on_a_device(device):
    how = {
        "advantage__mode": "gdpo",
        "update__loss__level": "item",
        "update__loss__aggregation": "item",
    }
    both = [trained(Own(d), {"a": ones, "b": short}, **how)[0] for d in ("cpu", device)]
    assert both[1] == pytest.approx(both[0], abs=1e-6)


def test_a_language_model_trains_on_a_device_and_goes_on(device):
    make = lambda d: TokenPolicy.from_pretrained("data/tiny-llama", device=d, max_new_tokens=4)
    how = {"update__loss__entropy_coef": 0.01, "steps": 1} | FILTER
    want, _ = trained(make("cpu"), short, **how)
    got, trainer = trained(make(device), short, **how)
    assert got == pytest.approx(want, rel=1e-5, abs=1e-6)
    r = trainer.collect(TASKS[:2])
    assert torch.equal(trainer.policy.logp(r.to(device)).cpu(), trainer.policy.logp(r).cpu())
    other = GRPO(make(device), TASKS, short, trainer.config)
    other.load_state_dict(copy.deepcopy(trainer.state_dict()))
    assert [t.fit(1).history[-1]["loss"] for t in (trainer, other)][0] == other.history[-1]["loss"]


def test_a_diffusion_policy_learns_and_imitates_on_a_device(device):
    policy, tasks = reach_policy(0, steps=5), reach_tasks(8, torch.Generator().manual_seed(0))
    there = copy.copy(policy)
    there.model = copy.deepcopy(policy.model).to(device)
    want, _ = trained(policy, reach, tasks, **KL)
    assert trained(there, reach, tasks, **KL)[0] == pytest.approx(want, rel=1e-3, abs=1e-5)
    draws = [torch.Generator().manual_seed(0) for _ in range(2)]
    losses = [
        pretrain(p.model, p.sampler, _reach_paths, g, 2) for p, g in zip((policy, there), draws)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-3)
