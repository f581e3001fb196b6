"""What packages and modules from outside of titanlite add to its tables."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from titanlite.errors import ConfigError

TABLES = {  # group of entry points -> its table; as text, because to import one takes seconds
    "titanlite.families": "titanlite.models:FAMILIES",
    "titanlite.optimizers": "titanlite.optim:OPTIMIZERS",
    "titanlite.schedules": "titanlite.optim:LR_DECAYS",
    "titanlite.formats": "titanlite.data:FORMATS",
    "titanlite.sinks": "titanlite.metrics:SINKS",
    "titanlite.actions": "titanlite.job.actions:ACTIONS",
    "titanlite.parallel_styles": "titanlite.parallelize.tensor:TENSOR_PARALLEL_ROLES",
}


def load_extensions(argv: Sequence[str]) -> list[str]:
    """Load the entry points of installed packages, then the modules of `--job.import A,B`.

    Returns `argv` without this option. It is no setting, because TOMLs may come from strangers and
    must run no code. Call this before a TOML is read. Raises ConfigError.
    """
    installed = entry_points()
    for group, place in TABLES.items():
        for point in installed.select(group=group):
            package = f"{point.dist.name} {point.dist.version}: " if point.dist else ""
            given = f"{package}entry point {point.name} = {point.value} of {group}"
            value = _load(point.load, given, "Correct or uninstall this package.")
            if pkgutil.resolve_name(place).setdefault(point.name, value) is not value:
                raise ConfigError(f"{given}: the name is taken.", fix="Uninstall this package.")
    rest: list[str] = []
    arguments = iter(argv)
    for argument in arguments:
        option, equals, names = argument.partition("=")
        if option != "--job.import":  # what follows "--" is for another program
            rest += [argument, *arguments] if argument == "--" else [argument]
            continue
        sys.path.append(os.getcwd())  # which torchrun does not add
        for name in (names if equals else next(arguments, "")).split(","):
            fix = "Give a module that is installed, in PYTHONPATH or in the working directory."
            _load(partial(import_module, name), f"--job.import {name}", fix)
    return rest


def _load(load: Callable[[], Any], given: str, fix: str) -> Any:
    try:
        return load()
    except Exception as error:  # whatever a foreign module raises
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{given}: cannot be loaded ({reason}).", fix=fix) from error
