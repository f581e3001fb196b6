"""torch.compile, block by block: one graph serves all blocks, and names stay as they were."""

from __future__ import annotations

import ctypes
import os
import shutil
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.mesh import ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.models import OutputLayer


@dataclass(frozen=True)
class CompileConfig:
    """[compile] torch.compile, block by block."""

    enable: bool = False  # compile what `components` names
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    # what is compiled: the blocks, and what is between the products of the loss
    backend: str = "inductor"  # by which compiler

    def __str__(self) -> str:
        return f"{' and '.join(self.components)}, by {self.backend}"

    def compiles(self, component: str) -> bool:
        return self.enable and component in self.components


def compile_blocks(blocks: nn.ModuleDict, config: CompileConfig) -> None:
    """Compile the forward of every block, whole: hooks of FSDP stay outside, so nothing breaks it.

    Shapes are taken as they are, because those of a run do not change from step to step.
    """
    if not config.compiles("model"):
        return
    # A graph is bound to a block's sizes and not to its weights; those of a pipeline stage, of
    # training and of validation are different ones, each with a variant for its own blocks.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    for block in blocks.values():
        compiled = torch.compile(
            block.forward, backend=config.backend, fullgraph=True, dynamic=False
        )
        block.forward = partial(_arrived, compiled)


def compile_loss(output: OutputLayer | None, config: CompileConfig) -> None:
    """Compile what is between the products of the loss: passes over the logits become fewer."""
    if output is not None and config.compiles("loss"):
        output.compile_loss(backend=config.backend, fullgraph=True, dynamic=False)


def enable_async_tensor_parallel_fusion(tp: DeviceMesh) -> None:
    """Let the compiler cut gathers and scatters into pieces that travel beside their products."""
    # Both private, and the only way. Torch 2.13 warns that the second is needless, but its compiler
    # still asks which groups it was called for; one that needs it no more may have it no more.
    torch._inductor.config._micro_pipeline_tp = True
    if enable := getattr(_symmetric_memory, "enable_symm_mem_for_group", None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(tp.get_group().group_name)


def _arrived(forward: Callable[..., Tensor], x: Tensor, *others) -> Tensor:
    """Under tensor parallel an embedding's output is still on its way, and a kind of tensor that
    code compiled for a plain one would give no gradient to."""
    return forward(x if type(x) is Tensor else x.clone(), *others)


def prepare_compiler(device: torch.device) -> None:
    """Keep compiled code among the user's caches, unless they said where, so that it is found."""
    # Private, as all that tells of it (torch 2.11 to 2.15). That a folder is in the environment
    # does not mean that somebody named it: torch names its own once its pipelines are imported.
    from torch._inductor import cpu_vec_isa
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    key = "TORCHINDUCTOR_CACHE_DIR"
    if os.environ.get(key) in (None, default_cache_dir()):
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        os.environ[key] = str(cache / "titanlite" / "inductor")
    if device.type == "cpu":
        cpu_vec_isa.VecISA._probe_load = _loads


def _loads(isa, library: str) -> bool:
    """Whether a library can be loaded: torch asks six, at each start, what vectors there are, and
    for each starts a Python. Kernels are loaded into this process too, and with less care."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def compiled_so_far() -> str:
    """How long compiling took in this process, and how much of it was there from a start before."""
    # Nothing public tells (torch 2.11 to 2.15); what is not counted under these names is left out.
    from torch._dynamo.utils import counters, cumulative_time_spent_ns

    graphs, cache = counters["stats"]["unique_graphs"], counters["inductor"]
    phases = ("entire_frame_compile", "entire_backward_compile")
    seconds = sum(cumulative_time_spent_ns[phase] for phase in phases) / 1e9
    found, made = cache["fxgraph_cache_hit"], cache["fxgraph_cache_miss"]
    return (
        f"compiled {graphs} graphs in {seconds:.1f} s, {'cold' if made else 'warm'}:"
        f" {found} of {found + made} were in the cache"
    )


def compile_problems(config: CompileConfig, section: ParallelismConfig) -> Iterator[ConfigError]:
    """Nothing to compile, or what is compiled for in vain."""
    if config.enable and not config.components:
        yield ConfigError(
            "compile.enable = true: but compile.components is empty, so nothing would be.",
            fix='Use components = ["model", "loss"], or one of them.',
            keys=("compile.components",),
        )
    if section.enable_async_tensor_parallel:
        degree, key = section.tensor_parallel_degree, "parallelism.enable_async_tensor_parallel"
        missing = [f"parallelism.tensor_parallel_degree = {degree}"] if degree == 1 else []
        missing += [] if config.compiles("model") else ["blocks are not compiled"]
        if missing:
            yield ConfigError(
                f"{key} = true: the compiler overlaps what tensor parallel sends with its products;"
                f" but {' and '.join(missing)}.",
                fix="Set compile.enable = true and a degree above 1, or leave it out.",
                keys=(key,),
            )


def compiler_problems(
    config: CompileConfig, compiles: bool, device_type: str
) -> Iterator[ConfigError]:
    """A compiler that there is not, where anything at all is compiled."""
    # The usual one is there; to ask for the others imports them all.
    asked = config.enable and config.backend != "inductor"
    if asked and config.backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        yield ConfigError(
            f'compile.backend = "{config.backend}": this torch has no such compiler. It has'
            f" {known}, and aot_eager and eager to look for mistakes with.",
            keys=("compile.backend",),
        )
    compiler = os.environ.get("CXX", "g++")
    by_inductor = compiles and (config.backend == "inductor" or not config.enable)
    if by_inductor and device_type == "cpu" and shutil.which(compiler) is None:
        yield ConfigError(
            f"there is no {compiler} here: on a CPU, torch.compile (compile.enable, or"
            " optimizer.state_dtype) writes C++.",
            fix="Install g++, name a compiler in CXX, or set compile.enable = false and"
            ' optimizer.implementation = "for-loop".',
            keys=("compile.enable",),
        )
