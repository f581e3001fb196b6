"""training.batch_size_ramp: smaller batches at the start."""

from __future__ import annotations

import re
from fractions import Fraction
from itertools import pairwise
from typing import NamedTuple

from titanlite.errors import ConfigError
from titanlite.settings import format_value

RAMP_KEY, BATCH_KEY = "training.batch_size_ramp", "training.global_batch_size"
_FORMS = 'Write a table such as "0:512 10B:1024", or a linear ramp such as "32 +32 over 12B".'
MAX_INCREMENTS = 10_000  # of a linear ramp: each adds a stage, whose size is checked
_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class BatchStage(NamedTuple):
    """A constant part of a batch-size schedule."""

    first_token: int  # steps that begin at this token or later have `sequences`
    sequences: int  # of one optimizer step, over all ranks


def parse_batch_ramp(ramp: str, final: int) -> list[BatchStage]:
    """The stages that `training.batch_size_ramp` describes, up to `final` sequences.

    Raises ConfigError.
    """
    linear = re.fullmatch(r"\s*(\d{1,15})\s*\+\s*(\d{1,15})\s+over\s+(\S+)\s*", ramp)
    if not linear:
        return _table_stages(ramp, final)
    start, increment, length = int(linear[1]), int(linear[2]), _parse_tokens(linear[3], ramp)
    return _linear_stages(ramp, start, increment, length, final)


def _linear_stages(
    ramp: str, start: int, increment: int, length: int, final: int
) -> list[BatchStage]:
    """Sizes from `start` to `final`; all but the last have about equal numbers of tokens.

    The ramp of GPT-3 (https://arxiv.org/abs/2005.14165, appendix B).
    """
    rise = final - start
    if start < 1 or increment < 1 or rise < 1 or rise % increment:
        raise refused_ramp(
            ramp,
            f"{BATCH_KEY} = {final} must be more than the start {start} by a multiple of the"
            f" increment {increment}.",
            f"Use another start or increment, or another {BATCH_KEY}.",
        )
    count = rise // increment
    if not count <= min(length, MAX_INCREMENTS):
        reason = f"has {count} increments in {length} tokens; at most one a token, and"
        raise refused_ramp(ramp, f"{reason} {MAX_INCREMENTS:,} in all.", "Use a larger increment.")
    return [BatchStage(-(-n * length // count), start + n * increment) for n in range(count + 1)]


def _table_stages(ramp: str, final: int) -> list[BatchStage]:
    """The stages of "TOKENS:SIZE TOKENS:SIZE …"."""
    stages = []
    for entry in ramp.replace(",", " ").split():
        tokens, colon, size = entry.partition(":")
        if not (colon and size.isdecimal() and len(size) <= 15):
            raise refused_ramp(ramp, f"{format_value(entry)} is not TOKENS:SIZE.", _FORMS)
        stages.append(BatchStage(_parse_tokens(tokens, ramp), int(size)))
    rises = all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(stages))
    if not stages or stages[0].first_token != 0 or stages[0].sequences < 1 or not rises:
        reason = "the table must begin at 0 tokens, and its tokens and sizes must increase."
        raise refused_ramp(ramp, reason, _FORMS)
    if (last := stages[-1].sequences) != final:
        reason = f"ends at {last} sequences, but {BATCH_KEY} = {final} is the size after the ramp."
        raise refused_ramp(ramp, reason, f"Set {BATCH_KEY} = {last}.")
    return stages


def _parse_tokens(text: str, ramp: str) -> int:
    """A number of tokens such as 4096, 500M or 1.5B."""
    match = re.fullmatch(r"(\d[\d_]{0,20}(?:\.\d{1,12})?)([KMBT]?)", text, re.ASCII)
    amount = Fraction(match[1].replace("_", "")) * _SUFFIXES[match[2]] if match else Fraction(1, 2)
    if amount.denominator != 1:
        reason = f"{format_value(text)} is not a whole number of tokens such as 4096 or 1.5B."
        raise refused_ramp(ramp, reason, _FORMS)
    return int(amount)


def refused_ramp(ramp: str, reason: str, fix: str) -> ConfigError:
    return ConfigError(f"{RAMP_KEY} = {format_value(ramp)}: {reason}", fix=fix)
