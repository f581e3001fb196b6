"""Shards by URL: the ids of local ones."""

from __future__ import annotations

import fsspec
import numpy as np
import pytest

from tests.checkpoint.object_store import needs_s3, open_store
from tests.data.test_stream import VOCAB_SIZE, write_corpus
from tests.faults.launch import LaunchedRun
from titanlite.data import CorpusChecks, SourceConfig, open_sample_stream
from titanlite.data.formats import open_token_source
from titanlite.errors import DataError

TOKENS = 400_000  # 800 KB in 3 shards: 2 blocks each


@pytest.fixture
def remote(tmp_path):
    """(URL of a folder of shards, the same folder on the disk)."""
    write_corpus(tmp_path / "corpus", TOKENS)
    url = f"memory://{tmp_path}/bucket"
    fsspec.filesystem("memory").put(f"{tmp_path}/corpus", url, recursive=True)
    yield url, tmp_path / "corpus"
    fsspec.filesystem("memory").rm(url, recursive=True)


STARTS = np.random.default_rng(3).integers(0, TOKENS - 1025, 60)


def test_remote_shards_have_the_ids_and_the_properties_of_local_ones(remote, tmp_path):
    url, folder = remote
    local = open_token_source("megatron", str(folder))
    for verify in ("sample", "full", "off"):
        found = open_token_source("megatron", url, CorpusChecks(verify))
        assert (found.tokens, found.fingerprint) == (local.tokens, local.fingerprint)
        assert found.content_sample == (None if verify == "off" else local.content_sample)
        assert np.array_equal(found.gather(STARTS, 1025), local.gather(STARTS, 1025))
    streams = [
        open_sample_stream(
            [SourceConfig("a", path)], seq_len=64, seed=1, vocab_size=VOCAB_SIZE, checks=options
        )
        for path, options in ((str(folder), None), (url, CorpusChecks()))
    ]
    assert streams[0].properties == streams[1].properties


def test_damaged_and_incomplete_remote_shards_are_refused(remote, tmp_path):
    url, _ = remote
    memory, options = fsspec.filesystem("memory"), CorpusChecks()

    def refuse(match: str) -> None:
        with pytest.raises(DataError, match=match):
            open_token_source("megatron", url, options)

    content = memory.cat_file(f"{url}/1.bin")
    memory.pipe_file(f"{url}/1.bin", bytes(len(content)))
    refuse("1.bin: its bytes differ")
    memory.pipe_file(f"{url}/1.bin", content[:-2])
    refuse("1.bin: is truncated")
    memory.rm_file(f"{url}/1.bin")
    refuse("1 of 6 files are missing: 1.bin")
    memory.pipe_file(f"{url}/1.bin", content)
    memory.pipe_file(f"{url}/1.idx", b"x" * memory.size(f"{url}/1.idx"))
    refuse("not a Megatron index")
    memory.pipe_file(f"{url}/manifest.json", b"{}")
    refuse("not a valid manifest")
    memory.rm_file(f"{url}/manifest.json")
    refuse("has no manifest.json")
    for nowhere in ("memory://nothing/here", "nosuch://bucket/a", "s3:///"):
        with pytest.raises(DataError, match=nowhere.rstrip("/")):
            open_token_source("megatron", nowhere, options)


@pytest.mark.slow
@needs_s3
def test_two_ranks_train_from_s3(run_toml, corpus, tmp_path, monkeypatch):
    with open_store() as store:
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").put(f"{corpus}/train", "s3://bucket/train", recursive=True)
        starts = np.arange(0, 20_000, 999)
        found = open_token_source("megatron", "s3://bucket/train").gather(starts, 100)
        local = open_token_source("megatron", f"{corpus}/train").gather(starts, 100)
        assert np.array_equal(found, local)
        store.reset()
        argv = ["--job.config_file", str(run_toml), "--training.steps", "2"]
        argv += ["--checkpoint.enable", "false", "--validation.enable", "false"]
        argv += ["--data.sources", '[{ name = "code", path = "s3://bucket/train" }]']
        with LaunchedRun(2, tmp_path / "out", *argv, prepare=store.set_environment) as run:
            assert run.wait() == [0, 0], run.output
        gets = [line for line in store.requests() if line == "GET /bucket/train/shard.bin"]
        # each rank verifies 8 samples when it checks its settings, and when it starts
        assert len(gets) >= 2 * 2 * 8 + 2 * 2  # and a sample of each step
