"""The inputs of a job: the tokenizer, the training data, its batches and the validation sets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from itertools import tee
from typing import Any

import torch.distributed as dist

from titanlite.data import (
    TEXT,
    BatchDump,
    SampleStream,
    Tokenizer,
    ValidationSet,
    describe_mixture,
    merge_positions,
    open_sample_stream,
    open_tokenizer,
    open_validation,
    prefetch,
    rank_slices,
    repeated_sources,
)
from titanlite.distributed.collectives import gather_from_all_ranks, run_on_all_ranks
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.process_group import RankContext
from titanlite.elastic.rows import RankSlice, rank_rows, read_with_idle
from titanlite.errors import ConfigError, UserError
from titanlite.job.config import JobConfig
from titanlite.job.job import Job
from titanlite.log import logger
from titanlite.settings import raise_together
from titanlite.training.batch import Batch
from titanlite.training.batch_schedule import BatchSchedule
from titanlite.training.engine import Engine
from titanlite.training.state import Counters, TrainState

_SHOWN_CHANGES = 8
VerifySlice = tuple[int, int]  # (rank, ranks): the ranks divide a full verification among them


def open_job_tokenizer(config: JobConfig) -> Tokenizer | None:
    """The tokenizer of [data]; None if data.tokenizer is not set."""
    return open_tokenizer(config.data.tokenizer) if config.data.tokenizer else None


def open_job_stream(
    config: JobConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    verify_slice: VerifySlice | None = None,
) -> SampleStream:
    """The training data; raises DataError."""
    return open_sample_stream(
        config.data.sources,
        seq_len=config.training.seq_len,
        seed=config.debug.seed,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        checks=config.data.checks(verify_slice),
        mixture=config.data.mixture,
    )


def open_job_validation(
    config: JobConfig,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    verify_slice: VerifySlice | None = None,
) -> list[ValidationSet]:
    """The validation sets; empty if validation is off. Raises all their errors together."""
    opened: list[ValidationSet] = []
    problems: list[UserError] = []
    for source in config.data.validation if config.validation.enable else ():
        try:
            validation_set = open_validation(
                source,
                tokenizer=tokenizer,
                checks=config.data.checks(verify_slice),
                seq_len=config.validation.seq_len,
                vocab_size=vocab_size,
            )
            opened.append(validation_set)
        except UserError as error:
            problems.append(error)
    raise_together(problems)
    return opened


def log_mixture(
    stream: SampleStream, batches: BatchSchedule, steps: int, counters: Counters
) -> None:
    """Log the tokens and epochs of each source in the whole run, and warn of many epochs.

    `counters`: where the run starts or resumes. Raises ConfigError if the data end earlier.
    """
    after = batches.tokens_after(max(0, steps - counters.step), counters.tokens)
    end = counters.position + (after - counters.tokens) // stream.seq_len
    if stream.length is not None and end > stream.length:
        raise ConfigError(
            f"training.steps = {steps}: the run needs {end:,} samples, but all sources of a phase"
            f" have reached max_epochs after {stream.length:,}.",
            fix="Use a smaller training.steps, or a larger max_epochs in data.sources.",
        )
    shares = stream.shares([*counters.consumed, (counters.position, end)])
    lines = describe_mixture(shares)
    changes = stream.describe_changes(end)
    if len(changes) > _SHOWN_CHANGES:
        changes[_SHOWN_CHANGES:] = [f"… and {len(changes) - _SHOWN_CHANGES} more changes"]
    logger.info("%s", "\n  ".join(["training data of the whole run", *lines, *changes]))
    for warning in repeated_sources(shares):
        logger.warning("%s", warning)


class SavedLanes:
    """How far text was read, if it is tokenized while it is read: a part of each checkpoint."""

    def __init__(self, stream: SampleStream, counters: Counters):
        self._stream, self._counters = stream, counters

    def state(self) -> Any:
        """The positions in the lanes of the text (data/lanes.py), from all ranks; None: no text."""
        if not self._stream.tokenizes:
            return None
        own = self._stream.lane_positions(self._counters.position)
        return merge_positions(gather_from_all_ranks(own))

    def restore(self, state: Any) -> None:
        """Continue there; None: text is tokenized from the start again."""
        self._stream.restore_lanes(state or {})


def build_data(job: Job, rank: RankContext) -> tuple[SampleStream, list[ValidationSet]]:
    """The training data and the validation sets; the errors of all ranks are raised on all."""

    def open_all() -> tuple[SampleStream, list[ValidationSet]]:
        tokenizer, vocab_size = open_job_tokenizer(job.config), job.sizes.vocab_size
        verify_slice = (rank.rank, rank.world_size)
        stream = open_job_stream(job.config, vocab_size, tokenizer, verify_slice)
        return stream, open_job_validation(job.config, vocab_size, tokenizer, verify_slice)

    opened = run_on_all_ranks(open_all)
    for source in job.config.data.sources:
        if source.format == TEXT:
            logger.info(
                'source "%s" is tokenized while it is read; to do it once, before runs:'
                " titanlite prepare '%s' --tokenizer %s --out outputs/%s",
                source.name,
                source.path,
                job.config.data.tokenizer,
                source.name,
            )
    return opened


def build_batches(
    job: Job, stream: SampleStream, state: TrainState, mesh: Mesh, engine: Engine
) -> Iterator[Batch]:
    """Prefetch this rank's batches from `state.position` on, for a GPU into pinned memory."""
    pin = mesh.batch.device_type == "cuda"
    rank, ranks, windows = mesh.batch_rank, mesh.batch.size(), state.counters.windows

    def read(size: int, position: int, sequences: int) -> Batch:
        rows = rank_rows(size, ranks, job.config.training.local_batch_size)
        batch = engine.prepare(*read_with_idle(stream.read, position, sequences, rows))
        if job.configured:
            batch = dataclasses.replace(batch, own=RankSlice(position, sequences, size))
        return batch.pin_memory() if pin else batch

    sizes, batches = tee(job.batches.batches_from(state.counters.tokens))
    slices = rank_slices(state.position, batches, rank, ranks, windows)
    return prefetch(read, ((size, *part) for size, part in zip(sizes, slices, strict=False)))


def build_batch_dump(job: Job, stream: SampleStream) -> Callable[[int, int, int], str]:
    """A function that writes the global batch of a step to a file, on rank 0."""
    if dist.get_rank():
        return lambda step, position, samples: ""
    return BatchDump(job.folder / "guard", stream).write
