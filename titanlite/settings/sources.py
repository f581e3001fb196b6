"""Sources of settings: TOML files with their includes, and command-line overrides."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from titanlite.errors import ConfigError
from titanlite.files import parse_toml, read_regular_file
from titanlite.settings.output import CommandLineText, format_value

CONFIG_FILE_KEY = "job.config_file"
MAX_INCLUDES = 100  # in all files of a job together
MAX_TOML_BYTES = 4 << 20  # of all files of a job together
TRAIN_CONFIGS = Path(__file__).parents[1] / "train_configs"


def read_toml(
    path: str | Path, key: str = CONFIG_FILE_KEY, shipped: Path = TRAIN_CONFIGS
) -> dict[str, Any]:
    """Read a TOML, by its path or its name in `shipped`, with its includes. Raises ConfigError."""
    return TomlFiles(key, shipped).read(Path(), str(path), ())


class TomlFiles:
    """A TOML file and those it includes; each is read once, however often it is included."""

    def __init__(self, key: str, shipped: Path) -> None:
        self._key = key  # gives the path of the first file
        self._shipped = {path.stem: path for path in sorted(shipped.glob("*.toml"))}
        self._tables: dict[Path, dict[str, Any]] = {}  # merged with what they include
        self._includes, self._bytes = 0, 0

    def read(self, folder: Path, name: str, including: tuple[Path, ...]) -> dict[str, Any]:
        """Read a file; `including` is the chain of files that include it, the outermost first."""
        path = folder / name
        if name in self._shipped and not path.is_file():
            path = self._shipped[name]
        real_path = Path(os.path.realpath(path))  # Path.resolve raises on circular links
        if real_path in including:
            chain = " -> ".join(file.name for file in (*including, path))
            raise ConfigError(f"circular include: {chain}.", fix="Remove one of these includes.")
        if real_path not in self._tables:
            table = self._parse(path, including)
            included = self._read_includes(path, table, (*including, real_path))
            self._tables[real_path] = merge_tables(included, table)
        return self._tables[real_path]

    def _read_includes(
        self, path: Path, table: dict[str, Any], including: tuple[Path, ...]
    ) -> dict[str, Any]:
        """Merge the files that `table` includes, and remove `include` from it."""
        names = table.pop("include", [])
        are_strings = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not are_strings or any("\0" in name for name in names):
            raise ConfigError(
                f"include = {format_value(names)} ({path}): must be a list of paths.",
                fix='Write include = ["base.toml"].',
            )
        self._includes += len(names)
        if self._includes > MAX_INCLUDES:
            raise ConfigError(
                f"include ({path}): the files of this job have more than {MAX_INCLUDES} includes.",
                fix="Merge some of these files.",
            )
        merged: dict[str, Any] = {}
        for name in names:
            merged = merge_tables(merged, self.read(path.parent, name, including))
        return merged

    def _parse(self, path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
        given = f'{self._key} = "{path}"'
        folder = "working directory"
        if including:
            given, folder = f'include = "{path}" ({including[-1]})', "including file"
        try:
            content = read_regular_file(path, MAX_TOML_BYTES - self._bytes)
        except OSError as error:
            reason = error.strerror or error
            if error.errno == errno.EFBIG:  # its text names only what the files before left over
                reason = f"the files of this job have more than {MAX_TOML_BYTES:,} bytes"
            raise ConfigError(
                f"{given}: cannot be read ({reason}).",
                fix=f"Paths are relative to the {folder}. Names: {', '.join(self._shipped)}.",
            ) from None
        self._bytes += len(content)
        try:
            return parse_toml(content.decode())
        except ValueError as error:
            raise ConfigError(
                f"{given}: not valid TOML: {error}.", fix="Correct this place of the file."
            ) from None


def merge_tables(base: dict[str, Any], override: dict[str, Any]) -> dict[str, Any]:
    """Merge nested tables; `override` wins. Lists are replaced, not concatenated."""
    merged = dict(base)
    for key, value in override.items():
        are_tables = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge_tables(merged[key], value) if are_tables else value
    return merged


def parse_overrides(argv: Sequence[str]) -> tuple[dict[str, Any], list[ConfigError]]:
    """Parse `--section.key value` and `--section.key=value`; returns a nested table and errors."""
    table: dict[str, Any] = {}
    problems: list[ConfigError] = []
    arguments = list(argv)
    while arguments:
        argument = arguments.pop(0)
        if not argument.startswith("--"):
            fix = f"Use --{CONFIG_FILE_KEY} {argument}." if argument.endswith(".toml") else ""
            problems.append(
                ConfigError(
                    f"command line: {argument!r}: expected --section.key value.",
                    fix=fix or "See --help for every key.",
                )
            )
            continue
        key, equals, text = argument[2:].partition("=")
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                fix = f"Write --{key} VALUE (true or false for a boolean)."
                problems.append(ConfigError(f"command line: --{key} has no value.", fix=fix))
                continue
            text = arguments.pop(0)
        if re.search(r"[\ud800-\udfff]", key + text):  # bytes that are not UTF-8
            shown = ascii(key)[1:-1]
            problems.append(
                ConfigError(
                    f"command line: the value of --{shown} is not UTF-8.",
                    fix="Give text in UTF-8; rename a file whose name is not.",
                )
            )
        elif not _insert_override(table, key, text):
            problems.append(
                ConfigError(
                    f"command line: --{key}: with another option, one key has a value and keys of"
                    " its own.",
                    fix="Remove one of the two options.",
                )
            )
    return table, problems


def _insert_override(table: dict[str, Any], key: str, text: str) -> bool:
    """Insert a value under a dotted key; False if it is a section, or a part of it has a value."""
    *sections, name = key.split(".")
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):  # --a 1 --a.b 2
            return False
    if isinstance(table.get(name), dict):  # --a.b 2 --a 1
        return False
    table[name] = CommandLineText(text)
    return True
