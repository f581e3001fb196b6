"""Published peak FLOP/s of GPUs."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peaks:
    """Published dense TFLOP/s of a device; None where it has no units for the dtype."""

    name: str  # regular expression for the full name; a MIG slice or laptop part must not match
    fp32: float  # without TF32, which torch disables by default
    fp16: float
    bf16: float | None
    fp8: float | None
    source: str


NVIDIA = "https://www.nvidia.com/en-us/data-center/"
LENOVO = "https://lenovopress.lenovo.com/"
RTX_6000 = "https://www.nvidia.com/en-us/design-visualization/rtx-6000/"
A800 = (
    "https://www.nvidia.cn/content/dam/en-zz/Solutions/Data-Center/a800/"
    "nvidia-a800-datasheet-2029415.pdf"
)

# "halved": the source publishes its Tensor Core figures only with sparsity, twice the dense ones.
# GeForce GPUs run at half rate with fp32 accumulation, which training uses: that rate is listed.
PEAKS = [
    Peaks(r"Tesla V100-SXM2-\d+GB", 15.7, 125, None, None, "NVIDIA V100 data sheet"),
    Peaks(r"Tesla V100-PCIE-\d+GB", 14, 112, None, None, "NVIDIA V100 data sheet"),
    Peaks(r"Tesla V100S-PCIE-32GB", 16.4, 130, None, None, "NVIDIA V100 data sheet"),
    Peaks(r"(Tesla|NVIDIA) T4", 8.1, 65, None, None, "NVIDIA T4 data sheet"),
    Peaks(r"A100-(SXM4?|PCIE)-[48]0GB|A100 80GB PCIe", 19.5, 312, 312, None,
          "NVIDIA A100 data sheet"),
    Peaks(r"A800-SXM4-[48]0GB|A800 80GB PCIe", 19.5, 312, 312, None, A800),
    Peaks(r"A30", 10.3, 165, 165, None, "NVIDIA A30 data sheet"),
    Peaks(r"A40", 37.4, 149.7, 149.7, None, "NVIDIA A40 data sheet"),
    Peaks(r"A10", 31.2, 125, 125, None, "NVIDIA A10 data sheet"),
    Peaks(r"A10G", 35, 70, 70, None, "NVIDIA A10G data sheet for AWS"),
    Peaks(r"L4", 30.3, 121, 121, 242.5, "NVIDIA L4 data sheet, halved"),
    Peaks(r"L40", 90.5, 181, 181, 362, "NVIDIA L40 data sheet"),
    Peaks(r"L40S", 91.6, 362, 362, 733, "NVIDIA L40S data sheet"),
    Peaks(r"H100 80GB HBM3", 67, 989.5, 989.5, 1979, "NVIDIA H100 data sheet, SXM, halved"),
    Peaks(r"H100 PCIe", 51, 756.5, 756.5, 1513, "NVIDIA H100 data sheet, PCIe, halved"),
    Peaks(r"H100 NVL", 60, 835.5, 835.5, 1670.5, "NVIDIA H100 data sheet, NVL, halved"),
    # the H100 with slower NVLink and FP64
    Peaks(r"H800", 67, 989.5, 989.5, 1979, "NVIDIA H800 data sheet, SXM, halved"),
    Peaks(r"H800 PCIe", 51, 756.5, 756.5, 1513, f"{LENOVO}lp1814, halved"),
    Peaks(r"H20(-3e)?", 44, 148, 148, 296, "NVIDIA HGX H20 data sheet for partners, dense"),
    Peaks(r"GH200 (480GB|120GB|144G HBM3e)", 67, 989.5, 989.5, 1979,
          "NVIDIA GH200 data sheet, halved"),
    Peaks(r"H200", 67, 989.5, 989.5, 1979, "NVIDIA H200 data sheet, SXM, halved"),
    Peaks(r"H200 NVL", 60, 835.5, 835.5, 1670.5, "NVIDIA H200 data sheet, NVL, halved"),
    Peaks(r"B200", 75, 2250, 2250, 4500, f"{NVIDIA}hgx, a GPU of HGX B200, halved"),
    Peaks(r"B300( SXM6 AC)?", 75, 2250, 2250, 4500, f"{NVIDIA}hgx, a GPU of HGX B300, halved"),
    # the GPUs of these superchips run at higher power than those of HGX
    Peaks(r"GB200", 80, 2500, 2500, 5000, f"{NVIDIA}gb200-nvl72, a GPU of 72, halved"),
    Peaks(r"GB300", 83.3, 2500, 2500, 5000, f"{NVIDIA}gb300-nvl72, a GPU of 72, halved"),
    Peaks(r"RTX 6000 Ada Generation", 91.1, 364.25, 364.25, 728.5,
          f"{RTX_6000}: FP8 halved, and FP16 at half of FP8, as in the Ada white paper"),
    Peaks(r"GeForce RTX 3090", 35.6, 71, 71, None, "NVIDIA GA102 white paper"),
    Peaks(r"GeForce RTX 4090", 82.6, 165.2, 165.2, 330.3, "NVIDIA Ada white paper"),
    Peaks(r"GeForce RTX 5090", 104.8, 209.5, 209.5, 419, "NVIDIA RTX Blackwell white paper"),
    # a device is one of the card's two dies, so half of the card's figure
    Peaks(r"AMD Instinct MI250X", 47.85, 191.5, 191.5, None, "AMD MI250X data sheet, a die"),
    Peaks(r"AMD Instinct MI250", 45.25, 181, 181, None, "AMD MI250 data sheet, a die"),
    Peaks(r"AMD Instinct MI300X", 163.4, 1307.4, 1307.4, 2614.9, "AMD MI300X data sheet"),
    Peaks(r"AMD Instinct MI325X", 163.4, 1307.4, 1307.4, 2614.9, "AMD MI325X data sheet"),
]  # fmt: skip

_PEAKS_FIELD = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Published dense FLOP/s of a device for a dtype; None where it is unknown."""
    name = device_name.strip().removeprefix("NVIDIA ")
    for peaks in PEAKS:
        if re.fullmatch(peaks.name, name) or re.fullmatch(peaks.name, device_name.strip()):
            tera = getattr(peaks, _PEAKS_FIELD.get(dtype, ""), None)
            return tera and tera * 1e12
    return None
