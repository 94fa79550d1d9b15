"""Which models of transformers can be trained: each of its causal language models, built tiny, in a process of its own.

python tests/bench/architectures.py [--only llama,qwen3]

A model is sampled behind padding and from its cache, scored again and updated once; the reference is transformers' plain
forward of each sample alone.
"""

import argparse
import inspect
import multiprocessing
import os
import warnings

import common
import torch
from tqdm.auto import tqdm

LIMIT_S, MOST = 90, 30_000_000  # seconds and parameters of one model
LENGTHS = "max_position_embeddings n_positions max_seq_len".split()
LAYERS = "num_hidden_layers n_layer num_layers n_layers decoder_layers".split()
WIDTHS = "hidden_size n_embd d_model".split()
INNER = "intermediate_size ffn_dim decoder_ffn_dim ffn_hidden_size".split()
HEADS = "num_attention_heads n_head n_heads num_heads decoder_attention_heads".split()
SIZES = dict.fromkeys(LENGTHS, 64) | dict.fromkeys(LAYERS, 2) | dict.fromkeys(WIDTHS, 32)
SIZES |= dict.fromkeys(INNER, 48) | dict.fromkeys(HEADS, 4)
SIZES |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "tie_word_embeddings": False}
EXPERTS = "num_experts num_local_experts n_routed_experts moe_num_experts".split()
INSIDE = "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size".split()
SIZES |= dict.fromkeys(EXPERTS, 4) | dict.fromkeys(INSIDE, 16)
SIZES |= {
    "num_experts_per_tok": 2,
    "unpadded_vocab_size": 64,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
LATENT |= {"v_head_dim": 8, "num_key_value_heads": 4}
STATE = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
STATE |= {"mamba_chunk_size": 8}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8}
LINEAR |= {"linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
FITTED = dict.fromkeys("deepseek_v2 deepseek_v3 minicpm3 glm4_moe_lite".split(), LATENT)
FITTED |= dict.fromkeys("qwen3_next qwen3_5_text qwen3_5_moe_text".split(), LINEAR)
FITTED |= dict.fromkeys("gpt_oss gemma3_text cohere2 exaone4 olmo3".split(), WINDOW)
FITTED |= dict.fromkeys(("gptj", "codegen"), {"rotary_dim": 4}) | {
    "bamba": STATE | {"attn_layer_indices": [1]},
    "falcon_h1": STATE | {"mamba_d_ssm": 32, "mamba_d_head": 8},
    "granitemoehybrid": STATE | {"layer_types": ["mamba", "attention"]},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
    | {"chunk_size": 8, "hybrid_override_pattern": "M*"},
    "llama4_text": {
        "intermediate_size_mlp": 32,
        "attention_chunk_size": 4,
        "no_rope_layers": [1, 0],
    }
    | {"layer_types": ["chunked_attention", "full_attention"]},
}


def build(kind, tokenizer):
    "A tiny model of this kind; keys that its configuration refuses are left at their defaults."
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    ids = {k: getattr(tokenizer, k) for k in ("bos_token_id", "eos_token_id")}
    given, own = SIZES | {"vocab_size": max(len(tokenizer), 64)} | ids, FITTED.get(kind, {})
    while True:
        try:
            config = CONFIG_MAPPING[kind](**given | own)
            break
        except Exception as e:
            odd = [k for k in given if k in str(e)]
            if not odd:
                raise
            given.pop(odd[0])
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if size > MOST:
        raise ValueError(f"{size:,} parameters")
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


@torch.no_grad()
def plain_logp(model, prompt, completion):
    "Log-probs of a completion by one forward of prompt and completion, without padding and cache."
    ids = torch.cat([prompt, completion])
    takes = inspect.signature(model.forward).parameters
    logits = model(
        input_ids=ids[None], **{"use_cache": False} if "use_cache" in takes else {}
    ).logits
    logp = logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return logp.gather(1, completion[:, None])[:, 0]


def train(kind):
    "What became of it, and how far its log-probs are from the reference."
    from grpo_nb.all import Taskset, TokenPolicy, seeded, update
    from grpo_nb.policies.loading import load_model

    torch.set_num_threads(1)
    _, tokenizer = load_model("data:tiny-llama")
    prompts = [torch.tensor(tokenizer(x).input_ids) for x in ("<bos>1+1=", "<bos>23-17+4=")]
    try:
        model = build(kind, tokenizer)
        plain_logp(model, *prompts)
    except Exception as e:
        return "not built", f"{type(e).__name__}: {' '.join(str(e).split()):.90}"
    tasks = Taskset.load([{"prompt": tokenizer.decode(x), "answer": "1"} for x in prompts])[:]
    try:
        policy = TokenPolicy(model, tokenizer, max_new_tokens=8)
        r = policy.sample(tasks, 3, seeded(0))
    except ValueError as e:
        return ("refused" if "cannot be sampled" in str(e) else "failed"), str(e)
    off = (policy.logp(r).detach() - r.old_logp_NS)[r.mask_NS].abs().max()
    for i, ok_S in enumerate(r.mask_NS):
        want = plain_logp(model, prompts[i // 3], r.states["completion_ids"][i, ok_S])
        off = max(off, (want - r.old_logp_NS[i, ok_S]).abs().max())
    before = [p.detach().clone() for p in policy.parameters()]
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    update(policy, r, torch.tensor([1.0, 0, -1] * 2), optimizer)
    moved = any(not torch.equal(a, b) for a, b in zip(before, policy.parameters()))
    return ("trains" if off < 1e-4 and moved else "differs"), float(off)


def attempt(kind, found):
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # of transformers: hints to kernels
    try:
        found.put(train(kind))
    except Exception as e:
        found.put(("failed", f"{type(e).__name__}: {' '.join(str(e).split()):.90}"))


def main():
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as NAMES

    import grpo_nb.all  # noqa: F401 (loaded once, before the processes divide)

    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--only", default="", help="names, with commas")
    asked, results = [k for k in ap.parse_args().only.split(",") if k], {}
    fork = multiprocessing.get_context("fork")
    for kind in tqdm(asked or sorted(NAMES)):
        found = fork.SimpleQueue()
        process = fork.Process(target=attempt, args=(kind, found))
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
        late = ("not built", f"not done after {LIMIT_S} s")
        results[kind] = late if found.empty() else found.get()
    if asked:
        print(*results.items(), sep="\n")
        return
    of = lambda state: sorted(k for k, v in results.items() if v[0] == state)
    states = "trains refused differs failed".split()
    rows = [{"": k, "models": len(of(k)), "which": ", ".join(of(k))} for k in states]
    worst = max(v[1] for v in results.values() if v[0] == "trains")
    notes = f"""Of {len(results)} causal language models that transformers knows, {len(of("not built"))} were not built: parts of models
for pictures or sound, or no tiny configuration was found. Log-probs of what trains are at most {worst:.2g} from those of
transformers' forward without padding and cache, in float32. What is refused is refused before anything is trained, in one
line that says what is off: mostly models without a cache, or whose state depends on padding."""
    title = "Models of transformers, built tiny: sampled, scored again, updated"
    common.save("architectures", title, rows, common.environment(), notes, results)


if __name__ == "__main__":
    main()
