"""Text of every kind of file and place: what cannot be read is refused or reported."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from titanlite.data import text
from titanlite.data.text import ReadProblem, TextRules, list_file_ranges, read_located_documents
from titanlite.data.text_files import FileRange, find_files
from titanlite.errors import DataError
from titanlite.log import logger

TEXTS = [f"{i} é🙂\r\n" * (i % 7) + "x" for i in range(100)]
SUFFIXES = [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"]


def write(path: Path, texts: list[str], field: str = "text") -> Path:
    lines = b"".join(json.dumps({field: text}).encode() + b"\n" for text in texts)
    if path.suffix == ".parquet":
        table = pyarrow.table({field: texts})
        pyarrow.parquet.write_table(table, path, row_group_size=7)
    elif path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines[:999]) + gzip.compress(lines[999:]))  # two members
    elif path.suffix == ".zst":
        codec = pyarrow.Codec("zstd")
        path.write_bytes(b"".join(codec.compress(part, asbytes=True) for part in (lines, b"\n")))
    else:
        path.write_bytes(lines)
    return path


def read(ranges: list[FileRange], **rules) -> tuple[list[str], list[ReadProblem], list[str]]:
    """(texts, problems, origins) of what can be read."""
    problems: list[ReadProblem] = []
    documents = list(read_located_documents(ranges, TextRules(**rules), problems.append))
    return [d.text for d in documents], problems, [d.origin for d in documents]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_kind_of_file_gives_every_document_also_by_url(tmp_path, suffix):
    file = write(tmp_path / f"a{suffix}", TEXTS, "body")
    assert find_files([tmp_path]) == [file]
    memory = fsspec.filesystem("memory")
    memory.pipe(f"/{suffix}/below/a{suffix}", file.read_bytes())
    memory.pipe(f"/{suffix}/below/other.md", b"not text")
    urls = [
        f"memory:///{suffix}",
        f"memory:///{suffix}/*/a*",
        f"memory:///{suffix}/below/a{suffix}",
    ]
    assert len(find_files(urls)) == 1
    for files in ([file], *(find_files([url]) for url in urls)):
        ranges = list_file_ranges(files, "body")
        for parts in (ranges, [part for whole in ranges for part in whole.split(500)]):
            texts, problems, origins = read(parts, text_field="body")
            assert texts == TEXTS and not problems
            assert len(set(origins)) == len(TEXTS) and origins[4] == f"{files[0]}:5"
        assert (len(parts) > 3) == (suffix in (".jsonl", ".parquet"))


def test_a_missing_url_or_scheme_is_named():
    for url, reason in (
        ("memory:///nothing.txt", "no such file"),
        ("memory:///nothing/*.txt", "matches none"),
        ("unknown://a/b.txt", "cannot be opened"),
        ("http://127.0.0.1:9/a.jsonl", "cannot be read|no such file"),
    ):
        with pytest.raises(DataError, match=reason):
            find_files([url])


@pytest.mark.parametrize("suffix", SUFFIXES[1:])
def test_a_truncated_file_is_reported_and_its_beginning_kept(tmp_path, suffix):
    noise = [os.urandom(20_000).hex() for _ in range(200)]  # more than the readers' buffers
    file = write(tmp_path / f"a{suffix}", noise)
    size = file.stat().st_size
    for kept in (size - 9, size // 2):
        os.truncate(file, kept)
        ranges = list_file_ranges([file], on_problem=lambda problem: None)
        texts, problems, _ = read(ranges)
        assert [problem.kind for problem in problems] == ["damaged"], problems
        assert str(file) in problems[0].error.message
        assert texts == noise[: len(texts)]
        assert bool(texts) == (suffix != ".parquet")  # whose index is at its end
        with pytest.raises(DataError):
            list(read_located_documents(list_file_ranges([file]), TextRules()))


BROKEN = [
    (b'{"text": "a"', "not_json"),
    (b"[1]", "not_json"),
    (b'{"text": "\xff"}', "not_utf8"),
    (b'{"text": "' + b"a" * (1 << 12) + b'"}', "too_long"),
]


@pytest.mark.parametrize("line, kind", BROKEN, ids=[kind for _, kind in BROKEN])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_a_broken_line_loses_only_itself_and_is_named(tmp_path, line, kind, suffix):
    content = b'{"text": "first"}\n\n' + line + b'\n{"text": "last"}'
    if suffix == ".jsonl.zst":
        content = pyarrow.Codec("zstd").compress(content, asbytes=True)
    (tmp_path / f"a{suffix}").write_bytes(content)
    (whole,) = list_file_ranges([tmp_path / f"a{suffix}"])
    for parts in ([whole], whole.split(19)):  # a later part does not read those before it
        texts, problems, origins = read(parts, max_bytes=1 << 12)
        assert texts == ["first", "last"] and origins[0].endswith(":1")
        assert [problem.kind for problem in problems] == [kind]
        place = "line 3" if len(parts) == 1 else "byte 19"
        assert f"a{suffix}, {place}: " in problems[0].error.message


@pytest.mark.slow
def test_a_parquet_takes_time_in_proportion_to_its_row_groups(tmp_path):
    def seconds(groups: int) -> float:
        table = pyarrow.table({"text": ["a"]})
        with pyarrow.parquet.ParquetWriter(tmp_path / "a.parquet", table.schema) as writer:
            for _ in range(groups):
                writer.write_table(table)
        ranges, began = list_file_ranges([tmp_path / "a.parquet"]), time.process_time()
        assert read(ranges)[2][-1].endswith(f":{groups}")
        return time.process_time() - began

    # quadratic: 14 times; the least of three, as other processes run beside this one
    assert min(seconds(4000) for _ in range(3)) < 8 * min(seconds(1000) for _ in range(3)) + 0.3


def test_the_parts_of_a_file_that_is_one_long_line_read_it_once(tmp_path, monkeypatch):
    class CountingFile(io.BytesIO):
        def readline(self, size: int) -> bytes:
            line = super().readline(size)
            sizes.append(len(line))
            return line

    sizes: list[int] = []
    content = b"a" * 10_000
    (tmp_path / "a.jsonl").write_bytes(content)
    monkeypatch.setattr(text, "_SKIPPED_BYTES", 10)
    monkeypatch.setattr(text, "open_text_file", lambda path: nullcontext(CountingFile(content)))
    (whole,) = list_file_ranges([tmp_path / "a.jsonl"])
    texts, problems, _ = read(whole.split(100), max_bytes=50)
    assert not texts and [problem.kind for problem in problems] == ["too_long"]
    assert len(content) <= sum(sizes) < 3 * len(content)


@pytest.mark.parametrize("suffix", [".txt", *SUFFIXES])
def test_a_document_above_the_limit_is_refused_in_every_kind_of_file(tmp_path, suffix):
    """Those of web pages and of the datasets library: extras/titanlite_corpus/tests."""
    file = write(tmp_path / f"a{suffix}", ["x" * 2000])
    texts, problems, _ = read(list_file_ranges([file]), max_bytes=1000)
    assert not texts and [problem.kind for problem in problems] == ["too_long"]


def test_a_file_that_changes_after_it_was_listed_is_reported(tmp_path):
    for suffix in (".txt", *SUFFIXES):
        file = write(tmp_path / f"a{suffix}", TEXTS)
        ranges = list_file_ranges([file])
        write(file, TEXTS[:50] + ["y"] * 50)
        assert "changed" in {problem.kind for problem in read(ranges)[1]}
        file.unlink()
        assert {problem.kind for problem in read(ranges)[1]} == {"damaged"}


@pytest.mark.parametrize("name", ["a.jsonl.zst", "a.parquet"])
def test_a_file_that_needs_a_missing_package_is_named(tmp_path, monkeypatch, name):
    (tmp_path / name).write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=f"{name}: needs pyarrow"):
        list(read_located_documents(list_file_ranges([tmp_path / name]), TextRules()))


def test_empty_files_have_no_documents_and_no_problems(tmp_path):
    for suffix in (".jsonl", ".jsonl.gz", ".jsonl.zst"):
        (tmp_path / f"a{suffix}").touch()
    assert read(list_file_ranges(find_files([tmp_path]))) == ([], [], [])


def test_a_folder_that_cannot_be_listed_is_not_empty(tmp_path, monkeypatch):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        write(tmp_path / name / "x.jsonl", TEXTS)
    scandir = os.scandir

    def refuse_b(path="."):
        if os.fspath(path) == str(tmp_path / "b"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse_b)
    for given in (tmp_path, tmp_path / "*/x.jsonl", tmp_path / "**/*.jsonl", tmp_path / "[ab]"):
        with pytest.raises(DataError, match=r"/b: cannot be read \(Permission denied\)"):
            find_files([given])
    assert len(find_files([tmp_path / "a*/x*", tmp_path / "b/x.jsonl"])) == 2


@pytest.mark.parametrize("kind", ["a broken link", "not a regular file"])
def test_what_is_no_file_is_refused_and_not_left_out(tmp_path, kind):
    write(tmp_path / "a.jsonl", TEXTS)
    if kind == "a broken link":
        (tmp_path / "b.jsonl").symlink_to(tmp_path / "nothing.jsonl")
    else:
        os.mkfifo(tmp_path / "b.jsonl")
    for given in (tmp_path, tmp_path / "*.jsonl", tmp_path / "b*"):
        with pytest.raises(DataError, match=f"b.jsonl: (is {kind}|.*matches none)"):
            find_files([given])
    os.unlink(tmp_path / "b.jsonl")
    badly_named = write(tmp_path / os.fsdecode(b"c\xff.jsonl"), TEXTS)
    with pytest.raises(DataError, match=r"/c\\xff.jsonl'?: its name is not UTF-8"):
        find_files([tmp_path])
    badly_named.unlink()
    assert find_files([tmp_path]) == [tmp_path / "a.jsonl"]


def test_a_file_that_disappears_while_files_are_listed_is_named(tmp_path):
    with pytest.raises(DataError, match="gone.jsonl: cannot be read"):
        list_file_ranges([tmp_path / "gone.jsonl"])


def test_a_folder_says_what_it_skips_and_is_refused_if_that_is_most(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logger, "propagate", True)
    caplog.set_level("INFO")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "object").write_text("hidden" * 100)
    (tmp_path / "a.txt").write_text("text" * 10)
    assert find_files([tmp_path]) == [tmp_path / "a.txt"] and not caplog.records
    (tmp_path / "b.rst").write_text("text")
    (tmp_path / "README").write_text("text")
    assert find_files([tmp_path]) == [tmp_path / "a.txt"]
    message = caplog.records[-1].message
    assert "reads 1 file" in message and "1 without a suffix" in message
    assert "1 .rst" in message and f"'{tmp_path}/**/*.rst'" in message
    (tmp_path / "c.rst").write_text("text" * 20)
    with pytest.raises(DataError, match="Most of it would be left out") as refusal:
        find_files([tmp_path])
    assert f"'{tmp_path}/**/*.rst'" in refusal.value.fix
    assert len(find_files([tmp_path, f"{tmp_path}/**/*.rst"])) == 3
    assert len(find_files([f"{tmp_path}/**/*.txt"])) == 1
