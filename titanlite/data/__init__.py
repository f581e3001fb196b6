"""Text to batches: tokenizers, shards of ids, and the order in which a run reads them.

`prepare_corpus` and `bpe`, which make shards and tokenizers, are imported by name where they are used:
they need packages that a training machine does not.
"""

from __future__ import annotations

from titanlite.data.order import MixtureQuotas, SampleOrder, rank_slices
from titanlite.data.shards import (
    Corpus,
    CorpusChecks,
    CorpusManifest,
    ShardWriter,
    open_corpus,
    verify_corpus,
)
from titanlite.data.stream import (
    DataConfig,
    SampleStream,
    SourceConfig,
    ValidationSet,
    check_bos,
    open_sample_stream,
    open_validation,
)
from titanlite.data.tokenizer import Tokenizer, open_tokenizer

__all__ = [
    "Corpus",
    "CorpusChecks",
    "CorpusManifest",
    "DataConfig",
    "MixtureQuotas",
    "SampleOrder",
    "SampleStream",
    "ShardWriter",
    "SourceConfig",
    "Tokenizer",
    "ValidationSet",
    "check_bos",
    "open_corpus",
    "open_sample_stream",
    "open_tokenizer",
    "open_validation",
    "rank_slices",
    "verify_corpus",
]
