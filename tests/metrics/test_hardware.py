"""Peak FLOP/s and peak memory, which MFU and memory figures refer to."""

from __future__ import annotations

import pytest
import torch

from titanlite.metrics import hardware, measure_matmul_flops, peak_memory_bytes
from titanlite.metrics.gpu_peaks import peak_flops

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA A100-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A100 80GB PCIe", torch.float32, 19.5),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989.5),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756.5),
        ("NVIDIA H200", torch.float8_e4m3fn, 1979),
        ("NVIDIA B200", torch.float8_e4m3fn, 4500),
        ("NVIDIA B300 SXM6 AC", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA GB300", torch.float8_e4m3fn, 5000),
        ("NVIDIA GH200 144G HBM3e", torch.bfloat16, 989.5),
        ("NVIDIA H800", torch.bfloat16, 989.5),
        ("NVIDIA H800 PCIe", torch.float8_e4m3fn, 1513),
        ("NVIDIA H20", torch.bfloat16, 148),
        ("NVIDIA H20-3e", torch.float8_e4m3fn, 296),
        ("NVIDIA A800-SXM4-80GB", torch.bfloat16, 312),
        ("NVIDIA A800 80GB PCIe", torch.bfloat16, 312),
        ("NVIDIA RTX 6000 Ada Generation", torch.bfloat16, 364.25),
        ("NVIDIA L40S", torch.bfloat16, 362),
        ("NVIDIA L4", torch.bfloat16, 121),
        ("NVIDIA A10G", torch.bfloat16, 70),
        ("NVIDIA GeForce RTX 4090", torch.bfloat16, 165.2),
        ("Tesla V100-SXM2-16GB", torch.float16, 125),
        ("AMD Instinct MI300X", torch.bfloat16, 1307.4),
    ],
)
def test_the_peak_is_the_published_one_of_the_device_and_dtype(name, dtype, tera):
    assert peak_flops(name, dtype) == pytest.approx(tera * 1e12)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", torch.bfloat16),  # a seventh of one
        ("NVIDIA GeForce RTX 4090 Laptop GPU", torch.bfloat16),
        ("NVIDIA H100", torch.bfloat16),  # ambiguous: three parts have this name
        ("NVIDIA GB200 MIG 1g.23gb", torch.bfloat16),
        ("NVIDIA RTX 6000", torch.bfloat16),  # the Quadro of 2018
        ("NVIDIA Z9000", torch.bfloat16),
        ("", torch.bfloat16),
        ("Tesla V100-SXM2-16GB", torch.bfloat16),  # has no bfloat16 units
        ("NVIDIA A100-SXM4-80GB", torch.float8_e4m3fn),
        ("NVIDIA A100-SXM4-80GB", torch.float64),  # not in the table
    ],
)
def test_an_unknown_device_or_dtype_has_no_peak(name, dtype):
    assert peak_flops(name, dtype) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_the_measured_peak_is_that_of_the_fastest_layout(dtype, monkeypatch):
    """Each layout has its own kernel; in float16 on a CPU their speeds differ 7-fold."""
    operands = []
    times = iter([9.0, 2.0, 3.0, 0.5])
    monkeypatch.setattr(
        hardware, "_seconds_of_matmul", lambda a, b: operands.append((a, b)) or next(times)
    )
    peak = measure_matmul_flops(dtype, CPU, seconds=0.0)
    transposed = {(a.is_contiguous(), b.is_contiguous()) for a, b in operands[1:4]}
    assert transposed == {(True, False), (True, True), (False, True)}
    assert peak == 2 * 1024**3 / 0.5


def test_measuring_does_not_change_the_random_state():
    before = torch.get_rng_state()
    measure_matmul_flops(torch.float32, torch.device("cpu"), seconds=0.0)
    assert torch.equal(torch.get_rng_state(), before)


def test_peak_memory_includes_freed_memory():
    before = peak_memory_bytes(CPU)
    block = torch.ones(before + 100 * 2**20, dtype=torch.uint8)  # larger than all so far
    del block
    assert peak_memory_bytes(CPU) >= before + 90 * 2**20
