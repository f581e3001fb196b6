"""The batch size as a pure function of the tokens consumed, so that resuming needs no state."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

from titanlite.errors import ConfigError
from titanlite.training.batch_ramp import BATCH_KEY, BatchStage, parse_batch_ramp, refused_ramp
from titanlite.training.config import TrainingConfig


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


def build_batch_schedule(training: TrainingConfig, global_batch: int) -> BatchSchedule:
    """The batch sizes of a run whose batch is `global_batch` in the end; raises ConfigError."""
    if training.batch_size_ramp is None:
        return constant_batch(global_batch, training.seq_len)
    if training.global_batch_size == -1:
        raise refused_ramp(
            training.batch_size_ramp,
            f"{BATCH_KEY} = -1 depends on the layout.",
            f"Set {BATCH_KEY} to the size after the ramp.",
        )
    stages = parse_batch_ramp(training.batch_size_ramp, global_batch)
    return BatchSchedule(tuple(stages), training.seq_len)


def check_batch_size(training: TrainingConfig, data_ranks: int) -> Iterator[ConfigError]:
    """Reject global batches that the data-parallel ranks cannot divide into local batches.

    `data_ranks` 0: they need not, because idle sequences complete the batches.
    """
    local = training.local_batch_size
    if training.global_batch_size == -1 and training.batch_size_ramp is None:
        return
    unit = local * data_ranks if data_ranks else 1
    try:
        schedule = build_batch_schedule(training, training.global_batch_size)
    except ConfigError as error:
        yield error
        if training.global_batch_size == -1:
            return
        schedule = constant_batch(training.global_batch_size, training.seq_len)
    misfits = [stage.sequences for stage in schedule.stages if stage.sequences % unit]
    reason = f"training.local_batch_size {local} x {data_ranks} data-parallel ranks = {unit}."
    if training.global_batch_size in misfits:
        size = misfits.pop()
        nearest = " or ".join(str(n) for n in (size - size % unit, size + -size % unit) if n)
        yield ConfigError(
            f"{BATCH_KEY} = {size}: is not a multiple of {reason}",
            fix=f"Use {nearest}, or another local_batch_size.",
        )
    if misfits:
        sizes = ", ".join(map(str, misfits[:10])) + (", …" if len(misfits) > 10 else "")
        yield refused_ramp(
            training.batch_size_ramp or "",
            f"its sizes {sizes} are not multiples of {reason}",
            f"Use multiples of {unit}, or another local_batch_size.",
        )
