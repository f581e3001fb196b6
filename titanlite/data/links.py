"""Symbolic links that lead out of a folder the user named."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from titanlite.errors import DataError


def refuse_outward_links(files: Iterable[Path], folder: Path, allow: str) -> None:
    """Raise DataError for the first file in `folder` that is really outside of it.

    `allow`: what the user sets to read it all the same. The folder itself may be a link.
    """
    root = os.path.realpath(folder)
    inside = os.path.join(root, "")
    for file in files:
        real = os.path.realpath(file)
        if not real.startswith(inside) and real != root:
            raise DataError(
                f"{file}: leads through a symbolic link to {real}, outside {folder}.",
                fix=f"Give the file or folder that it leads to, or allow such links: {allow}.",
            )
