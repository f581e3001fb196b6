"""Progress of a corpus without a terminal, as in a log file."""

from __future__ import annotations

from titanlite_corpus import progress_bars
from titanlite_corpus.progress_bars import StageBars
from titanlite_corpus.task import StageProgress


def test_lines_do_not_follow_each_other_after_a_slow_task(monkeypatch, capsys):
    """Once a line is late, it is printed once, not for every interval that passed without it."""
    now = 0.0
    monkeypatch.setattr(progress_bars.time, "monotonic", lambda: now)
    bars = StageBars()
    bars(StageProgress("filter", 9, 0, 0, None))
    printed = []
    for done, now in enumerate([300.0, 301.0, 302.0, 331.0, 332.0, 333.0, 334.0, 335.0], 1):
        bars(StageProgress("filter", 9, done, 0, {"bytes_in": 10**9}))
        if capsys.readouterr().err:
            printed.append(now)
    assert printed == [300.0, 331.0]
