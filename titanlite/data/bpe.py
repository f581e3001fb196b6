"""Train a byte-level BPE tokenizer on one's own text, as a file of tiktoken ranks."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlite.data.manifest import write_whole
from titanlite.data.tokenizer import SPLIT_PATTERN, well_formed
from titanlite.errors import DataError

SPECIALS = 2  # what open_tokenizer appends to a ranks file: the beginning and the end of a text
SMALLEST = 256 + SPECIALS  # a rank for every byte


def train_bpe(texts: Iterable[str], vocab_size: int, out: str | Path) -> int:
    """Write ranks so that `open_tokenizer(out).vocab_size` is `vocab_size`; returns that size.

    Fewer ids are made where the text is too poor for as many merges; then the size is smaller.
    Raises DataError.
    """
    if vocab_size < SMALLEST:
        raise DataError(
            f"vocab_size = {vocab_size}: is too small.",
            fix=f"Give at least {SMALLEST}: 256 bytes and {SPECIALS} special tokens.",
        )
    ranks = ranks_of(train_merges(texts, vocab_size - SPECIALS))
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    write_whole(Path(out), b"".join(lines))
    return len(ranks) + SPECIALS


def train_merges(texts: Iterable[str], ranks: int) -> Any:
    """A `tokenizers.Tokenizer` of `ranks` ids: the 256 bytes, then the merges learnt from texts."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as missing:
        raise DataError(
            "training a tokenizer needs tokenizers, which is not installed.",
            fix="pip install tokenizers",
        ) from missing
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    as_letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, as_letters])
    trainer = trainers.BpeTrainer(
        vocab_size=ranks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],  # they would take the first ids and shift every rank
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(well_formed, texts), trainer)
    return tokenizer


def ranks_of(tokenizer: Any) -> dict[bytes, int]:
    """The ids of a byte-level tokenizer as tiktoken's ranks, in order."""
    byte_of = _bytes_by_letter()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return {bytes(byte_of[letter] for letter in token): rank for token, rank in vocabulary}


def _bytes_by_letter() -> dict[str, int]:
    """Which byte each letter of the byte-level alphabet stands for.

    The alphabet is GPT-2's: a printable Latin-1 character is itself, and the other bytes are, in
    order, the characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {chr(byte): byte for byte in printable}
    return letters | {chr(0x100 + number): byte for number, byte in enumerate(others)}
