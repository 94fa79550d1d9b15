"""Our estimators, losses and trainer through verl's own functions: `make verl` runs this with the real verl 0.9.1.

RAY_AUTH_MODE=disabled VERL_USE_EXTERNAL_MODULES=grpo_nb.integrations.verl python tests/peers/inside_verl.py OUT.json
"""

import contextlib
import itertools
import json
import random
import sys
from pathlib import Path

import numpy as np
import ray
import torch
import transfer_queue
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, agg_loss
from verl.trainer.ppo.core_algos import get_policy_loss_fn, kl_penalty
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.trainer.ppo.v1 import get_trainer_cls
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.workers.config import ActorConfig, PolicyLossConfig

from grpo_nb.advantages import ADVANTAGES, AdvantageConfig, compute_advantages
from grpo_nb.integrations.from_verl import config_from_verl, _VERL_ESTIMATORS
from grpo_nb.integrations.verl import kept
from grpo_nb.lab.frames import flat_keys
from grpo_nb.losses import policy_loss
from grpo_nb.selectors import make_selector


def batch(seed, n=48, length=7):
    "Uneven groups in any order, uneven lengths, two components of which one is missing for some samples."
    rng = np.random.default_rng(seed)
    uid = np.array([f"u{i}" for i in rng.integers(0, 8, n)], object)
    acc, fmt = rng.integers(0, 2, n).astype(float), rng.random(n)
    fmt[rng.random(n) < 0.1] = np.nan
    lengths = rng.integers(1, length + 1, n)
    mask = torch.from_numpy(np.arange(length)[None] < lengths[:, None]).float()
    total = torch.zeros(n, length)
    last = torch.arange(n), torch.from_numpy(lengths) - 1
    total[last] = torch.from_numpy(acc + np.nan_to_num(fmt)).float()
    tensors = {"token_level_rewards": total, "response_mask": mask}
    return DataProto.from_dict(tensors, non_tensors={"uid": uid, "acc": acc, "fmt": fmt}), lengths


RECORD = {"verl": verl.__version__, "losses": {}, "advantages": {}}
SAME = {"ppo": "vanilla", "gspo": "gspo", "cispo": "cispo", "dppo_tv": "dppo_tv", "dppo_kl": "dppo_kl", "geo_mean": "geo_mean",
        "reinforce": "gpg", "dro": "dro"}  # fmt: skip
MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


def losses():
    "Our losses as verl calls them: value and gradient are those of its own of the same name."
    compared = 0
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        old = -torch.rand(12, 9, generator=g) - 0.1
        advantages = torch.randn(12, 1, generator=g).expand(12, 9).contiguous()
        mask = (torch.arange(9) < torch.randint(1, 10, (12, 1), generator=g)).float()
        step = 0.2 * torch.randn(12, 9, generator=g)
        if seed == 0:
            RECORD["loss_inputs"] = [x.tolist() for x in (old, old + step, advantages, mask)]
        for ours, theirs in SAME.items():
            config = ActorConfig(
                strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=4, clip_ratio_low=0.1, clip_ratio_high=0.28,
                policy_loss=PolicyLossConfig(dro_beta=0.5 if ours == "dro" else None),
            )  # fmt: skip
            for mode in MODES if ours != "geo_mean" else ("seq-mean-token-mean",):
                found = []
                for name in (f"grpo_nb.{ours}", theirs):
                    logp = (old + step).requires_grad_()
                    f = get_policy_loss_fn(name)
                    loss, _ = f(old, logp, advantages, mask, mode, config)
                    loss.backward()
                    found += [(loss.detach(), logp.grad * mask)]
                if seed == 0 and mode == "token-mean":
                    RECORD["losses"][ours] = found[1][0].item()
                for a, b in zip(*found):
                    torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=f"{ours} {mode}")
                compared += 1
    return compared


def losses_of_settings(count=600):
    "Settings drawn at random, read as ours: our loss and its gradient, with entropy and KL, are verl's."
    rng, at = random.Random(0), "actor_rollout_ref.actor."
    torch.manual_seed(0)
    kinds = dict.fromkeys("vanilla gspo sapo cispo geo_mean gpg dppo_tv dro".split(), {})
    kinds["sapo"] = {"tau_pos": 0.8}
    free = {"clip_ratio_low": 0.1, "clip_ratio_high": 0.28, "clip_ratio_c": 5.0, "loss_scale_factor": 50, "entropy_coeff": 0.1}  # fmt: skip
    for kind in rng.choices([*kinds], k=count):
        told = {k: v for k, v in free.items() if rng.random() < 0.4} | kinds[kind]
        told["loss_agg_mode"] = MODES[2] if kind in ("sapo", "geo_mean") else rng.choice(MODES)
        kl = rng.choice(["", "kl", "abs", "mse", "low_var_kl", "k3+"])
        told |= {"use_kl_loss": True, "kl_loss_coef": 0.2, "kl_loss_type": kl} if kl else {}
        loss = {"loss_mode": kind} | ({"dro_beta": 0.5} if kind == "dro" else {})
        old = -torch.rand(12, 9) - 0.1
        step, ref = 0.3 * torch.randn(12, 9), old + 0.2 * torch.randn(12, 9)
        advantage = torch.randn(12)
        mask = torch.arange(9) < torch.randint(1, 10, (12, 1))
        given = {at + k: v for k, v in told.items()}
        given |= {f"{at}policy_loss.{k}": v for k, v in loss.items()}
        ours = config_from_verl(given | {"data.max_response_length": 9}).config.update.loss
        clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2} | told
        fixed = {"strategy": "fsdp", "rollout_n": 4, "ppo_micro_batch_size_per_gpu": 4}
        theirs = ActorConfig(policy_loss=PolicyLossConfig(**loss), **fixed, **clip)
        theirs.global_batch_info["loss_scale_factor"] = theirs.loss_scale_factor
        logp, again = ((old + step).requires_grad_() for _ in range(2))
        rest = advantage[:, None].expand(12, 9), mask, theirs.loss_agg_mode, theirs
        want, _ = get_policy_loss_fn(kind)(old, logp, *rest)
        terms = [(-old, -theirs.entropy_coeff)]
        terms += [(kl_penalty(logp, ref, kl), theirs.kl_loss_coef)] if kl else []
        for x, weight in terms:
            total = agg_loss(x, mask, theirs.loss_agg_mode, **theirs.global_batch_info)
            want = want + weight * total
        got, _ = policy_loss(again, old, advantage, mask, ours, ref, entropy_NS=-old)
        grads = [torch.autograd.grad(a, x)[0] * mask for a, x in ((want, logp), (got, again))]
        for a, b in ((want.detach(), got.detach()), grads):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=str(given))
    print(f"{count} losses of random settings equal verl's in value and gradient")


def advantages_of_settings():
    "Each of verl's estimators that is read, with and without the deviation: our advantages are verl's."
    compared, keys, at = 0, ["acc", "fmt"], "algorithm."
    for seed, (name, scaled) in enumerate(itertools.product(_VERL_ESTIMATORS, (True, False))):
        told = {"adv_estimator": name, "norm_adv_by_std_in_grpo": scaled}
        if name == "gdpo":
            told |= {"gdpo_reward_keys": keys, "gdpo_reward_weights": [1.0, 0.5]}
        given = {at + k: v for k, v in told.items()} | {"actor_rollout_ref.rollout.n": 4}
        how = config_from_verl(given).config
        data, lengths = batch(seed)
        data.non_tensor_batch["uid"] = np.array([f"u{i // 4}" for i in range(48)], object)
        data.non_tensor_batch["fmt"] = np.nan_to_num(data.non_tensor_batch["fmt"])
        mask, x = data.batch["response_mask"], data.batch["token_level_rewards"].sum(1)[:, None]
        data.batch["prompts"] = torch.zeros(48, 1, dtype=torch.long)
        data.batch["attention_mask"] = torch.cat([torch.ones(48, 1), mask], 1).long()
        if name == "gdpo":
            x = torch.from_numpy(np.stack([data.non_tensor_batch[k] for k in keys], 1)).float()
        names, ids, n = keys[: x.shape[1]], torch.arange(48) // 4, torch.from_numpy(lengths)
        want = compute_advantages(x, ids, names, how.advantage, lengths_N=n).values
        config = AlgoConfig(**told)
        got = compute_advantage(data, name, 1.0, 1.0, 4, scaled, config).batch["advantages"]
        torch.testing.assert_close(got * mask, want[:, None] * mask, atol=1e-4, rtol=1e-4, msg=name)
        compared += 1
    print(f"{compared} settings of estimators give verl's advantages")


def default_trainer():
    "The registered trainer of the default kind, through verl's own transfer queue and `_compute_advantage`."
    ray.init(num_cpus=16, include_dashboard=False, log_to_driver=False)
    transfer_queue.init()
    n, data = 48, batch(7)[0]
    mask, scores = data.batch["response_mask"], data.batch["token_level_rewards"]
    lengths, uid = mask.sum(1).int().tolist(), data.non_tensor_batch["uid"]
    acc, fmt = data.non_tensor_batch["acc"], data.non_tensor_batch["fmt"]

    def row(i):
        rewards = {"acc": acc[i], "fmt": None if np.isnan(fmt[i]) else fmt[i]}
        own = {"uid": uid[i], "extra_fields": {"reward_extra_info": rewards}}
        own |= {k: torch.zeros(lengths[i]) for k in ("old_log_probs", "rollout_log_probs")}
        own |= {"response_mask": mask[i, : lengths[i]].long(), "rm_scores": scores[i, : lengths[i]]}
        return own

    keys = [f"{uid[i]}_{i}_0" for i in range(n)]
    fields = list_of_dict_to_tensordict([row(i) for i in range(n)])
    put = transfer_queue.kv_batch_put(keys=keys, partition_id="train", fields=fields)
    trainer = object.__new__(get_trainer_cls("grpo_nb"))
    rollout = OmegaConf.create({"rollout": {"n": 6}})
    trainer.config = OmegaConf.create({"actor_rollout_ref": rollout}, flags={"allow_objects": True})
    trainer.config.algorithm = OmegaConf.create(
        {"use_kl_in_reward": False, "adv_estimator": "grpo_nb.gdpo", "gamma": 1.0, "lam": 1.0,
         "gdpo_reward_keys": ["acc", "fmt"], "gdpo_reward_weights": [1.0, 0.5]}
    )  # fmt: skip
    trainer._compute_advantage(put, {})
    got = transfer_queue.kv_batch_get(keys=keys, partition_id="train", select_fields=["advantages"])
    ids = torch.from_numpy(np.unique(uid, return_inverse=True)[1])
    how = AdvantageConfig(mode="gdpo", weights=[1.0, 0.5], eps=1e-6)
    want = compute_advantages(torch.from_numpy(np.stack([acc, fmt], 1)), ids, ["acc", "fmt"], how)
    for values, number in zip(got["advantages"], want.values):
        torch.testing.assert_close(values, number.float().expand(len(values)), atol=1e-6, rtol=0)
    sync = object.__new__(get_trainer_cls("sync"))
    sync.config = trainer.config
    try:
        sync._compute_advantage(put, {})
    except ValueError as e:
        assert "trainer.v1.trainer_mode=grpo_nb" in str(e)
    else:
        raise AssertionError("components that were not fetched were ignored")
    transfer_queue.close()
    ray.shutdown()


class Chosen(torch.utils.data.Sampler):
    def __init__(self, dataset, config):
        self.selector = make_selector(dataset, config)

    def __iter__(self):
        for _ in range(len(self)):
            yield int(self.selector.get_indices(1)[0])

    def __len__(self):
        return self.selector.num_tasks

    def update(self, batch, metric="acc"):  # a DataProto with rewards
        index, value = (batch.non_tensor_batch[k] for k in ("index", metric))
        self.selector.feedback(index.astype(int), value.astype(float))


def sampler():
    "A selector chooses what verl's data loader reads, and hears of every batch."
    rows = [{"prompt": str(i)} for i in range(64)]
    chosen = Chosen(rows, {"selector_type": "thompson", "seed": 1})
    loader = StatefulDataLoader(rows, 8, sampler=chosen, num_workers=0, collate_fn=list)
    drawn = []
    for _ in range(12):
        for part in loader:
            index = np.repeat([int(r["prompt"]) for r in part], 8)
            acc = np.where(index < 32, 1.0, np.tile([0.0, 1.0], len(index) // 2))
            chosen.update(DataProto.from_dict(non_tensors={"index": index, "acc": acc}))
            drawn += index[::8].tolist()
    late = np.array(drawn[len(drawn) // 2 :])
    assert (late >= 32).mean() > 0.8, (late >= 32).mean()  # not those that are always solved
    return len(drawn)


_MODEL = "actor_rollout_ref.model.path"


def settings():
    "Every key of verl's default configuration is read, or has a reason."
    folder = str(Path(verl.__file__).parent / "trainer/config")
    with initialize_config_dir(config_dir=folder, version_base=None):
        tree = OmegaConf.to_container(compose("ppo_trainer"), resolve=False)
    flat = {k: "x" if v is None else v for k, v in flat_keys(tree).items()}
    for name, value in flat.items():
        with contextlib.suppress(ValueError):  # none of the values, or a reference to another key
            said = config_from_verl({name: value}).left.get(name, "")
            assert not said.startswith("not a key"), name
    chosen = {"algorithm.adv_estimator": "grpo"}
    here = [k for k in flat if k.endswith(("_files", "image_key")) or k == _MODEL]  # of its machine
    whole = {k: v for k, v in flat.items() if v != "x" and "${" not in str(v) and k not in here}
    default, spelt = (config_from_verl(x | chosen, num_tasks=9000).config for x in ({}, whole))
    assert default == spelt, (default, spelt)
    print(f"{len(flat)} keys of verl's configuration are read or have a reason; its defaults are")


def main():
    names = [f"grpo_nb.{mode}" for mode in ADVANTAGES]
    assert all(n in ADV_ESTIMATOR_REGISTRY for n in names), "the plugin did not register"
    compared, keys = 0, ["acc", "fmt"]
    for seed in range(5):
        for mode in ("grpo", "gdpo", "gdpo_verl", "rloo", "mo_grpo", "dr_grpo"):
            data, lengths = batch(seed)
            two = {"gdpo_reward_keys": keys, "gdpo_reward_weights": [1.0, 0.5]}
            config = AlgoConfig(adv_estimator=f"grpo_nb.{mode}", **two)
            got = compute_advantage(data, f"grpo_nb.{mode}", config=config).batch
            ids = torch.from_numpy(np.unique(data.non_tensor_batch["uid"], return_inverse=True)[1])
            x = torch.from_numpy(np.stack([data.non_tensor_batch[k] for k in keys], 1))
            how = AdvantageConfig(mode=mode, weights=[1.0, 0.5], eps=1e-6)
            want = compute_advantages(x, ids, keys, how, lengths_N=torch.from_numpy(lengths)).values
            if seed == 0:
                RECORD["advantages"][mode] = got["advantages"].tolist()
            want = want[:, None] * got["response_mask"]
            torch.testing.assert_close(got["advantages"], want, atol=1e-6, rtol=0)
            compared += 1
        data, _ = batch(seed)
        config = AlgoConfig(adv_estimator="grpo_nb.grpo")
        ours = compute_advantage(data, "grpo_nb.grpo", config=config).batch["advantages"]
        theirs = compute_advantage(batch(seed)[0], "grpo", config=AlgoConfig()).batch["advantages"]
        sizes = np.unique(data.non_tensor_batch["uid"], return_counts=True)[1]
        if sizes.min() > 1:  # verl keeps the raw reward of a sample without siblings
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        rows = kept(data, "acc")
        assert len(data[rows].batch["response_mask"]) == rows.sum()
    no_components, _ = batch(0)
    del no_components.non_tensor_batch["fmt"]
    config = AlgoConfig(adv_estimator="grpo_nb.gdpo", gdpo_reward_keys=keys)
    try:
        compute_advantage(no_components, "grpo_nb.gdpo", config=config)
    except ValueError as e:
        assert "did not fetch the reward components ['fmt']" in str(e)
    else:
        raise AssertionError("missing components were ignored")
    settings()
    torch.set_default_dtype(torch.float64)
    losses_of_settings()
    torch.set_default_dtype(torch.float32)
    advantages_of_settings()
    same = f"{losses()} losses equal verl's own in value and gradient"
    print(f"{same}; a sampler drew {sampler()} tasks")
    default_trainer()
    print("the default trainer fetches the components through its own queue, and refuses without")
    same = f"{compared} batches of its compute_advantage equal ours"
    print(f"verl {verl.__version__}: {len(names)} estimators registered, {same}")
    if len(sys.argv) > 1:
        data, inputs = batch(0)[0], ("token_level_rewards", "response_mask")
        RECORD["advantage_inputs"] = [data.batch[k].tolist() for k in inputs]
        RECORD["columns"] = {k: v.tolist() for k, v in data.non_tensor_batch.items()}
        with open(sys.argv[1], "w") as f:
            json.dump(RECORD, f)


if __name__ == "__main__":
    main()
