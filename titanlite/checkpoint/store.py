"""Tensors to and from a directory through torch.distributed.checkpoint, for any layout."""

from __future__ import annotations

import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from titanlite.errors import CheckpointError

# Flattened, so that an optimizer's state is found by parameter name, whatever its groups are.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def write_tensors(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write the shards of all ranks; every rank calls it together."""
    state = {"model": get_model_state_dict(model, options=_BY_NAME)}
    state["optimizer"] = _moments(model, optimizer)
    with _named(folder, "written"):
        dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))


def read_tensors(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Read into the shards that this layout has, in place, whatever layout wrote them."""
    state: dict[str, Any] = {"model": get_model_state_dict(model, options=_BY_NAME)}
    if optimizer is not None:
        state["optimizer"] = _moments(model, optimizer)
    alone = not torch.distributed.is_initialized()
    with _named(folder, "read"), warnings.catch_warnings():
        if alone:  # which DCP supposes to be a mistake
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, storage_reader=dcp.FileSystemReader(folder), no_dist=alone)


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    # Rates and decays come from the job, not from the checkpoint: only the state itself is kept.
    # What is not there yet (a fresh AdamW has no moments) is made here, to be read into.
    whole = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    return {name: value for name, value in whole.items() if name.startswith("state.")}


@contextmanager
def _named(folder: Path, act: str):
    try:
        yield
    except CheckpointException as failure:  # a BaseException; DCP raises it on every rank
        rank, (error, _) = min(failure.failures.items())
        raise CheckpointError(
            f"{folder}: could not be {act}: rank {rank}: {type(error).__name__}: {error}"
        ).known_to_all() from failure
