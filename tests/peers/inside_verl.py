"""Our estimators through verl's own `compute_advantage`: `make verl` runs this with the real verl 0.9.1.

python tests/peers/inside_verl.py
"""

import numpy as np
import torch
import verl
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY
from verl.trainer.ppo.ray_trainer import compute_advantage

from grpo_nb.advantages import ADVANTAGES, AdvantageConfig, compute_advantages
from grpo_nb.integrations.verl import kept


def batch(seed, n=48, length=7):
    "Uneven groups in any order, uneven lengths, two components of which one is missing for some samples."
    rng = np.random.default_rng(seed)
    uid = np.array([f"u{i}" for i in rng.integers(0, 8, n)], object)
    acc, fmt = rng.integers(0, 2, n).astype(float), rng.random(n)
    fmt[rng.random(n) < 0.1] = np.nan
    lengths = rng.integers(1, length + 1, n)
    mask = torch.from_numpy(np.arange(length)[None] < lengths[:, None]).float()
    total = torch.zeros(n, length)
    total[torch.arange(n), torch.from_numpy(lengths) - 1] = torch.from_numpy(
        acc + np.nan_to_num(fmt)
    ).float()
    tensors = {"token_level_rewards": total, "response_mask": mask}
    return DataProto.from_dict(tensors, non_tensors={"uid": uid, "acc": acc, "fmt": fmt}), lengths


def main():
    names = [f"grpo_nb.{mode}" for mode in ADVANTAGES]
    assert all(n in ADV_ESTIMATOR_REGISTRY for n in names), "the plugin did not register"
    compared = 0
    for seed in range(5):
        for mode in ("grpo", "gdpo", "gdpo_verl", "rloo", "mo_grpo", "dr_grpo"):
            data, lengths = batch(seed)
            keys = ["acc", "fmt"]
            config = AlgoConfig(
                adv_estimator=f"grpo_nb.{mode}",
                gdpo_reward_keys=keys,
                gdpo_reward_weights=[1.0, 0.5],
            )
            out = compute_advantage(data, f"grpo_nb.{mode}", config=config)
            ids = torch.from_numpy(np.unique(data.non_tensor_batch["uid"], return_inverse=True)[1])
            x = torch.from_numpy(np.stack([data.non_tensor_batch[k] for k in keys], 1))
            how = AdvantageConfig(mode=mode, weights=[1.0, 0.5], eps=1e-6)
            want = compute_advantages(x, ids, keys, how, lengths_N=torch.from_numpy(lengths)).values
            mask = out.batch["response_mask"]
            torch.testing.assert_close(
                out.batch["advantages"], want[:, None] * mask, atol=1e-6, rtol=0
            )
            compared += 1
        data, _ = batch(seed)
        ours = compute_advantage(
            data, "grpo_nb.grpo", config=AlgoConfig(adv_estimator="grpo_nb.grpo")
        ).batch["advantages"]
        theirs = compute_advantage(batch(seed)[0], "grpo", config=AlgoConfig()).batch["advantages"]
        sizes = np.unique(data.non_tensor_batch["uid"], return_counts=True)[1]
        if sizes.min() > 1:  # verl keeps the raw reward of a sample without siblings
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        rows = kept(data, "acc")
        assert len(data[rows].batch["response_mask"]) == rows.sum()
    no_components, _ = batch(0)
    del no_components.non_tensor_batch["fmt"]
    try:
        compute_advantage(
            no_components,
            "grpo_nb.gdpo",
            config=AlgoConfig(adv_estimator="grpo_nb.gdpo", gdpo_reward_keys=["acc", "fmt"]),
        )
    except ValueError as e:
        assert "did not fetch the reward components ['fmt']" in str(e)
    else:
        raise AssertionError("missing components were ignored")
    print(
        f"verl {verl.__version__}: {len(names)} estimators registered, {compared} batches of its compute_advantage equal ours"
    )


if __name__ == "__main__":
    main()
