"""Peak memory and time of log-probs + backward with a real vocabulary (49152), ours beside the plain ways.

    python tests/bench/logp_memory.py [--modes ours full keep backbone] [--repeats 3]

Every measurement is a fresh process; modes alternate. Memory is the peak resident set during the measured passes minus that
just before them (model and gradients already there). The loss is the clipped ratio with token-mean weights.

  ours       TokenPolicy.logp: one pass, output layer in chunks
  ours_micro the same gradient in four backward passes of two rows each (UpdateConfig.micro_tokens)
  ours_again the same with policy.gradient_checkpointing: what is inside a layer is computed again
  full       logits of all positions       keep      logits of the completion only
  backbone   no output layer at all (the floor)
"""

import argparse
import json
import sys
import time

from common import ROOT, child, environment, median, peak_mb, reset_peak, rss_mb, save

KNOBS = dict(
    passes=3, threads=2, batch=8, prompt=128, completion=256, vocab=49152, layers=4, chunk=0
)


def measure(a):
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from grpo_nb.core import Rollout
    from grpo_nb.policies.tokens import TokenPolicy

    torch.set_num_threads(a.threads)
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=a.vocab,
            hidden_size=576,
            intermediate_size=1536,
            num_hidden_layers=a.layers,
            num_attention_heads=9,
            num_key_value_heads=3,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    how = {"chunk_tokens": a.chunk or None, "gradient_checkpointing": a.mode == "ours_again"}
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "data/tiny-llama")  # decodes nothing here
    policy = TokenPolicy(model, tokenizer, stop=[2], chat=False, **how)

    def batch(b, p, c):
        g = torch.Generator().manual_seed(1)
        prompt = torch.randint(3, a.vocab, (b, p), generator=g)
        completion = torch.randint(3, a.vocab, (b, c), generator=g)
        return Rollout(
            group_N=torch.arange(b),  # every prompt differs, so no prefix can be shared
            tasks=[None] * b,
            states={
                "prompt_ids": prompt,
                "prompt_len": torch.full((b,), p),
                "completion_ids": completion,
            },
            mask_NS=torch.ones(b, c, dtype=torch.bool),
            old_logp_NS=torch.zeros(b, c),
        )

    def grpo(lp, advantage, tokens):
        r = (lp - lp.detach()).exp()
        adv = advantage[:, None]
        return -torch.min(r * adv, r.clamp(0.8, 1.2) * adv).sum() / tokens

    def run(r):
        adv, tokens = torch.linspace(-1, 1, len(r)), int(r.mask_NS.sum())
        if a.mode.startswith("ours"):
            total = 0.0
            for rows in torch.arange(len(r)).split(2 if a.mode == "ours_micro" else len(r)):
                loss = grpo(policy.logp(r[rows]), adv[rows], tokens)
                loss.backward()
                total += float(loss.detach())
            return total
        ids = torch.cat([r.states["prompt_ids"], r.states["completion_ids"]], 1)
        c = r.mask_NS.shape[1]
        if a.mode == "backbone":
            lp = (
                model.model(input_ids=ids, use_cache=False)
                .last_hidden_state[:, -c - 1 : -1]
                .mean(-1)
            )
        else:
            kw = {"logits_to_keep": c + 1} if a.mode == "keep" else {}
            z = model(input_ids=ids, use_cache=False, **kw).logits[:, -c - 1 : -1]
            lp = torch.log_softmax(z.float(), -1).gather(-1, r.states["completion_ids"][..., None])[
                ..., 0
            ]
        loss = grpo(lp, adv, tokens)
        loss.backward()
        return float(loss.detach())

    run(batch(2, 8, 8))  # thread pools, buffers, gradients
    for p in model.parameters():
        p.grad.zero_()
    x = batch(a.batch, a.prompt, a.completion)
    base = rss_mb()
    reset_peak()
    times = []
    for _ in range(a.passes):
        start = time.process_time()
        loss = run(x)
        times.append(time.process_time() - start)
    norm = float(sum((p.grad**2).sum() for p in model.parameters()) ** 0.5) / a.passes
    print(
        json.dumps(
            dict(
                mode=a.mode,
                peak_minus_base_mb=round(peak_mb() - base, 1),
                s_median=round(median(times), 3),
                s_min=round(min(times), 3),
                loss=round(loss, 6),
                grad_norm=round(norm, 4),
            )
        )
    )


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument(
        "--modes", nargs="+", default=["ours", "ours_micro", "keep", "full", "backbone"]
    )
    ap.add_argument("--mode", default="", help=argparse.SUPPRESS)
    ap.add_argument("--repeats", type=int, default=3)
    ap.add_argument("--result", default="logp_memory", help="name of the file in results/")
    for k, v in KNOBS.items():
        ap.add_argument("--" + k, type=int, default=v)
    a = ap.parse_args()
    if a.mode:
        return measure(a)
    knobs = [x for k in KNOBS for x in (f"--{k}", getattr(a, k))]
    env, runs = environment(), []
    for _ in range(a.repeats):
        for mode in a.modes:
            runs.append(child([sys.executable, __file__, "--mode", mode, *knobs], cwd=ROOT))
            print(runs[-1], flush=True)
    rows = []
    for mode in dict.fromkeys(r["mode"] for r in runs):
        got = [r for r in runs if r["mode"] == mode]
        rows.append(
            {
                "path": {"ours_again": "ours, policy.gradient_checkpointing"}.get(mode, mode),
                "peak above baseline, MB": round(median(r["peak_minus_base_mb"] for r in got)),
                "forward + backward, CPU s (median)": round(median(r["s_median"] for r in got), 2),
                "best, CPU s": min(r["s_min"] for r in got),
            }
        )
    notes = (
        f"42.5 M parameters, vocabulary {a.vocab}, {a.batch} x ({a.prompt} + {a.completion}) tokens, fp32, {a.threads} threads, "
        f"median of {a.repeats} processes x {a.passes} passes, modes alternating."
    )
    save(a.result, "Peak memory of log-probs + backward", rows, env, notes, runs)


if __name__ == "__main__":
    main()
