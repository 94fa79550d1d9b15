"Loaders and their faults: what a taskset gives back, refuses, and costs."

import copy
import json
import multiprocessing
import pickle
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.tasks import (
    Task,
    Taskset,
    _feature_array,
    _ListRows,
    _read_column,
    _row_starts,
    _TableRows,
    data_path,
    overlap,
)

ROWS = [
    {"prompt": "2+3=", "answer": "5", "carries": 0},
    {"prompt": "7+8=", "answer": "15", "carries": 1},
    {"prompt": "9-4=", "answer": "5", "carries": 0},
]
TEXT = "\n".join(map(json.dumps, ROWS)) + "\n"
BYTES = TEXT.encode()


@pytest.fixture
def write(tmp_path):
    def put(content, name="rows.jsonl"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return put


def sources(tmp_path):
    import datasets

    (tmp_path / "rows.jsonl").write_text(TEXT)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    hub = datasets.Dataset.from_list(ROWS)
    return {
        "jsonl": tmp_path / "rows.jsonl",
        "str": str(tmp_path / "rows.jsonl"),
        "parquet": tmp_path / "rows.parquet",
        "table": pa.Table.from_pylist(ROWS),
        "list": ROWS,
        "hub": hub,
        "hub torch": hub.with_format("torch"),
        "hub shuffled back": hub.select([2, 1, 0]).select([2, 1, 0]),
    }


def test_every_source_gives_the_same_tasks(tmp_path):
    wanted = [
        Task(r["prompt"], {k: r[k] for k in ("answer", "carries")}, "t", i)
        for i, r in enumerate(ROWS)
    ]
    for kind, source in sources(tmp_path).items():
        t = Taskset.load(source, name="t")
        assert t[:] == wanted, kind
        assert t.column("carries").tolist() == [0, 1, 0] and t.column("carries").dtype == np.int64
        assert t.column("answer").tolist() == ["5", "15", "5"], kind
        assert t.column("prompt").tolist() == [r["prompt"] for r in ROWS], kind
        assert t.column_names == ["answer", "carries"]
        for other in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
            assert other[:] == wanted, kind


def test_index_kinds(write):
    t = Taskset.load(write(TEXT), name="t")
    assert t[np.int64(1)].index == t[torch.tensor(1)].index == t[1].index == t[-2].index == 1
    for index in ([2, 0], (2, 0), np.array([2, 0]), torch.tensor([2, 0])):
        assert [x.index for x in t[index]] == [2, 0]
    assert [x.index for x in t[np.array([True, False, True])]] == [0, 2]
    assert [x.index for x in t[::-1]] == [2, 1, 0]
    assert [x.key for x in t] == [("t", 0), ("t", 1), ("t", 2)]
    assert t[[]] == [] and t[5:] == []
    for bad in (3, -4, [0, 3], torch.tensor([-4])):
        with pytest.raises(IndexError):
            t[bad]
    for bad in ("prompt", 1.5):
        with pytest.raises(TypeError):
            t[bad]


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "no rows (0 bytes)"),
        (b" \n\t\r\n", "no rows"),
        (b"\xef\xbb\xbf", "no rows"),
        (BYTES + b"[1]\n", "line 4: a row must be a JSON object with named fields, got list"),
        (BYTES + b"\n\nnull\n", "line 6: a row must be a JSON object"),
        (BYTES + b'"text"\n', "line 4: a row must be a JSON object"),
        (BYTES[:-8], "line 3: not valid JSON, and the file ends inside this row"),
        (BYTES + b'{"prompt": "x"} {"prompt": "y"}\n', "line 4: not valid JSON (Extra data"),
        (BYTES + b"\x00" * 64, "line 4: not valid JSON"),
        (BYTES + b'{"prompt": "\xff"}\n', "line 4: not UTF-8 (byte 12 of the row)"),
        (TEXT.encode("utf-16"), "line 1: not UTF-8"),
        (TEXT.replace("\n", "\r").encode(), "line 1: not valid JSON"),
        (b'{"answer": "5"}\n', "line 1: no field 'prompt'; the row has answer"),
        (BYTES + b'{"answer": "5"}\n', "line 4: no field 'prompt'"),
        (BYTES + b'{"prompt": null}\n', "line 4: a prompt is text"),
        (BYTES + b'{"prompt": ""}\n', "line 4: a prompt is text that is not empty"),
        (b"{}\n", "line 1: no field 'prompt'; the row has none"),
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
    for read in (lambda: t[3], lambda: t.column("carries"), t.prompt_keys, lambda: list(t)):
        with pytest.raises(ValueError, match=r"rows\.jsonl, line 4: not valid JSON"):
            read()


@pytest.mark.parametrize("end", ["\n", "\r\n", "\n\n", "\r\n \t\r\n", "\n   "])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_line_ends_blank_lines_and_byte_order_marks(write, end, mark):
    content = end.join(map(json.dumps, ROWS))
    for tail in ("", end):
        t = Taskset.load(write(mark + (content + tail).encode()))
        assert [x.prompt for x in t] == [r["prompt"] for r in ROWS]
        assert t.column("carries").tolist() == [0, 1, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.text(st.characters(blacklist_categories=["Cs"]), min_size=1), min_size=1, max_size=8
    ),
    st.lists(st.sampled_from(["\n", "\r\n", "\n\n", "\n \r\n\t\n"]), min_size=8, max_size=8),
    st.integers(1, 40),
)
def test_any_text_survives_and_any_block_size_finds_the_rows(prompts, ends, block):
    lines = [json.dumps({"prompt": p}, ensure_ascii=False) for p in prompts]
    data = "".join(x + e for x, e in zip(lines, ends)).encode()
    starts = _row_starts(data, block)
    assert starts.tolist() == _row_starts(data).tolist()
    cut = [data[a:b] for a, b in zip(starts, [*starts[1:], len(data)])]
    assert [json.loads(x.decode())["prompt"] for x in cut] == prompts


def test_paths(tmp_path, write, monkeypatch):
    for bad, message in [
        (tmp_path / "no.jsonl", "no such file"),
        (tmp_path / "no.parquet", "no such file"),
        (write("a,b", "a.csv"), "cannot read .csv"),
        (write("{}", "rows.jsonl.gz"), "cannot read .gz"),
        (write("text", "bad.parquet"), "not a parquet file"),
        (tmp_path, "cannot read a name without suffix"),
        ("no/such/rows.jsonl", "No file no/such/rows.jsonl, neither here"),
        ({"prompt": "x"}, "Cannot make tasks of dict"),
        ([], "list: no rows"),
        (pa.table({"prompt": pa.array([], pa.string())}), "table: no rows"),
    ]:
        with pytest.raises(ValueError) as e:
            Taskset.load(bad)
        assert message in str(e.value)
    write(TEXT, "mine.jsonl")
    monkeypatch.setenv("GRPO_NB_DATA", str(tmp_path))
    assert len(Taskset.load("mine.jsonl")) == 3
    assert data_path("mine.jsonl") == tmp_path / "mine.jsonl"
    with pytest.raises(ValueError, match="GRPO_NB_DATA"):
        data_path("tiny-llama")
    monkeypatch.delenv("GRPO_NB_DATA")
    assert (data_path() / "manifest.json").is_file()


def test_field_names(tmp_path):
    rows = [{"question": "a?", "solution": "5", "meta": {"level": 2, "steps": [1, 4]}}]
    t = Taskset.load(rows, prompt="question", rename={"solution": "answer"}, id="other", name="n")
    assert t[0] == Task("a?", {"answer": "5", "meta": rows[0]["meta"]}, "other", 0)
    assert t.name == "n"
    assert t.column("answer").tolist() == ["5"] and t.column("prompt").tolist() == ["a?"]
    assert t.column("meta.level").tolist() == [2] and t.column("meta.steps.1").tolist() == [4]
    assert Taskset.load(rows, prompt=lambda r: r["question"] * 2)[0].prompt == "a?a?"
    with pytest.raises(ValueError, match="two fields one name"):
        Taskset.load(rows, prompt="question", rename={"solution": "meta"})
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "nested.parquet")
    t = Taskset.load(tmp_path / "nested.parquet", prompt="question")
    assert t.column("meta.steps.1").tolist() == [4] and t[0]["meta"]["level"] == 2


def test_chat_prompts_from_every_source(tmp_path):
    import datasets

    chat = [{"role": "user", "content": "2+3?"}]
    rows = [{"prompt": chat, "answer": "5"}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "chat.parquet")
    for source in (rows, tmp_path / "chat.parquet", datasets.Dataset.from_list(rows)):
        t = Taskset.load(source)
        assert t[0].prompt == chat and t.column_names == ["answer"]
    t[0].prompt[0]["content"] = t[0].columns["answer"] = "9"  # does not change the source
    assert t[0].prompt == chat and t[0]["answer"] == "5"
    assert len(overlap(t, Taskset.load(rows))) == 1
    assert len(overlap(t, Taskset.load([{"prompt": "2+3?"}]))) == 0


def test_missing_values(write):
    lines = ['{"prompt": "a", "x": 1, "s": "u"}', "", '{"prompt": "b", "x": null}']
    t = Taskset.load(write("\n".join([*lines, '{"prompt": "c", "x": NaN, "s": "v"}'])))
    for name in ("x", "s"):
        with pytest.raises(ValueError, match=rf"rows\.jsonl, line 3: no value for column '{name}'"):
            t.column(name)
    with pytest.raises(ValueError, match="Unknown column of rows 'y'"):
        t.column("y")
    table = pa.table({"prompt": ["a", "b"], "x": pa.array([1, None])})
    with pytest.raises(ValueError, match="table, row 1: no value for column 'x'"):
        Taskset.load(table).column("x")


def test_columns_in_blocks_keep_order_and_kind():
    rows = _ListRows([{"f": i if i % 2 else i + 0.5, "b": i > 3, "s": "x" * i} for i in range(11)])
    for name in ("f", "b", "s"):
        whole = _read_column(rows, name)
        for size in (1, 2, 3, 7):
            values = _read_column(rows, name, size)
            assert values.tolist() == whole.tolist() and values.dtype == whole.dtype
    rows = _ListRows([{"x": 1}, {"x": 2}, {"x": True}])
    for size in (1, 2, 3):
        with pytest.raises(ValueError, match="list, row 2: column 'x' holds .*True"):
            _read_column(rows, "x", size)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(st.integers(-(2**53), 2**53), st.floats(), st.none()), min_size=1, max_size=9
    )
)
def test_number_columns(values):
    missing = [v is None or v != v for v in values]
    if any(missing):
        with pytest.raises(ValueError, match=f"row {missing.index(True)}: no value"):
            _feature_array(values, "row {}".format, "x")
    kept = [v for v, m in zip(values, missing) if not m]
    if kept:
        assert _feature_array(kept, "row {}".format, "x").tolist() == kept


def test_a_million_rows_do_not_become_objects(tmp_path):
    path, n = tmp_path / "large.jsonl", 10**6
    rows = [{"prompt": f"<bos>{i}+1=", "answer": f"{i + 1}", "carries": i % 3} for i in range(1000)]
    block = "".join(json.dumps(r) + "\n" for r in rows)
    with open(path, "w") as f:
        for _ in range(n // 1000):
            f.write(block)
    tracemalloc.start()
    t = Taskset.load(path)
    last = t[-1]
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(t) == n and last.prompt == "<bos>999+1=" and last.index == n - 1
    assert t.rows.starts.dtype == np.int64 and t.rows.starts.nbytes == 8 * n
    assert held < 8 * n + 2**20, "only the offsets may stay"
    assert peak < 100 * 2**20


def test_a_changed_file_is_noticed(write):
    sent = pickle.dumps(Taskset.load(write(TEXT)))
    assert pickle.loads(sent)[2].prompt == "9-4="
    write(TEXT + TEXT)
    with pytest.raises(ValueError, match="changed since the taskset was opened"):
        pickle.loads(sent)[2]


def read_prompt(job):
    t, i = job
    return t[i].prompt


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_worker_processes(write, method):
    t = Taskset.load(write(TEXT))
    gym = Taskset.load("gym:chain_sum", size=4, seed=1)
    jobs = [(x, i) for x in (t, gym) for i in range(3)]
    with multiprocessing.get_context(method).Pool(1) as pool:
        assert pool.map(read_prompt, jobs) == [read_prompt(j) for j in jobs]


def test_reasoning_gym():
    settings = dict(size=20, seed=3, min_terms=2, max_terms=2)
    t, again = (Taskset.load("gym:chain_sum", **settings) for _ in range(2))
    assert t[:] == again[:] and len(t) == 20 and t.id == "chain_sum"
    assert (t.column("metadata.num_terms") == 2).all()
    assert t.column("metadata.difficulty.num_terms.1").tolist() == [2] * 20
    for dataset, config, message in [
        ("chain_sum", {"min_terms": 0}, "are refused"),
        ("gcd", {"no_such": 1}, "no_such"),
    ]:
        with pytest.raises(ValueError, match=message):
            Taskset.load(f"gym:{dataset}", **config)


def test_table_rows_are_read_one_at_a_time():
    rows = _TableRows(pa.Table.from_pylist(ROWS * 50_000), "table")
    tracemalloc.start()
    assert rows.row(149_999) == ROWS[2]
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
