"""Triton accepts the kernels of all that titanlite compiles, for GPUs that this machine lacks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest

from conftest import ROOT
from titanlite.parallelize.float8 import Gpu

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs Triton, but no GPU: see CONTRIBUTING.md"
)
TRITON_CAST = "float8 cast of Triton"  # without inductor
MOST_INSTRUCTIONS = {"optimizer, 8bit state": 165, "optimizer, float8 state": 75}  # an element


@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "10.0"])
def test_every_compiled_function_compiles_for_the_gpu(capability, tmp_path):
    """Where titanlite expects that it does not, Triton must say why."""
    caches = {f"{name}_CACHE_DIR": str(tmp_path / name) for name in ("TORCHINDUCTOR", "TRITON")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_trace.compile_for_target", capability],
        cwd=ROOT,
        env={**os.environ, **caches, "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert done.returncode == 0
    results = json.loads(done.stdout.splitlines()[-1])
    major, minor = map(int, capability.split("."))
    gpu = Gpu("", (major, minor))
    refused = {case for case, result in results.items() if result["error"]}
    expected = set() if gpu.supports_float8 else {TRITON_CAST}
    if not gpu.compiles_float8:
        expected = {case for case in results if "float8" in case}
    print({case: result["kernels"] for case, result in results.items()})  # pytest -rP
    if capability == "9.0":  # the bytes of an update take as long as 104 instructions on an H100
        for case, most in MOST_INSTRUCTIONS.items():
            assert (results[case]["instructions"] or most + 1) <= most, case
    assert refused == expected, {case: results[case]["error"] for case in refused - expected}
    for case in refused:
        assert "type fp8e4nv not supported in this architecture" in results[case]["error"]
    without_kernels = {case for case, result in results.items() if not result["kernels"]}
    assert without_kernels <= {*refused, TRITON_CAST}  # which is no kernel of inductor
