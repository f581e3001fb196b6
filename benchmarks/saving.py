"""Save and load 504 MB of parameters and optimizer state on two ranks, in every mode.

The memory checkpoints are of two hosts: each rank sends its shards to the other.

torchrun --nproc_per_node 2 -m benchmarks.saving   prints the seconds of each save and load
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from titanlite.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    SaveRequest,
    model_and_optimizer_state,
    read_tensors,
)
from titanlite.checkpoint.memory_sets import FOLDER_VARIABLE
from titanlite.distributed.collectives import broadcast_from_rank_0
from titanlite.distributed.error_report import ErrorReport
from titanlite.distributed.process_group import CommConfig, DebugConfig, join_process_group
from titanlite.storage import StorageFolder

MODES = ("disabled", "async", "async_with_pinned_mem")


def measure_saving() -> None:
    """Save and load in every mode; rank 0 prints the seconds by name, as JSON."""
    with join_process_group(
        torch.device("cpu"), CommConfig(), DebugConfig(), Path(), ErrorReport()
    ) as rank:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(40)))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        seconds: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as folder_of_rank:
            folder = broadcast_from_rank_0(folder_of_rank)
            no_job = {"properties": {}, "job": {}, "layout": ""}
            for mode in MODES:
                config = CheckpointConfig(enable=True, async_mode=mode, keep_latest_k=2)
                checkpointer = Checkpointer(StorageFolder(f"{folder}/{mode}"), config, **no_job)
                for step in range(1, 8):
                    progress = {"step": step, "position": step, "tokens": step}
                    save = partial(checkpointer.save, step, model, [optimizer], progress=progress)
                    blocked = _time_call(save)
                    saved = checkpointer.wait()
                    assert saved and not saved.problem, saved
                    seconds.setdefault(f"{mode}, blocked", []).append(blocked)
                    seconds.setdefault(f"{mode}, written", []).append(saved.seconds)
            measure_memory(model, optimizer, f"{folder}/memory", seconds)
            state = model_and_optimizer_state(model, [optimizer])
            storage = StorageFolder(f"{folder}/disabled")
            for verify in ("off", "full") * 5:
                config = CheckpointConfig(enable=True, verify=verify)
                checkpointer = Checkpointer(storage, config, **no_job)
                load_seconds = _time_call(partial(_load, checkpointer, state))
                seconds.setdefault(f"load, verify {verify}", []).append(load_seconds)
            torch.distributed.barrier()
        if rank.rank == 0:
            print(json.dumps(seconds))


def measure_memory(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    folder: str,
    seconds: dict[str, list[float]],
) -> None:
    """Save in the memory of two "hosts": each rank has a folder of its own in /dev/shm."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        os.environ[FOLDER_VARIABLE] = memory
        config = CheckpointConfig(enable=True, async_mode="async", memory_interval=1)
        checkpointer = Checkpointer(StorageFolder(folder), config, properties={}, job={}, layout="")
        assert checkpointer.find() is None and checkpointer.memory
        for step in range(1, 8):
            progress = {"step": step, "position": step, "tokens": step}
            request = SaveRequest(step, model, [optimizer], progress)
            blocked = _time_call(partial(checkpointer.save_in_memory, request))
            saved = checkpointer.memory.take_result(wait=True)
            assert saved and not saved.problem and not saved.error, saved
            seconds.setdefault("memory, blocked", []).append(blocked)
            seconds.setdefault("memory, written", []).append(saved.seconds)
        assert checkpointer.memory.sent_bytes
        checkpointer.memory.remove()
        torch.distributed.barrier()


def _load(checkpointer: Checkpointer, state: dict) -> None:
    found = checkpointer.find()
    assert found is not None
    read_tensors(found.folder, state)


def _time_call(function: Callable[[], object]) -> float:
    torch.distributed.barrier()
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


if __name__ == "__main__":
    measure_saving()
