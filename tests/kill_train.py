"""Trains in forked children that are killed at random moments until the run is done, and compares with a run that never stopped.

`main` prints one JSON line for each variant; its process must have no threads.
"""

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import test_diffusion
import torch
from resumed import row_differences, state_differences

from grpo_nb.lab import checkpoint, session
from grpo_nb.lab.checkpoint import checkpoints, latest, read_state
from grpo_nb.lab.recipe import load_config
from grpo_nb.trainer import GRPO

COMMON = ["run.progress=false", "num_generations=4", "train_batch_size=4", "steps=3", "threads=1",
          "checkpoint.every=1", "checkpoint.seconds=0.01", "run.samples_every=1", "run.if_exists=resume",
          "tasks.train=data:tasks/middle_dev.jsonl", "tasks.eval=data:tasks/easy_eval.jsonl"]  # fmt: skip
VARIANTS = {
    "epochs": ["update.loss.kl_coef=0.01", "optimizer.schedule=cosine", "update.num_epochs=3", "update.minibatch_size=8", "update.kl_stop.target=0.001", "advantage.mode=gdpo"],
    "filter": ["num_generations=8", "filter_groups.enable=true", "filter_groups.surplus=carry", "filter_groups.max_staleness=2", "tasks.selector=thompson"],
    "curriculum": ["num_generations=8", "tasks.selector=greso", "filter_groups.enable=true", "eval.every=2", "eval.limit=4", "eval.samples=2"],
    "workers": ["rewards.run.workers=1"],
}  # fmt: skip


def length_mod(completion, **columns):
    return (len(completion) % 3) / 2


def make(variant, folder):
    if variant == "diffusion":
        return diffusion(folder)
    if variant == "ranking":
        return ranking(folder)
    own = [*VARIANTS[variant], "policy.max_new_tokens=8", f"run.dir={folder}"]
    config = load_config(None, [*COMMON, *own])
    rewards = {"length": length_mod}
    if variant in ("epochs", "workers"):
        rewards["ends"] = lambda completion, **columns: float(completion[-1:] in "0123")
    return GRPO.from_config(config, rewards=rewards)


def diffusion(folder):
    "Latent trajectories: three epochs over the steps."
    policy = test_diffusion.make("flow", reduce="mean")
    more = ["update.num_epochs=3", "update.minibatch_size=8", "filter_groups.enable=true"]
    config = load_config(None, [*COMMON, *more, "optimizer.lr=1e-2", f"run.dir={folder}"])
    tasks = [{"prompt": f"task {i}", "goal": [0.5 * i, 1.0, -1.0]} for i in range(9)]
    left = lambda completion, **columns: -float(completion[:, 0].mean())
    return GRPO(policy, tasks, {"left": left}, config)


def ranking(folder):
    "Lists of films, rewards per rank, advantages on the tokens of each item."
    sys.path.insert(0, str(Path(__file__).parents[1] / "data" / "build"))
    import movielens_task as films

    from grpo_nb.applications import movielens as ml
    from grpo_nb.ranking import make_relevance_reward, make_safety_reward

    task = folder.parent / "task"
    if not task.exists():
        warm = films.WarmStart(hidden=32, layers=1, steps=30, batch=16, lr=5e-3)
        films.build_task(task, films.load_movies(60, "generated"), warm)
    task = ml.load_task(task)
    policy = ml.RankingPolicy(task.model, task.tokenizer, task.parser, max_new_tokens=28)
    rewards = {
        "relevance": make_relevance_reward(task.parser, "exp_inf"),
        "safety": make_safety_reward(task.parser, task.oracle),
    }
    loss = ["update.loss.level=item", "update.loss.aggregation=seq_mean_item_mean"]
    more = ["update.num_epochs=2", "advantage.mode=gdpo", f"run.dir={folder}"]
    config = load_config(None, [*COMMON, *loss, *more])
    return GRPO(policy, task.train, rewards, config, task.eval[:4])


def train(variant, folder, suicide=None):
    t = make(variant, folder)
    if suicide is not None:
        die_at(suicide)
    t.fit()
    t.close()


def die_at(n):
    "Kill this process at the n-th step of writing checkpoints."
    calls = [0]

    def count(f):
        def g(*a, **k):
            calls[0] += 1
            if calls[0] == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return f(*a, **k)

        return g

    for name in ("_to_disk", "sha256", "_write_state", "_seal", "pack"):
        setattr(checkpoint, name, count(getattr(checkpoint, name)))
    session.prune = count(session.prune)
    checkpoint.shutil.rmtree = count(checkpoint.shutil.rmtree)


def child(*args):
    "Fork; the child trains and ends with 0."
    pid = os.fork()
    if pid:
        return pid
    try:
        with warnings.catch_warnings(action="ignore"):
            train(*args)
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main(folder, kills, variants):
    torch.set_num_threads(1)
    for variant in variants:
        (folder / variant).mkdir()
        kill_and_compare(variant, folder / variant, kills)


def kill_and_compare(variant, folder, kills):
    rng = random.Random(0)
    whole, cut = folder / "whole", folder / "cut"
    make(variant, folder / "warm").fit(2).close()  # what is done once, before the forks
    start = time.monotonic()
    assert os.waitpid(child(variant, whole), 0)[1] == 0
    span, killed, by_suicide, done, seen = time.monotonic() - start, 0, 0, False, set()
    rounds = 0
    while not done:
        rounds += 1
        enough = killed >= kills and by_suicide and len(seen) > 1
        own = not enough and rounds % 3 == 0
        pid = child(variant, cut, rng.randrange(1, 40) if own else None)
        deadline = time.monotonic() + (1e9 if enough or own else rng.uniform(0, 0.5) * span)
        while True:
            got, status = os.waitpid(pid, os.WNOHANG)
            if got:
                break
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
                status = os.waitpid(pid, 0)[1]
                break
            time.sleep(0.002)
        if os.WIFSIGNALED(status):
            killed += 1
            by_suicide += own
            with warnings.catch_warnings(action="error"):
                at = latest(cut / "checkpoints")
            seen.add(at and at.name)
        elif os.WEXITSTATUS(status):
            raise SystemExit(f"{variant}: the child failed")
        elif not enough:  # done too early: once more from the beginning
            cut.rename(folder / f"done{rounds}")
        else:
            done = True
    root = cut / "checkpoints"
    assert sorted(p.name for p in root.iterdir()) == sorted(p.name for p in checkpoints(root))
    compare(whole, cut)
    for other in folder.glob("done*"):
        compare(whole, other)
    told = {"variant": variant, "kills": killed, "in_save": by_suicide, "rounds": rounds}
    print(json.dumps(told | {"resumed_from": len(seen)}))


def compare(a, b):
    "The last checkpoint, metrics and samples are the same, but for times."
    one, two = (read_state(latest(p / "checkpoints")) for p in (a, b))
    del one["trainer"]["config"], two["trainer"]["config"]  # which names the folder
    odd = state_differences(one, two) + row_differences(a, b)
    assert not odd, odd[:8]
