"""What reproductions.ipynb reads: the three estimators as KL losses on paths.

    OMP_NUM_THREADS=1 python studies/reproductions.py     trains what is missing (81 processor seconds of training)

One epoch over every batch with a ratio of 1, so that only the estimators' gradients differ; one learning rate, nothing tuned.
Finished runs are kept in runs/, and the same command goes on where it stopped.
"""

from pathlib import Path

from grpo_nb.applications.motion import motion_config
from grpo_nb.lab.compare import compare

STORE = Path(__file__).with_name("reproductions_kl.json")
KINDS = {k: {"update.loss.kl_kind": k, "update.loss.kl_coef": 0.3} for k in ("k1", "k2", "k3")}


def kl_losses(**how):
    "k1, k2 and k3 as losses, and none."
    base = motion_config(lr=3e-4) | {"application": "motion"}
    fixed = {"seeds": 5, "budget": {"samples": 10_240}, "eval_every": {"samples": 2_560}}
    fixed |= {"store": STORE, "keep": ("reward", "kl_ref/k3"), "dir": "runs/reproductions"}
    none = {"update.loss.kl_coef": 1e-9}  # pulls at nothing; the distance is recorded
    return compare({"none": none} | KINDS, base, **fixed | how)


if __name__ == "__main__":
    print(kl_losses(workers=2).table())
