"""The pictures of the documentation can be redrawn."""

from __future__ import annotations

import subprocess

from conftest import HANG_SECONDS, ROOT

DIAGRAMS = ("layers", "step", "commit", "watchdog", "memory", "schedules")  # the others run a job


def test_the_diagrams_are_drawn_from_the_code_as_it_is(python, tmp_path):
    command = [python, "docs/_make/draw_docs.py", *DIAGRAMS, "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert result.returncode == 0, result.stderr
    assert {path.stem for path in tmp_path.iterdir()} == set(DIAGRAMS)
