"""Packages that only some recipes or options need, installed with an extra of titanlite."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from titanlite.errors import ConfigError


def import_extra(module: str, extra: str, needed_by: str) -> Any:
    """Import a module; raises ConfigError with the command that installs it."""
    try:
        return import_module(module)
    except ImportError as missing:
        raise ConfigError(
            f"{needed_by} needs {missing.name or module}, which is not installed.",
            fix=f"pip install 'titanlite[{extra}]'",
        ) from missing
