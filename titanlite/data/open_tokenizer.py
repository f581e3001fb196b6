"""Open a tokenizer, of whatever kind."""

from __future__ import annotations

import errno
from pathlib import Path

from titanlite.data.huggingface_tokenizer import HuggingFaceTokenizer
from titanlite.data.tokenizer import ALLOWED, BYTES, ByteTokenizer, RanksTokenizer, Tokenizer
from titanlite.errors import DataError
from titanlite.files import read_regular_file

MAX_TOKENIZER_BYTES = 64 << 20  # of a file; the largest in use (Gemma's tokenizer.json) has 34 MB
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # file names in checkpoints


def open_tokenizer(path: str) -> Tokenizer:
    """Open a tokenizer file; "bytes" gives a ByteTokenizer. Raises DataError."""
    return ByteTokenizer() if path == BYTES else tokenizer_from_bytes(_read_file(Path(path)), path)


def tokenizer_from_bytes(content: bytes, name: str) -> Tokenizer:
    """Make a tokenizer from the content of its file; `name` is for messages. Raises DataError."""
    if content.lstrip()[:1] != b"{":
        return RanksTokenizer(content, name)
    return HuggingFaceTokenizer(content, name)


def _read_file(path: Path) -> bytes:
    if path.is_dir():
        inside = [str(path / name) for name in TOKENIZER_FILES if (path / name).exists()]
        fix = f"Give the file: {inside[0]}" if inside else ALLOWED
        raise DataError(f'tokenizer "{path}": is a folder.', fix=fix)
    try:
        return read_regular_file(path, MAX_TOKENIZER_BYTES)
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        reason, number = str(getattr(error, "strerror", error)), getattr(error, "errno", None)
        if number not in (errno.EINVAL, errno.EFBIG):  # the messages of these two are complete
            reason = f"cannot be read ({reason})"
        raise DataError(f'tokenizer "{path}": {reason}.', fix=ALLOWED) from None
