"""Build the embedded sums tasks and the half-trained tiny Llama that starts on them.

    python data/build/sums.py data                      everything under data/ (some four minutes on one core)
    python data/build/sums.py OUT --target 0.2          the same with a weaker start, in another folder
    python data/build/sums.py data --tasks-only         only the task files
    python data/build/sums.py data --anchors            only the pass rates of a weak and a strong model (some ten minutes)

No network is used: the problems come from reasoning-gym's chain_sum generator and the model is trained from random
weights. OUT receives tasks/*.jsonl, tiny-llama/, manifest.json, and the measured table of README.md if there is one.
The anchors are the models that --target 0.2 and --target 0.8 give, and their pass rates on every training task become
pass_rates/*.jsonl; the first of each level, together, are pass_rates/mixed_train.jsonl. `--anchors weak` and `--anchors strong` do one of the two.
What this leaves out: learning rate decay, weight averaging, any choice of the best step. The start has to be half-trained.
"""

import argparse
import hashlib
import json
import math
import platform
import re
import time
from importlib import metadata
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

logging.disable_progress_bar()

SPECIAL = ["<pad>", "<bos>", "<eos>"]
TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
CHARACTERS = "0123456789+-*/=();., abcdefghijklmnopqrstuvwxyz?"
PAD, BOS, EOS, THINK_END = 0, 1, 2, 4

# name: (terms, digits per term, sizes of the splits in the order they are drawn)
LEVELS = {
    "easy": (2, 1, {"train": 150, "eval": 50}),
    "middle": (2, 2, {"train": 4000, "eval": 200, "dev": 200}),
    "hard": (3, 2, {"train": 2000, "eval": 200}),
}
MIX = {"middle": 0.8, "easy": 0.1, "hard": 0.1}  # what the warm start is trained on
ANCHORS = {"weak": 0.2, "strong": 0.8}  # the --target of each
ANCHOR_SAMPLES = 16  # per task and anchor
MIXED = 100  # tasks of each level in the mixed pool
MAX_NEW_TOKENS = 12  # the longest solution, three terms: <think>792-</think>-297<eos> is 11


# ---------------------------------------------------------------- tasks


def carries(expression):
    "Columns that carry or borrow when the terms are worked off from left to right, on paper."
    total, count = 0, 0
    for sign, digits in re.findall(r"([-+]?)(\d+)", expression):
        term = -int(digits) if sign == "-" else int(digits)
        a, b = abs(total), abs(term)
        add = (total >= 0) == (term >= 0)
        a, b, carry = max(a, b), min(a, b), 0
        while b or carry:
            column = a % 10 + b % 10 + carry if add else a % 10 - b % 10 - carry
            carry = int(column > 9 or column < 0)
            count, a, b = count + carry, a // 10, b // 10
        total += term
    return count


def row(expression, answer, terms, digits):
    "One line of a task file: the prompt, its answer and what makes it easy or hard, as numbers."
    return {
        "prompt": f"<bos>{expression}=",
        "answer": answer,
        "terms": terms,
        "digits": digits,
        "carries": carries(expression),
        "negative": int(answer.startswith("-")),
    }


def problems(level, seed):
    "The splits of one level: distinct expressions, so that no problem is in two splits."
    import reasoning_gym

    terms, digits, sizes = LEVELS[level]
    wanted, found = sum(sizes.values()), {}
    source = reasoning_gym.create_dataset(
        "chain_sum",
        size=100 * wanted,
        seed=10**6 * (1 + list(LEVELS).index(level)) + seed,
        min_terms=terms,
        max_terms=terms,
        min_digits=digits,
        max_digits=digits,
    )
    for i in range(len(source)):
        entry = source[i]
        found.setdefault(entry["metadata"]["expression"].replace(" ", ""), entry["answer"])
        if len(found) == wanted:
            break
    rows = iter([row(q, a, terms, digits) for q, a in found.items()])
    return {split: [next(rows) for _ in range(n)] for split, n in sizes.items()}


# ---------------------------------------------------------------- tokenizer and model


def make_tokenizer():
    "One token per character. The tags are ordinary tokens, so that decoding without special tokens keeps them."
    vocab = {token: i for i, token in enumerate([*SPECIAL, *TAGS, *CHARACTERS])}
    t = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=None))
    t.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    t.decoder = decoders.Fuse()
    t.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in SPECIAL])
    t.add_tokens([AddedToken(s, special=False, normalized=False) for s in TAGS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=t,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        padding_side="left",
        model_max_length=128,
        clean_up_tokenization_spaces=False,
    )
    assert len(tokenizer) == len(vocab) == 55
    return tokenizer


def make_model(vocab_size):
    "A Llama of 860,160 parameters with the sampling defaults it was measured with."
    ids = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS}
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        **ids,
    )
    model = LlamaForCausalLM(config).float()
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=MAX_NEW_TOKENS,
        **ids,
    )
    return model


def solution(answer):
    "The completion that is taught: digits backwards, because carries run from the last digit, then the answer."
    return f"<think>{answer[::-1]}</think>{answer}<eos>"


# ---------------------------------------------------------------- sampling and reward


@torch.no_grad()
def complete(model, prompt_PS, generator=None):
    "Completions (P, MAX_NEW_TOKENS) at temperature 1, or greedy without a generator, with the smallest gap of a choice."
    ids, cache, out = prompt_PS, None, []
    open_P = torch.ones(len(ids), dtype=torch.bool)
    gap_P = torch.full((len(ids),), math.inf)
    for _ in range(MAX_NEW_TOKENS):
        step = model(input_ids=ids, cache=cache, use_cache=True)
        cache, logp_PV = step.cache, step.logits[:, -1].log_softmax(-1)
        if generator is None:
            top = logp_PV.topk(2, -1)
            ids, gap = top.indices[:, :1], top.values[:, 0] - top.values[:, 1]
            gap_P = torch.where(open_P, torch.minimum(gap_P, gap), gap_P)
        else:
            ids = torch.multinomial(logp_PV.exp(), 1, generator=generator)
        out.append(torch.where(open_P[:, None], ids, PAD))
        open_P = open_P & (ids[:, 0] != EOS)
        if not open_P.any():
            break
    return torch.cat(out, 1), gap_P


def exact(ids, answer, tokenizer):
    "1.0 if the text between </think> and <eos> is the answer, else 0.0; the scratchpad is not graded."
    ids = ids.tolist()
    if EOS not in ids or THINK_END not in ids[: ids.index(EOS)]:
        return 0.0
    return float(tokenizer.decode(ids[ids.index(THINK_END) + 1 : ids.index(EOS)]) == answer)


def accuracy(model, tokenizer, rows, n=1, generator=None):
    "Mean reward of each row over `n` completions; greedy without a generator. Prompts of a level are equally long."
    was_training = model.training
    model.eval()
    prompt = torch.tensor(tokenizer([r["prompt"] for r in rows]).input_ids)
    ids = complete(model, prompt.repeat_interleave(n, 0), generator)[0]
    model.train(was_training)
    hits = torch.tensor([exact(c, rows[i // n]["answer"], tokenizer) for i, c in enumerate(ids)])
    return hits.view(-1, n).mean(1)


def interval(mean_P, z=1.96):
    "Mean and 95 % interval over problems: Wilson's for one greedy answer each, normal for means of samples."
    n, p = len(mean_P), mean_P.mean().item()
    if ((mean_P == 0) | (mean_P == 1)).all():
        middle, scale = (p + z * z / (2 * n)) / (1 + z * z / n), 1 + z * z / n
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / scale
        return [round(x, 4) for x in (p, middle - half, middle + half)]
    half = z * mean_P.std().item() / math.sqrt(n)
    return [round(x, 4) for x in (p, max(0.0, p - half), p + half)]


# ---------------------------------------------------------------- warm start


def training_table(tokenizer, sets):
    "All solved problems as padded ids and labels, and the chance of drawing each."
    weights, texts, starts = [], [], []
    for level, share in MIX.items():
        rows = sets[level]["train"]
        weights += [share / len(rows)] * len(rows)
        texts += [r["prompt"] + solution(r["answer"]) for r in rows]
        starts += [r["prompt"] for r in rows]
    encoded = tokenizer(texts, padding=True, padding_side="right", return_tensors="pt")
    prompt_lengths = torch.tensor([len(x) for x in tokenizer(starts).input_ids])
    ids, mask = encoded.input_ids, encoded.attention_mask.bool()
    taught = mask & (torch.arange(ids.shape[1]) >= prompt_lengths[:, None])
    return ids, ids.masked_fill(~taught, -100), mask.sum(1), torch.tensor(weights)


def warm_start(model, tokenizer, sets, args, generators):
    "Supervised steps until sampled accuracy on the dev split first reaches the target; the history of it."
    ids, labels, lengths, weights = training_table(tokenizer, sets)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    model.train()
    history, start = [], time.perf_counter()
    for step in range(1, args.max_steps + 1):
        optimizer.param_groups[0]["lr"] = args.lr * min(1.0, step / 50)
        pick = torch.multinomial(weights, args.batch, True, generator=generators["batches"])
        width = int(lengths[pick].max())
        # padding stands on the right, so causal attention alone keeps it out
        logits = model(input_ids=ids[pick, :width], use_cache=False).logits
        target = labels[pick, 1:width].flatten()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), target, ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        every = args.every if not history or history[-1][2] < args.target / 2 else 5
        if step % every == 0:
            dev = accuracy(model, tokenizer, sets["middle"]["dev"], 2, generators["dev"])
            dev = round(dev.mean().item(), 4)
            history.append([step, round(loss.item(), 4), dev])
            seconds = time.perf_counter() - start
            print(f"step {step} loss {loss:.3f} sampled dev {dev:.3f} {seconds:.0f} s", flush=True)
            if dev >= args.target:
                return history
    raise SystemExit(f"Sampled dev accuracy stayed below {args.target} for {args.max_steps} steps.")


def trained(tokenizer, sets, args):
    "The model that reached args.target, the history of it, and a generator to measure it with."
    torch.manual_seed(args.seed)  # for the initial weights, which torch draws globally
    model = make_model(len(tokenizer))
    names = ("batches", "dev", "measure")
    generators = {k: torch.Generator().manual_seed(args.seed * 10 + i) for i, k in enumerate(names)}
    history = warm_start(model, tokenizer, sets, args, generators)
    model.eval()
    return model, history, generators["measure"]


def write_anchors(tokenizer, sets, args, name):
    "Pass rates of one anchor on every training task, beside those of the other in pass_rates/*.jsonl; what the manifest says of it."
    args = argparse.Namespace(**{**vars(args), "target": ANCHORS[name]})
    model, history, generator = trained(tokenizer, sets, args)
    found = {"target": args.target, "steps": history[-1][0], "sampled dev accuracy": history[-1][2]}
    found["pass rate"] = {}
    for level in LEVELS:
        rows, rates = sets[level]["train"], []
        for start in range(0, len(rows), 250):
            part = rows[start : start + 250]
            rates += accuracy(model, tokenizer, part, ANCHOR_SAMPLES, generator).tolist()
        found["pass rate"][level] = round(sum(rates) / len(rates), 4)
        path = args.out / "pass_rates" / f"{level}_train.jsonl"
        old = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
        old = old or [{} for _ in rows]
        if len(old) != len(rows) or any(
            o.get("prompt", r["prompt"]) != r["prompt"] for o, r in zip(old, rows)
        ):
            raise SystemExit(f"{path} belongs to other tasks: delete it first.")
        lines = [
            {"prompt": r["prompt"]}
            | {k: v for k in ANCHORS if (v := {**o, name: x}.get(k)) is not None}
            for r, o, x in zip(rows, old, rates)
        ]
        path.parent.mkdir(exist_ok=True)
        path.write_text("".join(json.dumps(x) + "\n" for x in lines), encoding="utf-8")
    return found


def write_mixed(out, sets):
    "The first training tasks of every level with the pass rates of both anchors, as one pool for selectors."
    lines = []
    for level in LEVELS:
        path = out / "pass_rates" / f"{level}_train.jsonl"
        rates = [json.loads(x) for x in path.read_text().splitlines()] if path.exists() else []
        if not rates or set(ANCHORS) - set(rates[0]):
            return
        pairs = zip(sets[level]["train"][:MIXED], rates)
        lines += [{**task, **rate, "level": level} for task, rate in pairs]
    text = "".join(json.dumps(x) + "\n" for x in lines)
    (out / "pass_rates" / "mixed_train.jsonl").write_text(text, encoding="utf-8")


def measure(model, tokenizer, sets, generator):
    "Held-out accuracy of each level, greedy and sampled: [mean, low, high]."
    model.eval()
    out = {}
    for level in LEVELS:
        rows = sets[level]["eval"]
        out[level] = {
            "greedy": interval(accuracy(model, tokenizer, rows)),
            "sampled": interval(accuracy(model, tokenizer, rows, 8, generator)),
        }
    return out


def greedy_examples(model, tokenizer, rows, gap=0.1, count=8):
    "Some greedy completions that no rounding can change: each choice leads by more than `gap` nats."
    ids, gap_P = complete(
        model, torch.tensor(tokenizer([r["prompt"] for r in rows]).input_ids), None
    )
    keep = (gap_P > gap).nonzero()[:count, 0].tolist()
    texts = [tokenizer.decode(ids[i]).replace("<pad>", "") for i in keep]
    return [
        {"prompt": rows[i]["prompt"], "answer": rows[i]["answer"], "completion": text}
        for i, text in zip(keep, texts)
    ]


# ---------------------------------------------------------------- files


def in_words(task):
    "A sum as one would ask a model that was trained on language."
    expression = re.sub(r"([+-])", r" \1 ", task["prompt"].removeprefix("<bos>").removesuffix("="))
    return {**task, "prompt": f"What is {expression}?"}


def hashes(out):
    "Size and sha256 of everything shipped."
    folders = [out / d for d in ("pass_rates", "tasks", "tiny-llama") if (out / d).is_dir()]
    files = sorted(p for d in folders for p in d.iterdir())
    return {
        p.relative_to(out).as_posix(): {
            "bytes": p.stat().st_size,
            "sha256": hashlib.sha256(p.read_bytes()).hexdigest(),
        }
        for p in files
    }


def write_tasks(out, sets):
    words = {split: [in_words(r) for r in rows] for split, rows in sets["easy"].items()}
    for level, splits in {**sets, "words": words}.items():
        for split, rows in splits.items():
            text = "".join(json.dumps(r) + "\n" for r in rows)
            (out / "tasks" / f"{level}_{split}.jsonl").write_text(text, encoding="utf-8")


def tidy(folder):
    "Readable by everyone, and a tokenizer class that older transformers know too."
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    for p in folder.iterdir():
        p.chmod(0o644)


def table(manifest):
    "The measured accuracies as a Markdown table."
    lines = [
        "| held-out set | problems | greedy accuracy | sampled accuracy (8 per problem) |",
        "|---|---|---|---|",
    ]
    for level, values in manifest["measured"].items():
        cells = [f"{m:.3f} ({low:.3f}-{high:.3f})" for m, low, high in values.values()]
        size = LEVELS[level][2]["eval"]
        lines.append(f"| `{level}_eval` | {size} | {cells[0]} | {cells[1]} |")
    lines += ["", "| file | bytes | sha256 |", "|---|---|---|"]
    lines += [f"| `{k}` | {v['bytes']} | `{v['sha256']}` |" for k, v in manifest["files"].items()]
    return "\n".join(lines)


def write_readme(out, manifest):
    readme, marks = out / "README.md", ("<!-- measured: begin -->", "<!-- measured: end -->")
    if readme.exists():
        text = readme.read_text(encoding="utf-8")
        head, tail = text.split(marks[0])[0], text.split(marks[1])[1]
        body = f"{marks[0]}\n{table(manifest)}\n{marks[1]}"
        readme.write_text(head + body + tail, encoding="utf-8")


def write_manifest(out, manifest):
    text = json.dumps(manifest, indent=1)
    (out / "manifest.json").write_text(text + "\n", encoding="utf-8")
    write_readme(out, manifest)


def main():
    kind = argparse.RawDescriptionHelpFormatter
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=kind)
    ap.add_argument("out", type=Path, help="folder to write, usually data")
    ap.add_argument("--seed", type=int, default=0)
    ap.add_argument(
        "--target", type=float, default=0.40, help="stop at this sampled accuracy on middle_dev"
    )
    ap.add_argument("--threads", type=int, default=1)
    ap.add_argument("--lr", type=float, default=1e-3)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument(
        "--every",
        type=int,
        default=25,
        help="steps between looks at the dev split; 5 from half the target on",
    )
    ap.add_argument("--max-steps", type=int, default=4000)
    ap.add_argument("--tasks-only", action="store_true")
    ap.add_argument("--anchors", nargs="*", choices=list(ANCHORS), help="both if none is named")
    args = ap.parse_args()
    start = time.perf_counter()
    torch.set_num_threads(args.threads)
    for folder in ("tasks", "tiny-llama"):
        (args.out / folder).mkdir(parents=True, exist_ok=True)

    sets = {level: problems(level, args.seed) for level in LEVELS}
    path, tokenizer = args.out / "manifest.json", make_tokenizer()
    old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if args.anchors is not None:
        for name in args.anchors or ANCHORS:
            old.setdefault("anchors", {})[name] = write_anchors(tokenizer, sets, args, name)
        write_mixed(args.out, sets)
        old.pop("files", None)  # files stand last
        write_manifest(args.out, old | {"files": hashes(args.out)})
        return
    write_tasks(args.out, sets)
    if args.tasks_only:
        write_mixed(args.out, sets)
        write_manifest(args.out, old | {"files": hashes(args.out)})
        return

    model, history, measuring = trained(tokenizer, sets, args)
    model.save_pretrained(args.out / "tiny-llama")
    tokenizer.save_pretrained(args.out / "tiny-llama")
    tidy(args.out / "tiny-llama")

    packages = ("torch", "transformers", "tokenizers", "safetensors", "reasoning-gym")
    manifest = {
        "command": f"python data/build/sums.py data --seed {args.seed} --target {args.target} --threads {args.threads}",
        "seed": args.seed,
        "target": args.target,
        "versions": {"python": platform.python_version()}
        | {p: metadata.version(p) for p in packages},
        "parameters": sum(p.numel() for p in model.parameters()),
        "vocabulary": len(tokenizer),
        "warm_start": {"columns": ["step", "loss", "sampled dev accuracy"], "rows": history},
        "measured": measure(model, tokenizer, sets, measuring),
        "greedy_examples": greedy_examples(model, tokenizer, sets["middle"]["eval"]),
        **({"anchors": old["anchors"]} if "anchors" in old else {}),
        "files": hashes(args.out),
    }
    write_manifest(args.out, manifest)
    print(json.dumps(manifest["measured"], indent=1))
    print(f"done in {time.perf_counter() - start:.0f} s, {history[-1][0]} warm-start steps")


if __name__ == "__main__":
    main()
