"""Progress of the stages of a corpus: a bar each on a terminal, otherwise lines."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from titanlite_corpus.task import Counts, StageProgress

_LINE_SECONDS = 30.0  # between two lines of a stage, without a terminal


@dataclass
class _Stage:
    """What was done of a stage since it began."""

    bar: TaskID
    started: float
    bytes: int = 0
    tokens: int = 0
    intervals: int = 0  # of _LINE_SECONDS that had passed at the last line, without a terminal

    def add(self, counts: Counts) -> None:
        """Add the counts of a task that was done now."""
        self.bytes += counts.get("bytes_in") or counts.get("bytes_out") or 0
        self.tokens += counts.get("tokens_out", 0)

    def is_line_due(self) -> bool:
        """Whether a line is due: at most one in each interval of _LINE_SECONDS."""
        before, self.intervals = self.intervals, int(self._seconds / _LINE_SECONDS)
        return self.intervals > before

    @property
    def _seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def rate(self) -> str:
        """Text or tokens per second, as text."""
        seconds = max(self._seconds, 1e-3)
        if self.bytes:
            return f"{self.bytes / seconds / 1e6:.1f} MB/s"
        return f"{self.tokens / seconds / 1e6:.1f} M tokens/s" if self.tokens else ""


class StageBars:
    """Shows the progress of tasks on stderr; a context manager and a `TaskProgress`."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        columns = (BarColumn(), TextColumn("{task.completed} of {task.total} tasks"))
        rate = (TextColumn("{task.fields[rate]}"), TimeRemainingColumn())
        self._bars = Progress(
            TextColumn("{task.description:20}"), *columns, *rate, console=self._console
        )
        self._stages: dict[str, _Stage] = {}

    def __enter__(self) -> StageBars:
        if self._console.is_terminal:
            self._bars.start()
        return self

    def __exit__(self, *_) -> None:
        if self._console.is_terminal:
            self._bars.stop()

    def __call__(self, update: StageProgress, /) -> None:
        name = update.stage
        if update.counts is None:  # a stage may begin several times: in rounds
            bar = self._bars.add_task(name, total=update.tasks, completed=update.done, rate="")
            self._stages[name] = _Stage(bar, time.monotonic())
            return
        stage = self._stages[name]
        stage.add(update.counts)
        self._bars.update(stage.bar, completed=update.done, rate=stage.rate)
        if not self._console.is_terminal and (update.done == update.tasks or stage.is_line_due()):
            line = f"{name:20} {update.done} of {update.tasks} tasks  {stage.rate}"
            self._console.print(line.rstrip(), highlight=False)
