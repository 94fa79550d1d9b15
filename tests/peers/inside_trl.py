"""TRL's trainer and ours inside it on the tiny model: `make trl` runs this with the real TRL, in one process and in two.

python tests/peers/inside_trl.py OUT.json
ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 tests/peers/inside_trl.py
"""

import collections
import contextlib
import dataclasses
import json
import os
import random
import shutil
import sys
import tempfile
import types
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from grpo_nb.advantages import AdvantageConfig, compute_advantages
from grpo_nb.integrations.from_trl import config_from_trl
from grpo_nb.integrations.trl import GRPOTrainer
from grpo_nb.lab.record import Run
from grpo_nb.losses import policy_loss
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.scheduler import TasksetScheduler
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO

WORLD = int(os.environ.get("WORLD_SIZE", 1))
DATA = data_path("tiny-llama")


def right(prompts, completions, answer, **_):
    said = [c.split("</think>")[-1].replace("<eos>", "").strip() for c in completions]
    return [float(c == a) for c, a in zip(said, answer)]


def short(prompts, completions, **_):
    # eighths: sums and means of float32 are exact, so that TRL's constant groups are constant too (with tenths its
    # mean is off by a rounding error, and an advantage of up to 0.002 is left in a group that teaches nothing)
    return [None if len(c) % 5 == 0 else -0.125 * len(c) for c in completions]


FOLDER = Path(tempfile.gettempdir()) / f"inside_trl_{os.environ.get('MASTER_PORT', os.getpid())}"


def run(kind, steps=12, iterations=1, lr=1e-4, save=None, resume=None, given=None, **options):
    torch.manual_seed(0)
    rows = [json.loads(x) for x in open(data_path("tasks/middle_train.jsonl"))][:400]
    data = Dataset.from_list([{"prompt": r["prompt"], "answer": r["answer"]} for r in rows])
    tokenizer = AutoTokenizer.from_pretrained(DATA)
    args = GRPOConfig(
        str(FOLDER), max_steps=steps, per_device_train_batch_size=64 // WORLD, num_generations=8,
        max_completion_length=10, learning_rate=lr, lr_scheduler_type="constant", logging_steps=1, seed=3,
        report_to=[], use_cpu=True, bf16=False, save_strategy="steps" if save else "no", save_steps=save or 500,
        beta=0.0, disable_tqdm=True, warmup_steps=0, num_iterations=iterations,
        **(given or {}),
    )  # fmt: skip
    model, given = AutoModelForCausalLM.from_pretrained(DATA), {"processing_class": tokenizer}
    trainer = kind(model, [right, short], args=args, train_dataset=data, **given, **options)
    seen = []
    own = trainer._generate_and_score_completions

    def watched(inputs):
        batch = own(inputs)
        rewards = getattr(trainer, "_rewards", None)
        rewards = None if rewards is None else trainer.accelerator.gather(rewards)
        seen.append((batch["advantages"].clone(), rewards, len(inputs)))
        return batch

    trainer._generate_and_score_completions = watched
    trainer.add_callback(Weights())
    trainer.train(resume_from_checkpoint=resume)
    assert trainer.accelerator.num_processes == WORLD
    logs = [r for r in trainer.state.log_history if "loss" in r]
    rates = [r["rewards/right/mean"] for r in logs if "reward" in r]
    return {"loss": [r["loss"] for r in logs], "right": rates}, seen, trainer


class Weights(TrainerCallback):
    "Every parameter after each optimizer step."

    steps: list = []

    def on_train_begin(self, *_, **__):
        self.steps.clear()

    def on_step_end(self, *_, model=None, **__):
        self.steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))


def curriculum():
    "Tasks are drawn after the feedback on the last ones, alike on all processes, and go on after a resume."
    how = {"selector": "thompson", "steps": 6}
    told = []
    read, observe = TasksetScheduler.read, TasksetScheduler.observe

    def watched_read(self, n=None):
        found = read(self, n)
        told.append([(t["taskset_id"], t["index"]) for t in found])
        return found

    def watched_observe(self, rollout, passed=None):
        told.append("feedback")
        return observe(self, rollout, passed)

    TasksetScheduler.read, TasksetScheduler.observe = watched_read, watched_observe
    try:
        whole, _, a = run(GRPOTrainer, save=3, **how)
        assert told[1::2] == ["feedback"] * 6 and all(len(x) == 8 for x in told[::2]), told
        first, told[:] = told[::2], []
        part, _, b = run(GRPOTrainer, resume=str(FOLDER / "checkpoint-3"), **how)
        assert told[::2] == first[3:], "a resumed curriculum drew other tasks"
    finally:
        TasksetScheduler.read, TasksetScheduler.observe = read, observe
    assert part["loss"][3:] == whole["loss"][3:], (part["loss"], whole["loss"])
    states = [torch.from_numpy(x._stream.selectors[0].estimator.mean()) for x in (a, b)]
    everywhere = a.accelerator.gather(states[0][None].float())
    assert torch.equal(*states) and (everywhere == everywhere[0]).all()
    found = "6 batches drawn after the feedback, resumed at 3 with the same tasks and losses"
    print(f"{WORLD} process(es): {found}")
    return whole


def kl_stop():
    "Stopped after the first update of each rollout, four passes are one; a limit out of reach changes nothing."
    one, _, _ = run(trl.GRPOTrainer, steps=3, lr=1e-3)
    want = Weights.steps[-1]
    stopped, _, b = run(GRPOTrainer, steps=12, iterations=4, lr=1e-3, kl_stop=1e-9)
    moved = [not torch.equal(x, y) for x, y in zip(Weights.steps, Weights.steps[1:])]
    assert moved == [False, False, False, True] * 2 + [False] * 3, moved
    # Adam divides by the size of the gradient: where that is nearly 0, rounding of the ratio shows
    worst = (want - Weights.steps[-1]).abs().max().item()
    assert worst < 1e-4 and stopped["right"] == one["right"], worst
    marks = [r.get("upd/stopped") for r in b.state.log_history if "loss" in r]
    assert marks == [0, 1, None, None] * 3, marks
    run(GRPOTrainer, steps=4, iterations=4, lr=1e-3)
    want = Weights.steps[-1]
    _, _, d = run(GRPOTrainer, steps=4, iterations=4, lr=1e-3, kl_stop=1e9)
    assert torch.equal(want, Weights.steps[-1])
    kl = [r["kl_old/k3"] for r in d.state.log_history if "loss" in r]
    assert kl[0] < 1e-9 and 0 < kl[1] < kl[3], kl
    found = "a KL stop leaves the weights alone, one out of reach changes nothing"
    print(f"{WORLD} process(es): {found}")
    return {"stopped": marks, "kl": kl, "difference": worst}


def record():
    "Our record beside TRL's log: the same numbers."
    folder = FOLDER / "record"
    logged, _, trainer = run(GRPOTrainer, steps=3, record=folder)
    if trainer.accelerator.is_main_process:
        found = Run.open(folder)
        assert found.status["state"] == "finished"
        assert found.frame()["loss"].tolist() == logged["loss"]
        samples = found.samples().query("step == 3")
        assert {"prompt", "completion", "rewards/right", "advantage"} <= set(samples), list(samples)


def own_trainer(mode, steps):
    "The same task in our own trainer: its curve beside TRL's."
    policy = TokenPolicy.from_pretrained(DATA, max_new_tokens=10)
    tasks = Taskset.load(data_path("tasks/middle_train.jsonl"))[:400]
    sizes = {"train_batch_size": 8, "num_generations": 8, "steps": steps, "seed": 3}
    how = {"optimizer.lr": 1e-4, "optimizer.warmup": 0, "advantage.mode": mode}
    trainer = GRPO(policy, tasks, [right, short], sizes | how).fit()
    return [row["rewards/right/mean"] for row in trainer.history]


def curves(steps=30):
    "GRPO and GDPO: TRL's own, ours inside TRL, and our own trainer."
    own = {"grpo": {}, "gdpo": {"multi_objective_aggregation": "normalize_then_sum"}}
    found = {}
    for mode, given in own.items():
        found[f"{mode}, TRL"] = run(trl.GRPOTrainer, steps, given=given)[0]["right"]
        found[f"{mode}, ours in TRL"] = run(GRPOTrainer, steps, advantage=mode)[0]["right"]
        found[f"{mode}, our trainer"] = own_trainer(mode, steps)
    return found


def settings():
    "Every key of TRL's own configurations is read, or has a reason."
    kinds = trl.GRPOConfig, trl.ModelConfig, trl.ScriptArguments
    names = [f.name for kind in kinds for f in dataclasses.fields(kind) if f.init]
    for name in names:
        with contextlib.suppress(ValueError):  # "x" is none of the values
            said = config_from_trl({name: "x"}).left.get(name, "")
            assert not said.startswith("not a key"), name
    args = GRPOConfig(output_dir=str(FOLDER), use_cpu=True, bf16=False)
    whole = {f.name: getattr(args, f.name) for f in dataclasses.fields(args)}
    whole.pop("generation_batch_size")  # which follows from others
    default, spelt = (config_from_trl(x, num_tasks=1000).config for x in ({}, whole))
    assert default == spelt, (default, spelt)
    print(f"{len(names)} keys of TRL's configurations are read or have a reason; its defaults are")


class Alone:
    "One process, as TRL's loss asks for it."

    num_processes, sync_gradients = 1, True
    gather = gather_for_metrics = reduce = staticmethod(lambda x, reduction=None: x)


def their_loss(args, logp, old, ref, advantage, mask, entropy):
    "TRL's loss with these settings, of log-probs that are given."
    on, high = types.SimpleNamespace(training=True), args.epsilon_high
    self = types.SimpleNamespace(
        **vars(args) | {"epsilon_low": args.epsilon, "epsilon_high": args.epsilon if high is None else high, "args": args},
        aux_loss_enabled=False, model=on, accelerator=Alone, current_gradient_accumulation_steps=1,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)), _entropy_bonus_enabled=args.entropy_coef != 0,
        get_gamma_weights=trl.GRPOTrainer.get_gamma_weights, _get_per_token_logps_and_entropies=lambda *_, **__: (logp, entropy, None),
    )  # fmt: skip
    names = "completion_ids completion_mask prompt_ids prompt_mask".split()
    ids = {k: mask.long() for k in names}
    given = {"advantages": advantage, "old_per_token_logps": old, "ref_per_token_logps": ref}
    given["num_items_in_batch"] = mask.sum()
    return trl.GRPOTrainer._compute_loss(self, None, ids | given)


def losses(count=600):
    "Settings drawn at random, read as ours: our loss and its gradient are TRL's."
    rng, g, compared = random.Random(0), torch.Generator().manual_seed(0), 0
    kinds = {"grpo": {}, "bnpo": {}, "dr_grpo": {}, "dapo": {}, "cispo": {"epsilon_high": 5.0}, "luspo": {},
             "sapo": {"sapo_temperature_pos": 0.7}, "vespo": {"vespo_k_pos": 1.5, "vespo_lambda_neg": 2.5}}  # fmt: skip
    free = {"epsilon": 0.1, "epsilon_high": 1.5, "delta": 6.5, "beta": 0.3, "use_bias_correction_kl": False,
            "importance_sampling_level": "sequence", "max_completion_length": 16, "entropy_coef": 0.1}  # fmt: skip
    for kind in rng.choices([*kinds], k=count):
        told = {k: v for k, v in free.items() if rng.random() < 0.4}
        told |= kinds[kind] | {"loss_type": kind}
        if kind == "vespo":  # it averages the ratio itself
            told.pop("importance_sampling_level", 0)
        old = -torch.rand(12, 9, generator=g) - 0.1
        step, to_ref = torch.randn(2, 12, 9, generator=g) * rng.choice([0.1, 1.0])
        advantage = torch.randn(12, generator=g)
        mask = torch.arange(9) < torch.randint(1, 10, (12, 1), generator=g)
        read = config_from_trl(told)
        if any("entropy_coef" in note for note in read.notes):
            told.pop("entropy_coef")  # which is averaged otherwise, as the note says
        bonus = told.get("entropy_coef", 0)
        ours = dataclasses.replace(read.config.update.loss, entropy_coef=bonus)
        args = GRPOConfig(output_dir=str(FOLDER), use_cpu=True, bf16=False, **told)
        both, given = [], (advantage, mask)
        for theirs in (True, False):
            logp = (old + step).requires_grad_()
            loss = (
                their_loss(args, logp, old, old + to_ref, *given, -old)
                if theirs
                else policy_loss(logp, old, *given, ours, old + to_ref, entropy_NS=-old)[0]
            )
            both.append((loss.detach(), torch.autograd.grad(loss, logp)[0] * mask))
        for a, b in zip(*both):
            torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-9, msg=str(told))
        compared += 1
    print(f"{compared} losses of random settings equal TRL's in value and gradient")


def main():
    settings()
    torch.set_default_dtype(torch.float64)
    losses()
    torch.set_default_dtype(torch.float32)
    base, theirs, _ = run(trl.GRPOTrainer)
    ours, mine, _ = run(GRPOTrainer, advantage="grpo")
    worst = max((a - b).abs().max().item() for (a, _, _), (b, _, _) in zip(theirs, mine))
    off = max(abs(a - b) for a, b in zip(base["loss"], ours["loss"]))
    print("largest difference of advantages", worst, "of losses", off)
    assert worst < 1e-6 and off < 1e-6
    i = next(i for i, (_, rewards, _) in enumerate(mine) if rewards.isnan().any())  # one with None
    call = {"rewards": mine[i][1].tolist(), "advantages": theirs[i][0].tolist()}
    gdpo, seen, trainer = run(GRPOTrainer, advantage="gdpo")
    names, mode = ["right", "short"], AdvantageConfig(mode="gdpo", weights=[1.0, 1.0])
    for advantages, rewards, _ in seen:
        ids = torch.arange(len(rewards)) // 8
        want = compute_advantages(rewards, ids, names, mode).values
        at = trainer.accelerator.process_index * len(advantages)
        torch.testing.assert_close(advantages, want[at : at + len(advantages)], atol=1e-6, rtol=0)
    how = {"enable": True, "metric": "right", "max_num_gen_batches": 10, "on_cap": "train_partial"}
    filtered, seen, trainer = run(GRPOTrainer, advantage="grpo", filter_groups=how)
    by_group = [rewards[:, 0].view(-1, 8) for _, rewards, _ in seen]
    varied = [(r.amax(1) > r.amin(1)).float().mean().item() for r in by_group]
    assert all(len(a) == n for a, _, n in seen) and min(varied) == 1, varied
    logs = trainer._logs  # the table of completions holds the samples that were trained on
    noted = torch.tensor([list(logs["rewards"][k]) for k in names]).T
    ids = torch.arange(len(noted)) // 8
    want = compute_advantages(noted, ids, names, trainer._advantage).values
    torch.testing.assert_close(torch.tensor(list(logs["advantages"])), want, atol=1e-6, rtol=0)
    batches = trainer.state.log_history[0]["filter/num_gen_batches"]
    found = f"filtered batches are full and vary; first step took {batches:g} generations"
    print(f"{WORLD} process(es): {found}")
    drawn, stop = curriculum(), kl_stop()
    record()
    trainer.accelerator.wait_for_everyone()
    if len(sys.argv) > 1:
        runs = {"TRL": base, "grpo": ours, "gdpo": gdpo, "grpo, filtered": filtered}
        runs |= {"curriculum": drawn}
        versions = {m.__name__: m.__version__ for m in (trl, transformers, torch)}
        out = {
            "command": "make trl", "seed": 3, "versions": versions, "processes": WORLD, "runs": runs,
            "largest_difference_of_advantages": worst, "groups_that_vary": min(varied), "call": call, "kl_stop": stop, "curves": curves(),
        }  # fmt: skip
        with open(sys.argv[1], "w") as f:
            json.dump(out, f)
    if trainer.accelerator.is_main_process:
        shutil.rmtree(FOLDER)


if __name__ == "__main__":
    main()
