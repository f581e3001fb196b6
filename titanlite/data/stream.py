"""Batches by position: training samples in the order of the run, validation samples in file order.

A sample of T tokens needs T + 1 ids, the last of which is only a label; the next sample begins
with it. In an epoch every id is a label exactly once, except the first id of the source and the
last (N - 1) % T of its N ids, which do not fill a sample. Validation includes those last ids.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from titanlite.data.background import BackgroundReader
from titanlite.data.block_cache import CacheLimits
from titanlite.data.formats import TEXT, open_token_source
from titanlite.data.mixing import (
    MixtureConfig,
    SourceShare,
    SourceSize,
    describe_segments,
    plan_phases,
)
from titanlite.data.open_files import MIN_OPEN_FILES, OpenFiles
from titanlite.data.order import OrderedSource, SampleOrder
from titanlite.data.text_source import LanePositions, TextSource, document_encoder
from titanlite.data.token_source import CorpusChecks, SourceRecord, TokenSource
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError, UserErrors
from titanlite.labels import IGNORE_INDEX
from titanlite.settings import Positive, Range


@dataclass(frozen=True)
class SourceConfig:
    """One source of token ids in [data]."""

    name: str  # unique name; seeds the sample order and labels metrics
    path: str  # of the files; for "megatron" a folder of shards, or one shard
    weight: Annotated[float, Range(0)] = 1.0  # share of the samples, relative to the other weights
    format: str = "megatron"  # data format of the files: a name in titanlite/data/formats.py
    max_epochs: Annotated[float, Range(0)] = 0.0
    # how often its text is read at most; the other sources then take its place; 0: no limit
    shuffle: bool = True  # false: in the order of the files, for a curriculum by sample
    lanes: Positive = 16
    # of format "text", which is tokenized while it is read: into so many parts, which ranks share
    bos: bool = False  # of format "text": begin each document with the tokenizer's BOS


@dataclass(frozen=True)
class DataConfig:
    """[data] The tokenizer, the training data and the validation data."""

    tokenizer: str | None = None  # file of tiktoken ranks, a tokenizer.json, or "bytes"
    sources: list[SourceConfig] = field(default_factory=list)  # training data, mixed by weight
    mixture: MixtureConfig = field(default_factory=MixtureConfig)
    validation: list[SourceConfig] = field(default_factory=list)  # validation sets, each on its own
    verify: Literal["sample", "full", "off"] = "sample"
    # content verified when a corpus is opened; sample: some blocks of each shard; full: every byte,
    # the shards divided among the ranks, within comm.init_timeout_seconds; off: none
    follow_symlinks: bool = False  # allow symbolic links in a corpus to lead outside its folder
    cache_folder: str = ""
    # of shards by URL, on a disk of each machine; its ranks and jobs share it; empty: a folder of
    # the user in the temporary folder
    cache_gib: Annotated[float, Range(0)] = 8.0  # most GiB in it; best: all shards of the run
    read_timeout_seconds: Positive = 300
    # longest wait for one batch; after it the run ends with exit code 2, because the disk does not
    # respond

    def checks(self, verify_slice: tuple[int, int] | None = None) -> CorpusChecks:
        """What to verify when a source is opened.

        `verify_slice` = (rank, ranks) divides a full verification among the ranks; without it,
        "full" verifies samples only.
        """
        verify = "sample" if self.verify == "full" and verify_slice is None else self.verify
        cache = CacheLimits(self.cache_folder, int(self.cache_gib * 2**30))
        return CorpusChecks(verify, self.follow_symlinks, cache, verify_slice or (0, 1))


class SampleStream:
    """The training samples of a run, read at any position.

    `facts` identify what a position means (settings and data); checkpoints store and compare them.
    """

    def __init__(
        self,
        sources: Sequence[_CheckedSource | _TextSamples],
        seq_len: int,
        seed: int,
        tokenizer: Tokenizer | None = None,
        mixture: MixtureConfig | None = None,
    ):
        self.seq_len, self._sources = seq_len, sources
        self.tokenizer = tokenizer
        self.bos = sources[0].bos  # each document begins with BOS; the same in all sources
        self.end = tokenizer.eos_id if tokenizer else None  # last id of every document
        sizes = [SourceSize(s.name, s.weight, s.tokens) for s in sources]
        weights, phases = plan_phases(mixture or MixtureConfig(), sizes, seq_len)
        pairs = zip(sources, weights, strict=True)
        self._order = SampleOrder(seed, [s.ordered(weight, seq_len) for s, weight in pairs], phases)
        self.facts: dict[str, Any] = {
            "debug.seed": seed,
            "training.seq_len": seq_len,
            "data.tokenizer": tokenizer and tokenizer.fingerprint,
            "data.bos": self.bos,
            "data.sources": {
                source.name: self._describe(number, source, weight)
                for number, (source, weight) in enumerate(zip(sources, weights, strict=True))
            },
            "data.phases": describe_segments(self.names, self._order.mixture.segments),
        }
        samples = {s.name: s.content_sample for s in sources if s.content_sample is not None}
        if samples:
            self.facts["data.content"] = samples

    @property
    def names(self) -> list[str]:
        """Names of the sources."""
        return [source.name for source in self._sources]

    @property
    def length(self) -> int | None:
        """Number of positions, if all sources are limited; None: there is no last one."""
        return self._order.mixture.end

    def shares(self, ranges: Iterable[tuple[int, int]]) -> list[SourceShare]:
        """How much of each source the positions [start, end) of `ranges` have."""
        counts = [0] * len(self._sources)
        for start, end in ranges:
            drawn = (self._order.mixture.drawn_at(position) for position in (start, end))
            counts = [
                count + after - before for count, before, after in zip(counts, *drawn, strict=True)
            ]
        return [
            SourceShare(
                source.name,
                count,
                count * self.seq_len,
                None if (samples := source.samples(self.seq_len)) is None else count / samples,
            )
            for source, count in zip(self._sources, counts, strict=True)
        ]

    @property
    def tokenizes(self) -> bool:
        """Whether a source is tokenized while it is read."""
        return any(isinstance(source, _TextSamples) for source in self._sources)

    def lane_positions(self, position: int) -> dict[str, LanePositions]:
        """How far this process has read the text of each source at a position, to be merged."""
        drawn = self._order.mixture.drawn_at(position)
        return {
            source.name: source.text.positions(count)
            for source, count in zip(self._sources, drawn, strict=True)
            if isinstance(source, _TextSamples)
        }

    def count_near(self, position: int, sequences: int) -> int:
        """How many of `sequences` positions can be read without tokenizing much text before."""
        source_at, _, samples = self._order.sample_at(np.arange(position, position + sequences))
        for row, (number, sample) in enumerate(
            zip(source_at.tolist(), samples.tolist(), strict=True)
        ):
            source = self._sources[number]
            if isinstance(source, _TextSamples) and not source.text.is_near(sample):
                return row
        return sequences

    def restore_lanes(self, positions: Any) -> None:
        """Continue where merged `lane_positions` stopped; else text is tokenized from the start."""
        for source in self._sources:
            if isinstance(source, _TextSamples):
                known = positions.get(source.name, {}) if isinstance(positions, dict) else None
                source.text.restore(known)

    def _describe(self, number: int, source: _CheckedSource | _TextSamples, weight: float) -> str:
        """A source as `facts` record it: what it contains and its order, not its path."""
        text = _weight_text(weight, six_digits_suffice=self._order.has_whole_quotas)
        version = self._order.version(number)
        suffix = "" if version == 1 else f", order version {version}"  # 0.1 wrote no version
        suffix += "" if source.config.shuffle else ", not shuffled"
        return f"number {number}, weight {text}, content {source.fingerprint}{suffix}"

    def read(self, position: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of `sequences` positions: int64 [B, T] each; raises DataError."""
        return self.read_with_sources(position, sequences)[:2]

    def read_with_sources(self, position: int, sequences: int) -> tuple[Tensor, Tensor, Tensor]:
        """`read`, and the number of the source of each sequence: int64 [B]."""
        positions = np.arange(position, position + sequences, dtype=np.int64)
        source_at, _, samples = self._order.sample_at(positions)
        inputs, labels = (np.empty((sequences, self.seq_len), dtype=np.int64) for _ in range(2))
        for number, source in enumerate(self._sources):
            chosen = source_at == number
            if chosen.all():  # without one more copy
                inputs, labels = source.read_samples(samples, self.seq_len)
                break
            if chosen.any():
                inputs[chosen], labels[chosen] = source.read_samples(samples[chosen], self.seq_len)
        return torch.from_numpy(inputs), torch.from_numpy(labels), torch.from_numpy(source_at)

    def locate(self, position: int, sequences: int) -> list[dict[str, Any]]:
        """Where the samples of `sequences` positions are from, as JSON values.

        `first_token` counts the ids of the source; a sample has `seq_len` + 1 of them. It is None
        for text that is tokenized while it is read.
        """
        positions = np.arange(position, position + sequences, dtype=np.int64)
        columns = zip(*(part.tolist() for part in self._order.sample_at(positions)), strict=True)
        return [
            {
                "position": position + number,
                "source": self._sources[source].name,
                "path": self._sources[source].path,
                "epoch": epoch,
                "sample": sample,
                "first_token": self._sources[source].first_token(sample, self.seq_len),
            }
            for number, (source, epoch, sample) in enumerate(columns)
        ]

    def without_end(self, end: int) -> list[str]:
        """Names of the sources whose last id is not `end`, the end of a document."""
        return [source.name for source in self._sources if source.lacks_end(end)]

    def prefetch(
        self,
        slices: Iterable[tuple[int, int]],
        ahead: int = 2,
        timeout_seconds: float | None = None,
        prepare: Callable[[Tensor, Tensor, Tensor], Any] | None = None,
    ) -> Iterator[Any]:
        """Yield `read(*slice)` for each slice, reading up to `ahead` batches in the background.

        `prepare` also runs in the background, with the tensors of `read_with_sources`; what it
        returns replaces them.
        An error there is raised at the batch it belongs to; DataError if a batch takes
        more than `timeout_seconds`. The thread ends with the iterator, however that ends.
        """

        def read(position: int, sequences: int) -> Any:
            if prepare is None:
                return self.read(position, sequences)
            return prepare(*self.read_with_sources(position, sequences))

        slices = iter(slices)
        reader = BackgroundReader(read, "prefetch", timeout_seconds)
        paths = ", ".join(source.path for source in self._sources)
        try:
            pending = deque((s, reader.submit(*s)) for s in islice(slices, max(1, ahead)))
            while pending:
                (position, sequences), future = pending.popleft()
                description = f"training samples {position}…{position + sequences - 1} of {paths}"
                batch = reader.wait(future, description)
                del future
                pending.extend((s, reader.submit(*s)) for s in islice(slices, 1))
                yield batch
        finally:
            reader.close()


class ValidationSet:
    """The samples of a validation source in file order; the last of `samples` may be shorter."""

    def __init__(
        self,
        source: _CheckedSource,
        seq_len: int,
        timeout_seconds: float | None = None,
        tokenizer: Tokenizer | None = None,
    ):
        self.name, self.seq_len, self._source = source.name, seq_len, source
        self.token_bytes = _byte_counts(tokenizer, source.vocab_size) if tokenizer else None
        self.bos = source.bos
        self.samples = source.samples(seq_len, whole=False)
        self._timeout = timeout_seconds
        self._reader: BackgroundReader | None = None

    def read(self, start: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples [start, start + sequences): int64 [B, T] each.

        Past the end of the source, also in sequences past the last sample, labels are IGNORE_INDEX.
        Raises DataError, also if reading takes longer than the time limit.
        """
        if self._timeout is None:
            return self._read_now(start, sequences)
        if self._reader is None:  # a set that is never read needs no thread
            self._reader = BackgroundReader(self._read_now, "validation", self._timeout)
        description = f"validation samples {start}…{start + sequences - 1} of {self._source.path}"
        return self._reader.wait(self._reader.submit(start, sequences), description)

    def _read_now(self, start: int, sequences: int) -> tuple[Tensor, Tensor]:
        if self._source.is_packed:
            return self._read_windows(start, sequences)
        length, tokens = self.seq_len, self._source.tokens
        first = start * length
        ids = np.full((sequences, length + 1), IGNORE_INDEX, dtype=np.int64)
        full_sequences = max(0, min(sequences, (tokens - 1 - first) // length))
        ids[:full_sequences] = self._source.gather(
            first + np.arange(full_sequences) * length, length + 1
        )
        rest = tokens - first - full_sequences * length
        if full_sequences < sequences and rest > 1:
            ids[full_sequences, :rest] = self._source.gather(np.array([tokens - rest]), rest)
        both = torch.from_numpy(ids)
        # the embedding needs a valid id for every input
        return both[:, :-1].clamp(min=0), both[:, 1:].clone()

    def _read_windows(self, start: int, sequences: int) -> tuple[Tensor, Tensor]:
        inputs = torch.zeros((sequences, self.seq_len), dtype=torch.int64)
        labels = torch.full_like(inputs, IGNORE_INDEX)
        count = max(0, min(sequences, self.samples - start))
        read = self._source.read_samples(np.arange(start, start + count), self.seq_len)
        inputs[:count], labels[:count] = map(torch.from_numpy, read)
        return inputs, labels

    def without_end(self, end: int) -> list[str]:
        """The set's name, if its last id is not `end`, the end of a document."""
        return [self.name] if self._source.lacks_end(end) else []


def open_sample_stream(
    sources: Sequence[SourceConfig],
    *,
    seq_len: int,
    seed: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    checks: CorpusChecks | None = None,
    mixture: MixtureConfig | None = None,
) -> SampleStream:
    """Open the training samples of `sources` in the order of `seed`.

    Raises DataError, or UserErrors if several sources cannot be used.
    """
    opened: list[_CheckedSource | _TextSamples] = []
    problems: list[DataError] = []
    files = OpenFiles()
    for config in sources:
        try:
            if config.format == TEXT:
                opened.append(_open_text(config, seq_len, seed, tokenizer, checks))
                continue
            source = open_token_source(config.format, config.path, checks, files)
            _check_seq_len(config, source, "training.seq_len", seq_len)
            opened.append(_check_source(config, source, seq_len + 1, vocab_size, tokenizer))
        except DataError as error:
            problems.append(error)
    if problems:
        raise problems[0] if len(problems) == 1 else UserErrors(problems)
    names = [config.name for config in sources]
    if not names or len(set(names)) < len(names):
        raise DataError(
            f"sources: {names}: there must be at least one source, and each needs its own name."
        )
    check_bos({source.name: source.bos for source in opened})
    return SampleStream(opened, seq_len, seed, tokenizer, mixture)


def check_bos(sources: Mapping[str, bool]) -> None:
    """Raise DataError if documents begin with BOS in some sources but not in others."""
    with_bos = [name for name, bos in sources.items() if bos]
    if 0 < len(with_bos) < len(sources):
        without = [name for name in sources if name not in with_bos]
        raise DataError(
            f"documents begin with BOS in {', '.join(with_bos)}, and not in {', '.join(without)}.",
            fix="Prepare all of them with or all without --bos (scripts/prepare_data.py).",
        )


def open_validation(
    config: SourceConfig,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    checks: CorpusChecks | None = None,
    timeout_seconds: float | None = None,
) -> ValidationSet:
    """Open all of a source as a validation set; raises DataError.

    `timeout_seconds`: limit for one read.
    """
    files = OpenFiles(MIN_OPEN_FILES)  # its shards are read one after the other
    source = open_token_source(config.format, config.path, checks, files)
    _check_seq_len(config, source, "validation.seq_len", seq_len)
    checked = _check_source(config, source, 2, vocab_size, tokenizer)
    return ValidationSet(checked, seq_len, timeout_seconds, tokenizer)


def _byte_counts(tokenizer: Tokenizer, vocab_size: int) -> Tensor:
    """Bytes of text that each id of the model stands for: int64 [`vocab_size`]."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    lengths = [len(text) for text in tokenizer.token_bytes()]
    counts[: len(lengths)] = torch.tensor(lengths)[:vocab_size]
    return counts


@dataclass(frozen=True)
class _CheckedSource:
    """A source that passed the checks of this run."""

    config: SourceConfig
    source: TokenSource
    vocab_size: int  # of the model
    bos: bool  # every document begins with BOS

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def path(self) -> str:
        return self.config.path

    @property
    def weight(self) -> float:
        return self.config.weight

    @property
    def tokens(self) -> int:
        return self.source.tokens

    @property
    def fingerprint(self) -> str:
        return self.source.fingerprint

    @property
    def content_sample(self) -> str | None:
        return self.source.content_sample

    @property
    def is_packed(self) -> bool:
        return self.source.packed_seq_len is not None

    def lacks_end(self, end: int) -> bool:
        """Whether the last document does not end with the id `end`, which has to mark its end."""
        return not self.is_packed and _id_at(self.source, self.tokens - 1) != end

    def stride(self, seq_len: int) -> int:
        """Ids between the first ids of two samples."""
        return seq_len + 1 if self.is_packed else seq_len

    def samples(self, seq_len: int, whole: bool = True) -> int:
        """Number of samples; the last may be shorter than `seq_len` unless `whole`."""
        if self.is_packed:
            return self.tokens // (seq_len + 1)
        return (self.tokens - 1) // seq_len if whole else -(-(self.tokens - 1) // seq_len)

    def read_samples(self, samples: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of whole samples: int64 [N, T] each; raises DataError."""
        starts = samples * self.stride(seq_len)
        if not self.is_packed:
            return _inputs_and_labels(self.gather(starts, seq_len + 1))
        ids, labels = self.source.gather_windows(samples)
        self._check_ids(ids, starts)
        return ids[:, :-1].copy(), labels

    def ordered(self, weight: float, seq_len: int) -> OrderedSource:
        """The source as the order of samples needs it."""
        samples, limit = self.samples(seq_len), None
        if self.config.max_epochs:
            limit = max(1, int(Fraction(self.config.max_epochs) * samples))
        return OrderedSource(self.name, weight, samples, limit, self.config.shuffle)

    def first_token(self, sample: int, seq_len: int) -> int:
        """Position of the first id of a sample."""
        return sample * self.stride(seq_len)

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start: int64 [len(starts), count].

        Raises DataError, also for ids outside the vocabulary.
        """
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


def _check_seq_len(config: SourceConfig, source: TokenSource, key: str, seq_len: int) -> None:
    """Refuse windows of another length than that of the run; raises DataError."""
    if source.packed_seq_len not in (None, seq_len):
        raise DataError(
            f'source "{config.name}" ({config.path}): is packed in windows of'
            f" {source.packed_seq_len} tokens, but {key} = {seq_len}.",
            fix=f"Set {key} = {source.packed_seq_len}, or pack again with [pack] seq_len ="
            f" {seq_len}.",
        )


@dataclass(frozen=True)
class _TextSamples:
    """Text that is tokenized while it is read, with the interface of a `_CheckedSource`."""

    config: SourceConfig
    text: TextSource
    last_id: int  # of every document
    tokens: int | None = None  # unknown

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def path(self) -> str:
        return self.config.path

    @property
    def weight(self) -> float:
        return self.config.weight

    @property
    def bos(self) -> bool:
        return self.config.bos

    @property
    def fingerprint(self) -> str:
        return self.text.fingerprint

    @property
    def content_sample(self) -> str | None:
        return self.text.content_sample

    def samples(self, seq_len: int) -> None:
        """Unknown: nothing has counted the tokens."""

    def first_token(self, sample: int, seq_len: int) -> None:
        """Unknown: samples of several lanes alternate."""

    def ordered(self, weight: float, seq_len: int) -> OrderedSource:
        """The source as the order of samples needs it."""
        return OrderedSource(self.name, weight, None)

    def lacks_end(self, end: int) -> bool:
        """Whether documents do not end with the id `end`."""
        return self.last_id != end

    def read_samples(self, samples: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
        """Inputs and labels of samples: int64 [N, T] each; raises DataError."""
        return _inputs_and_labels(self.text.read(samples))


def _open_text(
    config: SourceConfig,
    seq_len: int,
    seed: int,
    tokenizer: Tokenizer | None,
    checks: CorpusChecks | None,
) -> _TextSamples:
    """Open text files to be tokenized while they are read; raises DataError."""
    label = f'source "{config.name}" ({config.path}), format = "{TEXT}"'
    if tokenizer is None:
        raise DataError(f"{label}: needs a tokenizer.", fix="Set data.tokenizer.")
    if config.max_epochs or not config.shuffle:
        raise DataError(
            f"{label}: max_epochs and shuffle = false need prepared shards.",
            fix="Remove them, or prepare the text: scripts/prepare_data.py.",
        )
    if config.bos and not tokenizer.has_bos:
        raise DataError(f"{label}: bos = true, but the tokenizer has no BOS.", fix="Remove bos.")
    encode = document_encoder(tokenizer, config.bos)
    text = TextSource(
        config.path,
        config.lanes,
        seq_len + 1,
        f"{seed} text {config.name}",
        encode,
        checks or CorpusChecks(),
    )
    return _TextSamples(config, text, tokenizer.eos_id)


def _check_source(
    config: SourceConfig,
    source: TokenSource,
    min_tokens: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> _CheckedSource:
    """Check that an opened source fits the model and the tokenizer; raises DataError."""
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
    return _CheckedSource(config, source, vocab_size, bos)


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


def _weight_text(weight: float, six_digits_suffice: bool) -> str:
    """A weight as checkpoints record it.

    Six digits are enough to distinguish quotas of whole samples per block; otherwise all digits
    are needed.
    """
    short = f"{weight:g}"
    return short if six_digits_suffice or float(short) == weight else repr(weight)


def _id_at(source: TokenSource, position: int) -> int:
    return int(source.gather(np.array([position]), 1)[0, 0])


def _inputs_and_labels(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Ids [N, T + 1] as two arrays [N, T] that share no memory."""
    return ids[:, :-1].copy(), ids[:, 1:].copy()
