"""One epoch or many over each rollout, on sums with the shipped Llama: the studies that single_vs_multi_epoch.ipynb reads.

    OMP_NUM_THREADS=1 python studies/single_vs_multi_epoch.py     trains what is missing (2,014 processor seconds of training)

Every finished run is kept in runs/, and the same command goes on where it stopped. All arms generate the same number of
samples. Each arm tries the same five learning rates on four tuning seeds for half of the samples, scored on a development set; the winner runs on the
reported seeds, scored on held-out problems. Two pairs of arms share a fixed rate instead: the fixed and the progressive scheme
the middle one, and eight epochs with and without an early stop the largest, at which they collapse.
A second study lets the single epoch run for about the seconds that eight take.
What this leaves out: tuning of anything but the learning rate, other models, longer training.
"""

from pathlib import Path

from grpo_nb.lab.compare import compare
from grpo_nb.lab.study import Samples

HERE = Path(__file__).resolve().parent
BASE = {
    "train_batch_size": 8,
    "num_generations": 8,
    "policy": {"max_new_tokens": 10},
    "optimizer": {"warmup": 5},
    "eval": {"samples": 4, "greedy": False},
}
EIGHT = {"update.num_epochs": 8}
LRS = [1e-6, 3e-6, 1e-5, 3e-5, 1e-4]
MIDDLE_LR, LARGE_LR = {"optimizer.lr": 3e-5}, {"optimizer.lr": 1e-4}
VARIANTS = {
    "K=1": {"update.num_epochs": 1},
    "K=2": {"update.num_epochs": 2},
    "K=4": {"update.num_epochs": 4},
    "K=8": EIGHT,
    "K=8, lr 3e-5": EIGHT | MIDDLE_LR,
    "K=8, lr 3e-5, progressive": EIGHT | MIDDLE_LR | {"update.scheme": "progressive"},
    "reference": {"update.scheme": "reference"},
    "K=8, lr 1e-4": EIGHT | LARGE_LR,
    "K=8, lr 1e-4, stop": EIGHT | LARGE_LR | {"update.kl_stop.target": 0.003},
}
EPOCHS = (0, 1, 3, 7)  # of which the store keeps the distance, the clipping and the ratios
BY_EPOCH = ("kl_old", "clip_ratio/region_mean", "ratio/q01", "ratio/q99")
KEEP = (
    "reward",
    "entropy",
    "grad_norm",
    "updates_per_rollout",
    "kl_old/k3",
    "upd/kl_last",
    "clip_ratio/region_mean",
    *(f"upd/epoch{e}/{k}" for e in EPOCHS for k in BY_EPOCH),
)


def study(**how):
    "Epochs and schemes at equal samples."
    return compare(
        VARIANTS,
        BASE,
        seeds=range(5),
        budget=Samples(2048),
        eval_every=Samples(512),
        tune={"optimizer.lr": LRS},
        tune_seeds=range(100, 104),
        tune_budget=Samples(1024),
        tune_tasks="data:tasks/middle_dev.jsonl",
        store=HERE / "single_vs_multi_epoch.json",
        keep=KEEP,
        **{"dir": "runs/single_vs_multi_epoch"} | how,
    )


def longer(**how):
    "A single epoch for six times the samples: more than the seconds that eight epochs take."
    return compare(
        {"K=1, longer": {"update.num_epochs": 1}},
        BASE,
        seeds=range(5),
        budget=Samples(12288),
        eval_every=Samples(2048),
        tune={"optimizer.lr": LRS},
        tune_seeds=(100, 101),
        tune_budget=Samples(4096),
        tune_tasks="data:tasks/middle_dev.jsonl",
        store=HERE / "single_vs_multi_epoch_longer.json",
        keep=KEEP[:4],
        **{"dir": "runs/single_vs_multi_epoch_longer"} | how,
    )


if __name__ == "__main__":
    for run in (study, longer):
        print(run().table())
