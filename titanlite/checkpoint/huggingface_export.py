"""Write a model as a Hugging Face folder of safetensors, one shard in memory at a time."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.huggingface import (
    CONFIG_FILE,
    DTYPE_OF_CODE,
    INDEX_FILE,
    SINGLE_FILE,
    TOKENIZER_FILE,
)
from titanlite.checkpoint.saved_model import buffer_names, parameter_shapes
from titanlite.data import Tokenizer
from titanlite.data.tokenizer_json import to_tokenizer_json
from titanlite.errors import CheckpointError
from titanlite.models import ModelSizes, ModelSpec
from titanlite.models.config_json import join_parts
from titanlite.storage import StorageFolder

SHARD_BYTES = 5_000_000_000
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}


@dataclass(frozen=True)
class ModelToExport:
    """A model with its weights and tokenizer, to be written as a Hugging Face folder."""

    spec: ModelSpec
    sizes: ModelSizes  # the dataclass of the model family
    load: Callable[[Sequence[str]], Mapping[str, Tensor]]  # titanlite's names -> unsharded tensors
    seq_len: int  # tokens in a training sequence; 0: not known
    tokenizer: Tokenizer | None  # None: the model was trained on token ids only
    bos: bool = False  # every training document began with the tokenizer's BOS
    published: Mapping[str, Any] = field(default_factory=dict)  # see read_published_facts


def write_hugging_face(
    folder: StorageFolder,
    model: ModelToExport,
    *,
    dtype: torch.dtype = torch.float32,
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a new folder from one process; returns a sentence about its tokenizer.

    `dtype` is that of the parameters; buffers stay fp32, as in transformers. `model.load` is called
    with the names of one shard at a time. config.json is written last: nothing loads the folder
    without it. Raises CheckpointError, about folder and architecture before any file is written.
    """
    if dtype not in CODE_OF_DTYPE:
        raise CheckpointError(
            f"{folder}: weights of {dtype} cannot be written.", fix="Give another --dtype."
        )
    spec, sizes, tokenizer = model.spec, model.sizes, model.tokenizer
    config = spec.hugging_face.to_config(sizes, model.seq_len)
    # no token is padding: transformers would not train its embedding (Gemma 3: token 0)
    config |= {"torch_dtype": str(dtype).removeprefix("torch."), "pad_token_id": None}
    config |= _special_token_ids(tokenizer, model.bos)
    if model.published.get("eos_token_id") is not None:
        config["eos_token_id"] = model.published["eos_token_id"]
    if folder.sizes() or folder.folders():
        raise CheckpointError(
            f"{folder}: already exists and is not empty.", fix="Remove it, or give another folder."
        )
    shapes, copies = _shapes_to_write(spec, sizes)
    stored, buffers = _names_by_stored_tensor(spec, shapes), buffer_names(spec, sizes)
    tensors_to_write = {
        name: torch.empty(shape, dtype=torch.float32 if name in buffers else dtype, device="meta")
        for name, shape in shapes.items()
    }
    shards = _assign_to_shards(stored, tensors_to_write, max_shard_bytes)
    total_bytes = sum(tensor.nbytes for tensor in tensors_to_write.values())
    try:
        folder.create_folder()
        folder.check_free_space(total_bytes, fix="Free disk space, or give another folder.")
        for file, names in shards.items():
            loaded = model.load(list(dict.fromkeys(copies.get(name, name) for name in names)))
            tensors = {name: loaded[copies.get(name, name)] for name in names}
            exported = {name: tensors_to_write[name] for name in names}
            _write_shard(folder, file, spec, exported, tensors)
        if SINGLE_FILE not in shards:
            stored_as = spec.hugging_face.stored_as(shapes)
            weight_map = {
                stored_name: file
                for file, names in shards.items()
                for name in names
                for stored_name in stored_as[name]
            }
            index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
            _write_json(folder, INDEX_FILE, index)
        note = _write_tokenizer(folder, model)
        folder.write_atomically(CONFIG_FILE, json.dumps(config, indent=2).encode())
    except OSError as error:
        raise CheckpointError(f"{folder}: could not be written: {error}.") from error
    return note


def _shapes_to_write(
    spec: ModelSpec, sizes: ModelSizes
) -> tuple[dict[str, torch.Size], dict[str, str]]:
    """(shape of each tensor to write, name -> original of those that are written twice)."""
    tied, copies = dict(spec.tied_parameters(sizes)), dict(spec.stored_copies(sizes))
    shapes = {n: shape for n, shape in parameter_shapes(spec, sizes).items() if n not in tied}
    return shapes | {name: shapes[original] for name, original in copies.items()}, copies


def _special_token_ids(tokenizer: Tokenizer | None, bos: bool) -> dict[str, int | None]:
    """The special token ids for config.json, as in training; transformers defaults to 1 and 2.

    If training used no BOS, each document followed the EOS of the one before, so EOS is the BOS.
    """
    if tokenizer is None:
        return {"bos_token_id": None, "eos_token_id": None}
    begin = tokenizer.bos_id if bos else tokenizer.eos_id
    return {"bos_token_id": begin, "eos_token_id": tokenizer.eos_id}


def _names_by_stored_tensor(spec: ModelSpec, names: Iterable[str]) -> dict[str, list[str]]:
    """Hugging Face's names, in order -> our names of the parameters in each tensor."""
    stored: dict[str, list[str]] = {}
    for name in names:
        stored.setdefault(spec.hugging_face.name_of(name), []).append(name)
    return stored


def _assign_to_shards(
    stored: Mapping[str, Sequence[str]], exported: Mapping[str, Tensor], max_bytes: int
) -> dict[str, list[str]]:
    """File name -> our names of its tensors, in order; parameters of one stored tensor are in one
    file, and a tensor above `max_bytes` has its own file."""
    shards: list[list[str]] = [[]]
    filled = 0
    for names in stored.values():
        needed = sum(exported[name].nbytes for name in names)
        if shards[-1] and filled + needed > max_bytes:
            shards.append([])
            filled = 0
        shards[-1] += names
        filled += needed
    if len(shards) == 1:
        return {SINGLE_FILE: shards[0]}
    file_name = "model-{:05}-of-{:05}.safetensors"
    return {file_name.format(number, len(shards)): shard for number, shard in enumerate(shards, 1)}


def _write_shard(
    folder: StorageFolder,
    file: str,
    spec: ModelSpec,
    exported: Mapping[str, Tensor],
    tensors: dict[str, Tensor],
) -> None:
    """Write one safetensors file (https://github.com/huggingface/safetensors), freeing `tensors`.

    `exported` has the shapes and dtypes to write, as meta tensors.
    The safetensors library writes to local paths only; a `StorageFolder` may be a URL.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # required by transformers
    end = 0
    # The widest dtype first, so that the elements of every tensor are aligned.
    names_in_order = sorted(exported, key=lambda name: -exported[name].dtype.itemsize)
    mapping, stored = spec.hugging_face, _names_by_stored_tensor(spec, names_in_order)
    stored_as = mapping.stored_as({name: tensor.shape for name, tensor in exported.items()})
    for name, *_ in stored.values():
        dtype = exported[name].dtype
        # The tensors of stacked experts follow each other, as their rows do.
        for stored_name, shape in stored_as[name].items():
            begin, end = end, end + shape.numel() * dtype.itemsize
            header[stored_name] = {
                "dtype": CODE_OF_DTYPE[dtype],
                "shape": list(shape),
                "data_offsets": [begin, end],
            }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the elements
    with folder.open_for_writing(file) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for names in stored.values():
            tensor = join_parts(
                [mapping.part_of(name) for name in names],
                [_convert_for_export(name, tensors.pop(name), exported[name]) for name in names],
            )
            stream.write(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def _convert_for_export(name: str, tensor: Tensor, exported: Tensor) -> Tensor:
    """A CPU tensor of its dtype; raises CheckpointError for another shape or if values overflow."""
    shape, dtype = exported.shape, exported.dtype
    if tensor.shape != shape:
        raise CheckpointError(f"{name}: has shape {list(tensor.shape)}, not {list(shape)}.")
    tensor = tensor.detach().cpu()
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(tensor.dtype).max:  # float16's limit is below that of bfloat16, too
        largest = max(-tensor.min().item(), tensor.max().item())  # abs() would make a copy
        if largest > limit:
            raise CheckpointError(
                f"{name}: has the value {largest:.3g}, which overflows {dtype}.",
                fix="Use bfloat16: checkpoint.export_dtype, or --dtype of checkpoint.py to-hf.",
            )
    return tensor.to(dtype)


def _write_json(folder: StorageFolder, name: str, content: dict[str, Any]) -> None:
    with folder.open_for_writing(name) as stream:
        stream.write(json.dumps(content, indent=2).encode())


def _write_tokenizer(folder: StorageFolder, model: ModelToExport) -> str:
    """Write the files of transformers' AutoTokenizer; returns a sentence about them."""
    if isinstance(generation := model.published.get("generation_config"), dict) and generation:
        _write_json(folder, "generation_config.json", generation)
    tokenizer, bos = model.tokenizer, model.bos
    if tokenizer is None:
        return "No tokenizer: the model was trained on token ids only."
    content = to_tokenizer_json(tokenizer, bos=bos)
    with folder.open_for_writing(TOKENIZER_FILE) as stream:
        stream.write(content)
    begin = tokenizer.special_token_name(tokenizer.bos_id if bos else tokenizer.eos_id)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": begin,
        "eos_token": tokenizer.special_token_name(tokenizer.eos_id),
        "clean_up_tokenization_spaces": False,
    }
    if template := model.published.get("chat_template"):
        settings["chat_template"] = template
    _write_json(folder, "tokenizer_config.json", settings)
    if tokenizer.files.get(TOKENIZER_FILE) == content:
        return f"{TOKENIZER_FILE} is a copy of {tokenizer.name}."
    adds = f" It adds {begin} before a text." if bos else ""
    return f"{TOKENIZER_FILE} gives the same ids as {tokenizer.name}.{adds}"
