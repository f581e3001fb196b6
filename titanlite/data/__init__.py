"""Tokenizers, shards of token ids, and the order in which a run reads them.

`titanlite_corpus` makes shards and tokenizers.
"""

from __future__ import annotations

from titanlite.data.background import prefetch
from titanlite.data.dump import BatchDump
from titanlite.data.formats import FORMATS, TEXT, open_token_source
from titanlite.data.mixing import MixtureConfig, PhaseConfig, describe_mixture, repeated_sources
from titanlite.data.open_tokenizer import open_tokenizer
from titanlite.data.order import (
    PositionWindow,
    SampleOrder,
    next_start,
    rank_slices,
    window_lr_factor,
)
from titanlite.data.sample_source import SourceConfig
from titanlite.data.shards import Corpus, open_corpus, verify_corpus
from titanlite.data.stream import (
    SAMPLE_FORMATS,
    DataConfig,
    SampleStream,
    check_bos,
    open_sample_stream,
)
from titanlite.data.text_source import merge_positions
from titanlite.data.token_source import CorpusChecks, TokenSource
from titanlite.data.tokenizer import Tokenizer
from titanlite.data.validation_set import ValidationSet, open_validation

__all__ = [
    "FORMATS",
    "SAMPLE_FORMATS",
    "TEXT",
    "BatchDump",
    "Corpus",
    "CorpusChecks",
    "DataConfig",
    "MixtureConfig",
    "PhaseConfig",
    "PositionWindow",
    "SampleOrder",
    "SampleStream",
    "SourceConfig",
    "TokenSource",
    "Tokenizer",
    "ValidationSet",
    "check_bos",
    "describe_mixture",
    "merge_positions",
    "next_start",
    "open_corpus",
    "open_sample_stream",
    "open_token_source",
    "open_tokenizer",
    "open_validation",
    "prefetch",
    "rank_slices",
    "repeated_sources",
    "verify_corpus",
    "window_lr_factor",
]
