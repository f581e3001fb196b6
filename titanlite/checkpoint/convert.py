"""Convert checkpoints to and from Hugging Face folders, in one process, one shard at a time."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from titanlite.checkpoint.huggingface import (
    MAX_JSON_BYTES,
    PUBLISHED_FILE,
    TOKENIZER_FILE,
    HuggingFaceFolder,
    open_hugging_face,
    read_published_facts,
)
from titanlite.checkpoint.huggingface_export import (
    SHARD_BYTES,
    ModelToExport,
    write_hugging_face,
)
from titanlite.checkpoint.manifest import (
    DTYPE_OF_NAME,
    CheckpointManifest,
    check_hashes,
    software_versions,
    write_checkpoint_manifest,
)
from titanlite.checkpoint.saved_model import (
    SavedModel,
    buffer_names,
    parameter_shapes,
    read_saved_model,
)
from titanlite.checkpoint.tensor_reader import read_tensors
from titanlite.checkpoint.tensor_writer import write_small_files, write_tensors_one_by_one
from titanlite.data import Tokenizer, open_tokenizer
from titanlite.errors import CheckpointError, DataError
from titanlite.files import parse_json
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
    """Write a checkpoint as a Hugging Face folder; returns a sentence about its tokenizer.

    `dtype`: by default the widest in which a parameter was saved. `tokenizer`: path of a tokenizer
    file, for a checkpoint without a copy of its own. Raises CheckpointError or DataError.
    """
    saved = read_saved_model(checkpoint, tokenizer)
    records = saved.manifest.tensors

    def load(names: Sequence[str]) -> dict[str, Tensor]:
        tensors = {}
        for name in names:
            record = records[f"model.{name}"]
            tensors[name] = torch.empty(record.shape, dtype=DTYPE_OF_NAME[record.dtype])
        read_tensors(checkpoint, {"model": tensors}, no_dist=True)
        return tensors

    saved_dtypes = {
        DTYPE_OF_NAME[records[f"model.{name}"].dtype]
        for name in parameter_shapes(saved.spec, saved.sizes).keys()
        - buffer_names(saved.spec, saved.sizes)
    }
    published = read_saved_facts(saved)
    context = published.get("max_position_embeddings")
    seq_len = max(saved.seq_len, context if type(context) is int and context < 1 << 40 else 0)
    model = ModelToExport(
        saved.spec, saved.sizes, load, seq_len, saved.tokenizer, saved.bos, published
    )
    return write_hugging_face(
        out,
        model,
        dtype=dtype or max(saved_dtypes, key=lambda saved_dtype: saved_dtype.itemsize),
        max_shard_bytes=max_shard_bytes,
    )


def read_saved_facts(saved: SavedModel) -> dict[str, Any]:
    """What read_published_facts found in the folder that a checkpoint's training began with.

    Only the context length if the checkpoint has another tokenizer than that folder.
    """
    record = saved.manifest.files.get(PUBLISHED_FILE)
    if record is None or record.bytes > MAX_JSON_BYTES:
        return {}
    check_hashes(saved.folder, saved.manifest, [PUBLISHED_FILE])
    try:
        facts = parse_json(saved.folder.read(PUBLISHED_FILE))
    except ValueError:
        return {}
    if not isinstance(facts, dict):
        return {}
    content = saved.tokenizer.files.get(TOKENIZER_FILE, b"") if saved.tokenizer else b""
    if facts.get("tokenizer") != xxhash.xxh3_128_hexdigest(content):
        return {key: facts[key] for key in facts if key == "max_position_embeddings"}
    return facts


def from_hugging_face(folder: StorageFolder, out: StorageFolder) -> CheckpointManifest:
    """Write the weights of a Hugging Face folder as a model-only checkpoint in fp32.

    It is for `checkpoint.initial_load_path` and for generating text; a tokenizer.json is copied.
    Raises CheckpointError.
    """
    if out.sizes() or out.folders():
        raise CheckpointError(
            f"{out}: already exists and is not empty.", fix="Remove it, or give another folder."
        )
    source, started = open_hugging_face(folder), time.monotonic()
    tokenizer = _open_tokenizer_if_valid(folder) if source.has_tokenizer else None
    properties: dict[str, Any] = {"model": dataclasses.asdict(source.sizes)}
    if tokenizer:
        properties |= {"data.tokenizer": tokenizer.fingerprint, "data.bos": tokenizer.adds_bos}
    manifests, facts = [], read_published_facts(folder)

    def commit(files, tensors) -> None:
        manifest = CheckpointManifest(
            step=0,
            progress={},
            facts=properties,
            job=_job_of(source, tokenizer),
            layout="one process",
            files=files
            | write_small_files(out, {**(tokenizer.files if tokenizer else {}), **facts}),
            tensors=tensors,
            versions=software_versions(),
            seconds=time.monotonic() - started,
        )
        manifests.append(manifest)
        write_checkpoint_manifest(out, manifest)

    shapes = {
        f"model.{name}": torch.empty(location.shape, dtype=torch.float32, device="meta")
        for name, location in source.tensors.items()
    }
    write_tensors_one_by_one(
        out, shapes, lambda name: source.read(name.removeprefix("model.")).float(), commit
    )
    return manifests[0]


def _job_of(source: HuggingFaceFolder, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """The settings of the model, all of whose sizes are set, and the tokenizer's name."""
    flavor = next(iter(source.spec.flavors))
    settings = {"name": source.spec.name, "flavor": flavor, **dataclasses.asdict(source.sizes)}
    if not settings.get("head_dim"):  # dim / n_heads: as in the first flavor of each family
        settings.pop("head_dim", None)
    return {
        "model": dataclasses.asdict(ModelConfig.schema_for(source.spec.name)(**settings)),
        "data": {"tokenizer": tokenizer and tokenizer.name},
    }


def _open_tokenizer_if_valid(folder: StorageFolder) -> Tokenizer | None:
    """The tokenizer.json of a local folder; None, with a warning, if it cannot be used."""
    try:
        return open_tokenizer(folder.path_of(TOKENIZER_FILE))
    except DataError as error:
        logger.warning("%s: its tokenizer is not copied: %s", folder, error)
        return None
