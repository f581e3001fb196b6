"""[checkpoint], and the wishes in it that cannot be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from titanlite.checkpoint.manifest import read_checkpoint_manifest
from titanlite.errors import CheckpointError, ConfigError
from titanlite.settings import NotNegative, Positive, Range, Supported
from titanlite.storage import StorageFolder, is_url

EXCLUDABLE = {  # part that need not be loaded -> what then happens
    "optimizer": "its moments start anew",
    "dataloader": "the data starts anew, at position 0",
    "train_state": "steps and tokens are counted anew",
}


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint] What is kept of a run, and where it starts from."""

    enable: bool = False  # save checkpoints, and go on from the newest one that is there
    folder: str = "checkpoint"
    # where they are, under job.dump_folder; or a URL (s3://…, gs://…) that fsspec understands
    interval: Positive = 500  # steps between two
    initial_load_path: str | None = None  # step-N folder of another run to start from
    initial_load_model_only: bool = True  # take only its weights, and start at position 0
    initial_load_in_hf: bool = False  # it is a Hugging Face folder of safetensors
    initial_load_in_hf_quantized: Annotated[bool, Supported((False,), "Quantised loading")] = False
    # and its weights are quantised
    last_save_model_only: bool = False
    # leave the optimizer out of the last one; the run can then not be extended
    last_save_in_hf: bool = False
    # write the last one as Hugging Face safetensors too, in step-N-hf
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    # precision of a model-only or Hugging Face last save
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    # train on while a checkpoint is written, from a copy in host memory; pinned: copied faster
    timeout_seconds: Positive = 1800
    # limit for one save or one load; beyond it, as on a dead disk, the run ends with exit code 1
    keep_latest_k: NotNegative = 10  # whole checkpoints kept; 0: all
    keep_every: NotNegative = 0  # and those of every so many steps, for ever; 0: none
    keep_aside_k: NotNegative = 4
    # checkpoints kept of those set aside (damaged, or later than load_step); 0: all
    verify: Literal["full", "sizes", "off"] = "full"
    # what must be true of a checkpoint before it is loaded: contents, sizes, or only its manifest
    load_step: Annotated[int, Range(-1)] = -1
    # step to resume from; -1: the newest valid one. Applied once per new value: a restart resumes
    # from the newest. With load_only: applied at every start
    exclude_from_loading: list[str] = field(default_factory=list)
    # parts that start anew, at every start: optimizer, dataloader, train_state
    allow_changes: list[str] = field(default_factory=list)
    # facts that may differ from those a checkpoint was saved with, by the names it is refused with
    enable_first_step_checkpoint: bool = False  # save after step 1 too, to see that it works
    load_only: bool = False  # load, but never save


def checkpoint_folder(run: Path, config: CheckpointConfig) -> StorageFolder:
    """Where the checkpoints of the run in the folder `run` are."""
    return StorageFolder(config.folder if is_url(config.folder) else run / config.folder)


def check_checkpoint_config(config: CheckpointConfig) -> Iterator[ConfigError]:
    """Wishes that would be ignored, and a start that is not there."""
    for key in ("initial_load_path", "load_only"):
        if getattr(config, key) and not config.enable:
            yield _wrong(
                f"checkpoint.{key}: is set, but checkpoint.enable = false, so nothing is loaded.",
                "Set checkpoint.enable = true, or leave it out.",
                f"checkpoint.{key}",
            )
    for part in config.exclude_from_loading:
        if part not in EXCLUDABLE:
            why = " (the rate is a function of the step)" if part == "lr_scheduler" else ""
            yield _wrong(
                f'checkpoint.exclude_from_loading: "{part}" is no part that can be left out{why}.',
                f"Use {', '.join(EXCLUDABLE)}.",
                "checkpoint.exclude_from_loading",
            )
    narrow = config.export_dtype != "float32"
    if narrow and not (config.last_save_model_only or config.last_save_in_hf):
        yield _wrong(
            f'checkpoint.export_dtype = "{config.export_dtype}": is for a last save of the model'
            " alone; a run can go on only from the precision it has.",
            "Set checkpoint.last_save_model_only or last_save_in_hf = true, or leave it out.",
            "checkpoint.export_dtype",
        )
    if config.initial_load_in_hf and config.initial_load_path is None:
        yield _wrong(
            "checkpoint.initial_load_in_hf = true: but checkpoint.initial_load_path is not set.",
            "Set it to a folder with config.json and safetensors.",
            "checkpoint.initial_load_in_hf",
        )
    if config.initial_load_in_hf and not config.initial_load_model_only:
        yield _wrong(
            "checkpoint.initial_load_in_hf = true: such a folder holds the model alone.",
            "Leave checkpoint.initial_load_model_only at true.",
            "checkpoint.initial_load_model_only",
        )
    if is_url(config.folder):
        try:
            StorageFolder(config.folder)
        except CheckpointError as error:
            yield _wrong(f"checkpoint.folder: {error.message}", error.fix, "checkpoint.folder")
    if config.initial_load_path is not None and not config.initial_load_in_hf:
        try:
            read_checkpoint_manifest(StorageFolder(config.initial_load_path))
        except CheckpointError as error:
            yield _wrong(
                f"checkpoint.initial_load_path: {error.message}",
                error.fix,
                "checkpoint.initial_load_path",
            )


def _wrong(message: str, fix: str, key: str) -> ConfigError:
    return ConfigError(message, fix=fix, keys=(key,))
