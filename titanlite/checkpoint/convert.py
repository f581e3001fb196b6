"""Checkpoints to and from Hugging Face folders, in one process, a shard at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from titanlite.checkpoint.hf import TOKENIZER, open_hugging_face
from titanlite.checkpoint.hf_export import SHARD_BYTES, write_hugging_face
from titanlite.checkpoint.manifest import Manifest, read_manifest, versions, write_manifest
from titanlite.checkpoint.place import Place
from titanlite.checkpoint.store import read_tensors, write_one_by_one
from titanlite.errors import CheckpointError
from titanlite.models import FAMILIES, ModelConfig


def to_hugging_face(
    checkpoint: Place,
    out: Place,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | None = None,
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a checkpoint as a Hugging Face folder; returns what became of the tokenizer.

    `dtype` unset: as it was saved; `tokenizer` where its file has moved. Raises CheckpointError.
    """
    manifest = read_manifest(checkpoint)
    model = ModelConfig(**manifest.job["model"])
    family = FAMILIES[model.name]
    records = manifest.tensors

    def load(names: Sequence[str]) -> dict[str, Tensor]:
        own = {
            name: torch.empty(record.shape, dtype=getattr(torch, record.dtype))
            for name in names
            if (record := records[f"model.{name}"])
        }
        read_tensors(checkpoint, {"model": own}, alone=True)
        return own

    saved = {record.dtype for name, record in records.items() if name.startswith("model.")}
    return write_hugging_face(
        out,
        family,
        family.shape_of(model),
        load,
        dtype=dtype or getattr(torch, saved.pop()),
        context=manifest.job.get("training", {}).get("seq_len", 0),
        tokenizer=tokenizer or manifest.job["data"]["tokenizer"],
        max_shard_bytes=max_shard_bytes,
    )


def from_hugging_face(folder: Place, out: Place) -> Manifest:
    """Write the weights of a Hugging Face folder as a checkpoint of the model alone, in fp32.

    It is for `checkpoint.initial_load_path` and for generating. Raises CheckpointError.
    """
    if out.sizes() or out.folders():
        raise CheckpointError(f"{out}: is there and not empty.", fix="Name a new folder.")
    source, began = open_hugging_face(folder), time.monotonic()
    fields = dataclasses.asdict(source.shape)
    tokenizer = f"{folder}/{TOKENIZER}" if source.has_tokenizer else None
    said = {key: value for key, value in fields.items() if value is False or value != 0}
    job = {  # as a TOML would say it, where what is 0 is not set
        "model": dataclasses.asdict(ModelConfig(name=source.family.name, **said)),
        "data": {"tokenizer": tokenizer},
    }
    about = {"facts": {"model": fields}, "job": job, "layout": "one process"}
    made: list[Manifest] = []

    def commit(files, tensors) -> None:
        written = {"files": files, "tensors": tensors, "versions": versions()}
        seconds = time.monotonic() - began
        made.append(Manifest(0, {}, seconds=seconds, **about, **written))
        write_manifest(out, made[0])

    shapes = {
        f"model.{name}": torch.empty(held.shape, dtype=torch.float32, device="meta")
        for name, held in source.tensors.items()
    }
    write_one_by_one(
        out, shapes, lambda name: source.read(name.removeprefix("model.")).float(), commit
    )
    return made[0]
