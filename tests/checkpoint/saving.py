"""Helpers of the checkpoint tests."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.distributed.oracle import full_value
from titanlite.checkpoint import CheckpointConfig, Checkpointer, SaveRequest, SaveResult
from titanlite.storage import StorageFolder


def open_checkpointer(
    folder, *, properties=None, job=None, layout="", check_lease=None, **config
) -> Checkpointer:
    """A checkpointer of a job without properties, unless they are given."""
    options = {"properties": properties or {}, "job": job or {}, "layout": layout}
    if check_lease:
        options["check_lease"] = check_lease
    return Checkpointer(StorageFolder(folder), CheckpointConfig(enable=True, **config), **options)


def save(checkpointer: Checkpointer, state, final: bool = False) -> None:
    """Start to save a state."""
    request = SaveRequest(state.step, state.model, state.optimizer, state.progress())
    checkpointer.save(request, final)


def save_and_wait(checkpointer: Checkpointer, state, final: bool = False) -> SaveResult:
    """Save a state; fails if the save does."""
    save(checkpointer, state, final)
    saved = checkpointer.wait()
    assert not saved.problem, saved.problem
    return saved


def bits(state) -> dict[str, bytes]:
    """Every unsharded weight and optimizer state of this rank's pipeline stages, as bytes."""
    result = {}
    for name, parameter in state.model.named_parameters():
        result[name] = bits_of(parameter)
        for key, value in state.optimizer.state[parameter].items():
            result[f"{name}.{key}"] = bits_of(value)
    return result


def bits_of(tensor: Tensor) -> bytes:
    """The unsharded values of any dtype, as bytes; a collective for DTensors."""
    return full_value(tensor).contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def load(checkpointer: Checkpointer, state, properties: dict | None = None) -> str:
    """Resume from the checkpoint that is found; returns its name."""
    found = checkpointer.find()
    state.restore(checkpointer.load(found, state.model, state.optimizer, properties or {}))
    checkpointer.set_aside_later_steps(state.step)
    return found.folder.name
