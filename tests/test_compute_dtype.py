"""mixed_precision_param = "auto": bfloat16, and float32 on a CPU that emulates bfloat16."""

from __future__ import annotations

import os

import pytest

from tests.distributed.ranks import run_on_ranks
from titanlite.job import read, read_job
from titanlite.job.start import check_compute_dtypes
from titanlite.metrics import cpu_has_bf16_units

CHECK_GPUS = ["--job.check=true", "--job.check_ranks=2"]


@pytest.mark.parametrize(
    ("flags", "has_units"),
    [
        ("flags : fpu avx512f avx512_bf16 amx_tile", True),
        ("flags : fpu amx_bf16 amx_int8", True),
        ("Features : fp asimd bf16 i8mm", True),
        ("flags : fpu avx2 avx512f avx512vl", False),
        (None, False),
    ],
)
def test_bf16_units_are_found_by_the_flags_of_the_cpu(tmp_path, flags, has_units):
    file = tmp_path / "cpuinfo"
    if flags:
        file.write_text(f"processor : 0\n{flags}\n")
    assert cpu_has_bf16_units(file) is has_units


@pytest.mark.parametrize(
    ("arguments", "has_units", "dtype"),
    [
        ([], True, "bfloat16"),
        ([], False, "float32"),
        ([*CHECK_GPUS, "--job.device", "auto"], False, "bfloat16"),  # of another machine
        ([*CHECK_GPUS, "--job.device", "cpu"], False, "float32"),
        (["--training.mixed_precision_param", "bfloat16"], False, "bfloat16"),
    ],
)
def test_a_job_without_a_dtype_is_not_slow_on_a_cpu(
    run_toml, monkeypatch, arguments, has_units, dtype
):
    monkeypatch.setattr(read, "cpu_has_bf16_units", lambda: has_units)
    lines = run_toml.read_text().splitlines()
    run_toml.write_text("\n".join(line for line in lines if "mixed_precision" not in line))
    resolved = read_job(["--job.config_file", str(run_toml), *arguments], 1)
    assert resolved.config.training.mixed_precision_param == dtype
    assert f'mixed_precision_param = "{dtype}"' in resolved.as_toml()


def check_on_different_cpus() -> str:
    try:
        check_compute_dtypes("float32" if int(os.environ["RANK"]) else "bfloat16")
    except Exception as error:
        return str(error)
    return "accepted"


def test_ranks_on_different_cpus_do_not_compute_in_different_dtypes():
    for message in run_on_ranks(check_on_different_cpus, 2):
        assert "rank 0 computes in bfloat16 and rank 1 in float32" in message
