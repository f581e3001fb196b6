"""The manifest of a checkpoint: written last and atomically, it makes a folder a checkpoint."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import xxhash

import titanlite
from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.storage import UNFINISHED, StorageFolder

MANIFEST_FILE = "manifest.json"
FORMAT = 4  # incremented when another version of titanlite could misread a checkpoint
MAX_MANIFEST_BYTES = 1 << 26  # the manifest of 405B parameters has 1 MB
MAX_DIMS = 64  # of a tensor, as in PyTorch; multiplying a million sizes takes an hour
DTYPE_OF_NAME = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if type(value) is torch.dtype
}


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of one file of a checkpoint."""

    bytes: int
    hash: str  # xxh3_128 of its content


@dataclass(frozen=True)
class TensorRecord:
    """Global shape, dtype and hash of one tensor of a checkpoint."""

    shape: list[int]
    dtype: str
    hash: str  # sum of the xxh3_64 of the bytes of its chunks, modulo 2^64


@dataclass(frozen=True)
class CheckpointManifest:
    """All of a checkpoint but the values and places of its tensors: the keys of manifest.json."""

    step: int
    progress: dict[str, Any]  # training state to resume from: position, tokens, random generators
    facts: dict[str, Any]  # job properties: see job_properties.py
    job: dict[str, Any]  # effective configuration of the job that saved it
    layout: str
    versions: dict[str, str]
    seconds: float  # from the start of the save to this manifest
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    lease: int = 0  # number of the lease under which it was written; 0: none
    format: int = FORMAT

    def has(self, part: str) -> bool:
        """Whether it contains tensors of `model` or `optimizer`."""
        return any(name.startswith(f"{part}.") for name in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def tensor_bytes(self) -> int:
        return sum(
            DTYPE_OF_NAME[tensor.dtype].itemsize * math.prod(tensor.shape)
            for tensor in self.tensors.values()
        )


def write_checkpoint_manifest(folder: StorageFolder, manifest: CheckpointManifest) -> None:
    """Commit a checkpoint: all other files must be on the disk already."""
    body = asdict(manifest)
    text = json.dumps({**body, "hash": manifest_hash(body)}, indent=1)
    folder.write_atomically(MANIFEST_FILE, text.encode())


def read_checkpoint_manifest(
    folder: StorageFolder, sizes: bool = True, files: bool = True
) -> CheckpointManifest:
    """Read and check the manifest of a checkpoint; with `sizes`, also compare all file sizes.

    With `files` = False, the other files are not even listed: of thousands of ranks, one does it.

    Checks every name, number and type: it may come from a stranger. Raises CheckpointError.
    """
    try:
        file_sizes = folder.sizes() if files else {MANIFEST_FILE: folder.size_of(MANIFEST_FILE)}
        if MANIFEST_FILE not in file_sizes:
            raise FileNotFoundError
        if file_sizes[MANIFEST_FILE] > MAX_MANIFEST_BYTES:
            raise ValueError(
                f"{file_sizes[MANIFEST_FILE]:,} bytes; the limit is {MAX_MANIFEST_BYTES:,}"
            )
        body = parse_json(folder.read(MANIFEST_FILE))
    except FileNotFoundError:
        raise _no_checkpoint_error(folder) from None
    except (OSError, ValueError) as error:
        raise damaged_checkpoint(folder, f"{MANIFEST_FILE} cannot be read ({error})") from None
    if isinstance(body, dict) and "shards" in body:  # the manifest of a corpus
        raise _no_checkpoint_error(folder)
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        saved_format = body.get("format") if isinstance(body, dict) else None
        raise CheckpointError(
            f"{folder}: {MANIFEST_FILE} has format {saved_format!s:.80}; this titanlite reads"
            f" format {FORMAT}.",
            fix="Use the version of titanlite that wrote it.",
        )
    if body.pop("hash", None) != manifest_hash(body):
        raise damaged_checkpoint(folder, f"{MANIFEST_FILE} was changed after it was written")
    manifest = _parse_manifest(folder, body)
    for name, record in manifest.files.items() if files else ():
        size = file_sizes.get(name)
        if size is None:
            raise damaged_checkpoint(folder, f"{name} is missing (links are not followed)")
        if sizes and size != record.bytes:
            raise damaged_checkpoint(folder, f"{name} has {size} bytes, not {record.bytes}")
    return manifest


def _parse_manifest(folder: StorageFolder, body: dict[str, Any]) -> CheckpointManifest:
    """Build a manifest from its JSON table; raises CheckpointError for any wrong key or type."""
    try:
        tables = ("progress", "facts", "job", "versions", "files", "tensors")
        types: dict[str, Any] = dict.fromkeys(tables, dict)
        types |= {"step": int, "layout": str, "seconds": int | float, "lease": int}
        wrong = [key for key, kind in types.items() if not isinstance(body[key], kind)]
        wrong = wrong or [key for key in ("step", "seconds") if not 0 <= body[key] < 1 << 63]
        if wrong:
            raise ValueError(f"{wrong[0]} has the wrong type or value")
        body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
        body["tensors"] = {name: TensorRecord(**record) for name, record in body["tensors"].items()}
        manifest = CheckpointManifest(**body)
        _check_progress(manifest)
        _check_files(manifest)
        _check_tensors(manifest)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{MANIFEST_FILE} is not valid ({error!s:.200})"
        raise damaged_checkpoint(folder, reason) from None
    return manifest


def _check_progress(manifest: CheckpointManifest) -> None:
    """Raise ValueError unless a run can resume from it; empty progress means weights only."""
    progress = manifest.progress
    for key in ("step", "position", "tokens") if progress else ():
        if type(progress[key]) is not int or not 0 <= progress[key] < 1 << 63:
            raise ValueError(f"progress.{key} is not a non-negative integer")


def _check_files(manifest: CheckpointManifest) -> None:
    """Raise ValueError unless every file name stays inside the checkpoint's folder."""
    for name, file in manifest.files.items():
        if not re.fullmatch(r"[\w.-]{1,255}", name, re.ASCII) or name in (".", ".."):
            raise ValueError(f"{name[:80]!r} is not a name of a file in its folder")
        if type(file.bytes) is not int or file.bytes < 0 or type(file.hash) is not str:
            raise ValueError(f"{name} has no valid bytes and hash")


def _check_tensors(manifest: CheckpointManifest) -> None:
    """Raise ValueError for a wrong description, or tensors that have more bytes than the files."""
    for name, tensor in manifest.tensors.items():
        if not name.isprintable() or len(name) > 1000:
            raise ValueError(f"{name[:80]!r} is not a name of a tensor")
        if tensor.dtype not in DTYPE_OF_NAME or type(tensor.hash) is not str:
            raise ValueError(f"{name} has an unknown dtype, or no hash")
        if type(tensor.shape) is not list or len(tensor.shape) > MAX_DIMS:
            raise ValueError(f"{name} has a shape that is not a list of at most {MAX_DIMS} sizes")
        if not all(type(size) is int and 0 <= size < 1 << 63 for size in tensor.shape):
            raise ValueError(f"{name} has a shape with sizes that are not non-negative integers")
    if manifest.tensor_bytes > manifest.bytes:
        raise ValueError(
            f"its tensors have {manifest.tensor_bytes:,} bytes, its files {manifest.bytes:,}"
        )


def check_hashes(folder: StorageFolder, manifest: CheckpointManifest, names: Iterable[str]) -> None:
    """Raise CheckpointError if the content of one of these files differs from its hash."""
    for name in names:
        try:
            actual = folder.hash_of(name)
        except OSError as error:
            raise damaged_checkpoint(folder, f"{name} cannot be read ({error})") from None
        if actual != manifest.files[name].hash:
            raise wrong_hash(folder, name)


def software_versions() -> dict[str, str]:
    return {"titanlite": titanlite.__version__, "torch": torch.__version__}


def _no_checkpoint_error(folder: StorageFolder) -> CheckpointError:
    """The error for a folder without a manifest; the message depends on what it contains."""
    if UNFINISHED in folder.sizes():
        return CheckpointError(
            f"{folder}: is not a checkpoint: its save or removal is not finished."
        )
    if folder.folders() or folder.sizes():
        reason = f"it has no {MANIFEST_FILE}, the last file that a save writes"
    else:
        reason = "the folder does not exist or is empty"
    return CheckpointError(
        f"{folder}: is not a checkpoint: {reason}.",
        fix="Give the folder of one step, such as outputs/checkpoint/step-100. For a checkpoint of"
        " torchtitan (DCP), give its Hugging Face export, with checkpoint.initial_load_in_hf.",
    )


def damaged_checkpoint(folder: StorageFolder, reason: str) -> CheckpointError:
    """The error for a checkpoint whose files are not as they were written."""
    return CheckpointError(f"{folder}: is damaged: {reason}.")


def wrong_hash(folder: StorageFolder, name: str) -> CheckpointError:
    """The error for a file whose content is not what its manifest records."""
    return damaged_checkpoint(folder, f"{name} is not what was written (its hash differs)")


def manifest_hash(body: dict[str, Any]) -> str:
    """xxh3_128 of a manifest's JSON table without its `hash` key."""
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
