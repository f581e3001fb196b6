"""Generation by a server over HTTP: the same completions as by the run itself."""

from __future__ import annotations

import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path
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
from tests.faults.launch import lines_of
from titanlite.checkpoint.huggingface import open_hugging_face
from titanlite.storage import StorageFolder
from titanlite_post.server import write_weights

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
    "optimizer.lr": 0.03,
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
def prompts(run_toml, tmp_path) -> Path:
    """The folder with a TOML of prompts."""
    (tmp_path / "early_reward.py").write_text(REWARD)
    lines = [{"prompt": text} for text in ("a", "bcd", "ef", "g h", "ij", "klm")]
    (tmp_path / "prompts.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    text = run_toml.read_text()
    (before, _, after) = text.partition("sources = ")
    source = f'[{{ name = "p", path = "{tmp_path}/prompts.jsonl", format = "prompts" }}]\n'
    run_toml.write_text(before + "sources = " + source + after.partition("\n")[2])
    return run_toml


def start(command: list[str], folder: Path, **options) -> subprocess.Popen:
    path = f"{ROOT}:{ROOT / 'extras'}:{folder}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes, **options)


def train(python: str, ranks: int, toml: Path, name: str, **settings) -> tuple[int, Path, str]:
    """(exit code, folder, what was printed on stderr) of a run."""
    folder = toml.parent / name
    options = {**SETTINGS, "job.dump_folder": folder} | settings
    arguments = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    program = (
        [python, "-m"]
        if ranks == 1
        else [*(f"{Path(python).parent}/torchrun", f"--nproc_per_node={ranks}", "-m")]
    )
    command = [*program, "titanlite_post", "grpo", "--job.config_file", str(toml), *arguments]
    process = start(command, toml.parent)
    _, errors = process.communicate(timeout=HANG_SECONDS)
    return process.returncode, folder, errors


@contextmanager
def serve(python: str, folder: Path, *options: str):
    """The URL of a server."""
    module = "titanlite_post.tests.completion_server"
    process = start([python, "-m", module, *options], folder)
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
    """Under layouts of 4 ranks, against generation by the run itself on one."""
    code, expected, errors = train(python, 1, prompts, "own")
    assert code == 0, errors
    pipeline = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 2}
    tensor = {"parallelism.tensor_parallel_degree": 2, "training.local_batch_size": 2}
    with serve(python, prompts.parent) as url:
        for name, layout in {"pipeline": pipeline, "tensor": tensor}.items():
            settings = layout | {"grpo.server": url}
            code, found, errors = train(python, 4, prompts, name, **settings)
            assert code == 0, errors
            assert len(gaps_of(found)) == 3 and max(gaps_of(found)) < 1e-5, gaps_of(found)
            assert losses_of(found) == pytest.approx(losses_of(expected), rel=1e-4, abs=1e-6)
            for own, other in zip(completions_of(expected), completions_of(found), strict=True):
                assert own["ids"] == other["ids"]
                for ours, theirs in zip(own["sampled"], other["sampled"], strict=True):
                    assert ours == pytest.approx(theirs, rel=1e-5)  # weights round, too
    with serve(python, prompts.parent, "--stale") as url:
        code, found, errors = train(python, 1, prompts, "stale", **{"grpo.server": url})
    assert code == 0, errors
    first, *later = gaps_of(found)
    assert first < 1e-5 and min(later) > 1e-2, (first, later)


def export(layouts: list[Layout], recipe: Recipe, folder: Path) -> None:
    for layout in layouts:
        fitted = fit_recipe(recipe, layout)
        sharded, parallel = build_parallel(layout, fitted)
        config = SimpleNamespace(training=SimpleNamespace(seq_len=64))
        parts = SimpleNamespace(
            job=SimpleNamespace(spec=fitted.spec, sizes=fitted.sizes, config=config),
            sharded=sharded,
            layout=parallel,
            stream=SimpleNamespace(tokenizer=None),
            rank=SimpleNamespace(rank=torch.distributed.get_rank()),
        )
        write_weights(StorageFolder(folder / str(layout)), SimpleNamespace(device=CPU), parts)


@pytest.mark.parametrize(("family", "layouts"), EXPORTS.items())
def test_every_layout_gives_the_server_the_same_weights(family, layouts, tmp_path):
    ranks, *_ = {layout.degrees.ranks for layout in layouts}
    recipe = SGD if family == "llama3" else recipe_of(family)
    run_on_ranks(export, 1, [Layout()], recipe, tmp_path)
    run_on_ranks(export, ranks, layouts, recipe, tmp_path)
    expected = open_hugging_face(StorageFolder(tmp_path / str(Layout())))
    for layout in layouts:
        found = open_hugging_face(StorageFolder(tmp_path / str(layout)))
        assert found.tensors.keys() == expected.tensors.keys()
        for name in expected.tensors:
            assert torch.equal(found.read(name), expected.read(name)), (layout, name)
