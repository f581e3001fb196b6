"""Matmuls in bf16 and fp16 at the speed of fp32, on CPUs without units for them.

There torch has loops of its own for these dtypes, which take 10 to 40 times as long as fp32. They
add in fp32 and round once; so does an fp32 matmul whose result is rounded.
"""

from __future__ import annotations

import warnings
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

MATMULS = ("mm", "addmm", "bmm", "baddbmm")


@cache
def compute_matmuls_in_fp32() -> torch.library.Library | None:
    """Replace torch's slow kernels in this process and its forks; None: this CPU has units."""
    supported = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported(),
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported(),
    }
    slow = tuple(dtype for dtype, has_units in supported.items() if not has_units)
    if not slow:
        return None
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it overrides kernels
        for name in MATMULS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            run = partial(_run, kernel, slow)
            library.impl(name, run, "CPU", with_keyset=True, allow_override=True)
    return library  # whose end would bring torch's kernels back


def _run(kernel: Any, slow: tuple[torch.dtype, ...], keys: Any, *args: Any, **options: Any) -> Any:
    dtype = args[0].dtype
    if dtype not in slow:
        return kernel.call_boxed(keys, *args, **options)
    exact = (arg.float() if isinstance(arg, Tensor) else arg for arg in args)
    return kernel.call_boxed(keys, *exact, **options).to(dtype)
