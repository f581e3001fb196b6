"""Hugging Face folders of safetensors, written a shard at a time, from tensors under our names."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from titanlite.checkpoint.huggingface import CONFIG, DTYPES, INDEX, SINGLE, TOKENIZER, parameters_of
from titanlite.data import Tokenizer
from titanlite.data.tokenizer_json import to_tokenizer_json
from titanlite.errors import CheckpointError
from titanlite.models import ModelSizes, ModelSpec
from titanlite.storage import StorageFolder

SHARD_BYTES = 5_000_000_000

_CODES = {dtype: code for code, dtype in DTYPES.items()}

Load = Callable[[Sequence[str]], Mapping[str, Tensor]]  # our names -> whole tensors


def write_hugging_face(
    place: StorageFolder,
    spec: ModelSpec,
    sizes: ModelSizes,
    load: Load,
    *,
    dtype: torch.dtype = torch.float32,
    context: int,
    tokenizer: Tokenizer | None,
    bos: bool = False,
    max_shard_bytes: int = SHARD_BYTES,
) -> str:
    """Write a fresh folder from one process; returns what became of the tokenizer, in words.

    `load` is asked for the tensors of one shard at a time, and each is let go once it is on the
    disk. `context` is how many tokens the model was trained on at once. `bos`: every document began
    with the tokenizer's BOS.
    config.json comes last: without it, nothing loads the folder. Raises CheckpointError, before
    anything is written where the folder or the architecture is the reason.
    """
    if dtype not in _CODES:
        raise CheckpointError(
            f"{place}: weights of {dtype} cannot be written.", fix="Give another --dtype."
        )
    config = _config(spec, sizes, dtype, context)
    config |= _begin_and_end(tokenizer, bos)
    if place.sizes() or place.folders():
        raise CheckpointError(
            f"{place}: is there and not empty.", fix="Remove it, or give another folder."
        )
    tied = dict(spec.tied_parameters(sizes))
    tensor_sizes = {n: size for n, size in parameters_of(spec, sizes).items() if n not in tied}
    files = _cut(tensor_sizes, dtype.itemsize, max_shard_bytes)
    try:
        place.make()
        needed = dtype.itemsize * sum(size.numel() for size in tensor_sizes.values())
        place.check_room(needed, fix="Make room, or give another folder.")
        for file, names in files.items():
            wanted = {name: tensor_sizes[name] for name in names}
            _write_shard(place, file, spec, wanted, dict(load(names)), dtype)
        if SINGLE not in files:
            _write_json(place, INDEX, _index(spec, files, tensor_sizes, dtype))
        note = _write_tokenizer(place, tokenizer, bos)
        place.write_atomically(CONFIG, json.dumps(config, indent=2).encode())
    except OSError as error:
        raise CheckpointError(f"{place}: could not be written: {error}.") from error
    return note


def _config(spec: ModelSpec, sizes: ModelSizes, dtype: torch.dtype, context: int) -> dict[str, Any]:
    return {
        **spec.hugging_face.to_config(sizes, context),
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _begin_and_end(tokenizer: Tokenizer | None, bos: bool) -> dict[str, int | None]:
    """What stood before a document in training (BOS, or the end of the one before), and its end."""
    begin = tokenizer and (tokenizer.bos_id if bos else tokenizer.eos_id)
    # left out, transformers would have 1 and 2
    return {"bos_token_id": begin, "eos_token_id": tokenizer and tokenizer.eos_id}


def _cut(tensor_sizes: Mapping[str, torch.Size], itemsize: int, most: int) -> dict[str, list[str]]:
    """The names of each file of at most `most` bytes, in order; a larger tensor has its own."""
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in tensor_sizes.items():
        needed = size.numel() * itemsize
        if shards[-1] and filled + needed > most:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += needed
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    named = "model-{:05}-of-{:05}.safetensors"
    return {named.format(number, len(shards)): shard for number, shard in enumerate(shards, 1)}


def _index(
    spec: ModelSpec,
    files: Mapping[str, list[str]],
    tensor_sizes: Mapping[str, torch.Size],
    dtype: torch.dtype,
) -> dict[str, Any]:
    total = dtype.itemsize * sum(size.numel() for size in tensor_sizes.values())
    name_of = spec.hugging_face.name_of
    where = {name_of(name): file for file, names in files.items() for name in names}
    return {"metadata": {"total_size": total}, "weight_map": where}


def _write_shard(
    place: StorageFolder,
    file: str,
    spec: ModelSpec,
    tensor_sizes: Mapping[str, torch.Size],
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
) -> None:
    """One safetensors file, tensor after tensor (https://github.com/huggingface/safetensors).

    Not by the library, which writes to local paths alone, and a `StorageFolder` may be a URL.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}  # transformers insists on it
    end = 0
    for name, size in tensor_sizes.items():
        begin, end = end, end + size.numel() * dtype.itemsize
        about = {"dtype": _CODES[dtype], "shape": list(size), "data_offsets": [begin, end]}
        header[spec.hugging_face.name_of(name)] = about
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # aligns the numbers
    with place.writing(file) as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name, size in tensor_sizes.items():
            raw = _converted(name, tensors.pop(name), size, dtype)
            stream.write(raw.contiguous().reshape(-1).view(torch.uint8).numpy())


def _converted(name: str, tensor: Tensor, size: torch.Size, dtype: torch.dtype) -> Tensor:
    if tensor.shape != size:
        raise CheckpointError(f"{name}: has shape {list(tensor.shape)}, not {list(size)}.")
    tensor = tensor.detach().cpu()
    if dtype.itemsize < tensor.dtype.itemsize:
        largest = max(-tensor.min().item(), tensor.max().item())  # without a copy, as abs() makes
        if largest > torch.finfo(dtype).max:
            raise CheckpointError(
                f"{name}: holds {largest:.3g}, which {dtype} cannot.", fix="Use bfloat16."
            )
    return tensor.to(dtype)


def _write_json(place: StorageFolder, name: str, content: dict[str, Any]) -> None:
    with place.writing(name) as stream:
        stream.write(json.dumps(content, indent=2).encode())


def _write_tokenizer(place: StorageFolder, tokenizer: Tokenizer | None, bos: bool) -> str:
    """Write what transformers' AutoTokenizer opens, and say what it is."""
    if tokenizer is None:
        return "No tokenizer: the model was trained on ids alone."
    content, ids = to_tokenizer_json(tokenizer, bos=bos), _begin_and_end(tokenizer, bos)
    with place.writing(TOKENIZER) as stream:
        stream.write(content)
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.token_of(ids["bos_token_id"]),
        "eos_token": tokenizer.token_of(ids["eos_token_id"]),
        "clean_up_tokenization_spaces": False,
    }
    _write_json(place, "tokenizer_config.json", about)
    if tokenizer.files.get(TOKENIZER) == content:
        return f"{TOKENIZER} is {tokenizer.name}."
    adds = f" It adds {about['bos_token']} before a text." if bos else ""
    return f"{TOKENIZER} gives the same ids as {tokenizer.name}.{adds}"
