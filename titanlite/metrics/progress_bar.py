"""The console sink of a terminal: log lines above a progress bar."""

from __future__ import annotations

import atexit
import logging
import re
import sys
from typing import Any

from titanlite.log import logger
from titanlite.metrics.console import Console


class LiveConsole(Console):
    """Log lines above a progress bar.

    The bar is redrawn in place, so other output must not go to the terminal directly: while the bar
    is shown, sys.stdout, sys.stderr and the logger print through it.
    """

    def __init__(self, total_steps: int, completed_steps: int, colour: bool):
        super().__init__(total_steps, colour)
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}"),
            console=Terminal(file=sys.stderr, no_color=not colour, highlight=False),
            expand=True,
            refresh_per_second=2,  # drawing slows down training on the CPU
        )
        self._task = self._progress.add_task(
            "", total=total_steps, completed=completed_steps, status=""
        )
        self._progress.start()
        handlers = [h for h in logger.handlers if isinstance(h, logging.StreamHandler)]
        self._streams = [(handler, handler.stream) for handler in handlers]
        for handler, _ in self._streams:
            handler.setStream(sys.stderr)  # now prints above the bar
        atexit.register(self.close)  # else a failed run would leave the terminal without a cursor

    def step(self, record: dict[str, Any]) -> None:
        fields = [f"loss {record['loss']:.2f}", *self._speed_fields(record)]
        shown = [field for field in fields if "/device" not in field]  # fits into 80 columns
        uncolored = re.sub("\033.*?m", "", "  ".join(shown))
        self._progress.update(self._task, completed=record["step"], status=uncolored)
        super().step(record)

    def _fields(self, record: dict[str, Any]) -> list[str]:
        # the bar shows the speed, so the line fits into 80 columns
        return self._loss_fields(record)

    def roll_back(self, step: int, rollbacks: int) -> None:
        super().roll_back(step, rollbacks)
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._progress.stop()
        for handler, stream in self._streams:
            handler.setStream(stream)
        atexit.unregister(self.close)
