"""The text of web pages, in WARC archives and .html files; needs the extra "web".

fastwarc reads archives and resiliparse extracts the text; both are of one project
(https://github.com/chatnoir-eu/chatnoir-resiliparse).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import IO, Any

from titanlite.data.text import (
    Document,
    ProblemHandler,
    ReadProblem,
    TextRules,
    decompress,
    report_failures,
)
from titanlite.data.text_files import FileRange, open_text_file, too_long_error
from titanlite.data.urls import StorageError
from titanlite.errors import DataError
from titanlite_corpus.extras import import_extra
from titanlite_corpus.page_text import PageError, extract_text

ARCHIVE_SUFFIXES = (".warc", ".warc.gz")
WEB_SUFFIXES = (*ARCHIVE_SUFFIXES, ".html", ".htm")
_RECORD_END = b"\r\n\r\n"
_PAGE_TYPES = ("text/html", "application/xhtml+xml")


def require_web_extra(source: str) -> None:
    """Raise ConfigError unless the packages are installed."""
    for module in ("fastwarc", "resiliparse"):
        import_extra(module, "web", f'sources: "{source}": reading web pages')


def read_web_pages(
    part: FileRange, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    """The main text of each HTML page in a file, without menus and footers."""
    read = _read_archive if part.path.endswith(ARCHIVE_SUFFIXES) else _read_page
    yield from report_failures(part, read(part, rules, on_problem), on_problem)


def _read_page(part: FileRange, rules: TextRules, on_problem: ProblemHandler) -> Iterator[Document]:
    with open_text_file(part.path) as file:
        content = file.read(rules.max_bytes + 1)
    if len(content) > rules.max_bytes:
        on_problem(ReadProblem("too_long", too_long_error(part.path, rules.max_bytes)))
    else:
        yield from _extract_page(content, None, part.path, on_problem)


def _extract_page(
    content: bytes, charset: str | None, origin: str, on_problem: ProblemHandler
) -> Iterator[Document]:
    """The document of a page, if its text can be extracted."""
    try:
        yield Document(extract_text(content, charset), origin)
    except PageError as error:
        fix = 'Leave it out: read.on_error = "skip".'
        on_problem(ReadProblem("not_html", DataError(f"{origin}: {error}.", fix=fix)))


def _read_archive(
    part: FileRange, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    with open_text_file(part.path) as file:
        is_compressed = part.path.endswith(".gz")
        stream = _ArchiveStream(decompress(file, part.path) if is_compressed else file)
        yield from _read_records(stream, part.path, rules, on_problem)


def _read_records(
    stream: _ArchiveStream, path: str, rules: TextRules, on_problem: ProblemHandler
) -> Iterator[Document]:
    """Responses of an archive that are HTML. A truncated archive ends with a problem."""
    from fastwarc.warc import ArchiveIterator, WarcRecordType

    source: Any = stream
    records = ArchiveIterator(source, record_types=WarcRecordType.response, parse_http=True)
    while record := stream.call(lambda: next(records, None)):
        if (record.http_content_type or "").lower() not in _PAGE_TYPES:
            continue
        content = _read_page_record(stream, record, rules.max_bytes + 1)
        origin = f"{path}:{record.headers.get('WARC-Target-URI', record.record_id)}"
        if len(content) > rules.max_bytes:
            on_problem(ReadProblem("too_long", too_long_error(origin, rules.max_bytes)))
        elif stream.is_intact:
            yield from _extract_page(content, record.http_charset, origin, on_problem)
    if isinstance(stream.error, StorageError):
        raise stream.error
    if not stream.is_intact:
        message = f"{path}: cannot be read to its end ({stream.error or 'it is truncated'})."
        on_problem(ReadProblem("damaged", DataError(message)))


def _read_page_record(stream: _ArchiveStream, record: Any, most: int) -> bytes:
    return stream.call(lambda: record.reader.read(most)) or b""


class _ArchiveStream:
    """The bytes of an archive; remembers what fastwarc takes for the end of the archive.

    fastwarc reports neither an error of its stream nor a record that is not complete.
    """

    def __init__(self, stream: IO[bytes]):
        self._stream, self._tail, self._ended, self._position = stream, b"", False, 0
        self.error: BaseException | None = None

    def call(self, function: Callable[[], Any]) -> Any:
        """Call a function of fastwarc; None if it fails, which `error` then records."""
        try:
            return function()
        except BaseException as error:  # a panic of its Rust code is not an Exception
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            self.error = error
            return None

    def tell(self) -> int:
        """The number of bytes read."""
        return self._position

    def read(self, size: int) -> bytes:
        """The next bytes; none after an error."""
        try:
            content = self._stream.read(size)
        except (OSError, StorageError) as error:
            self.error, content = error, b""
        self._ended = not content
        self._position += len(content)
        self._tail = (self._tail + content)[-len(_RECORD_END) :]
        return content

    @property
    def is_intact(self) -> bool:
        """Whether no error occurred, and the end is that of a record."""
        if self.error:
            return False
        return not self._ended or not self._tail or self._tail == _RECORD_END
