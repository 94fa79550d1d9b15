"""GRPO and GDPO on sums with three rewards, on one scale and with one 30 times too large: what grpo_vs_gdpo.ipynb reads.

    OMP_NUM_THREADS=1 python studies/grpo_vs_gdpo.py     trains what is missing

Four arms choose among the same four learning rates on two tuning seeds and a development set, and run on five other seeds, judged at
factor 1 on 200 held-out problems with 4 samples each. All had chosen the same rate, so four more arms fix twice that; the last of
them, `corner`, ran later and is stored by itself. Finished runs are kept in runs/, and the same command goes on where it stopped.
What this leaves out: tuning of anything but the learning rate, other models, longer training.
"""

from pathlib import Path

import epochs_and_rates

from grpo_nb.lab.compare import compare
from grpo_nb.lab.study import Samples

HERE = Path(__file__).parent
ACCURACY = "eval_sampled/correct"
BASE = epochs_and_rates.BASE | {"train_batch_size": 16}  # the same rewards and weights
GRPO, GDPO = {"advantage.mode": "grpo"}, {"advantage.mode": "gdpo"}
PAYS_30, FAST = {"advantage.scales.short": 30}, {"optimizer.lr": 5e-5}
VARIANTS = {
    "GDPO": GDPO,
    "GRPO": GRPO,
    "GDPO, 30x": GDPO | PAYS_30,
    "GRPO, 30x": GRPO | PAYS_30,
    "GDPO, lr 5e-5": GDPO | FAST,
    "GRPO, lr 5e-5": GRPO | FAST,
    "GRPO, 30x, lr 5e-5": GRPO | PAYS_30 | FAST,
}
CORNER = {"GDPO, 30x, lr 5e-5": GDPO | PAYS_30 | FAST}
ALIKE = {"seeds": range(5, 10), "budget": Samples(5_120), "eval_every": Samples(1_280)}
ALIKE |= {"metric": ACCURACY, "keep": (), "dir": "runs/grpo_vs_gdpo"}
DEV = {"tune_seeds": (100, 101), "tune_tasks": "data:tasks/middle_dev.jsonl"}


def study(**how):
    "All eight arms as one study."
    grid = {"tune": {"optimizer.lr": [1.25e-5, 2.5e-5, 5e-5, 1e-4]}}
    found = compare(VARIANTS, BASE, store=HERE / "grpo_vs_gdpo.json", **ALIKE | grid | DEV | how)
    corner = compare(CORNER, BASE, store=HERE / "grpo_vs_gdpo_corner.json", **ALIKE | how)
    found.spec["variants"] |= corner.spec["variants"]
    found.runs += corner.runs
    return found


if __name__ == "__main__":
    print(study(workers=2).table(margin=0.03))
