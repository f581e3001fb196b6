"""[checkpoint]: its settings and their validation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from titanlite.errors import CheckpointError, ConfigError
from titanlite.settings import NotNegative, Positive, Range
from titanlite.storage import StorageFolder


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint] Saving checkpoints, and the checkpoint that a run starts from."""

    enable: bool = False  # save checkpoints, and resume from the newest valid one
    folder: str = "checkpoint"
    # checkpoint folder, relative to job.dump_folder; or a URL (s3://…, gs://…) for fsspec
    interval: Positive = 500  # steps between two checkpoints
    memory_interval: NotNegative = 0
    # steps between two checkpoints in the memory of this and another host, for a restart after the
    # loss of a rank or a host; 0: none. They are files in /dev/shm, or in the folder that the
    # environment variable TITANLITE_MEMORY_FOLDER names
    initial_load_path: str | None = None  # step-N folder of another run to start from
    initial_load_model_only: bool = True  # load only that folder's weights, and start at position 0
    initial_load_in_hf: bool = False  # initial_load_path is a Hugging Face folder of safetensors
    last_save_model_only: bool = False
    # save the last checkpoint without optimizer state; the run can then not be extended
    last_save_in_hf: bool = False
    # also write the last checkpoint as Hugging Face safetensors, in step-N-hf
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    # dtype of the weights in the last save, if that is model-only or Hugging Face; a validation
    # that the next start catches up has these weights
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    # write from a copy in host memory while training continues; pinned: faster copies
    timeout_seconds: Positive = 1800
    # limit for one save or one load; when it is exceeded, the run ends with exit code 1
    keep_latest_k: NotNegative = 10  # newest valid checkpoints to keep; 0: all
    keep_every: NotNegative = 0  # also keep checkpoints of multiples of this step; 0: none
    keep_aside_k: NotNegative = 4
    # checkpoints to keep that were set aside: damaged, or later than the step that a run went back
    # to; 0: all
    verify: Literal["full", "sizes", "off"] = "full"
    # checks before loading: hashes of all files, file sizes, or only the manifest
    load_step: Annotated[int, Range(-1)] = -1
    # step to resume from; -1: the newest valid one. Applied once per new value: a restart resumes
    # from the newest. With load_only: applied at every start
    exclude_from_loading: list[Literal["optimizer", "dataloader", "train_state"]] = field(
        default_factory=list
    )
    # parts to start from scratch, at every start: optimizer (its state), dataloader (position 0),
    # train_state (step and token counts, of initial_load_path only); the learning rate is none of
    # them, because it is a function of the step
    allow_changes: list[str] = field(default_factory=list)
    # job properties that may differ from the checkpoint's, named as in the error that refuses them
    enable_first_step_checkpoint: bool = False  # also save after step 1, to test that saving works
    load_only: bool = False  # load, but never save

    @property
    def saves(self) -> bool:
        return self.enable and not self.load_only

    @property
    def why_not_saved(self) -> str:
        """The setting because of which the run does not save."""
        return f"checkpoint.{'load_only = true' if self.enable else 'enable = false'}"


def checkpoint_folder(run: Path, config: CheckpointConfig) -> StorageFolder:
    """The folder with the checkpoints of the run in the folder `run`."""
    return StorageFolder(config.folder if "://" in config.folder else run / config.folder)


def check_checkpoint_config(config: CheckpointConfig) -> Iterator[ConfigError]:
    """Reject what cannot be loaded, and a run that would not start from the weights given."""
    if config.initial_load_path is not None and not config.enable:
        yield ConfigError(
            "checkpoint.initial_load_path: is set, but checkpoint.enable = false, so the run would"
            " start from scratch.",
            fix="Set checkpoint.enable = true, or remove checkpoint.initial_load_path.",
        )
    if "://" in config.folder:
        try:
            StorageFolder(config.folder)
        except CheckpointError as error:
            yield ConfigError(f"checkpoint.folder: {error.message}", error.fix)
    if config.initial_load_in_hf and config.initial_load_path is None:
        yield ConfigError(
            "checkpoint.initial_load_in_hf: is true, but checkpoint.initial_load_path is not set.",
            fix="Set checkpoint.initial_load_path to a folder with config.json and safetensors.",
        )
