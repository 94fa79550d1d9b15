"The whole library in a program that has set torch's default dtype to float64, or a default device."

import math

import pytest
import torch
from resumed import every
from test_diffusion import SAMPLERS, make
from test_diffusion import TASKS as MOTIONS

from grpo_nb.all import ADVANTAGES, GRPO, RULES, SELECTORS, Taskset, TokenPolicy, data_path, seeded
from grpo_nb.losses import KL_KINDS, POLICY_LOSSES
from grpo_nb.update import UpdateConfig, update

TASKS = Taskset.load(data_path("tasks/middle_dev.jsonl"))
KEYS = {"difficulty_based": ["negative", "negative"], "offline_easy2hard": ["digits"]}


POOLS = [every(x) for x in (POLICY_LOSSES, KL_KINDS, ADVANTAGES, RULES, SELECTORS)]
POOLS[1] += ["k1+", "k3+"]


@pytest.fixture(autouse=True)
def wide():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("i", range(max(map(len, POOLS))))
@pytest.mark.filterwarnings("ignore")
def test_every_choice_trains_beside_others(i):
    loss, kl, mode, rule, selector = (pool[i % len(pool)] for pool in POOLS)
    options = {"beta": 1.0} if loss == "dro" else {}
    config = {
        "steps": 2,
        "train_batch_size": 4,
        "num_generations": 4,
        "update.num_epochs": 2,
        "update.micro_tokens": 120,
        "update.loss": {"policy_loss": loss, "options": options, "kl_coef": 0.1, "kl_kind": kl},
        "advantage.mode": mode,
        "filter_groups.enable": True,
        "filter_groups.rule": rule,
        "filter_groups.metric": "a" if rule == "metric" else None,
        "tasks.selector": {"selector_type": selector, "feature_keys": KEYS.get(selector, [])},
    }
    policy = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=6)
    mixed = lambda completion: sum(map(ord, completion)) % 3 / 2  # few groups are filtered
    rewards = {"a": mixed, "b": lambda completion: 1.0}
    trainer = GRPO(policy, TASKS, rewards, config, TASKS[:4]).fit()
    assert all(math.isfinite(row["loss"]) for row in trainer.history)
    trainer.evaluate(TASKS[:2], k=(1, 2))


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
def test_diffusion(sampler):
    policy, reference = make(sampler), make(sampler)
    r = policy.sample(MOTIONS, 3, seeded(0, "sampling"))
    optimizer = torch.optim.AdamW(policy.parameters(), 1e-3)
    config = UpdateConfig(num_epochs=2, loss={"kl_coef": 0.1})
    done = update(policy, r, torch.randn(len(r)), optimizer, config, reference)
    assert done.done == 2 and policy.sample(MOTIONS, 1, seeded(0, "greedy"), greedy=True).outputs


def test_minibatches_that_need_no_pass_in_half_precision():
    policy = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=3)
    rollout = policy.sample(TASKS[:2], 2, seeded(0))
    torch.set_default_dtype(torch.bfloat16)
    optimizer, how = torch.optim.SGD(policy.parameters(), 0.1), UpdateConfig(minibatch_size=2)
    report = update(policy, rollout, torch.zeros(4), optimizer, how, generator=seeded(1))
    assert [row["n_scored"] for row in report.rows] == [0, 0] and report.done == 2


@pytest.mark.parametrize("do", [lambda: GRPO("nowhere", [], len), lambda: seeded(0, "draws")])
def test_a_default_device_is_refused_before_anything_is_loaded_or_drawn(do):
    with torch.device("meta"), pytest.raises(ValueError, match=r"set_default_device\(None\)"):
        do()
