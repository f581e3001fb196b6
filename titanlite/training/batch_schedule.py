"""The batch size as a pure function of the tokens consumed, so that resuming needs no state."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from titanlite.errors import ConfigError
from titanlite.settings import format_value
from titanlite.training.config import TrainingConfig

RAMP_KEY, BATCH_KEY = "training.batch_size_ramp", "training.global_batch_size"
_FORMS = 'Write a table such as "0:512 10B:1024", or a linear ramp such as "32 +32 over 12B".'
MAX_INCREMENTS = 10_000  # of a linear ramp: each adds a stage, whose size is checked
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchStage(NamedTuple):
    """A constant part of a batch-size schedule."""

    first_token: int  # steps that begin at this token or later have `sequences`
    sequences: int  # of one optimizer step, over all ranks


@dataclass(frozen=True)
class BatchSchedule:
    """The global batch size of each step. The sizes increase, and the first stage begins at 0."""

    stages: tuple[BatchStage, ...]
    seq_len: int  # tokens of a sequence

    @property
    def largest(self) -> int:
        """The batch size of the last stage."""
        return self.stages[-1].sequences

    def batch_at(self, tokens: int) -> int:
        """Batch size of a step that begins after `tokens` tokens."""
        return self.stages[bisect_right(self.stages, tokens, key=lambda s: s.first_token) - 1][1]

    def batches_from(self, tokens: int) -> Iterator[int]:
        """Batch sizes of the steps from `tokens` on, without an end."""
        while True:
            yield (batch := self.batch_at(tokens))
            tokens += batch * self.seq_len

    def tokens_after(self, steps: int, tokens: int = 0) -> int:
        """Tokens consumed `steps` steps after `tokens`, in time O(stages)."""
        for (_, sequences), following in zip(self.stages, [*self.stages[1:], None], strict=True):
            step_tokens, stage_steps = sequences * self.seq_len, steps
            if following is not None:
                to_next = max(0, following.first_token - tokens)
                stage_steps = min(steps, -(-to_next // step_tokens))
            tokens += stage_steps * step_tokens
            steps -= stage_steps
        return tokens

    def __str__(self) -> str:
        (_, first), (end, last) = self.stages[0], self.stages[-1]
        if len(self.stages) == 1:
            return f"{first} sequences"
        return f"{first} to {last} sequences in {len(self.stages)} sizes over {end:,} tokens"


def constant_batch(sequences: int, seq_len: int) -> BatchSchedule:
    """A schedule with one batch size."""
    return BatchSchedule((BatchStage(0, sequences),), seq_len)


def ramp_batch(ramp: str, final: int, seq_len: int) -> BatchSchedule:
    """The schedule that `training.batch_size_ramp` describes, up to `final` sequences.

    Raises ConfigError.
    """
    linear = re.fullmatch(r"\s*(\d{1,15})\s*\+\s*(\d{1,15})\s+over\s+(\S+)\s*", ramp)
    if linear:
        start, increment, length = int(linear[1]), int(linear[2]), _parse_tokens(linear[3], ramp)
        stages = _linear_stages(ramp, start, increment, length, final)
    else:
        stages = _table_stages(ramp, final)
    return BatchSchedule(tuple(stages), seq_len)


def _linear_stages(
    ramp: str, start: int, increment: int, length: int, final: int
) -> list[BatchStage]:
    """Sizes from `start` to `final`; all but the last have about equal numbers of tokens.

    The ramp of GPT-3 (https://arxiv.org/abs/2005.14165, appendix B).
    """
    rise = final - start
    if start < 1 or increment < 1 or rise < 1 or rise % increment:
        raise _refused(
            ramp,
            f"{BATCH_KEY} = {final} must be more than the start {start} by a multiple of the"
            f" increment {increment}.",
            f"Use another start or increment, or another {BATCH_KEY}.",
            BATCH_KEY,
        )
    count = rise // increment
    if not count <= min(length, MAX_INCREMENTS):
        reason = f"has {count} increments in {length} tokens; at most one a token, and"
        raise _refused(ramp, f"{reason} {MAX_INCREMENTS:,} in all.", "Use a larger increment.")
    return [BatchStage(-(-n * length // count), start + n * increment) for n in range(count + 1)]


def _table_stages(ramp: str, final: int) -> list[BatchStage]:
    """The stages of "TOKENS:SIZE TOKENS:SIZE …"."""
    stages = []
    for entry in ramp.replace(",", " ").split():
        tokens, colon, size = entry.partition(":")
        if not (colon and size.isdecimal() and len(size) <= 15):
            raise _refused(ramp, f"{format_value(entry)} is not TOKENS:SIZE.", _FORMS)
        stages.append(BatchStage(_parse_tokens(tokens, ramp), int(size)))
    rises = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(stages))
    if not stages or stages[0].first_token != 0 or stages[0].sequences < 1 or not rises:
        reason = "the table must begin at 0 tokens, and its tokens and sizes must increase."
        raise _refused(ramp, reason, _FORMS)
    if (last := stages[-1].sequences) != final:
        reason = f"ends at {last} sequences, but {BATCH_KEY} = {final} is the size after the ramp."
        raise _refused(ramp, reason, f"Set {BATCH_KEY} = {last}.", BATCH_KEY)
    return stages


def _parse_tokens(text: str, ramp: str) -> int:
    """A number of tokens such as 4096, 500M or 1.5B."""
    match = re.fullmatch(r"(\d[\d_]{0,20}(?:\.\d{1,12})?)([KMBT]?)", text, re.ASCII)
    amount = Fraction(match[1].replace("_", "")) * _SUFFIXES[match[2]] if match else Fraction(1, 2)
    if amount.denominator != 1:
        reason = f"{format_value(text)} is not a whole number of tokens such as 4096 or 1.5B."
        raise _refused(ramp, reason, _FORMS)
    return int(amount)


def _refused(ramp: str, reason: str, fix: str, *keys: str) -> ConfigError:
    return ConfigError(
        f"{RAMP_KEY} = {format_value(ramp)}: {reason}", fix=fix, keys=(RAMP_KEY, *keys)
    )


def build_batch_schedule(training: TrainingConfig, global_batch: int) -> BatchSchedule:
    """The batch sizes of a run whose batch is `global_batch` in the end; raises ConfigError."""
    if training.batch_size_ramp is None:
        return constant_batch(global_batch, training.seq_len)
    if training.global_batch_size == -1:
        raise _refused(
            training.batch_size_ramp,
            f"{BATCH_KEY} = -1 depends on the layout.",
            f"Set {BATCH_KEY} to the size after the ramp.",
            BATCH_KEY,
        )
    return ramp_batch(training.batch_size_ramp, global_batch, training.seq_len)


def check_batch_size(training: TrainingConfig, data_ranks: int) -> Iterator[ConfigError]:
    """Reject global batches that the data-parallel ranks cannot divide into local batches."""
    local = training.local_batch_size
    if training.global_batch_size == -1 and training.batch_size_ramp is None:
        return
    unit = local * data_ranks
    try:
        schedule = build_batch_schedule(training, training.global_batch_size)
    except ConfigError as error:
        yield error
        if training.global_batch_size == -1:
            return
        schedule = constant_batch(training.global_batch_size, training.seq_len)
    misfits = [stage.sequences for stage in schedule.stages if stage.sequences % unit]
    reason = f"local_batch_size {local} x {data_ranks} data-parallel ranks = {unit}."
    if training.global_batch_size in misfits:
        size = misfits.pop()
        nearest = " or ".join(str(n) for n in (size - size % unit, size + -size % unit) if n)
        yield ConfigError(
            f"{BATCH_KEY} = {size}: is not a multiple of {reason}",
            fix=f"Use {nearest}, or another local_batch_size.",
            keys=(BATCH_KEY, "training.local_batch_size"),
        )
    if misfits:
        sizes = ", ".join(map(str, misfits[:10])) + (", …" if len(misfits) > 10 else "")
        yield _refused(
            training.batch_size_ramp or "",
            f"its sizes {sizes} are not multiples of {reason}",
            f"Use multiples of {unit}, or another local_batch_size.",
            "training.local_batch_size",
        )
