"""The console: a line a record, and on a terminal a bar that stays below them."""

from __future__ import annotations

import atexit
import logging
import re
import sys
from typing import Any

from titanlite.log import logger

_TROUBLE = ("checkpoint_failed", "checkpoint_refused")  # events that somebody should look at
_DIM, _PLAIN = "\033[2m", "\033[0m"


def open_console(total_steps: int, first_step: int, colour: bool, progress: bool | None) -> Console:
    """Lines where the output goes to a file or pipe, a bar under them where a person looks on."""
    if sys.stderr.isatty() if progress is None else progress:
        return LiveConsole(total_steps, first_step, colour)
    return Console(total_steps, colour=False)


class Console:
    """One readable log line a record."""

    def __init__(self, total_steps: int, colour: bool):
        self.total_steps = total_steps
        self.colour = colour
        self._first: tuple[int, float] | None = None  # the first record's step and time

    def step(self, record: dict[str, Any]) -> None:
        logger.info("%s", "  ".join([self._place(record["step"]), *self._facts(record)]))

    def event(self, record: dict[str, Any]) -> None:
        words = [self._place(record["step"]), record["event"].replace("_", " ")]
        for key, value in record.items():
            if key not in ("event", "step", "time"):
                bare = key in (
                    "name",
                    "path",
                    "problem",
                    "reason",
                )  # they say themselves what they are
                words.append(_shown(value) if bare else self._fact(key, _shown(value)))
        level = logging.ERROR if record["event"] in _TROUBLE else logging.INFO
        logger.log(level, "%s", "  ".join(words))

    def close(self) -> None:
        pass

    def _place(self, step: int) -> str:
        width = len(str(self.total_steps))
        return f"{self._dim('step')} {step:{width}}{self._dim(f'/{self.total_steps}')}"

    def _facts(self, record: dict[str, Any]) -> list[str]:
        return [*self._learned(record), *self._how_fast(record)]

    def _learned(self, record: dict[str, Any]) -> list[str]:
        z_loss = record["z_loss"]
        return [
            self._fact("loss", f"{record['loss']:.4f}"),
            *([] if z_loss is None else [self._fact("z_loss", f"{z_loss:.4f}")]),
            self._fact("grad_norm", f"{record['grad_norm']:.2f}"),
            self._fact("lr", f"{record['lr']:.1e}"),
        ]

    def _how_fast(self, record: dict[str, Any]) -> list[str]:
        facts = [f"{record['tokens_per_second']:,.0f} {self._dim('tok/s')}"]
        if record["mfu"] is not None:
            facts.append(self._fact("mfu", f"{record['mfu']:.1%}"))
        return [*facts, self._fact("eta", clock(self.seconds_left(record)))]

    def seconds_left(self, record: dict[str, Any]) -> float:
        """Until the last step, at the pace since the first record: validation and saving too."""
        step = record["step"]
        pace = record["step_seconds"] + record["data_seconds"]
        if self._first is None:
            self._first = (step, record["time"])
        elif step > self._first[0]:
            pace = (record["time"] - self._first[1]) / (step - self._first[0])
        return pace * (self.total_steps - step)

    def _fact(self, name: str, value: str) -> str:
        return f"{self._dim(name)} {value}"

    def _dim(self, text: str) -> str:
        return f"{_DIM}{text}{_PLAIN}" if self.colour else text


class LiveConsole(Console):
    """The lines, above a bar that shows how far it is.

    The bar is redrawn in place, so nothing else may write to the terminal on its own: while it is
    shown, sys.stdout, sys.stderr and the logger print through it.
    """

    def __init__(self, total_steps: int, first_step: int, colour: bool):
        super().__init__(total_steps, colour)
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[facts]}"),
            console=Terminal(file=sys.stderr, no_color=not colour, highlight=False),
            expand=True,
            refresh_per_second=2,  # drawing takes time from training where both run on the CPU
        )
        self._task = self._progress.add_task("", total=total_steps, completed=first_step, facts="")
        self._progress.start()
        self._streams = [(handler, handler.stream) for handler in logger.handlers]
        for handler, _ in self._streams:
            handler.setStream(sys.stderr)  # which is now the one that prints above the bar
        atexit.register(self.close)  # or a run that fails leaves the terminal without a cursor

    def step(self, record: dict[str, Any]) -> None:
        facts = [f"loss {record['loss']:.2f}", *self._how_fast(record)]
        plain = re.sub("\033.*?m", "", "  ".join(facts))
        self._progress.update(self._task, completed=record["step"], facts=plain)
        super().step(record)

    def _facts(self, record: dict[str, Any]) -> list[str]:
        return self._learned(record)  # how fast it goes is in the bar, and the line fits 80 columns

    def close(self) -> None:
        self._progress.stop()
        for handler, stream in self._streams:
            handler.setStream(stream)
        atexit.unregister(self.close)


def clock(seconds: float) -> str:
    """A duration as a clock shows it: 2:10, 1:02:10, 3 d 4 h."""
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24} d {hours % 24} h"
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _shown(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else str(value)
