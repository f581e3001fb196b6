"""Reject symbolic links that lead out of the folder that the user gave."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from titanlite.errors import DataError


def refuse_outward_links(files: Iterable[Path], folder: Path, allow: str) -> None:
    """Raise DataError for the first of `files` whose real path is outside `folder`.

    The folder itself may be a link. `allow` is the setting or option that permits outward links,
    for the error message.
    """
    root = os.path.realpath(folder)
    root_prefix = os.path.join(root, "")
    for file in files:
        real = os.path.realpath(file)
        if not real.startswith(root_prefix) and real != root:
            raise DataError(
                f"{file}: leads through a symbolic link to {real}, outside {folder}.",
                fix=f"Give the path that the link points to, or allow such links: {allow}.",
            )
