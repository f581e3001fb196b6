"""Read Hugging Face folders of safetensors, by titanlite's parameter names, into any layout."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from titanlite.checkpoint.dcp import BaseStorageReader, completed_future
from titanlite.checkpoint.mxfp4 import MXFP4, MXFP4_BLOCK, Mxfp4Slice
from titanlite.checkpoint.saved_model import check_model_size, parameter_shapes
from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.models import FAMILIES, ModelSizes, ModelSpec
from titanlite.models.config_json import MULTIMODAL_PREFIX, StoredPart
from titanlite.storage import StorageFolder

PUBLISHED_FILE = "hugging_face.json"  # in checkpoints: facts of the original Hugging Face folder
CONFIG_FILE, TOKENIZER_FILE = "config.json", "tokenizer.json"
ADAPTER_FILE = "adapter_config.json"  # of peft
SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"

# safetensors' dtype codes that are supported; quantised ones would also need their scales.
DTYPE_OF_CODE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}

MAX_JSON_BYTES = 1 << 27  # an index of a million tensors
MAX_LISTED_NAMES = 8  # in an error


@dataclass(frozen=True)
class TensorLocation:
    """Where one tensor of a folder is stored."""

    file: str
    name: str  # in that file
    shape: torch.Size
    code: str  # safetensors' dtype code, or MXFP4
    scales: TensorLocation | None = None  # of MXFP4; the other fields are those of its blocks, but
    # `shape` is that of the elements


@dataclass(frozen=True)
class StoredParameter:
    """Where one of our parameters is stored."""

    shape: torch.Size
    locations: tuple[TensorLocation, ...]  # several: one for each row, as experts are stacked
    is_stacked: bool
    part: StoredPart  # how each of these tensors contains it
    first: int  # the outputs of other parameters before it

    @property
    def dtype(self) -> torch.dtype:
        """Of the file; of several tensors, that of the first; of MXFP4, which holds its values."""
        return {**DTYPE_OF_CODE, MXFP4: torch.bfloat16}[self.locations[0].code]


@dataclass(frozen=True)
class HuggingFaceFolder:
    """A checked folder with all tensors of a model; none of them is loaded."""

    folder: StorageFolder
    spec: ModelSpec
    sizes: ModelSizes  # the dataclass of the model family
    tensors: dict[str, StoredParameter]  # by titanlite's parameter names

    @property
    def files(self) -> list[str]:
        """The files of the tensors."""
        return sorted({at.file for each in self.tensors.values() for at in each.locations})

    def read(
        self, name: str, offsets: Sequence[int] | None = None, lengths: Sequence[int] | None = None
    ) -> Tensor:
        """A tensor, or its part of `lengths` from `offsets` on, in the dtype of the file."""
        stored = self.tensors[name]
        shape = stored.shape
        lengths, offsets = lengths or shape, offsets or (0,) * len(shape)
        if not stored.is_stacked:
            return next(self._read_parts(stored, stored.locations, offsets, lengths))
        (first, *offsets), (count, *lengths) = offsets, lengths
        rows = stored.locations[first : first + count]
        parts = self._read_parts(stored, rows, offsets, lengths)
        return torch.stack([part.to(stored.dtype) for part in parts])

    def _read_parts(
        self,
        parameter: StoredParameter,
        locations: Sequence[TensorLocation],
        offsets: Sequence[int],
        lengths: Sequence[int],
    ) -> Iterator[Tensor]:
        """The same part of several tensors; a file is opened once for consecutive ones."""
        part, first = parameter.part, parameter.first
        for file_name, group in groupby(locations, lambda location: location.file):
            with _open_safetensors(self.folder, file_name) as file:
                for location in group:
                    stored = file.get_slice(location.name)
                    if location.scales is not None:
                        with _open_safetensors(self.folder, location.scales.file) as others:
                            scales = others.get_slice(location.scales.name)
                            values = part.read(Mxfp4Slice(stored, scales), offsets, lengths)
                    else:
                        values = part.read(stored, offsets, lengths, first)
                    # copied, as a slice keeps the file mapped
                    yield values.clone(memory_format=torch.contiguous_format)


def open_hugging_face(folder: StorageFolder, mtp_layers: int = 0) -> HuggingFaceFolder:
    """Check a folder of config.json and safetensors; raises CheckpointError with all problems.

    `mtp_layers`: blocks for multi-token prediction to read; others that it has are left out.
    """
    if not folder.local:
        raise CheckpointError(
            f"{folder}: Hugging Face folders are read from local disks only.",
            fix="Copy it to a local disk.",
        )
    spec, sizes = read_model_config(folder)
    locations = _locate_tensors(folder)
    sizes = _sizes_with_prediction(folder, spec, sizes, mtp_layers, locations)
    check_model_size(folder, spec, sizes, len(locations))
    shapes, copies = parameter_shapes(spec, sizes), dict(spec.stored_copies(sizes))
    shapes |= {name: shapes[original] for name, original in copies.items()}
    mapping = spec.hugging_face
    if mapping.reads_mxfp4:
        locations = _join_blocks_and_scales(folder, locations)
    if mapping.multimodal:
        locations = _name_as_text_model(locations)
    mapping = mapping.as_stored_in(locations)
    stored_as = mapping.stored_as(shapes)
    prefix = mapping.optional_prefix
    if prefix and not any(stored.startswith(prefix) for stored in locations):
        stored_as = {
            name: {stored.removeprefix(prefix): shape for stored, shape in shapes_stored.items()}
            for name, shapes_stored in stored_as.items()
        }
    tied = [*spec.tied_parameters(sizes), *copies.items()]
    for name, original in tied:
        if not stored_as[name].keys() & locations.keys():
            stored_as[name] = stored_as[original]
    expected = {name: shape for stored in stored_as.values() for name, shape in stored.items()}
    _check_tensors_match(folder, spec, locations, expected)
    ahead = mapping.prediction_prefixes(locations)  # their number is logged already
    if ignored := {x for x in locations.keys() - expected.keys() if not x.startswith(ahead)}:
        lines = _format_names("tensors are not part of the model, and not read", ignored)
        logger.info("%s: %s", folder, lines[0])
    first = mapping.outputs_before(shapes)
    tensors = {
        name: StoredParameter(
            shapes[name],
            tuple(locations[stored] for stored in shapes_stored),
            mapping.is_stacked(name),
            mapping.part_of(name),
            first[name],
        )
        for name, shapes_stored in stored_as.items()
    }
    source = HuggingFaceFolder(folder, spec, sizes, tensors)
    for pair in tied:
        _check_pair_is_equal(source, *pair, copied=pair[0] in copies)
    for name in copies:
        del tensors[name]
    return source


def _sizes_with_prediction(
    folder: StorageFolder,
    spec: ModelSpec,
    sizes: ModelSizes,
    mtp_layers: int,
    stored: Iterable[str],
) -> ModelSizes:
    """The sizes with `mtp_layers` blocks for multi-token prediction, if the folder has as many."""
    found = len(spec.hugging_face.prediction_prefixes(stored))
    if mtp_layers > found:
        raise CheckpointError(
            f"{folder}: has {found} blocks for multi-token prediction, and the job has"
            f" model.mtp_layers = {mtp_layers}; blocks cannot be added to a trained model.",
            fix=f"Set model.mtp_layers = {found}.",
        )
    changes: dict[str, Any] = {"mtp_layers": mtp_layers} if mtp_layers else {}
    return replace(sizes, **changes)  # type: ignore[type-var]  # a dataclass


def _check_pair_is_equal(source: HuggingFaceFolder, name: str, original: str, copied: bool) -> None:
    """Raise CheckpointError if two tensors of a folder differ that are one parameter; `copied`: of
    multi-token prediction."""
    one, other = source.tensors[name], source.tensors[original]
    if one == other or torch.equal(source.read(name).float(), source.read(original).float()):
        return
    why = "multi-token prediction shares" if copied else f"{CONFIG_FILE} ties"
    fix = f"If both were trained, set tie_word_embeddings = false in {CONFIG_FILE}."
    raise CheckpointError(
        f"{source.folder}: {one.locations[0].name} differs from {other.locations[0].name}, but"
        f" {why} them.",
        fix="Set model.mtp_layers = 0, which does not read the first." if copied else fix,
    )


def read_model_config(
    folder: StorageFolder, name: str | None = None
) -> tuple[ModelSpec, ModelSizes]:
    """The model family and sizes that config.json describes; raises CheckpointError.

    `name`: the family to use if several have this architecture.
    """
    config = _read_text_config(folder)
    # reversed: of several families with one architecture, the first can represent all its models
    families = {
        name: spec
        for spec in reversed(FAMILIES.values())
        for name in spec.hugging_face.architectures
    }
    architectures = config.get("architectures")
    if (
        not isinstance(architectures, list)
        or len(architectures) != 1
        or str(architectures[0]) not in families
    ):
        raise CheckpointError(
            f"{folder}: {CONFIG_FILE} has architectures = {json.dumps(architectures):.80};"
            f" supported: {', '.join(families)}."
        )
    spec = FAMILIES[name] if name else families[architectures[0]]
    if architectures[0] not in spec.hugging_face.architectures:
        raise CheckpointError(
            f"{folder}: is a {architectures[0]}, which is not of the family {name}.",
            fix=f'Set model.name = "{families[architectures[0]].name}".',
        )
    try:
        return spec, spec.hugging_face.from_config(config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error.message}", error.fix) from None


def read_published_facts(folder: StorageFolder) -> dict[str, bytes]:
    """Facts of this folder that titanlite does not use, but writes again when it exports the model.

    The context length, the ids that end a text, generation_config.json and the chat template.
    Returns {name: bytes} of the file that keeps them in each checkpoint. Raises CheckpointError.
    """
    config, files = _read_text_config(folder), folder.sizes()
    others = {
        name: _read_json_table(folder, f"{name}.json") if f"{name}.json" in files else {}
        for name in ("generation_config", "tokenizer_config")
    }
    template, file = others["tokenizer_config"].get("chat_template"), "chat_template.jinja"
    if file in files and files[file] <= MAX_JSON_BYTES:
        template = folder.read(file).decode(errors="replace")
    tokenizer = folder.read(TOKENIZER_FILE) if TOKENIZER_FILE in files else b""
    facts = {
        "max_position_embeddings": config.get("max_position_embeddings"),
        "eos_token_id": others["generation_config"].get("eos_token_id", config.get("eos_token_id")),
        "generation_config": others["generation_config"],
        "chat_template": template,
        # the ids and the template belong to this tokenizer
        "tokenizer": xxhash.xxh3_128_hexdigest(tokenizer),
    }
    return {PUBLISHED_FILE: json.dumps(facts).encode()}


def _locate_tensors(folder: StorageFolder) -> dict[str, TensorLocation]:
    """The location of every tensor in the folder's safetensors files, by Hugging Face name."""
    file_sizes = folder.sizes()
    if SINGLE_FILE in file_sizes:  # preferred to an index, as in transformers
        return _read_header(folder, SINGLE_FILE)
    if INDEX_FILE not in file_sizes:
        for name in (SINGLE_FILE, INDEX_FILE):
            _refuse_link(folder, name)
        pickles = [name for name in file_sizes if name.endswith((".bin", ".pt", ".pth"))]
        hint = f" {pickles[0]} is a pickle, which could execute code." if pickles else ""
        raise CheckpointError(f"{folder}: has neither {SINGLE_FILE} nor {INDEX_FILE}.{hint}")
    index = _read_json_table(folder, INDEX_FILE).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(f, str) for f in index.values()):
        raise CheckpointError(f"{folder}: {INDEX_FILE} has no weight_map of names to files.")
    files = set(index.values())
    missing = files - file_sizes.keys()
    headers, problems = {}, _format_names("files in the index are missing", missing)
    for file in sorted(files - missing):
        try:
            headers[file] = _read_header(folder, file)
        except CheckpointError as error:
            problems.append(error.message.removeprefix(f"{folder}: ").rstrip("."))
    stored = {(file, name) for file, names in headers.items() for name in names}
    indexed = {(file, name) for name, file in index.items() if file in headers}
    problems += _format_names(
        "tensors are not in the file that the index gives", [n for _, n in indexed - stored]
    )
    problems += _format_names("tensors are not in the index", [n for _, n in stored - indexed])
    if problems:
        raise CheckpointError(f"{folder}: {'; '.join(problems)}.", fix="Download it again.")
    return {name: headers[file][name] for name, file in index.items()}


def _read_header(folder: StorageFolder, file_name: str) -> dict[str, TensorLocation]:
    with _open_safetensors(folder, file_name) as file:
        names = file.keys()
        slices = {name: file.get_slice(name) for name in names}
        return {
            name: TensorLocation(file_name, name, torch.Size(part.get_shape()), part.get_dtype())
            for name, part in slices.items()
        }


def _read_text_config(folder: StorageFolder) -> dict[str, Any]:
    """config.json, with the keys of its `text_config`, which that of a multimodal model has.

    transformers ties the embeddings of such a model by the key beside `text_config`.
    """
    config = _read_json_table(folder, CONFIG_FILE)
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    outer = {key: config[key] for key in ("architectures", "tie_word_embeddings") if key in config}
    return {**config, **text, **outer}


def _name_as_text_model(locations: dict[str, TensorLocation]) -> dict[str, TensorLocation]:
    """The locations, with the text part of a multimodal model under the names of a text model."""

    def text_name(name: str) -> str:
        text = "model." + name.removeprefix(MULTIMODAL_PREFIX)
        # a name that is there already is kept: the prefixed one is then refused
        return text if name.startswith(MULTIMODAL_PREFIX) and text not in locations else name

    return {text_name(name): location for name, location in locations.items()}


def _join_blocks_and_scales(
    folder: StorageFolder, locations: dict[str, TensorLocation]
) -> dict[str, TensorLocation]:
    """The locations, where NAME_blocks and NAME_scales are one tensor NAME in MXFP4."""
    joined = dict(locations)
    for name, blocks in locations.items():
        whole, scales = name.removesuffix("_blocks"), name.removesuffix("_blocks") + "_scales"
        if whole == name or scales not in locations:
            continue
        experts, outputs, *groups = blocks.shape
        expected = torch.Size([experts, outputs, *groups[:1]])
        codes = {blocks.code, locations[scales].code}
        if groups[1:] == [16] and locations[scales].shape == expected and codes == {"U8"}:
            shape = torch.Size([experts, groups[0] * MXFP4_BLOCK, outputs])
            joined[whole] = replace(blocks, shape=shape, code=MXFP4, scales=locations[scales])
            del joined[name], joined[scales]
    if count := len(locations) - len(joined):
        logger.info(
            "%s: %d tensors of experts are stored in MXFP4; they are read as bfloat16, which has"
            " the same values. An export writes 16 or 32 bits, not MXFP4.",
            folder,
            count,
        )
    return joined


def _check_tensors_match(
    folder: StorageFolder,
    spec: ModelSpec,
    locations: Mapping[str, TensorLocation],
    expected: Mapping[str, torch.Size],
) -> None:
    """Raise CheckpointError with every difference between stored and expected tensors."""
    stored = {name: locations[name] for name in expected if name in locations}
    prefixes = spec.hugging_face.prediction_prefixes(locations)
    prefixes = tuple(p for p in prefixes if not any(name.startswith(p) for name in expected))
    if left := sum(name.startswith(prefixes) for name in locations):
        logger.info(
            "%s: %d tensors of multi-token prediction are left out; model.mtp_layers = %d reads"
            " them.",
            folder,
            left,
            len(prefixes),
        )
    derived = [*spec.hugging_face.derived, *(f"{prefix}*" for prefix in prefixes)]
    names_by_problem = {
        "tensors are missing": [name for name in expected if name not in locations],
        "tensors are not part of the model": [
            name
            for name in locations
            if name not in expected and not any(fnmatchcase(name, each) for each in derived)
        ],
        "tensors have another shape": [
            f"{name} {list(location.shape)!s:.80}, not {list(expected[name])}"
            for name, location in stored.items()
            if location.shape != expected[name]
        ],
        "tensors have an unsupported dtype": [
            f"{name} {location.code}"
            for name, location in stored.items()
            if location.code not in DTYPE_OF_CODE and location.scales is None
        ],
    }
    problems = [line for item in names_by_problem.items() for line in _format_names(*item)]
    if problems:
        raise CheckpointError(
            f"{folder}: the tensors are not those of the model in {CONFIG_FILE}:"
            f" {'; '.join(problems)}."
        )


def _format_names(problem: str, names: Collection[str]) -> list[str]:
    """A list with one line about these names; an empty list if there are none."""
    left = len(names) - MAX_LISTED_NAMES
    rest = f" and {left} more" if left > 0 else ""
    listed = [
        name[:200] if name.isprintable() else ascii(name[:200])
        for name in sorted(names)[:MAX_LISTED_NAMES]
    ]
    return [f"{len(names)} {problem}: {', '.join(listed)}{rest}"] if names else []


def _read_json_table(folder: StorageFolder, name: str) -> dict[str, Any]:
    size = folder.sizes().get(name)
    if size is None:
        _refuse_link(folder, name)
        if ADAPTER_FILE in folder.sizes():
            raise CheckpointError(
                f"{folder}: is a LoRA adapter ({ADAPTER_FILE}), not a whole model.",
                fix="Merge it into its base model first: merge_and_unload() of peft.",
            )
        raise CheckpointError(
            f"{folder}: is not a complete Hugging Face folder: it has no {name}, the last file that"
            " an export writes.",
            fix="Give the folder of a complete download or export: config.json, *.safetensors.",
        )
    try:
        if size > MAX_JSON_BYTES:
            raise ValueError(f"it has {size:,} bytes; the limit is {MAX_JSON_BYTES:,}")
        content = parse_json(folder.read(name))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder}: {name} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{folder}: {name} is not a JSON object.")
    return content


def _refuse_link(folder: StorageFolder, name: str) -> None:
    """Raise CheckpointError if a file is a link, as in Hugging Face's own cache."""
    if Path(folder.path_of(name)).is_symlink():
        raise CheckpointError(
            f"{folder}: {name} is a link; links are not followed.",
            fix=f"Copy the files they point to: cp -rL {folder} FOLDER.",
        )


@contextmanager
def _open_safetensors(folder: StorageFolder, name: str) -> Iterator[Any]:
    """Open a safetensors file by mapping it, so no tensor is read yet."""
    try:
        with safe_open(folder.path_of(name), framework="pt") as file:
            yield file
    except SafetensorError as error:
        if folder.sizes()[name] < 1024 and folder.read(name).startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"{folder}: {name} is a Git LFS pointer, not the weights.",
                fix=f"Run git lfs pull in {folder}.",
            ) from None
        raise CheckpointError(
            f"{folder}: {name} is damaged or truncated: {error}.", fix="Download it again."
        ) from None
    except OSError as error:
        raise CheckpointError(f"{folder}: {name} cannot be read: {error}.") from None


class HuggingFaceReader(BaseStorageReader):
    """A folder as a DCP checkpoint of {"model": …}, in which every tensor is one chunk.

    DCP's own Hugging Face reader cannot map names, reads every safetensors file in the folder,
    listed or not, and cannot fill two names from one tensor, as tied models need.
    """

    def __init__(self, source: HuggingFaceFolder):
        self.source = source

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return Metadata(
            {
                f"model.{name}": TensorStorageMetadata(
                    TensorProperties(tensor.dtype),
                    tensor.shape,
                    [ChunkStorageMetadata(torch.Size([0] * len(tensor.shape)), tensor.shape)],
                )
                for name, tensor in self.source.tensors.items()
            }
        )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            name = item.storage_index.fqn.removeprefix("model.")
            target = planner.resolve_tensor(item).detach()
            target.copy_(self.source.read(name, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)
        return completed_future(None)
