"""Shared parts of the calls into torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titanlite.errors import CheckpointError, UserError
from titanlite.storage import StorageFolder


class BaseStorageReader(StorageReader):
    """A DCP StorageReader that needs no preparation of plans; subclasses read metadata and data."""

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def completed_future(value: Any) -> Future:
    """A future that has its value already, for DCP methods that must return one."""
    future: Future = Future()
    future.set_result(value)
    return future


@contextmanager
def ignore_no_dist_warning() -> Iterator[None]:
    """Suppress DCP's warning about a missing process group, which one process does not need."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


@contextmanager
def raise_checkpoint_error(folder: StorageFolder, action: str) -> Iterator[None]:
    """Turn DCP's exception, which it raises on every rank, into a CheckpointError.

    `action` is "read" or "written".
    """
    try:
        yield
    except CheckpointException as failure:  # a BaseException
        rank, (error, _) = min(failure.failures.items())
        if isinstance(error, UserError):
            raise error.mark_on_all_ranks() from failure
        raise CheckpointError(
            f"{folder}: could not be {action}: rank {rank}: {type(error).__name__}: {error}"
        ).mark_on_all_ranks() from failure
