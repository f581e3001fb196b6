"""The sources of a run as samples: stored token ids, or text that is tokenized while it is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

import numpy as np

from titanlite.data.formats import TEXT
from titanlite.data.order import SourceOrder
from titanlite.data.text_source import TextSource, document_encoder
from titanlite.data.token_source import CorpusChecks, SourceRecord, TokenSource
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.settings import Positive, Range


@dataclass(frozen=True)
class SourceConfig:
    """One source of token ids in [data]."""

    name: str  # unique name; seeds the sample order and labels metrics
    path: str  # of the files; for "megatron" a folder of shards, or one shard
    weight: Annotated[float, Range(0)] = 1.0  # share of the samples, relative to the other weights
    format: str = "megatron"  # data format of the files: a name in titanlite/data/formats.py
    max_epochs: Annotated[float, Range(0)] = 0.0
    # largest number of epochs; after them the other sources take its share; 0: no limit
    shuffle: bool = True  # false: samples in the order of the files, for a curriculum
    lanes: Positive = 16
    # of format "text", which is tokenized while it is read: parts of the text that are tokenized
    # independently; their number does not depend on the layout
    bos: bool = False  # of format "text": begin each document with the tokenizer's BOS


@dataclass(frozen=True)
class SampleSource:
    """A source of a run; subclasses read its samples of `seq_len` tokens."""

    config: SourceConfig
    source: TokenSource | TextSource
    bos: bool  # every document begins with BOS

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def path(self) -> str:
        return self.config.path


@dataclass(frozen=True)
class StoredSamples(SampleSource):
    """Samples of stored token ids, which passed the checks of this run."""

    source: TokenSource
    vocab_size: int  # of the model

    @property
    def tokens(self) -> int:
        return self.source.tokens

    @property
    def is_packed(self) -> bool:
        return self.source.packed_seq_len is not None

    def lacks_end(self, end: int) -> bool:
        """Whether the last document does not end with the id `end`, which has to mark its end."""
        return not self.is_packed and _id_at(self.source, self.tokens - 1) != end

    def _stride(self, seq_len: int) -> int:
        """Ids between the first ids of two samples."""
        return seq_len + 1 if self.is_packed else seq_len

    def samples(self, seq_len: int, whole: bool = True) -> int:
        """Number of samples; the last may be shorter than `seq_len` unless `whole`."""
        if self.is_packed:
            return self.tokens // (seq_len + 1)
        return (self.tokens - 1) // seq_len if whole else -(-(self.tokens - 1) // seq_len)

    def read_samples(self, samples: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of whole samples: int64 [N, T] each; raises DataError."""
        starts = samples * self._stride(seq_len)
        if not self.is_packed:
            return inputs_and_labels(self.gather(starts, seq_len + 1))
        ids, labels = self.source.gather_windows(samples)
        self._check_ids(ids, starts)
        return ids[:, :-1].copy(), labels

    def order_settings(self, weight: float, seq_len: int) -> SourceOrder:
        samples, limit = self.samples(seq_len), None
        if self.config.max_epochs:
            limit = max(1, int(Fraction(self.config.max_epochs) * samples))
        return SourceOrder(self.name, weight, samples, limit, self.config.shuffle)

    def first_token(self, sample: int, seq_len: int) -> int:
        """Position of the first id of a sample."""
        return sample * self._stride(seq_len)

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start, int64 [N, count]; raises DataError."""
        ids = np.ascontiguousarray(self.source.gather(starts, count), dtype=np.int64)
        assert ids.shape == (len(starts), count), (ids.shape, type(self.source))
        self._check_ids(ids, starts)
        return ids

    def _check_ids(self, ids: np.ndarray, starts: np.ndarray) -> None:
        """Raise DataError for an id outside the vocabulary; ids [N, count] are from `starts` on."""
        if ids.size and int(ids.view(np.uint64).max()) >= self.vocab_size:  # negatives are huge
            row, column = np.argwhere((ids < 0) | (ids >= self.vocab_size))[0]
            raise DataError(
                f'source "{self.name}" ({self.path}): token {starts[row] + column} has the id'
                f" {ids[row, column]}, outside 0…{self.vocab_size - 1}.",
                fix="Use the tokenizer that made the source, or a larger model.vocab_size.",
            )


@dataclass(frozen=True)
class TextSamples(SampleSource):
    """Samples of text that is tokenized while it is read."""

    source: TextSource
    last_id: int  # of every document
    tokens = None  # unknown: nothing has counted them

    def samples(self, seq_len: int) -> None:
        """Unknown, like the number of tokens."""

    def first_token(self, sample: int, seq_len: int) -> None:
        """Unknown: samples of several lanes alternate."""

    def order_settings(self, weight: float, seq_len: int) -> SourceOrder:
        return SourceOrder(self.name, weight, None)

    def lacks_end(self, end: int) -> bool:
        """Whether documents do not end with the id `end`."""
        return self.last_id != end

    def read_samples(self, samples: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of samples: int64 [N, T] each; raises DataError."""
        return inputs_and_labels(self.source.read(samples))


def check_window_length(config: SourceConfig, source: TokenSource, key: str, seq_len: int) -> None:
    """Refuse windows of another length than that of the run; raises DataError."""
    if source.packed_seq_len not in (None, seq_len):
        raise DataError(
            f'source "{config.name}" ({config.path}): is packed in windows of'
            f" {source.packed_seq_len} tokens, but {key} = {seq_len}.",
            fix=f"Set {key} = {source.packed_seq_len}, or pack again with [pack] seq_len ="
            f" {seq_len}.",
        )


def open_text_samples(
    config: SourceConfig,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer | None,
    checks: CorpusChecks | None,
) -> TextSamples:
    """Open text files to be tokenized while they are read; raises DataError."""
    encode, label = open_text_encoder(config, tokenizer), _text_label(config)
    assert tokenizer is not None, "open_text_encoder refuses it"
    if config.max_epochs or not config.shuffle:
        raise DataError(
            f"{label}: max_epochs and shuffle = false need prepared shards.",
            fix="Remove them, or prepare the text: titanlite prepare.",
        )
    text = TextSource(
        config.path,
        config.lanes,
        seq_len + 1,
        f"{seed} text {config.name}",
        encode,
        checks or CorpusChecks(),
    )
    return TextSamples(config, text, config.bos, tokenizer.eos_id)


def open_text_encoder(
    config: SourceConfig, tokenizer: Tokenizer | None
) -> Callable[[str], np.ndarray]:
    """A function that gives the ids of a document of a source of text; raises DataError."""
    label = _text_label(config)
    if tokenizer is None:
        raise DataError(f"{label}: needs a tokenizer.", fix="Set data.tokenizer.")
    if config.bos and not tokenizer.has_bos:
        raise DataError(f"{label}: bos = true, but the tokenizer has no BOS.", fix="Remove bos.")
    return document_encoder(tokenizer, config.bos)


def _text_label(config: SourceConfig) -> str:
    return f'source "{config.name}" ({config.path}), format = "{TEXT}"'


def check_stored_samples(
    config: SourceConfig,
    source: TokenSource,
    min_tokens: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> StoredSamples:
    """The samples of an opened source, if it fits model and tokenizer; raises DataError."""
    label = f'source "{config.name}" ({config.path})'
    if source.tokens < min_tokens:
        raise DataError(
            f"{label}: has {source.tokens} tokens, but one sample needs {min_tokens}.",
            fix="Add text, or, for training data, use a smaller training.seq_len.",
        )
    if source.record:
        _check_record(label, source.record, vocab_size, tokenizer)
        bos = source.record.bos
    else:  # the first document stands for all of them
        bos = bool(tokenizer and tokenizer.has_bos and _id_at(source, 0) == tokenizer.bos_id)
    return StoredSamples(config, source, bos, vocab_size)


def _check_record(
    label: str, record: SourceRecord, vocab_size: int, tokenizer: Tokenizer | None
) -> None:
    """Compare what a source records with the tokenizer and the model; raises DataError."""
    if tokenizer and record.tokenizer != tokenizer.fingerprint:
        raise DataError(
            f"{label}: was made by the tokenizer {record.tokenizer[:12]} with"
            f" {record.vocab_size} ids; data.tokenizer is {tokenizer.fingerprint[:12]} with"
            f" {tokenizer.vocab_size}.",
            fix="Set data.tokenizer to the tokenizer that made the shards, or prepare the text"
            " again.",
        )
    if record.max_id >= vocab_size:
        raise DataError(
            f"{label}: has ids up to {record.max_id}, outside 0…{vocab_size - 1}.",
            fix=f"Set model.vocab_size = {record.vocab_size} or more.",
        )


def _id_at(source: TokenSource, position: int) -> int:
    return int(source.gather(np.array([position]), 1)[0, 0])


def inputs_and_labels(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids [N, T + 1] as two arrays [N, T] that share no memory."""
    return ids[:, :-1].copy(), ids[:, 1:].copy()
