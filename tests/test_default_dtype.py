"The whole library in a program that has set torch's default dtype to float64."

import math

import pytest
import torch
from test_diffusion import SAMPLERS, make
from test_diffusion import TASKS as MOTIONS

from grpo_nb.advantages import ADVANTAGES, AdvantageConfig, compute_advantages
from grpo_nb.core import seeded
from grpo_nb.filter_groups import RULES
from grpo_nb.losses import KL_KINDS, POLICY_LOSSES
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.selectors import SELECTORS
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO
from grpo_nb.update import UpdateConfig, update

TASKS = Taskset.load(data_path("tasks/middle_train.jsonl"))

KEYS = {"difficulty_based": ["negative", "negative"], "offline_easy2hard": ["digits"]}


def every(registry):
    "One name of each entry."
    return sorted({registry[k]: k for k in registry}.values())


@pytest.fixture(autouse=True)
def wide():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def fit(**config):
    config = {"steps": 2, "train_batch_size": 4, "num_generations": 4} | config
    policy = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=6)
    rewards = {"long": lambda completion: len(completion) % 3 / 2, "b": lambda completion: 1.0}
    trainer = GRPO(policy, TASKS, rewards, config, TASKS[:4]).fit()
    assert all(math.isfinite(row["loss"]) for row in trainer.history)
    return trainer


@pytest.mark.parametrize("name", every(POLICY_LOSSES))
def test_losses(name):
    loss = {"policy_loss": name, "options": {"beta": 1.0} if name == "dro" else {}}
    fit(update={"num_epochs": 2, "loss": loss})


@pytest.mark.parametrize("kind", every(KL_KINDS))
def test_kl_terms_entropy_and_micro_batches(kind):
    loss = {"kl_coef": 0.1, "kl_kind": kind, "entropy_coef": 0.01}
    update = {"loss": loss, "micro_tokens": 20, "kl_on_dead_groups": False}
    fit(update=update).evaluate(k=(1, 2))


@pytest.mark.parametrize("mode", every(ADVANTAGES))
def test_estimators(mode):
    reward_NR, group_N = torch.rand(12, 2), torch.arange(4).repeat_interleave(3)
    for dtype in (torch.float32, torch.float64):
        config = AdvantageConfig(mode=mode)
        found = compute_advantages(
            reward_NR.to(dtype), group_N, ("a", "b"), config, lengths_N=torch.ones(12)
        )
        assert found.values.isfinite().all()


@pytest.mark.parametrize("rule", every(RULES))
def test_filter_rules(rule):
    metric = {"metric": "long"} if rule == "metric" else {}
    fit(filter_groups={"enable": True, "rule": rule, "log_format": None} | metric)


@pytest.mark.parametrize("name", every(SELECTORS))
def test_selectors(name):
    fit(tasks={"selector": {"selector_type": name, "feature_keys": KEYS.get(name, [])}})


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_diffusion(sampler):
    policy, reference = make(sampler), make(sampler)
    r = policy.sample(MOTIONS, 3, seeded(0, "sampling"))
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    config = UpdateConfig(num_epochs=2, loss={"kl_coef": 0.1})
    done = update(policy, r, torch.randn(len(r)), optimizer, config, reference)
    assert done.done == 2 and policy.sample(MOTIONS, 1, seeded(0, "greedy"), greedy=True).outputs
