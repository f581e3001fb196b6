"""Web pages and the datasets library: text is found, and what cannot be read is reported."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from titanlite.data.text import Document, ReadProblem, TextRules
from titanlite.data.text_files import describe_file
from titanlite.data.urls import StorageError
from titanlite.errors import ConfigError, DataError
from titanlite_corpus.datasets_library import list_dataset_ranges, read_dataset_rows
from titanlite_corpus.read import CorpusSource, ReadConfig, plan_reading
from titanlite_corpus.web_pages import read_web_pages

PAGE = """<html><head><title>Title</title></head><body><nav><a href="/">Home</a></nav><main>
<p>{} A paragraph of text that is long enough for a page, with an umlaut: {}.</p>
<p>And a second one, which has several words too, so that it is main content.</p>
</main><footer>Imprint</footer></body></html>"""


def read(part, reader, **rules) -> tuple[list[Document], list[ReadProblem]]:
    problems: list[ReadProblem] = []
    return list(reader(part, TextRules(**rules), problems.append)), problems


def warc_record(kind: str, number: int, mime: str, body: bytes) -> bytes:
    """A record as WARC 1.1 defines it (iipc.github.io/warc-specifications)."""
    content = f"HTTP/1.1 200 OK\r\nContent-Type: {mime}\r\n\r\n".encode() + body
    headers = {
        "WARC-Type": kind,
        "WARC-Record-ID": f"<urn:uuid:00000000-0000-0000-0000-{number:012}>",
        "WARC-Date": "2026-01-01T00:00:00Z",
        "WARC-Target-URI": f"https://example.com/{number}",
        "Content-Type": f"application/http; msgtype={kind}",
        "Content-Length": str(len(content)),
    }
    lines = ["WARC/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode() + content + b"\r\n\r\n"


@pytest.fixture
def archive(tmp_path):
    """A .warc.gz of three pages, an image and a request."""
    pytest.importorskip("resiliparse")
    pytest.importorskip("fastwarc")
    members = [
        gzip.compress(warc_record(kind, number, mime, body))  # one member for each record
        for number in range(3)
        for kind, mime, body in (
            ("request", "text/html", b"GET /"),
            ("response", "text/html; charset=latin-1", PAGE.format(number, "ä").encode("latin-1")),
            ("response", "image/png", os.urandom(2000)),
        )
    ]
    path = tmp_path / "pages.warc.gz"
    path.write_bytes(b"".join(members))
    return path


def test_the_main_text_of_the_pages_of_an_archive_is_read(archive):
    documents, problems = read(describe_file(archive), read_web_pages)
    assert not problems and len(documents) == 3
    text, origin = documents[1]
    assert text.startswith("1 A paragraph") and "umlaut: ä." in text and "second one" in text
    assert "Home" not in text and "Imprint" not in text
    assert origin == f"{archive}:https://example.com/1"
    documents, problems = read(describe_file(archive), read_web_pages, max_bytes=100)
    assert not documents and [problem.kind for problem in problems] == ["too_long"] * 3


@pytest.mark.parametrize("compressed", [True, False])
def test_a_truncated_archive_is_reported(archive, compressed):
    if not compressed:
        archive = archive.rename(archive.with_suffix(""))
        archive.write_bytes(gzip.decompress(archive.read_bytes()))
    whole = archive.stat().st_size
    for size, pages in ((whole - 30, 3), (whole - 2500, 3), (whole // 2, 2)):
        os.truncate(archive, size)
        documents, problems = read(describe_file(archive), read_web_pages)
        assert (not compressed) <= len(documents) <= pages
        assert [problem.kind for problem in problems] == ["damaged"], (size, len(documents))
        assert all("second one" in document.text for document in documents)


HOSTILE = {
    "unknown charset": ("none", PAGE.format(1, "ä").encode()),
    "codec that is no charset": ("rot13", PAGE.format(1, "ä").encode()),
    "depth": ("utf-8", b"<div>" * 100_000),
    "hidden depth": ("utf-8", b"<div><!--</div>-->" * 60_000),
}


@pytest.mark.slow
@pytest.mark.parametrize("charset_and_page", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_page_is_the_problem_of_its_record(tmp_path, charset_and_page):
    pytest.importorskip("resiliparse")
    pytest.importorskip("fastwarc")
    charset, page = charset_and_page
    good = PAGE.format(0, "ä").encode()
    pages = [("utf-8", good), (charset, page), ("utf-8", good)]
    records = [
        warc_record("response", number, f"text/html; charset={charset}", body)
        for number, (charset, body) in enumerate(pages)
    ]
    path = tmp_path / "pages.warc"
    path.write_bytes(b"".join(records))
    documents, problems = read(describe_file(path), read_web_pages)
    assert len(documents) + len(problems) == 3 and "umlaut: ä." in documents[-1].text
    assert [problem.kind for problem in problems] == (["not_html"] if page[:5] == b"<div>" else [])


def test_html_files_are_pages_and_need_the_extra(tmp_path, monkeypatch):
    pytest.importorskip("resiliparse")
    path = tmp_path / "page.html"
    path.write_text(PAGE.format(7, "ä"))
    (task,) = plan_reading(CorpusSource("web", [str(tmp_path)]), ReadConfig())
    assert task.function(tmp_path, [], task.arguments)["documents_out"] == 1
    monkeypatch.setitem(sys.modules, "resiliparse", None)
    with pytest.raises(ConfigError) as refusal:
        plan_reading(CorpusSource("web", [str(tmp_path)]), ReadConfig())
    assert "titanlite[web]" in refusal.value.fix


@pytest.fixture
def rows(tmp_path, monkeypatch):
    """Three files of four rows, and the URL that the library opens them by."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for number in range(3):
        lines = [json.dumps({"body": f"{number} {row}", "n": row}) for row in range(4)]
        (tmp_path / f"{number}.jsonl").write_text("\n".join(lines))
    return f"datasets://json?data_files={tmp_path}/*.jsonl"


def test_what_the_datasets_library_opens_is_read_in_parts(rows, tmp_path):
    pytest.importorskip("datasets")
    parts = list_dataset_ranges(rows)
    assert len(parts) == 3
    read_parts = [read(part, read_dataset_rows, text_field="body") for part in parts]
    texts = [document.text for documents, _ in read_parts for document in documents]
    assert texts == [f"{number} {row}" for number in range(3) for row in range(4)]
    documents, problems = read(parts[0], read_dataset_rows, text_field="n")
    assert not documents and [problem.kind for problem in problems] == ["not_json"] * 4
    os.utime(tmp_path / "0.jsonl", (1, 1))
    assert list_dataset_ranges(rows)[0].modified_ns != parts[0].modified_ns
    for url, error in (
        ("datasets://json?file=x", ConfigError),
        ("datasets://pandas?data_files=a.pkl", ConfigError),
        ("datasets://json?data_files=reference%3A%3Afile:///x", ConfigError),
        (f"datasets://json?data_files={tmp_path}/no.jsonl", DataError),
    ):
        with pytest.raises(error):
            list_dataset_ranges(url)


def test_a_dataset_whose_server_fails_is_not_taken_for_a_damaged_one(tmp_path, monkeypatch):
    library = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(library.config, "STREAMING_READ_MAX_RETRIES", 1)
    monkeypatch.setattr(library.config, "STREAMING_READ_RETRY_INTERVAL", 0)
    rows = [json.dumps({"text": f"row {n}"}) for n in range(9000)]
    with _serve("\n".join(rows).encode()) as (url, drop_connections):
        (part,) = list_dataset_ranges(f"datasets://json?data_files={url}")
        documents, problems = read(part, read_dataset_rows)
        assert len(documents) == len(rows) and not problems
        drop_connections.set()
        with pytest.raises(StorageError, match="after row 0: cannot be read"):
            read(part, read_dataset_rows)
    (tmp_path / "damaged.jsonl").write_text("\n".join([*rows, "{", *rows]))
    (part,) = list_dataset_ranges(f"datasets://json?data_files={tmp_path}/damaged.jsonl")
    assert [problem.kind for problem in read(part, read_dataset_rows)[1]] == ["damaged"]


@contextmanager
def _serve(content: bytes):
    """The URL of a file, and an event: once it is set, the server sends half and disconnects."""
    drop_connections = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()

        def do_GET(self):
            self.do_HEAD()
            half = len(content) // 2
            self.wfile.write(content[:half] if drop_connections.is_set() else content)

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", drop_connections
        finally:
            server.shutdown()


def test_without_the_datasets_library_its_extra_is_named(rows, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError) as refusal:
        list_dataset_ranges(rows)
    assert "titanlite[hf]" in refusal.value.fix
