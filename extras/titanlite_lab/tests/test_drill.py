"""python -m titanlite_lab drill on a tiny run: each fault is noticed, and changes nothing."""

from __future__ import annotations

import os
import subprocess

import pytest

from conftest import ROOT

pytestmark = pytest.mark.slow


def run_drill(python: str, tmp_path, run_toml, *options: str, job: tuple[str, ...] = ()) -> str:
    """Output of a drill that must find no difference."""
    drill = subprocess.run(
        [
            *(python, "-m", "titanlite_lab", "drill", *options),
            *("--out", str(tmp_path / "drill"), "--longest", "0.2", "--"),
            *("--job.config_file", str(run_toml), "--validation.enable", "false", *job),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'extras'}"},
    )
    assert drill.returncode == 0, drill.stdout + drill.stderr
    return drill.stdout


def test_a_wrong_value_is_noticed_and_changes_nothing(python, run_toml, tmp_path):
    """Of one rank and one kind, because each start takes seconds."""
    options = ("--faults", "1", "--ranks", "1", "--kinds", "flip_a_gradient_bit")
    job = ("--training.steps", "100", "--guard.spike", "skip")
    output = run_drill(python, tmp_path, run_toml, *options, job=job)
    assert "flip in its gradient; the rank was named" in output and "bit-equal" in output
