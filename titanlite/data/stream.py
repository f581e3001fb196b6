"""Batches by position: the training samples in the order of the run.

A sample of T tokens needs T + 1 ids, the last of which is only a label; the next sample begins
with it. So every id is a label exactly once in an epoch, except the first id of the source and the
last (N - 1) % T of its N ids, which do not fill a sample. Validation includes those last ids.
Packed samples share no id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from titanlite.data.formats import TEXT, open_token_source
from titanlite.data.mixing import (
    MixtureConfig,
    SourceShare,
    describe_changes,
    describe_segments,
    plan_phases,
)
from titanlite.data.open_files import OpenFiles
from titanlite.data.order import SampleOrder
from titanlite.data.sample_source import (
    SourceConfig,
    StoredSamples,
    TextSamples,
    check_stored_samples,
    check_window_length,
    open_text_samples,
)
from titanlite.data.text_source import LanePositions
from titanlite.data.token_source import CorpusChecks
from titanlite.data.tokenizer import Tokenizer
from titanlite.errors import DataError
from titanlite.settings import raise_together


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

    def checks(self, verify_slice: tuple[int, int] | None) -> CorpusChecks:
        """What to verify when a source is opened.

        `verify_slice` = (rank, ranks) divides a full verification among the ranks; with None, as
        before the ranks have joined, "full" is done as "sample".
        """
        verify = "sample" if self.verify == "full" and verify_slice is None else self.verify
        return CorpusChecks(verify, verify_slice or (0, 1))


class SampleStream:
    """The training samples of a run, read at any position.

    `properties` identify what a position means (settings and data). They are among the job
    properties, which checkpoints store and compare.
    """

    def __init__(
        self,
        sources: Sequence[StoredSamples | TextSamples],
        seq_len: int,
        seed: int,
        tokenizer: Tokenizer | None,
        mixture: MixtureConfig,
    ):
        self.seq_len, self._sources = seq_len, sources
        self.tokenizer = tokenizer
        self.bos = sources[0].bos  # each document begins with BOS; the same in all sources
        self.document_end_id = tokenizer.eos_id if tokenizer else None  # last id of every document
        weights, phases = plan_phases(mixture, sources, seq_len)
        pairs = zip(sources, weights, strict=True)
        self._order = SampleOrder(
            seed, [s.order_settings(weight, seq_len) for s, weight in pairs], phases
        )
        self.properties: dict[str, Any] = {
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
        samples = {s.name: s.source.content_sample for s in sources if s.source.content_sample}
        if samples:
            self.properties["data.content"] = samples

    @property
    def names(self) -> list[str]:
        return [source.name for source in self._sources]

    @property
    def sources(self) -> Sequence[StoredSamples | TextSamples]:
        return self._sources

    @property
    def length(self) -> int | None:
        """Number of positions, if all sources of a phase end; None: there is no last one."""
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

    def describe_changes(self, end: int) -> list[str]:
        """A line for each change of the weights before position `end`."""
        return describe_changes(self.names, self._order.mixture.segments, self.seq_len, end)

    @property
    def tokenizes(self) -> bool:
        """Whether a source is tokenized while it is read."""
        return any(isinstance(source, TextSamples) for source in self._sources)

    def lane_positions(self, position: int) -> dict[str, LanePositions]:
        """How far this process has read each lane (data/lanes.py) of each text source."""
        drawn = self._order.mixture.drawn_at(position)
        return {
            source.name: source.source.positions(count)
            for source, count in zip(self._sources, drawn, strict=True)
            if isinstance(source, TextSamples)
        }

    def count_near(self, position: int, sequences: int) -> int:
        """How many of these positions come before the first that needs much text tokenized."""
        source_at, _, samples = self._order.sample_at(np.arange(position, position + sequences))
        for row, (number, sample) in enumerate(
            zip(source_at.tolist(), samples.tolist(), strict=True)
        ):
            source = self._sources[number]
            if isinstance(source, TextSamples) and not source.source.is_near(sample):
                return row
        return sequences

    def restore_lanes(self, positions: Any) -> None:
        """Continue where merged `lane_positions` stopped; else text is tokenized from the start."""
        for source in self._sources:
            if isinstance(source, TextSamples):
                known = positions.get(source.name, {}) if isinstance(positions, dict) else None
                source.source.restore(known)

    def _describe(self, number: int, source: StoredSamples | TextSamples, weight: float) -> str:
        """A source as `properties` record it: what it contains and its order, not its path."""
        text = f"{weight:g}" if float(f"{weight:g}") == weight else repr(weight)
        suffix = "" if source.config.shuffle else ", not shuffled"
        return f"number {number}, weight {text}, content {source.source.fingerprint}{suffix}"

    def read(self, position: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of `sequences` positions: int64 [B, T] each; raises DataError."""
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
        return torch.from_numpy(inputs), torch.from_numpy(labels)

    def sources_at(self, position: int, sequences: int) -> Tensor:
        """The number of the source of each of `sequences` positions: int64 [B]."""
        source_at, _, _ = self._order.sample_at(np.arange(position, position + sequences))
        return torch.from_numpy(source_at)

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

    def sources_without(self, document_end_id: int) -> list[str]:
        """Names of the sources whose last id is not `document_end_id`."""
        return [source.name for source in self._sources if source.lacks_end(document_end_id)]


SAMPLE_FORMATS: dict[str, Callable[..., StoredSamples | TextSamples]] = {
    # formats that are not a sequence of stored ids -> opener, with the arguments of this one
    TEXT: open_text_samples,
}


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
    """The training samples of `sources` in the order of `seed`; raises all DataErrors together."""
    opened: list[StoredSamples | TextSamples] = []
    problems: list[DataError] = []
    files = OpenFiles()
    for config in sources:
        try:
            if config.format in SAMPLE_FORMATS:
                open_samples = SAMPLE_FORMATS[config.format]
                opened.append(open_samples(config, seq_len, seed, tokenizer, checks))
                continue
            source = open_token_source(config.format, config.path, checks, files)
            check_window_length(config, source, "training.seq_len", seq_len)
            opened.append(check_stored_samples(config, source, seq_len + 1, vocab_size, tokenizer))
        except DataError as error:
            problems.append(error)
    raise_together(problems)
    names = [config.name for config in sources]
    if not names or len(set(names)) < len(names):
        raise DataError(
            f"their names are {names}: there must be a source, and each needs its own name.",
            fix="Rename sources: the name seeds the order of the samples.",
        )
    check_bos({source.name: source.bos for source in opened})
    return SampleStream(opened, seq_len, seed, tokenizer, mixture or MixtureConfig())


def check_bos(sources: Mapping[str, bool]) -> None:
    """Raise DataError if documents begin with BOS in some sources but not in others."""
    with_bos = [name for name, bos in sources.items() if bos]
    if 0 < len(with_bos) < len(sources):
        without = [name for name in sources if name not in with_bos]
        raise DataError(
            f"documents begin with BOS in {', '.join(with_bos)}, and not in {', '.join(without)}.",
            fix="Prepare all of them with or all without --bos (titanlite prepare).",
        )
