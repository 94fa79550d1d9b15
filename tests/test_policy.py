"Token policies: padding, packing, prefix sharing, chunking and decoding on several architectures."

import copy
import warnings
from types import SimpleNamespace

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

from grpo_nb.core import concat, seeded
from grpo_nb.lab.recipe import load_config
from grpo_nb.lab.session import check_resume
from grpo_nb.policies.decoding import Decoder, LlamaDecoder, head_logp, shape_logits
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.tasks import Taskset, data_path
from grpo_nb.trainer import GRPO
from grpo_nb.update import UpdateConfig, check_on_policy, update

SIZE = dict(
    vocab_size=55, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4
)
EDGE = dict(max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
MODELS = {
    "llama": LlamaConfig(**SIZE, **EDGE, num_key_value_heads=4, tie_word_embeddings=True),
    "llama_gqa": LlamaConfig(**SIZE, **EDGE, num_key_value_heads=2, attention_bias=True),
    "qwen2": Qwen2Config(**SIZE, **EDGE, num_key_value_heads=2),
    "mistral": MistralConfig(**SIZE, **EDGE, num_key_value_heads=2, sliding_window=None),
    "mistral_window": MistralConfig(**SIZE, **EDGE, num_key_value_heads=2, sliding_window=4),
    "gemma2_cap": Gemma2Config(
        **SIZE,
        **EDGE,
        num_key_value_heads=2,
        head_dim=8,
        final_logit_softcapping=5.0,
        sliding_window=4096,
    ),
    "gpt2_dropout": GPT2Config(
        vocab_size=55,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=2,
        resid_pdrop=0.5,
    ),
}
TASKS = [
    SimpleNamespace(prompt=p, columns={})
    for p in ("<bos>1+2=", "<bos>12-25+4=", "<bos>7=", "<bos>1+2=")
]


@pytest.fixture(scope="module")
def tokenizer():
    return TokenPolicy.from_pretrained(data_path("tiny-llama")).tokenizer


@pytest.fixture(scope="module", params=list(MODELS))
def policy(request, tokenizer):
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(MODELS[request.param], dtype=torch.float32)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.25, generator=seeded(0, "init")) if p.ndim > 1 else None
    return TokenPolicy(model, tokenizer, max_new_tokens=8, stop=[2, 20, 21])


def changed(policy, **kw):
    other = copy.copy(policy)
    vars(other).update(kw)
    return other


def gradient(policy, rollout):
    policy.model.zero_grad()
    lp = policy.logp(rollout)
    (lp * torch.randn(lp.shape, generator=seeded(0, "w"))).sum().backward()
    return lp.detach(), torch.cat(
        [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    )


def alone(policy, rollout, i):
    "Log-probs of one row by the plain model without padding, cache or sharing."
    n, m = int(rollout.states["prompt_len"][i]), int(rollout.lengths_N[i])
    ids = torch.cat([rollout.states["prompt_ids"][i, :n], rollout.states["completion_ids"][i, :m]])[
        None
    ]
    with torch.no_grad():
        z = policy.model(input_ids=ids).logits[0, n - 1 : -1]
    z = shape_logits(z, policy.temperature, policy.top_k, policy.top_p, keep=ids[0, n:])
    return torch.log_softmax(z, -1).gather(1, ids[0, n:, None])[:, 0]


def test_sampled_scored_and_plain_log_probs_agree(policy):
    r = policy.sample(TASKS, 4, seeded(0, "s"))
    assert check_on_policy(policy, r, tol=1e-4) < 1e-4
    for i in range(len(r)):
        torch.testing.assert_close(
            r.old_logp_NS[i, : r.lengths_N[i]], alone(policy, r, i), atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize(
    "kw", [{"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}]
)
def test_sampler_options_are_in_the_score(policy, kw):
    p = changed(policy, **kw)
    r = p.sample(TASKS, 3, seeded(1, "s"))
    for i in range(0, len(r), 3):
        torch.testing.assert_close(
            r.old_logp_NS[i, : r.lengths_N[i]], alone(p, r, i), atol=1e-4, rtol=1e-4
        )
    assert check_on_policy(p, r, tol=1e-4) < 1e-4


def test_sharing_batching_and_shrinking_change_nothing(policy):
    base = policy.sample(TASKS, 5, seeded(2, "s"))
    for kw in (
        {"share_prefix": False},
        {"shrink": 0.0},
        {"shrink": 1.0},
        {"max_rows": 3},
        {"fast": False},
    ):
        r = changed(policy, **kw).sample(TASKS, 5, seeded(2, "s"))
        assert torch.equal(r.states["completion_ids"], base.states["completion_ids"]), kw
        torch.testing.assert_close(r.old_logp_NS, base.old_logp_NS, atol=1e-4, rtol=1e-4)


def test_prefix_sharing_and_chunks_give_equal_gradients(policy):
    r = policy.sample(TASKS, 5, seeded(3, "s"))
    lp, grad = gradient(policy, r)
    for kw in ({"share_prefix": False}, {"chunk_tokens": 1}, {"chunk_tokens": 7}):
        other, g = gradient(changed(policy, **kw), r)
        torch.testing.assert_close(other, lp, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(g, grad, atol=2e-4, rtol=1e-3)


def test_padding_order_and_company_change_nothing(policy):
    r = policy.sample(TASKS, 4, seeded(4, "s"))
    lp = policy.logp(r).detach()
    order = torch.randperm(len(r), generator=seeded(0, "o"))  # interleaved groups
    torch.testing.assert_close(policy.logp(r[order]).detach(), lp[order], atol=1e-5, rtol=1e-4)
    wide = concat(
        [r, changed(policy, max_new_tokens=12).sample(TASKS, 2, seeded(5, "s"))]
    )  # more padding
    torch.testing.assert_close(
        policy.logp(wide).detach()[: len(r), : lp.shape[1]], lp, atol=1e-5, rtol=1e-4
    )
    for i in (0, 5, 15):
        got = policy.logp(r[i]).detach()[0, : r.lengths_N[i]]
        torch.testing.assert_close(got, lp[i, : r.lengths_N[i]], atol=1e-5, rtol=1e-4)


def test_fast_decoder_is_used_where_it_fits(policy):
    with torch.no_grad():
        kind = type(policy.network.decoder())
    known = type(policy.model).__name__ in (
        "LlamaForCausalLM",
        "Qwen2ForCausalLM",
        "MistralForCausalLM",
    )
    window = getattr(policy.model.config, "sliding_window", None) == 4
    assert kind is (LlamaDecoder if known and not window else Decoder)


def test_stop_token_is_in_the_mask_and_nothing_after_it(policy):
    r = policy.sample(TASKS, 8, seeded(8, "s"))
    ids, mask = r.states["completion_ids"], r.mask_NS
    stop = torch.isin(ids, torch.tensor(policy.stop)) & mask
    last = torch.zeros_like(mask).scatter(1, r.lengths_N[:, None] - 1, True)
    assert (stop & ~last).sum() == 0  # a stop token is always the last
    assert torch.equal(r.info["truncated"], ~(stop & last).any(1))
    assert (r.lengths_N[r.info["truncated"]] == policy.max_new_tokens).all()
    assert all(
        policy.tokenizer.decode([s]) not in text
        for s in policy.stop
        for text in r.outputs
        if s != 20
    )


def test_outputs_show_special_tokens_so_that_padding_inside_an_answer_is_no_answer(policy):
    tokenizer = policy.tokenizer
    ids = tokenizer("4<pad>2")["input_ids"]
    assert tokenizer.convert_tokens_to_ids("<pad>") in ids
    ids_NS = torch.tensor([[*ids, policy.stop[0]]])
    assert policy.decode(ids_NS, torch.ones_like(ids_NS, dtype=torch.bool)) == ["4<pad>2"]


def test_zero_learning_rate_leaves_every_ratio_at_one(policy):
    r = policy.sample(TASKS, 4, seeded(9, "s"))
    adv = torch.randn(len(r), generator=seeded(0, "a"))
    opt = torch.optim.AdamW(policy.parameters(), 0.0)
    config = UpdateConfig(num_epochs=3, minibatch_size=8, micro_tokens=20)
    for row in update(policy, r, adv, opt, config, generator=seeded(0, "mb")).rows:
        assert abs(row["ratio/min"] - 1) < 1e-4 and abs(row["ratio/max"] - 1) < 1e-4
        assert row["clip_ratio/region_mean"] == 0 and row["kl_old/k3"] < 1e-8


def test_leaving_out_zero_advantages_is_exact(policy):
    r = policy.sample(TASKS, 4, seeded(10, "s"))
    adv = torch.randn(len(r), generator=seeded(0, "a"))
    adv[:4] = 0  # a group without signal
    grads = []
    for skip in (True, False):
        p = copy.deepcopy(policy)
        opt = torch.optim.SGD(p.parameters(), 1.0)
        before = torch.cat([q.detach().flatten() for q in p.parameters()])
        got = update(p, r, adv, opt, UpdateConfig(skip_zero_advantage=skip, max_grad_norm=None))
        grads.append(before - torch.cat([q.detach().flatten() for q in p.parameters()]))
        assert got.rows[0]["n_scored"] == (12 if skip else 16)
    torch.testing.assert_close(*grads, atol=1e-5, rtol=1e-3)


def test_half_precision_scores_in_fp32(tokenizer):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS["llama"], dtype=torch.bfloat16)
    p = TokenPolicy(model, tokenizer, max_new_tokens=6)
    r = p.sample(TASKS, 3, seeded(0, "s"))
    lp = p.logp(r)
    assert lp.dtype == r.old_logp_NS.dtype == torch.float32
    assert (lp.detach() - r.old_logp_NS).abs().max() < 0.1


def test_head_logp_peak_memory_does_not_grow_with_the_number_of_tokens():
    "The largest tensor that is allocated is one chunk of logits."
    seen = []
    real = torch.Tensor.new_empty
    try:
        torch.Tensor.new_empty = lambda self, size, **kw: (
            seen.append(size),
            real(self, size, **kw),
        )[1]
        h, w = torch.randn(500, 8, requires_grad=True), torch.randn(3000, 8, requires_grad=True)
        head_logp(h, w, torch.zeros(500, dtype=torch.long), chunk=16).sum().backward()
    finally:
        torch.Tensor.new_empty = real
    assert seen and all(s[0] <= 16 for s in seen)


def test_lora_starts_as_the_model_trains_only_its_additions_and_merges(tmp_path):
    base = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=6)
    p = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=6, lora={"r": 4})
    tasks = list(Taskset.load(data_path("tasks/middle_train.jsonl"))[:4])
    a, b = (x.sample(tasks, 4, seeded(0, "s")) for x in (base, p))
    assert torch.equal(a.states["completion_ids"], b.states["completion_ids"])
    torch.testing.assert_close(a.old_logp_NS, b.old_logp_NS, atol=1e-5, rtol=0)
    before = {k: v.clone() for k, v in p.model.state_dict().items()}
    halves = lambda completions, **columns: [float(i % 2) for i in range(len(completions))]
    config = load_config(None, ["steps=3", "optimizer.lr=1e-2", "optimizer.warmup=0", "train_batch_size=4", "num_generations=4", "run.progress=false", "update.loss.kl_coef=0.1"])  # fmt: skip
    GRPO(p, tasks, {"halves": halves}, config).fit()
    changed = {k for k, v in p.model.state_dict().items() if not torch.equal(v, before[k])}
    assert changed == set(p.state_dict())
    r = p.sample(tasks, 4, seeded(1, "s"))
    assert check_on_policy(p, r) < 1e-4
    p.save_pretrained(tmp_path / "m")
    plain = TokenPolicy.from_pretrained(tmp_path / "m", max_new_tokens=6)
    assert not plain.lora and not any("lora_" in k for k in plain.state_dict())
    torch.testing.assert_close(plain.logp(r), p.logp(r), atol=1e-4, rtol=0)
    assert (plain.logp(r) - base.logp(r)).abs().max() > 1e-2


def test_a_lora_run_resumes_with_the_same_bytes(tmp_path):
    more = ["policy.lora={r: 2}", "run.progress=false", "policy.max_new_tokens=6", "num_generations=4", "train_batch_size=4"]  # fmt: skip
    make = lambda d: GRPO.from_config(load_config(None, [*more, f"run.dir={d}"]))
    where = check_resume(make, 3, tmp_path, cuts=[1])
    (newest, *_) = (where / "checkpoints").glob("step_*")
    assert (newest / "policy.safetensors").stat().st_size < 200_000  # not the 3.4 MB of the model


def test_autocast_computes_in_bfloat16_and_scores_in_float32():
    p = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=6, autocast="bfloat16")
    full = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=6)
    tasks = list(Taskset.load(data_path("tasks/middle_train.jsonl"))[:4])
    r = p.sample(tasks, 4, seeded(0, "s"))
    logp = p.logp(r)
    assert logp.dtype == r.old_logp_NS.dtype == torch.float32
    own, other = (logp - r.old_logp_NS)[r.mask_NS], (logp - full.logp(r))[r.mask_NS]
    assert own.abs().max() < 0.1 and 1e-4 < other.abs().max() < 0.3
    logp[r.mask_NS].sum().backward()
    grads = [w.grad for w in p.parameters()]
    assert all(g is not None and g.dtype == torch.float32 for g in grads)
    with pytest.raises(ValueError, match="autocast must be"):
        TokenPolicy(p.model, p.tokenizer, autocast="float16")
