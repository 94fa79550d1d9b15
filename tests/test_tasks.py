"Loaders and their faults; the embedded data: hashes, disjoint splits, the tokenizer, the checkpoint and what it was measured with."

import copy
import hashlib
import importlib.util
import json
import pickle
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.stream import open_tasks
from grpo_nb.tasks import Task, Taskset, _feature_array, data_path, overlap

ROWS = [
    {"prompt": "2+3=", "answer": "5", "carries": 0},
    {"prompt": "7+8=", "answer": "15", "carries": 1},
    {"prompt": "9-4=", "answer": "5", "carries": 0},
]
TEXT = "\n".join(map(json.dumps, ROWS)) + "\n"
BYTES = TEXT.encode()
TEXTS = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1)


@pytest.fixture
def write(tmp_path):
    def put(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


def test_a_taskset_is_the_same_after_a_copy_and_behind_a_shuffled_hub(write):
    import datasets

    wanted = [Task(r["prompt"], {k: r[k] for k in ("answer", "carries")}, "t", i) for i, r in enumerate(ROWS)]  # fmt: skip
    hub = datasets.Dataset.from_list(ROWS).select([2, 1, 0]).select([2, 1, 0])
    for source in (write(TEXT), pa.Table.from_pylist(ROWS), hub):
        t = Taskset.load(source, name="t")
        for other in (t, pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
            assert other[:] == wanted and other.column("carries").dtype == np.int64


@pytest.mark.parametrize(
    "content, message",
    [
        (b"\xef\xbb\xbf", "no rows"),
        (BYTES + b"\n\nnull\n", "line 6: a row must be a JSON object"),
        (BYTES + b'{"prompt": "x"} {"a": "y"}\n', "line 4: not valid JSON (Extra data at column"),
        (BYTES + b"\x00" * 64, "line 4: not valid JSON"),
        (TEXT.replace("\n", "\r").encode(), "line 1: not valid JSON"),
        (BYTES + b'{"answer": "5"}\n', "line 4: no field 'prompt'"),
        (b'{"prompt": ' + b"[" * 50_000, "line 1: not valid JSON"),
    ],
)
def test_bad_jsonl_is_refused_with_file_and_line(write, content, message):
    path = write(content)
    with pytest.raises(ValueError) as e:
        Taskset.load(path)
    assert message in str(e.value) and str(path) in str(e.value)


@pytest.mark.parametrize("bad", ["{oops}", '{"prompt": ["b"\n"c"], "x": 2}'])
def test_bad_rows_of_a_large_file_are_refused_when_read_and_do_not_mend_each_other(write, bad):
    t = Taskset.load(write(TEXT + bad + "\n" + TEXT * 40_000))
    assert len(t) >= 120_004 and t[4 + bad.count("\n")].prompt == "2+3="
    for read in (lambda: t[3], lambda: t.column("carries"), t._prompt_keys, lambda: list(t)):
        with pytest.raises(ValueError, match=r"rows\.jsonl, line 4: not valid JSON"):
            read()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(TEXTS, min_size=1, max_size=8),
    st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n \r\n\t\n"]), min_size=8, max_size=8),
)
def test_any_text_survives(tmp_path_factory, prompts, ends):
    lines = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts]
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes("".join(x + e for x, e in zip(lines, ends)).encode())
    assert [t.prompt for t in Taskset.load(path)] == prompts


def test_chat_prompts_from_every_source(tmp_path):
    import datasets

    chat = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    rows, path = [{"prompt": chat, "answer": "5"}], tmp_path / "chat.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path)
    for source in (rows, path, pq.read_table(path).to_pandas(), datasets.Dataset.from_list(rows)):
        t = Taskset.load(source)
        assert t[0].prompt == chat and t.column_names == ["answer"]
    t[0].prompt[0]["content"] = t[0].columns["answer"] = "9"  # does not change the source
    assert t[0].prompt == chat and t[0]["answer"] == "5"
    assert len(overlap(t, Taskset.load(rows))) == 1
    assert len(overlap(t, Taskset.load([{"prompt": "2+3?"}]))) == 0


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**53), 2**53) | st.floats() | st.none(), min_size=1, max_size=9))
def test_number_columns(values):
    missing = [v is None or v != v for v in values]
    if any(missing):
        with pytest.raises(ValueError, match=f"row {missing.index(True)}: no value"):
            _feature_array(values, "row {}".format, "x")
    kept = [v for v, m in zip(values, missing) if not m]
    if kept:
        assert _feature_array(kept, "row {}".format, "x").tolist() == kept


def test_a_function_makes_prompts_and_a_generator_s_mistakes_are_told():
    assert Taskset.load(ROWS, prompt=lambda r: r["prompt"] * 2)[0].prompt == "2+3=2+3="
    with pytest.raises(ValueError, match="are refused"):
        Taskset.load("gym:chain_sum", min_terms=0)
    with pytest.raises(ValueError, match="no_such"):
        Taskset.load("gym:gcd", no_such=1)
    assert open_tasks("gym:gcd")[0].prompt.startswith("Find the Greatest")  # at the door of GRPO


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
