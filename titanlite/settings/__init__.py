"""TOML files and command-line overrides become frozen dataclasses; all problems are reported.

A section is a frozen dataclass; the comment beside or below a field is its documentation, which
`config_reference.py` reads. `Range` bounds a number, and `OneOf` names the keys of a dictionary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from titanlite.errors import ConfigError, UserError, UserErrors
from titanlite.settings.output import CommandLineText, format_value, to_toml
from titanlite.settings.schema import (
    Fraction,
    KeyedSection,
    NotNegative,
    OneOf,
    Positive,
    Range,
    all_keys,
    describe_type,
    type_hints,
)
from titanlite.settings.sources import merge_tables, parse_overrides, read_toml
from titanlite.settings.values import build_dataclass

__all__ = [
    "Fraction",
    "KeyedSection",
    "NotNegative",
    "OneOf",
    "Positive",
    "Range",
    "all_keys",
    "build_dataclass",
    "describe_type",
    "format_value",
    "load_config",
    "merge_tables",
    "raise_together",
    "read_toml",
    "to_toml",
    "type_hints",
]


def load_config(
    schema: type,
    argv: Sequence[str],
    moved: Mapping[str, str] | None = None,
    resolve: Callable[[dict[str, Any]], list[ConfigError]] = lambda table: [],
) -> tuple[Any, list[ConfigError]]:
    """Load the job that argv describes (its TOML, then the overrides), with every problem found.

    `resolve` may complete the table in place, and returns its problems.
    Raises the problems immediately if `job.config_file` cannot be read, or if argv is invalid and
    has no `job.config_file`: without a TOML, every required setting would be reported as well.
    """
    overrides, problems = parse_overrides(argv)
    job = overrides.get("job")
    path = job.get("config_file") if isinstance(job, dict) else None
    if problems and path is None:
        raise_together(problems)
    table: dict[str, Any] = {}
    if isinstance(path, CommandLineText):
        try:
            table = read_toml(path.text)
        except ConfigError as error:
            raise_together([*problems, error])
    table = merge_tables(table, overrides)
    problems += resolve(table)
    config, config_problems = build_dataclass(schema, table, moved)
    return config, problems + config_problems


def raise_together(problems: Sequence[UserError]) -> None:
    """Raise all problems as one error; return if there are none."""
    if problems:
        raise problems[0] if len(problems) == 1 else UserErrors(problems)
