"""Tokenizers, shards of token ids, and the order in which a run reads them.

`titanlite.corpus.prepare` and `titanlite.data.bpe`, which make shards and tokenizers, are not
imported here: they need packages that training does not need.
"""

from __future__ import annotations

from titanlite.data.dump import BatchDump
from titanlite.data.formats import FORMATS, open_token_source
from titanlite.data.order import MixtureQuotas, SampleOrder, rank_slices
from titanlite.data.shards import (
    Corpus,
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
from titanlite.data.token_source import CorpusChecks, SourceOpener, SourceRecord, TokenSource
from titanlite.data.tokenizer import Tokenizer, open_tokenizer
from titanlite.data.windows import PositionWindow, next_start, window_lr_factor

__all__ = [
    "FORMATS",
    "BatchDump",
    "Corpus",
    "CorpusChecks",
    "CorpusManifest",
    "DataConfig",
    "MixtureQuotas",
    "PositionWindow",
    "SampleOrder",
    "SampleStream",
    "ShardWriter",
    "SourceConfig",
    "SourceOpener",
    "SourceRecord",
    "TokenSource",
    "Tokenizer",
    "ValidationSet",
    "check_bos",
    "next_start",
    "open_corpus",
    "open_sample_stream",
    "open_token_source",
    "open_tokenizer",
    "open_validation",
    "rank_slices",
    "verify_corpus",
    "window_lr_factor",
]
