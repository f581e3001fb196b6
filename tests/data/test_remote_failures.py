"""Text and shards on S3 that are damaged, change, disappear or cannot be had: nothing is lost."""

from __future__ import annotations

import gzip
import json
import zlib
from functools import partial

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests.checkpoint.object_store import needs_s3, open_store
from tests.data.test_stream import write_corpus
from titanlite.data import SourceConfig, open_sample_stream, open_tokenizer
from titanlite.data.formats import open_token_source
from titanlite.data.text import TextRules, list_file_ranges, raise_problem, read_located_documents
from titanlite.data.text_files import find_files
from titanlite.data.urls import StorageError
from titanlite.errors import DataError
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.pipeline import make_corpus
from titanlite_corpus.recipe import load_recipe

pytestmark = needs_s3
TEXTS = [np.random.default_rng(n).bytes(200).hex() for n in range(300)]
LINES = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
STORAGE = ["refuse", "busy", "drop"]  # 403, 503, and a connection that ends in mid-answer


def parquet(texts: list[str]) -> bytes:
    out = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), out, row_group_size=60)
    return out.getvalue().to_pybytes()


def files_with(lines: list[bytes]) -> dict[str, bytes]:
    """The same documents in each kind of file."""
    content, texts = b"".join(lines), [json.loads(line)["text"] for line in lines]
    return {
        "a.txt": "".join(texts).encode(),
        "a.jsonl": content,
        "a.jsonl.gz": gzip.compress(content, 1),
        "a.jsonl.zst": pyarrow.Codec("zstd").compress(content, asbytes=True),
        "a.parquet": parquet(texts),
        "a.html": b"<html><body><p>" + content + b"</p></body></html>",
    }


CONTENT, OTHER = files_with(LINES), files_with(LINES[::-1])
FAILURES = {  # by file, so that each failure and each kind of file is tested
    "a.txt": ["drop"],
    "a.jsonl": ["refuse"],
    "a.jsonl.gz": ["busy"],
    "a.jsonl.zst": ["drop"],
    "a.parquet": STORAGE,
}


@pytest.fixture(scope="module")
def server():
    with pytest.MonkeyPatch.context() as patch, open_store() as store:
        for name, value in store.environ.items():
            patch.setenv(name, value)
        patch.setattr(fsspec.get_filesystem_class("s3"), "retries", 2)
        yield store


@pytest.fixture
def store(server):
    """The server without rules; its clients know no listing."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    server.reset()
    yield server
    server.reset()


def put(name: str, content: bytes) -> str:
    fsspec.filesystem("s3").pipe_file(f"bucket/{name}", content)
    return f"s3://bucket/{name}"


def read(url: str, skip: bool = True, before=lambda: None) -> tuple[str, set[str]]:
    """(text, kinds of problems); `before` runs after the files were listed."""
    problems = []
    policy = problems.append if skip else raise_problem
    ranges = list_file_ranges(find_files([url]), on_problem=policy)
    before()
    documents = [d.text for d in read_located_documents(ranges, TextRules(), policy)]
    return "".join(documents), {problem.kind for problem in problems}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_failing_storage_is_no_damage_and_damage_is_no_failing_storage(store, name):
    url, text = put(name, CONTENT[name]), "".join(TEXTS)
    drop_once = partial(store.add_rule, "GET", name, "drop", 1)
    assert read(url, skip=False, before=drop_once) == (text, set())
    for action in FAILURES[name]:
        with pytest.raises(StorageError, match=f"{name}: cannot be read"):
            read(url, before=partial(store.add_rule, "GET", name, action))
        store.reset()
    found, problems = read(put(name, CONTENT[name][: len(CONTENT[name]) * 3 // 4 + 9]))
    assert text.startswith(found)
    # the beginning of a .txt is a .txt
    assert problems == {"a.txt": set(), "a.jsonl": {"not_json"}}.get(name, {"damaged"})
    if problems:
        with pytest.raises(DataError, match=name) as refusal:
            read(url, skip=False)
        assert type(refusal.value) is DataError


@pytest.mark.slow
@pytest.mark.parametrize("name", CONTENT)
def test_a_file_that_is_replaced_or_removed_after_it_was_listed_is_reported(store, name):
    url, fs = put(name, CONTENT[name]), fsspec.filesystem("s3")
    assert read_any(url, partial(put, name, OTHER[name])) == {"changed"}
    assert read_any(url, lambda: fs.rm_file(f"bucket/{name}")) == {"damaged"}


def read_any(url: str, before) -> set[str]:
    """`read` for text and for web pages: the kinds of problems."""
    if not url.endswith(".html"):
        return read(url, before=before)[1]
    pytest.importorskip("resiliparse")
    from titanlite_corpus.web_pages import read_web_pages

    problems = []
    (part,) = list_file_ranges([url])
    before()
    list(read_web_pages(part, TextRules(), problems.append))
    return {problem.kind for problem in problems}


def test_a_file_that_is_replaced_while_it_is_read_is_reported(store, monkeypatch):
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "default_block_size", 1 << 20)
    url, problems = put("b.jsonl", LINES[0] * 9000), []
    documents = read_located_documents(list_file_ranges([url]), TextRules(), problems.append)
    assert next(documents).text == TEXTS[0]
    put("b.jsonl", LINES[1] * 9000)
    assert {document.text for document in documents} == {TEXTS[0]}
    assert [problem.kind for problem in problems] == ["changed"]


def test_a_folder_that_cannot_be_listed_is_not_empty(store):
    for number in range(2):
        put(f"tree/{number}/a.jsonl", CONTENT["a.jsonl"])
    put("tree/0/deep/b.jsonl", CONTENT["a.jsonl"])
    everything = [f"tree/{n}" for n in ("0/a.jsonl", "0/deep/b.jsonl", "1/a.jsonl")]
    for pattern, found in (
        ("tree", everything),
        ("tree/**", everything),
        ("tree/*/a*", [everything[0], everything[2]]),
        ("tree/[0]/*", everything[:1]),
    ):
        assert find_files([f"s3://bucket/{pattern}"]) == [f"s3://bucket/{n}" for n in found]
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        store.add_rule("GET", "prefix=tree%2F0%2F", "refuse")
        with pytest.raises(StorageError, match="AccessDenied"):
            find_files([f"s3://bucket/{pattern}"])
        store.reset()


def test_a_recipe_counts_damage_and_goes_on_after_the_storage_failed(store, tmp_path):
    half = len(CONTENT["a.jsonl.gz"]) // 2
    put("recipe/a.jsonl", LINES[0] + b'{"text": \n{"text": "\xff"}\n' + b"x" * (1 << 20) + b"y\n")
    put("recipe/b.jsonl.gz", CONTENT["a.jsonl.gz"][:half])
    put("recipe/c.jsonl.zst", b"")
    put("recipe/d.parquet", CONTENT["a.parquet"][:half])
    (tmp_path / "recipe.toml").write_text(
        f"""
        out = "{tmp_path / "out"}"
        tokenizer = "bytes"
        validation_share = 0.0
        [[sources]]
        name = "web"
        inputs = ["s3://bucket/recipe"]
        [read]
        on_error = "skip"
        document_mib = 1
        """
    )
    recipe, engine = load_recipe(tmp_path / "recipe.toml"), LocalEngine(workers=1)
    store.add_rule("GET", "b.jsonl.gz", "busy")
    with pytest.raises(StorageError, match=r"b.jsonl.gz: cannot be read \(OSError: .*SlowDown"):
        make_corpus(recipe, engine)
    assert not (tmp_path / "out/web").exists()
    store.reset()
    counts = make_corpus(recipe, engine).stages["read"]
    assert counts["skipped"] == {"not_json": 1, "not_utf8": 1, "too_long": 1, "damaged": 2}
    before_the_damage = zlib.decompressobj(31).decompress(CONTENT["a.jsonl.gz"][:half])
    assert counts["documents_out"] == 1 + before_the_damage.count(b"\n")


@pytest.mark.slow
def test_streamed_text_that_changes_or_cannot_be_read_ends_the_run(store):
    def stream(name: str):
        url = put(name, CONTENT["a.jsonl.gz"])
        source = SourceConfig("a", url, format="text", lanes=2)
        options = {"seq_len": 64, "seed": 1, "vocab_size": 258}
        return open_sample_stream([source], tokenizer=open_tokenizer("bytes"), **options)

    samples = 2 * len("".join(TEXTS)) // 64  # more than an epoch
    assert len(stream("s.jsonl.gz").read(0, samples)[0]) == samples
    for action in STORAGE:
        before = stream("s.jsonl.gz")
        store.add_rule("GET", "s.jsonl.gz", action)
        with pytest.raises(StorageError, match="s.jsonl.gz"):
            before.read(0, samples)
        store.reset()
    for content in (OTHER["a.jsonl.gz"], CONTENT["a.jsonl.gz"][:-30]):
        before = stream("s.jsonl.gz")
        put("s.jsonl.gz", content)
        with pytest.raises(DataError, match="s.jsonl.gz: (changed since|cannot be read)"):
            before.read(0, samples)


@pytest.mark.slow
def test_shards_that_change_or_cannot_be_read_end_the_run(store, tmp_path):
    write_corpus(tmp_path / "corpus", 60_000)
    files = {path.name: path.read_bytes() for path in (tmp_path / "corpus").iterdir()}
    fs = fsspec.filesystem("s3")
    replaced = "1.bin: was replaced or removed"
    for number, (failure, reason) in enumerate(
        [
            ("refuse", "AccessDenied"),
            ("busy", "SlowDown"),
            ("drop", "cannot be read"),
            ("remove", replaced),
            (files["1.bin"][::-1], replaced),
            (b"", replaced),
        ]
    ):
        folder = f"shards{number}"
        for name, content in files.items():
            put(f"{folder}/{name}", content)
        source = open_token_source("megatron", f"s3://bucket/{folder}")
        if isinstance(failure, bytes):
            put(f"{folder}/1.bin", failure)
        elif failure == "remove":
            fs.rm_file(f"bucket/{folder}/1.bin")
        else:
            store.add_rule("GET", "1.bin", failure)
        with pytest.raises(DataError, match=f"{folder}.*({reason})"):
            source.gather(np.arange(0, 50_000, 999), 100)
        store.reset()
