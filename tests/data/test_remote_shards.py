"""Shards by URL: the ids of local ones, through a cache of bounded size that processes share."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from pathlib import Path

import fsspec
import numpy as np
import pytest

from tests.checkpoint.object_store import needs_s3, open_store
from tests.data.test_stream import VOCAB_SIZE, write_corpus
from tests.faults.launch import LaunchedRun
from titanlite.data import CorpusChecks, SourceConfig, open_sample_stream, remote_shards
from titanlite.data.formats import open_token_source
from titanlite.data.remote_shards import BLOCK_BYTES, BlockCache
from titanlite.data.token_source import CacheLimits
from titanlite.errors import DataError
from titanlite.log import logger

TOKENS = 400_000  # 800 KB in 3 shards: 2 blocks each


@pytest.fixture
def remote(tmp_path):
    """(URL of a folder of shards, the same folder on the disk)."""
    write_corpus(tmp_path / "corpus", TOKENS)
    url = f"memory://{tmp_path}/bucket"
    fsspec.filesystem("memory").put(f"{tmp_path}/corpus", url, recursive=True)
    yield url, tmp_path / "corpus"
    fsspec.filesystem("memory").rm(url, recursive=True)


def checks(tmp_path: Path, limit: int = 1 << 30, **changes) -> CorpusChecks:
    return CorpusChecks(cache=CacheLimits(str(tmp_path / "cache"), limit), **changes)


def cached_bytes(tmp_path: Path) -> int:
    return sum(path.stat().st_size for path in (tmp_path / "cache" / "blocks").iterdir())


STARTS = np.random.default_rng(3).integers(0, TOKENS - 1025, 60)


def test_remote_shards_have_the_ids_and_the_properties_of_local_ones(remote, tmp_path):
    url, folder = remote
    local = open_token_source("megatron", str(folder))
    for verify in ("sample", "full", "off"):
        found = open_token_source("megatron", url, checks(tmp_path, verify=verify))
        assert (found.tokens, found.fingerprint) == (local.tokens, local.fingerprint)
        assert found.content_sample == (None if verify == "off" else local.content_sample)
        assert np.array_equal(found.gather(STARTS, 1025), local.gather(STARTS, 1025))
    streams = [
        open_sample_stream(
            [SourceConfig("a", path)], seq_len=64, seed=1, vocab_size=VOCAB_SIZE, checks=options
        )
        for path, options in ((str(folder), None), (url, checks(tmp_path)))
    ]
    assert streams[0].properties == streams[1].properties


def test_each_block_is_fetched_once_for_all_processes_and_again_if_it_is_damaged(
    remote, tmp_path, monkeypatch
):
    url, folder = remote
    local, fetched = open_token_source("megatron", str(folder)), []
    first, second = (open_token_source("megatron", url, checks(tmp_path)) for _ in range(2))
    memory = type(fsspec.filesystem("memory"))
    cat_ranges = memory.cat_ranges

    def count_ranges(self, paths, *others, **options):
        fetched.extend(paths)
        return cat_ranges(self, paths, *others, **options)

    monkeypatch.setattr(memory, "cat_ranges", count_ranges)
    for corpus in (first, second):
        assert np.array_equal(corpus.gather(STARTS, 1025), local.gather(STARTS, 1025))
    assert 3 <= (once := len(fetched)) <= 6
    damaged = next((tmp_path / "cache" / "blocks").iterdir())
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    assert np.array_equal(second.gather(STARTS, 1025), local.gather(STARTS, 1025))
    assert len(fetched) == once + 1


def test_the_cache_never_has_more_bytes_than_its_limit(remote, tmp_path):
    url, folder = remote
    local, limit = open_token_source("megatron", str(folder)), 3 * (BLOCK_BYTES + 16)
    corpus = open_token_source("megatron", url, checks(tmp_path, limit))
    for start in STARTS:
        found = corpus.gather(np.array([start]), 1025)
        assert np.array_equal(found, local.gather(np.array([start]), 1025))
        assert 0 < cached_bytes(tmp_path) <= limit
    (tmp_path / "cache" / "bytes").unlink()  # lost: the blocks are counted
    corpus.gather(STARTS, 1025)
    assert cached_bytes(tmp_path) <= limit


def test_the_blocks_that_were_read_last_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(remote_shards, "_KEPT", 1.0)
    cache = BlockCache(CacheLimits(str(tmp_path), 4 * (BLOCK_BYTES + 16)))

    def fetch(names):
        fetched.extend(number for _, number in names)
        return [bytes([number]) * BLOCK_BYTES for _, number in names]

    for number in range(4):
        fetched: list[int] = []
        cache.read([("a", number)], fetch)
        os.utime(tmp_path / "blocks" / f"a-{number}", ns=(number, number))
    cache.read([("a", 0)], fetch)  # so that it is the newest
    cache.read([("a", 9)], fetch)
    fetched = []
    assert cache.read([("a", 0), ("a", 9)], fetch)["a", 9] == bytes([9]) * BLOCK_BYTES
    cache.read([("a", 1)], fetch)
    assert fetched == [1]


def test_damaged_and_incomplete_remote_shards_are_refused(remote, tmp_path):
    url, _ = remote
    memory, options = fsspec.filesystem("memory"), checks(tmp_path)

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


def test_a_cache_that_other_users_can_write_to_is_refused(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / f"titanlite_{os.getuid()}").mkdir()
    (tmp_path / f"titanlite_{os.getuid()}").chmod(0o777)
    with pytest.raises(DataError, match="other users can write to it"):
        open_token_source("megatron", remote[0])


@needs_s3
def test_two_ranks_train_from_s3_and_fetch_each_block_once(run_toml, corpus, tmp_path, monkeypatch):
    with open_store() as store:
        for name, value in store.environ.items():
            monkeypatch.setenv(name, value)
        fsspec.filesystem("s3").put(f"{corpus}/train", "s3://bucket/train", recursive=True)
        options = checks(tmp_path)
        starts = np.arange(0, 20_000, 999)
        found = open_token_source("megatron", "s3://bucket/train", options).gather(starts, 100)
        local = open_token_source("megatron", f"{corpus}/train").gather(starts, 100)
        assert np.array_equal(found, local)
        shutil.rmtree(tmp_path / "cache")
        store.reset()
        argv = ["--job.config_file", str(run_toml), "--training.steps", "2"]
        argv += ["--checkpoint.enable", "false", "--validation.enable", "false"]
        argv += ["--data.cache_folder", str(tmp_path / "cache")]
        argv += ["--data.sources", '[{ name = "code", path = "s3://bucket/train" }]']
        with LaunchedRun(2, tmp_path / "out", *argv, prepare=store.set_environment) as run:
            assert run.wait() == [0, 0], run.output
        gets = [line for line in store.requests() if line == "GET /bucket/train/shard.bin"]
        blocks = len(list((tmp_path / "cache" / "blocks").iterdir()))
        # each rank verifies 8 samples when it checks its settings, and when it starts
        assert blocks > 1 and len(gets) == 2 * 2 * 8 + blocks


def test_a_cache_that_fails_is_left_out(tmp_path, monkeypatch):
    cache = BlockCache(CacheLimits(str(tmp_path / "cache")))
    names, fetch = [("key", 1)], lambda missing: [b"content"] * len(missing)
    warned: list[tuple] = []
    monkeypatch.setattr(logger, "warning", lambda *args: warned.append(args))

    def fail(*args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    assert cache.read(names, fetch) == {names[0]: b"content"}
    monkeypatch.setattr(os, "utime", fail)  # read-only now; the block is there
    assert cache.read(names, lambda missing: pytest.fail("fetched")) == {names[0]: b"content"}
    shutil.rmtree(tmp_path / "cache")  # cleaned
    for _ in range(2):
        assert cache.read(names, fetch) == {names[0]: b"content"}
    assert ["cannot be used" in text for text, *_ in warned] == [True]
