"""The reference of all settings, from their dataclasses: for `--help` and a Markdown page."""

from __future__ import annotations

import dataclasses
import inspect
import io
import sys
import tokenize
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, ConfigError, format_error
from titanlite.settings import KeyedSection, describe_type, format_value, type_hints


@dataclass(frozen=True)
class KeyReference:
    """One setting in the reference."""

    name: str  # section.key
    type: str
    default: str
    meaning: str


@dataclass(frozen=True)
class SectionReference:
    """One section in the reference."""

    name: str
    summary: str  # first line of the dataclass's docstring, without "[name]"
    keys: list[KeyReference]
    condition: str = ""  # under which the section has these keys


@cache
def list_sections(schema: type, name: str = "") -> list[SectionReference]:
    """The sections of a schema in the order of their fields."""
    keys: list[KeyReference] = []
    subsections: list[SectionReference] = []
    comments = _read_field_comments(schema)
    for field in dataclasses.fields(schema):
        hint, key = type_hints(schema)[field.name], f"{name}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(hint):
            subsections += list_sections(typing.cast(type, hint), key)
        else:
            meaning = comments.get(field.name, "")
            keys.append(KeyReference(key, describe_type(hint), _describe_default(field), meaning))
    for key, meaning in getattr(schema, "REPLACED", {}).items():
        keys.insert(0, KeyReference(f"{name}.{key}", "a string or none", "none", meaning))
    summary = (inspect.getdoc(schema) or "").partition("\n")[0].removeprefix(f"[{name}] ")
    further = list(_list_further_keys(name, schema)) if issubclass(schema, KeyedSection) else []
    return ([SectionReference(name, summary, keys)] if keys else []) + further + subsections


def _list_further_keys(name: str, section: type[KeyedSection]) -> Iterator[SectionReference]:
    """The keys of a section under each value of its `KEY`."""
    for value, choice in section.choices().items():
        keys = []
        comments: dict[str, str] = {}
        for base in reversed(choice.__mro__[:-1]):
            comments |= _read_field_comments(base)
        for field in dataclasses.fields(choice):
            hint = type_hints(choice)[field.name]
            notes = [note for note in getattr(hint, "__metadata__", ()) if isinstance(note, str)]
            meaning = notes[0] if notes else comments.get(field.name, "")
            default = section.UNSET or _describe_default(field)
            type_text = describe_type(hint)
            keys.append(KeyReference(f"{name}.{field.name}", type_text, default, meaning))
        yield SectionReference(name, "", keys, f'{section.KEY} = "{value}"')


def _describe_default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return format_value(field.default_factory())
    return "(required)" if field.default is dataclasses.MISSING else format_value(field.default)


@cache
def _read_field_comments(schema: type) -> dict[str, str]:
    """The comment beside each field, with the comment lines that follow it."""
    source = inspect.cleandoc("\n" + inspect.getsource(schema))
    comments: dict[str, str] = {}
    name, at_line_start, depth = "", True, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.string, 0)
        if token.type == tokenize.NAME and at_line_start and depth == 0 and token.start[1] > 0:
            name = token.string
        if token.type == tokenize.COMMENT and name:
            comments[name] = f"{comments.get(name, '')} {token.string.lstrip('# ')}".strip()
        if token.type == tokenize.NL and not token.line.strip():
            name = ""  # comments after a blank line do not belong to the field
        at_line_start = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL) or (
            at_line_start and token.type == tokenize.DEDENT
        )
    return comments


def help_text(schema: type, names: Sequence[str] = ()) -> Iterator[str]:
    """All settings, or those of sections `names`, as lines for `--help`; raises ConfigError."""
    sections = list_sections(schema)
    for name in names:
        if not any(f"{section.name}.".startswith(f"{name}.") for section in sections):
            raise ConfigError(
                f"--help {name}: there is no section [{name}].",
                fix=f"Sections: {', '.join(dict.fromkeys(section.name for section in sections))}.",
            )
    shown = tuple(f"{name}." for name in names) or ("",)
    for section in (s for s in sections if f"{s.name}.".startswith(shown)):
        condition = f" with {section.condition}" if section.condition else ""
        yield f"\n[{section.name}]{condition}  {section.summary}"
        for key in section.keys:
            yield f"  --{key.name}  ({key.type}; default {key.default})"
            if key.meaning:
                yield f"      {key.meaning}"


def print_help(title: str, schema: type, names: Sequence[str]) -> int:
    """Print the title and every setting, or those of some sections; returns the exit code."""
    try:
        lines = list(help_text(schema, names))
    except ConfigError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(*([] if names else [title]), *lines, sep="\n")
    return EXIT_DONE
