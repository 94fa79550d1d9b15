"""TRL's GRPOTrainer for update_cost.py: seconds and peak memory of all updates over one rollout. Runs in an environment with TRL.

    python tests/bench/peers/trl_update.py --dir FOLDER --epochs 1 2 4 [--micro ROWS]

FOLDER holds model/ and tasks.jsonl. A cycle is one generation and its K optimizer steps. Counted is everything but generating and
scoring; the pass over the old policy's log-probs, which TRL makes only if K > 1, counts. Not counted: trimming the heap, which
precedes the updates so that their peak is theirs. The last line of output is one JSON object.
"""

import argparse
import ctypes
import json
import os
import re
import statistics
import tempfile
import time
import warnings
from pathlib import Path

os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
warnings.filterwarnings("ignore")

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from transformers import AutoTokenizer, LlamaForCausalLM, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402


def memory(key):
    "VmRSS or VmHWM of this process in MB."
    return int(re.search(rf"{key}:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024


def clocks():
    "Wall time and CPU time."
    return time.perf_counter(), time.process_time()


class Timed(GRPOTrainer):
    "The trainer with a clock around generation and scoring."

    def __init__(self, *args, **kwargs):
        self.away, self.old_pass, self.base, self.inside = [0.0, 0.0], [0.0, 0.0], 0.0, False
        super().__init__(*args, **kwargs)

    def _generate_and_score_completions(self, *args, **kwargs):
        start, self.inside, self.old_pass = clocks(), True, [0.0, 0.0]
        out = super()._generate_and_score_completions(*args, **kwargs)
        self.inside = False
        ctypes.CDLL("libc.so.6").malloc_trim(0)
        self.base = memory("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        self.away = [b - a - old for a, b, old in zip(start, clocks(), self.old_pass)]
        return out

    def _get_per_token_logps_and_entropies(self, *args, **kwargs):
        start = clocks()
        out = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self.inside:
            self.old_pass = [t + b - a for t, a, b in zip(self.old_pass, start, clocks())]
        return out


class Clock(TrainerCallback):
    "Time from step end to step end, generation taken off."

    def __init__(self):
        self.spent, self.peak = [], []

    def on_train_begin(self, args, state, control, **kwargs):
        self.last = clocks()

    def on_step_end(self, args, state, control, **kwargs):
        away = self.trainer.away
        self.spent.append([b - a - off for a, b, off in zip(self.last, clocks(), away)])
        self.peak.append(memory("VmHWM") - self.trainer.base)
        self.trainer.away, self.last = [0.0, 0.0], clocks()


def measure(a, num_iterations):
    torch.manual_seed(a.seed)
    folder = Path(a.dir)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    model = LlamaForCausalLM.from_pretrained(folder / "model")
    tasks = [json.loads(x) for x in (folder / "tasks.jsonl").read_text().splitlines()]
    rows = a.prompts * a.generations
    micro = a.micro or rows

    def reward(completions, completion_ids, **columns):
        return [sum(i % 7 for i in ids) / (7 * len(ids)) for ids in map(list, completion_ids)]

    with tempfile.TemporaryDirectory() as tmp:
        config = GRPOConfig(
            output_dir=tmp, use_cpu=True, bf16=False, fp16=False, report_to="none", save_strategy="no",
            disable_tqdm=True, per_device_train_batch_size=micro, gradient_accumulation_steps=rows // micro,
            num_generations=a.generations, max_completion_length=a.tokens, num_iterations=num_iterations,
            max_steps=num_iterations * (a.cycles + 1), learning_rate=a.lr, lr_scheduler_type="constant",
            weight_decay=0.0, max_grad_norm=1.0, beta=0.0, loss_type="dapo", temperature=1.0, top_k=0, top_p=1.0,
            gradient_checkpointing=False, seed=a.seed,
        )  # fmt: skip
        clock = Clock()
        trainer = Timed(
            model=model, reward_funcs=reward, args=config, train_dataset=Dataset.from_list(tasks),
            processing_class=tokenizer, callbacks=[clock],
        )  # fmt: skip
        for c in list(trainer.callback_handler.callbacks):
            if type(c).__name__ in ("PrinterCallback", "ProgressCallback"):
                trainer.remove_callback(type(c))
        clock.trainer = trainer
        torch.set_num_threads(a.threads)
        trainer.train()
    k = num_iterations
    cycles = [[sum(v) for v in zip(*clock.spent[i : i + k])] for i in range(k, len(clock.spent), k)]
    seconds, cpu = zip(*cycles)
    peaks = [max(clock.peak[i : i + k]) for i in range(k, len(clock.peak), k)]
    facts = {"seconds": seconds, "cpu": cpu, "peak_mb": statistics.median(peaks)}
    return {"K": k, "updates": k} | facts


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--dir", required=True)
    ap.add_argument("--epochs", type=int, nargs="+", default=[1, 2, 4])
    for k, v in dict(
        prompts=32, generations=8, tokens=10, cycles=3, seed=0, threads=1, micro=0, lr=1e-4
    ).items():
        ap.add_argument("--" + k, type=type(v), default=v)
    a = ap.parse_args()
    torch.set_num_threads(a.threads)
    print(json.dumps({"runs": [measure(a, k) for k in a.epochs]}))


if __name__ == "__main__":
    main()
