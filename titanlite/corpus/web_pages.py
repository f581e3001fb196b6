"""The text of web pages, in WARC archives and .html files; needs the extra "web".

The libraries are resiliparse and fastwarc, of one project: 4 MB, without further dependencies but
brotli. DataComp-LM (arXiv:2406.11794, section 4.2) found models trained on the text of resiliparse
and of trafilatura equally good, and resiliparse eight times as fast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from titanlite.data.text import Document, FileRange, ProblemHandler, ReadProblem, TextRules
from titanlite.data.text_files import open_text_file, too_long_error
from titanlite.errors import ConfigError, DataError

ARCHIVE_SUFFIXES = (".warc", ".warc.gz")
WEB_SUFFIXES = (*ARCHIVE_SUFFIXES, ".html", ".htm")
_PAGE_TYPES = ("text/html", "application/xhtml+xml")


def require_web_extra(source: str) -> None:
    """Raise ConfigError unless the packages are installed."""
    try:
        import fastwarc  # noqa: F401
        import resiliparse  # noqa: F401
    except ImportError as missing:
        raise ConfigError(
            f'sources: "{source}" has web pages, but {missing.name} is not installed.',
            fix="pip install 'titanlite[web]'",
        ) from missing


def read_web_pages(
    part: FileRange, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    """The main text of each HTML page in a file, without menus and footers."""
    try:
        if not part.path.endswith(ARCHIVE_SUFFIXES):
            yield from _read_page(part, rules, on_problem)
            return
        with open_text_file(part.path) as file:
            yield from _read_archive(file, part.path, rules, on_problem)
    except OSError as error:
        reason = error.strerror or error
        on_problem(ReadProblem("damaged", DataError(f"{part.path}: cannot be read ({reason}).")))


def _read_page(part: FileRange, rules: TextRules, on_problem: ProblemHandler) -> Iterator[Document]:
    with open_text_file(part.path) as file:
        content = file.read(rules.max_bytes + 1)
    if len(content) > rules.max_bytes:
        on_problem(ReadProblem("too_long", too_long_error(part.path, rules.max_bytes)))
    else:
        yield Document(extract_text(content), part.path)


def _read_archive(
    file: Any, path: str, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    """Responses of an archive that are HTML. A truncated archive ends with a problem."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    iterator = ArchiveIterator(file, record_types=WarcRecordType.response, parse_http=True)
    while True:
        try:
            record = next(iterator, None)
            if record is None:
                break
            kind = (record.http_content_type or "").lower()
            if kind not in _PAGE_TYPES:
                continue
            content = record.reader.read(rules.max_bytes + 1)
        except (OSError, EOFError, ValueError, RuntimeError) as error:
            message = f"{path}: cannot be read beyond here ({error})."
            on_problem(ReadProblem("damaged", DataError(message)))
            return
        origin = f"{path}:{record.headers.get('WARC-Target-URI', record.record_id)}"
        if len(content) > rules.max_bytes:
            on_problem(ReadProblem("too_long", too_long_error(origin, rules.max_bytes)))
        else:
            yield Document(extract_text(content, record.http_charset), origin)


def extract_text(content: bytes, charset: str | None = None) -> str:
    """The main text of an HTML page; bytes that its encoding does not have become U+FFFD."""
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding

    encoding = charset or detect_encoding(content, from_html_meta=True) or "utf-8"
    html = bytes_to_str(content, encoding)
    return extract_plain_text(html, main_content=True, alt_texts=False, links=False)
