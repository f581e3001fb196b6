"""What is kept of a run: whole checkpoints that any layout can go on from."""

from __future__ import annotations

from titanlite.checkpoint.checkpointer import Checkpointer, FoundCheckpoint, SaveResult
from titanlite.checkpoint.config import CheckpointConfig, checkpoint_folder, check_checkpoint_config
from titanlite.checkpoint.convert import from_hugging_face, to_hugging_face
from titanlite.checkpoint.listing import list_steps, step_and_number
from titanlite.checkpoint.manifest import CheckpointManifest, check_hashes, read_checkpoint_manifest
from titanlite.checkpoint.newest import find_newest_checkpoint
from titanlite.checkpoint.saved_model import SavedModel, describe_saved_model, read_saved_model
from titanlite.checkpoint.tensor_io import model_and_optimizer_state, read_tensors

__all__ = [
    "CheckpointConfig",
    "CheckpointManifest",
    "Checkpointer",
    "FoundCheckpoint",
    "SaveResult",
    "SavedModel",
    "check_hashes",
    "checkpoint_folder",
    "checkpoint_problems",
    "describe_saved_model",
    "find_newest_checkpoint",
    "from_hugging_face",
    "list_steps",
    "model_and_optimizer_state",
    "read_checkpoint_manifest",
    "read_saved_model",
    "read_tensors",
    "step_and_number",
    "to_hugging_face",
]
