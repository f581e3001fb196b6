"""torch's flight recorder: the last collectives of each rank, written to files when a run hangs.

NCCL writes them itself only when a collective times out, and the watchdog ends a run before that.
A file is a pickle, because torch's analyzer reads nothing else: open only traces of your own runs.
"""

from __future__ import annotations

import os
import pickle
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class FlightRecorder:
    """The recorder of this rank, and where its files are: `folder/DEVICE/rank_N`.

    Host and GPU have a folder each, because torch's analyzer reads the traces of one backend.
    """

    folder: Path
    max_collectives: int  # 0: off

    def enable(self, device: torch.device, rank: int) -> None:
        """Record collectives from now on; call it before the first process group exists."""
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(self.max_collectives)
        if self.max_collectives == 0:
            return
        if device.type == "cuda":
            os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
            os.environ["TORCH_FR_DUMP_TEMP_FILE"] = str(self.folder / "cuda" / "rank_")
        with suppress(OSError):  # a folder that cannot be written is reported when it is locked
            if rank == 0:
                self._set_aside_earlier_files()
            if device.type == "cuda":
                (self.folder / "cuda").mkdir(parents=True, exist_ok=True)

    def write(self, rank: int) -> list[Path]:
        """Write the last collectives; returns the folders. May block if a GPU hangs."""
        if self.max_collectives == 0:
            return []
        backends = _backends_by_device()
        for device_type, backend in backends.items():
            file = self.folder / device_type / f"rank_{rank}"
            file.parent.mkdir(parents=True, exist_ok=True)
            # written to the parent folder first: the analyzer fails on any other file in this one
            temporary = self.folder / f"{device_type}_{rank}.tmp"
            temporary.write_bytes(_dump(backend))
            os.replace(temporary, file)
        return [self.folder / device_type for device_type in backends]

    def _set_aside_earlier_files(self) -> None:
        """Move away the traces of an earlier start: they cannot be compared with new ones."""
        earlier = self.folder.with_name(f"{self.folder.name}_before")
        for device_type in ("cpu", "cuda"):
            target = earlier / device_type
            if files := _rank_files(self.folder / device_type):
                target.mkdir(parents=True, exist_ok=True)
                for file in _rank_files(target):
                    file.unlink()
                for file in files:
                    os.replace(file, target / file.name)


def _rank_files(folder: Path) -> list[Path]:
    return [f for f in folder.glob("rank_*") if f.name.removeprefix("rank_").isdigit()]


def _backends_by_device() -> dict[str, str]:
    """The backends of the default process group, by the type of device that each is for."""
    backends: dict[str, str] = {}
    group = dist.group.WORLD
    assert group is not None, "the watchdog runs while the group exists"
    for device_type in ("cpu", "cuda"):
        with suppress(RuntimeError):  # the group has no backend for it
            # Private, but nothing else names the backend behind "nccl": torch 2.15 has two.
            name = group._get_backend(torch.device(device_type)).name()
            if name not in backends.values():  # gloo alone serves GPUs too
                backends[device_type] = name
    return backends


def _dump(backend: str) -> bytes:
    """The last collectives of a backend, as torch's analyzer reads them."""
    # Private, and without a public equivalent (torch 2.11 to 2.15).
    recorders: Any = torch._C._distributed_c10d
    if backend == "nccl":
        return recorders._dump_nccl_trace()
    if backend == "gloo":
        return _with_groups(recorders._dump_fr_trace())
    return recorders._dump_fr_trace(backend=backend)  # torch 2.15: nccl2, the default there


def _with_groups(trace: bytes) -> bytes:
    """Add the ranks of every process group, which gloo does not record and the analyzer needs."""
    # There is no public list of groups (torch 2.11 to 2.15).
    from torch.distributed.distributed_c10d import _world

    content = pickle.loads(trace)  # this process has just written it
    content["pg_config"] = {
        group.group_name: {
            "name": group.group_name,
            "desc": group.group_desc,
            "ranks": str(dist.get_process_group_ranks(group)),
        }
        for group in list(_world.pg_map)
    }
    return pickle.dumps(content)
