"""What a checkpoint says of its model and tokenizer; it may be foreign, so it is checked first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from titanlite.checkpoint.huggingface import check_size, parameters_of
from titanlite.checkpoint.manifest import (
    CheckpointManifest,
    FileRecord,
    check_hashes,
    read_checkpoint_manifest,
)
from titanlite.data import Tokenizer, open_tokenizer
from titanlite.data.tokenizer import (
    BYTES,
    MAX_TOKENIZER_BYTES,
    TOKENIZER_FILES,
    tokenizer_from_bytes,
)
from titanlite.errors import CheckpointError, ConfigError
from titanlite.models import FAMILIES, ModelConfig, ModelSizes, ModelSpec
from titanlite.settings import build_dataclass, describe_type
from titanlite.storage import StorageFolder

T = TypeVar("T")


@dataclass(frozen=True)
class SavedModel:
    """A checkpoint's model, without its weights, and what is needed to write text with it."""

    place: StorageFolder
    manifest: CheckpointManifest
    spec: ModelSpec
    sizes: ModelSizes  # the family's own
    tokenizer: Tokenizer | None  # None: it was trained on ids alone
    bos: bool  # every document it was trained on began with BOS
    documents_apart: bool  # attention.mask = "document"
    seq_len: int  # tokens it was trained on at once; 0: not known


def read_saved_model(place: StorageFolder, tokenizer: str | None = None) -> SavedModel:
    """The model and tokenizer of a `step-N` folder; raises CheckpointError or DataError.

    `tokenizer`: the path of a file to use where the checkpoint holds no copy of it.
    """
    manifest = read_checkpoint_manifest(place)
    spec, sizes = describe_saved_model(place, manifest)
    opened = _open_tokenizer(place, manifest, tokenizer)
    if opened and opened.vocab_size > sizes.vocab_size:
        raise CheckpointError(
            f'{place}: the tokenizer "{opened.name}" has {opened.vocab_size} ids, and the model'
            f" knows {sizes.vocab_size}.",
            fix="Name the tokenizer it was trained with: --tokenizer PATH.",
        )
    seq_len = job_value(place, manifest, "training", "seq_len", int) or 0
    bos = manifest.facts.get("data.bos") is True
    apart = manifest.facts.get("attention.mask") == "document"
    return SavedModel(place, manifest, spec, sizes, opened, bos, apart, seq_len)


def write_files(place: StorageFolder, contents: Mapping[str, bytes]) -> dict[str, FileRecord]:
    """Write small files of a checkpoint, before its manifest that lists them."""
    written = {}
    for name, content in contents.items():
        with place.writing(name) as stream:
            stream.write(content)
        written[name] = FileRecord(stream.bytes, stream.hash)
    return written


def describe_saved_model(
    checkpoint: StorageFolder, manifest: CheckpointManifest
) -> tuple[ModelSpec, ModelSizes]:
    """The family and shape of a checkpoint's model, whose weights it holds.

    Raises CheckpointError before anything is built where the model is not that of its tensors.
    """
    table = manifest.job.get("model")
    model, problems = build_dataclass(ModelConfig, table if isinstance(table, dict) else {})
    if problems or not isinstance(table, dict):
        why = "; ".join(problem.message for problem in problems) or "it names no model"
        raise CheckpointError(f"{checkpoint}: its job is not valid: {why}")
    spec = FAMILIES[model.name]
    try:
        sizes = spec.sizes_of(model)
    except ConfigError as error:
        raise CheckpointError(f"{checkpoint}: its job is not valid: {error.message}") from None
    check_size(checkpoint, spec, sizes, len(manifest.tensors))
    wrong = [
        name
        for name, size in parameters_of(spec, sizes).items()
        if (record := manifest.tensors.get(f"model.{name}")) is None or record.shape != list(size)
    ]
    if wrong:
        raise CheckpointError(
            f"{checkpoint}: {len(wrong)} tensors of the model that it describes are missing or"
            f" have another shape: {', '.join(wrong[:4])}."
        )
    return spec, sizes


def job_value(
    checkpoint: StorageFolder, manifest: CheckpointManifest, section: str, key: str, kind: type[T]
) -> T | None:
    """A setting of the job that saved a checkpoint, or None; raises CheckpointError."""
    table = manifest.job.get(section, {})
    value = table.get(key) if isinstance(table, dict) else table
    if value is not None and type(value) is not kind:
        raise CheckpointError(
            f"{checkpoint}: its job is not valid: {section}.{key} is not {describe_type(kind)}."
        )
    return value


def _open_tokenizer(
    place: StorageFolder, manifest: CheckpointManifest, path: str | None
) -> Tokenizer | None:
    """The copy in the checkpoint, or the file at `path`; the one that it was trained with.

    The path that the manifest records is never opened: it is relative to another working directory,
    and in a foreign checkpoint it could name any file.
    """
    trained_with = manifest.facts.get("data.tokenizer")
    recorded = job_value(place, manifest, "data", "tokenizer", str)
    copies = [name for name in TOKENIZER_FILES if name in manifest.files]
    if path is not None:
        opened = open_tokenizer(path)
    elif copies:
        opened = tokenizer_from_bytes(
            _read_copy(place, manifest, copies[0]), f"{place}/{copies[0]}"
        )
    elif recorded == BYTES:
        opened = open_tokenizer(BYTES)
    elif recorded is None and trained_with is None:
        return None
    else:
        raise CheckpointError(
            f"{place}: holds no copy of its tokenizer, whose file was {recorded!r:.200}.",
            fix="Name that file, if you trust it: --tokenizer PATH.",
        )
    if trained_with not in (None, opened.fingerprint):
        copy = "leave --tokenizer out, because the checkpoint holds a copy; or " if copies else ""
        raise CheckpointError(
            f"{place}: was trained with the tokenizer {trained_with!s:.32}; the fingerprint of"
            f' "{opened.name}" is {opened.fingerprint}, so its ids mean something else.',
            fix=f"Use that one: {copy}--tokenizer PATH.",
        )
    return opened


def _read_copy(place: StorageFolder, manifest: CheckpointManifest, name: str) -> bytes:
    if manifest.files[name].bytes > MAX_TOKENIZER_BYTES:
        raise CheckpointError(f"{place}: {name} has more than {MAX_TOKENIZER_BYTES:,} bytes.")
    check_hashes(place, manifest, [name])
    return place.read(name)
