"""Text to batches: tokenizers, shards of ids, and the order in which a run reads them.

`prepare` and `bpe`, which make shards and tokenizers, are imported by name where they are used:
they need packages that a training machine does not.
"""

from __future__ import annotations

from titanlite.data.order import Order, Shares, slices_of
from titanlite.data.shards import Corpus, CorpusChecks, Manifest, ShardWriter, open_corpus, verify
from titanlite.data.stream import (
    IGNORE_INDEX,
    DataConfig,
    SourceConfig,
    Stream,
    ValidationSet,
    check_bos,
    open_stream,
    open_validation,
)
from titanlite.data.tokenizer import Tokenizer, open_tokenizer

__all__ = [
    "IGNORE_INDEX",
    "Corpus",
    "CorpusChecks",
    "DataConfig",
    "Manifest",
    "Order",
    "ShardWriter",
    "Shares",
    "SourceConfig",
    "Stream",
    "Tokenizer",
    "ValidationSet",
    "check_bos",
    "open_corpus",
    "open_stream",
    "open_tokenizer",
    "open_validation",
    "slices_of",
    "verify",
]
