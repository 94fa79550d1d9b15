"Token policies: padding, packing, prefix sharing, chunking and decoding on several architectures."

import copy
import dataclasses
import json
import pickle
import re
import shutil
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import peft
import pytest
import torch
from huggingface_hub import HfApi, constants
from resumed import check_resume
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, Lfm2Config, LlamaConfig
from transformers import Gemma3Config, HunYuanMoEV1Config, MistralConfig, MixtralConfig, OPTConfig
from transformers import Qwen2Config

from grpo_nb.all import GRPO, TokenPolicy, check_on_policy, concat, load_config, seeded, update
from grpo_nb.policies.decoding import _Decoder, _LlamaDecoder, _shape_logits
from grpo_nb.policies.loading import load_model
from grpo_nb.tasks import Taskset, data_path

SIZE = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(vocab_size=55, num_key_value_heads=2, max_position_embeddings=64)
SIZE |= dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
MIXED = dict(layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False)
MODELS = {
    "llama": LlamaConfig(**SIZE | {"num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama_gqa": LlamaConfig(**SIZE, attention_bias=True),
    "qwen2": Qwen2Config(**SIZE),
    "mistral": MistralConfig(**SIZE, sliding_window=None),
    "mistral_window": MistralConfig(**SIZE, sliding_window=4),
    "gemma2_cap": Gemma2Config(**SIZE, head_dim=8, final_logit_softcapping=5.0),
    "lfm2_convolutions": Lfm2Config(**SIZE, **MIXED),
    "gpt2_dropout": GPT2Config(**SIZE, resid_pdrop=0.5),
}
PROMPTS = ("<bos>1+2=", "<bos>12-25+4=", "<bos>7=", "<bos>1+2=")
TASKS = [SimpleNamespace(prompt=p, columns={}) for p in PROMPTS]


@pytest.fixture(scope="module")
def tokenizer():
    return TokenPolicy.from_pretrained(data_path("tiny-llama")).tokenizer


@pytest.fixture(scope="module", params=list(MODELS))
def policy(request, tokenizer):
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
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
    grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return lp.detach(), torch.cat(grads)


def alone(policy, rollout, i):
    "Log-probs of one row by the plain model without padding, cache or sharing."
    n, m = int(rollout.states["prompt_len"][i]), int(rollout.lengths_N[i])
    parts = rollout.states["prompt_ids"][i, :n], rollout.states["completion_ids"][i, :m]
    ids = torch.cat(parts)[None]
    with torch.no_grad():
        z = policy.model(input_ids=ids).logits[0, n - 1 : -1]
    z = _shape_logits(z, policy.temperature, policy.top_k, policy.top_p, keep=ids[0, n:])
    return torch.log_softmax(z, -1).gather(1, ids[0, n:, None])[:, 0]


@pytest.mark.parametrize(
    "kw", [{}, {"temperature": 0.6}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}]
)
def test_sampled_scored_and_plain_log_probs_agree(policy, kw):
    p = changed(policy, **kw)
    r = p.sample(TASKS, 3, seeded(1, "s"))
    assert check_on_policy(p, r, tol=1e-4) < 1e-4
    for i in range(len(r)):
        got = r.old_logp_NS[i, : r.lengths_N[i]]
        torch.testing.assert_close(got, alone(p, r, i), atol=1e-4, rtol=1e-4)


def test_sharing_batching_and_shrinking_change_nothing(policy):
    base = policy.sample(TASKS, 5, seeded(2, "s"))
    for kw in ({"share_prefix": False}, {"shrink": 0.0}, {"shrink": 1.0}, {"max_rows": 3}, {"fast": False}):  # fmt: skip
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


def test_without_a_step_log_probs_and_gradients_are_0(policy):
    one = SimpleNamespace(prompt="7", columns={})
    for tasks, g in ((TASKS, 2), ([one], 1)):
        r = policy.sample(tasks, g, seeded(3, "s"))
        r = dataclasses.replace(r, mask_NS=torch.zeros_like(r.mask_NS))
        for kw in ({}, {"share_prefix": False}):
            lp, grad = gradient(changed(policy, **kw), r)
            assert lp.shape == r.mask_NS.shape and not lp.any() and not grad.any()


def test_padding_order_and_company_change_nothing(policy):
    r = policy.sample(TASKS, 4, seeded(4, "s"))
    lp = policy.logp(r).detach()
    order = torch.randperm(len(r), generator=seeded(0, "o"))  # interleaved groups
    torch.testing.assert_close(policy.logp(r[order]).detach(), lp[order], atol=1e-5, rtol=1e-4)
    longer = changed(policy, max_new_tokens=12).sample(TASKS, 2, seeded(5, "s"))
    wide = policy.logp(concat([r, longer])).detach()[: len(r), : lp.shape[1]]  # more padding
    torch.testing.assert_close(wide, lp, atol=1e-5, rtol=1e-4)
    for i in (0, 5, 15):
        got = policy.logp(r[i]).detach()[0, : r.lengths_N[i]]
        torch.testing.assert_close(got, lp[i, : r.lengths_N[i]], atol=1e-5, rtol=1e-4)


def test_fast_decoder_is_used_where_it_fits(policy):
    with torch.no_grad():
        kind = type(policy.network.decoder())
    known = policy.model.config.model_type in ("llama", "qwen2", "mistral")
    window = getattr(policy.model.config, "sliding_window", None) == 4
    assert kind is (_LlamaDecoder if known and not window else _Decoder)


def test_a_lora_run_resumes_with_the_same_bytes(tmp_path):
    more = ["policy.lora={r: 2, modules_to_save: [norm]}", "run.progress=false", "policy.max_new_tokens=6", "num_generations=4", "train_batch_size=4", "tasks.train=data:tasks/middle_dev.jsonl"]  # fmt: skip
    make = lambda d: GRPO.from_config(load_config(None, [*more, f"run.dir={d}"]))
    where = check_resume(make, 3, tmp_path, cuts=[1])
    (newest, *_) = (where / "checkpoints").glob("step_*")
    assert (newest / "policy.safetensors").stat().st_size < 200_000  # not the 3.4 MB of the model


def test_autocast_computes_in_bfloat16_and_scores_in_float32():
    p = TokenPolicy.from_pretrained("data:tiny-llama", max_new_tokens=6, autocast="bfloat16")
    full = TokenPolicy.from_pretrained("data:tiny-llama", max_new_tokens=6)
    r = p.sample(TASKS, 4, seeded(0, "s"))
    logp = p.logp(r)
    assert logp.dtype == r.old_logp_NS.dtype == torch.float32
    own, other = (logp - r.old_logp_NS)[r.mask_NS], (logp - full.logp(r))[r.mask_NS]
    assert own.abs().max() < 0.1 and 1e-4 < other.abs().max() < 0.3
    logp[r.mask_NS].sum().backward()
    grads = [w.grad for w in p.parameters()]
    assert all(g is not None and g.dtype == torch.float32 for g in grads)


EYES = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 1, "image_size": 28}
OTHERS = {
    "{'bias': 'all'}": MODELS["llama_gqa"],
    "{'r': 4}": MixtralConfig(**SIZE, num_local_experts=4),
    "{'r': 5}": HunYuanMoEV1Config(**SIZE, head_dim=8, num_experts=4, moe_topk=[2, 2]),
    "{'r': 6}": Gemma3Config(text_config=SIZE | {"head_dim": 8}, vision_config=EYES),
}
EXTRAS = [
    {},
    *({"r": r} for r in (4, 5, 6)),  # of models with experts, and with eyes
    {"target_modules": ["q_proj"], "modules_to_save": ["norm", "mlp"]},
    {"modules_to_save": ["lm_head", "embed_tokens"]},  # tied in the model
    {"trainable_token_indices": [3, 4]},
    {"target_modules": ["embed_tokens"]},
    {"target_modules": ["lm_head", "embed_tokens"]},
    {"use_dora": True, "use_rslora": True},
    {"init_lora_weights": "pissa"},
    {"bias": "all"},
    peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
    peft.OFTConfig(target_modules=["q_proj"], oft_block_size=8),
]


# the text of a peft configuration holds sets, whose order differs between processes
@pytest.mark.parametrize(
    "options", EXTRAS, ids=lambda o: str(o) if isinstance(o, dict) else type(o).__name__
)
@pytest.mark.filterwarnings("ignore:.*(not a linear layer|is_gradient_checkpointing)")
def test_whatever_peft_trains_is_scored_copied_and_stored(tokenizer, options, tmp_path):
    torch.manual_seed(0)
    kind = OTHERS.get(str(options), MODELS["llama"])
    model = AutoModelForCausalLM.from_config(kind, dtype=torch.float32)
    model.save_pretrained(tmp_path / "base")
    model.name_or_path = str(tmp_path / "base")
    if isinstance(options, dict):
        p = TokenPolicy(model, tokenizer, max_new_tokens=6, lora=options)
    else:
        p = TokenPolicy(peft.get_peft_model(model, options), tokenizer, max_new_tokens=6)
    before = p.sample(TASKS, 3, seeded(0, "s"))
    for x in p.parameters():
        torch.nn.init.normal_(x, std=0.3, generator=seeded(x.numel(), "w"))
    r = p.sample(TASKS, 3, seeded(0, "s"))
    want = p.logp(r).detach()
    assert check_on_policy(p, r) < 1e-4 and (p.logp(before) - before.old_logp_NS).abs().max() > 1e-3
    assert sum(v.numel() for v in p.state_dict().values()) == sum(x.numel() for x in p.parameters())
    assert torch.equal(p.copy().logp(r), want)
    for save, folder in ((p.save_pretrained, tmp_path / "all"), (p.save_adapter, tmp_path / "a")):
        save(folder)
        again = TokenPolicy.from_pretrained(folder).logp(r)
        torch.testing.assert_close(again, want, atol=1e-4, rtol=0)
    stored = load_file(tmp_path / "a" / "adapter_model.safetensors").values()
    assert len(stored) <= len(p.parameters()) + 2  # with the embeddings, if they have an adapter


@pytest.mark.parametrize(
    "options, message",
    [
        ({"target_modules": ["q_proj", "nonesuch"]}, "layer in lora.target_modules 'nonesuch'"),
        ({"trainable_token_indices": [99]}, "out of bounds"),
        ({"layer_replication": [[0, 1], [0, 1]]}, "leave out layer_replication"),
        ({"alora_invocation_tokens": [1]}, "leave out alora_invocation"),  # at work after them
        ({"arrow_config": {}}, "leave out arrow_config"),
        ({"lora_alpha": 0}, "lora_alpha must be a whole number >= 1"),
        ({"r": "8"}, "lora: r must be a whole number"),
        ({"target_modules": ["q_porj"]}, "'q_porj'. Did you mean 'q_proj'"),
        ({"target_modules": ".*mlp"}, "Target module LlamaMLP( (gate_proj"),
    ],
    ids=str,
)
def test_what_peft_cannot_train_is_refused(tokenizer, options, message):
    model = AutoModelForCausalLM.from_config(MODELS["llama"])
    with pytest.raises(ValueError, match=f"(?i){re.escape(message)}"):
        TokenPolicy(model, tokenizer, lora=options)


def test_what_cannot_be_merged_or_trained_is_said_before_anything_happens(tokenizer, tmp_path):
    p = TokenPolicy.from_pretrained("data:tiny-llama", lora={"lora_bias": True})
    with pytest.raises(ValueError, match="Nothing was written"):
        p.save_pretrained(tmp_path / "m")
    assert not (tmp_path / "m").exists()
    prompts = peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PROMPT_TUNING works outside the layers"):
        model = TokenPolicy.from_pretrained("data:tiny-llama").model
        TokenPolicy(peft.get_peft_model(model, prompts), tokenizer)


def test_an_adapter_folder_is_trained_on(tokenizer, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(data_path("tiny-llama"))
    options = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["norm"])
    peft.get_peft_model(model, options).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    p = TokenPolicy.from_pretrained(tmp_path)
    assert len(p.parameters()) == 17
    with pytest.raises(ValueError, match="only modules_to_save are trained"):
        TokenPolicy(AutoModelForCausalLM.from_pretrained(tmp_path), tokenizer)
    p.save_pretrained(tmp_path / "merged")
    assert len(TokenPolicy.from_pretrained(tmp_path / "merged").parameters()) == 38


TEMPLATE = "{% for m in messages %}<bos>{{m.role[0]}}{{m.content}}{% if m.role == 'assistant' %}<eos>{% endif %}{% endfor %}{% if add_generation_prompt %}a{% endif %}"


@pytest.mark.parametrize("adds", ["$A", "<bos> $A", "<bos> $A <eos>"])
def test_a_text_begins_once_and_is_not_ended(tokenizer, adds):
    t = copy.deepcopy(tokenizer)
    special = [("<bos>", t.bos_token_id), ("<eos>", t.eos_token_id)]
    t.backend_tokenizer.post_processor = TemplateProcessing(single=adds, special_tokens=special)
    p = TokenPolicy.from_pretrained("data:tiny-llama")
    p.tokenizer = t
    for text in ("1+1=", "<bos>1+1="):
        begun = "<bos>" if "<bos>" in adds + text else ""
        assert t.convert_ids_to_tokens(p.encode(text)) == [*[begun][: len(begun)], *"1+1="]


U, A, S = ({"role": r, "content": c} for r, c in (("user", "1+"), ("assistant", "<think>"), ("system", "8")))  # fmt: skip

PARTS = "{% for m in messages %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endfor %}a"
BEGUN = "{% for m in messages %}{{ m.content[0].text or m.content[:1] }}{% endfor %}a"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}a"
LAST = "{{ messages[-1].content }}a"
QWEN3 = "{{ messages[-1].content if messages[-1].content is string }}a"
ENDS = "z{% for m in messages %}{{ m.content.split('z')[-1] }},{% endfor %}"
ONE = {"type": "text", "text": "1"}
FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.mark.parametrize(
    "template, prompt, want",
    [
        (TEMPLATE, "1+", "<bos>s9<bos>u1+a"),
        (TEMPLATE, [U, A], "<bos>u1+<bos>a<think>"),  # continued, not closed
        (TEMPLATE, [U, A, U], "<bos>s9<bos>u1+<bos>a<think><eos><bos>u1+a"),
        (TEMPLATE, [U, A | {"content": ""}], "<bos>u1+a"),
        (TEMPLATE, "<bos>u1+a", "holds '<bos>', which the chat template adds"),
        (TEMPLATE, [U | {"content": "1<bos>"}], "holds '<bos>', which the chat template adds"),
        (TEMPLATE, U, "or a list of messages"),
        (TEMPLATE, [{"role": "user"}], "or a list of messages"),
        (TEMPLATE, [1, 8, 17], "or a list of messages"),
        (PARTS, [U | {"content": [{"type": "text", "text": "1+"}]}], "1+a"),
        (PARTS, "1+", "leaves out what"),  # a text has no parts, so nothing is left of it
        ("a", "1+", "leaves out what"),
        (BEGUN, "1+", "leaves out what"),  # of a text its end, of two parts the second
        (BEGUN, [U | {"content": [ONE, ONE | {"text": "+"}]}], "leaves out what"),
        (USERS, [S, U], "leaves out what {'role': 'system'"),
        (LAST, [U, A, U], "leaves out what {'role': 'user'"),  # not the one that it says
        (ENDS, [U, A | {"content": "z"}], "leaves out what {'role': 'assistant', 'content': 'z'}"),
        (LAST, [U | {"content": ""}, U], "1+a"),
        (LAST, [U], "1+a"),
        (LAST, [U | {"content": [ONE, {"text": "+"}]}], "1+a"),  # it would print them as Python
        (QWEN3, [U | {"content": [ONE, {"text": "+"}]}], "1+a"),  # it would drop them
        (TEMPLATE, [U, A | {"content": [ONE]}], "<bos>u1+<bos>a1"),
        (LAST, [U | {"content": [ONE, {"type": "image"}]}], "it takes text alone"),
        (FIRST + TEMPLATE, [S, U], "<bos>s8<bos>u1+a"),
        (FIRST + TEMPLATE, "1+", "no system"),
        (TEMPLATE, [U, A | {"content": None, "tool_calls": []}], "The chat template does not take"),
    ],
)
def test_a_template_says_what_the_messages_say(template, prompt, want):
    "The prompt becomes this text (which has a +), or is refused with these words."
    p = TokenPolicy.from_pretrained("data:tiny-llama", system_prompt="9" if "s9" in want else None)
    p.tokenizer.chat_template, p.chat = template, True
    if "+" in want:
        assert p.tokenizer.decode(p.encode(prompt)) == want
    else:
        with pytest.raises(ValueError, match=want):
            p.encode(prompt)


@pytest.mark.parametrize("wrong", [{"temperature": 0.5}, {"pad_token_id": -1}, {"max_new_tokens": -1}], ids=str)  # fmt: skip
def test_what_was_trained_is_written_whatever_the_generation_config_says(wrong, tmp_path):
    p = TokenPolicy.from_pretrained("data:tiny-llama", stop=[7])
    vars(p.model.generation_config).update({"do_sample": False} | wrong)
    with pytest.warns(UserWarning, match="Only eos_token_id is written"):
        p.save_pretrained(tmp_path)
    assert TokenPolicy.from_pretrained(tmp_path).stop == p.stop


def test_stops_are_read_from_tensors_and_what_stands_for_none(tokenizer):
    model = load_model("data:tiny-llama")[0]
    model.generation_config.eos_token_id, model.config.eos_token_id = torch.tensor([2, 9, 99]), -1
    p = TokenPolicy(model, copy.deepcopy(tokenizer), stop=np.array([5]))
    assert p.stop == [2, 5, 9]
    p.tokenizer.add_special_tokens({"pad_token": "[PAD]"})  # of which the model knows nothing
    check_on_policy(p, p.sample(TASKS, 3, seeded(0, "s")))


@pytest.mark.parametrize("when", ["made", "set"])
def test_layers_that_are_computed_again_have_no_dropout(tokenizer, when):
    small = dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.5, layerdrop=0.5)
    model = AutoModelForCausalLM.from_config(OPTConfig(**SIZE, **small))
    model.idle = torch.nn.Parameter(torch.ones(2))  # which the loss does not reach
    r = TokenPolicy(copy.deepcopy(model), tokenizer, max_new_tokens=6).sample(TASKS, 3, seeded(0))
    p, calls = TokenPolicy(model, tokenizer, gradient_checkpointing=when == "made"), []
    p.gradient_checkpointing, p.model.config.intermediate_size = True, [48, 32]  # one a layer
    count = lambda *_: calls.append(1) if torch.is_grad_enabled() else None
    model.model.decoder.layers[0].fc1.register_forward_pre_hook(count)
    adam = torch.optim.AdamW(p.parameters(), 0.1, weight_decay=0.5)
    update(p, r, torch.tensor([1.0, -1.0, 0.0] * 4), adam)
    assert calls == [1, 1] and (model.idle == 1).all()


def _broken(folder: Path, kind: str):
    "Damage a model folder, or put code into it."
    code = "open('RAN', 'w')"
    evil = type("Evil", (), {"__reduce__": lambda self: (exec, (code,))})()
    name, _, what = kind.partition(" ")
    if what == "half":
        (folder / name).write_bytes((folder / name).read_bytes()[:-200])
    elif what == "pickle":
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(pickle.dumps(evil))
    elif what == "auto_map":
        own = {"model_type": "own", "tokenizer_class": "T"}
        own["auto_map"] = {"AutoConfig": "own.C", "AutoModelForCausalLM": "own.M", "AutoTokenizer": ["own.T", "own.T"]}  # fmt: skip
        (folder / "own.py").write_text(code)
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | own))
    elif what == "lacks":
        state = load_file(folder / name)
        state.pop("model.norm.weight")
        save_file(state, folder / name, {"format": "pt"})


BROKEN = {
    "tokenizer.json half": "tokenizer.json is damaged",
    "config.json half": "config.json is damaged",
    "model.safetensors half": "model.safetensors is damaged",
    "model.safetensors pickle": "model.safetensors is damaged",
    "pytorch_model.bin pickle": "a pickle with code in it",
    "config.json auto_map": "needs code of its own",
    "tokenizer_config.json auto_map": "needs code of its own",
    "model.safetensors lacks": "lacks model.norm.weight",
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_damaged_model_is_named_and_no_code_of_a_model_runs(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = shutil.copytree(data_path("tiny-llama"), tmp_path / "m")
    [f.chmod(0o644) for f in folder.iterdir()]
    _broken(folder, kind)
    config = load_config(None, [f"policy.model={folder}"])
    with pytest.raises(ValueError, match=BROKEN[kind]) as e:
        GRPO.from_config(config)
    assert "\n" not in str(e.value) and not Path("RAN").exists()


def test_names_import_nothing_and_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    for f in ("evil/__init__.py", "evil/x.py"):
        Path(f).parent.mkdir(exist_ok=True)
        Path(f).write_text("open('RAN', 'w')")
    Path("bad.gguf").write_bytes(b"nonsense")
    wrong = {"gguf:evil.x": "name of one package", "gguf:evil": "holds 0 GGUF files"}
    wrong |= {"bad.gguf": "bad.gguf holds no model", "./no": "Give a folder"}
    wrong |= {"nosuch": "the Hugging Face cache does not hold it, and", "data:nosuch": "nosuch"}
    wrong |= {str(tmp_path): "holds no model that transformers can load"}
    Path("run/checkpoints").mkdir(parents=True)
    Path("done/checkpoints").mkdir(parents=True), Path("done/policy").mkdir()
    wrong |= {"run": r"is a run, no model: GRPO.load\('run'\).pol", "done": "no model: done/policy"}
    for name, message in wrong.items():
        with pytest.raises(ValueError, match=f"^policy.model.*{message}.*$"):
            GRPO.from_config(load_config(None, [f"policy.model={name}"]))
    assert not Path("RAN").exists()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ValueError, match="pip install gguf"):
        TokenPolicy.from_pretrained("bad.gguf")


def test_samples_of_broken_weights_name_them():
    p = TokenPolicy.from_pretrained("data:tiny-llama", max_new_tokens=4)
    p.model.model.norm.weight.data[0] = torch.nan
    for greedy in (False, True):
        with pytest.raises(FloatingPointError, match="not finite: model.norm.weight and 0 more"):
            p.sample(TASKS, 2, seeded(0, "s"), greedy=greedy)


def test_models_read_in_several_threads_are_whole():
    "transformers turns off the tying of weights for the whole process while it reads a model."
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda _: load_model("data:tiny-llama")[0], range(16)))
    read.append(load_model("data:tiny-llama")[0])
    assert all(m.lm_head.weight is m.model.embed_tokens.weight for m in read)


@pytest.mark.filterwarnings("ignore:.*(not a linear layer|save_embedding_layers)")
def test_an_adapter_is_written_in_the_format_of_peft(tmp_path):
    p, base = (TokenPolicy.from_pretrained("data:tiny-llama", lora=o) for o in ({"r": 4}, None))
    torch.manual_seed(0)
    for x in p.parameters():
        x.data += 0.05 * torch.randn_like(x)
    p.save_adapter(tmp_path)
    with warnings.catch_warnings(action="error", category=UserWarning):  # of keys that are missing
        warnings.filterwarnings("ignore", ".*tied layer")
        again = TokenPolicy(peft.PeftModel.from_pretrained(base.model, tmp_path), base.tokenizer)
    ids = torch.tensor([p.encode("<bos>42-25=")])
    assert torch.equal(again.model(ids).logits, p.model(ids).logits)


def test_the_adapter_that_is_trained_is_the_one_that_is_stored(tokenizer, tmp_path):
    lora = lambda r, part: peft.LoraConfig(r=r, target_modules=[part])
    wrapped = peft.get_peft_model(load_model("data:tiny-llama")[0], lora(8, "q_proj"), "first")
    wrapped.add_adapter("second", lora(2, "v_proj"))
    wrapped.set_adapter("second")
    p = TokenPolicy(wrapped, tokenizer)
    p.parameters()[1].data += 0.5
    p.save_adapter(tmp_path)
    again = TokenPolicy.from_pretrained(tmp_path)
    ids = torch.tensor([p.encode("<bos>42-25=")])
    assert torch.equal(again.model(ids).logits, p.model(ids).logits)
    for idle in (wrapped.merge_adapter, wrapped.base_model.disable_adapter_layers):
        idle()
        with pytest.raises(ValueError, match="merged or disabled, so they cannot be trained"):
            TokenPolicy(wrapped, tokenizer)


def test_a_policy_is_pushed_to_a_hub_and_refused_offline(tmp_path, monkeypatch):
    sent = {}

    def upload_folder(self, repo_id, folder_path):
        sent.update({f.name: f.read_bytes() for f in Path(folder_path).iterdir()})
        return f"https://hub/{repo_id}/commit/abc"

    p = TokenPolicy.from_pretrained("data:tiny-llama")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set: use save_pretrained"):
        p.push_to_hub("me/sums")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match="^push_to_hub 'no repository': "):
        p.push_to_hub("no repository", token="hf_x")
    made = lambda self, name, **kw: SimpleNamespace(repo_id=name)
    monkeypatch.setattr(HfApi, "create_repo", made)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    assert p.push_to_hub("me/sums", token="hf_x").endswith("/me/sums/commit/abc")
    p.save_pretrained(tmp_path)
    assert sent == {f.name: f.read_bytes() for f in tmp_path.iterdir()}


def test_gradients_are_the_same_bits_however_threads_are_scheduled():
    "Other work at the same time changes which thread comes first, and must not change a sum."
    policy = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=10)
    r = policy.sample(Taskset.load(data_path("tasks/middle_train.jsonl"))[:8], 8, seeded(0))
    scored = lambda: torch.autograd.grad(policy.logp(r).sum(), policy.parameters())
    threads, stop = torch.get_num_threads(), []
    torch.set_num_threads(2)
    try:
        want = scored()
        with ThreadPoolExecutor(2) as pool:
            for _ in range(2):
                pool.submit(lambda: [scored() for _ in iter(lambda: bool(stop), True)])
            found = [scored() for _ in range(6)]
            stop.append(True)
    finally:
        stop.append(True)
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for g in found for a, b in zip(g, want))
