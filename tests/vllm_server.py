"""A small server with vLLM's API in this process: it samples with a model of ours, and can be told to misbehave."""

import contextlib
import copy
import functools
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch
from safetensors.torch import load_file

from grpo_nb.core import seeded
from grpo_nb.policies.loading import load_model
from grpo_nb.policies.tokens import TokenPolicy
from grpo_nb.tasks import data_path

_loaded = functools.cache(load_model)


def tiny():
    "A model of one's own, and the tokenizer."
    model, tokenizer = _loaded(str(data_path("tiny-llama")))
    return copy.deepcopy(model), tokenizer


class FakeVLLM:
    "Answers like vLLM 0.32; `troubles` is a list of functions (path, body) -> None, (status, answer) or an exception."

    def __init__(self, limit=128, mode="processed_logprobs", port=0):
        self.policy = TokenPolicy(*tiny())
        self.limit, self.mode = limit, mode
        self.first = {k: v.clone() for k, v in self.policy.model.state_dict().items()}
        self.version, self.asked, self.troubles = "default", [], []
        self.loads = True  # whether new weights are really taken
        self.lock = threading.Lock()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            log_message = lambda *a: None

            def do_GET(self):
                n = int(self.headers.get("content-length") or 0)
                body = json.loads(self.rfile.read(n)) if n else None
                server.asked.append((self.path, body, dict(self.headers)))
                try:
                    status, answer = server.answer(self.path.split("?")[0], body)
                except ConnectionAbortedError:
                    self.close_connection = True
                    self.connection.close()
                    return
                data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                with contextlib.suppress(OSError):
                    self.send_response(status)
                    self.send_header("content-length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_POST = do_GET

        self.http = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.http.daemon_threads = True
        self.http.handle_error = lambda *_: None  # clients that hang up are what some tests want
        threading.Thread(target=self.http.serve_forever, args=[0.02], daemon=True).start()
        self.url = f"http://127.0.0.1:{self.http.server_port}"

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.http.shutdown()
        self.http.server_close()

    def restart(self):
        "As a process that is started again: the weights of the start."
        self.policy.model.load_state_dict(self.first)
        self.version = "default"

    def answer(self, path, body):
        for trouble in list(self.troubles):
            found = trouble(path, body)
            if found is not None:
                return found
        method = getattr(self, "say_" + path.strip("/").replace("/", "_"), None)
        if method is None:
            return 404, {"detail": "Not Found"}
        with self.lock:
            return method(body)

    say_health = lambda self, body: (200, b"")
    say_reset_prefix_cache = lambda self, body: (200, {"success": True})

    def say_v1_models(self, body):
        return 200, {"data": [{"id": "tiny", "max_model_len": self.limit}]}

    def say_tokenize(self, body):
        ids = self.policy.tokenizer(body["prompt"], add_special_tokens=False).input_ids
        return 200, {"tokens": ids, "count": len(ids), "max_model_len": self.limit}

    def say_server_info(self, body):
        return 200, {"vllm_config": {"model_config": {"logprobs_mode": self.mode}}}

    def say_weight_info(self, body):
        return 200, {"weight_version": self.version}

    def say_update_weight_version(self, body):
        self.version = body["new_version"]
        return 200, {"message": "ok"}

    def say_collective_rpc(self, body):
        assert body["method"] == "reload_weights"
        folder, state = Path(body["kwargs"]["weights_path"]), {}
        for path in sorted(folder.glob("*.safetensors")):
            state |= load_file(path)
        if self.loads:
            self.policy.model.load_state_dict(state)
        return 200, {"results": [None]}

    def say_v1_completions(self, body):
        if body["model"] != "tiny":
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        ids = torch.tensor([body["prompt"]])
        p, greedy = copy.copy(self.policy), body["temperature"] == 0
        p.max_new_tokens, p.temperature = body["max_tokens"], body["temperature"] or 1.0
        p.top_k, p.top_p = body["top_k"], body["top_p"]
        p.stop = sorted({*self.policy.stop, *body["stop_token_ids"]})
        where = ids, torch.tensor([ids.shape[1]]), torch.zeros(body["n"], dtype=torch.long)
        with torch.no_grad():
            token, mask, logp, _ = p._draw(*where, seeded(body["seed"]), greedy)
        drawn = enumerate(zip(token, mask, logp))
        return 200, {"choices": [self.choice(i, *row) for i, row in drawn]}

    def choice(self, i, token, mask, logp):
        ids = token[mask].tolist()
        logprobs = {"token_logprobs": logp[mask].tolist()}
        why = "stop" if ids[-1] in self.policy.stop else "length"
        return {"index": i, "token_ids": ids, "logprobs": logprobs, "finish_reason": why}


def once(path, act):
    "Trouble at the first request to a path."
    left = [act]

    def trouble(asked, body):
        if asked != path or not left:
            return None
        return left.pop()(body)

    return trouble


def always(path, act):
    return lambda asked, body: act(body) if asked == path else None


def broken(body):
    raise ConnectionAbortedError


def slow(seconds):
    return lambda body: time.sleep(seconds)
