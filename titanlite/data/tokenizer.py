"""One interface for three kinds of tokenizer: tiktoken ranks, a tokenizer.json, raw bytes.

The name of a control token in a text is encoded as ordinary text; only callers add control ids.
"""

from __future__ import annotations

import base64
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
import xxhash

from titanlite.errors import DataError

BYTES = "bytes"  # the name of the tokenizer that needs no file
BEGIN, END = "<|begin_of_text|>", "<|end_of_text|>"

# How Llama 3 splits text. A ranks file does not contain its pattern; another one gives other ids.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# Ranks of published files with other patterns; in all of them "!" is the first, which it is in no
# file of train_tokenizer.py. cl100k_base (100,256) has Llama 3's pattern.
_OTHER_PATTERNS = {50_256: "GPT-2 (r50k_base)", 199_998: "o200k_base", 151_643: "Qwen"}
_LLAMA3_RANKS, _LLAMA3_SPECIALS = 128_000, 256
ALLOWED = (
    'Give a tiktoken ranks file (lines of "base64 rank"), a Hugging Face tokenizer.json,'
    f' or "{BYTES}".'
)

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
    control_tokens: frozenset[str]
    # the special tokens whose names are ordinary text in a text; the others are found there
    adds_bos = False  # its file specifies that BOS is added before a text
    files: dict[str, bytes]
    # file name -> content from which `tokenizer_from_bytes` makes an equal one; {} for "bytes"

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


def parse_ranks(path: str, content: bytes) -> dict[bytes, int]:
    """token -> rank from the lines of a ranks file; `path` is for messages. Raises DataError."""
    # tiktoken's own reader returns its copy under /tmp, even after the file has changed
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise DataError(
                f'tokenizer "{path}": line {number} is not "base64 rank".', fix=ALLOWED
            ) from None
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise DataError(f'tokenizer "{path}": the ranks are not 0, 1, 2 …, each exactly once.')
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise DataError(
            f'tokenizer "{path}": {len(missing)} of the 256 single bytes have no rank,'
            f" 0x{missing[0]:02x} first; some text could not be encoded.",
            fix=ALLOWED,
        )
    return ranks


class RanksTokenizer(Tokenizer):
    """tiktoken ranks: byte pairs are merged in rank order; special tokens follow the ranks."""

    def __init__(self, content: bytes, name: str):
        try:
            import tiktoken
        except ImportError as missing:
            raise not_installed_error(name, "tiktoken") from missing
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
        self.control_tokens = frozenset(specials)
        self.bos_id, self.eos_id = specials[BEGIN], specials[END]
        tokens = sorted(ranks, key=ranks.__getitem__)
        in_order = b"\n".join(base64.b64encode(token) for token in tokens)
        self.fingerprint = fingerprint_of("ranks", SPLIT_PATTERN, " ".join(names), in_order)

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
    if ranks != _LLAMA3_RANKS:
        return [BEGIN, END]
    reserved = [f"<|reserved_special_token_{i}|>" for i in range(_LLAMA3_SPECIALS - 5)]
    names = [BEGIN, END, *reserved[:4], "<|start_header_id|>", "<|end_header_id|>", reserved[4]]
    return [*names, "<|eot_id|>", *reserved[5:]]


class ByteTokenizer(Tokenizer):
    """The 256 bytes of UTF-8, then BOS and EOS."""

    name, vocab_size, bos_id, eos_id = BYTES, 258, 256, 257

    def __init__(self):
        self.files, self.special_tokens = {}, {BEGIN: self.bos_id, END: self.eos_id}
        self.control_tokens = frozenset(self.special_tokens)
        self.fingerprint = fingerprint_of(BYTES, BEGIN, END)

    def token_bytes(self) -> list[bytes]:
        return [*(bytes([byte]) for byte in range(256)), b"", b""]

    def _encode(self, text: str) -> list[int]:
        return list(text.encode())

    def _encode_array(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8)

    def _decode(self, ids: list[int]) -> str:
        specials = {self.bos_id: BEGIN.encode(), self.eos_id: END.encode()}
        return b"".join(specials.get(i) or bytes([i]) for i in ids).decode("utf-8", "replace")


def fingerprint_of(*parts: str | bytes) -> str:
    digest = xxhash.xxh3_128()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()


def not_installed_error(path: str, package: str) -> DataError:
    return DataError(
        f'tokenizer "{path}": needs the package {package}, which is not installed.',
        fix=f"pip install {package}",
    )
