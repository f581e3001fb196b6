"""What is kept of a run: whole checkpoints that any layout can go on from."""

from __future__ import annotations

from titanlite.checkpoint.checkpointer import CheckpointConfig, Checkpointer, checkpoint_problems
from titanlite.checkpoint.manifest import Manifest, read_manifest
from titanlite.checkpoint.store import read_tensors

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "Manifest",
    "checkpoint_problems",
    "read_manifest",
    "read_tensors",
]
