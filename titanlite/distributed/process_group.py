"""The process group of a run: device, backend, seeds, timeouts, and the errors of ranks."""

from __future__ import annotations

import ctypes
import os
import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from titanlite.distributed.error_report import ErrorReport, exit_code_of
from titanlite.distributed.flight_recorder import FlightRecorder
from titanlite.distributed.rendezvous import (
    END_KEY,
    HOST_KEY,
    SPARE_SECONDS,
    SPARES_VARIABLE,
    bind_gloo_to_loopback,
    connect_gloo_on_demand,
    explaining_failed_connections,
    launched_rank_and_world_size,
    open_rank_store,
)
from titanlite.distributed.time_limit import LEAVE_SECONDS, exit_after
from titanlite.errors import EXIT_DONE, ConfigError
from titanlite.files import raise_open_file_limit
from titanlite.log import logger
from titanlite.settings import NotNegative, Positive


@dataclass(frozen=True)
class CommConfig:
    """[comm] Communication between ranks, and its timeouts."""

    init_timeout_seconds: Positive = 300  # timeout until the first step is done
    train_timeout_seconds: Positive = 100  # timeout after the first step
    trace_buf_size: NotNegative = 20_000  # collectives that the flight recorder stores; 0: off
    save_traces_folder: str = "comm_traces"  # folder of the traces of a hang, in job.dump_folder

    def flight_recorder(self, folder: Path) -> FlightRecorder:
        """The recorder of collectives, which writes its files into the run's folder."""
        return FlightRecorder(folder / self.save_traces_folder, self.trace_buf_size)


@dataclass(frozen=True)
class DebugConfig:
    """[debug] Seeds and determinism."""

    seed: NotNegative = 0  # seed of the initial weights and the sample order
    deterministic: bool = False  # use deterministic kernels only; may be slower
    deterministic_warn_only: bool = False  # warn where no deterministic kernel exists; do not fail


@dataclass(frozen=True)
class RankContext:
    """This process among the ranks of the run."""

    rank: int
    world_size: int
    device: torch.device
    start_id: str = ""  # identifies this start in the store; the same on all its ranks
    store: dist.Store | None = None  # where spare ranks wait; None: there are none

    def spare_hosts(self) -> list[str]:
        """The hosts of the spare ranks, in rank order."""
        spares = range(self.world_size, self.world_size + int(os.environ.get(SPARES_VARIABLE, 0)))
        return [self.store.get(HOST_KEY.format(rank)).decode() for rank in spares if self.store]

    def release_spares(self, code: int) -> None:
        """Let spare ranks exit with the exit code of the run."""
        if self.store is not None:
            self.store.set(END_KEY, str(code))
            time.sleep(2 * SPARE_SECONDS * (code == EXIT_DONE))  # rank 0 may host the store


def choose_device(setting: str) -> torch.device:
    """This rank's device for `job.device`; "auto" is CUDA if available. Raises ConfigError."""
    if setting == "cpu" or (setting == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            'job.device = "cuda": torch finds no CUDA device.', fix='Use "cpu" or "auto".'
        )
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return torch.device("cuda", gpu_index(local_rank, torch.cuda.device_count(), by_torchrun))


def gpu_index(local_rank: int, visible: int, by_torchrun: bool) -> int:
    """Index of the GPU of a local rank among those that its process sees.

    A launcher such as `srun --gpus-per-task=1` shows each process only its own GPU, as index 0.
    torchrun shows all of its processes the same GPUs. Raises ConfigError if none is left.
    """
    if local_rank < visible:
        return local_rank
    if visible == 1 and not by_torchrun:
        return 0
    raise ConfigError(
        f"local rank {local_rank} has no GPU: this process sees {visible}.",
        fix=f"Use --nproc_per_node {visible}, or start each process with a GPU of its own, as srun"
        " --gpus-per-task=1 does.",
    )


@contextmanager
def join_process_group(
    device: torch.device, comm: CommConfig, debug: DebugConfig, folder: Path, report: ErrorReport
) -> Iterator[RankContext]:
    """Join the process group and seed the generators; leave at the end, also after an error.

    `report` prints an error of this rank before the rank leaves, because leaving may block, and the
    other ranks end when it leaves. Raises RendezvousError if the ranks do not find each other.
    """
    rank, world_size = launched_rank_and_world_size()
    comm.flight_recorder(folder).enable(device, rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        disable_malloc_trim()
    bind_gloo_to_loopback(world_size)
    connect_gloo_on_demand()
    raise_open_file_limit()
    timeout = comm.init_timeout_seconds
    # A store on a frozen host ignores timeouts: one is for waiting, one for connecting to ranks.
    with exit_after(2 * timeout, f"rank {rank}: joining the process group"):
        spares = int(os.environ.get(SPARES_VARIABLE, 0))
        store, start_id = open_rank_store(rank, world_size + spares, timeout)
        with explaining_failed_connections(rank, world_size):
            dist.init_process_group(
                # gloo beside NCCL: checkpoints and small values are exchanged in host memory
                backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
                timeout=timedelta(seconds=timeout),
                store=store,
                rank=rank,
                world_size=world_size,
            )
    context = RankContext(rank, world_size, device, start_id, store if spares else None)
    try:
        with report.printing_errors():
            _apply_debug_config(debug)
            yield context
    except BaseException as error:
        with exit_after(LEAVE_SECONDS, f"rank {rank}: aborting collectives", exit_code_of(error)):
            context.release_spares(exit_code_of(error))
            report.wait_for_rank_0(error, store)
            _abort_process_groups()
        raise
    with exit_after(LEAVE_SECONDS, f"rank {rank}: leaving the process group"):
        dist.destroy_process_group()


def _abort_process_groups() -> None:
    """Leave all process groups; to destroy them, NCCL would wait for collectives of other ranks."""
    # No public function aborts all groups (torch 2.11 to 2.15). This one aborts the communicators
    # of NCCL as one group, because they can wait for each other; gloo has nothing to abort.
    from torch.distributed.distributed_c10d import _abort_process_group

    try:
        _abort_process_group()
    except Exception as failure:  # of CUDA or NCCL; the error that ended this rank is raised
        logger.warning("collectives could not be aborted: %s", failure)


def _apply_debug_config(debug: DebugConfig) -> None:
    """Seed the global generators alike on all ranks; weights and sample order do not use them."""
    random.seed(debug.seed)
    np.random.seed(debug.seed % 2**32)
    torch.manual_seed(debug.seed)
    if debug.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
        torch.backends.cudnn.benchmark = False


def disable_malloc_trim() -> None:
    """Make the C library reuse freed memory for later tensors.

    By default glibc returns every large block to the kernel, which then clears it page by page for
    the next tensor; `benchmark.py --case trainer` shows the cost.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library
        return
    trim_threshold, mmap_max = -1, -4  # malloc.h's M_TRIM_THRESHOLD and M_MMAP_MAX
    libc.mallopt(trim_threshold, -1)  # never trim
    libc.mallopt(mmap_max, 0)  # never use mmap, whose blocks are unmapped when freed


def enable_expandable_segments() -> None:
    """Let the CUDA allocator extend its segments, which reduces fragmentation.

    Takes effect if CUDA is not in use yet. A setting of the user, by any of its names, stays.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def set_collective_timeouts(seconds: int, excluded: Sequence[dist.ProcessGroup | None]) -> None:
    """Set the timeout of all process groups that exist, except those in `excluded`."""
    # there is no public list of groups (torch 2.11 to 2.15), and no `set_timeout` before 2.15
    from torch.distributed import distributed_c10d

    set_timeout = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    for group in set(distributed_c10d._world.pg_map).difference(excluded):
        set_timeout(timedelta(seconds=seconds), group)
