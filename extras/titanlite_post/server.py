"""Generation by a vLLM server over HTTP, with the present weights of the run.

When a rollout begins, the weights are written as a Hugging Face folder, in the compute dtype, and
the server loads it: it must see the same path. Then one rank of each data-parallel rank asks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Sequence
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen
from uuid import uuid4

import torch

from titanlite.distributed.collectives import (
    gather_from_all_ranks,
    run_on_all_ranks,
    run_on_rank_0,
)
from titanlite.errors import ConfigError
from titanlite.job import RunParts
from titanlite.models.label_sampling import mix_int64
from titanlite.storage import StorageFolder
from titanlite.threads import open_thread_pool
from titanlite.training.run import Run
from titanlite_post.export import write_weights
from titanlite_post.generation import Generation, Prompts

CONNECTIONS = 1024  # of all ranks to the server; more than its backlog (2048) would be reset
SAMPLING: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
SAMPLING |= {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# until here what a generation_config.json could change; log-probabilities of the sampled ids alone
SAMPLING |= {"ignore_eos": True, "logprobs": 0, "return_token_ids": True}


class Server:
    """The HTTP API of a vLLM server that was started with VLLM_SERVER_DEV_MODE=1.

    `timeout`: seconds that it may take for an answer. Raises ConfigError.
    """

    def __init__(self, url: str, timeout: float):
        self._url, self._timeout = url.rstrip("/"), timeout

    def load_weights(self, path: str) -> None:
        """Replace the weights by those of a Hugging Face folder; waits for a server that starts."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._post("/collective_rpc", body, waits=True)

    def complete(self, request: dict[str, Any]) -> tuple[list[int], list[float]]:
        """(sampled ids, their log-probabilities)"""
        answer = self._post("/v1/completions", SAMPLING | request)
        try:
            (choice,) = answer["choices"]
            ids, log_probs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            if len(ids) == len(log_probs):
                return ids, log_probs
        except (LookupError, TypeError, ValueError):
            pass
        raise self.error("its answer has no token ids with a log-probability each")

    def _post(self, path: str, body: dict[str, Any], waits: bool = False) -> Any:
        deadline = time.monotonic() + self._timeout
        headers = {"Content-Type": "application/json"}
        request = Request(self._url + path, json.dumps(body).encode(), headers)
        while True:
            try:
                with urlopen(request, timeout=max(1.0, deadline - time.monotonic())) as response:
                    return json.loads(response.read() or "null")
            except HTTPError as error:
                text = error.read(300).decode(errors="replace")
                raise self.error(f"{path} was refused ({error.code} {text})") from None
            except (OSError, HTTPException, ValueError) as error:
                # completions are not asked for again: a restarted server has other weights
                if not waits or time.monotonic() > deadline - 1:
                    fix = "Start it; if it is only slow, raise comm.train_timeout_seconds."
                    raise self.error(f"{path} had no answer ({error})", fix) from None
            time.sleep(1)

    def error(self, problem: str, fix: str = "") -> ConfigError:
        fix = fix or "Start vLLM 0.18 or later with this model and VLLM_SERVER_DEV_MODE=1."
        guide = " See docs/how-to/generate-with-vllm.md."
        return ConfigError(f'grpo.server = "{self._url}": {problem}.', fix=fix + guide)


class ServerGenerator:
    """Completions by a server; see `ShardedGenerator.generate`.

    `ends`: ids that end a completion. The seed of a completion is a function of debug.seed and its
    number, but a server need not sample the same ids twice: its rounding depends on its load.
    """

    def __init__(self, url: str, run: Run, parts: RunParts, ends: Collection[int]):
        self._run, self._parts, self._mesh = run, parts, parts.layout.mesh
        tokenizer, config = parts.stream.tokenizer, parts.job.config
        assert tokenizer is not None, "format prompts needs one"
        self._tokenizer, self._ends = tokenizer, frozenset(ends)
        # below the limit of the watchdog, which would report a hang
        self._server = Server(url, 0.8 * config.comm.train_timeout_seconds)
        self._folder = StorageFolder(parts.job.folder.resolve() / "server_weights")
        self._loaded, self._salt = -1, ""  # step whose weights the server has; see `_update_server`

    def generate(
        self,
        prompts: Prompts,
        numbers: Sequence[int],
        max_new_tokens: int,
        progress: Callable[[], None] = lambda: None,
    ) -> list[Generation]:
        if self._loaded != self._run.state.step:
            self._update_server(self._run.state.step)
        shared = (self._mesh.tp, self._mesh.cp, self._mesh.pp)  # their ranks have the same prompts
        asks = not any(mesh.get_local_rank() for mesh in shared)
        seed = self._parts.job.config.debug.seed
        keys = mix_int64(mix_int64(torch.tensor(numbers, dtype=torch.int64)) + seed).tolist()
        requests = [
            {"prompt": list(prompt), "seed": key, "max_tokens": max_new_tokens}
            for prompt, key in zip(prompts, keys, strict=True)
        ]

        def ask() -> list[Generation]:
            connections = max(1, CONNECTIONS // self._mesh.batch.size())
            with open_thread_pool(connections) as pool:
                return list(pool.map(self._complete, requests if asks else []))

        own = run_on_all_ranks(ask)
        if all(mesh.size() == 1 for mesh in shared):
            return own
        values = [(each.ids, each.log_probs, each.ended) for each in own]
        answers = gather_from_all_ranks((self._mesh.batch_rank, values) if asks else None)
        of_rank = dict(answer for answer in answers if answer is not None)
        return [Generation(*each) for each in of_rank[self._mesh.batch_rank]]

    def _complete(self, request: dict[str, Any]) -> Generation:
        vocab_size, padded = self._tokenizer.vocab_size, self._parts.job.sizes.vocab_size
        request |= {
            "stop_token_ids": sorted(self._ends),
            "logit_bias": {str(id): -100 for id in range(vocab_size, padded)},
            "cache_salt": self._salt,
        }
        ids, log_probs = self._server.complete(request)
        ended = bool(ids) and ids[-1] in self._ends
        if max(ids, default=0) >= vocab_size:
            raise self._server.error(f"returned id {max(ids)}; the tokenizer has {vocab_size}")
        if not ended and len(ids) != request["max_tokens"]:
            raise self._server.error(
                f"ended after {len(ids)} of {request['max_tokens']} ids, without an id that ends"
            )
        return Generation(ids, log_probs, ended)

    def _update_server(self, step: int) -> None:
        """Let the server load the present weights; a collective."""
        set_phase, folder = self._run.watchdog.set_phase, self._folder / f"step-{step}"
        set_phase(step + 1, "weights for the server")
        # always a new folder: what the server may still map can be deleted, but not changed
        run_on_rank_0(lambda: self._folder.remove("") if self._folder.exists() else None)
        write_weights(folder, self._run, self._parts)
        set_phase(step + 1, "weights of the server")
        run_on_rank_0(lambda: self._server.load_weights(folder.path))
        set_phase(step + 1, "generate")
        # a server, which may outlive this run, reuses keys and values of a prompt for equal salts
        self._loaded, self._salt = step, uuid4().hex
