"""On a CPU that emulates bfloat16, quickstart picks float32, and train.py warns about bfloat16."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from tests.conftest import HANG_SECONDS, ROOT

pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64", reason="ONEDNN_MAX_CPU_ISA affects x86 CPUs only"
)


def run_without_bf16_units(*command: str) -> subprocess.CompletedProcess[str]:
    without_bf16 = {"ONEDNN_MAX_CPU_ISA": "AVX2", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, **without_bf16},
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )


def test_quickstart_picks_float32_on_a_cpu_without_bf16_units():
    process = run_without_bf16_units("scripts/fastest_dtype.py")
    assert process.stdout == "float32\n", process.stderr
    assert "computing in float32" in process.stderr and "bfloat16 0.0" in process.stderr


def test_train_warns_if_bf16_is_slower_than_float32(run_toml, tmp_path):
    arguments = ["--job.config_file", str(run_toml), "--training.steps", "1"]
    arguments += ["--job.dump_folder", str(tmp_path / "bf16")]
    process = run_without_bf16_units(
        "train.py", *arguments, "--training.mixed_precision_param", "bfloat16"
    )
    assert process.returncode == 0, process.stderr
    assert (
        'mixed_precision_param = "bfloat16" is slower than "float32" on this CPU' in process.stderr
    )
    assert "--training.mixed_precision_param float32" in process.stderr
