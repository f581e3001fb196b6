"""The console sink: one line per record."""

from __future__ import annotations

import logging
from typing import Any

from titanlite.log import logger

_LEVELS = {  # of events; others are logged as information
    **dict.fromkeys(("checkpoint_failed", "checkpoint_refused"), logging.ERROR),
    **dict.fromkeys(("replica_mismatch", "rolled_back", "rollback_failed"), logging.ERROR),
    **dict.fromkeys(("memory_checkpoint_failed", "straggler"), logging.WARNING),
}
_OPTIONAL_FIELDS = ("bits_per_byte",)  # event fields left out where they are null
_UNNAMED_FIELDS = ("name", "path", "problem", "reason")  # event fields shown by value alone
_DIM, _RESET = "\033[2m", "\033[0m"


class Console:
    """One log line per record."""

    def __init__(self, total_steps: int, colour: bool):
        self.total_steps = total_steps
        self.colour = colour
        self._first: tuple[int, float] | None = None  # the first record's step and time

    def step(self, record: dict[str, Any]) -> None:
        logger.info("%s", "  ".join([self._position(record["step"]), *self._fields(record)]))

    def event(self, record: dict[str, Any]) -> None:
        if any(isinstance(value, dict) for value in record.values()):  # too long for a line
            return
        fields = [self._position(record["step"]), record["event"].replace("_", " ")]
        for key, value in record.items():
            if value is None and key in _OPTIONAL_FIELDS:
                continue
            if key not in ("event", "step", "time") and value != "":  # "": does not apply
                text = _format_value(value)
                fields.append(text if key in _UNNAMED_FIELDS else self._field(key, text))
        logger.log(_LEVELS.get(record["event"], logging.INFO), "%s", "  ".join(fields))

    def roll_back(self, step: int, rollbacks: int) -> None:
        self._first = None

    def close(self) -> None:
        pass

    def _position(self, step: int) -> str:
        width = len(str(self.total_steps))
        return f"{self._dim('step')} {step:{width}}{self._dim(f'/{self.total_steps}')}"

    def _fields(self, record: dict[str, Any]) -> list[str]:
        z_loss, mfu = record["z_loss"], record["mfu"]
        speed, of_device = record["tokens_per_second"], record["tokens_per_second_per_device"]
        per_device = f"{of_device:,.0f} {self._dim('tok/s/device')}"
        return [
            self._field("loss", f"{record['loss']:.4f}"),
            *([] if z_loss is None else [self._field("z_loss", f"{z_loss:.4f}")]),
            self._field("grad_norm", f"{record['grad_norm']:.2f}"),
            self._field("lr", f"{record['lr']:.1e}"),
            f"{speed:,.0f} {self._dim('tok/s')}",
            *([] if of_device == speed else [per_device]),
            f"{record['peak_memory_gib']:.1f} {self._dim('GiB')}",
            *([] if mfu is None else [self._field("mfu", f"{mfu:.1%}")]),
            self._field("eta", format_clock(self.seconds_left(record))),
        ]

    def seconds_left(self, record: dict[str, Any]) -> float:
        """Time left at the average speed since the first record, validation and saves included."""
        step = record["step"]
        seconds_per_step = record["step_seconds"] + record["data_seconds"]
        if self._first is None:
            self._first = (step, record["time"])
        elif step > self._first[0]:
            seconds_per_step = (record["time"] - self._first[1]) / (step - self._first[0])
        return seconds_per_step * (self.total_steps - step)

    def _field(self, name: str, value: str) -> str:
        return f"{self._dim(name)} {value}"

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_RESET}" if self.colour else text


def _format_value(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.4f}" if abs(value) >= 0.01 or not value else f"{value:.2e}"


def format_clock(seconds: float) -> str:
    """A duration as 2:10, 1:02:10 or 3 d 4 h."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
