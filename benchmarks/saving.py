"""One rank of two: 504 MB of weights and moments, saved in every mode, and loaded again.

torchrun --nproc_per_node 2 -m benchmarks.saving   prints the seconds of each
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard

from titanlite.checkpoint import (
    CheckpointConfig,
    Checkpointer,
    model_and_optimizer_state,
    read_tensors,
)
from titanlite.distributed.collectives import broadcast_from_rank_0
from titanlite.distributed.process_group import CommConfig, DebugConfig, join_process_group
from titanlite.storage import StorageFolder

MODES = ("disabled", "async", "async_with_pinned_mem")


def saving() -> None:
    with join_process_group(torch.device("cpu"), CommConfig(), DebugConfig(), Path()) as session:
        model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024, bias=False) for _ in range(40)))
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.ones(1, 1024)).sum().backward()
        optimizer.step()
        found: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as own:
            folder = broadcast_from_rank_0(own)
            about = {"facts": {}, "job": {}, "layout": ""}
            for mode in MODES:
                config = CheckpointConfig(enable=True, async_mode=mode, keep_latest_k=2)
                checkpointer = Checkpointer(StorageFolder(f"{folder}/{mode}"), config, **about)
                for step in range(1, 8):
                    progress = {"step": step, "position": step, "tokens": step}
                    blocked = _seconds(
                        lambda: checkpointer.save(
                            step,
                            model,
                            optimizer,
                            progress=progress,
                        )
                    )
                    saved = checkpointer.wait()
                    assert saved and not saved.problem, saved
                    found.setdefault(f"{mode}, blocked", []).append(blocked)
                    found.setdefault(f"{mode}, written", []).append(saved.seconds)
            state, place = (
                model_and_optimizer_state(model, optimizer),
                StorageFolder(f"{folder}/disabled"),
            )
            for verify in ("off", "full") * 5:
                config = CheckpointConfig(enable=True, verify=verify)
                checkpointer = Checkpointer(place, config, **about)
                taken = _seconds(lambda: read_tensors(checkpointer.find().folder, state))
                found.setdefault(f"load, verify {verify}", []).append(taken)
            torch.distributed.barrier()
        if session.rank == 0:
            print(json.dumps(found))


def _seconds(act: Callable[[], object]) -> float:
    torch.distributed.barrier()
    start = time.perf_counter()
    act()
    return time.perf_counter() - start


if __name__ == "__main__":
    saving()
