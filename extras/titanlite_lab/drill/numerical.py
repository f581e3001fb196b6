"""Numerical faults: wrong bits on one rank, and slow ranks.

Each must be noticed, and must not change the end of the run. A fault in a gradient or an activation
is gone when the guard replays the step. A fault in a weight stays: the run ends before it saves,
and resumes from an earlier checkpoint.
"""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from titanlite.errors import CheckpointError
from titanlite_lab.drill.faults import signal_a_rank
from titanlite_lab.drill.run import Drill

SECONDS_TO_NOTICE = 120


def inject_wrong_value(kind: str, value: str, events: tuple[str, ...], drill: Drill) -> str:
    """One wrong value on one rank: one of `events` must name the rank."""
    rank = drill.random.randrange(drill.ranks)
    # A spike needs 16 steps before it. An unused row of the embedding has no gradient, and a huge
    # output of a feed-forward layer would become 0 in the next norm: neither would be noticed.
    run = drill.start(
        fault={
            "kind": kind,
            "value": value,
            "rank": rank,
            "after": drill.random.randint(17, 25),
            "parameter": "ffn_norm" if kind == "activation" else "feed_forward",
        }
    )

    def is_noticed() -> bool:
        lines = drill.log_text().splitlines()
        return any(event in line and names_rank(line, rank) for event in events for line in lines)

    wait_until(lambda: run.poll() is not None or is_noticed())
    if f"drill: rank {rank}, " not in drill.log_text():
        raise drill.ended_early()
    if not is_noticed():
        run.kill()
        drill.wait(run)
        raise drill.failure(
            f"{value} in the {kind} of rank {rank} was not noticed",
            fix='Set guard.spike = "skip".',
        )
    if run.poll() is None:
        time.sleep(drill.random.uniform(0, drill.max_delay))
        with suppress(CheckpointError):  # the run may end by itself
            signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    return f"rank {rank}: {value} in its {kind}; the rank was named"


def slow_down_a_rank(drill: Drill) -> str:
    """A rank that computes more slowly must be named."""
    rank = drill.random.randrange(drill.ranks)
    run = drill.start(fault={"kind": "slow", "rank": rank, "step": 1, "slowdown": 0.5})

    def is_named() -> bool:
        lines = drill.log_text().splitlines()
        return any("straggler" in line and names_rank(line, rank) for line in lines)

    wait_until(lambda: run.poll() is not None or is_named())
    if not is_named():
        run.kill()
        drill.wait(run)
        raise drill.failure(f"rank {rank} was slow and not named", fix="Enable [straggler].")
    if run.poll() is None:
        signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    return f"rank {rank} slowed down; it was named"


def names_rank(line: str, rank: int) -> bool:
    """Whether a log line has "rank N" or "ranks [M, N]"; "pipeline_rank N" does not count."""
    named = re.findall(r"\branks? \[?([\d, ]+)", line)
    return any(str(rank) in re.findall(r"\d+", numbers) for numbers in named)


def kill_in_a_roll_back(drill: Drill) -> str:
    """Kill a rank at a random moment around a roll-back, which --poison causes."""
    run = drill.start()
    wait_until(lambda: run.poll() is not None or "  spike" in drill.log_text())
    time.sleep(drill.random.uniform(0, min(1.0, drill.max_delay)))
    rolled_back = drill.log_text().count("  rolled back")
    rank = signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    return f"rank {rank} killed after a spike; roll-backs so far: {rolled_back}"


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until `condition`, but not forever."""
    deadline = time.monotonic() + SECONDS_TO_NOTICE
    while time.monotonic() < deadline and not condition():
        time.sleep(0.01)


WRONG = ("hardware fault",)
CORRUPT = ("replica mismatch", "training diverged", "diverged", "rolled back")
# The names are values of --kinds.
NUMERICAL_FAULTS: dict[str, Callable[[Drill], str]] = {
    "flip_a_gradient_bit": partial(inject_wrong_value, "gradient", "flip", WRONG),
    "flip_an_activation_bit": partial(inject_wrong_value, "activation", "flip", WRONG),
    "flip_a_weight_bit": partial(inject_wrong_value, "weight", "flip", CORRUPT),
    "nan_in_a_gradient": partial(inject_wrong_value, "gradient", "nan", WRONG),
    "inf_in_an_activation": partial(inject_wrong_value, "activation", "inf", WRONG),
    "1e30_in_a_gradient": partial(inject_wrong_value, "gradient", "1e30", WRONG),
    "slow_down_a_rank": slow_down_a_rank,
}
