"""Checkpoints to and from Hugging Face folders, in one process, a shard at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.huggingface import TOKENIZER, open_hugging_face, parameters_of
from titanlite.checkpoint.huggingface_export import SHARD_BYTES, write_hugging_face
from titanlite.checkpoint.manifest import (
    DTYPES,
    CheckpointManifest,
    versions,
    write_checkpoint_manifest,
)
from titanlite.checkpoint.saved_model import read_saved_model, write_files
from titanlite.checkpoint.tensor_io import read_tensors, write_one_by_one
from titanlite.data import Tokenizer, open_tokenizer
from titanlite.errors import CheckpointError, DataError
from titanlite.log import logger
from titanlite.models import ModelConfig
from titanlite.storage import StorageFolder


def to_hugging_face(
    checkpoint: StorageFolder,
    out: StorageFolder,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a checkpoint as a Hugging Face folder; returns what became of the tokenizer.

    `dtype` unset: as it was saved, the widest; `tokenizer`: the path of its file, where the checkpoint has no
    copy. Raises CheckpointError, or DataError.
    """
    saved = read_saved_model(checkpoint, tokenizer)
    records = saved.manifest.tensors

    def load(names: Sequence[str]) -> dict[str, Tensor]:
        own = {
            name: torch.empty(record.shape, dtype=DTYPES[record.dtype])
            for name in names
            if (record := records[f"model.{name}"])
        }
        read_tensors(checkpoint, {"model": own}, alone=True)
        return own

    dtypes = {
        DTYPES[records[f"model.{name}"].dtype] for name in parameters_of(saved.spec, saved.sizes)
    }
    return write_hugging_face(
        out,
        saved.spec,
        saved.sizes,
        load,
        dtype=dtype or max(dtypes, key=lambda kind: kind.itemsize),
        context=saved.seq_len,
        tokenizer=saved.tokenizer,
        bos=saved.bos,
        max_shard_bytes=max_shard_bytes,
    )


def from_hugging_face(folder: StorageFolder, out: StorageFolder) -> CheckpointManifest:
    """Write the weights of a Hugging Face folder as a checkpoint of the model alone, in fp32.

    It is for `checkpoint.initial_load_path` and for generating; a tokenizer.json goes along. Raises
    CheckpointError.
    """
    if out.sizes() or out.folders():
        raise CheckpointError(f"{out}: is there and not empty.", fix="Name a new folder.")
    source, began = open_hugging_face(folder), time.monotonic()
    fields = dataclasses.asdict(source.sizes)
    tokenizer = _tokenizer_of(folder) if source.has_tokenizer else None
    said = {key: value for key, value in fields.items() if value is False or value != 0}
    job = {  # as a TOML would say it, where what is 0 is not set
        "model": dataclasses.asdict(ModelConfig(name=source.spec.name, **said)),
        "data": {"tokenizer": tokenizer and tokenizer.name},
    }
    facts: dict[str, Any] = {"model": fields}
    if tokenizer:
        facts |= {"data.tokenizer": tokenizer.fingerprint, "data.bos": tokenizer.adds_bos}
    about = {"facts": facts, "job": job, "layout": "one process"}
    made: list[CheckpointManifest] = []

    def commit(files, tensors) -> None:
        files |= write_files(out, tokenizer.files if tokenizer else {})
        written = {"files": files, "tensors": tensors, "versions": versions()}
        seconds = time.monotonic() - began
        made.append(CheckpointManifest(0, {}, seconds=seconds, **about, **written))
        write_checkpoint_manifest(out, made[0])

    shapes = {
        f"model.{name}": torch.empty(held.shape, dtype=torch.float32, device="meta")
        for name, held in source.tensors.items()
    }
    write_one_by_one(
        out, shapes, lambda name: source.read(name.removeprefix("model.")).float(), commit
    )
    return made[0]


def _tokenizer_of(folder: StorageFolder) -> Tokenizer | None:
    """The tokenizer.json of a folder on this machine; None, and a warning, if it cannot be used."""
    try:
        return open_tokenizer(folder.file(TOKENIZER))
    except DataError as error:
        logger.warning("%s: left out: %s", folder, error)
        return None
