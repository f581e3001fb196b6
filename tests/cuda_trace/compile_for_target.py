"""Compile what titanlite compiles for a GPU that this machine does not have.

A program of its own, because torch caches the properties of the device in many places:

    python -m tests.cuda_trace.compile_for_target 8.0

prints one JSON object, {case: {"kernels": number of Triton kernels, "instructions": of a warp for
each element of rows of 128, "error": text}}. It needs Triton, which the CUDA builds of torch bring,
but no GPU and no driver.

Each case runs on the CPU, so that Dynamo and AOTAutograd trace the real forward and backward. Each
of their graphs is copied with its tensors moved to a fake CUDA device, and inductor compiles the
copy to Triton kernels, and Triton, with the ptxas it brings, those to machine code of the target.
The CPU then executes the graph that was traced.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
import triton
import triton.language as tl
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from triton.compiler import ASTSource

from benchmarks.gpu_bytes.sass import executed_instructions
from benchmarks.gpu_bytes.target import (
    KERNELS,
    WARP_SIZE,
    is_persistent,
    prepare_triton,
    pretend_gpu,
    triton_target,
)
from titanlite.labels import IGNORE_INDEX
from titanlite.models import FAMILIES, Llama3Sizes, LossConfig, OutputLayer
from titanlite.models.rope import rope_cos_sin
from titanlite.optim import OptimizerConfig, build_optimizer
from titanlite.parallelize.compile import CompileConfig, compile_blocks, compile_loss
from titanlite.parallelize.float8 import Float8Config, convert_to_float8

CUDA = torch.device("cuda", 0)
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
        optimizer.step(grad_factor=torch.tensor(0.5))
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


def instructions_per_element(kernel: CachingAutotuner) -> float:
    """Warp instructions times 32, for each element of rows that fit into registers."""
    result = kernel.compile_results[0]
    executed = executed_instructions(result.kernel.asm["cubin"], loop_trips=1)
    elements = result.config.kwargs["XBLOCK"] * kernel.size_hints["r0_"]
    return executed * result.config.num_warps * WARP_SIZE / elements


def main(capability: str, *names: str) -> None:
    """Compile the cases of these names, by default all."""
    prepare_triton(capability)
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
        rows = [k for k in KERNELS if is_persistent(k) and k.size_hints["r0_"] == 128]
        instructions = max((instructions_per_element(kernel) for kernel in rows), default=None)
        results[name] = {"kernels": len(KERNELS), "instructions": instructions, "error": error}
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
