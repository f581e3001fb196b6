"""Train a byte-level BPE tokenizer on your own text, written as a file of tiktoken ranks."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from titanlite.data.token_bytes import byte_level_alphabet
from titanlite.data.tokenizer import SPLIT_PATTERN, special_token_names, well_formed
from titanlite.errors import DataError
from titanlite.files import write_file_atomically

SPECIALS = 2  # BOS and EOS, which open_tokenizer adds after the ranks
MIN_VOCAB_SIZE = 256 + SPECIALS  # one rank for every byte


def train_bpe(texts: Iterable[str], vocab_size: int, out: str | Path) -> int:
    """Train a tokenizer and write its ranks to `out`; returns its vocabulary size.

    That is `vocab_size`, special tokens included, or less if the text has too few different pairs
    to merge. It is more for exactly 128,000 ranks, to which open_tokenizer adds Llama 3's 256
    special tokens. Raises DataError.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise DataError(
            f"vocab_size = {vocab_size}: is too small.",
            fix=f"Give at least {MIN_VOCAB_SIZE}: 256 bytes and {SPECIALS} special tokens.",
        )
    ranks = ranks_of(train_merges(texts, vocab_size - SPECIALS))
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_file_atomically(Path(out), b"".join(lines))
    return len(ranks) + len(special_token_names(len(ranks)))


def train_merges(texts: Iterable[str], ranks: int) -> Any:
    """A `tokenizers.Tokenizer` with `ranks` ids: the 256 bytes, then merges learned from texts."""
    try:
        from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
    except ImportError as missing:
        raise DataError(
            "training a tokenizer needs the package tokenizers, which is not installed.",
            fix="pip install tokenizers",
        ) from missing
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=ranks,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],  # they would get the first ids and shift every rank
        show_progress=False,
    )
    tokenizer.train_from_iterator(map(well_formed, texts), trainer)
    return tokenizer


def ranks_of(tokenizer: Any) -> dict[bytes, int]:
    """The vocabulary of a byte-level tokenizer as tiktoken ranks (token -> rank), in order."""
    byte_of = byte_level_alphabet()
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    return {bytes(byte_of[character] for character in token): rank for token, rank in vocabulary}
