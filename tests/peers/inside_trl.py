"""TRL's trainer and ours inside it on the tiny model: `make trl` runs this with the real TRL, in one process and in two.

python tests/peers/inside_trl.py OUT.json
ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 tests/peers/inside_trl.py
"""

import json
import os
import sys
import tempfile

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig

from grpo_nb.advantages import AdvantageConfig, compute_advantages
from grpo_nb.integrations.trl import GRPOTrainer
from grpo_nb.tasks import data_path

WORLD = int(os.environ.get("WORLD_SIZE", 1))
DATA = data_path("tiny-llama")


def right(prompts, completions, answer, **_):
    return [
        float(c.split("</think>")[-1].replace("<eos>", "").strip() == a)
        for c, a in zip(completions, answer)
    ]


def short(prompts, completions, **_):
    # eighths: sums and means of float32 are exact, so that TRL's constant groups are constant too (with tenths its
    # mean is off by a rounding error, and an advantage of up to 0.002 is left in a group that teaches nothing)
    return [None if len(c) % 5 == 0 else -0.125 * len(c) for c in completions]


def run(kind, steps=12, **options):
    torch.manual_seed(0)
    rows = [json.loads(x) for x in open(data_path("tasks/middle_train.jsonl"))][:400]
    data = Dataset.from_list([{"prompt": r["prompt"], "answer": r["answer"]} for r in rows])
    tokenizer = AutoTokenizer.from_pretrained(DATA)
    args = GRPOConfig(
        tempfile.mkdtemp(), max_steps=steps, per_device_train_batch_size=64 // WORLD, num_generations=8,
        max_completion_length=10, learning_rate=1e-4, lr_scheduler_type="constant", logging_steps=1, seed=3,
        report_to=[], use_cpu=True, bf16=False, save_strategy="no", beta=0.0, disable_tqdm=True, warmup_steps=0,
    )  # fmt: skip
    trainer = kind(
        AutoModelForCausalLM.from_pretrained(DATA),
        [right, short],
        args=args,
        train_dataset=data,
        processing_class=tokenizer,
        **options,
    )
    seen = []
    own = trainer._generate_and_score_completions

    def watched(inputs):
        batch = own(inputs)
        rewards = getattr(trainer, "_rewards", None)
        seen.append(
            (
                batch["advantages"].clone(),
                None if rewards is None else trainer.accelerator.gather(rewards),
                len(inputs),
            )
        )
        return batch

    trainer._generate_and_score_completions = watched
    trainer.train()
    assert trainer.accelerator.num_processes == WORLD
    logs = [r for r in trainer.state.log_history if "loss" in r]
    return (
        {"loss": [r["loss"] for r in logs], "right": [r["rewards/right/mean"] for r in logs]},
        seen,
        trainer,
    )


def main():
    base, theirs, _ = run(trl.GRPOTrainer)
    ours, mine, _ = run(GRPOTrainer, advantage="grpo")
    worst = max((a - b).abs().max().item() for (a, _, _), (b, _, _) in zip(theirs, mine))
    print(
        "largest difference of advantages",
        worst,
        "of losses",
        max(abs(a - b) for a, b in zip(base["loss"], ours["loss"])),
    )
    assert worst < 1e-6 and max(abs(a - b) for a, b in zip(base["loss"], ours["loss"])) < 1e-6
    i = next(i for i, (_, rewards, _) in enumerate(mine) if rewards.isnan().any())  # one with None
    call = {"rewards": mine[i][1].tolist(), "advantages": theirs[i][0].tolist()}
    gdpo, seen, trainer = run(GRPOTrainer, advantage="gdpo")
    for advantages, rewards, _ in seen:
        want = compute_advantages(
            rewards,
            torch.arange(len(rewards)) // 8,
            ["right", "short"],
            AdvantageConfig(mode="gdpo", weights=[1.0, 1.0]),
        ).values
        at = trainer.accelerator.process_index * len(advantages)
        torch.testing.assert_close(advantages, want[at : at + len(advantages)], atol=1e-6, rtol=0)
    how = {"enable": True, "metric": "right", "max_num_gen_batches": 10, "on_cap": "train_partial"}
    filtered, seen, trainer = run(GRPOTrainer, advantage="grpo", filter_groups=how)
    varied = [
        (r[:, 0].view(-1, 8).amax(1) > r[:, 0].view(-1, 8).amin(1)).float().mean().item()
        for _, r, _ in seen
    ]
    assert all(len(a) == n for a, _, n in seen) and min(varied) == 1, varied
    batches = trainer.state.log_history[0]["filter_groups/num_gen_batches"]
    print(
        f"{WORLD} process(es): filtered batches are full and vary; first step took {batches:g} generations"
    )
    if len(sys.argv) > 1:
        runs = {"TRL": base, "grpo": ours, "gdpo": gdpo, "grpo, filtered": filtered}
        versions = {
            "trl": trl.__version__,
            "transformers": transformers.__version__,
            "torch": torch.__version__,
        }
        out = {
            "command": "make trl", "seed": 3, "versions": versions, "processes": WORLD, "runs": runs,
            "largest_difference_of_advantages": worst, "groups_that_vary": min(varied), "call": call,
        }  # fmt: skip
        with open(sys.argv[1], "w") as f:
            json.dump(out, f)


if __name__ == "__main__":
    main()
