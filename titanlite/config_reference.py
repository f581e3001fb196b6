"""Every setting in words: `--help`, and the page in `docs/`, from the dataclasses themselves."""

from __future__ import annotations

import dataclasses
import inspect
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from titanlite.settings import Supported, describe_type, format_value, type_hints


@dataclass(frozen=True)
class Key:
    """One setting, as a reference lists it."""

    name: str  # dotted
    kind: str
    default: str
    meaning: str


@cache
def list_sections(schema: type, name: str = "") -> list[tuple[tuple[str, str], list[Key]]]:
    """[((section, its meaning), its keys)], in the order they stand in the schema."""
    here, below = [], []
    meanings = _comments(schema)
    for field in dataclasses.fields(schema):
        hint, key = type_hints(schema)[field.name], f"{name}.{field.name}".lstrip(".")
        if dataclasses.is_dataclass(hint):
            below += list_sections(hint, key)
        else:
            here.append(Key(key, _kind(hint), _default(field), meanings.get(field.name, "")))
    about = (inspect.getdoc(schema) or "").partition("\n")[0]
    return ([((name, about), here)] if here else []) + below


def _kind(hint) -> str:
    rules = [rule for rule in getattr(hint, "__metadata__", ()) if isinstance(rule, Supported)]
    only = "".join(f"; so far only {' or '.join(map(format_value, rule.values))}" for rule in rules)
    return describe_type(hint) + only


def _default(field: dataclasses.Field) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return format_value(field.default_factory())
    return "(required)" if field.default is dataclasses.MISSING else format_value(field.default)


@cache
def _comments(schema: type) -> dict[str, str]:
    """The comment beside each field; a comment alone on the next line goes on with it."""
    source = inspect.cleandoc("\n" + inspect.getsource(schema))
    found: dict[str, str] = {}
    name, fresh, depth = "", True, 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        depth += {"(": 1, "[": 1, ")": -1, "]": -1}.get(token.string, 0)
        if token.type == tokenize.NAME and fresh and depth == 0 and token.start[1] > 0:
            name = token.string
        if token.type == tokenize.COMMENT and name:
            found[name] = f"{found.get(name, '')} {token.string.lstrip('# ')}".strip()
        if token.type == tokenize.NL and not token.line.strip():
            name = ""  # a blank line ends what a comment can belong to
        fresh = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.NL) or (
            fresh and token.type == tokenize.DEDENT
        )
    return found


def reference_page(schema: type) -> str:
    """Every key as a Markdown page."""
    lines = ["# Configuration", "", "Every key of a job; made by `scripts/write_reference.py`."]
    for (name, about), keys in list_sections(schema):
        lines += ["", f"## `[{name}]`", "", about.removeprefix(f"[{name}] "), ""]
        lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
        for key in keys:
            row = (f"`{key.name}`", key.kind, f"`{key.default}`", key.meaning)
            lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join(lines) + "\n"


def help_text(schema: type) -> Iterator[str]:
    """Every key, its type, default and meaning, section by section."""
    for (name, about), keys in list_sections(schema):
        yield f"\n[{name}]  {about.removeprefix(f'[{name}] ')}"
        for key in keys:
            yield f"  --{key.name}  ({key.kind}; default {key.default})"
            if key.meaning:
                yield f"      {key.meaning}"
