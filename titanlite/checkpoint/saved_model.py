"""The model and tokenizer of a checkpoint, checked because it may come from a stranger."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import torch

from titanlite.checkpoint.manifest import CheckpointManifest, check_hashes, read_checkpoint_manifest
from titanlite.data import Tokenizer, open_tokenizer
from titanlite.data.open_tokenizer import MAX_TOKENIZER_BYTES, TOKENIZER_FILES, tokenizer_from_bytes
from titanlite.data.tokenizer import BYTES
from titanlite.errors import CheckpointError, ConfigError
from titanlite.models import FAMILIES, ModelConfig, ModelSizes, ModelSpec
from titanlite.settings import build_dataclass, describe_type
from titanlite.storage import StorageFolder

T = TypeVar("T")

MAX_PARAMETERS = 1 << 50


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model without its weights, and the settings to generate text with it."""

    folder: StorageFolder
    manifest: CheckpointManifest
    spec: ModelSpec
    sizes: ModelSizes  # the dataclass of the model family
    tokenizer: Tokenizer | None  # None: the model was trained on token ids only
    bos: bool  # every training document began with BOS
    document_mask: bool  # trained with attention.mask = "document"
    seq_len: int  # tokens in a training sequence; 0: not known


def read_saved_model(folder: StorageFolder, tokenizer: str | None = None) -> SavedModel:
    """The model and tokenizer of a `step-N` folder; raises CheckpointError or DataError.

    `tokenizer`: path of a tokenizer file, for a checkpoint without a copy of its own.
    """
    manifest = read_checkpoint_manifest(folder)
    spec, sizes = describe_saved_model(folder, manifest)
    opened = _open_saved_tokenizer(folder, manifest, tokenizer)
    if opened and opened.vocab_size > sizes.vocab_size:
        raise CheckpointError(
            f'{folder}: the tokenizer "{opened.name}" has {opened.vocab_size} ids, but the model'
            f" only {sizes.vocab_size}.",
            fix="Give the tokenizer that the model was trained with: --tokenizer PATH.",
        )
    return SavedModel(
        folder,
        manifest,
        spec,
        sizes,
        opened,
        bos=manifest.facts.get("data.bos") is True,
        document_mask=manifest.facts.get("attention.mask") == "document",
        seq_len=_saved_setting(folder, manifest, "training", "seq_len", int) or 0,
    )


def describe_saved_model(
    folder: StorageFolder, manifest: CheckpointManifest
) -> tuple[ModelSpec, ModelSizes]:
    """The family and sizes of a checkpoint's model.

    Raises CheckpointError, before anything is built, unless all its tensors are in the checkpoint.
    """
    spec, sizes = read_saved_sizes(folder, manifest)
    if manifest.facts.get("lora"):
        raise CheckpointError(
            f"{folder}: has only the adapters of LoRA, not the model.",
            fix="Merge them into their base first: python -m titanlite_post adapters merge.",
        )
    check_model_size(folder, spec, sizes, len(manifest.tensors))
    wrong = [
        name
        for name, shape in parameter_shapes(spec, sizes).items()
        if (record := manifest.tensors.get(f"model.{name}")) is None or record.shape != list(shape)
    ]
    if wrong:
        raise CheckpointError(
            f"{folder}: {len(wrong)} tensors of the model that it describes are missing or"
            f" have another shape: {', '.join(wrong[:4])}."
        )
    return spec, sizes


def read_saved_sizes(
    folder: StorageFolder, manifest: CheckpointManifest
) -> tuple[ModelSpec, ModelSizes]:
    """The family and sizes in a manifest; raises CheckpointError if they are not valid."""
    table = manifest.job.get("model")
    model, problems = build_dataclass(ModelConfig, table if isinstance(table, dict) else {})
    if problems or not isinstance(table, dict):
        reason = "; ".join(problem.message for problem in problems) or "it has no model section"
        raise _invalid_job(folder, reason)
    spec = FAMILIES[model.name]
    try:
        sizes = spec.sizes_of(model)
    except ConfigError as error:
        raise _invalid_job(folder, error.message) from None
    return spec, sizes


def _saved_setting(
    folder: StorageFolder, manifest: CheckpointManifest, section: str, key: str, kind: type[T]
) -> T | None:
    """A setting of the job that saved a checkpoint, or None; raises CheckpointError."""
    table = manifest.job.get(section, {})
    value = table.get(key) if isinstance(table, dict) else table
    if value is not None and type(value) is not kind:
        raise _invalid_job(folder, f"{section}.{key} is not {describe_type(kind)}")
    return value


def _invalid_job(folder: StorageFolder, reason: str) -> CheckpointError:
    return CheckpointError(f"{folder}: the job in its manifest is not valid: {reason}.")


def _open_saved_tokenizer(
    folder: StorageFolder, manifest: CheckpointManifest, path: str | None
) -> Tokenizer | None:
    """The tokenizer that the model was trained with: the checkpoint's copy, or the file at `path`.

    The path in the manifest is never opened: it is relative to another working directory, and in a
    checkpoint from a stranger it could name any file.
    """
    fingerprint = manifest.facts.get("data.tokenizer")
    saved_path = _saved_setting(folder, manifest, "data", "tokenizer", str)
    copies = [name for name in TOKENIZER_FILES if name in manifest.files]
    if path is not None:
        opened = open_tokenizer(path)
    elif copies:
        content = _read_tokenizer_copy(folder, manifest, copies[0])
        opened = tokenizer_from_bytes(content, f"{folder}/{copies[0]}")
    elif saved_path == BYTES:
        opened = open_tokenizer(BYTES)
    elif saved_path is None and fingerprint is None:
        return None
    else:
        raise CheckpointError(
            f"{folder}: has no copy of its tokenizer, whose path was {saved_path!r:.200}.",
            fix="Give that file, if you trust it: --tokenizer PATH.",
        )
    if fingerprint not in (None, opened.fingerprint):
        copy = "omit --tokenizer, because the checkpoint has a copy; or " if path and copies else ""
        raise CheckpointError(
            f"{folder}: was trained with the tokenizer {fingerprint!s:.32}; the fingerprint of"
            f' "{opened.name}" is {opened.fingerprint}, so its ids have other meanings.',
            fix=f"Use the original one: {copy}--tokenizer PATH.",
        )
    return opened


def _read_tokenizer_copy(folder: StorageFolder, manifest: CheckpointManifest, name: str) -> bytes:
    if manifest.files[name].bytes > MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{folder}: {name} has more than {MAX_TOKENIZER_BYTES:,} bytes.")
    check_hashes(folder, manifest, [name])
    return folder.read(name)


def check_model_size(
    folder: StorageFolder, spec: ModelSpec, sizes: ModelSizes, tensors: int
) -> None:
    """Raise CheckpointError for a model that a folder with `tensors` tensors cannot contain.

    To be called before the model is built, which takes memory and time for each layer.
    """
    layers = sizes.n_layers
    if layers > tensors:
        raise CheckpointError(
            f"{folder}: describes a model of {layers:,} layers, but contains only {tensors:,}"
            " tensors."
        )
    if problems := [problem.message for problem in spec.find_size_problems(sizes)]:
        raise CheckpointError(f"{folder}: describes an impossible model: {' '.join(problems)}")
    try:
        parameters = spec.count_parameters(sizes)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: {error.message}") from None
    if parameters > MAX_PARAMETERS:
        raise CheckpointError(
            f"{folder}: describes a model of {parameters:.1e} parameters; the limit is"
            f" {float(MAX_PARAMETERS):.1e}."
        )


def parameter_shapes(spec: ModelSpec, sizes: ModelSizes) -> dict[str, torch.Size]:
    """Name and shape of every parameter; tied parameters are listed under both names."""
    with torch.device("meta"):
        return {name: tensor.shape for name, tensor in spec.build(sizes).state_dict().items()}


def buffer_names(spec: ModelSpec, sizes: ModelSizes) -> set[str]:
    """Names of the buffers, which are in fp32 in every precision.

    Rounded to bfloat16, selection biases that many small updates have moved select other experts.
    """
    with torch.device("meta"):
        return {name for name, _ in spec.build(sizes).named_buffers()}
