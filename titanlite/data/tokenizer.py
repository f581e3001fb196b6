"""One interface over three kinds of tokenizer: tiktoken ranks, a tokenizer.json, raw bytes.

Text that looks like a special token stays text: only this room's callers put special ids in.
"""

from __future__ import annotations

import base64
import errno
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import xxhash

from titanlite.data.tokenizer_definition import added_around_text, check_definition
from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file

BYTES = "bytes"  # the name of the tokenizer that needs no file
MOST_BYTES = 64 << 20  # of a file; the largest in use (Gemma's tokenizer.json) has 34 MB
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"

# How Llama 3 cuts text before merging bytes; the ranks of a file mean little without it.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LLAMA3_RANKS, _LLAMA3_SPECIALS = 128_000, 256
_ALLOWED = (
    'Give a tiktoken ranks file (lines of "base64 rank"), a Hugging Face tokenizer.json,'
    f' or "{BYTES}".'
)
FILES = ("tokenizer.json", "tokenizer.model")  # what their files are called
_BEGINS = (BEGIN, "<s>", "<bos>", "<|startoftext|>", "[BOS]", "<｜begin▁of▁sentence｜>")
_ENDS = (END, "</s>", "<eos>", "<|endoftext|>", "[EOS]", "<｜end▁of▁sentence｜>")

# tiktoken's regular expression overflows its stack on about a million blanks in a row
_MOST_BLANKS = 100_000
_BLANKS = re.compile(rf"(?<!\s)\s{{{_MOST_BLANKS},}}")


class Tokenizer(ABC):
    """Text to ids and back; may be sent to another process."""

    name: str  # where it came from, for messages
    vocab_size: int  # one more than the largest id, specials included
    bos_id: int  # eos_id where it has none of its own
    eos_id: int
    fingerprint: str  # equal for equal ids, wherever the file lies
    adds_bos = False  # whether its file says that a text begins with BOS
    files: dict[str, bytes] = {}  # what `tokenizer_of` makes the same one from; "bytes" needs none

    @property
    def has_bos(self) -> bool:
        """Whether it has a BOS that is not its end id too."""
        return self.bos_id != self.eos_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without a beginning or an end; never a special one.

        Raises DataError where a foreign file cannot do it.
        """
        return self._encode(well_formed(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 show as U+FFFD."""
        # a model may be wider than its tokenizer, and those ids have no text
        return self._decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    def token_of(self, id: int) -> str:
        """What a special token is called."""
        return self._decode([id])

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...


def well_formed(text: str) -> str:
    """The text with U+FFFD for halves of surrogate pairs, which JSON can hold and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def open_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a file, or raw bytes for "bytes"; raises DataError."""
    return _Bytes() if path == BYTES else tokenizer_of(_read(Path(path)), path)


def tokenizer_of(content: bytes, name: str) -> Tokenizer:
    """The tokenizer of a file's content; `name` is for messages. Raises DataError."""
    kind = _HuggingFace if content.lstrip()[:1] == b"{" else _Ranks
    return kind(content, name)


def _read(path: Path) -> bytes:
    if path.is_dir():
        inside = [path / name for name in FILES]
        there = [str(file) for file in inside if file.exists()]
        fix = f"Give the file: {there[0]}" if there else _ALLOWED
        raise DataError(f'tokenizer "{path}": is a folder.', fix=fix)
    try:
        return read_regular_file(path, MOST_BYTES)
    except OSError as error:
        refused = error.errno in (errno.EINVAL, errno.EFBIG)
        reason = error.strerror or error
        why = f"{reason}" if refused else f"cannot be read ({reason})"
        raise DataError(f'tokenizer "{path}": {why}.', fix=_ALLOWED) from None


def _read_json(path: str, content: bytes) -> dict:
    try:
        table = parse_json(content)
    except ValueError as error:
        raise DataError(f'tokenizer "{path}": not valid JSON ({error}).', fix=_ALLOWED) from None
    if not isinstance(table, dict) or not isinstance(table.get("model"), dict):
        raise DataError(f'tokenizer "{path}": is JSON, but not a tokenizer.json.', fix=_ALLOWED)
    try:
        check_definition(table)
    except ValueError as error:
        raise DataError(f'tokenizer "{path}": cannot be used: {error}.', fix=_ALLOWED) from None
    return table


def read_ranks(path: str, content: bytes) -> dict[bytes, int]:
    # not by tiktoken's own reader: it keeps a copy under /tmp by path, and shows that copy again
    # after the file has changed
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(
                f'tokenizer "{path}": line {number} is not "base64 rank".', fix=_ALLOWED
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f'tokenizer "{path}": the ranks are not 0, 1, 2 … each once.')
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f'tokenizer "{path}": {len(missing)} of the 256 single bytes have no rank,'
            f" 0x{missing[0]:02x} first; some text would have no ids.",
            fix=_ALLOWED,
        )
    return ranks


class _Ranks(Tokenizer):
    """Byte pairs merged in the order of their rank, by tiktoken; the specials follow the ranks."""

    def __init__(self, content: bytes, name: str):
        try:
            import tiktoken
        except ImportError as missing:
            raise _not_installed(name, "tiktoken") from missing
        self.name, self.files = name, {"tokenizer.model": content}
        ranks = read_ranks(name, content)
        names = _llama3_specials() if len(ranks) == _LLAMA3_RANKS else [BEGIN, END]
        specials = {name: len(ranks) + number for number, name in enumerate(names)}
        self._encoding = tiktoken.Encoding(
            "ranks", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.vocab_size = len(ranks) + len(specials)
        self.bos_id, self.eos_id = specials[BEGIN], specials[END]
        in_order = b"\n".join(base64.b64encode(token) for token in sorted(ranks, key=ranks.get))
        self.fingerprint = _fingerprint("ranks", SPLIT_PATTERN, " ".join(names), in_order)

    def _encode(self, text: str) -> list[int]:
        if len(text) < _MOST_BLANKS:
            return self._encoding.encode_ordinary(text)
        encode = self._encoding.encode_ordinary
        return [id for part in _short_of_blanks(text) for id in encode(part)]

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


def _short_of_blanks(text: str) -> Iterator[str]:
    """The text in parts, none of them with more blanks in a row than tiktoken can take."""
    done = 0
    for run in _BLANKS.finditer(text):
        for cut in range(run.start() + _MOST_BLANKS, run.end() + 1, _MOST_BLANKS):
            yield text[done:cut]
            done = cut
    yield text[done:]


def _llama3_specials() -> list[str]:
    """The names of Llama 3's 256 special tokens, as published with its weights."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(_LLAMA3_SPECIALS - 5)]
    names = [BEGIN, END, *reserved[:4], "<|start_header_id|>", "<|end_header_id|>", reserved[4]]
    return [*names, "<|eot_id|>", *reserved[5:]]


class _HuggingFace(Tokenizer):
    """A tokenizer.json, by the tokenizers library."""

    def __init__(self, content: bytes, name: str):
        try:
            import tokenizers
        except ImportError as missing:
            raise _not_installed(name, "tokenizers") from missing
        self.name, self.files = name, {"tokenizer.json": content}
        table = {**_read_json(name, content), "truncation": None, "padding": None}
        # those two are habits of whoever saved the file; they would cut or fill our documents
        definition = json.dumps(table, sort_keys=True)
        with _as_data_error(name, "the tokenizers library cannot read it"):
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
            self._tokenizer.encode_special_tokens = True  # special-looking text stays text
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
            added = {t.content: i for i, t in self._tokenizer.get_added_tokens_decoder().items()}
        self.vocab_size = 1 + max(ids)
        self.eos_id = _first_of(_ENDS, added)
        if self.eos_id is None:
            raise DataError(
                f'tokenizer "{name}": no known end of text among its {len(added)} added tokens.',
                fix=f"Add one of {' '.join(_ENDS)} to it.",
            )
        begin = _first_of(_BEGINS, added)
        self.bos_id = self.eos_id if begin is None else begin  # as GPT-2 does
        first = next(iter(added_around_text(table)), None)
        self.adds_bos = self.has_bos and added.get(first) == self.bos_id
        self.fingerprint = _fingerprint("tokenizer.json", definition)

    def __reduce__(self):  # the library's own forgets encode_special_tokens
        return tokenizer_of, (self.files["tokenizer.json"], self.name)

    def token_of(self, id: int) -> str:
        return self._tokenizer.id_to_token(id)  # a decoder may strip, or join with spaces

    def _encode(self, text: str) -> list[int]:
        with _as_data_error(self.name, f"cannot encode a text of {len(text):,} characters"):
            return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _decode(self, ids: list[int]) -> str:
        with _as_data_error(self.name, f"cannot decode {len(ids):,} ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)


@contextmanager
def _as_data_error(name: str, what: str) -> Iterator[None]:
    """Whatever the tokenizers library raises, panics of Rust included, as a DataError."""
    try:
        yield
    except BaseException as error:  # the library has no narrower class; a panic is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f'tokenizer "{name}": {what} ({error}).', fix=_ALLOWED) from None


class _Bytes(Tokenizer):
    """The 256 bytes of UTF-8, a beginning and an end."""

    name, vocab_size, bos_id, eos_id = BYTES, 258, 256, 257

    def __init__(self):
        self.fingerprint = _fingerprint(BYTES, BEGIN, END)

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _decode(self, ids: list[int]) -> str:
        specials = {self.bos_id: BEGIN.encode(), self.eos_id: END.encode()}
        return b"".join(specials.get(i) or bytes([i]) for i in ids).decode("utf-8", "replace")


def _first_of(names: Sequence[str], ids: dict[str, int]) -> int | None:
    return next((ids[name] for name in names if name in ids), None)


def _fingerprint(*parts: str | bytes) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()


def _not_installed(path: str, package: str) -> DataError:
    return DataError(
        f'tokenizer "{path}": needs {package}, which is not installed.',
        fix=f"pip install {package}",
    )
