"""Data formats: a format that is added to FORMATS trains, resumes and mixes like the others."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import HANG_SECONDS, ROOT
from tests.data.npy_format import open_npy
from tests.data.test_stream import BYTES, SEQ_LEN, VOCAB_SIZE, open_mixture, write_corpus
from titanlite.data import (
    FORMATS,
    SampleOrder,
    SourceConfig,
    open_token_source,
    open_validation,
    prefetch,
)
from titanlite.errors import DataError, UserErrors


@pytest.fixture(autouse=True)
def npy_format(monkeypatch) -> None:
    monkeypatch.setitem(FORMATS, "npy", open_npy)


def write_npy(path: Path, tokens: int, seed: int = 5) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(0, VOCAB_SIZE, tokens).astype(np.uint16)
    np.save(path, ids)
    return ids.astype(np.int64)


@pytest.fixture
def mixture(tmp_path):
    """A .npy file and a folder of shards: their sources, and their ids by name."""
    ids = {"a": write_npy(tmp_path / "a.npy", 901), "b": write_corpus(tmp_path / "b", 700)}
    sources = [
        SourceConfig("a", str(tmp_path / "a.npy"), 0.4, format="npy"),
        SourceConfig("b", str(tmp_path / "b"), 0.6),
    ]
    return sources, ids


def test_another_format_mixes_with_shards(mixture):
    sources, ids_of = mixture
    samples = [(len(ids_of[s.name]) - 1) // SEQ_LEN for s in sources]
    order = SampleOrder(1, [(s.name, s.weight, n) for s, n in zip(sources, samples, strict=True)])
    inputs, labels = open_mixture(sources).read(100, 64)
    drawn = np.stack(order.sample_at(np.arange(100, 164)), 1)
    assert set(drawn[:, 0]) == {0, 1}
    for row, (source, _, sample) in enumerate(drawn):
        ids = ids_of[sources[source].name][sample * SEQ_LEN :][: SEQ_LEN + 1]
        assert inputs[row].tolist() == ids[:-1].tolist()
        assert labels[row].tolist() == ids[1:].tolist()


def test_another_format_resumes_at_any_position(mixture):
    sources, _ = mixture
    slices = [(position, 4) for position in range(0, 200, 4)]
    uninterrupted = list(prefetch(open_mixture(sources).read, slices))
    resumed = list(prefetch(open_mixture(sources).read, slices[31:]))
    for (inputs, labels), (expected_inputs, expected_labels) in zip(
        resumed, uninterrupted[31:], strict=True
    ):
        assert torch.equal(inputs, expected_inputs) and torch.equal(labels, expected_labels)


def test_a_changed_file_of_another_format_changes_the_properties(mixture, tmp_path):
    sources, _ = mixture
    properties = open_mixture(sources).properties
    assert open_mixture(sources).properties == properties
    assert set(properties["data.content"]) == {
        "b"
    }  # the .npy file's fingerprint is of all its bytes
    write_npy(tmp_path / "a.npy", 901, seed=6)
    changed = open_mixture(sources).properties
    assert changed["data.sources"]["a"] != properties["data.sources"]["a"]
    assert changed["data.sources"]["b"] == properties["data.sources"]["b"]


def test_another_format_is_a_validation_set(tmp_path):
    ids = write_npy(tmp_path / "a.npy", 50)
    source = SourceConfig("held out", str(tmp_path / "a.npy"), format="npy")
    held_out = open_validation(source, seq_len=7, vocab_size=VOCAB_SIZE)
    inputs, _ = held_out.read(0, held_out.samples)
    assert inputs.tolist() == ids[:49].reshape(7, 7).tolist()


def test_bos_and_ids_outside_the_vocabulary_are_detected_in_another_format(tmp_path):
    np.save(tmp_path / "a.npy", np.array([BYTES.bos_id, *range(200), BYTES.eos_id] * 3))
    source = SourceConfig("a", str(tmp_path / "a.npy"), format="npy")
    stream = open_mixture([source], tokenizer=BYTES)
    assert stream.bos and stream.sources_without(BYTES.eos_id) == []
    with pytest.raises(DataError, match="has the id 257, outside 0…256"):
        open_mixture([source], vocab_size=257).read(0, 40)


def test_an_unknown_format_is_refused_with_the_known_ones(tmp_path):
    source = SourceConfig("a", str(tmp_path / "a.npy"), format="numpy")
    with pytest.raises(DataError, match='a.npy: format = "numpy" is not') as refusal:
        open_mixture([source])
    assert refusal.value.fix == "Use megatron or packed or npy or text."


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "a.npy: cannot be read"),
        (b"no array", "a.npy: is not a .npy file"),
        (np.zeros((2, 3), np.int32), r"a.npy: has the shape \(2, 3\)"),
        (np.zeros(40, np.float32), "the type float32"),
        (np.zeros(0, np.int32), "a.npy: contains no tokens"),
        (np.zeros(5, np.int32), "has 5 tokens, but one sample needs 17"),
    ],
    ids=["missing", "foreign", "two dimensions", "floats", "empty", "short"],
)
def test_a_bad_file_of_another_format_is_an_error_that_names_it(tmp_path, content, message):
    path = tmp_path / "a.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    good = SourceConfig("b", str(tmp_path / "b"))
    write_corpus(tmp_path / "b", 700)
    with pytest.raises(DataError, match=message):
        open_mixture([SourceConfig("a", str(path), format="npy"), good])
    missing = SourceConfig("c", str(tmp_path / "missing"))
    with pytest.raises(UserErrors) as refusal:
        open_mixture([SourceConfig("a", str(path), format="npy"), missing])
    assert len(refusal.value.problems) == 2


def test_shards_are_the_default_format(tmp_path):
    write_corpus(tmp_path, 100)
    assert SourceConfig("a", str(tmp_path)).format == "megatron"
    assert open_token_source("megatron", str(tmp_path)).tokens == 100


TRAIN = """
import runpy, sys
from tests.data.npy_format import open_npy
from titanlite.data import FORMATS

FORMATS["npy"] = open_npy
runpy.run_path("train.py", run_name="__main__")
"""


def train(python: str, run_toml: Path, out: Path, *argv: str) -> list[float]:
    """Train on one process with the npy format; returns the losses of all steps so far."""
    options = ["--job.config_file", str(run_toml), "--job.dump_folder", str(out), *argv]
    command = [python, "-c", TRAIN, *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if "loss" in line and "event" not in line]


@pytest.mark.slow
def test_a_run_on_another_format_resumes_exactly(python, run_toml, corpus, tmp_path):
    write_npy(tmp_path / "a.npy", 5000)
    sources = (
        f'[{{ name = "a", path = "{tmp_path}/a.npy", format = "npy" }},'
        f' {{ name = "code", path = "{corpus}/train" }}]'
    )
    argv = ("--data.sources", sources, "--validation.enable", "false")
    argv += ("--checkpoint.enable", "true", "--checkpoint.interval", "2")
    uninterrupted = train(
        python, run_toml, tmp_path / "uninterrupted", *argv, "--training.steps", "4"
    )
    train(python, run_toml, tmp_path / "resumed", *argv, "--training.steps", "2")
    resumed = train(python, run_toml, tmp_path / "resumed", *argv, "--training.steps", "4")
    assert len(uninterrupted) == 4 and resumed == uninterrupted
