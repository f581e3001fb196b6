"""Compile what titanlite compiles for a GPU that this machine does not have.

A program of its own, because torch caches the properties of the device in many places:

    python -m tests.cuda_trace.compile_for_target 8.0

prints one JSON object, {case: {"kernels": number of Triton kernels, "error": text}}. It needs
Triton, which the CUDA builds of torch bring, but no GPU and no driver.

Each case runs on the CPU, so that Dynamo and AOTAutograd trace the real forward and backward. Each
of their graphs is copied with its tensors moved to a fake CUDA device, and inductor compiles the
copy to Triton kernels, and Triton, with the ptxas it brings, those to machine code of the target.
The CPU then executes the graph that was traced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, partialmethod
from types import SimpleNamespace
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
import torch._inductor.runtime.triton_helpers as triton_helpers
import torch._inductor.runtime.triton_heuristics as triton_heuristics
import triton
import triton.language as tl
from torch import Tensor, fx, nn
from torch._dynamo.device_interface import CudaInterface
from torch._guards import detect_fake_mode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._triton import has_triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime import driver as triton_driver

from titanlite.labels import IGNORE_INDEX
from titanlite.models import FAMILIES, Llama3Sizes, LossConfig, OutputLayer
from titanlite.models.rope import rope_cos_sin
from titanlite.optim import OptimizerConfig, build_optimizer
from titanlite.parallelize.compile import CompileConfig, compile_blocks, compile_loss
from titanlite.parallelize.float8 import Float8Config, convert_to_float8

TARGETS = {  # capability -> (name, streaming multiprocessors, threads of each)
    "8.0": ("A100", 108, 2048),
    "8.9": ("L40S", 142, 1536),
    "9.0": ("H100", 132, 2048),
    "10.0": ("B200", 148, 2048),
}
CUDA = torch.device("cuda", 0)
RAW_STREAM, WARP_SIZE = "_cuda_getCurrentRawStream", 32
SIZES = Llama3Sizes(
    dim=256, n_layers=1, n_heads=4, n_kv_heads=2, hidden_dim=512, vocab_size=512, qk_norm=True
)
COMPILED = CompileConfig(enable=True)


# --- cases: what titanlite compiles ---------------------------------------------------------------


def update_parameters(**section) -> None:
    """Two steps of an optimizer with low-memory moments, over matrices and a vector."""
    model = nn.Sequential(nn.Linear(256, 64, bias=False), nn.Linear(64, 128)).bfloat16()
    optimizer = build_optimizer(model, OptimizerConfig.of(**section))
    for _ in range(2):
        model(torch.ones(2, 256, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def compute_loss() -> None:
    """Forward and backward of the compiled loss, in chunks, the last one shorter."""
    output = OutputLayer(256, 500).bfloat16()
    output.config = LossConfig(chunk_tokens=48, z_loss=1e-4)
    compile_loss(output, COMPILED)
    hidden = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, 500, (2, 64))
    labels[:, ::5] = IGNORE_INDEX
    output(hidden, labels).backward()


def run_block(float8: Float8Config | None = None) -> None:
    """Forward and backward of a compiled transformer block in bfloat16."""
    model = FAMILIES["llama3"].build(SIZES).bfloat16()
    if float8 is not None:
        convert_to_float8(model, float8)
    compile_blocks(model.layers, COMPILED)
    rope = rope_cos_sin(torch.arange(64), SIZES.head_width, SIZES.rope_theta)
    x = torch.randn(2, 64, SIZES.dim, dtype=torch.bfloat16, requires_grad=True)
    model.layers["0"](x, rope).float().square().sum().backward()


CASES: dict[str, Callable[[], None]] = {
    **{
        f"optimizer, {dtype} state": partial(update_parameters, state_dtype=dtype)
        for dtype in ("bfloat16", "8bit", "4bit", "float8")
    },
    "loss": compute_loss,
    "block": run_block,
    **{
        f"block, float8 {recipe}": partial(run_block, Float8Config(recipe_name=recipe))
        for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp")
    },
    "block, float8 emulated": partial(
        run_block, Float8Config(recipe_name="tensorwise", emulate=True)
    ),
}


TRITON_CAST = "float8 cast of Triton"


# --- the target -----------------------------------------------------------------------------------


def triton_target(capability: str) -> GPUTarget:
    """What Triton calls a compute capability: 80 for 8.0, 100 for 10.0."""
    return GPUTarget("cuda", int(capability.replace(".", "")), WARP_SIZE)


def device_properties(capability: str) -> SimpleNamespace:
    """As torch.cuda.get_device_properties."""
    name, processors, threads = TARGETS[capability]
    major, minor = map(int, capability.split("."))
    return SimpleNamespace(
        name=name,
        major=major,
        minor=minor,
        multi_processor_count=processors,
        max_threads_per_multi_processor=threads,
        max_threads_per_block=1024,
        regs_per_multiprocessor=1 << 16,
        shared_memory_per_block_optin=99 << 10,  # the smallest of them
        warp_size=WARP_SIZE,
        total_memory=40 << 30,
    )


@contextmanager
def pretend_gpu(capability: str):
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


KERNELS: list = []  # compiled so far


def _compile_kernel(kernel, precompile: Callable, *_, **__) -> None:
    """What a process of inductor's compiler pool does, which has no access to the device."""
    if kernel.configs:  # otherwise it is compiled already
        kernel.configs = kernel.configs[:1]  # they differ in block sizes, not in types
        precompile(kernel, warm_cache_only=True)
        KERNELS.append(kernel)


# --- from the traced graph to the target ----------------------------------------------------------


@contextmanager
def compiling_for(capability: str, host_scalars: bool):
    """Compile for the target a copy of every graph that inductor is given; execute the graph.

    `host_scalars`: 0-d inputs are in host memory, also on a GPU.
    """
    compile_inner = compile_fx._compile_fx_inner

    def compile_copy(graph: fx.GraphModule, inputs: list, *args, **options):
        copy, copied_inputs = move_to_cuda(graph, inputs, host_scalars)
        with pretend_gpu(capability):
            compile_inner(copy, copied_inputs, *args, **options)
        return compile_fx.make_boxed_func(graph.forward)

    with mock.patch.object(compile_fx, "_compile_fx_inner", compile_copy):
        yield


def move_to_cuda(
    graph: fx.GraphModule, inputs: list, host_scalars: bool
) -> tuple[fx.GraphModule, list]:
    """A copy of a traced graph, and its fake inputs, on CUDA."""
    mode = detect_fake_mode(inputs)

    def move(value):
        if not isinstance(value, Tensor) or (host_scalars and not value.dim()):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=CUDA)

    with mode:
        moved = [move(value) for value in inputs]
    copy = fx.GraphModule(graph, fx.Graph())
    copy.graph.output(copy.graph.graph_copy(graph.graph, {}))
    for node in copy.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": CUDA}
    copy.recompile()
    FakeTensorProp(copy, mode).propagate_dont_convert_inputs(*moved)
    return copy, moved


@triton.jit
def _cast_to_float8(source, target):
    tl.store(target, tl.load(source).to(tl.float8e4nv).to(tl.float32))


def cast_in_triton(capability: str) -> None:
    """Compile a cast to Float8 without inductor, which may replace it by an ATen operation."""
    types = {"source": "*fp32", "target": "*fp32"}
    triton.compile(ASTSource(_cast_to_float8, types), target=triton_target(capability))


def main(capability: str, *names: str) -> None:
    """Compile the cases of these names, by default all."""
    triton_driver.set_active(SimpleNamespace(get_current_target=partial(triton_target, capability)))
    with pretend_gpu(capability):
        assert has_triton()  # cached: from now on also for Dynamo, which has no GPU here
    cases, results = {**CASES, TRITON_CAST: partial(cast_in_triton, capability)}, {}
    for name in names or cases:
        torch._dynamo.reset()
        KERNELS.clear()
        error = ""
        try:
            with compiling_for(capability, host_scalars=name.startswith("optimizer")):
                cases[name]()
        except Exception as problem:  # any, so that every case is reported
            error = f"{type(problem).__name__}: {problem}"
        results[name] = {"kernels": len(KERNELS), "error": error}
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
