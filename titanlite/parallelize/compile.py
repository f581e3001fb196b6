"""torch.compile, block by block: equal blocks share a graph, and parameter names do not change."""

from __future__ import annotations

import ctypes
import os
import shutil
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed import _symmetric_memory
from torch.distributed.device_mesh import DeviceMesh

from titanlite.errors import ConfigError
from titanlite.files import make_private_folder
from titanlite.log import logger
from titanlite.models import MixtureOfExperts, OutputLayer


@dataclass(frozen=True)
class CompileConfig:
    """[compile] torch.compile, block by block."""

    enable: bool = False  # compile the components
    components: list[Literal["model", "loss"]] = field(default_factory=lambda: ["model", "loss"])
    # model: the transformer blocks; loss: the elementwise operations of the loss
    backend: str = "inductor"  # torch.compile backend

    def __str__(self) -> str:
        return f"{' and '.join(self.components)}, backend {self.backend}"

    def compiles(self, component: str) -> bool:
        return self.enable and component in self.components


NOT_COMPILED = CompileConfig()


def replace_forward(module: nn.Module, forward: Callable[..., Any], *arguments: Any) -> None:
    """Let `module(*inputs)` return `forward(module, *arguments, *inputs)`.

    The module gets a subclass, which it shares with those of equal arguments. torch.compile would
    compile each block by itself if a module in it had a forward of its own.
    """
    base: Any = type(module)
    module.__class__ = _with_forward(base, forward, *arguments)


@cache
def _with_forward(base: Any, forward: Callable[..., Any], *arguments: Any) -> type:
    def method(self: nn.Module, *inputs: Any, **named: Any) -> Any:
        return forward(self, *arguments, *inputs, **named)

    return type(base.__name__, (base,), {"forward": method})


def compile_blocks(
    blocks: nn.ModuleDict, config: CompileConfig, rounds_as_eager: bool = False
) -> None:
    """Compile the forward of every block as one graph; FSDP's hooks stay outside of it.

    `rounds_as_eager`: round each result in a compute dtype below fp32, also inside of a kernel.

    Shapes are static, because those of a run do not change from step to step. A mixture of experts
    is several graphs, between its matmuls: how many rows an expert has changes from step to step,
    and a graph that recomputes a router in backward could select other experts than in forward.
    """
    if not config.compiles("model"):
        return
    # A graph depends on a block's shapes, not on its weights. Pipeline stages, training and
    # validation differ in shapes, and each of them needs one graph per kind of block.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 64)
    options: Any = None  # other backends accept none
    if rounds_as_eager and config.backend == "inductor":
        options = {"emulate_precision_casts": True}
    for block in blocks.values():
        mixtures = [module for module in block.modules() if isinstance(module, MixtureOfExperts)]
        for mixture in mixtures:
            mixture.compile_functions(config.backend)
        block.forward = torch.compile(
            block.forward,
            backend=config.backend,
            fullgraph=not mixtures,
            dynamic=False,
            options=options,
        )


def compile_loss(output: OutputLayer | None, config: CompileConfig) -> None:
    """Compile the elementwise operations of the loss, so that they read the logits fewer times."""
    if output is not None and config.compiles("loss"):
        output.vocabulary.compile(backend=config.backend, fullgraph=True, dynamic=False)


def enable_async_tensor_parallel_fusion(tp: DeviceMesh) -> None:
    """Let inductor fuse all-gathers and reduce-scatters with their matmuls, to overlap the two."""
    # Both settings are private; there is no public one. Torch 2.13 warns that the second is not
    # needed, but its compiler still checks it; later versions may remove it.
    torch._inductor.config._micro_pipeline_tp = True
    if enable := getattr(_symmetric_memory, "enable_symm_mem_for_group", None):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(tp.get_group().group_name)


def prepare_compiler(device: torch.device) -> None:
    """Cache compiled code on this machine unless the user set a folder; probe CPU ISAs in-process.

    Torch's default folder can be guessed, but torch does not check whose it is. Triton's is in the
    home folder, which thousands of ranks may share. Raises ConfigError if there is no safe folder.
    """
    # All of this is private (torch 2.11 to 2.15). TORCHINDUCTOR_CACHE_DIR may be set, and not by
    # the user: torch sets its own default when its pipelining package is imported.
    from torch._inductor import cpu_vec_isa
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir

    inductor, triton = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
    if os.environ.get(inductor) in (None, default_cache_dir()):
        try:
            os.environ[inductor] = str(make_private_folder() / "inductor")
        except OSError as error:
            problem = f"{error.filename}: {error.strerror or error}"
            raise ConfigError(
                f"{problem}, so compiled code cannot be cached there.",
                fix=f"Set {inductor} to a folder of yours, best on a disk of this machine.",
            ) from None
    logger.info("compile cache  %s (set %s to change it)", os.environ[inductor], inductor)
    if device.type == "cuda":
        # inductor's own default; without it, kernels that are not inductor's go to ~/.triton
        own_folder = Path(os.environ[inductor]) / "triton" / str(device.index or 0)
        os.environ.setdefault(triton, str(own_folder))
    if device.type == "cpu":
        # torch has no setting to skip its own check.
        cpu_vec_isa.VecISA._probe_load = _can_load_library  # type: ignore[method-assign, assignment]


def _can_load_library(isa, library: str) -> bool:
    """Whether a shared library loads; replaces torch's check, which starts a Python for each of six
    vector ISAs at every start. Compiled kernels are loaded into this process anyway."""
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def describe_compilation() -> str:
    """Number of graphs compiled in this process, the time that it took, and cache hits."""
    # No public API (torch 2.11 to 2.15); a counter that torch has renamed reads as 0.
    from torch._dynamo.utils import counters, cumulative_time_spent_ns

    graphs, inductor = counters["stats"]["unique_graphs"], counters["inductor"]
    phases = ("entire_frame_compile", "entire_backward_compile")
    seconds = sum(cumulative_time_spent_ns[phase] for phase in phases) / 1e9
    hits, misses = inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"]
    return (
        f"compiled {graphs} graphs in {seconds:.1f} s"
        f" ({'cold' if misses else 'warm'} cache: {hits} of {hits + misses} found)"
    )


def check_compiler(
    config: CompileConfig, compiles_optimizer: bool, device_type: str
) -> Iterator[ConfigError]:
    """Reject an unknown backend, and a missing C or C++ compiler, before anything is compiled.

    `compiles_optimizer`: whether the optimizer uses torch.compile, always with inductor.
    """
    # inductor always exists; listing the backends imports them all.
    is_other_backend = config.enable and config.backend != "inductor"
    if is_other_backend and config.backend not in torch._dynamo.list_backends(exclude_tags=()):
        known = ", ".join(torch.compiler.list_backends())
        yield ConfigError(
            f'compile.backend = "{config.backend}": unknown to this torch, which has {known}, and'
            " aot_eager and eager for debugging."
        )
    by_inductor = compiles_optimizer or (config.enable and config.backend == "inductor")
    if by_inductor and (found := _find_missing_compiler(device_type)):
        missing, fix = found
        yield ConfigError(
            f"{missing}, which torch.compile (used for compile.enable, optimizer.state_dtype and"
            " optimizer.offload) needs.",
            fix=f'{fix}, or set compile.enable = false and optimizer.implementation = "for-loop".',
        )


def _find_missing_compiler(device_type: str) -> tuple[str, str] | None:
    """(what inductor needs on this device and does not find, how to get it), or None."""
    if device_type == "cpu":
        compiler = os.environ.get("CXX", "g++")
        fix = "Install g++, set CXX to a compiler"
        return None if shutil.which(compiler) else (f"{compiler} not found: a C++ compiler", fix)
    # Triton compiles the launchers of its kernels in C, with the headers of Python. It looks for
    # compilers in this order (triton/runtime/build.py of Triton 3.6 to 3.9).
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    if not any(shutil.which(compiler) for compiler in compilers):
        missing = f"{' or '.join(compilers)} not found: a C compiler for Triton"
        return missing, "Install gcc, set CC to a compiler"
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")  # as Triton does
    header = Path(sysconfig.get_path("include", scheme)) / "Python.h"
    fix = "Install the development package of this Python (python3-dev)"
    return None if header.exists() else (f"{header} not found: a header for Triton", fix)
