"""One interface for three kinds of tokenizer: tiktoken ranks, a tokenizer.json, raw bytes.

The name of a control token in a text is encoded as ordinary text; only callers add control ids. In
a tokenizer.json, the control tokens are BOS, EOS, the added tokens that it marks as special, and
those named like <|im_end|>. Its other added tokens, such as runs of spaces, are vocabulary, found
in text.
"""

from __future__ import annotations

import base64
import errno
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from titanlite.data.token_bytes import bytes_of_tokens
from titanlite.data.tokenizer_definition import added_around_text, check_definition, without_prefix
from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file

BYTES = "bytes"  # the name of the tokenizer that needs no file
MAX_TOKENIZER_BYTES = 64 << 20  # of a file; the largest in use (Gemma's tokenizer.json) has 34 MB
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"

# How Llama 3 splits text before merging bytes. A ranks file does not contain its pattern, and with
# another pattern the same ranks give other ids.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Ranks of published files with other patterns; in all of them "!" is the first, which it is in no
# file of train_tokenizer.py. cl100k_base (100,256) has Llama 3's pattern.
_OTHER_PATTERNS = {50_256: "GPT-2 (r50k_base)", 199_998: "o200k_base", 151_643: "Qwen"}
_LLAMA3_RANKS, _LLAMA3_SPECIALS = 128_000, 256
_ALLOWED = (
    'Give a tiktoken ranks file (lines of "base64 rank"), a Hugging Face tokenizer.json,'
    f' or "{BYTES}".'
)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")  # file names in checkpoints
_BOS_NAMES = (BEGIN, "<s>", "<bos>", "<|startoftext|>", "[BOS]", "<｜begin▁of▁sentence｜>")
_EOS_NAMES = (END, "</s>", "<eos>", "<|endoftext|>", "[EOS]", "<｜end▁of▁sentence｜>")
# Some files do not mark these as special, such as <|im_end|> and DeepSeek's <｜User｜>.
_CONTROL_NAME = re.compile(r"<[|｜][^\s|｜]+[|｜]>")

# tiktoken's regular expression overflows its stack at about a million spaces in a row
_MAX_SPACES = 100_000
_LONG_SPACES = re.compile(rf"(?<!\s)\s{{{_MAX_SPACES},}}")


class Tokenizer(ABC):
    """Converts text to ids and back; can be pickled for another process."""

    name: str  # path or "bytes", for messages
    vocab_size: int  # largest id + 1, special tokens included
    bos_id: int  # eos_id if it has no BOS of its own
    eos_id: int
    fingerprint: str  # equal for tokenizers that give equal ids, wherever the file is
    special_tokens: dict[str, int]  # name -> id; of a tokenizer.json, all added tokens
    strips: Mapping[str, tuple[bool, bool]] = {}
    # name of a special token -> whether it takes the white space (before, after) it, where it does
    adds_bos = False  # its file specifies that BOS is added before a text
    files: dict[str, bytes]
    # file name -> content from which `tokenizer_from_bytes` makes an equal tokenizer;
    # empty for "bytes"

    @property
    def has_bos(self) -> bool:
        """Whether its BOS is a token other than its EOS."""
        return self.bos_id != self.eos_id

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without BOS and EOS and never the id of a control token.

        Raises DataError if a foreign tokenizer.json fails on this text, or makes a control token.
        """
        return self._encode(well_formed(text))

    def encode_array(self, text: str) -> np.ndarray:
        """What `encode` gives, as an array of integers; several times faster than from a list."""
        return self._encode_array(well_formed(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of some ids; bytes that are not UTF-8 become U+FFFD."""
        # a model's vocabulary may be larger than its tokenizer's; the extra ids have no text
        return self._decode([int(i) for i in ids if 0 <= i < self.vocab_size])

    def special_token_name(self, id: int) -> str:
        """The name of a special token, such as "<|end_of_text|>"."""
        return self._decode([id])

    @property
    def control_tokens(self) -> frozenset[str]:
        """The names that are ordinary text in a text; the other special tokens are found there."""
        return frozenset(self.special_tokens)

    def with_control_tokens(self, names: Iterable[str]) -> Tokenizer:
        """This tokenizer with `names`, some of its special tokens, as control tokens too."""
        return self

    def continuing(self, *, after_text: bool) -> Tokenizer:
        """The tokenizer of text behind a control token or `after_text`; only its encoding differs.

        A file may add a space before a text, which must not be in the middle of one.
        """
        return self

    @abstractmethod
    def token_bytes(self) -> list[bytes]:
        """The bytes of text that each id stands for; b"" for special tokens."""

    @abstractmethod
    def _encode(self, text: str) -> list[int]: ...

    @abstractmethod
    def _decode(self, ids: list[int]) -> str: ...

    def _encode_array(self, text: str) -> np.ndarray:
        return np.asarray(self._encode(text), dtype=np.int64)


def well_formed(text: str) -> str:
    """Replace halves of surrogate pairs, which JSON may contain and UTF-8 may not, by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def open_tokenizer(path: str) -> Tokenizer:
    """Open a tokenizer file; "bytes" gives a ByteTokenizer. Raises DataError."""
    return ByteTokenizer() if path == BYTES else tokenizer_from_bytes(_read_file(Path(path)), path)


def tokenizer_from_bytes(content: bytes, name: str) -> Tokenizer:
    """Make a tokenizer from the content of its file; `name` is for messages. Raises DataError."""
    is_json = content.lstrip()[:1] == b"{"
    return HuggingFaceTokenizer(content, name) if is_json else RanksTokenizer(content, name)


def _read_file(path: Path) -> bytes:
    if path.is_dir():
        inside = [str(path / name) for name in TOKENIZER_FILES if (path / name).exists()]
        fix = f"Give the file: {inside[0]}" if inside else _ALLOWED
        raise DataError(f'tokenizer "{path}": is a folder.', fix=fix)
    try:
        return read_regular_file(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        reason = str(error.strerror or error)
        if error.errno not in (errno.EINVAL, errno.EFBIG):  # the messages of these two are complete
            reason = f"cannot be read ({reason})"
        raise DataError(f'tokenizer "{path}": {reason}.', fix=_ALLOWED) from None


def _parse_tokenizer_json(path: str, content: bytes) -> dict:
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


def parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """token -> rank from the lines of a ranks file; `path` is for messages. Raises DataError."""
    # tiktoken's own reader caches a copy under /tmp by path, and returns it even after the file
    # has changed
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
        raise DataError(f'tokenizer "{path}": the ranks are not 0, 1, 2 …, each exactly once.')
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f'tokenizer "{path}": {len(missing)} of the 256 single bytes have no rank,'
            f" 0x{missing[0]:02x} first; some text could not be encoded.",
            fix=_ALLOWED,
        )
    return ranks


class RanksTokenizer(Tokenizer):
    """tiktoken ranks: byte pairs are merged in rank order; special tokens follow the ranks."""

    def __init__(self, content: bytes, name: str):
        try:
            import tiktoken
        except ImportError as missing:
            raise _not_installed_error(name, "tiktoken") from missing
        self.name, self.files = name, {"tokenizer.model": content}
        ranks = parse_ranks(name, content)
        if (model := _OTHER_PATTERNS.get(len(ranks))) and ranks.get(b"!") == 0:
            raise DataError(
                f'tokenizer "{name}": has the {len(ranks):,} ranks of {model}, which splits text by'
                " another pattern than Llama 3. A ranks file does not contain its pattern.",
                fix="Use the tokenizer.json of that model.",
            )
        names = special_token_names(len(ranks))
        specials = {special: len(ranks) + number for number, special in enumerate(names)}
        self._encoding = tiktoken.Encoding(
            "ranks", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials
        )
        self.special_tokens, self.vocab_size = specials, len(ranks) + len(specials)
        self.bos_id, self.eos_id = specials[BEGIN], specials[END]
        tokens = sorted(ranks, key=ranks.__getitem__)
        in_order = b"\n".join(base64.b64encode(token) for token in tokens)
        self.fingerprint = _fingerprint("ranks", SPLIT_PATTERN, " ".join(names), in_order)

    def token_bytes(self) -> list[bytes]:
        ranks = self.vocab_size - len(self._encoding.special_tokens_set)
        texts = [self._encoding.decode_single_token_bytes(id) for id in range(ranks)]
        return texts + [b""] * (self.vocab_size - ranks)

    def _encode(self, text: str) -> list[int]:
        encode = self._encoding.encode_ordinary
        if len(text) < _MAX_SPACES:
            return encode(text)
        return [id for part in _split_long_spaces(text) for id in encode(part)]

    def _encode_array(self, text: str) -> np.ndarray:
        if len(text) < _MAX_SPACES:
            return self._encoding.encode_to_numpy(text, disallowed_special=())
        return super()._encode_array(text)

    def _decode(self, ids: list[int]) -> str:
        return self._encoding.decode(ids)


def _split_long_spaces(text: str) -> Iterator[str]:
    """The text in parts, none with more whitespace in a row than tiktoken can process."""
    start = 0
    for spaces in _LONG_SPACES.finditer(text):
        for end in range(spaces.start() + _MAX_SPACES, spaces.end() + 1, _MAX_SPACES):
            yield text[start:end]
            start = end
    yield text[start:]


def special_token_names(ranks: int) -> list[str]:
    """The special tokens that follow `ranks` tiktoken ranks: BOS and EOS, or Llama 3's 256."""
    return _llama3_specials() if ranks == _LLAMA3_RANKS else [BEGIN, END]


def _llama3_specials() -> list[str]:
    """The names of Llama 3's 256 special tokens, as published with its weights."""
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(_LLAMA3_SPECIALS - 5)]
    names = [BEGIN, END, *reserved[:4], "<|start_header_id|>", "<|end_header_id|>", reserved[4]]
    return [*names, "<|eot_id|>", *reserved[5:]]


class HuggingFaceTokenizer(Tokenizer):
    """A tokenizer.json, read by the tokenizers library."""

    def __init__(self, content: bytes, name: str, control: frozenset[str] = frozenset()):
        """`control`: added tokens that are control tokens, whatever the file says."""
        try:
            import tokenizers
        except ImportError as missing:
            raise _not_installed_error(name, "tokenizers") from missing
        self.name, self.files = name, {"tokenizer.json": content}
        # a file may enable truncation and padding, which would change documents
        table = {**_parse_tokenizer_json(name, content), "truncation": None, "padding": None}
        for token in table.get("added_tokens") or []:
            if _is_control_name(token.get("content"), control):
                token["special"] = True  # otherwise the library would find it in ordinary text
        definition = json.dumps(table, sort_keys=True)
        with _library_errors(name, "the tokenizers library cannot read it"):
            self._tokenizer = tokenizers.Tokenizer.from_str(definition)
            self._tokenizer.encode_special_tokens = True  # special-looking text is ordinary text
            ids = self._tokenizer.get_vocab(with_added_tokens=True).values()
            tokens = self._tokenizer.get_added_tokens_decoder()
        added = {token.content: id for id, token in tokens.items()}
        self.special_tokens, self.vocab_size = added, 1 + max(ids)
        self._control = frozenset(token.content for token in tokens.values() if token.special)
        self.strips = {t.content: (t.lstrip, t.rstrip) for t in tokens.values()}
        eos_id, bos_id = _first_id(_EOS_NAMES, added), _first_id(_BOS_NAMES, added)
        if eos_id is None:
            raise DataError(
                f'tokenizer "{name}": no known EOS among its {len(added)} added tokens.',
                fix=f"Add one of {' '.join(_EOS_NAMES)} to it.",
            )
        self.eos_id = eos_id
        self.bos_id = eos_id if bos_id is None else bos_id  # GPT-2 uses its EOS as BOS
        first = next(iter(added_around_text(table)), None)
        self.adds_bos = self.has_bos and first is not None and added.get(first) == self.bos_id
        self.fingerprint = _fingerprint("tokenizer.json", definition)
        control_ids = {added[token] for token in self._control} - {
            _unknown_id(table["model"], added)
        }
        self._never_in_text = control_ids | {self.bos_id, self.eos_id}

    def __reduce__(self):  # the library's own pickling loses encode_special_tokens
        return HuggingFaceTokenizer, (self.files["tokenizer.json"], self.name, self._control)

    @property
    def control_tokens(self) -> frozenset[str]:
        return self._control

    def with_control_tokens(self, names: Iterable[str]) -> Tokenizer:
        control = self._control.union(names)
        if control == self._control:
            return self
        return HuggingFaceTokenizer(self.files["tokenizer.json"], self.name, control)

    def continuing(self, *, after_text: bool) -> Tokenizer:
        table = json.loads(self.files["tokenizer.json"])
        changed = without_prefix(table, after_text=after_text)
        if changed == table:
            return self
        return HuggingFaceTokenizer(json.dumps(changed).encode(), self.name, self._control)

    def special_token_name(self, id: int) -> str:
        name = self._tokenizer.id_to_token(id)  # not decode(): a decoder may strip or add spaces
        assert name is not None, f"no token has the id {id}"
        return name

    def token_bytes(self) -> list[bytes]:
        tokens = [self._tokenizer.id_to_token(id) for id in range(self.vocab_size)]
        return bytes_of_tokens(json.loads(self._tokenizer.to_str()), tokens, self._decode)

    def _encode(self, text: str) -> list[int]:
        with _library_errors(self.name, f"cannot encode a text of {len(text):,} characters"):
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
            ids = encoding.ids
        if not self._never_in_text.isdisjoint(ids):
            # Unigram finds special tokens in text, and merges may make one; unknown may be EOS
            place = next(place for place, id in enumerate(ids) if id in self._never_in_text)
            token, (start, end) = self.special_token_name(ids[place]), encoding.offsets[place]
            around = json.dumps(text[max(0, start - 20) : end + 20], ensure_ascii=False)
            raise DataError(
                f'tokenizer "{self.name}": encodes ordinary text as the special token {token},'
                f" in {around}.",
                fix=f"Remove {token} from the text if it is there, or use another tokenizer.",
            )
        return ids

    def _decode(self, ids: list[int]) -> str:
        with _library_errors(self.name, f"cannot decode {len(ids):,} ids"):
            return self._tokenizer.decode(ids, skip_special_tokens=False)


@contextmanager
def _library_errors(name: str, failure: str) -> Iterator[None]:
    """Raise whatever the tokenizers library raises, Rust panics included, as a DataError."""
    try:
        yield
    except BaseException as error:  # no narrower class; a panic is not an Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise DataError(f'tokenizer "{name}": {failure} ({error}).', fix=_ALLOWED) from None


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then BOS and EOS."""

    name, vocab_size, bos_id, eos_id = BYTES, 258, 256, 257

    def __init__(self):
        self.files, self.special_tokens = {}, {BEGIN: self.bos_id, END: self.eos_id}
        self.fingerprint = _fingerprint(BYTES, BEGIN, END)

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b"", b""]

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def _decode(self, ids: list[int]) -> str:
        specials = {self.bos_id: BEGIN.encode(), self.eos_id: END.encode()}
        return b"".join(specials.get(i) or bytes([i]) for i in ids).decode("utf-8", "replace")


def _is_control_name(name: Any, control: frozenset[str]) -> bool:
    """Whether an added token is a control token, although its file may not mark it as special."""
    if not isinstance(name, str):
        return False
    known = name in _BOS_NAMES or name in _EOS_NAMES or name in control
    return known or _CONTROL_NAME.fullmatch(name) is not None


def _unknown_id(model: Mapping[str, Any], ids: Mapping[str, int]) -> int | None:
    """The id of text that a model of a tokenizer.json cannot encode, if it is among `ids`."""
    return model.get("unk_id", ids.get(str(model.get("unk_token"))))


def _first_id(names: Sequence[str], ids: dict[str, int]) -> int | None:
    return next((ids[name] for name in names if name in ids), None)


def _fingerprint(*parts: str | bytes) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()


def _not_installed_error(path: str, package: str) -> DataError:
    return DataError(
        f'tokenizer "{path}": needs the package {package}, which is not installed.',
        fix=f"pip install {package}",
    )
