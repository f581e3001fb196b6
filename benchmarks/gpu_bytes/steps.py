"""One steady-state training step of a job on a fake GPU, counted by its parts."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils._pytree import tree_leaves

from benchmarks.gpu_bytes.fake_cuda import Trace, fake_cuda
from benchmarks.gpu_bytes.minimum import MinimumBytes
from benchmarks.gpu_bytes.traced_run import trace_run
from benchmarks.gpu_bytes.work import Attention, CompiledGraph, Matmul, Work, describe_call
from titanlite.parallelize import weight_init

STEADY_STEP = 2  # the first compiles and allocates, the last logs
PART_OF_FILE = (  # the innermost Python frame in one of these files names the part; of a graph,
    # the file that most of its operators come from
    ("torch/distributed/fsdp/", "FSDP"),
    ("titanlite/parallelize/fsdp.py", "FSDP"),
    ("titanlite/optim/clip.py", "clipping"),
    ("titanlite/optim/adaptive_clip.py", "clipping"),
    ("titanlite/optim/", "optimizer"),
    ("torch/optim/", "optimizer"),
    ("titanlite/models/loss.py", "loss"),
    ("titanlite/parallelize/token_exchange.py", "exchange"),
    ("titanlite/models/moe.py", "experts"),
    ("titanlite/models/router.py", "experts"),
    ("titanlite/kernels/grouped.py", "experts"),
    ("titanlite/models/llama.py", "blocks"),
)
UNCOUNTED = {  # operators that launch no kernel
    *("view", "_unsafe_view", "permute", "transpose", "t", "slice", "select", "expand", "squeeze"),
    *("unsqueeze", "as_strided", "detach", "alias", "split", "split_with_sizes", "unbind", "chunk"),
    *("empty", "empty_strided", "empty_like", "new_empty", "lift_fresh", "set_", "resize_"),
    *("_reshape_alias", "unsafe_split", "diagonal", "narrow", "movedim", "unfold", "is_pinned"),
    *("_local_scalar_dense", "item", "record_stream", "_record_stream", "new_empty_strided"),
}
OVERWRITING = {  # in-place operators that do not read what they write
    *("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_"),
    *("split_with_sizes_copy", "_chunk_cat"),
}


GATHERING = {"gather", "index_select", "embedding"}  # read only as much as they write


@dataclass
class Step:
    """What one step did."""

    parts: dict[str, Work] = field(default_factory=lambda: defaultdict(Work))
    saved_bytes: int = 0  # activations that compiled forwards keep
    waits: list[str] = field(default_factory=list)  # what the host waited for


class _Recorder(TorchDispatchMode):
    """Adds every operator outside of compiled graphs to the part of the step that calls it."""

    def __init__(self, step: Step, position: Callable[[], tuple[int, str]]):
        super().__init__()
        self.step, self.position = step, position
        self.minimum = MinimumBytes()
        self.graph_part = ""  # of the compiled graph that runs; "": none does

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # DTensor and the like: then come the operators on what is inside
        output = operator(*args, **kwargs)
        number, phase = self.position()
        if number == STEADY_STEP:
            self._count(operator, args, kwargs, output, phase)
        elif number > STEADY_STEP:
            self.minimum.end_step()
        return output

    def _count(self, operator: Any, args: Any, kwargs: Any, output: Any, phase: str) -> None:
        namespace, _, rest = operator.name().partition("::")
        name = rest.partition(".")[0]
        if name in UNCOUNTED or namespace == "prim":
            return
        read, written = _memory(operator, name, args, kwargs, output)
        if not read and not written:
            return
        call = describe_call(operator, args, kwargs, output)
        part = self.graph_part or part_of_call(phase)
        if call is not None or "c10d" in namespace:
            self.minimum.outside(read, written)
        elif not _is_view(operator, name, read, written):
            self.minimum.kernel(part, read, written)
        if self.graph_part or namespace == "prims" or namespace.startswith("c10d"):
            return
        work = self.step.parts[part]
        if isinstance(call, Matmul):
            work.matmuls[call] += 1
        elif isinstance(call, Attention):
            work.attention[call] += 1
        else:
            work.add(Work(1, sum(map(_bytes, read)), sum(map(_bytes, written))))

    def run_graph(self, graph: CompiledGraph, forward: Callable) -> Callable:
        """The function that executes a compiled graph, and counts it."""

        def run(arguments: list) -> Any:
            number, phase = self.position()
            outer, part = self.graph_part, self.graph_part or part_of_call(phase, graph)
            if number == STEADY_STEP and not outer:
                sizes = [t.numel() for t in arguments if isinstance(t, Tensor)]
                scale = max(map(int, sizes), default=0) / max(graph.elements, 1)
                self.step.parts[part].add(graph.work, scale)
                if phase.startswith("forward"):
                    self.step.saved_bytes += graph.saved_bytes
            self.graph_part = part
            try:
                result = forward(*arguments)
            finally:
                self.graph_part = outer
            arguments.clear()
            return result

        run._boxed_call = True  # type: ignore[attr-defined]  # of AOTAutograd
        return run


def part_of_call(phase: str, graph: CompiledGraph | None = None) -> str:
    """The part of the step that the running Python code belongs to."""
    frame, part = sys._getframe(1), _part_of_file(graph.file) if graph else ""
    while frame is not None and not part:
        part = _part_of_file(frame.f_code.co_filename)
        frame = frame.f_back  # type: ignore[assignment]
    backward = phase.startswith("backward")
    if part in ("experts", "exchange"):  # recomputed ones too
        return f"{part}, {'backward' if backward else 'forward'}"
    if part in ("", "blocks"):
        name = "blocks" if graph or part else "others"
        if graph and backward and not graph.is_backward:
            return "blocks, recomputed"
        return f"{name}, {'backward' if backward else 'forward'}"
    return part


def _part_of_file(file: str) -> str:
    return next((part for text, part in PART_OF_FILE if text in file), "")


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _memory(operator: Any, name: str, args: Any, kwargs: Any, output: Any) -> tuple[list, list]:
    """The tensors on the device that an operator reads, and those that it writes."""

    def on_device(value: Any) -> list[Tensor]:
        leaves = tree_leaves(value)
        return [t for t in leaves if isinstance(t, FakeTensor) and t.device.type == "cuda"]

    read: list[Tensor] = []
    written: list[Tensor] = []
    arguments = operator._schema.arguments
    given = dict(zip((a.name for a in arguments), args, strict=False)) | dict(kwargs)
    for argument in arguments:
        tensors = on_device(given.get(argument.name))
        if argument.alias_info is not None and argument.alias_info.is_write:
            # a fused Adam writes gradients only to divide them by a scale
            if argument.name != "grads" or given.get("grad_scale") is not None:
                written += tensors
            if name in OVERWRITING or argument.kwarg_only:
                continue
        read += tensors
    if name in GATHERING:
        return on_device(output), on_device(output)
    return read, written or on_device(output)


def _is_view(operator: Any, name: str, read: list[Tensor], written: list[Tensor]) -> bool:
    """Whether an operator gives its result the memory of an argument, and computes nothing."""
    if operator._schema.is_mutable or name in GATHERING:
        return False
    inputs = {tensor.untyped_storage()._cdata for tensor in read}
    return all(tensor.untyped_storage()._cdata in inputs for tensor in written)


def trace_step(settings: list[str], ranks: int, capability: str) -> Step:
    """Train a job for three steps as rank 0 of `ranks` on a fake GPU; count the steady one.

    `capability`: of the GPU that graphs are compiled for; "": the job compiles nothing.
    """
    step, trace = Step(), Trace()
    recorder = _Recorder(step, lambda: trace.position())
    with ExitStack() as stack:
        stack.enter_context(fake_cuda(trace))
        if capability:
            from benchmarks.gpu_bytes.compiled import compiling_graphs  # needs Triton

            stack.enter_context(compiling_graphs(capability, recorder.run_graph))
        # weights have no values here; to draw those of 8B took most of the trace
        stack.enter_context(mock.patch.object(weight_init, "_fill_normal"))
        stack.enter_context(recorder)
        result = trace_run(trace, settings, ranks)
    for part, work in step.parts.items():
        work.minimum = recorder.minimum.of_part[part]
    step.waits = result["waits"]
    return step
