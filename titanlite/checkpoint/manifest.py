"""The manifest makes a folder a checkpoint: written last, at once, and true."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
import xxhash

from titanlite.checkpoint.place import Place
from titanlite.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 2  # goes up when another titanlite could misread a checkpoint
UNFINISHED = "unfinished"  # the first file of a folder, gone once it has a manifest


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
class Manifest:
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
    format: int = FORMAT

    def has(self, part: str) -> bool:
        """Whether it holds `model`, or `optimizer`."""
        return any(name.startswith(f"{part}.") for name in self.tensors)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def write_manifest(place: Place, manifest: Manifest) -> None:
    """Make a folder whose files are all on the disk a checkpoint, at once."""
    body = asdict(manifest)
    text = json.dumps({**body, "hash": _hash(body)}, indent=1)
    place.write_at_once(NAME, text.encode())


def read_manifest(place: Place, sizes: bool = True) -> Manifest:
    """The manifest of a checkpoint, or CheckpointError; its files have the `sizes` it states."""
    try:
        body = json.loads(place.read(NAME))
    except FileNotFoundError:
        raise _missing(place) from None
    except (OSError, ValueError) as error:
        raise _damaged(place, f"{NAME} cannot be read ({error})") from None
    if not isinstance(body, dict) or body.get("format") != FORMAT:
        found = body.get("format") if isinstance(body, dict) else None
        raise CheckpointError(
            f"{place}: {NAME} has format {found}; this titanlite reads {FORMAT}.",
            fix="Use the titanlite that wrote it.",
        )
    if body.pop("hash", None) != _hash(body):
        raise _damaged(place, f"{NAME} was changed after it was written")
    try:
        body["files"] = {name: FileRecord(**record) for name, record in body["files"].items()}
        body["tensors"] = {name: TensorRecord(**record) for name, record in body["tensors"].items()}
        manifest, there = Manifest(**body), place.sizes() if sizes else {}
    except (KeyError, TypeError, AttributeError) as error:
        raise _damaged(place, f"{NAME} is not a manifest ({error!r})") from None
    except OSError as error:
        raise _damaged(place, f"cannot be listed ({error})") from None
    for name, record in manifest.files.items() if sizes else ():
        found = there.get(name)
        if found != record.bytes:
            has = "is missing" if found is None else f"has {found} bytes, not {record.bytes}"
            raise _damaged(place, f"{name} {has}")
    return manifest


def check_hashes(place: Place, manifest: Manifest, names: Iterable[str]) -> None:
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


def _missing(place: Place) -> CheckpointError:
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


def _damaged(place: Place, what: str) -> CheckpointError:
    return CheckpointError(f"{place}: is damaged: {what}.")


def _hash(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128(json.dumps(body, sort_keys=True).encode()).hexdigest()
