"""The HTTP API of vLLM that `titanlite_post.server` uses, around a plain model on a CPU.

    python -m titanlite_post.tests.completion_server [--stale]

prints its port. It samples with the noise of `ShardedGenerator`, which is a function of the seed of
a request. `--stale`: it loads weights only once.
"""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock

import torch
from torch import nn

from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.models.label_sampling import GOLDEN, add_noise, mix_int64
from titanlite.parallelize.tied import tie_parameters
from titanlite.storage import StorageFolder

EXACT = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
EXACT |= {"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True, "logprobs": 0}


def load_model(path: str) -> nn.Module:
    source = open_hugging_face(StorageFolder(path))
    model = source.spec.build(source.sizes)
    model.load_state_dict({name: source.read(name) for name in source.tensors})
    tie_parameters(model, source.spec.tied_parameters(source.sizes))
    return model


@torch.no_grad()
def complete(model: nn.Module, request: dict) -> dict:
    assert request.items() >= EXACT.items() and request["return_token_ids"], request
    ids, log_probs = list(request["prompt"]), []
    bias = torch.zeros(model.sizes.vocab_size)
    for id, value in request["logit_bias"].items():
        bias[int(id)] = value
    for index in range(request["max_tokens"]):
        logits = model(torch.tensor([ids]))[0, -1:]
        key = mix_int64(request["seed"] + torch.tensor([index]) * GOLDEN) & (2**63 - 1)
        ids.append(int(add_noise(logits + bias, key, 0)[1]))
        log_probs.append(logits.log_softmax(-1)[0, ids[-1]].item())
        if ids[-1] in request["stop_token_ids"]:
            break
    new = ids[len(request["prompt"]) :]
    return {"choices": [{"token_ids": new, "logprobs": {"token_logprobs": log_probs}}]}


class Handler(BaseHTTPRequestHandler):
    model: nn.Module | None = None
    stale, lock = "--stale" in sys.argv, Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: object = [None]
        with self.lock:
            if self.path == "/collective_rpc":
                assert body["method"] == "reload_weights"
                if Handler.model is None or not self.stale:
                    Handler.model = load_model(body["kwargs"]["weights_path"])
            else:
                assert self.path == "/v1/completions" and Handler.model is not None
                answer = complete(Handler.model, body)
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


if __name__ == "__main__":
    torch.set_num_threads(1)
    ThreadingHTTPServer.request_queue_size = 256  # else a burst of connections is reset
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()
