"""What is kept of a run: whole checkpoints that any layout can go on from."""

from __future__ import annotations

from titanlite.checkpoint.checkpointer import Checkpointer, Found, Saved
from titanlite.checkpoint.config import CheckpointConfig, checkpoint_place, checkpoint_problems
from titanlite.checkpoint.convert import from_hugging_face, to_hugging_face
from titanlite.checkpoint.hold import Hold, hold_folders
from titanlite.checkpoint.listing import list_steps, step_and_number
from titanlite.checkpoint.manifest import Manifest, check_hashes, read_manifest
from titanlite.checkpoint.newest import newest_checkpoint
from titanlite.checkpoint.place import Place
from titanlite.checkpoint.saved_model import SavedModel, described_model, read_saved_model
from titanlite.checkpoint.store import read_tensors, state_of

__all__ = [
    "CheckpointConfig",
    "Checkpointer",
    "Found",
    "Hold",
    "Manifest",
    "Place",
    "Saved",
    "SavedModel",
    "check_hashes",
    "checkpoint_place",
    "checkpoint_problems",
    "described_model",
    "from_hugging_face",
    "hold_folders",
    "list_steps",
    "newest_checkpoint",
    "read_manifest",
    "read_saved_model",
    "read_tensors",
    "state_of",
    "step_and_number",
    "to_hugging_face",
]
