"""A nested table becomes a frozen dataclass; types are checked at every depth.

Each `_convert_…` returns the value in the type of its key, or raises `ValueRefused`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, Union

from titanlite.errors import ConfigError
from titanlite.files import parse_toml
from titanlite.settings.output import CommandLineText, format_value
from titanlite.settings.schema import (
    KeyedSection,
    Range,
    all_keys,
    describe_type,
    resolve_names,
    type_hints,
)

MIN_INT, MAX_INT = -(2**63), 2**63 - 1  # the integers of TOML


class ValueRefused(Exception):
    """A value does not fit its type; the text states what is allowed."""


class EntriesRefused(ValueRefused):
    """Entries of a list, or keys of a table, do not fit; `problems` says which, and why."""

    def __init__(self, problems: list[str]):
        super().__init__(" ".join(problems))
        self.problems = problems


def build_dataclass(
    schema: type,
    table: dict[str, Any],
    moved: Mapping[str, str] | None = None,
    key_list: str = "--help",
) -> tuple[Any, list[ConfigError]]:
    """Build the dataclass that a table describes; returns it with every problem of the table.

    A key with a problem gets its default, or None if it has no default, so that rules about other
    keys can still be checked.
    `moved` maps the name of a key or section of another version ("training.seed", "old_section") to
    a sentence that names its replacement. `key_list` is where users find all keys, for messages.
    """
    builder = DataclassBuilder(schema, moved or {}, key_list)
    return builder.build(schema, table), builder.problems


class DataclassBuilder:
    """Builds the sections of one schema and collects the problems."""

    def __init__(
        self,
        schema: type,
        moved: Mapping[str, str],
        key_list: str | None,  # None: a table inside of a value, whose keys are in no list
    ):
        self.problems: list[ConfigError] = []
        self._moved, self._key_list, self._known_keys = moved, key_list, all_keys(schema)

    def build(self, schema: type, table: dict[str, Any], prefix: str = "") -> Any:
        """Build one section; `prefix` is its name with a dot, or ""."""
        if issubclass(schema, KeyedSection):
            schema = schema.schema_for(_chosen(schema, table))
        hints, values = type_hints(schema), {}
        for name, given in table.items():
            key = f"{prefix}{name}"
            if name not in hints:
                self.problems += self._explain_unexpected_key(prefix, name, schema, table)
                continue
            hint = hints[name]
            if dataclasses.is_dataclass(hint):
                if isinstance(given, dict):
                    values[name] = self.build(typing.cast(type, hint), given, f"{key}.")
                else:
                    self._refuse(key, given, ValueRefused("must be a table."))
                continue
            try:
                values[name] = convert(given, hint)
            except ValueRefused as refusal:
                self._refuse(key, given, refusal)
        for field in dataclasses.fields(schema):
            required = field.default is field.default_factory is dataclasses.MISSING
            if required and field.name not in table:
                key = f"{prefix}{field.name}"
                text = f"{key}: is missing, and has no default."
                self.problems.append(ConfigError(text))
            if required and field.name not in values:
                values[field.name] = None
        return schema(**values)

    def _explain_unexpected_key(
        self, prefix: str, name: str, section: type, table: dict[str, Any]
    ) -> Iterator[ConfigError]:
        """The error for a key that a section does not have, or only under another `KEY`."""
        key, given = f"{prefix}{name}", table[name]
        choices = section.choices() if issubclass(section, KeyedSection) else {}
        having = [choice for choice, further in choices.items() if name in type_hints(further)]
        if not issubclass(section, KeyedSection) or not having:
            yield self._unknown_key(key, given, prefix, type_hints(section))
            return
        value, chooser = _chosen(section, table), f"{prefix}{section.KEY}"
        if not isinstance(value, str) or value not in choices:
            return  # users see this problem alone: its own check refuses the value
        yield ConfigError(
            f'{key} = {format_value(given)}: is not a key of {chooser} = "{value}".',
            fix=f"Remove it; this {section.KEY} has {', '.join(type_hints(choices[value]))}."
            f" Those with {name}: {', '.join(having)}.",
        )

    def _refuse(self, key: str, given: Any, refusal: ValueRefused) -> None:
        texts = _describe_refusal(key, f"{key} = {format_value(given)}", refusal)
        self.problems += [ConfigError(text) for text in texts]

    def _unknown_key(
        self, key: str, given: Any, prefix: str, hints: Mapping[str, Any]
    ) -> ConfigError:
        is_section = isinstance(given, dict)
        for old_name in (key, key.partition(".")[0]):
            if old_name in self._moved:
                written = f"[{key}]" if is_section else f"{key} = {format_value(given)}"
                return ConfigError(f"{written}: {self._moved[old_name]}")
        name, known = key[len(prefix) :], self._known_keys
        similar = [k for k in known if k.rpartition(".")[2] == name][:1]  # in another section
        similar = similar or [prefix + m for m in difflib.get_close_matches(name, hints, 1, 0.6)]
        similar = similar or difflib.get_close_matches(key, known, 1, 0.6)
        if is_section:
            sections = sorted({known_key.partition(".")[0] for known_key in known})
            similar = difflib.get_close_matches(name, sections, 1, 0.6) or similar
            problem = f"[{key}]: unknown section."
            otherwise = f"Known sections: {', '.join(sections)}."
        else:
            problem = f"{key} = {format_value(given)}: unknown key."
            otherwise = f"See {self._key_list} for every key."
        fix = f"Did you mean {similar[0]}?" if similar else otherwise
        if self._key_list is None:
            fix = f"{fix} " if similar else ""
            fix += f"Allowed keys: {', '.join(hints)}."
        return ConfigError(problem, fix=fix)


def _chosen(section: type[KeyedSection], table: dict[str, Any]) -> Any:
    """The value of the key of a section that decides about further keys."""
    value = table.get(section.KEY, getattr(section, section.KEY))
    return value.text if isinstance(value, CommandLineText) else value


def _describe_refusal(name: str, with_value: str, refusal: ValueRefused) -> list[str]:
    """One text per problem: the name and the value, or the name and the entry with the problem."""
    if isinstance(refusal, EntriesRefused):
        return [f"{name}, {problem}" for problem in refusal.problems]
    return [f"{with_value}: {refusal}"]


def convert(given: Any, hint: Any, declared: Any = None) -> Any:
    """Convert `given` to `hint`, a part of the field's type `declared`; raises ValueRefused."""
    hint = resolve_names(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    declared = declared or hint
    if origin is Annotated:
        value = convert(given, arguments[0], declared)
        for rule in arguments[1:]:
            if isinstance(rule, Range) and not rule.contains(value):
                raise ValueRefused(f"must be {rule}.")
        return value
    if origin in (Union, types.UnionType):
        return _convert_union(given, arguments, declared)
    if origin is Literal:
        return _convert_literal(given, arguments, declared)
    if origin is list:
        return _convert_list(given, arguments[0], declared)
    if origin is dict:
        return _convert_dict(given, arguments[1], declared)
    if dataclasses.is_dataclass(hint):
        return _convert_table(given, typing.cast(type, hint))
    return _convert_scalar(given, hint, declared)


def _convert_scalar(given: Any, hint: type, declared: Any) -> Any:
    value = _parse_text(given.text, hint) if isinstance(given, CommandLineText) else given
    if hint in (int, float) and type(value) is int and not MIN_INT <= value <= MAX_INT:
        raise ValueRefused("must be a number of at most 64 bits.")
    if hint is float and type(value) is int:  # an int is a valid float; a bool is not an int
        value = float(value)
    if type(value) is not hint or (type(value) is float and not math.isfinite(value)):
        raise ValueRefused(f"must be {describe_type(declared)}.")
    return value


def _parse_text(text: str, hint: type) -> Any:
    if hint is str:
        return text
    if hint is bool:
        return {"true": True, "false": False}.get(text.lower(), text)
    try:
        return hint(text.replace("_", ""))
    except ValueError:
        return text  # has the wrong type, so it is refused


def _convert_union(given: Any, members: tuple[Any, ...], declared: Any) -> Any:
    is_none = given is None or (isinstance(given, CommandLineText) and given.text.lower() == "none")
    if is_none and type(None) in members:
        return None
    (member,) = (m for m in members if m is not type(None))
    return convert(given, member, declared)


def _convert_literal(given: Any, allowed: tuple[Any, ...], declared: Any) -> Any:
    value = given.text if isinstance(given, CommandLineText) else given
    if value in allowed:
        return value
    by_lower_case = {str(choice).lower(): choice for choice in allowed}
    similar = difflib.get_close_matches(str(value).lower(), by_lower_case, 1)
    suggestion = f' Did you mean "{by_lower_case[similar[0]]}"?' if similar else ""
    raise ValueRefused(f"must be {describe_type(declared)}.{suggestion}")


def _convert_list(given: Any, item_hint: Any, declared: Any) -> list[Any]:
    if isinstance(given, CommandLineText):
        given = _parse_list(given.text.strip(), declared)
    if not isinstance(given, list):
        raise ValueRefused(f"must be {describe_type(declared)}.")
    return _convert_entries([(f"entry {i}", item) for i, item in enumerate(given)], item_hint)


def _convert_entries(named: Iterable[tuple[str, Any]], hint: Any) -> list[Any]:
    """The converted values; raises EntriesRefused with the problems of all, by their names."""
    values: list[Any] = []
    problems: list[str] = []
    for name, item in named:
        try:
            values.append(convert(item, hint))
        except ValueRefused as refusal:
            problems += _describe_refusal(name, f"{name} ({format_value(item)})", refusal)
    if problems:
        raise EntriesRefused(problems)
    return values


def _parse_list(text: str, declared: Any) -> Any:
    """A list from the command line: TOML in brackets, or separated by commas."""
    if not text.startswith("["):
        return [CommandLineText(item.strip()) for item in text.split(",") if item.strip()]
    try:
        return parse_toml(f"value = {text}")["value"]
    except ValueError:
        raise ValueRefused(f"must be {describe_type(declared)}, written as in TOML.") from None


def _convert_dict(given: Any, item_hint: Any, declared: Any) -> dict[str, Any]:
    """A table with any keys, such as the names of sources."""
    if not isinstance(given, dict):
        raise ValueRefused(f"must be {describe_type(declared)}.")
    named = [(f'"{key}"', item) for key, item in given.items()]
    return dict(zip(given, _convert_entries(named, item_hint), strict=True))


def _convert_table(given: Any, schema: type) -> Any:
    if not isinstance(given, dict):
        raise ValueRefused(f"must be a table with {', '.join(type_hints(schema))}.")
    builder = DataclassBuilder(schema, {}, key_list=None)
    value = builder.build(schema, given)
    if builder.problems:
        raise EntriesRefused([str(problem) for problem in builder.problems])
    return value
