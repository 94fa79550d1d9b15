"""Ready rewards: what is a right answer, and that no text of a model is ever executed."""

import json
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rewards import batch as rollout_of_texts

from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.reward_runner import RewardRunner
from grpo_nb.tasks import Task
from grpo_nb.verifiers import _between_tags, _gym_scorer, _is_prose, _listed
from grpo_nb.verifiers import _memory_limit, _quantity, _without_unit, answer_tags, exact_answer
from grpo_nb.verifiers import format_match, math_equivalence, reasoning_gym_score

ROOT = Path(__file__).resolve().parents[1]
QUIET = dict(warn_error_share=1.0, max_error_share=1.0)


def batch(outputs, columns):
    "A rollout of texts, each for a task of its own."
    tasks = [Task(c.pop("prompt", "p"), c, "t", i) for i, c in enumerate(columns)]
    return rollout_of_texts(outputs, tasks)


def test_math_equivalence_in_its_worker():
    bare = ("A", "(1,2)", "x+y", "yes", "True", "12:30", "[1, 2)", r"\text{A}", r"2\pi", "1 2")
    cases = [(x, x, 1) for x in bare] + [
        (r"$\{2,1\}$", r"\{1,2\}", 1),
        (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\begin{pmatrix}1\\3\end{pmatrix}", 0),
        (r"(\sqrt2+\sqrt3)^2", r"5+2\sqrt6", 1),
        (r"\sin^2 x + \cos^2 x", "1", 1),
        (r"10^{100}+1", r"10^{100}", 0),
        (r"\log_2 8", "3", 1),
        (r"e^{i\pi}", "-1", 1),
        ("I do not know $x$, so it is $5$", "5", 1),
        ("5", r"\infty", 0),
        (r"-\infty", r"\infty", 0),
        (r"\{10^{-7}, 1\}", r"\{2\cdot 10^{-7}, 1\}", 0),
        ("(1,3)", "(1,2)", 0),
        ("$1$", None, -99),
        ("9^{9^{9}}=5", "5", 0),  # nothing an answer holds ends a training
        ("$9^{9^{9^{9}}}$", list("uvwxyz"), 0),
        (r"$\int_0^1 x^{1000000} dx$", "1", 0),
        ("$1$", r"\frac{", -2),
    ]
    options = dict(on_timeout=-1.0, on_error=-2.0, timeout_s=4.0, **QUIET)
    maths = math_equivalence(math_timeout_s=1)
    with ThreadPoolExecutor() as pool, RewardRunner([maths], **options) as runner:
        job = batch([c for c, _, _ in cases], [{"answer": a} for _, a, _ in cases])
        scored = pool.submit(runner, job).result().rewards_NR[:, 0]
        with pytest.raises(RuntimeError, match="needs the main thread"):
            pool.submit(maths, completion="1", answer="1").result()
    assert scored.nan_to_num(nan=-99).tolist() == [w for _, _, w in cases]
    assert runner.config.workers == 0  # it gets a process anyway, also when called from a thread


def test_accepted_answers_of_any_sequence():
    many = [np.array(["4", "5"]), np.array([4, 5]), torch.tensor([4.0, 5.0]), ["x", None, 5]]
    many += [{"4", "5"}, ("4", np.int64(5)), [torch.tensor(5)]]
    for answer in (*many, np.array(5), np.str_("5"), 5, 5.0, Fraction(5)):
        assert exact_answer()(completion="5", answer=answer) == 1.0
        assert exact_answer()(completion="6", answer=answer) == 0.0


@pytest.mark.parametrize(
    "said, answer, want",
    [
        ("3  1 / 2", "7/2", 1),
        ("1 5/3", "8/3", 0),  # no mixed number
        ("1\n2", "12", 0),
        ("1 000", "1000", 0),  # one group: also the numbers 1 and 0
        ("1\u00a0234\u00a0567.0", "1234567", 1),
        ("1,234 567", "1234567", 0),
        ("0,123", "123", 0),  # a decimal comma
        ("$ 1,000.50", "1000.5", 1),
        ("- 5 %", "-5", 1),
        ("1,000/2", "500", 1),
        ("5 cm^2", "5 cm", 0),
        (r"\(1\) and \(2\)", "1", 0),
        ("It isn't $5$", "5", 0),
        ("more than 5.5", "5.5", 0),
        ("1e999999999", "1", 0),
        ("from 5 to 6", "6", 0),
        ("5 or six of them", "5", 0),
        ("5 over two for all", "5", 0),
        ("square root of 6", "6", 0),
        ("$6$ is wrong", "6", 0),
        ("it cannot be $6$", "6", 0),
        (r"\text{either } 5 \text{ or } 6", "6", 0),
        ("(101)_{2}", "101", 0),
        ("2^T", "2", 0),  # no transpose of a number
        ("1:2:3", "1/6", 0),
        ("so " * 5000 + r"\boxed{6}", "6", 1),  # the length of an answer counts, not of its text
    ],
)
def test_a_wrong_number_is_never_right(said, answer, want):
    for score in (exact_answer(), math_equivalence()):
        assert score(completion=said, answer=answer) == want
        if answer != "1":
            assert score(completion=answer, answer=said) == want


def test_a_tag_that_a_chat_template_leaves_open_is_seen():
    policy = TokenPolicy.from_pretrained(ROOT / "data/tiny-llama", max_new_tokens=2)
    policy.tokenizer.chat_template, policy.chat = "{{messages[0].content}}<think>", True
    rollout = policy.sample([Task("2+2", {}, "t", 0)], 2, torch.Generator().manual_seed(0))
    said = rollout.replace(outputs=["2 plus 2.</think><answer>4</answer>"] * 2)
    rewards = [answer_tags(), format_match("<think>.*</think><answer>4</answer>")]
    assert RewardRunner(rewards)(said).rewards_NR.min() == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 999), min_size=2, max_size=4), st.integers(1, 30))
def test_numbers_in_a_row_are_no_number_but_in_groups_of_three(parts, below):
    text = " ".join(map(str, parts))
    groups = len(parts) > 2 and parts[0] > 0 and all(x > 99 for x in parts[1:])
    assert _quantity(text) == ((int(text.replace(" ", "")), "") if groups else None)
    mixed = _quantity(f"{parts[0]} {parts[1]}/{below}")
    assert mixed == ((parts[0] + Fraction(parts[1], below), "") if parts[1] < below else None)


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="<>/answer x", max_size=60), st.text(alphabet="ab ", max_size=9))
def test_between_tags_finds_the_last_pair(noise, inside):
    assert _between_tags(f"{noise}<answer>{inside}</answer>", "answer") == inside.strip()
    assert _between_tags(f"{noise}<answer>{inside}</answer><answer>", "answer") is None


def test_answers_are_found_in_linear_time():
    start = time.process_time()
    pieces = r"<answer>|<think>|\boxed{|\boxed{2}|\left(\begin{array}|$|*|`|1 |1,|\(|\)|{|5 or |~|(|. |{{|$,|=1|answer |Is "
    for piece in pieces.split("|"):
        text = piece * (100_000 // len(piece))
        for extract in ("whole", "tags"):
            assert exact_answer(extract=extract)(completion=text, answer="1") == 0.0
        assert answer_tags()(completion=text) == 0.0
        assert _without_unit(text) == (text, "")
        _is_prose(_listed(text))
        assert math_equivalence()(completion=text, answer="x") == 0
    assert time.process_time() - start < 4


ATTACKS = """
import os, sys, time
import reasoning_gym
from math_verify import parse, verify
from reasoning_gym.factory import DATASETS
from grpo_nb.verifiers import _gym_scorer, _gym_value, math_equivalence

ran = []
def hook(event, args):
    code = getattr(args[0], "co_filename", "") if event == "exec" else event
    if str(getattr(args[0], "co_names", "")).startswith("('monomial_"):
        return  # sympy writes its own arithmetic of polynomials, for so many variables
    if code in ("<string>", "<unknown>", "os.system", "subprocess.Popen"):
        ran.append(code)

evil = "__import__('os').environ.update(SEEN='1')"
texts = [evil, f"[{evil}]", f"1+{evil}", f"({evil})", f"1\\n{evil}", f'{{"a": {evil}}}', "9**9**9**9", "1/0",
         "(" * 5000, "[" * 100000, "9" * 10**5, "", None, "nan", "inf", "nan+nanj", "1e999", "qwertz"]
refused = []
math_equivalence().reward_options["warm_up"]()
for name, (kind, _) in sorted(DATASETS.items()):
    if name == "composite":  # its entries name the dataset that they come from
        continue
    try:
        score = _gym_scorer(name)
    except ValueError as e:
        assert "\\n" not in str(e)
        refused.append(name)
        continue
    try:
        entry = reasoning_gym.create_dataset(name, size=1, seed=1)[0]
    except Exception:
        continue
    if not hasattr(sys, "hooked"):
        sys.addaudithook(hook)
        sys.hooked = True
    for text in texts:
        ran.clear()
        value = _gym_value(score, text, entry)
        assert not ran, (name, text[:60], ran)
        assert value < .5, (name, text, value)
        assert "SEEN" not in os.environ, (name, text)
maths = math_equivalence(math_timeout_s=1)
texts += ["3.5", "$4$", r"\\\\frac{1}{2}", "x+1", "1e5", "[1,2)", f"${evil}$", "sin(2)"]
for i, text in enumerate(filter(None, texts)):
    ran.clear()
    try:
        assert maths(completion=text, answer=("\\\\pi", "x^2+0.5")[i % 2]) == 0, text
    except (TimeoutError, MemoryError):
        pass
    assert not ran and "SEEN" not in os.environ, text
print('refused', *refused)
"""


def test_no_text_of_a_model_is_evaluated_and_nonsense_earns_nothing(tmp_path):
    pytest.importorskip("reasoning_gym")
    refused = "binary_matrix bitwise_arithmetic intermediate_integration n_queens number_sorting "
    refused += "polynomial_multiplication simple_integration spiral_matrix string_insertion"
    said = forked.run(tmp_path / "out", exec, ATTACKS, {})
    assert said.rpartition("refused")[2].split() == refused.split(), said[-2000:]


def test_an_answer_that_a_scorer_cannot_read_gives_zero():
    gym = pytest.importorskip("reasoning_gym")
    names, said = ("chain_sum", "prime_factorization", "coin_flip"), ("?", "x", "1e999999999")
    items = [gym.create_dataset(name, size=1, seed=1)[0] for name in names]
    columns = [{"prompt": x["question"]} | {k: x[k] for k in ("answer", "metadata")} for x in items]
    with RewardRunner([reasoning_gym_score()]) as runner:
        answers = [f"<answer>{x}</answer>" for x in said]
        scored = runner(batch(answers, [dict(c) for c in columns])).rewards_NR[:, 0]
        assert scored.tolist()[1:] == [0, 0]
        right = [f"<answer>{x['answer']}</answer>" for x in items]
        stored = [c | {"metadata": json.dumps(c["metadata"], default=str)} for c in columns]
        assert runner(batch(right, stored)).rewards_NR.min() == 1.0


def test_grammars_of_ours_agree_with_the_scorers_they_replace():
    gym = pytest.importorskip("reasoning_gym")
    from reasoning_gym.factory import get_score_answer_fn

    def said(name, entry):
        yield from (entry["answer"], None, "", "x", "[]", entry["answer"] + "0")
        inside = entry["metadata"]
        if name == "countdown":
            yield from ("1+1", "+".join(map(str, inside["numbers"])), "7/0", "(2", "1 - -2")
        if name == "puzzle24":
            yield from ("1+1", "4*6", "1+2+3+4", "24")

    for name in "countdown puzzle24 chain_sum gcd lcm spell_backward letter_counting".split():
        theirs, ours = get_score_answer_fn(name), _gym_scorer(name)
        for seed in range(4):
            entry = gym.create_dataset(name, size=1, seed=seed)[0]
            for text in said(name, entry):
                assert ours(text, entry) == theirs(text, entry), (name, text, entry["answer"])
            assert ours(entry["answer"], entry) == 1.0


def test_parsing_mathematics_has_a_memory_limit():
    def wants(completion):
        before = resource.getrlimit(resource.RLIMIT_AS)
        with _memory_limit():
            bytearray((64 << 20) if completion == "less" else (2 << 30))
        return float(resource.getrlimit(resource.RLIMIT_AS) == before)

    with RewardRunner([wants], workers=1, on_error="skip", **QUIET) as runner:
        scored = runner(batch(["less", "more"], [{}, {}])).rewards_NR[:, 0]
        assert scored[0] == 1 and scored[1].isnan()
        assert runner.failures[0].message.startswith("MemoryError")
