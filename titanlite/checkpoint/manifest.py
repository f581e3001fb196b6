"""The manifest makes a folder a checkpoint: written last, at once, and true."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import xxhash

from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.storage import UNFINISHED, StorageFolder

NAME = "manifest.json"
FORMAT = 3  # goes up when another titanlite could misread a checkpoint
READABLE = (2, 3)  # 2 has no chunks.json: see chunks.py
MOST_BYTES = 1 << 26  # 405B parameters: 1 MB
MOST_DIMS = 64  # of a tensor, as in PyTorch; a product of a million numbers takes an hour
DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype}


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint."""

    bytes: int
    hash: str  # xxh3_128 of its content


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a checkpoint, whole."""

    shape: list[int]
    dtype: str
    hash: str  # sum of the xxh3_64 of its pieces' bytes, modulo 2^64


@dataclass(frozen=True)
class CheckpointManifest:
    """What a checkpoint holds, in words and numbers."""

    step: int
    progress: dict[str, Any]  # position, tokens, generators: what goes on from here
    facts: dict[str, Any]  # what must be equal, or allowed to change by name, to go on from here
    job: dict[str, Any]  # the effective job it was saved by
    layout: str
    versions: dict[str, str]
    seconds: float  # from the start of writing to this manifest
    files: dict[str, FileRecord]
    tensors: dict[str, TensorRecord]
    lease: int = 0  # number of the lease that it was written under; 0: none
    format: int = FORMAT

    def has(self, part: str) -> bool:
        """Whether it holds `model`, or `optimizer`."""
        return any(name.startswith(f"{part}.") for name in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())

    @property
    def tensor_bytes(self) -> int:
        return sum(DTYPES[t.dtype].itemsize * math.prod(t.shape) for t in self.tensors.values())


def write_checkpoint_manifest(place: StorageFolder, manifest: CheckpointManifest) -> None:
    """Make a folder whose files are all on the disk a checkpoint, at once."""
    body = asdict(manifest)
    text = json.dumps({**body, "hash": _hash(body)}, indent=1)
    place.write_atomically(NAME, text.encode())


def read_checkpoint_manifest(place: StorageFolder, sizes: bool = True) -> CheckpointManifest:
    """The manifest of a checkpoint, or CheckpointError; its files have the `sizes` it states.

    Every name, number and type in it is checked: it may come from somebody else.
    """
    try:
        there = place.sizes()
        if NAME not in there:
            raise FileNotFoundError
        if there[NAME] > MOST_BYTES:
            raise ValueError(f"{there[NAME]:,} bytes, of at most {MOST_BYTES:,}")
        body = parse_json(place.read(NAME))
    except FileNotFoundError:
        raise _missing(place) from None
    except (OSError, ValueError) as error:
        raise _damaged(place, f"{NAME} cannot be read ({error})") from None
    if not isinstance(body, dict) or body.get("format") not in READABLE:
        found = body.get("format") if isinstance(body, dict) else None
        raise CheckpointError(
            f"{place}: {NAME} has format {found!s:.80}; this titanlite reads"
            f" {' and '.join(map(str, READABLE))}.",
            fix="Use the titanlite that wrote it.",
        )
    if body.pop("hash", None) != _hash(body):
        raise _damaged(place, f"{NAME} was changed after it was written")
    manifest = _checked(place, body)
    for name, record in manifest.files.items():
        found = there.get(name)
        if found is None:
            raise _damaged(place, f"{name} is missing (links are not followed)")
        if sizes and found != record.bytes:
            raise _damaged(place, f"{name} has {found} bytes, not {record.bytes}")
    return manifest


def _checked(place: StorageFolder, body: dict[str, Any]) -> CheckpointManifest:
    """The manifest that a table describes; CheckpointError where it describes none."""
    kinds = {"step": int, "layout": str, "seconds": (int, float), "format": int}
    tables = ("progress", "facts", "job", "versions", "files", "tensors")
    try:
        wrong = [key for key in tables if type(body[key]) is not dict]
        wrong += [key for key, kind in kinds.items() if not isinstance(body[key], kind)]
        wrong += [] if isinstance(body.get("lease", 0), int) else ["lease"]
        if wrong or body["step"] < 0:
            raise ValueError(f"{wrong[0] if wrong else 'step'} has the wrong type or value")
        body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
        body["tensors"] = {name: TensorRecord(**record) for name, record in body["tensors"].items()}
        manifest = CheckpointManifest(**body)
        _check_progress(manifest)
        _check_records(manifest)
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(place, f"{NAME} is not a manifest ({error!s:.200})") from None
    return manifest


def _check_progress(manifest: CheckpointManifest) -> None:
    """Raise ValueError unless a run can go on from it; one without progress has weights alone."""
    if not 0 <= manifest.seconds < 1e9:
        raise ValueError("seconds is out of range")
    progress = manifest.progress
    for key in ("step", "position", "tokens") if progress else ():
        if type(progress[key]) is not int or not 0 <= progress[key] < 1 << 63:
            raise ValueError(f"progress.{key} is not a whole number")


def _check_records(manifest: CheckpointManifest) -> None:
    """Raise ValueError unless the files are in the folder and large enough for the tensors.

    The second bounds the memory that the tensors can take by what is really on the disk.
    """
    for name, file in manifest.files.items():
        if not re.fullmatch(r"[\w.-]{1,255}", name, re.ASCII) or name in (".", ".."):
            raise ValueError(f"{name[:80]!r} is not a name of a file in its folder")
        if type(file.bytes) is not int or file.bytes < 0 or type(file.hash) is not str:
            raise ValueError(f"{name} has no bytes and hash")
    for name, tensor in manifest.tensors.items():
        sizes = tensor.shape
        if not name.isprintable() or len(name) > 1000:
            raise ValueError(f"{name[:80]!r} is not a name of a tensor")
        if tensor.dtype not in DTYPES or type(tensor.hash) is not str:
            raise ValueError(f"{name} has an unknown dtype, or no hash")
        if type(sizes) is not list or len(sizes) > MOST_DIMS:
            raise ValueError(f"{name} has a shape that is no list of at most {MOST_DIMS} sizes")
        if not all(type(n) is int and 0 <= n < 1 << 63 for n in sizes):
            raise ValueError(f"{name} has a shape that is not whole numbers")
    if manifest.tensor_bytes > manifest.bytes:
        raise ValueError(
            f"its tensors have {manifest.tensor_bytes:,} bytes, its files {manifest.bytes:,}"
        )


def check_hashes(place: StorageFolder, manifest: CheckpointManifest, names: Iterable[str]) -> None:
    """Raise CheckpointError where the content of one of these files is not what was written."""
    for name in names:
        try:
            found = place.hash_of(name)
        except OSError as error:
            raise _damaged(place, f"{name} cannot be read ({error})") from None
        if found != manifest.files[name].hash:
            raise _damaged(place, f"{name} does not hold what was written (its hash differs)")


def versions() -> dict[str, str]:
    """What a checkpoint is written by."""
    try:
        own = version("titanlite")
    except PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"titanlite": own, "torch": torch.__version__}


def _missing(place: StorageFolder) -> CheckpointError:
    if UNFINISHED in place.sizes():
        return CheckpointError(f"{place}: is not a checkpoint: writing it was cut short.")
    if place.folders() or place.sizes():
        return CheckpointError(
            f"{place}: is not a checkpoint: it has no {NAME}, which is the last file of one.",
            fix="Give the folder of one step, such as outputs/checkpoint/step-100.",
        )
    return CheckpointError(
        f"{place}: is not a checkpoint: there is no such folder, or nothing in it.",
        fix="Give the folder of one step, such as outputs/checkpoint/step-100.",
    )


def _damaged(place: StorageFolder, what: str) -> CheckpointError:
    return CheckpointError(f"{place}: is damaged: {what}.")


def _hash(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
