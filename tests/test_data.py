"The embedded data: hashes, disjoint splits, the tokenizer, the checkpoint and what it was measured with."

import hashlib
import importlib.util
import json
import re

import numpy as np
import pytest
import torch

from grpo_nb.tasks import Taskset, data_path, overlap

DATA = data_path()
MANIFEST = json.loads((DATA / "manifest.json").read_text())
LEVELS = {"easy": (2, 1, 150, 50), "middle": (2, 2, 4000, 200), "hard": (3, 2, 2000, 200)}
SETS = [p.stem for p in sorted((DATA / "tasks").glob("*.jsonl"))]


@pytest.fixture(scope="module")
def build():
    spec = importlib.util.spec_from_file_location("sums_build", DATA / "build" / "sums.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DATA / "tiny-llama", local_files_only=True)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    path = DATA / "tiny-llama"
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)


def test_files_are_those_of_the_manifest():
    found = {
        p.relative_to(DATA).as_posix()
        for d in ("pass_rates", "tasks", "tiny-llama")
        for p in (DATA / d).iterdir()
    }
    assert found == set(MANIFEST["files"])
    for name, entry in MANIFEST["files"].items():
        content = (DATA / name).read_bytes()
        assert len(content) == entry["bytes"], name
        assert hashlib.sha256(content).hexdigest() == entry["sha256"], name
    assert sum(e["bytes"] for k, e in MANIFEST["files"].items() if "tiny" in k) < 5 * 10**6


def test_readme_shows_the_measured_figures_and_hashes(build):
    assert build.table(MANIFEST) in (DATA / "README.md").read_text()


@pytest.mark.parametrize("name", SETS)
def test_rows_hold_true_sums_and_true_features(name, build):
    t, level = Taskset.load(f"tasks/{name}.jsonl"), name.split("_")[0]
    terms, digits, *sizes = LEVELS["easy" if level == "words" else level]
    assert len(t) == (sizes[0] if name.endswith("train") else sizes[1])
    number = "[0-9]" if digits == 1 else f"[1-9][0-9]{{{digits - 1}}}"
    form = re.compile(rf"<bos>({number}([+-]{number}){{{terms - 1}}})=")
    if level == "words":
        form = re.compile(rf"What is ({number}( [+-] {number}){{{terms - 1}}})\?")
    for task in t:
        expression = form.fullmatch(task.prompt)[1].replace(" ", "")
        parts = re.findall(r"[-+]?\d+", expression)
        assert task["answer"] == str(sum(map(int, parts)))
        assert task["carries"] == build.carries(expression)
        assert task["negative"] == (task["answer"][0] == "-")
    assert (t.column("terms") == terms).all() and (t.column("digits") == digits).all()


def test_no_problem_is_in_two_splits():
    tasksets = [Taskset.load(f"tasks/{name}.jsonl") for name in SETS]
    for i, a in enumerate(tasksets):
        assert len(np.unique(a._prompt_keys())) == len(a), a
        for b in tasksets[i + 1 :]:
            assert not len(overlap(a, b)), (a, b)


def test_the_task_files_are_made_again_by_their_command(build):
    for level in LEVELS:
        for split, rows in build.problems(level, MANIFEST["seed"]).items():
            text = "".join(json.dumps(r) + "\n" for r in rows)
            assert (DATA / "tasks" / f"{level}_{split}.jsonl").read_text() == text


def test_tokenizer_round_trip(tokenizer, build):
    assert len(tokenizer) == 55 == MANIFEST["vocabulary"]
    for token in [*build.SPECIAL, *build.TAGS, *build.CHARACTERS]:
        ids = tokenizer(token).input_ids
        assert len(ids) == 1 and tokenizer.decode(ids) == token, token
    text = "<bos>" + build.CHARACTERS + "".join(build.TAGS) + " a . b , c ? " + "<eos>"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer.padding_side == "left"
    batch = tokenizer(["<bos>1+2=", "<bos>42-25="], padding=True)
    assert batch["attention_mask"] == [[0, 0, 1, 1, 1, 1, 1], [1] * 7]


def test_greedy_completions_are_those_stored(model, tokenizer):
    examples = MANIFEST["greedy_examples"]
    assert len(examples) == 8
    batch = tokenizer([e["prompt"] for e in examples], padding=True, return_tensors="pt")
    ids = model.generate(**batch, do_sample=False)[:, batch.input_ids.shape[1] :]
    texts = [t.replace("<pad>", "") for t in tokenizer.batch_decode(ids)]
    assert texts == [e["completion"] for e in examples]


def test_measured_accuracy_is_that_of_the_shipped_file(model, tokenizer, build):
    rows = [t.columns | {"prompt": t.prompt} for t in Taskset.load("tasks/middle_eval.jsonl")]
    greedy = build.accuracy(model, tokenizer, rows).mean().item()
    # a choice that rounding can flip may differ on another processor: two problems of 200 at most
    assert abs(greedy - MANIFEST["measured"]["middle"]["greedy"][0]) <= 0.0101
