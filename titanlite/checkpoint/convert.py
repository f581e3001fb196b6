"""Checkpoints to and from Hugging Face folders, in one process, a shard at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from titanlite.checkpoint.hf import TOKENIZER, check_size, open_hugging_face, parameters_of
from titanlite.checkpoint.hf_export import SHARD_BYTES, write_hugging_face
from titanlite.checkpoint.manifest import (
    DTYPES,
    Manifest,
    read_manifest,
    versions,
    write_manifest,
)
from titanlite.checkpoint.place import Place
from titanlite.checkpoint.store import read_tensors, write_one_by_one
from titanlite.errors import CheckpointError, ConfigError
from titanlite.models import FAMILIES, Family, ModelConfig
from titanlite.settings import build, describe

T = TypeVar("T")


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
    family, shape = described_model(checkpoint, manifest)
    records = manifest.tensors

    def load(names: Sequence[str]) -> dict[str, Tensor]:
        own = {
            name: torch.empty(record.shape, dtype=DTYPES[record.dtype])
            for name in names
            if (record := records[f"model.{name}"])
        }
        read_tensors(checkpoint, {"model": own}, alone=True)
        return own

    saved = {record.dtype for name, record in records.items() if name.startswith("model.")}
    context = job_value(checkpoint, manifest, "training", "seq_len", int)
    return write_hugging_face(
        out,
        family,
        shape,
        load,
        dtype=dtype or DTYPES[saved.pop()],
        context=context or 0,
        tokenizer=tokenizer or job_value(checkpoint, manifest, "data", "tokenizer", str),
        max_shard_bytes=max_shard_bytes,
    )


def described_model(checkpoint: Place, manifest: Manifest) -> tuple[Family, Any]:
    """The family and shape of a checkpoint's model, whose weights it holds.

    Raises CheckpointError before anything is built where the model is not that of its tensors.
    """
    table = manifest.job.get("model")
    model, problems = build(ModelConfig, table if isinstance(table, dict) else {})
    if problems or not isinstance(table, dict):
        why = "; ".join(problem.message for problem in problems) or "it names no model"
        raise CheckpointError(f"{checkpoint}: its job is not valid: {why}")
    family = FAMILIES[model.name]
    try:
        shape = family.shape_of(model)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint}: its job is not valid: {error.message}") from None
    check_size(checkpoint, family, shape, len(manifest.tensors))
    wrong = [
        name
        for name, size in parameters_of(family, shape).items()
        if (record := manifest.tensors.get(f"model.{name}")) is None or record.shape != list(size)
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint}: {len(wrong)} tensors of the model that it describes are missing or"
            f" have another shape: {', '.join(wrong[:4])}."
        )
    return family, shape


def job_value(
    checkpoint: Place, manifest: Manifest, section: str, key: str, kind: type[T]
) -> T | None:
    """A setting of the job that saved a checkpoint, or None; raises CheckpointError."""
    table = manifest.job.get(section, {})
    value = table.get(key) if isinstance(table, dict) else table
    if value is not None and type(value) is not kind:
        raise CheckpointError(
            f"{checkpoint}: its job is not valid: {section}.{key} is not {describe(kind)}."
        )
    return value


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
