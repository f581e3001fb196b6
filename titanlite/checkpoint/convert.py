"""Convert checkpoints to Hugging Face folders, in one process, one shard at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from titanlite.checkpoint.huggingface import MAX_JSON_BYTES, PUBLISHED_FILE, TOKENIZER_FILE
from titanlite.checkpoint.huggingface_export import SHARD_BYTES, ModelToExport, write_hugging_face
from titanlite.checkpoint.manifest import DTYPE_OF_NAME, check_hashes
from titanlite.checkpoint.saved_model import (
    SavedModel,
    buffer_names,
    parameter_shapes,
    read_saved_model,
)
from titanlite.checkpoint.tensor_reader import read_tensors
from titanlite.files import parse_json
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
