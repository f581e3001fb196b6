"""What tests of checkpoints share."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.distributed.oracle import whole
from titanlite.checkpoint import CheckpointConfig, Checkpointer, SaveResult
from titanlite.storage import StorageFolder


def open_checkpointer(folder, *, facts=None, layout="", check_lease=None, **config) -> Checkpointer:
    """Of a job of which nothing is known but what the test cares about."""
    about = {"facts": facts or {}, "job": {}, "layout": layout}
    if check_lease:
        about["check_lease"] = check_lease
    return Checkpointer(StorageFolder(folder), CheckpointConfig(enable=True, **config), **about)


def save(checkpointer: Checkpointer, state, final: bool = False) -> None:
    """Begin to save a state."""
    checkpointer.save(
        state.step, state.model, state.optimizer, progress=state.progress(), final=final
    )


def save_whole(checkpointer: Checkpointer, state, final: bool = False) -> SaveResult:
    """Save a state, and see that it was."""
    save(checkpointer, state, final)
    saved = checkpointer.wait()
    assert not saved.problem, saved.problem
    return saved


def bits(state) -> dict[str, bytes]:
    """Every weight and moment of this rank's stages as bytes, whole."""
    found = {}
    for name, parameter in state.model.named_parameters():
        found[name] = _bytes(whole(parameter))
        for key, value in state.optimizer.state[parameter].items():
            found[f"{name}.{key}"] = _bytes(whole(value))
    return found


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()  # of any type


def load(checkpointer: Checkpointer, state, facts: dict | None = None) -> str:
    """Go on from what is found; returns its name."""
    found = checkpointer.find()
    state.restore(checkpointer.load(found, state.model, state.optimizer, facts or {}))
    checkpointer.set_aside_later_steps(state.step)
    return found.folder.name
