"""TRL's GRPOTrainer for step_vs_trl.py and real_step.py: processor seconds, reward and peak memory. Runs in the environment of `make trl`.

    .venv-trl/bin/python tests/bench/peers/trl_step.py --model FOLDER --rows TASKS.jsonl --steps 150 [--out FOLDER]

Rows with an answer are paid for it, others by the parity of their length. `--exact 1` makes every completion as long as it may be.
The last line of output is one JSON object.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
warnings.filterwarnings("ignore")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

from common import peak_mb  # noqa: E402


class Timed(GRPOTrainer):
    "The trainer with a clock around generation."

    sampling = 0.0

    def _generate(self, *args, **kwargs):
        start = time.process_time()
        out = super()._generate(*args, **kwargs)
        self.sampling = time.process_time() - start
        return out


class Steps(TrainerCallback):
    "Processor seconds from step end to step end, those of sampling among them, and the mean reward."

    def __init__(self):
        self.rows = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        self.rows.append([time.process_time() - self.last, self.trainer.sampling])
        self.last = time.process_time()

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "reward" in logs:
            self.rows[-1].append(logs["reward"])


def train(a):
    tokenizer = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32)
    tasks = [json.loads(x) for x in Path(a.rows).read_text().splitlines()]

    def right(completion_ids, answer, **columns):
        texts = (tokenizer.decode(ids).replace(tokenizer.eos_token, "") for ids in completion_ids)
        return [float(t.split("</think>")[-1].strip() == str(x)) for t, x in zip(texts, answer)]

    def parity(completions, **columns):
        return [float(len(c[0]["content"]) % 2) for c in completions]

    with tempfile.TemporaryDirectory() as tmp:
        config = GRPOConfig(
            output_dir=tmp, use_cpu=True, bf16=False, fp16=False, report_to="none", save_strategy="no", logging_steps=1,
            disable_tqdm=True, per_device_train_batch_size=a.prompts * a.generations, num_generations=a.generations,
            max_completion_length=a.new, max_steps=a.steps, learning_rate=a.lr, lr_scheduler_type="constant_with_warmup",
            warmup_steps=a.warmup, weight_decay=0.0, max_grad_norm=1.0, beta=0.0, loss_type="dapo", temperature=1.0, top_k=0,
            top_p=1.0, gradient_checkpointing=False, seed=a.seed,
            generation_kwargs={"min_new_tokens": a.new} if a.exact else None,
        )  # fmt: skip
        steps, reward = Steps(), right if "answer" in tasks[0] else parity
        trainer = steps.trainer = Timed(
            model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(tasks),
            processing_class=tokenizer, callbacks=[steps],
        )  # fmt: skip
        torch.set_num_threads(a.threads)
        trainer.train()
    if a.out:
        model.save_pretrained(a.out)
        tokenizer.save_pretrained(a.out)
    print(json.dumps({"steps": steps.rows, "peak_mb": round(peak_mb())}))


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("--model", "--rows"):
        ap.add_argument(name, required=True)
    ap.add_argument("--out", help="where the trained model goes")
    for k, v in dict(prompts=32, generations=8, new=10, steps=150, threads=1, seed=0).items():
        ap.add_argument(f"--{k}", type=int, default=v)
    for k, v in dict(lr=1e-4, warmup=10, exact=0).items():
        ap.add_argument(f"--{k}", type=type(v), default=v)
    a = ap.parse_args()
    torch.manual_seed(a.seed)
    torch.set_num_threads(a.threads)
    train(a)


if __name__ == "__main__":
    main()
