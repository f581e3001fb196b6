"""The text of one HTML page, extracted in a process with limits on CPU time and memory.

resiliparse takes time that is quadratic in the depth of tags and in the attributes of a tag. Its
calls cannot be interrupted, so they run in a process that the system ends at its limit. This module
is also the program of that process, so it imports little.
"""

from __future__ import annotations

import os
import re
import resource
import struct
import subprocess
import sys
import time
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import IO

import titanlite
import titanlite_corpus

MAX_DEPTH = 4096  # tags that are open at once; Chromium's parser stops at 512
_CPU_SECONDS, _CPU_SECONDS_PER_MIB = 5, 3  # measured: at most 1.4 s for 1 MiB below MAX_DEPTH
_MEMORY_BYTES = 4 << 30  # of address space
_TAG = re.compile(rb"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
# Tags that need no end tag, by the HTML standard (section 13.1.2)
_UNCLOSED = frozenset(
    b"area base br col embed hr img input link meta param source track wbr html head body p li dt"
    b" dd option optgroup thead tbody tfoot tr td th colgroup caption rt rp".split()
)
_REQUEST = struct.Struct("<IQ")  # bytes of the charset, bytes of the page
_ANSWER = struct.Struct("<?Q")  # whether the text was extracted, bytes of it or of the error


class PageError(Exception):
    """A page whose text cannot be extracted."""


def extract_text(content: bytes, charset: str | None = None) -> str:
    """The main text of a page; bytes that its encoding does not have become U+FFFD.

    Raises PageError. `charset` is that of an HTTP header; if it is unknown, it is detected.
    """
    if (depth := measure_depth(content)) > MAX_DEPTH:
        raise PageError(f"has {depth:,} open tags at once, more than {MAX_DEPTH:,}")
    return _extractor().extract(content, charset or "")


def measure_depth(content: bytes) -> int:
    """The most tags that are open at once, by their names alone: one pass over the page."""
    opened: Counter[bytes] = Counter()
    depth = deepest = 0
    for match in _TAG.finditer(content):
        name = match[2].lower()
        if name in _UNCLOSED:
            continue
        if not match[1]:
            opened[name] += 1
            depth += 1
            deepest = max(deepest, depth)
        elif opened[name]:
            opened[name] -= 1
            depth -= 1
    return deepest


@lru_cache(maxsize=1)
def _extractor() -> _Extractor:
    return _Extractor()


class _Extractor:
    """A process for one page after the other; a page that exceeds its limits ends it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def extract(self, content: bytes, charset: str) -> str:
        """The text of a page; raises PageError."""
        if self._process is None:
            # of this checkout: the environment may have another one installed
            inits = (titanlite_corpus.__file__, titanlite.__file__)
            paths = [str(Path(init).parents[1]) for init in inits]
            paths += filter(None, [os.environ.get("PYTHONPATH")])
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        name = charset.encode(errors="replace")
        try:
            stdin.write(_REQUEST.pack(len(name), len(content)) + name)
            stdin.write(content)
            stdin.flush()
            done, size = _ANSWER.unpack(_read_answer(stdout, _ANSWER.size))
            answer = _read_answer(stdout, size).decode(errors="replace")
        except (BrokenPipeError, EOFError):
            code, self._process = self._process.wait(), None
            raise PageError(
                "takes more CPU time or memory than a page of its size may"
                f" (the extraction ended with {code})"
            ) from None
        if not done:
            raise PageError(f"its text cannot be extracted ({answer:.200})")
        return answer


def _read_answer(stream: IO[bytes], size: int) -> bytes:
    content = stream.read(size)
    if len(content) < size:
        raise EOFError
    return content


def _extract(content: bytes, charset: str) -> str:
    from resiliparse.extract.html2text import extract_plain_text
    from resiliparse.parse.encoding import bytes_to_str, detect_encoding, map_encoding_to_html5

    # Labels of https://encoding.spec.whatwg.org only: Python has codecs that are no charsets.
    encoding = map_encoding_to_html5(charset, fallback_utf8=False)
    encoding = encoding or detect_encoding(content, from_html_meta=True) or "utf-8"
    html = bytes_to_str(content, encoding)
    return extract_plain_text(html, main_content=True, alt_texts=False, links=False)


def _answer_requests(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """Extract the text of pages until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    while header := stdin.read(_REQUEST.size):
        name_size, size = _REQUEST.unpack(header)
        charset, content = stdin.read(name_size).decode(), stdin.read(size)
        seconds = _CPU_SECONDS + _CPU_SECONDS_PER_MIB * (size >> 20)
        resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + seconds, hard))
        try:
            done, answer = True, _extract(content, charset)
        except Exception as error:  # of any class: the page is a stranger's
            done, answer = False, f"{type(error).__name__}: {error}"
        text = answer.encode(errors="replace")
        stdout.write(_ANSWER.pack(done, len(text)) + text)
        stdout.flush()


if __name__ == "__main__":
    _answer_requests(sys.stdin.buffer, sys.stdout.buffer)
