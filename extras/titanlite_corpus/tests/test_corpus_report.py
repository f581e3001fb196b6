"""The report of a corpus: figures of every stage, examples, and no markup from documents."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from titanlite.errors import DataError
from titanlite_corpus.counts import merge_counts
from titanlite_corpus.documents import build_table
from titanlite_corpus.filters import FilterConfig, filter_table, open_rules
from titanlite_corpus.read import count_unread
from titanlite_corpus.report import render_corpus_report, write_corpus_report

EVIL = "<script>alert(1)</script> \" ' & </pre><img src=x onerror=alert(2)>"


class Elements(HTMLParser):
    """The tags of a page and the text outside of style and script."""

    def __init__(self):
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("style", "script"):
            self.text += data + " "


def read_page(page: str) -> Elements:
    elements = Elements()
    elements.feed(page)
    return elements


@pytest.fixture
def stages():
    texts = [EVIL, "mail me at jane@example.org please", "x\n" * 40]
    table = build_table(texts, EVIL, [f"{EVIL}:{n}" for n in range(3)])
    rules = open_rules(FilterConfig(rules=["personal_data", "gopher_repetition"]))
    read = {"documents_out": 3, "bytes_out": 2_000_000, "skipped": {EVIL: 7}}
    unread = [Path(f"docs/{n}.rst") for n in range(12)] + [Path("docs/<b>"), Path("x.\udcff")]
    read |= count_unread(unread)
    near = {"origin": EVIL, "text": EVIL, "kept_origin": EVIL, "kept_text": EVIL, "value": 0.75}
    removed = {
        "documents_in": 2,
        "documents_out": 1,
        "removed": {EVIL: {"documents": 1, "bytes": 5}},
        "clusters": {"2": 5, "3": 1, "100": 2},
        "samples": {EVIL: [near]},
    }
    tokenised = {"documents_in": 2, "bytes_in": 600, "tokens_out": 200, "seconds": 0.0}
    tokenised["tokenised"] = {
        EVIL: {"bytes": 400, "tokens": 100},
        "books": {"bytes": 200, "tokens": 100},
        "empty": {"bytes": 0, "tokens": 0},
    }
    filtered = filter_table(table, rules)[1] | {"seconds": 2.0, "bytes_in": 4_000_000}
    return {"read": read, "filter": filtered, "deduplicate": removed, "tokenise": tokenised}


def test_text_of_documents_is_never_markup(stages):
    page = read_page(render_corpus_report(stages, EVIL))
    names = [tag for tag, _ in page.tags]
    assert names.count("script") == 1 and "img" not in names
    assert not any(key.startswith("on") for _, attributes in page.tags for key in attributes)
    assert page.text.count("alert(2)") >= 10


def test_the_page_needs_no_network(stages):
    page = render_corpus_report(stages, "a corpus")
    for _, attributes in read_page(page).tags:
        assert not {"src", "href"} & attributes.keys()
    assert "url(" not in page and "@import" not in page


def test_the_figures_of_every_stage_are_there(stages):
    text = re.sub(r"\s+", " ", read_page(render_corpus_report(stages, "a corpus")).text)
    assert "filter 3 2 4.00 MB" in text and "2 s 2 MB/s" in text
    assert "gopher_repetition.repeated_lines 1 document (33.33%), 80 B" in text
    assert "personal_data.mail 1 change in 1 document" in text
    assert "mail me at <EMAIL> please" in text and "jane" not in text
    assert "400 B 100 0.2500 4.000" in text and "books 200 B 100 0.5000 2.000" in text
    assert "all sources 600 B 200 0.3333 3.000" in text and "empty" not in text
    assert "2 to 3 documents 6" in text and "64 to 127 documents 2" in text
    assert "value: 0.75" in text and "kept: " in text
    assert "read.unread .rst 12 files of folders, not read" in text and "docs/11.rst" in text
    assert "read.unread without a suffix 1 file of folders" in text and "docs/<b>" in text
    assert "32 to 63" in text


def test_stages_without_counts_leave_an_empty_page():
    text = read_page(render_corpus_report({"read": {}}, "a corpus")).text
    assert "Removed documents" not in text and "Length" not in text


def test_a_folder_that_cannot_be_written_is_an_error(stages, tmp_path):
    write_corpus_report(stages, "a corpus", tmp_path / "report.html")
    with pytest.raises(DataError, match="nowhere"):
        write_corpus_report(stages, "a corpus", tmp_path / "nowhere" / "report.html")


def test_counts_of_tasks_add_up():
    one = {"a": 1, "b": {"x": 2}, "samples": {"r": [{"origin": "o", "text": "t"}]}}
    two = {"a": 2, "b": {"x": 1, "y": 1}, "samples": {"r": [{"origin": "p", "text": "t"}]}}
    total = merge_counts([one, two])
    assert total["a"] == 3 and total["b"] == {"x": 3, "y": 1}
    assert total == merge_counts([two, one])
    assert {sample["origin"] for sample in total["samples"]["r"]} == {"o", "p"}
    assert one["a"] == 1 and len(one["samples"]["r"]) == 1
