"""The one reader of a run's metrics.jsonl."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlite.errors import DataError
from titanlite.files import parse_json, read_regular_file

Record = dict[str, Any]  # one line of metrics.jsonl


def read_metrics(path: Path, skip_incomplete: bool = False) -> tuple[list[Record], list[Record]]:
    """(step lines, event lines) of a metrics.jsonl; a partially written last line is skipped.

    `skip_incomplete`: skip incomplete lines anywhere.
    """
    try:
        lines = read_regular_file(path).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{path}: cannot be read ({getattr(error, 'strerror', None) or error}).",
            fix="Give the folder of a run, with its metrics.jsonl.",
        ) from None
    steps: list[Record] = []
    events: list[Record] = []
    for number, line in enumerate(lines, 1):
        try:
            record = parse_json(line)
        except ValueError as error:
            if number < len(lines) and not skip_incomplete:
                raise DataError(f"{path}: line {number} is not JSON ({error}).") from None
            continue
        if not isinstance(record, dict):
            raise DataError(f"{path}: line {number} is not a JSON object: {line:.40}")
        for key, value in record.items():
            if not _has_its_type(key, value):
                reason = f"line {number}: {key} {value!r:.40}"
                raise DataError(f"{path}: is not the metrics of a run ({reason}).")
        (events if "event" in record else steps).append(record)
    return steps, events


_NUMBERS = (  # or null, of step lines and of events
    *("loss", "z_loss", "grad_norm", "lr", "tokens", "samples", "loss_scale"),
    *("tokens_per_second", "tokens_per_second_per_device", "tflops_per_device", "mfu"),
    *("step_seconds", "data_seconds", "peak_memory_gib", "time"),
    *("seconds", "blocked_seconds", "perplexity", "bits_per_byte", "from_step", "position"),
)
_TEXTS = ("event", "name", "path", "reason", "problem", "parameter")


def _has_its_type(key: str, value: Any) -> bool:
    """Whether a value of a record is of the type that a run writes under its key."""
    if key == "step":
        return type(value) is int
    if key in _NUMBERS:
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return key not in _TEXTS or isinstance(value, str)
