"Secrets: hidden in everything that leaves the process, never in what trains."

import json

import pytest
import torch

from grpo_nb.all import GRPO, REWARDS, Steps, load_config
from grpo_nb.config import override
from grpo_nb.files import HIDDEN, _refuse_hidden, hide_secrets, leaves
from grpo_nb.lab.compare import FailedRun, compare
from grpo_nb.lab.runs import Spec

KEY, WORD = "sk-test-0123456789abcdefghij", "open sesame"

NAMES = "token openai_key apiKey OPENAI_API_KEY private_key bearer secret_word judge_token groq_key"
NAMES += " accessKeyId session-cookie session_id slack_webhook"
SECRETS = dict.fromkeys(NAMES.split(), "x") | {
    "api_keys": ["x", "y"],
    "headers": {"Authorization": "x", "X-Auth": "x"},
    "auth": {"user": "x", "code": "x"},
    "pwd": 1234,
    "credentials": [{"file": "x"}],
    "note": "-----BEGIN RSA PRIVATE KEY-----",
    "extra": ["Bearer abcdefghijklmnop", KEY, "hf_abcdefghijklmnopqrst", "ghp_" + "a" * 36],
    "db": {"pass": "x", "pw": "x", "token_2": "x", "connection_string": "x"},
    "wandb": "0123456789abcdef0123456789abcdef01234567",
    "search_key": "x0123456789abcdef",
    "keys": ["sk_live_0123456789abcdef", "gsk_0123456789abcdef0123", "ASIA0123456789ABCDEF"],
}
QUOTED = {  # hidden where they stand in a text
    "url": "https://user:pw@host/x",
    "urls": ["postgres://:pw@host/db", "https://x0123456789abcdef@host", "https://pw@host"],
    "basic": "curl -s -u a:pw https://host",
    "flags": "curl -sSu a:pw --proxy-user a:pw -ua:pw --user=a:pw https://host".split(),
    "httpie": "http -a a:pw https://host",
    "login": "wandb login 0123456789abcdef0123456789abcdef01234567",
    "query": "https://host/v1?model=a&api_key=pw&n=1",
    "command": ["judge", "--api-key", "pw", "--password=pw", "OPENAI_API_KEY=pw"],
    "env": [{"name": "JUDGE_TOKEN", "value": "pw"}],
    "error": f"401 from https://user:pw@host: {KEY} refused, header 'Bearer pw0123456789abcd'",
    "at": "https://user:p@pw@host/x",
    "signed": "https://host/x?key=pw&sig=pw https://host/x?auth=pw",
    "header": "curl -H 'Authorization: Basic pw0123' -d '{\"api_key\": \"pw\"}'",
    "line": "judge --api-key pw0 password: pw --token pw1",
    "hook": "https://hooks.slack.com/services/pw/0123456789abcdef",
}
COUNTS = dict.fromkeys("max_tokens tokens max_new_tokens micro_tokens".split(), 64)
WORDS = "eos_token pad_token stop_token prompt_key response_key tokenizer hf_tokenizer author key"
OPEN = COUNTS | dict.fromkeys([*WORDS.split(), "loss", "keyboard"], "token_mean")
OPEN |= {
    "url": "https://host:8000/v1",
    "prompt": "Basic arithmetic. Bearer bonds: what is 2+2?",
    "commit": "da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "task": "sk-learn",
    "empty_secret": "",
    "use_auth": True,
    "password": None,
    "container": ["docker", "run", "-u", "1000:1000", "-u", "root", "-p", "80:80", "image"],
    "file": "ssh://git@host/repository",
    "from": "commit da39a3ee5e6b4b0d3255bfef95601890afd80709, host/?mail=a@b, docker run -u 0:0",
    "snapshot": "hub/snapshots/da39a3ee5e6b4b0d3255bfef95601890afd80709",
    "said": "Reset the password when asked, and design=good.",
    "levels": ["--level", "token", "--tokenizer", "gpt2"],
}


@pytest.mark.parametrize("name", SECRETS)
def test_secrets_are_hidden_by_name_or_look_at_any_depth(name):
    for tree in ({name: SECRETS[name]}, {"a": [{"b": {name: SECRETS[name]}}]}):
        assert {value for _, value in leaves(hide_secrets(tree))} == {HIDDEN}


@pytest.mark.parametrize("name", QUOTED)
def test_secrets_are_hidden_where_a_text_quotes_them(name):
    for tree in ({name: QUOTED[name]}, {"a": [{"b": {name: QUOTED[name]}}]}):
        shown = hide_secrets(tree)
        for secret in ("pw", KEY, "0123456789abcdef"):
            assert secret not in json.dumps(shown)
        assert HIDDEN in json.dumps(shown)
        with pytest.raises(ValueError, match="hidden, as secrets are not stored"):
            _refuse_hidden(shown)


def test_what_is_no_secret_stays():
    assert hide_secrets(OPEN) == OPEN
    _refuse_hidden(OPEN)


@pytest.fixture
def seen():
    "A registered reward that needs secrets, and what it was given."
    given = []

    @REWARDS.register("needs_secrets")
    def make(api_key="", secret_word="", judge=None):
        given.append((api_key, secret_word, (judge or {}).get("url")))

        def scores(completions, **columns):
            assert HIDDEN not in str(given[-1])
            return [float(len(c) % 2) for c in completions]

        return scores

    yield given
    REWARDS.pop("needs_secrets")


URL = "https://user:pw@host"
JUDGE = {"reward": "needs_secrets", "api_key": KEY, "secret_word": WORD, "judge": {"url": URL}}
OPTIONS = {"rewards.functions": {"judge": JUDGE}}
SMALL = {"steps": 2, "train_batch_size": 2, "num_generations": 2, "policy.max_new_tokens": 4}
SMALL |= {"run.progress": False, "eval.every": 0, "tasks.train": "data:tasks/middle_dev.jsonl"}


def small_config(**more):
    return override(load_config(None), SMALL | OPTIONS | more)


def no_secret_in(folder):
    files = [p for p in folder.rglob("*") if p.is_file()]
    assert files
    for path in files:
        text = path.read_bytes()
        for secret in (KEY, WORD, URL):
            assert secret.encode() not in text, path


def test_a_stored_run_holds_no_secret_and_asks_for_it(tmp_path, seen):
    trainer = GRPO.from_config(small_config(**{"run.dir": str(tmp_path / "run")}))
    assert seen == [(KEY, WORD, URL)]
    trainer.fit(1)
    trainer.save()
    trainer.close()
    no_secret_in(tmp_path)
    keys = [f"rewards.functions.judge.{k}" for k in ("api_key", "secret_word", "judge.url")]
    with pytest.raises(ValueError, match=f"{', '.join(keys)}: hidden") as e:
        GRPO.load(tmp_path / "run")
    assert "\n" not in str(e.value) and "Pass what is meant again" in str(e.value)
    with pytest.raises(ValueError, match=f"{keys[1]}, {keys[2]}: hidden"):
        GRPO.load(tmp_path / "run", {keys[0]: KEY})
    assert len(seen) == 1  # nothing was made of what was hidden
    again = GRPO.load(tmp_path / "run", {keys[0]: KEY, keys[1]: WORD, keys[2]: URL})
    assert seen[-1] == (KEY, WORD, URL)
    again.fit()
    again.close()
    no_secret_in(tmp_path)
    # a program that passes the reward itself needs no option
    own = GRPO.load(tmp_path / "run", rewards={"judge": lambda completion: 1.0})
    own.close()


def test_compare_trains_with_the_secret_and_stores_none(tmp_path, seen):
    base = small_config(**{"tasks.eval": "tasks/middle_eval.jsonl", "eval.limit": 2})
    torch.manual_seed(0)
    how = {"budget": Steps(1), "evaluate": lambda trainer: {"eval_sampled": 1.0}}
    arms = {"a": {}, "b": {"optimizer.lr": 1e-5}}
    study = compare(arms, base, seeds=[0], dir=tmp_path / "study", **how)
    assert [r["status"] for r in study.runs] == ["done"] * 2, [r["error"] for r in study.runs]
    assert {s[:2] for s in seen} == {(KEY, WORD)}
    study.save(tmp_path / "study.json")
    no_secret_in(tmp_path)

    def evaluate(trainer):
        raise RuntimeError(f"{URL} refused the word {WORD!r} and the key {KEY}")

    with pytest.raises(FailedRun, match="refused the word '<hidden>'"):
        compare({"a": {}}, base, seeds=[1], budget=Steps(1), dir=tmp_path / "b", evaluate=evaluate)
    no_secret_in(tmp_path)
    assert KEY not in json.dumps(study.spec) and KEY not in json.dumps(study.runs)
    word = lambda w: override(base, {"rewards.functions.judge.secret_word": w})
    one, two = (Spec(arms, word(w), [0], Steps(1)).tree() for w in ("word-1", "word-2"))
    assert one != two and "word-1" not in json.dumps(one)
