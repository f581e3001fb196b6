"""(position, rows) -> a batch: training samples in the order of the run, validation in its own.

A sample of T tokens needs T + 1 ids, of which the last is only a label; the next sample begins
with it. An epoch has every id as a label exactly once, but for the first id of the corpus and the
last (N - 1) % T of its N ids, which fill no sample. Validation has those last ids too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from titanlite.data.background import BackgroundReader
from titanlite.data.open_files import LEAST_OPEN, OpenFiles
from titanlite.data.order import SampleOrder
from titanlite.data.shards import Corpus, CorpusChecks, open_corpus
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError, UserErrors
from titanlite.labels import IGNORE_INDEX
from titanlite.settings import Positive, Range


@dataclass(frozen=True)
class SourceConfig:
    """One corpus among those of a run."""

    name: str  # its own; the order of its samples depends on it, and metrics show it
    path: str  # a folder of shards, or one shard
    weight: Annotated[float, Range(0)] = 1.0  # its share of the samples, beside the other weights


@dataclass(frozen=True)
class DataConfig:
    """[data] What to read."""

    tokenizer: str | None = None  # tiktoken ranks, a tokenizer.json, or "bytes"
    sources: list[SourceConfig] = field(default_factory=list)  # what is learned from
    validation: list[SourceConfig] = field(default_factory=list)  # what is only measured
    verify: Literal["sample", "full", "off"] = "sample"
    # content compared when a corpus is opened: some blocks of each shard; every byte, the shards
    # divided among the ranks, within comm.init_timeout_seconds; nothing
    follow_symlinks: bool = False  # read shards that symbolic links lead to outside their folder
    read_timeout_seconds: Positive = 300
    # longest wait for one batch; then the run ends with 2, for a disk that does not answer

    def checks(self, part: tuple[int, int] | None = None) -> CorpusChecks:
        """What to check when a corpus is opened; `part` of a full verification, if any."""
        verify = "sample" if self.verify == "full" and part is None else self.verify
        return CorpusChecks(verify, self.follow_symlinks, part or (0, 1))


class SampleStream:
    """The samples of a run, at any position of it."""

    def __init__(
        self,
        sources: Sequence[_Source],
        seq_len: int,
        seed: int,
        tokenizer: Tokenizer | None = None,
    ):
        self.seq_len, self._sources = seq_len, sources
        self.tokenizer = tokenizer
        self.bos = sources[0].bos  # each document begins with BOS; the same in all sources
        self.end = tokenizer.eos_id if tokenizer else None  # the last id of every document
        self._order = SampleOrder(seed, [(s.name, s.weight, s.samples(seq_len)) for s in sources])
        whole = self._order.shares.whole
        self.facts: dict[str, Any] = {  # by the settings they come from: what a position means
            "debug.seed": seed,
            "training.seq_len": seq_len,
            "data.tokenizer": tokenizer and tokenizer.fingerprint,
            "data.bos": self.bos,
            "data.sources": {
                source.name: f"number {number}, {source.fact(whole)}{self._version(number)}"
                for number, source in enumerate(sources)
            },
        }
        samples = {source.name: source.corpus.sample for source in sources}
        if None not in samples.values():  # else nothing was sampled, so there is nothing to compare
            self.facts["data.content"] = samples

    def _version(self, number: int) -> str:
        """Of the order of a source, unless it is the first, which older checkpoints do not name."""
        version = self._order.version(number)
        return "" if version == 1 else f", order version {version}"

    def read(self, position: int, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of `rows` positions: int64 [rows, T] each; raises DataError."""
        positions = np.arange(position, position + rows, dtype=np.int64)
        which, _, samples = self._order.sample_at(positions)
        starts, ids = samples * self.seq_len, None
        for number, source in enumerate(self._sources):
            mine = which == number
            if mine.all():
                ids = source.gather(starts, self.seq_len + 1)
                break
            ids = np.empty((rows, self.seq_len + 1), dtype=np.int64) if ids is None else ids
            if mine.any():
                ids[mine] = source.gather(starts[mine], self.seq_len + 1)
        return _inputs_and_labels(ids)

    def without_end(self, end: int) -> list[str]:
        """The sources that do not end with the id `end`, as a document does."""
        return [source.name for source in self._sources if source.last_id != end]

    def _read_pinned(self, position: int, rows: int) -> tuple[Tensor, Tensor]:
        inputs, labels = self.read(position, rows)
        return inputs.pin_memory(), labels.pin_memory()

    def prefetch(
        self,
        slices: Iterable[tuple[int, int]],
        ahead: int = 2,
        pin: bool = False,
        timeout_seconds: float | None = None,
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """`read(*slice)` of each slice, up to `ahead` of them read in the background.

        `pin`: into memory that a GPU copies from by itself, so that nobody waits for it.
        An error of the background is raised here, at the batch it belongs to, and DataError where
        that batch takes more than `timeout_seconds`; however the iterator ends, so does its thread.
        """
        slices = iter(slices)
        read = self._read_pinned if pin else self.read
        reader = BackgroundReader(read, "prefetch", timeout_seconds)
        places = ", ".join(source.corpus.path for source in self._sources)
        try:
            waiting = deque((s, reader.submit(*s)) for s in islice(slices, max(1, ahead)))
            while waiting:
                (position, rows), future = waiting.popleft()
                what = f"training samples {position}…{position + rows - 1} of {places}"
                batch = reader.wait(future, what)
                del future
                waiting.extend((s, reader.submit(*s)) for s in islice(slices, 1))
                yield batch
        finally:
            reader.close()


class ValidationSet:
    """Held-out text in order, as `samples` samples of which the last may be short."""

    def __init__(self, source: _Source, seq_len: int, timeout_seconds: float | None = None):
        self.name, self.seq_len, self._source = source.name, seq_len, source
        self.bos = source.bos
        self.samples = -(-(source.corpus.tokens - 1) // seq_len)
        self._timeout, self._reader = timeout_seconds, None

    def read(self, start: int, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of samples [start, start + rows): int64 [rows, T] each.

        Where the text has ended, also in rows past the last sample, labels are IGNORE_INDEX.
        Raises DataError, also where reading takes more than the time limit.
        """
        if self._timeout is None:
            return self._read(start, rows)
        if self._reader is None:  # a thread only for those that are read
            self._reader = BackgroundReader(self._read, "validation", self._timeout)
        what = f"validation samples {start}…{start + rows - 1} of {self._source.corpus.path}"
        return self._reader.wait(self._reader.submit(start, rows), what)

    def _read(self, start: int, rows: int) -> tuple[Tensor, Tensor]:
        length, tokens = self.seq_len, self._source.corpus.tokens
        first = start * length
        ids = np.full((rows, length + 1), IGNORE_INDEX, dtype=np.int64)
        whole = max(0, min(rows, (tokens - 1 - first) // length))
        ids[:whole] = self._source.gather(first + np.arange(whole) * length, length + 1)
        rest = tokens - first - whole * length
        if whole < rows and rest > 1:
            ids[whole, :rest] = self._source.gather(np.array([tokens - rest]), rest)
        inputs, labels = _inputs_and_labels(ids)
        return inputs.clamp_(min=0), labels  # a model must be able to look every input up

    def without_end(self, end: int) -> list[str]:
        """Its name, if it does not end with the id `end`, as a document does."""
        return [self.name] if self._source.last_id != end else []


def open_sample_stream(
    sources: Sequence[SourceConfig],
    *,
    seq_len: int,
    seed: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    checks: CorpusChecks | None = None,
) -> SampleStream:
    """The samples of these sources in the order of `seed`; raises DataError, or Problems."""
    opened, problems, files = [], [], OpenFiles()
    for config in sources:
        try:
            corpus = open_corpus(config.path, checks, files)
            opened.append(_source_of(config, corpus, seq_len + 1, vocab_size, tokenizer))
        except DataError as error:
            problems.append(error)
    if problems:
        raise problems[0] if len(problems) == 1 else UserErrors(problems)
    names = [config.name for config in sources]
    if not names or len(set(names)) < len(names):
        raise DataError(f"sources: {names}: there must be at least one, each with its own name.")
    check_bos({source.name: source.bos for source in opened})
    return SampleStream(opened, seq_len, seed, tokenizer)


def check_bos(sources: Mapping[str, bool]) -> None:
    """Raise DataError where documents begin with BOS in some of the sources and not in others."""
    having = [name for name, bos in sources.items() if bos]
    if 0 < len(having) < len(sources):
        others = [name for name in sources if name not in having]
        raise DataError(
            f"documents begin with BOS in {', '.join(having)}, and not in {', '.join(others)}.",
            fix="Prepare all of them with or all without --bos (scripts/prepare_data.py).",
        )


def open_validation(
    source: SourceConfig,
    *,
    seq_len: int,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    checks: CorpusChecks | None = None,
    timeout_seconds: float | None = None,
) -> ValidationSet:
    """The whole of a source, in order; raises DataError. `timeout_seconds`: for one read of it."""
    corpus = open_corpus(source.path, checks, OpenFiles(LEAST_OPEN))  # one is read after the other
    fitting = _source_of(source, corpus, 2, vocab_size, tokenizer)
    return ValidationSet(fitting, seq_len, timeout_seconds)


@dataclass(frozen=True)
class _Source:
    name: str
    weight: float
    corpus: Corpus
    vocab_size: int
    bos: bool  # every document begins with BOS

    def samples(self, seq_len: int) -> int:
        return (self.corpus.tokens - 1) // seq_len

    @property
    def last_id(self) -> int:
        return int(self.corpus.read(self.corpus.tokens - 1, 1)[0])

    def fact(self, whole_shares: bool) -> str:
        """What the samples are, without where they lie.

        Six digits of a weight tell whole 4096ths apart; any other share needs all of them.
        """
        short = f"{self.weight:g}"
        weight = short if whole_shares or float(short) == self.weight else repr(self.weight)
        return f"weight {weight}, content {self.corpus.fingerprint}"

    def gather(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Ids [start, start + count) of each start: int64 [starts, count]; raises DataError."""
        ids = self.corpus.gather(starts, count)
        if ids.size and int(ids.view(np.uint64).max()) >= self.vocab_size:  # negatives are huge
            row, column = np.argwhere((ids < 0) | (ids >= self.vocab_size))[0]
            raise DataError(
                f'source "{self.name}" ({self.corpus.path}): token {starts[row] + column} is the id'
                f" {ids[row, column]}, outside 0…{self.vocab_size - 1}.",
                fix="Use the tokenizer that made the shards, or a model.vocab_size that holds it.",
            )
        return ids


def _source_of(
    config: SourceConfig,
    corpus: Corpus,
    least_tokens: int,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> _Source:
    """A corpus that fits the job; raises DataError where it does not."""
    about, manifest = f'source "{config.name}" ({config.path})', corpus.manifest
    if corpus.tokens < least_tokens:
        raise DataError(
            f"{about}: holds {corpus.tokens} tokens, and one sample needs {least_tokens}.",
            fix="Give more text, or a smaller seq_len.",
        )
    if manifest and tokenizer and manifest.tokenizer != tokenizer.fingerprint:
        raise DataError(
            f"{about}: was made by the tokenizer {manifest.tokenizer[:12]} of"
            f" {manifest.vocab_size} ids; data.tokenizer is {tokenizer.fingerprint[:12]} of"
            f" {tokenizer.vocab_size}.",
            fix="Name the tokenizer that made the shards, or prepare the text again.",
        )
    if manifest and manifest.max_id >= vocab_size:
        raise DataError(
            f"{about}: has ids up to {manifest.max_id}, outside 0…{vocab_size - 1}.",
            fix=f"Set model.vocab_size = {manifest.vocab_size} or more.",
        )
    if manifest:
        bos = manifest.bos is True
    else:  # of a corpus made elsewhere, by the first of its documents
        bos = bool(tokenizer and tokenizer.has_bos and corpus.read(0, 1)[0] == tokenizer.bos_id)
    return _Source(config.name, config.weight, corpus, vocab_size, bos)


def _inputs_and_labels(ids: np.ndarray) -> tuple[Tensor, Tensor]:
    """Ids [rows, T + 1] as two tensors [rows, T] that share no memory."""
    both = torch.from_numpy(ids)
    return both[:, :-1].clone(), both[:, 1:].clone()  # contiguous() would share where rows = 1
