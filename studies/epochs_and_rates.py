"""Epochs x learning rate x estimator on sums with three rewards on one scale: the picture in single_vs_multi_epoch.ipynb.

    OMP_NUM_THREADS=1 python studies/epochs_and_rates.py     trains what is missing (703 processor seconds of training)

Every cell of the grid is a variant of its own, with the same seeds, samples and held-out problems; nothing is tuned. Finished
runs are kept in runs/, and the same command goes on where it stopped.
What this leaves out: K = 8, other tasks, other models, longer training.
"""

from pathlib import Path

from grpo_nb.lab.compare import compare
from grpo_nb.lab.study import Samples

STORE = Path(__file__).with_suffix(".json")
EPOCHS, RATES, MODES = (1, 2, 4), (3e-6, 1e-5, 3e-5, 1e-4), ("grpo", "gdpo")
SCORE = "eval_sampled/correct"
# every token of an answer is a tag or a single character, so a pattern can say how long it may be
REWARDS = {
    "correct": {"reward": "exact_answer", "extract": "marker", "marker": "</think>"},
    "format": {  # a number, and the same backwards
        "reward": "format_match",
        "pattern": r"<think>(\d)(\d?)(\d?)(\d?)(-?)</think>\5\4\3\2\1",
    },
    "short": {"reward": "format_match", "pattern": r"(</?think>|.){0,6}"},  # and the end: 7 tokens
}
BASE = {
    "train_batch_size": 8,
    "num_generations": 8,
    "policy": {"max_new_tokens": 10},
    "rewards": {"functions": REWARDS},
    "advantage": {"weights": {"correct": 1, "format": 0.5, "short": 0.1}},
    "optimizer": {"warmup": 5},
    "eval": {"samples": 4, "greedy": False},
}
VARIANTS = {
    f"{mode.upper()}, K={k}, {lr:g}": {
        "advantage.mode": mode,
        "update.num_epochs": k,
        "optimizer.lr": lr,
    }
    for mode in MODES
    for k in EPOCHS
    for lr in RATES
}


def study(**how):
    "All cells of the grid."
    budget, dir = Samples(2048), "runs/epochs_and_rates"
    fixed = {"budget": budget, "metric": SCORE, "store": STORE, "keep": ()}
    return compare(VARIANTS, BASE, seeds=range(20, 23), **fixed, **{"dir": dir} | how)


if __name__ == "__main__":
    print(study(workers=2).table())
