"""scripts/fault_drill.py on a tiny run: each fault is noticed, and changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import ROOT


def run_drill(tmp_path, run_toml, *options: str, job: tuple[str, ...] = ()) -> str:
    """Output of a drill that must find no difference."""
    drill = subprocess.run(
        [
            *(sys.executable, str(ROOT / "scripts" / "fault_drill.py"), *options),
            *("--out", str(tmp_path / "drill"), "--longest", "0.2", "--"),
            *("--job.config_file", str(run_toml), "--validation.enable", "false", *job),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert drill.returncode == 0, drill.stdout + drill.stderr
    return drill.stdout


def test_wrong_values_on_one_rank_are_noticed_and_change_nothing(run_toml, tmp_path):
    kinds = ("--kinds", "flip_a_gradient_bit", "inf_in_an_activation")
    output = run_drill(
        tmp_path,
        run_toml,
        "--faults",
        "2",
        "--seed",
        "1",
        *kinds,
        job=("--training.steps", "150", "--guard.spike", "skip"),
    )
    assert "bit-equal" in output and output.count("the rank was named") == 2
