"""Hugging Face folders of safetensors, read a part at a time, under our names, by any layout."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint import StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.models import FAMILIES, ModelSizes, ModelSpec
from titanlite.storage import StorageFolder

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

# Weights as numbers, in safetensors' words; quantised ones mean nothing without their scales.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


MOST_JSON_BYTES = 1 << 27  # an index of a million tensors
MOST_LAYERS = 10_000  # each takes memory before any of its weights is read
MOST_PARAMETERS = 1 << 50


def check_size(place: StorageFolder, spec: ModelSpec, sizes: ModelSizes, tensors: int) -> None:
    """Raise CheckpointError where a model cannot be that of a folder with so many tensors.

    To be asked before the model is built, which takes memory and time for each layer.
    """
    layers, parameters = sizes.n_layers, spec.count_parameters(sizes)
    if layers > MOST_LAYERS or parameters > MOST_PARAMETERS:
        raise CheckpointError(
            f"{place}: describes a model of {_rounded(layers)} layers and {_rounded(parameters)}"
            f" parameters; at most {MOST_LAYERS:,} and {float(MOST_PARAMETERS):.1e} are read."
        )
    if layers > tensors:
        raise CheckpointError(
            f"{place}: describes a model of {layers:,} layers, and holds {tensors:,} tensors."
        )


def _rounded(number: float) -> str:
    return f"{number:,}" if number < 1e9 else f"{number:.1e}" if number < 1e300 else "over 1e300"


def parameters_of(spec: ModelSpec, sizes: ModelSizes) -> dict[str, torch.Size]:
    """Name and shape of every parameter; of a tied model, both names."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in spec.build(sizes).state_dict().items()}


@dataclass(frozen=True)
class TensorLocation:
    """One tensor of a folder, and where it is."""

    file: str
    name: str  # in that file
    shape: torch.Size
    code: str  # its dtype, in safetensors' words


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A folder that holds what a model of `shape` needs; nothing of it is in memory."""

    place: StorageFolder
    spec: ModelSpec
    sizes: ModelSizes  # the family's own
    tensors: dict[str, TensorLocation]  # by our names
    has_tokenizer: bool  # a tokenizer.json

    def read(
        self,
        name: str,
        offsets: Sequence[int] | None = None,
        tensor_sizes: Sequence[int] | None = None,
    ) -> Tensor:
        """A tensor, or its part of `tensor_sizes` from `offsets` on, as it is in the file."""
        held = self.tensors[name]
        tensor_sizes, offsets = tensor_sizes or held.shape, offsets or (0,) * len(held.shape)
        with _opened(self.place, held.file) as file:
            cut = tuple(slice(o, o + n) for o, n in zip(offsets, tensor_sizes, strict=True))
            return file.get_slice(held.name)[cut].clone()  # what it was is a view of the file

    def reader(self) -> StorageReader:
        """For dcp.load({"model": …}): each rank reads its parts, and converts them to its dtype."""
        return _Reader(self)


def open_hugging_face(place: StorageFolder) -> HuggingFaceFolder:
    """A folder with config.json and safetensors; raises CheckpointError with all that is wrong."""
    if not place.local:
        raise CheckpointError(
            f"{place}: Hugging Face folders are read from this machine.", fix="Copy it here."
        )
    spec, sizes = _described(place)
    held = _held(place)
    check_size(place, spec, sizes, len(held))
    tensor_sizes = parameters_of(spec, sizes)
    names = {name: spec.hugging_face.name_of(name) for name in tensor_sizes}
    for name, other in spec.tied_parameters(sizes):
        if names[name] not in held:
            names[name] = names[other]
    _check_fit(place, spec, held, {names[name]: size for name, size in tensor_sizes.items()})
    tensors = {name: held[theirs] for name, theirs in names.items()}
    folder = HuggingFaceFolder(place, spec, sizes, tensors, TOKENIZER in place.sizes())
    for name, other in spec.tied_parameters(sizes):
        twice = tensors[name] != tensors[other]
        if twice and not torch.equal(folder.read(name).float(), folder.read(other).float()):
            raise CheckpointError(
                f"{place}: {names[name]} is not {names[other]}, and {CONFIG} says that it is.",
                fix=f"If both were learned, set tie_word_embeddings = false in {CONFIG}.",
            )
    return folder


def _described(place: StorageFolder) -> tuple[ModelSpec, ModelSizes]:
    """What its config.json says it is."""
    config = _read_json(place, CONFIG)
    families = {spec.hugging_face.architecture: spec for spec in FAMILIES.values()}
    found = config.get("architectures")
    if not isinstance(found, list) or len(found) != 1 or str(found[0]) not in families:
        raise CheckpointError(
            f"{place}: {CONFIG} has architectures = {json.dumps(found):.80}; known are"
            f" {', '.join(families)}."
        )
    spec = families[found[0]]
    try:
        return spec, spec.hugging_face.from_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{place}: {error.message}", error.fix) from None


def _held(place: StorageFolder) -> dict[str, TensorLocation]:
    """Every tensor of its files, by their names."""
    there = place.sizes()
    if SINGLE in there:  # before an index, as transformers does
        return _header(place, SINGLE)
    if INDEX not in there:
        pickles = [name for name in there if name.endswith((".bin", ".pt", ".pth"))]
        hint = f" {pickles[0]} is a pickle, which could execute code." if pickles else ""
        raise CheckpointError(f"{place}: has neither {SINGLE} nor {INDEX}.{hint}")
    index = _read_json(place, INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        raise CheckpointError(f"{place}: {INDEX} has no weight_map of names to files.")
    headers, bad = {}, []
    for file in sorted(set(index.values())):
        try:
            headers[file] = _header(place, file) if file in there else {}
        except CheckpointError as error:
            bad.append(error.message.removeprefix(f"{place}: ").rstrip("."))
    absent = [file for file in headers if file not in there]
    bad += _listed("files that its index names are not there", absent)
    found = {(file, name) for file, names in headers.items() for name in names}
    said = {(file, name) for name, file in index.items() if headers.get(file)}
    bad += _listed("tensors are not in the file that its index says", [n for _, n in said - found])
    bad += _listed("tensors are not in its index", [n for _, n in found - said])
    if bad:
        raise CheckpointError(f"{place}: {'; '.join(bad)}.", fix="Fetch it again.")
    return {name: headers[file][name] for name, file in index.items()}


def _header(place: StorageFolder, name: str) -> dict[str, TensorLocation]:
    with _opened(place, name) as file:
        parts = {key: file.get_slice(key) for key in file.keys()}
        return {
            key: TensorLocation(name, key, torch.Size(part.get_shape()), part.get_dtype())
            for key, part in parts.items()
        }


def _check_fit(
    place: StorageFolder,
    spec: ModelSpec,
    held: Mapping[str, TensorLocation],
    wanted: Mapping[str, torch.Size],
) -> None:
    """Raise CheckpointError with everything in which the tensors are not those wanted."""
    both = {name: (held[name], size) for name, size in wanted.items() if name in held}
    derived = spec.hugging_face.derived
    extra = [n for n in held if n not in wanted and not fnmatchcase(n, derived)]
    shapes = [
        f"{name} {list(h.shape)!s:.80}, not {list(size)}"
        for name, (h, size) in both.items()
        if h.shape != size
    ]
    types = [f"{name} {h.code}" for name, (h, _) in both.items() if h.code not in DTYPES]
    bad = [
        *_listed("tensors are missing", [name for name in wanted if name not in held]),
        *_listed("tensors have no place in it", extra),
        *_listed("tensors have another shape", shapes),
        *_listed("tensors have a type that weights do not have", types),
    ]
    if bad:
        raise CheckpointError(
            f"{place}: does not hold the weights that its {CONFIG} describes: {'; '.join(bad)}."
        )


def _listed(what: str, names: list[str]) -> list[str]:
    """Names in one line, as a list of it; nothing of none."""
    rest = f" and {len(names) - 8} more" if len(names) > 8 else ""
    some = [name[:200] if name.isprintable() else ascii(name[:200]) for name in sorted(names)[:8]]
    return [f"{len(names)} {what}: {', '.join(some)}{rest}"] if names else []


def _read_json(place: StorageFolder, name: str) -> dict[str, Any]:
    bytes_there = place.sizes().get(name)
    if bytes_there is None:
        if Path(place.file(name)).is_symlink():  # as in Hugging Face's own cache
            raise CheckpointError(
                f"{place}: {name} is a link, which is not followed.",
                fix=f"Copy what the links lead to: cp -rL {place} FOLDER.",
            )
        raise CheckpointError(
            f"{place}: is no Hugging Face folder: it has no {name}, the last file to be written."
        )
    try:
        if bytes_there > MOST_JSON_BYTES:
            raise ValueError(f"it has {bytes_there:,} bytes, of at most {MOST_JSON_BYTES:,}")
        content = parse_json(place.read(name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{place}: {name} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{place}: {name} holds no table.")
    return content


@contextmanager
def _opened(place: StorageFolder, name: str) -> Iterator[Any]:
    try:
        with safe_open(place.file(name), framework="pt") as file:  # maps it: nothing is read yet
            yield file
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{place}: {name} is damaged or cut short: {error}.", fix="Fetch it again."
        ) from None


# --- reading by all ranks together ---------------------------------------------------------------


class _Reader(StorageReader):
    """A folder as DCP sees a checkpoint: every tensor one chunk.

    DCP's own Hugging Face reader knows no other names, takes every safetensors file in the folder,
    listed or not, and cannot fill two names from one tensor, as tied models need.
    """

    def __init__(self, folder: HuggingFaceFolder):
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                f"model.{name}": TensorStorageMetadata(
                    TensorProperties(DTYPES[held.code]),
                    held.shape,
                    [ChunkStorageMetadata(torch.Size([0] * len(held.shape)), held.shape)],
                )
                for name, held in self.folder.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name = item.storage_index.fqn.removeprefix("model.")
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.folder.read(name, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def reset(self, checkpoint_id: Any = None) -> None:
        pass

    def set_up_storage_reader(self, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True
