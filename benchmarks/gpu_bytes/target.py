"""Inductor and Triton compile for a GPU that this machine does not have.

They need Triton and the ptxas that it brings, but no GPU, no driver and no CUDA build of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.config as inductor_config
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._inductor.runtime.triton_heuristics as triton_heuristics
from torch._dynamo.device_interface import CudaInterface
from torch._inductor.runtime.hints import HeuristicType
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver as triton_driver

TARGETS = {  # capability -> (name, streaming multiprocessors, threads of each)
    "8.0": ("A100", 108, 2048),
    "8.9": ("L40S", 142, 1536),
    "9.0": ("H100", 132, 2048),
    "10.0": ("B200", 148, 2048),
}
RAW_STREAM, WARP_SIZE = "_cuda_getCurrentRawStream", 32
KERNELS: list[triton_heuristics.CachingAutotuner] = []  # compiled so far


def triton_target(capability: str) -> GPUTarget:
    """What Triton calls a compute capability: 80 for 8.0, 100 for 10.0."""
    return GPUTarget("cuda", int(capability.replace(".", "")), WARP_SIZE)


def prepare_triton(capability: str) -> None:
    """Let Triton compile for the target in this process, and Dynamo know that Triton is there."""
    triton_driver.set_active(SimpleNamespace(get_current_target=partial(triton_target, capability)))
    with pretend_gpu(capability):
        assert has_triton()  # cached: from now on also for Dynamo, which has no GPU here


def device_properties(capability: str) -> SimpleNamespace:
    """As torch.cuda.get_device_properties."""
    name, processors, threads = TARGETS[capability]
    major, minor = map(int, capability.split("."))
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        gcnArchName="",
        multi_processor_count=processors,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=1 << 16,
        shared_memory_per_block_optin=99 << 10,  # the smallest of them
        warp_size=WARP_SIZE,
        total_memory=40 << 30,
    )


@contextmanager
def pretend_gpu(capability: str) -> Iterator[None]:
    """Make torch report one GPU of this capability, and inductor compile kernels without loading
    them."""
    properties, kernel_class = device_properties(capability), triton_heuristics.CachingAutotuner
    answers = {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": properties,
        "get_device_capability": (properties.major, properties.minor),
        "get_device_name": properties.name,
        "get_rng_state": torch.empty(0, dtype=torch.uint8),
        "set_rng_state": None,
        "device": nullcontext(),
    }
    fakes = {name: mock.Mock(return_value=value) for name, value in answers.items()}
    of_dynamo = {"get_device_properties": fakes["get_device_properties"]}  # has its own reference
    compile_kernel = partialmethod(_compile_kernel, kernel_class.precompile)
    with ExitStack() as stack:
        stack.enter_context(mock.patch.multiple(torch.cuda, **fakes))
        stack.enter_context(mock.patch.multiple(CudaInterface, **of_dynamo))
        # Generated code imports it, and a CPU build does not have it.
        stack.enter_context(mock.patch.object(torch._C, RAW_STREAM, create=True))
        stack.enter_context(mock.patch.object(triton_helpers, "set_driver_to_gpu"))
        stack.enter_context(mock.patch.object(kernel_class, "precompile", compile_kernel))
        stack.enter_context(
            inductor_config.patch(
                compile_threads=1, force_disable_caches=True, use_static_cuda_launcher=False
            )
        )
        yield


def is_persistent(kernel: triton_heuristics.CachingAutotuner) -> bool:
    """Whether a kernel reduces rows that fit into registers."""
    return kernel.heuristic_type == HeuristicType.PERSISTENT_REDUCTION


def _compile_kernel(
    kernel: triton_heuristics.CachingAutotuner, precompile: Callable, *_, **__
) -> None:
    """What a process of inductor's compiler pool does, which has no access to the device."""
    if kernel.configs:  # otherwise it is compiled already
        # They differ in block sizes, not in types. A GPU times all: of a reduction of short rows,
        # the first, a row for two warps, executes the most instructions.
        index = min(1, len(kernel.configs) - 1) if is_persistent(kernel) else 0
        kernel.configs = kernel.configs[index : index + 1]
        precompile(kernel, warm_cache_only=True)
        KERNELS.append(kernel)
