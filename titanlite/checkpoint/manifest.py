"""The manifest makes a directory a checkpoint: written last, by rename, and true."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titanlite.errors import CheckpointError

NAME = "manifest.json"
FORMAT = 1  # goes up when an older titanlite could misread a newer checkpoint


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, in words and numbers."""

    step: int
    progress: dict[str, Any]  # position, tokens, generators: what goes on from here
    facts: dict[str, Any]  # what must be equal, or asked about, to go on from here
    job: dict[str, Any]  # the effective job it was saved by
    layout: str
    versions: dict[str, str]
    files: dict[str, int]  # name -> bytes
    format: int = FORMAT


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Make a directory whose files are all written a checkpoint, in one rename."""
    text = json.dumps(asdict(manifest), indent=1)
    temporary = folder / f"{NAME}.tmp"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(folder)  # the names of the data files, before the name that vouches for them
    os.replace(temporary, folder / NAME)
    _sync_directory(folder)
    _sync_directory(folder.parent)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint whose files all have the sizes it states, or CheckpointError."""
    try:
        manifest = Manifest(**json.loads((folder / NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: is not a checkpoint: it has no {NAME}.",
            fix="Give the folder of one step, such as outputs/checkpoint/step-100.",
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / NAME}: cannot be read: {error}.") from None
    if manifest.format > FORMAT:
        raise CheckpointError(
            f"{folder}: has format {manifest.format}; this titanlite reads up to {FORMAT}.",
            fix="Use the titanlite that wrote it, or a newer one.",
        )
    for name, size in manifest.files.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            has = "is missing" if found is None else f"has {found} bytes, not {size}"
            raise CheckpointError(f"{folder}: is damaged: {name} {has}.")
    return manifest


def file_sizes(folder: Path) -> dict[str, int]:
    """Every file of a directory but the manifest, with its size in bytes."""
    return {p.name: p.stat().st_size for p in sorted(folder.iterdir()) if not p.name.startswith(NAME)}


def _sync_directory(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
