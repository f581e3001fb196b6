"""Search for a text in a corpus, whose ids are decoded to bytes on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from titanlite.data import Corpus, Tokenizer
from titanlite.errors import ConfigError, DataError

_CHUNK_IDS = 1 << 20
_NO_TEXT = b"\xff"  # stands for ids without text; no UTF-8 text has this byte
_CONTEXT_IDS = 24  # shown before and after a match


@dataclass(frozen=True)
class TextMatch:
    """One occurrence of a text."""

    token: int  # of the corpus, in which it begins
    text: str  # with some of the text around it


def search_corpus(corpus: Corpus, tokenizer: Tokenizer, wanted: str) -> Iterator[TextMatch]:
    """Every occurrence of `wanted` inside a document, in order; raises DataError."""
    try:
        needle = wanted.encode()
    except UnicodeEncodeError:  # from a terminal with another encoding
        raise ConfigError("the text to search for is not UTF-8.") from None
    if not needle:
        raise ConfigError("the text to search for is empty.")
    texts = [text or _NO_TEXT for text in tokenizer.token_bytes()]
    lengths = np.array([len(text) for text in texts])
    overlap = len(needle)  # ids: each has at least one byte
    for start in range(0, corpus.tokens, _CHUNK_IDS):
        count = min(_CHUNK_IDS + overlap, corpus.tokens - start)
        ids = corpus.read(start, count)
        if int(ids.max()) >= len(texts) or int(ids.min()) < 0:
            raise DataError(
                f"{corpus.path}: has ids outside 0…{len(texts) - 1}.",
                fix="Give the tokenizer that made the corpus: --tokenizer FILE.",
            )
        content = b"".join(map(texts.__getitem__, ids.tolist()))
        ends = None
        found = content.find(needle)
        while found >= 0:
            ends = np.cumsum(lengths[ids]) if ends is None else ends
            token = int(np.searchsorted(ends, found, side="right"))
            if token >= _CHUNK_IDS:  # the next chunk finds it again
                break
            yield TextMatch(start + token, _around(tokenizer, ids, token, needle))
            found = content.find(needle, found + len(needle))


def _around(tokenizer: Tokenizer, ids: np.ndarray, token: int, needle: bytes) -> str:
    """The text of the ids around a match, which begins in `ids[token]`."""
    last = token + len(needle) + _CONTEXT_IDS
    return tokenizer.decode(ids[max(0, token - _CONTEXT_IDS) : last].tolist())
