"""Compiles the graphs of a step for the target, and counts what they do."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch._inductor.compile_fx as compile_fx
import torch._inductor.config as inductor_config
from torch import Tensor, fx
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch._inductor.scheduler import ExternKernelSchedulerNode, NopKernelSchedulerNode

from benchmarks.gpu_bytes.sass import executed_instructions
from benchmarks.gpu_bytes.target import KERNELS, pretend_gpu
from benchmarks.gpu_bytes.work import CompiledGraph, Matmul, describe_call


@contextmanager
def compiling_graphs(
    capability: str, wrap: Callable[[CompiledGraph, Callable], Callable]
) -> Iterator[None]:
    """Compile every graph that Inductor gets for the target, and count what it does.

    `wrap(graph, run)`: the function that is executed instead; `run` executes the traced graph.
    """
    compile_inner = compile_fx._compile_fx_inner

    def compile_and_count(gm: fx.GraphModule, inputs: list, *args: Any, **options: Any) -> Any:
        graph = CompiledGraph(bool(options.get("is_backward")))
        sizes = [t.numel() for t in inputs if isinstance(t, Tensor)]
        graph.elements = max((_hint(size) for size in sizes), default=0)
        _count_operators(gm, graph)
        graph.file = _source_file(gm)
        static = set(options.get("static_input_idxs") or ())
        graph.saved_bytes = 0 if graph.is_backward else _saved_bytes(gm, static)
        codegen = GraphLowering.codegen

        runs: list[tuple[str, list[int | None]]] = []

        def codegen_and_count(lowering: GraphLowering) -> Any:
            code = codegen(lowering)
            _count_bytes(lowering, graph)
            runs.extend(_list_runs(lowering, code[0].value))
            return code

        with (
            pretend_gpu(capability),
            mock.patch.object(GraphLowering, "codegen", codegen_and_count),
        ):
            compile_inner(gm, inputs, *args, **options)
        kernels = {kernel.inductor_meta["kernel_name"]: kernel for kernel in KERNELS}
        graph.work.instructions = sum(_instructions(kernels[name], sizes) for name, sizes in runs)
        return wrap(graph, gm.forward)

    # Folding computes one element of a constant on its device, which is not there.
    folding = inductor_config.patch(joint_graph_constant_folding=False)
    with folding, mock.patch.object(compile_fx, "_compile_fx_inner", compile_and_count):
        yield


def _hint(size: Any) -> int:
    return int(size) if isinstance(size, int) else int(size.node.hint)


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument


def _count_operators(gm: fx.GraphModule, graph: CompiledGraph) -> None:
    """Add the matmuls and the attention of a graph."""
    for node in gm.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), _value)
        call = describe_call(node.target, args, kwargs, node.meta.get("val"))
        if isinstance(call, Matmul):
            graph.work.matmuls[call] += 1
        elif call is not None:
            graph.work.attention[call] += 1


def _source_file(gm: fx.GraphModule) -> str:
    """The file with the innermost line of most operators; a backward's are those of its forward."""
    traces = (node.meta.get("stack_trace") or "" for node in gm.graph.nodes)
    files = Counter(found[-1] for trace in traces if (found := re.findall(r'File "(.+?)"', trace)))
    return max(files, key=files.__getitem__, default="")


def _saved_bytes(gm: fx.GraphModule, static: set[int]) -> int:
    """Bytes of the outputs after the first, without parameters."""
    (output,) = (node for node in gm.graph.nodes if node.op == "output")
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    parameters = {node for index, node in enumerate(placeholders) if index in static}
    kept = {node for node in output.args[0][1:] if isinstance(node, fx.Node)} - parameters
    tensors = [node.meta["val"] for node in kept if isinstance(node.meta.get("val"), Tensor)]
    return sum(_hint(tensor.numel()) * tensor.element_size() for tensor in tensors)


def _count_bytes(lowering: GraphLowering, graph: CompiledGraph) -> None:
    """Add the Triton kernels of a graph and the bytes that they move."""
    for node in lowering.scheduler.nodes:
        if isinstance(node, (ExternKernelSchedulerNode, NopKernelSchedulerNode)):
            continue
        in_memory = node.get_read_write_buffer_accesses(True, True)  # not within the kernel alone
        read = node.get_read_write_buffer_accesses(True, False)
        written = node.get_read_write_buffer_accesses(False, True)
        graph.work.kernels += 1
        graph.work.read += sum(int(size) for name, size in read.items() if name in in_memory)
        graph.work.written += sum(int(size) for name, size in written.items() if name in in_memory)


def _list_runs(lowering: GraphLowering, code: str) -> list[tuple[str, list[int | None]]]:
    """(kernel, its arguments that are numbers) of each call in the generated code."""
    values = getattr(lowering.sizevars.shape_env, "backed_var_to_val", {})
    known: dict[str, Any] = {str(symbol): int(value) for symbol, value in values.items()}
    runs = []
    for line in code.splitlines():
        if assigned := re.match(r"\s*(\w+numel) = (.+)", line):
            known[assigned[1]] = _evaluate(assigned[2], known)
        if run := re.match(r"\s*(triton_\w+)\.run\((.*), stream=", line):
            runs.append((run[1], [_evaluate(text, known) for text in run[2].split(", ")]))
    return runs


def _evaluate(text: str, known: dict[str, Any]) -> int | None:
    try:
        return int(eval(text, {"__builtins__": {}}, known))
    except (NameError, SyntaxError, TypeError, AttributeError):
        return None  # a buffer


def _instructions(kernel: CachingAutotuner, arguments: list[int | None]) -> float:
    """Warp instructions of one call with these arguments, in the configuration that is compiled."""
    result = kernel.compile_results[0]
    blocks, names = result.config.kwargs, list(kernel.triton_meta["signature"])
    sizes = dict(zip(names, arguments, strict=False))
    programs, trips = 1.0, 1.0
    for name, size in sizes.items():
        if not name.endswith("numel") or size is None:
            continue
        block = blocks.get(f"{name.removesuffix('numel').upper()}BLOCK")
        if name[0] in "xyz":
            programs *= math.ceil(size / (block or 1))
        elif block:  # else the whole row is in registers
            trips *= math.ceil(size / block)
    cubin = result.kernel.asm["cubin"]
    return programs * result.config.num_warps * executed_instructions(cubin, trips)
