"""TOML files and command-line overrides become frozen dataclasses, or every problem at once.

A section is a frozen dataclass; the comment beside a field is its meaning (see `reference.py`). Types are checked to their depth; `Range` bounds a number, `Supported` says which of the values
that the schema knows are available.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union

from titanlite.errors import ConfigError, UserErrors
from titanlite.files import parse_toml, read_regular_file

CONFIG_FILE = "job.config_file"
_LEAST_INT, _MOST_INT = -(2**63), 2**63 - 1  # as TOML promises
MOST_INCLUDES = 100  # of one job, in all its files
MOST_TOML_BYTES = 4 << 20  # of one job, in all its files


@dataclass(frozen=True)
class Range:
    """The bounds of a number, both included; `also` are values allowed outside them."""

    low: float = -math.inf
    high: float = math.inf
    also: tuple[float, ...] = ()

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high or value in self.also

    def __str__(self) -> str:
        bounds = [f"at least {self.low:g}"] if self.low > -math.inf else []
        bounds += [f"at most {self.high:g}"] if self.high < math.inf else []
        return " and ".join(bounds) + "".join(f", or {v:g}" for v in self.also)


@dataclass(frozen=True)
class Supported:
    """The values whose feature exists; the schema knows the others so that it can say so."""

    values: tuple
    feature: str


@dataclass(frozen=True)
class OneOf:
    """The names that a string may have, such as the keys of an extension point's dictionary.

    `names` is called when a value is checked, so the dictionary may be defined after the section.
    """

    names: Callable[[], Iterable[str]]


Positive = Annotated[int, Range(1)]
NotNegative = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


@dataclass(frozen=True)
class _Typed:
    """A value as typed on the command line, to be read as whatever type its key has."""

    text: str


class _Refused(Exception):
    """A value does not fit its type: says what is allowed."""


# --- from files and argv to one nested table -----------------------------------------------------


def read_toml(path: str | Path) -> dict[str, Any]:
    """The table of a TOML file, with what it includes beneath it; raises ConfigError."""
    return _TomlFiles().read(Path(path), ())


class _TomlFiles:
    """The TOML files of one job; each is read once, however often it is included."""

    def __init__(self):
        self._tables: dict[Path, dict[str, Any]] = {}  # with what they include beneath them
        self._includes, self._bytes = 0, 0

    def read(self, path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
        place = Path(os.path.realpath(path))  # Path.resolve raises where links go in a circle
        if place in including:
            chain = " -> ".join(p.name for p in (*including, path))
            raise ConfigError(f"include goes in a circle: {chain}.", fix="Remove one of them.")
        if place not in self._tables:
            table = self._parse(path, including)
            self._tables[place] = merge_tables(self._below(path, table, (*including, place)), table)
        return self._tables[place]

    def _below(
        self, path: Path, table: dict[str, Any], including: tuple[Path, ...]
    ) -> dict[str, Any]:
        """What a file includes, merged; takes `include` out of its table."""
        names = table.pop("include", [])
        paths = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not paths or any("\0" in name for name in names):
            raise ConfigError(f"include = {format_value(names)} ({path}): must be a list of paths.")
        self._includes += len(names)
        if self._includes > MOST_INCLUDES:
            raise ConfigError(
                f"include ({path}): the files of this job have more than {MOST_INCLUDES} includes.",
                fix="Write what they say into fewer files.",
            )
        below: dict[str, Any] = {}
        for name in names:
            below = merge_tables(below, self.read(path.parent / name, including))
        return below

    def _parse(self, path: Path, including: tuple[Path, ...]) -> dict[str, Any]:
        try:
            content = read_regular_file(path, MOST_TOML_BYTES - self._bytes)
        except OSError as error:
            by = f", included by {including[-1]}" if including else ""
            reason = error.strerror or error
            raise ConfigError(
                f'{CONFIG_FILE} = "{path}"{by}: cannot be read ({reason}).',
                fix="Give the path of a TOML file, relative to the working directory"
                " (an include: to the including file).",
            ) from None
        self._bytes += len(content)
        try:
            return parse_toml(content.decode())
        except ValueError as error:
            raise ConfigError(f'{CONFIG_FILE} = "{path}": not valid TOML: {error}.') from None


def merge_tables(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """Both tables in one; where they disagree, `above` wins. Lists are replaced, not joined."""
    out = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(out.get(key), dict)
        out[key] = merge_tables(out[key], value) if both else value
    return out


def parse_overrides(argv: Sequence[str]) -> tuple[dict[str, Any], list[ConfigError]]:
    """`--section.key value` and `--section.key=value` as a nested table, and what was not that."""
    table: dict[str, Any] = {}
    problems: list[ConfigError] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            fix = f"Did you mean --{CONFIG_FILE} {word}?" if word.endswith(".toml") else ""
            problems.append(
                ConfigError(f"{word!r} on the command line: expected --section.key value.", fix=fix)
            )
            continue
        key, equals, text = word[2:].partition("=")
        if not equals:
            if not words or words[0].startswith("--"):
                problems.append(
                    ConfigError(
                        f"--{key} on the command line: has no value.",
                        fix=f"Write --{key} VALUE (true or false for a switch).",
                    )
                )
                continue
            text = words.pop(0)
        place = table
        *sections, leaf = key.split(".")
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):  # --a 1 --a.b 2
                break
        else:
            place[leaf] = _Typed(text)
            continue
        problems.append(ConfigError(f"--{key} on the command line: contradicts an earlier one."))
    return table, problems


# --- from a table to a dataclass -----------------------------------------------------------------


def build_dataclass(
    schema: type, table: dict[str, Any], moved: dict[str, str] | None = None
) -> tuple[Any, list[ConfigError]]:
    """The dataclass a table describes, and every problem of the table.

    A key with a problem keeps its default, so that the rules about other keys can still be asked.
    `moved` maps a key that another version knew ("training.seed", or a whole "section") to a
    sentence that says where it went.
    """
    problems: list[ConfigError] = []
    value = _build(schema, table, "", problems, moved or {}, all_keys(schema))
    return value, problems


def _build(schema, table, prefix, problems, moved, every_key):
    hints, values = type_hints(schema), {}
    for name, given in table.items():
        key = f"{prefix}{name}"
        if name not in hints:
            problems.append(_unknown(key, given, prefix, hints, moved, every_key))
            continue
        hint = hints[name]
        if dataclasses.is_dataclass(hint):
            if isinstance(given, dict):
                values[name] = _build(hint, given, f"{key}.", problems, moved, every_key)
            else:
                problems.append(
                    ConfigError(f"{key} = {format_value(given)}: must be a table.", keys=(key,))
                )
            continue
        try:
            values[name] = _fit(given, hint)
        except _Refused as refusal:
            problems.append(ConfigError(f"{key} = {format_value(given)}: {refusal}", keys=(key,)))
    for field in dataclasses.fields(schema):
        required = field.default is field.default_factory is dataclasses.MISSING
        if required and field.name not in table:
            key = f"{prefix}{field.name}"
            problems.append(ConfigError(f"{key}: missing; it has no default.", keys=(key,)))
        if required and field.name not in values:
            values[field.name] = None
    return schema(**values)


def _unknown(key, given, prefix, hints, moved, every_key) -> ConfigError:
    for place in (key, key.partition(".")[0]):
        if place in moved:
            said = f"{key} = {format_value(given)}" if not isinstance(given, dict) else f"[{key}]"
            return ConfigError(f"{said}: {moved[place]}", keys=(key,))
    name = key[len(prefix) :]
    near = [prefix + n for n in difflib.get_close_matches(name, hints, 1, 0.6)]
    near = near or difflib.get_close_matches(key, every_key, 1, 0.6)
    near = near or [k for k in every_key if k.rpartition(".")[2] == name][:1]
    if isinstance(given, dict):
        sections = sorted({k.partition(".")[0] for k in every_key})
        near = difflib.get_close_matches(name, sections, 1, 0.6) or near
        said = f"[{key}]: unknown section."
        allowed = f"Known sections: {', '.join(sections)}."
    else:
        said, allowed = f"{key} = {format_value(given)}: unknown key.", "See --help for every key."
    return ConfigError(said, fix=f"Did you mean {near[0]}?" if near else allowed, keys=(key,))


def _fit(given: Any, hint: Any, stated: Any = None) -> Any:
    """`given` as a value of the type `hint`; raises _Refused with what is allowed.

    `stated` is the type as the field states it, with its bounds and its `None`.
    """
    hint = _as_literal(hint)
    origin, arguments, stated = typing.get_origin(hint), typing.get_args(hint), stated or hint
    if origin is Annotated:
        value = _fit(given, arguments[0], stated)
        for rule in arguments[1:]:
            _obey(value, rule)
        return value
    if origin in (Union, types.UnionType):
        return _fit_union(given, arguments, stated)
    if origin is Literal:
        value = given.text if isinstance(given, _Typed) else given
        if value not in arguments or isinstance(value, bool):
            by_lower = {str(a).lower(): a for a in arguments}
            close = difflib.get_close_matches(str(value).lower(), by_lower, 1)
            hint_at = f' Did you mean "{by_lower[close[0]]}"?' if close else ""
            raise _Refused(f"must be {describe_type(hint)}.{hint_at}")
        return value
    if origin is list:
        return _fit_list(given, hint, arguments[0])
    if dataclasses.is_dataclass(hint):
        return _fit_table(given, hint)
    value = _read_typed(given.text, hint) if isinstance(given, _Typed) else given
    if type(value) is int and not _LEAST_INT <= value <= _MOST_INT:
        raise _Refused("must be a number of at most 64 bits.")
    if hint is float and type(value) is int:  # an int is fine for a float; a bool is not an int
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise _Refused(f"must be {describe_type(stated)}.")
    return value


def _as_literal(hint: Any) -> Any:
    """A type with a OneOf rule as the Literal of its names; any other type unchanged."""
    for rule in getattr(hint, "__metadata__", ()):
        if isinstance(rule, OneOf):
            return Literal[tuple(rule.names())]
    return hint


def _fit_union(given, arms, stated):
    nothing = given is None or (isinstance(given, _Typed) and given.text.lower() == "none")
    if nothing and type(None) in arms:
        return None
    refusals = []
    for arm in arms:
        if arm is not type(None):
            try:
                return _fit(given, arm, stated)
            except _Refused as refusal:
                refusals.append(refusal)
    raise refusals[0] if len(refusals) == 1 else _Refused(f"must be {describe_type(stated)}.")


def _fit_list(given, hint, item):
    if isinstance(given, _Typed):
        text = given.text.strip()
        if text.startswith("["):
            try:
                given = parse_toml(f"value = {text}")["value"]
            except ValueError:
                raise _Refused(f"must be {describe_type(hint)}, written as in TOML.") from None
        else:
            given = [_Typed(part.strip()) for part in text.split(",") if part.strip()]
    if not isinstance(given, list):
        raise _Refused(f"must be {describe_type(hint)}.")
    values = []
    for number, entry in enumerate(given):
        try:
            values.append(_fit(entry, item))
        except _Refused as refusal:
            raise _Refused(f"entry {number} ({format_value(entry)}): {refusal}") from None
    return values


def _fit_table(given, hint):
    if not isinstance(given, dict):
        raise _Refused(f"must be a table with {', '.join(type_hints(hint))}.")
    value, problems = build_dataclass(hint, given)
    if problems:
        raise _Refused(" ".join(str(p) for p in problems))
    return value


def _read_typed(text: str, hint: type) -> Any:
    if hint is str:
        return text
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return hint(text.replace("_", ""))
    except (TypeError, ValueError):
        return text  # refused below, shown as typed


def _obey(value: Any, rule: Any) -> None:
    if isinstance(rule, Range) and not rule.holds(value):
        raise _Refused(f"must be {rule}.")
    if isinstance(rule, Supported) and value not in rule.values:
        only = " or ".join(format_value(v) for v in rule.values)
        raise _Refused(f"{rule.feature} is not available in this version. Use {only}.")


@cache
def type_hints(schema: type) -> dict[str, Any]:
    """The type of each field, with its bounds."""
    return typing.get_type_hints(schema, include_extras=True)


@cache
def all_keys(schema: type, prefix: str = "") -> list[str]:
    """Every key of a schema, dotted."""
    keys = []
    for name, hint in type_hints(schema).items():
        deeper = dataclasses.is_dataclass(hint)
        keys += all_keys(hint, f"{prefix}{name}.") if deeper else [f"{prefix}{name}"]
    return keys


def describe_type(hint: Any) -> str:
    """A type in words a user reads: "an integer of at least 1"."""
    hint = _as_literal(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [str(rule) for rule in arguments[1:] if isinstance(rule, Range)]
        return describe_type(arguments[0]) + "".join(f" of {b}" for b in bounds)
    if origin in (Union, types.UnionType):
        return " or ".join("none" if a is type(None) else describe_type(a) for a in arguments)
    if origin is Literal:
        return " | ".join(json.dumps(a) for a in arguments)
    if origin is list:
        return f"a list of {describe_type(arguments[0]).removeprefix('a ').removeprefix('an ')}"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(type_hints(hint)) + "}"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return words[hint]


# --- the whole way, and back ---------------------------------------------------------------------


def load_config(
    schema: type, argv: Sequence[str], moved: dict[str, str] | None = None
) -> tuple[Any, list[ConfigError]]:
    """The job that argv asks for (its TOML, then its overrides), and every problem found."""
    overrides, problems = parse_overrides(argv)
    named = overrides.get("job", {})
    path = named.get("config_file") if isinstance(named, dict) else None
    table: dict[str, Any] = {}
    if path is not None:
        try:
            table = read_toml(path.text)
        except ConfigError as error:
            problems.append(error)
    value, more = build_dataclass(schema, merge_tables(table, overrides), moved)
    return value, problems + more


def raise_together(problems: Sequence[ConfigError]) -> None:
    """Raise what there is, all of it at once."""
    if problems:
        raise problems[0] if len(problems) == 1 else UserErrors(problems)


def to_toml(section: Any) -> str:
    """A job as TOML that reads back as the same job; keys that are unset are left out."""
    lines: list[str] = []
    _write_table(section, "", lines)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(section: Any, name: str, lines: list[str]) -> None:
    fields = [(f.name, getattr(section, f.name)) for f in dataclasses.fields(section)]
    plain = [(k, v) for k, v in fields if v is not None and not dataclasses.is_dataclass(v)]
    if name and plain:
        lines.append(f"\n[{name}]")
    lines += [f"{key} = {_toml(value)}" for key, value in plain]
    for key, value in fields:
        if dataclasses.is_dataclass(value):
            _write_table(value, f"{name}.{key}".lstrip("."), lines)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "inf" if value == math.inf else "-inf" if value == -math.inf else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    if dataclasses.is_dataclass(value):
        value = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        pairs = (f"{k} = {_toml(v)}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, int) and value.bit_length() > 10_000:
        return hex(value)  # Python refuses to write it in decimal
    # Strings and ints read the same in TOML; its dates and times are no values of ours.
    return json.dumps(value, ensure_ascii=False, default=str)


def format_value(value: Any) -> str:
    if isinstance(value, _Typed):
        return value.text
    text = _toml(value) if value is not None else "none"
    return text if len(text) <= 80 else text[:77] + "..."
