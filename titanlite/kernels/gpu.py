"""The GPU of a rank, and what its compute capability supports."""

from __future__ import annotations

from dataclasses import dataclass

import torch

FLOAT8_FALLBACK_SINCE = "2.13"  # torch version; for the fallback see `compiles_float8`


@dataclass(frozen=True)
class Gpu:
    """The model of a CUDA device."""

    name: str
    capability: tuple[int, int]  # compute capability, as (9, 0) of an H100

    def __str__(self) -> str:
        return f"{self.name}, of compute capability {'.'.join(map(str, self.capability))}"

    @property
    def supports_float8(self) -> bool:
        """Whether it has Float8 matmuls; Triton supports float8_e4m3fn on the same GPUs."""
        return self.capability >= (8, 9)  # Ada; Hopper is 9.0

    @property
    def compiles_float8(self) -> bool:
        """Whether inductor compiles casts to Float8 for it.

        Where Triton does not support the dtype, inductor leaves the cast to ATen (in torch 2.13 to
        2.15), or fails with "type fp8e4nv not supported in this architecture" (in 2.11).
        """
        return self.supports_float8 or torch.__version__ >= FLOAT8_FALLBACK_SINCE


def find_gpu(device: torch.device) -> Gpu | None:
    """The GPU behind a device; None for a CPU."""
    if device.type != "cuda":
        return None
    return Gpu(torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
