"""Rollouts by a real vLLM server: `make vllm` starts one with the tiny model, checks it, and trains with it.

python tests/peers/inside_vllm.py .venv-vllm/bin/python OUT.json
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import httpx
import torch

import grpo_nb.lab.recipe  # noqa: F401 (GRPO.from_config)
from grpo_nb.core import seeded
from grpo_nb.integrations.vllm import VLLM
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO

TINY = str(data_path("tiny-llama"))
TINY_FLAGS = ("--max-model-len", "64", "--served-model-name", "tiny")
TASKS = Taskset.load(data_path("tasks/middle_train.jsonl"))
KEYS = {"policy.max_new_tokens": 10, "train_batch_size": 16, "num_generations": 8, "steps": 40}
KEYS |= {"optimizer.lr": 1e-4, "optimizer.warmup": 2, "run.progress": False}
KEYS |= {"eval.samples": 8, "eval.limit": 100, "threads": 1}


@contextlib.contextmanager
def serving(python, model, *flags, dtype="float32"):
    "The address of a server, and its process."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}  # fmt: skip
    env.pop("PYTHONPATH", None)
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--dtype", dtype, "--enforce-eager", "--logprobs-mode", "processed_logprobs"]
    command += ["--host", "127.0.0.1", "--port", str(port), *flags]
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        try:
            yield f"http://127.0.0.1:{port}", server
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
            server.kill()


def difference(r) -> dict:
    diff = (r.old_logp_NS - r.states["sampler_logp"])[r.mask_NS].abs()
    return {"mean": diff.mean().item(), "max": diff.max().item(), "tokens": int(r.mask_NS.sum())}


def same_log_probs(url) -> dict:
    "Before and after new weights, at several temperatures and filters."
    found = {}
    for name, options in {
        "plain": {},
        "temperature .5": {"temperature": 0.5},
        "temperature .7, top_k 5, top_p .9": {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    }.items():
        p = TokenPolicy.from_pretrained(TINY, max_new_tokens=10, engine=VLLM(url), **options)
        first = p.sample(TASKS[:32], 8, seeded(0))
        with torch.no_grad():
            for q in p.parameters():
                q.mul_(1.03)  # every tensor, the shared embedding too
        second = p.sample(TASKS[:32], 8, seeded(0))
        again = p.sample(TASKS[:32], 8, seeded(0))
        same = torch.equal(second.states["completion_ids"], again.states["completion_ids"])
        found[name] = {"start": difference(first), "reloaded": difference(second)}
        found[name]["same again"] = same
        for r in (first, second):
            assert difference(r)["mean"] < 1e-5 and difference(r)["max"] < 1e-4, found
    return found


def stale(url, steps=12) -> dict:
    "Mean difference in each step, and what it is if the server keeps the weights of the start."
    found = {}
    for name in ("new weights", "weights of the start"):
        engine = VLLM(url, tol=10.0)
        p = TokenPolicy.from_pretrained(TINY, max_new_tokens=10, engine=engine)
        if name != "new weights":
            engine.give_weights(p)
            engine.give_weights = lambda policy, e=engine: e._weights_there()
        trainer = GRPO.from_config(KEYS | {"steps": steps, "eval.every": 0}, policy=p)
        trainer.fit()
        found[name] = [row["sampling/sampling_logp_difference/mean"] for row in trainer.history]
    return found


def one_ahead(url, steps=10) -> dict:
    "Every batch but the first is drawn while the one before is trained on: how far its weights are."
    engine = {"kind": "vllm", "url": url, "max_staleness": 1}
    trainer = GRPO.from_config(KEYS | {"steps": steps, "eval.every": 0, "policy.engine": engine})
    trainer.fit()
    names = {"staleness": "staleness", "apart": "sampling_logp_difference/mean"}
    found = {k: [row[f"sampling/{v}"] for row in trainer.history] for k, v in names.items()}
    assert found["staleness"] == [0, *[1] * (steps - 1)], found
    assert found["apart"][0] < 1e-5 < min(found["apart"][2:]), found  # the first update warms up
    assert max(found["apart"]) < 0.5, found  # one update, not many
    assert trainer.policy_version == steps and trainer.policy.engine.ahead is None
    return found


def learning(url, seeds=3) -> dict:
    "The same recipe with the server and with our own sampler: passes while training, held-out before and after."
    found = {}
    for name, engine in (("vLLM", {"kind": "vllm", "url": url}), ("ours", None)):
        for seed in range(seeds):
            own = {"seed": seed, "policy.engine": engine, "eval.every": 0}
            trainer = GRPO.from_config(KEYS | own)
            start = time.perf_counter()
            before = trainer.evaluate().metrics()
            trainer.fit()
            after = trainer.evaluate().metrics()
            run = {"seed": seed, "seconds": round(time.perf_counter() - start, 1)}
            run["before"], run["after"] = (m["eval_sampled"] for m in (before, after))
            run["reward"] = [row["reward"] for row in trainer.history]
            found.setdefault(name, []).append(run)
            print(name, run["seed"], run["before"], run["after"], run["seconds"], flush=True)
    return found


def lost(python) -> dict:
    "A server whose engine a folder that is not there has ended."
    with serving(python, TINY, *TINY_FLAGS) as (url, _):
        p = TokenPolicy.from_pretrained(TINY, max_new_tokens=10, engine=VLLM(url, wait_s=300))
        want = p.sample(TASKS[:8], 4, seeded(0)).states["completion_ids"]
        bad = {"method": "reload_weights", "kwargs": {"weights_path": "/nowhere"}}
        status = httpx.post(f"{url}/collective_rpc", json=bad, timeout=60).status_code
        p.engine.config.wait_s = 5.0
        try:
            p.sample(TASKS[:8], 4, seeded(0))
            told = ""
        except ConnectionError as e:
            told = str(e)
    return {"status": status, "told": told.replace(url, "URL"), "tokens": int(want.numel())}


def main(python, out=None):
    torch.set_num_threads(int(os.environ.get("THREADS", 2)))
    found = {"command": "make vllm", "versions": {}}
    for name in ("torch", "transformers", "httpx"):
        found["versions"][name] = metadata.version(name)
    parts = {"log-probs": same_log_probs, "stale": stale, "one ahead": one_ahead}
    parts["learning"] = learning
    with serving(python, TINY, *TINY_FLAGS) as (url, _):
        VLLM(url, wait_s=1800).wait()
        found["versions"]["vllm-cpu"] = httpx.get(f"{url}/version").json()["version"]
        for name, part in parts.items():
            found[name] = part(url)
            print(name, json.dumps(found[name]), flush=True)
    sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
    from vllm_speed import speed

    for name, part in {"lost": lost, "speed": partial(speed, serving, difference)}.items():
        found[name] = part(python)
        print(name, json.dumps(found[name]), flush=True)
    if out:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    mean = lambda runs, what: sum(r[what] for r in runs) / len(runs)
    after = {k: mean(v, "after") for k, v in found["learning"].items()}
    gain = {k: after[k] - mean(v, "before") for k, v in found["learning"].items()}
    print("held-out passes after training", after, "gained", gain)
    assert min(gain.values()) > 0
    assert abs(after["vLLM"] - after["ours"]) < 0.06  # 4 standard errors: 800 samples, 3 seeds
    curves = [torch.tensor([r["reward"] for r in v]).mean(0) for v in found["learning"].values()]
    apart = (curves[0] - curves[1]).mean().abs()
    print(f"reward while training, mean over steps and seeds: {apart:.3f} apart")
    assert apart < 0.05


if __name__ == "__main__":
    main(*sys.argv[1:])
