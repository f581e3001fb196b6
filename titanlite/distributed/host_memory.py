"""Host memory for tensors, page-locked ("pinned") where a CUDA device copies to or from it."""

from __future__ import annotations

import mmap
import sys
from typing import Any

import torch
from torch import Tensor

from titanlite.distributed.collectives import local_shard
from titanlite.errors import UserError
from titanlite.log import logger

_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for the contexts of all devices


class HostMemory(mmap.mmap):
    """Memory of whole pages, zero at first; it is freed with the last tensor in it."""

    def __new__(cls, nbytes: int, *_: Any) -> HostMemory:
        try:
            return super().__new__(cls, -1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"{_format_size(nbytes)} of host memory: {error.strerror}") from error

    def place(self, tensor: Tensor, offset: int = 0) -> None:
        """Replace the memory of a host tensor's local shard by this memory, from byte `offset` on.

        Does not copy the values. The shard must be dense. The tensor objects stay. The new storage
        has the bytes of this shard only, because torch.save writes whole storages.
        """
        with torch.no_grad():  # with gradients, `to_local` would return an alias of the shard
            local = local_shard(tensor)
            if local.numel():
                here = torch.frombuffer(self, dtype=local.dtype, count=local.numel(), offset=offset)
                local.set_(here.untyped_storage(), 0, local.shape, local.stride())
                assert local_shard(tensor).data_ptr() == here.data_ptr()


class PinnedMemory(HostMemory):
    """Host memory that is registered with the CUDA driver exactly as long as it exists.

    If it stayed registered, the driver would hold pages that are no longer this memory's: copies
    into them are lost, and registering new memory at their address fails. The memory has whole
    pages, so that no page is registered twice. torch's own pinned memory (`pin_memory=True`) is
    rounded up to a power of two and kept when it is freed, so it is for tensors that come and go.
    """

    def __init__(self, nbytes: int, instead: str):
        """`instead`: the setting that needs no pinned memory. Raises UserError if pinning fails."""
        self._registered = False
        self._device = torch.cuda.current_device()
        self._address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        runtime = torch.cuda.cudart()
        # A forked child would share the pages until one of the two writes to them; this process
        # could then get other pages than those that the device uses.
        self.madvise(mmap.MADV_DONTFORK)
        error = runtime.cudaHostRegister(self._address, nbytes, _REGISTER_PORTABLE)
        if int(error):
            raise UserError(
                f"{_format_size(nbytes)} of host memory could not be page-locked:"
                f" {runtime.cudaGetErrorString(error)} (cudaHostRegister: error {int(error)}).",
                fix="Raise the memory limit of the container or `ulimit -l`, free host memory, or"
                f" set {instead}.",
            )
        self._registered = True

    def __del__(self) -> None:
        # At exit the process's memory and registrations end together, and CUDA may be gone already;
        # in a forked child, where CUDA is not initialized, the registration is the parent's.
        if not self._registered or sys.is_finalizing() or not torch.cuda.is_initialized():
            return
        with torch.cuda.device(self._device):  # this thread may use another device
            torch.cuda.synchronize()  # the device may still copy from or to this memory
            runtime = torch.cuda.cudart()
            error = runtime.cudaHostUnregister(self._address)
        if int(error):
            logger.error(
                "%s of page-locked host memory could not be unregistered: %s"
                " (cudaHostUnregister: error %d)",
                _format_size(len(self)),
                runtime.cudaGetErrorString(error),
                int(error),
            )


def pin_in_place(tensor: Tensor, instead: str) -> None:
    """Move the local shard of a host tensor to page-locked memory, with its values.

    `Tensor.pin_memory` would return another tensor. `instead` and errors: see `PinnedMemory`.
    """
    with torch.no_grad():
        local = local_shard(tensor)
        if local.numel():
            values = local.clone()
            PinnedMemory(local.nbytes, instead).place(tensor)
            local_shard(tensor).copy_(values)


def _format_size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB ({nbytes:,} bytes)"
