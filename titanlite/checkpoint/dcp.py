"""Shared parts of the calls into torch.distributed.checkpoint (DCP)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import format_exception
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from titanlite.distributed.collectives import capture_user_error, gather_from_all_ranks
from titanlite.distributed.rank_tree import RankTree
from titanlite.errors import CheckpointError, UserError, error_from_dict, error_to_dict
from titanlite.log import logger
from titanlite.storage import StorageFolder

T = TypeVar("T")

# Raised by wrong code, not by a disk; a damaged file raises some of them when it is read.
_BUGS = (AssertionError, AttributeError, LookupError, NameError, TypeError)


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
def as_checkpoint_error(folder: StorageFolder, action: str) -> Iterator[None]:
    """Turn any exception of the block into a UserError that names the folder and this rank.

    `action`: "read" or "written". A bug in a write is logged with its traceback: the run goes on.
    """
    try:
        yield
    except (Exception, CheckpointException) as failure:
        error: BaseException = failure
        if isinstance(failure, CheckpointException):  # DCP's: holds the error of each failed rank
            error, _ = next(iter(failure.failures.values()))
        if isinstance(error, UserError):
            raise error from failure
        if action == "written" and isinstance(error, _BUGS):
            logger.error("%s:\n%s", folder, "".join(format_exception(error)))
        raise CheckpointError(
            f"{folder}: could not be {action}: rank {RankTree().rank}:"
            f" {type(error).__name__}: {error}"
        ) from failure


def call_on_all_ranks(
    function: Callable[[], T], folder: StorageFolder, action: str, group: dist.ProcessGroup | None
) -> T:
    """Call `function` on all ranks together; raise the error of the lowest failed rank on all."""

    def call() -> T:
        with as_checkpoint_error(folder, action):
            return function()

    result, problem = capture_user_error(call)
    errors = gather_from_all_ranks(problem and error_to_dict(problem), group)
    if first := next(filter(None, errors), None):
        raise error_from_dict(first).mark_on_all_ranks() from problem
    return cast(T, result)
