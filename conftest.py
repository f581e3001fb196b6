"""A small real corpus: this repository's own text, as raw bytes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.preloaded_python import preloaded_python
from titanlite.data import open_tokenizer
from titanlite.distributed.rendezvous import bind_gloo_to_loopback
from titanlite_corpus.shard_writer import ShardWriter, write_corpus_manifest

ROOT = Path(__file__).parent
sys.path.append(str(ROOT / "scripts"))  # for tests that import a script: it imports checkout.py
# After this a process is taken for hung, on a machine however busy; no measure of speed.
HANG_SECONDS = 600
bind_gloo_to_loopback(1)  # all ranks of tests run on this machine, and inherit it


def pytest_addoption(parser) -> None:
    parser.addoption("--layouts", type=int, default=1, help="number of random layouts per kind")
    parser.addoption("--layout-seed", type=int, default=1, help="seed of the random layouts")
    parser.addoption("--layout-family", default="", help="family of the random layouts")
    parser.addoption(
        "--planted", action="store_true", help="plant all faults that the oracle must find"
    )
    parser.addoption(
        "--fuzz", type=float, default=0, help="minutes of fuzzing all readers; runs no other test"
    )
    parser.addoption(
        "--chat-templates", help="folder whose chat templates are compared with transformers"
    )


def pytest_configure(config) -> None:
    if config.getoption("--fuzz"):  # instead of all other tests
        config.args = [str(ROOT / "tests" / "fuzz")]


@pytest.fixture(scope="session")
def python(tmp_path_factory) -> Iterator[str]:
    """A Python for programs that has torch and titanlite imported; see tests/preloaded_python.py"""
    with preloaded_python(tmp_path_factory.mktemp("python"), ROOT) as programs:
        yield str(programs / "python")


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder with `train` and `validation`, of different files."""
    folder, tokenizer = tmp_path_factory.mktemp("corpus"), open_tokenizer("bytes")
    files = sorted((ROOT / "titanlite").rglob("*.py"))
    optim = ROOT / "titanlite" / "optim"
    validation = [optim / "__init__.py", optim / "loss_scale.py"]
    training = [path for path in files if path not in validation]
    for side, texts in (("train", training), ("validation", validation)):
        (folder / side).mkdir()
        with ShardWriter(folder / side / "shard", tokenizer.vocab_size) as writer:
            for path in texts:
                writer.add([*tokenizer.encode(path.read_text("utf-8")), tokenizer.eos_id])
            record = writer.close()
        write_corpus_manifest(folder / side, tokenizer.fingerprint, tokenizer.vocab_size, [record])
    return folder


@pytest.fixture
def run_toml(corpus, tmp_path) -> Path:
    """A complete tiny job; tests override settings on the command line."""
    path = tmp_path / "run.toml"
    path.write_text(
        f"""
        [job]
        dump_folder = "{tmp_path}/out"
        device = "cpu"
        [model]
        dim = 32
        n_layers = 2
        n_heads = 4
        n_kv_heads = 2
        hidden_dim = 64
        vocab_size = 258
        [data]
        tokenizer = "bytes"
        sources = [{{ name = "code", path = "{corpus}/train" }}]
        validation = [{{ name = "code", path = "{corpus}/validation" }}]
        [training]
        seq_len = 48
        local_batch_size = 2
        global_batch_size = 8
        steps = 6
        mixed_precision_param = "float32"
        [lr_scheduler]
        warmup_steps = 2
        [activation_checkpoint]
        mode = "none"
        [validation]
        enable = true
        freq = 3
        seq_len = 48
        steps = 2
        [checkpoint]
        enable = true
        interval = 3
        [metrics]
        log_freq = 1
        """
    )
    return path
