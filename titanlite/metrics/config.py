"""What is watched: [metrics] and [profiling]."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from titanlite.errors import ConfigError
from titanlite.settings import NotNegative, Positive, Supported


@dataclass(frozen=True)
class MetricsConfig:
    """[metrics] What is told of a run, how often and where."""

    log_freq: Positive = 10  # steps between two records
    enable_tensorboard: bool = False  # write the records for TensorBoard too
    disable_color_printing: bool = False  # print without colours
    save_tb_folder: str = "tb"  # TensorBoard's folder, under job.dump_folder
    save_for_all_ranks: Annotated[bool, Supported((False,), "Writing metrics from every rank")] = (
        False
    )
    # write the records of every rank, not of one
    enable_wandb: bool = False  # send the records to Weights & Biases too


@dataclass(frozen=True)
class ProfilingConfig:
    """[profiling] Traces of a few steps, to see where the time goes."""

    enable_profiling: bool = False  # write a trace on every rank, every profile_freq steps
    save_traces_folder: str = "profile_traces"  # the traces' folder, under job.dump_folder
    profile_freq: Positive = 10  # steps from one trace to the next
    profiler_active: Positive = 1  # steps in a trace
    profiler_warmup: NotNegative = 3  # steps before a trace, watched but thrown away
    enable_memory_snapshot: bool = False
    # write which allocations of a GPU were alive, and when, as often, when memory runs out, and
    # whenever the file `please` in their folder is touched
    save_memory_snapshot_folder: str = "memory_snapshot"  # their folder, under job.dump_folder


def check_metrics_config(config: MetricsConfig) -> Iterator[ConfigError]:
    """Guests that are asked for but not installed; asked on every rank, before any is started."""
    if config.enable_tensorboard and not _installed("tensorboard"):
        yield missing("metrics.enable_tensorboard", "tensorboard", "pip install tensorboard")
    if config.enable_wandb and not _installed("wandb"):
        yield missing("metrics.enable_wandb", "wandb", "pip install 'titanlite[wandb]'")


def check_profiling_config(config: ProfilingConfig) -> Iterator[ConfigError]:
    """A cycle of steps must hold its warmup and its trace."""
    needed = config.profiler_warmup + config.profiler_active
    if needed > config.profile_freq:
        yield ConfigError(
            f"profiling.profile_freq = {config.profile_freq}: must be at least {needed}, for"
            f" profiler_warmup = {config.profiler_warmup} and profiler_active ="
            f" {config.profiler_active} steps.",
            fix=f"Use {needed} or more, or fewer steps of warmup or trace.",
            keys=(
                "profiling.profile_freq",
                "profiling.profiler_warmup",
                "profiling.profiler_active",
            ),
        )


def missing(key: str, guest: str, command: str) -> ConfigError:
    """The error for an optional package that a setting needs."""
    return ConfigError(f"{key} = true, but {guest} is not installed.", fix=command, keys=(key,))


def _installed(guest: str) -> bool:
    spec = importlib.util.find_spec(guest)
    return spec is not None and spec.origin is not None  # or it is a folder that has its name
