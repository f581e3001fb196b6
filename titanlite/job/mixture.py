"""What a job reads of each source: checked and logged before it starts."""

from __future__ import annotations

from titanlite.data import SampleStream, describe_mixture, repeated_sources
from titanlite.errors import ConfigError
from titanlite.log import logger
from titanlite.training import BatchSchedule, Counters

_SHOWN_CHANGES = 8


def check_stream_length(stream: SampleStream, batches: BatchSchedule, steps: int) -> None:
    """Raise ConfigError if `steps` steps need more samples than the sources may give."""
    needed = batches.tokens_after(steps) // stream.seq_len
    if stream.length is None or needed <= stream.length:
        return
    raise ConfigError(
        f"training.steps = {steps}: the run needs {needed:,} samples, but all sources of a phase"
        f" have reached max_epochs after {stream.length:,}.",
        fix="Use a smaller training.steps, or a larger max_epochs in data.sources.",
        keys=("training.steps", "data.sources"),
    )


def log_mixture(
    stream: SampleStream, batches: BatchSchedule, steps: int, counters: Counters
) -> None:
    """Log the tokens and epochs of each source in the whole run, and warn of many epochs.

    `counters`: where the run starts or resumes.
    """
    after = batches.tokens_after(max(0, steps - counters.step), counters.tokens)
    end = counters.position + (after - counters.tokens) // stream.seq_len
    shares = stream.shares([(0, end if stream.length is None else min(end, stream.length))])
    lines = describe_mixture(shares, stream.bytes_per_token())
    changes = stream.describe_changes(end)
    if len(changes) > _SHOWN_CHANGES:
        changes[_SHOWN_CHANGES:] = [f"… and {len(changes) - _SHOWN_CHANGES} more changes"]
    logger.info("%s", "\n  ".join(["training data of the whole run", *lines, *changes]))
    for warning in repeated_sources(shares):
        logger.warning("%s", warning)
