"""Generation by a server over HTTP, with real processes: as by the run itself."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import subprocess
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace

import pytest
import torch

from conftest import HANG_SECONDS, ROOT
from tests.distributed.oracle import (
    CPU,
    SGD,
    Layout,
    Recipe,
    build_parallel,
    fit_recipe,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import recipe_of
from tests.faults.launch import LaunchedRun, lines_of
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.errors import UserError
from titanlite.storage import StorageFolder
from titanlite_post.export import write_weights
from titanlite_post.grpo import GRPOSection, RewardObjective, RolloutData
from titanlite_post.server import Server, ServerGenerator
from titanlite_post.tests.test_runs import use_command

pytestmark = pytest.mark.slow

EXPORTS = {
    "llama3": [Layout(shard=2, tensor=2), Layout(pipeline=2, shard=2)],
    "mixtral": [Layout(shard=4, expert=2), Layout(tensor=2, pipeline=2, expert=2, expert_tensor=1)],
}

REWARD = """
from titanlite_post.rewards import REWARDS

def early(completion, record):
    return sum(letter < "g" for letter in completion) / 10

REWARDS["early"] = early
"""
SETTINGS = {
    "attention.mask": "document",
    "checkpoint.enable": "false",
    "validation.enable": "false",
    "training.seq_len": 64,
    "training.local_batch_size": 4,
    "training.global_batch_size": 4,
    "training.steps": 3,
    "optimizer.name": "SGD",  # rounding moves no weight by much
    "optimizer.lr": 1.0,
    "lr_scheduler.warmup_steps": 1,
    "metrics.log_freq": 2,
    "model.vocab_size": 264,  # the tokenizer has 258
    "grpo.reward": "early",
    "grpo.group_size": 4,
    "grpo.max_new_tokens": 8,
    "grpo.bos": "true",
    "job.import": "early_reward",
}


@pytest.fixture
def prompts(run_toml, tmp_path, monkeypatch) -> Path:
    """The folder with a TOML of prompts."""
    (tmp_path / "early_reward.py").write_text(REWARD)
    monkeypatch.syspath_prepend(str(tmp_path))
    lines = [{"prompt": text} for text in ("a", "bcd", "ef", "g h", "ij", "klm")]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = run_toml.read_text()
    (before, _, after) = text.partition("sources = ")
    source = f'[{{ name = "p", path = "{tmp_path}/prompts.jsonl", format = "prompts" }}]\n'
    run_toml.write_text(before + "sources = " + source + after.partition("\n")[2])
    return run_toml


def train(ranks: int, toml: Path, name: str, **settings) -> Path:
    """The folder of a run, which must succeed."""
    folder = toml.parent / name
    options = {"job.config_file": toml, **SETTINGS, "job.dump_folder": folder} | settings
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    with LaunchedRun(ranks, folder, *arguments, prepare=partial(use_command, "grpo", None)) as run:
        assert run.wait() == [0] * ranks, run.output
    return folder


@contextmanager
def serve(python: str, *options: str):
    """The URL of a server."""
    command = [python, "-m", "titanlite_post.tests.completion_server", *options]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'extras'}"}
    process = subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE)
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.terminate()  # which reaches the fork, unlike SIGKILL
        process.communicate()


def completions_of(folder: Path) -> list[dict]:
    paths = sorted((folder / "completions").iterdir())
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def gaps_of(folder: Path) -> list[float]:
    lines = lines_of(folder)
    return [line["sampler_gap"] for line in lines if line.get("event") == "rollout"]


def losses_of(folder: Path) -> list[float]:
    return [line["loss"] for line in lines_of(folder) if "event" not in line]


def test_a_server_samples_what_the_run_would_and_one_with_old_weights_shows(prompts, python):
    """On 4 ranks with a server, against generation by the run itself on one."""
    expected = train(1, prompts, "own")
    layout = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 2}
    with serve(python) as url:
        found = train(4, prompts, "server", **layout, **{"grpo.server": url})
    assert len(gaps_of(found)) == 3 and max(gaps_of(found)) < 1e-5, gaps_of(found)
    assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-4, abs=1e-6)
    for own, other in zip(completions_of(expected), completions_of(found), strict=True):
        assert own["ids"] == other["ids"]
        for ours, theirs in zip(own["sampled"], other["sampled"], strict=True):
            assert ours == pytest.approx(theirs, abs=1e-5)
    with serve(python, "--stale") as url:
        found = train(1, prompts, "stale", **{"grpo.server": url})
    first, *later = gaps_of(found)
    assert first < 1e-5 and min(later) > 1e-2, (first, later)


def export(layouts: list[Layout], recipe: Recipe, folder: Path) -> None:
    for layout in layouts:
        sharded, parallel = build_parallel(layout, recipe)
        config = SimpleNamespace(training=SimpleNamespace(seq_len=64))
        parts = SimpleNamespace(
            job=SimpleNamespace(spec=recipe.spec, sizes=recipe.sizes, config=config),
            sharded=sharded,
            layout=parallel,
            stream=SimpleNamespace(tokenizer=None),
            rank=SimpleNamespace(rank=torch.distributed.get_rank()),
        )
        write_weights(StorageFolder(folder / str(layout)), SimpleNamespace(device=CPU), parts)


@pytest.mark.parametrize(("family", "layouts"), EXPORTS.items())
def test_every_layout_gives_the_server_the_same_weights(family, layouts, tmp_path):
    ranks, *_ = {layout.degrees.ranks for layout in layouts}
    recipe = fit_recipe(SGD if family == "llama3" else recipe_of(family), layouts[-1])
    run_on_ranks(export, 1, [Layout()], recipe, tmp_path)
    run_on_ranks(export, ranks, layouts, recipe, tmp_path)
    expected = open_hugging_face(StorageFolder(tmp_path / str(Layout())))
    for layout in layouts:
        found = open_hugging_face(StorageFolder(tmp_path / str(layout)))
        assert found.tensors.keys() == expected.tensors.keys()
        for name in expected.tensors:
            assert torch.equal(found.read(name), expected.read(name)), (layout, name)


def test_a_ratio_to_the_server_weighs_the_advantage_up_to_a_limit():
    log_probs = torch.tensor([[-1.0, -1.0, -3.0, -2.0]])
    sampled = torch.tensor([[-1.5, -4.0, -2.0, -2.0]])  # ratios e^0.5, e^3, e^-1 and, ignored, 1
    advantage = torch.tensor([[1.0, -0.5, 2.0, 7.0]])
    batch = SimpleNamespace(labels=torch.tensor([[1, 2, 3, -100]]), weights=advantage)
    engine = SimpleNamespace(token_losses=lambda batch: -log_probs)
    inputs = SimpleNamespace(batch=batch, valid=torch.tensor(3))
    mesh = SimpleNamespace(batch=SimpleNamespace(ndim=0))
    corrected = torch.tensor([[math.exp(0.5), -0.5 * 2.5, 2 * math.exp(-1), 0]])
    for bound, expected in {2.5: corrected, 0.0: torch.tensor([[1.0, -0.5, 2.0, 0]])}.items():
        section = GRPOSection(server="http://host", server_correction=bound)
        data = RolloutData(sampled, old=None, reference=None)
        objective = RewardObjective(section, engine, mesh, lambda data=data: data, lambda: True)
        found = objective(inputs, lambda phase: None)
        torch.testing.assert_close(found.weights, expected)
        torch.testing.assert_close(found.loss, -expected.sum() / 3)
        assert objective.means[3].item() == pytest.approx((0.5 + 3 + 1) / 3)
    # several steps on a rollout: the ratio to the server is that of the weights that generated
    old = log_probs - 0.1
    section, data = GRPOSection(server="http://host"), RolloutData(sampled, old, None)
    objective = RewardObjective(section, engine, mesh, lambda: data, lambda: True)
    found = objective(inputs, lambda phase: None)
    behind = (old - sampled).exp().clamp(max=2)
    expected = math.exp(0.1) * behind * advantage * (batch.labels >= 0)
    torch.testing.assert_close(found.weights, expected)


@contextmanager
def answering(code: int, content: str):
    """A server that gives the same answer to every request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def answer_of(ids: list[int] | None, log_probs: list[float]) -> str:
    choice = {"token_ids": ids, "logprobs": {"token_logprobs": log_probs}}
    return json.dumps({"choices": [choice]})


@pytest.mark.parametrize(
    ("code", "content", "expected"),
    [
        (404, "no such route", "/v1/completions was refused (404 no such route)"),
        (200, "<html>", "/v1/completions had no answer"),
        (200, answer_of(None, [-1.0]), "no token ids with a log-probability each"),
        (200, answer_of([1, 2], [-1.0]), "no token ids with a log-probability each"),
        (200, answer_of([1, 99], [-1.0, -2.0]), "returned id 99; the tokenizer has 50"),
        (200, answer_of([1, 2], [-1.0, -2.0]), "ended after 2 of 4 ids"),
    ],
)
def test_an_answer_that_would_train_on_wrong_labels_is_refused(code, content, expected):
    with answering(code, content) as url:
        config = SimpleNamespace(comm=SimpleNamespace(train_timeout_seconds=HANG_SECONDS))
        config.debug = SimpleNamespace(seed=0)
        sizes, one = (
            SimpleNamespace(vocab_size=60),
            SimpleNamespace(get_local_rank=lambda: 0, size=lambda: 1),
        )
        parts = SimpleNamespace(
            job=SimpleNamespace(config=config, folder=Path(), sizes=sizes),
            layout=SimpleNamespace(
                mesh=SimpleNamespace(tp=one, cp=one, pp=one, batch=one, batch_rank=0)
            ),
            stream=SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=50)),
        )
        run = SimpleNamespace(state=SimpleNamespace(step=-1))  # whose weights it has
        generator = ServerGenerator(url, run, parts, ends=[7])
        with pytest.raises(UserError, match=re.escape(expected)):
            generator.generate([[1], [2]], [0, 1], max_new_tokens=4)


def test_a_server_that_never_starts_is_an_error():
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    with pytest.raises(UserError, match="/collective_rpc had no answer .*refused"):
        Server(f"http://127.0.0.1:{port}", timeout=1).load_weights("/folder")
