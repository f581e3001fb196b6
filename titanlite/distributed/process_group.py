"""Joining the other ranks, and leaving them: device, backend, seeds, timeouts."""

from __future__ import annotations

import ctypes
import os
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
import torch.distributed as dist

from titanlite.distributed.rendezvous import (
    agree_on_start_id,
    bind_gloo_to_loopback,
    connect_to_store,
    launcher_hosts_store,
    open_store,
)
from titanlite.distributed.time_limit import LEAVE_SECONDS, exit_after
from titanlite.errors import ConfigError, UserError, format_error
from titanlite.settings import NotNegative, Positive, Supported

SILENT_SECONDS = 30  # longer than torchrun takes to end this rank after rank 0, also on a busy machine


@dataclass(frozen=True)
class CommConfig:
    """[comm] How ranks talk, and how long they wait for each other."""

    init_timeout_seconds: Positive = 300  # for starting up and the first step
    train_timeout_seconds: Positive = 100  # for everything after the first step
    trace_buf_size: NotNegative = 20_000  # collectives the flight recorder remembers; 0: off
    save_traces_folder: str = "comm_traces"  # where it writes them, under job.dump_folder
    save_traces_file_prefix: str = "rank_"  # how its files begin
    mode: Annotated[
        Literal["default", "fake_backend", "local_tensor"], Supported(("default",), "A dry run")
    ] = "default"  # real communication, or a pretence


@dataclass(frozen=True)
class DebugConfig:
    """[debug] Seeds and determinism."""

    seed: NotNegative = 0  # where weights and sample order come from
    deterministic: bool = False  # only deterministic kernels; may be slower
    deterministic_warn_only: bool = False  # warn where there is none, instead of failing
    moe_force_load_balance: Annotated[bool, Supported((False,), "Expert parallel")] = False
    # every expert the same number of tokens


@dataclass(frozen=True)
class RankContext:
    """Who this process is among the ranks."""

    rank: int
    world_size: int
    device: torch.device
    start_id: str = ""  # the same on all ranks of this start; no other start in the store has it


def launched_rank_and_world_size() -> tuple[int, int]:
    """(rank, ranks) as torchrun says; (0, 1) under plain python."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def choose_device(wish: str) -> torch.device:
    """This rank's device for `job.device`: auto takes CUDA where there is one."""
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError(
            'job.device = "cuda": this torch sees no CUDA device.', fix='Use "cpu" or "auto".'
        )
    local, devices = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if local >= devices:
        raise ConfigError(
            f"rank {local} of this machine has no GPU: there are {devices}.",
            fix=f"Use --nproc_per_node {devices} or fewer.",
        )
    return torch.device("cuda", local)


@contextmanager
def join_process_group(
    device: torch.device, comm: CommConfig, debug: DebugConfig, folder: Path
) -> Iterator[RankContext]:
    """Join the ranks, with the same seeds on all; leave them at the end, also after an error."""
    rank, ranks = launched_rank_and_world_size()
    if device.type == "cuda":
        torch.cuda.set_device(device)
        _record_flights(comm, folder)
    else:
        disable_malloc_trim()
    bind_gloo_to_loopback(ranks)
    timeout, start = comm.init_timeout_seconds, ""
    # A store on a frozen host ignores timeouts; one for the last rank to come, one for connecting.
    with exit_after(2 * timeout, f"rank {rank}: meeting the other ranks"):
        store: dist.Store = dist.HashStore()
        if ranks > 1 and launcher_hosts_store():
            store = connect_to_store(timeout)
            start = agree_on_start_id(store, rank, ranks, timeout)
            store = dist.PrefixStore(start, store)
        elif ranks > 1:
            store = open_store(rank, timeout)
        dist.init_process_group(
            # gloo beside nccl: checkpoints and agreements are about objects in host memory
            backend="gloo" if device.type == "cpu" else "cpu:gloo,cuda:nccl",
            timeout=timedelta(seconds=timeout),
            store=store,
            rank=rank,
            world_size=ranks,
        )
    try:
        seed_everything(debug.seed)
        if debug.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True, warn_only=debug.deterministic_warn_only)
            torch.backends.cudnn.benchmark = False
        yield RankContext(rank, ranks, device, start)
    except UserError as error:
        # Before leaving: the other ranks end because this one left.
        if not error.on_all_ranks and ranks > 1:
            print(f"rank {rank}: {format_error(error)}", file=sys.stderr, flush=True)
            error.on_all_ranks = error.printed = True
        raise
    finally:
        with exit_after(LEAVE_SECONDS, f"rank {rank}: leaving the other ranks"):
            dist.destroy_process_group()


def seed_everything(seed: int) -> None:
    """The same generators on every rank; weights and sample order do not draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def disable_malloc_trim() -> None:
    """Let the C library keep what tensors free, for the next step to use again.

    glibc gives every large block back to the kernel at once, which then clears it page by page for
    the next tensor; `benchmark.py --case trainer` shows what that costs.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:  # another C library; it has its own ways
        return
    trim_threshold, mmap_max = -1, -4  # malloc.h's M_TRIM_THRESHOLD and M_MMAP_MAX
    libc.mallopt(trim_threshold, -1)  # never trim
    libc.mallopt(mmap_max, 0)  # nor take blocks that would be unmapped when freed


def enable_expandable_segments() -> None:
    """Let the CUDA allocator extend its blocks, so that memory is not lost between them.

    Read when CUDA is first used. What the user has said, by its name of today or the older one,
    stays.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def set_collective_timeouts(seconds: int, excluded: dist.ProcessGroup | None) -> None:
    """Give up on a silent rank after `seconds` from now on, but in the group `excluded`."""
    # No public call changes the timeout of a group that exists (torch 2.11 to 2.15).
    from torch.distributed.distributed_c10d import _set_pg_timeout, _world

    for group in set(_world.pg_map) - {excluded}:
        _set_pg_timeout(timedelta(seconds=seconds), group)


def _record_flights(comm: CommConfig, folder: Path) -> None:
    if comm.trace_buf_size > 0:
        traces = folder / comm.save_traces_folder
        traces.mkdir(parents=True, exist_ok=True)
        os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(traces / comm.save_traces_file_prefix)
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(comm.trace_buf_size)


def report_user_error(error: UserError) -> int:
    """Print what the user must change, once for all ranks, and return the exit code.

    What every rank found, rank 0 prints; the others wait for the launcher to end them, because
    the first exit it sees is the one it acts on. Before they have joined, ranks cannot know what
    the others found: one that is still there after a while found it alone, and prints it.
    """
    if error.printed:
        return error.code
    rank, _ = launched_rank_and_world_size()
    if rank:
        time.sleep(SILENT_SECONDS)
    if rank == 0:
        print(format_error(error), file=sys.stderr, flush=True)
    elif not error.on_all_ranks:
        print(f"rank {rank}: {format_error(error)}", file=sys.stderr, flush=True)
    return error.code
