"Loaders and their faults: what a taskset gives back, refuses, and costs."

import copy
import json
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.stream import open_tasks
from grpo_nb.tasks import Task, Taskset, _feature_array, overlap

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
        (
            BYTES + b'{"prompt": "x"} {"a": "y"}\n',
            "line 4: not valid JSON (Extra data at column 17)",
        ),
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
