"""Rewards: the contract, faults of functions, worker processes, ready rewards."""

import asyncio
import functools
import gc
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
import torch
from forked import wait_for
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_nb.core import Rollout
from grpo_nb.reward_runner import RewardConfig, RewardRunner
from grpo_nb.reward_workers import _decode
from grpo_nb.rewards import RewardError, reward_function
from grpo_nb.tasks import Task
from grpo_nb.verifiers import answer_tags, exact_answer, format_match, length_target
from grpo_nb.verifiers import math_equivalence, reasoning_gym_score

ROOT = Path(__file__).resolve().parents[1]
nan = math.nan
QUIET = dict(warn_error_share=1.0, max_error_share=1.0)


def batch(outputs, tasks=None, states=None, **info):
    n = len(outputs)
    return Rollout(
        group_N=torch.arange(n) // 2,
        tasks=tasks or [Task("p", {"answer": "1"}) for _ in range(n)],
        states=states or {},
        mask_NS=torch.ones(n, 3, dtype=torch.bool),
        old_logp_NS=torch.zeros(n, 3),
        outputs=list(outputs),
        info=info,
    )


def values(x):
    return torch.nan_to_num(x, nan=-99.0).tolist()


def counts(runner, name):
    m = runner.metrics()
    return [m[f"reward/{name}/n_{o}"] for o in ("ok", "none", "error", "timeout", "nonfinite")]


OTHERS = set()  # processes of earlier tests, e.g. the resource tracker of multiprocessing


def children():
    return [p for p in psutil.Process().children(recursive=True) if p.pid not in OTHERS]


@pytest.fixture(autouse=True)
def no_process_left():
    OTHERS.update(p.pid for p in children())
    yield
    assert children() == []


def test_results_do_not_depend_on_the_number_of_workers():
    scale = 0.5

    def closure(prompt, completion, answer):
        return scale * len(completion) + float(answer)

    def ranked(completion, sample_seed):
        return np.random.default_rng(sample_seed).random(2)

    @reward_function(whole_batch=True)
    def order(completions):  # sees the batch, however it is cut up for others
        return [sorted(completions).index(c) for c in completions]

    functions = {"closure": closure, "ranked": ranked, "order": order}
    outputs = [f"text {i}" * (i % 4) for i in range(37)]
    tasks = [Task("p", {"answer": str(i)}) for i in range(37)]
    results = []
    for workers in (0, 1, 2):
        with RewardRunner(functions, workers=workers, chunk_size=5, seed=3) as runner:
            results.append([runner(batch(outputs, tasks)).rewards_NRK for _ in range(2)])
            assert counts(runner, "closure") == [37, 0, 0, 0, 0]
    for first, second in results:
        assert values(first) == values(results[0][0]) and values(second) == values(results[0][1])
    assert results[0][0].shape == (37, 3, 2)
    places = results[0][0][:, 2, 0].tolist()
    assert places == [sorted(outputs).index(c) for c in outputs]


SCRIPT = """
import os, re, sys, threading, time
import torch
from grpo_nb.core import Rollout
from grpo_nb.reward_runner import RewardRunner
from grpo_nb.verifiers import exact_answer

SCALE = 2.0

def light(completion):
    return SCALE * ("torch" in sys.modules)

def backtracks(completion):  # holds the interpreter lock
    re.match(r"(a+)+$", "a" * 60 + "b")

one = Rollout(torch.tensor([0]), [{"prompt": "p", "answer": "1"}], {}, torch.ones(1, 1) > 0,
              torch.zeros(1, 1), ["1"])
child = os.fork()  # a second script for the price of one import of torch
if child == 0:
    runner = RewardRunner({"light": light, "exact": exact_answer()}, workers=1)
    print(runner(one).rewards_NR.tolist(), runner.pool.workers[0].process.pid, flush=True)
    sys.exit()
os.waitpid(child, 0)
runner = RewardRunner([backtracks], workers=1, timeout_s=100)
threading.Thread(target=runner, args=(one,), daemon=True).start()
while not (runner.pool and runner.pool.workers and runner.pool.workers[0].limit == 100):
    time.sleep(0.01)
time.sleep(0.2)
print(runner.pool.workers[0].process.pid, runner.pool.workers[0].folder, flush=True)
time.sleep(100)
"""


def gone(pid):
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"


def test_workers_of_a_script_without_main_guard_end_with_it_also_when_it_is_killed(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    p = subprocess.Popen(
        [sys.executable, tmp_path / "script.py"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        rewards, ended = p.stdout.readline().rsplit(" ", 1)
        pid, folder = p.stdout.readline().split()  # written after the first script had ended
        assert rewards == "[[0.0, 1.0]]"  # 0: workers do not import torch for rewards of text
        assert gone(int(ended)) and not gone(int(pid))
    finally:
        p.kill()
        p.wait()
        p.stdout.close()
    assert wait_for(lambda: gone(int(pid))), "the worker outlived its parent"
    link = Path(folder).with_name("grpo_nb_reward_link")
    link.symlink_to(tmp_path)
    with RewardRunner({"one": lambda completion: 1.0}, workers=1) as runner:
        runner(batch(["a"]))
        assert os.path.isdir(runner.pool.workers[0].folder) and not os.path.exists(folder)
    link.unlink()
    assert (tmp_path / "script.py").exists()


def test_interrupt_ends_all_workers_and_the_runner_stays_usable():
    def sleeps(completion):
        time.sleep(60 if completion == "sleep" else 0)
        return 1.0

    runner = RewardRunner([sleeps], workers=2, timeout_s=100)
    runner(batch(["a", "b"]))
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        runner(batch(["sleep"] * 4))
    assert children() == []
    assert runner(batch(["a"])).rewards_NR.tolist() == [[1.0]]
    runner.close()


def test_workers_end_when_the_runner_is_collected():
    runner = RewardRunner({"one": lambda completion: 1.0}, workers=1)
    runner(batch(["a"]))
    folder = runner.pool.workers[0].folder
    assert len(children()) == 1 and os.path.isdir(folder)
    del runner
    gc.collect()
    assert children() == [] and not os.path.exists(folder)


def test_processes_started_by_a_function_are_killed_with_it():
    def forks(completion):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1234.5)"])
        while True:
            pass

    with RewardRunner([forks], workers=1, timeout_s=0.5, on_timeout="skip", **QUIET) as runner:
        assert runner(batch(["a"])).rewards_NR.isnan().all()
    started = [p for p in psutil.process_iter(["cmdline"]) if "(1234.5)" in str(p.info["cmdline"])]
    assert [p for p in started if p.status() != "zombie"] == []


def test_a_copy_that_a_function_forks_answers_nothing_and_any_error_is_told():
    def odd(completion):
        class Mute(Exception):
            def __str__(self):
                raise ValueError

        if completion == "mute":
            raise Mute
        if completion == "fork":
            os.fork()
        return float(len(completion))

    with RewardRunner([odd], workers=1, chunk_size=1, on_error=-1.0, **QUIET) as runner:
        for _ in range(3):
            assert values(runner(batch(["fork", "a", "mute"])).rewards_NR[:, 0]) == [4, 1, -1]
            assert runner.failures[0].message.startswith("Mute: ")


def in_time(f, *args, seconds=60):  # a hang fails here instead of stopping the suite
    results = []
    thread = threading.Thread(target=lambda: results.append(f(*args)), daemon=True)
    thread.start()
    thread.join(seconds)
    assert results, f"no result after {seconds} s"
    return results[0]


def test_a_worker_that_stops_reading_is_killed_at_the_deadline():
    def leaves_a_thread(completion):
        def backtrack():  # holds the interpreter lock, after the function returned
            time.sleep(0.05)
            re.match(r"(a+)+$", "a" * 60 + "b")

        if completion[0] == "c":
            threading.Thread(target=backtrack, daemon=True).start()
        return 1.0

    options = dict(workers=1, timeout_s=1.0, chunk_size=1, on_error="skip", **QUIET)
    with RewardRunner([leaves_a_thread], **options) as runner:
        for size in (1, 1_000_000):  # less and more than a pipe holds
            first = in_time(runner, batch([c * size for c in "abc"]))
            worker = psutil.Process(runner.pool.workers[0].process.pid)
            spent = lambda p=worker: sum(p.cpu_times()[:2])
            until = spent() + 0.1
            while spent() < until:  # it backtracks
                time.sleep(0.02)
            second = in_time(runner, batch([c * size for c in "de"]))
            assert values(first.rewards_NR[:, 0]) == [1, 1, 1]
            assert values(second.rewards_NR[:, 0]) == [-99, 1]
            assert counts(runner, "leaves_a_thread") == [1, 0, 0, 1, 0]
        assert "no result after" in runner.failures[0].message


def test_time_in_which_everything_is_paused_is_no_deadline():
    def works(completion):
        end = time.process_time() + 0.5
        while time.process_time() < end:
            pass
        return 1.0

    with RewardRunner([works], workers=1, timeout_s=2.5) as runner:
        runner(batch("a"))
        ids = f"{os.getpid()} {runner.pool.workers[0].process.pid}"
        pause = f"sleep 0.2; kill -STOP {ids}; sleep 3; kill -CONT {ids}"
        with subprocess.Popen(["sh", "-c", pause]):
            assert values(runner(batch("a")).rewards_NR[:, 0]) == [1]


def test_half_a_message_and_garbage_are_no_reason_to_wait():
    def writes(completion):
        good = b'{"outcome": "ok", "values": [[[1.0]]], "n": 1, "message": "", "ms": 0.0}\n'
        junk = {
            "half": good[:15],
            "text": b"hello\n",
            "nothing": b"\n",
            "again": b'{"split": true}\n',
            "more": good.replace(b"1.0", b"7.0").replace(b'"n": 1', b'"n": 99'),
            "bytes": b"\xff\xfe\n",
            "deep": b"[" * 100_000 + b"\n",
            "digits": good.replace(b"1.0", b"9" * 5000),
            "endless": b"[" + b"1," * (1 << 24),
        }.get(completion)
        while junk:
            junk = junk[os.write(int(sys.argv[1]), junk) :]
            time.sleep(0 if junk else 1000)
        return 1.0

    texts = "half a text nothing again more bytes deep digits endless b".split()
    n, start = len(texts), time.monotonic()
    with RewardRunner([writes], workers=2, timeout_s=2.0, on_error="skip", **QUIET) as runner:
        scored = in_time(runner, batch(texts))
    assert values(scored.rewards_NR[:, 0]) == [-99, 1] + [-99] * (n - 3) + [1]
    assert counts(runner, "writes") == [2, 0, n - 3, 1, 0]
    assert time.monotonic() - start < 100


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside),
    max_leaves=8,
)
MESSAGE = {"outcome": "ok", "values": [[[1.0], [2.0]]], "n": 1, "message": "", "ms": 0.0}
MESSAGE |= {"logged": {}}


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(list(MESSAGE)), JSON)
def test_whatever_a_message_holds_the_trainer_gets_a_result_or_a_refusal(key, value):
    with pytest.raises(ValueError):
        _decode(value, 2)
    try:
        result = _decode(MESSAGE | {key: value}, 2)
    except ValueError:
        return
    assert result.n == 1 and result.error is None and result.message.isprintable()
    assert result.values is None or [len(row) for row in result.values] == [2]


@pytest.mark.parametrize("when", ["boot", "job"])
def test_a_crafted_message_of_a_worker_is_data_and_runs_nothing(when, tmp_path):
    ran = tmp_path / "ran"

    def attack(completion=None):
        class Evil:
            def __reduce__(self):
                return os.system, (f"touch {ran}",)

        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            os.write(int(sys.argv[1]), pickle.dumps(Evil(), protocol) + b"\n")
        time.sleep(1000)

    options = dict(workers=1, timeout_s=5, on_error="skip", **QUIET)
    if when == "job":
        with RewardRunner([attack], **options) as runner:
            assert in_time(runner, batch(["a"])).rewards_NR.isnan().all()
        assert "bytes that are no data" in runner.failures[0].message
    else:
        judge = reward_function(lambda completion: 1.0, name="judge", warm_up=attack)
        with RewardRunner([judge], **options) as runner:
            with pytest.raises(RewardError, match="did not start.*bytes that are no data"):
                runner(batch(["a"]))
    assert not ran.exists()


def test_workers_that_end_before_they_take_a_sample_are_not_replaced_for_ever():
    def doomed():
        def at_the_first_read(frame, event, called):
            if event == "c_call" and called.__name__ == "read":
                os._exit(7)

        sys.setprofile(at_the_first_read)

    judge = reward_function(lambda completion: 1.0, name="judge", warm_up=doomed)
    with RewardRunner([judge], workers=1, on_error="skip", **QUIET) as runner:
        assert in_time(runner, batch(["a", "b"])).rewards_NR.isnan().all()
    assert "with code 7" in runner.failures[0].message


def test_memory_limit_scrubbed_environment_and_temporary_directory(monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    monkeypatch.setenv("A_KEY", "1")
    here = os.getcwd()

    def hog(completion):
        return len(bytearray(4 << 30))

    def clean(completion):
        print("x" * 100_000)  # goes nowhere, and waits for nobody
        os.write(2, b"z" * 100_000)
        open("left-behind", "w").close()
        return float("A_SECRET" in os.environ or os.getcwd() == here) + 10 * ("A_KEY" in os.environ)

    options = dict(workers=1, memory_mb=1024, keep_env=("A_KEY",), on_error="skip", **QUIET)
    with RewardRunner([hog, clean], **options) as runner:
        assert values(runner(batch(["a"])).rewards_NR) == [[-99.0, 10.0]]
    assert runner.failures[0].message.startswith("MemoryError")
    assert not os.path.exists("left-behind")


def test_a_late_chunk_is_tried_again_one_by_one():
    def hangs(completions):
        while "hang" in completions:
            pass
        return [1.0] * len(completions)

    whole = reward_function(lambda completions: hangs(completions), whole_batch=True, timeout_s=0.3)
    both = {"chunk": reward_function(hangs, timeout_s=0.3), "whole": whole}
    with RewardRunner(both, workers=1, on_error="skip", **QUIET) as runner:
        scored = runner(batch(["a", "hang", "b"]))
    assert values(scored.rewards_NR) == [[1, -99], [-99, -99], [1, -99]]
    assert counts(runner, "chunk") == [2, 0, 0, 1, 0]
    assert counts(runner, "whole") == [0, 0, 0, 3, 0]


def test_an_idle_worker_that_died_is_replaced_and_nothing_is_blamed():
    with RewardRunner({"one": lambda completion: 1.0}, workers=1) as runner:
        runner(batch(["a"]))
        worker = runner.pool.workers[0].process
        os.kill(worker.pid, signal.SIGKILL)
        worker.wait()
        assert runner(batch(["a", "b"])).rewards_NR.tolist() == [[1.0], [1.0]]
        assert runner.pool.workers[0].process.pid != worker.pid


def test_warm_up_is_no_part_of_the_deadline_and_its_failure_is_named():
    def fail():
        raise OSError("no such model")

    def judge(completion):
        return 1.0

    slow = reward_function(judge, warm_up=lambda: time.sleep(0.6), timeout_s=0.3)
    with RewardRunner({"slow": slow}, workers=1) as runner:
        assert runner(batch(["a"])).rewards_NR.tolist() == [[1.0]]
    with RewardRunner([reward_function(judge, warm_up=fail)], workers=1, on_error="skip") as runner:
        with pytest.raises(RewardError, match="could not load the functions[^$]*no such model"):
            runner(batch(["a"]))


BREACHES = [
    (lambda completions: (1.0 for _ in completions), "got generator"),
    (lambda completions: torch.ones(2, 1, 1), "one per completion, got Tensor"),
    (lambda completion: 1j, "got complex 1j"),
    (lambda completion: [1.0, "x"], "got str 'x'"),
    (
        lambda completions, log_extra: log_extra("rewards/f", completions),
        "log_extra('rewards/f', ...)",
    ),
]


@pytest.mark.parametrize("function, message", BREACHES)
def test_breaches_of_the_contract_stop_under_every_policy(function, message):
    runner = RewardRunner({"bad": function}, on_error="skip", on_nonfinite=0.0, **QUIET)
    with pytest.raises(RewardError, match="Reward 'bad', sample 0: expected ") as e:
        runner(batch(["a", "b"]))
    assert message in str(e.value)


def test_missing_values_do_not_apply_and_are_no_zeros():
    missing = [None, nan, np.float32("nan"), np.nan, pd.NA, pd.NaT, np.ma.masked, torch.tensor(nan)]
    tasks = [Task("q", {"answer": m, "metadata": m}) for m in missing]
    texts = ["nan", "None", "<NA>", "NaN", "", "NaT", "--", "tensor(nan)"]
    ready = [exact_answer(), math_equivalence(), reasoning_gym_score()]
    with RewardRunner(ready) as runner:
        assert runner(batch(texts, tasks)).rewards_NR.isnan().all()
        assert [counts(runner, s.name)[1] for s in runner.specs] == [8, 8, 8]
    for single in (True, False):
        for returned in missing:
            one = (lambda completion, r=returned: r) if single else None
            many = lambda completions, r=returned: [r, 1.0]  # noqa: E731
            scored = RewardRunner({"f": one or many})(batch(["a", "b"]))
            assert values(scored.rewards_NR) == [[-99], [-99 if single else 1]]


def test_text_of_chat_completions():
    text = {"type": "text", "text": "5"}
    right = [
        [{"role": "assistant", "content": "5"}],
        [{"role": "assistant", "content": [text]}],
        [{"role": "assistant", "content": [{"type": "image"}, text]}],
        [{"role": "assistant", "content": ["5"]}],
        [{"role": "assistant", "content": None, "tool_calls": []}, {"content": (text,)}],
        {"role": "assistant", "content": "5"},
    ]
    five = Task("p", {"answer": "5"})
    scored = RewardRunner([exact_answer()])(batch(right, [five] * len(right)))
    assert scored.rewards_NR.flatten().tolist() == [1.0] * len(right)
    assert exact_answer()(completion=[{"role": "assistant", "content": None}], answer="5") == 0.0
    image = [{"role": "assistant", "content": [{"type": "image"}]}]
    for odd in ([{"text": "5"}], [text], image, [{"content": [5]}], 5, None):
        with pytest.raises(RewardError, match="must (be|have) text"):
            RewardRunner([exact_answer()])(batch([odd], [five]))


@pytest.mark.parametrize("workers", [0, 1])
def test_what_one_function_does_to_its_arguments_no_other_sees(workers):
    def clears(prompts, completions, table, **columns):
        for row in table:
            row["ids"].clear()
        prompts.clear(), completions.clear()
        return [1.0] * len(table)

    def rewrites(prompt, completion, table, array):
        prompt[0]["content"] = "X"
        table["ids"].append(5)
        array += 1
        return 1.0

    def spoils_and_raises(completions):
        completions[0] = "LONGER"
        if len(completions) > 1:
            raise ValueError("more than one")
        return [float(len(completions[0]))]

    def state(prompt, completion, table, array):
        return len(prompt[0]["content"]) + 10 * len(table["ids"]) + 100 * array.sum()

    want = {clears: 1.0, rewrites: 1.0, spoils_and_raises: 6.0, state: 225}
    array = np.array([1.0, 1.0])  # of all tasks; a task is that of all samples of its group
    chats = [[{"role": "user", "content": "hello"}] for _ in range(3)]
    tasks = [Task(chat, {"table": {"ids": [1, 2]}, "array": array}) for chat in chats]
    before = repr([(t.prompt, t.columns) for t in tasks])
    options = dict(workers=workers, chunk_size=3, on_error="skip", **QUIET)
    for order in (list(want), list(want)[::-1]):
        rollout = batch(["AB"] * 6, [tasks[i // 2] for i in range(6)])
        with RewardRunner(order, **options) as runner:
            scored = runner(rollout)
        assert scored.rewards_NR.tolist() == [[want[f] for f in order]] * 6
        assert rollout.outputs == ["AB"] * 6
        assert repr([(t.prompt, t.columns) for t in tasks]) == before


@pytest.mark.parametrize("workers", [0, 1])
def test_functions_of_every_shape_are_called_and_awaited(workers):
    async def f(completion, scale=2.0):
        await asyncio.sleep(0)
        return scale

    class Own:
        async def __call__(self, completion, scale=2.0):
            return scale

        async def batch(self, completions):
            return [2.0] * len(completions)

    async def twice(completion):
        return f(completion)

    def given(completions, tokenizer, **columns):
        return [tokenizer(c) for c in completions]

    functions = {
        "lambda": lambda completion: f(completion),
        "object": Own(),
        "call": Own().__call__,
        "method": Own().batch,
        "a list to await": lambda completions: [f(c) for c in completions],
        "awaited twice": twice,
        "some to await": lambda completions: [2.0, *map(f, completions[1:])],
        "a tuple to await": lambda completions: tuple(map(f, completions)),
        "rows to await": lambda completions: [[f(c)] for c in completions],
        "partial of a partial": functools.partial(functools.partial(f), scale=2.0),
        "a wrapped partial": functools.update_wrapper(functools.partial(given, tokenizer=f), given),
    }
    with RewardRunner(functions, workers=workers) as runner:
        want = [[2.0] * len(functions)] * 2
        assert runner(batch(["a", "b"])).rewards_NR.tolist() == want

        async def notebook():  # a loop runs already
            return runner(batch(["a", "b"])).rewards_NR.tolist()

        assert asyncio.run(notebook()) == want


@pytest.mark.parametrize("workers", [0, 1])
def test_async_rewards_fail_like_others_and_keep_one_event_loop(workers):
    seen = []

    async def judge(completion):
        seen.append(asyncio.get_running_loop())
        assert seen[0] is seen[-1]
        if completion == "raise":
            raise KeyError("missing")
        await asyncio.sleep(1000 if completion == "hang" else 0)
        return 1.0

    texts = ["a", "raise", "b", *["hang"] * workers]
    options = dict(workers=workers, timeout_s=3.0, on_error="skip", **QUIET)
    with RewardRunner(judge, **options) as runner:
        scored = in_time(runner, batch(texts))
    assert values(scored.rewards_NR[:, 0]) == [1, -99, 1, -99][: len(texts)]
    assert runner.failures[0].message.startswith("KeyError: 'missing'")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reward_written_for_trl_works_unchanged(workers):
    def from_trl(prompts, completions, completion_ids, answer, trainer_state, log_metric, **kwargs):
        texts = [c[0]["content"] for c in completions]
        kwargs["log_extra"]("extracted", [t.strip() for t in texts])
        log_metric("length", sum(map(len, texts)) / len(texts))
        assert trainer_state.global_step == 7 and {len(i) for i in completion_ids} == {3}
        return [None if a is None else float(t == a) for t, a in zip(texts, answer)]

    chat = [{"role": "user", "content": "1+1="}]
    open_turn = [*chat, {"role": "assistant", "content": "It is "}]
    given = (chat, "2"), (chat, None), (open_turn, "It is 2")
    tasks = [Task(p, {"answer": a}) for p, a in given]
    ids = {"completion_ids": torch.ones(3, 3, dtype=torch.long)}
    with RewardRunner([from_trl, length_target(3)], workers=workers, chunk_size=2) as runner:
        runner.trainer_state["global_step"] = 7
        scored = runner(batch(["2", "3", "2"], tasks, ids))
        assert values(scored.rewards_NR) == [[1, 1], [-99, 1], [1, 1]]
        assert [x["extracted"] for x in scored.info["logged"]] == ["2", "3", "It is 2"]
        assert runner.metrics()["reward/from_trl/length"] == (3 if workers == 0 else 4)


def one_line(make, *parts):
    with pytest.raises(ValueError) as e:
        make()
    message = str(e.value)
    assert "\n" not in message and len(message) < 400, message
    for part in parts:
        assert part in message, message


class Judge:
    def __call__(self, completion):
        return 1.0


def yields(completion):
    yield 1.0


async def streams(completion):
    yield 1.0


ONE = {"f": lambda completion: 1.0}
WHOLE = {"f": reward_function(lambda completion: 1.0, whole_batch=True)}
ODD = [None, 3, [], {}, "x", Judge, nan, math.inf, -1.0, True, object()]
NAMES = [None, 3, "ab", ["a", "a"], [1], [""]]  # no list of distinct names
NEITHER = [3j, "", [3], {}, nan, math.inf, -1.0, object()]  # no parameter of a ready reward
CALLS = [  # what is called, with what, and what its message names
    (RewardRunner, ODD, "eward"),
    (lambda v: RewardRunner({"f": v}), [*ODD, yields, streams, max, exact_answer], "'f'"),
    (lambda v: RewardRunner({v: ONE["f"]}), (3, "", nan), "name must be non-empty text"),
    (lambda v: RewardRunner(ONE, config=v), (3, RewardConfig, []), "needs a mapping"),
    (RewardRunner(ONE).load_state_dict, (None, [], {}, {"version": 1}), "of a run with"),
    (lambda v: RewardRunner(ONE, on_timeout=v), (Judge, nan, True, {"f": "0"}), "on_timeout"),
    (lambda v: RewardRunner(ONE, keep_env=v), [3], "keep_env"),
    (RewardRunner, [WHOLE], "cannot be a whole_batch function"),
    (lambda v: reward_function(form=v), ("x", 3), "form"),
    (lambda v: reward_function(components=v), NAMES, "components"),
    (lambda v: reward_function(needs=v), NAMES, "needs"),
    (lambda v: reward_function(timeout_s=v), (0, nan, math.inf, "x", True), "timeout_s"),
    (lambda v: reward_function(v, name="f"), [Judge().__call__], "cannot be kept"),
    (lambda v: exact_answer(extract=v), NEITHER, "extract"),
    (lambda v: exact_answer(column=v), NEITHER, "column"),
    (lambda v: exact_answer(extract="tags", tag=v), [*NEITHER, "<answer>"], "tag"),
    (lambda v: math_equivalence(math_timeout_s=v), NEITHER, "math_timeout_s"),
    (lambda v: answer_tags(v), [*NEITHER, [], ("a", "a"), ["<think>"]], "tag"),
    (lambda v: format_match(v), [3j, [3], {}, nan, "("], "pattern"),
    (lambda v: length_target(v), [*NEITHER, 0], ""),
    (lambda v: length_target(3, v), NEITHER, "width"),
    (lambda v: reasoning_gym_score(tag=v), NEITHER, "tag"),
]


@pytest.mark.parametrize("make, wrong, part", CALLS)
def test_what_cannot_be_a_reward_or_its_option_is_one_line(make, wrong, part):
    for value in wrong:
        one_line(lambda v=value: make(v), part)


def test_what_cannot_reward_is_refused_when_the_trainer_is_made():
    from grpo_nb.all import GRPO, Taskset, TokenPolicy, data_path, load_config

    policy = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=4)
    tasks = Taskset.load([{"prompt": "<bos>1+1=", "answer": "2", "info": {"level": 1}}] * 4)
    other = Taskset.load([{"prompt": "<bos>1+1=", "solution": "2"}])

    def grpo(rewards, *overrides, eval_tasks=None):
        config = load_config(None, ["run.progress=false", *overrides])
        return GRPO(policy, tasks, rewards, config, eval_tasks)

    one_line(lambda: grpo(exact_answer(column="answr")), "'exact_answer'", "'answr'")
    one_line(lambda: grpo(exact_answer(column="info.levl")), "'info.levl'")
    one_line(lambda: grpo(exact_answer(), eval_tasks=other), "needs 'answer'")
    one_line(lambda: grpo(exact_answer(), "eval.passed=exact"), "Did you mean 'exact_answer'?")
    assert grpo(exact_answer(column="info.level")).passed == ("exact_answer",)
    trainer = grpo(lambda completion: None, "train_batch_size=2", "num_generations=2")
    with pytest.warns(UserWarning, match="Reward 'reward' is None for all 4 samples"):
        trainer.step()
    both = {"format": lambda completion: 1.0, "right": exact_answer()}
    assert grpo(both, "advantage.weights=[.2, 1]").passed == ("right",)
