"""Checkpoints that exist completely or not at all, and load under any layout."""

from __future__ import annotations

from titanlite.checkpoint.checkpointer import Checkpointer, SaveRequest, SaveResult
from titanlite.checkpoint.config import CheckpointConfig, check_checkpoint_config, checkpoint_folder
from titanlite.checkpoint.convert import read_saved_facts, to_hugging_face
from titanlite.checkpoint.finding import FoundCheckpoint, find_initial
from titanlite.checkpoint.manifest import CheckpointManifest, check_hashes, read_checkpoint_manifest
from titanlite.checkpoint.model_state import model_and_optimizer_state
from titanlite.checkpoint.saved_model import SavedModel, describe_saved_model, read_saved_model
from titanlite.checkpoint.step_folders import list_steps, step_sort_key
from titanlite.checkpoint.tensor_reader import read_tensors

__all__ = [
    "CheckpointConfig",
    "CheckpointManifest",
    "Checkpointer",
    "FoundCheckpoint",
    "SaveRequest",
    "SaveResult",
    "SavedModel",
    "check_checkpoint_config",
    "check_hashes",
    "checkpoint_folder",
    "describe_saved_model",
    "find_initial",
    "list_steps",
    "model_and_optimizer_state",
    "read_checkpoint_manifest",
    "read_saved_facts",
    "read_saved_model",
    "read_tensors",
    "step_sort_key",
    "to_hugging_face",
]
