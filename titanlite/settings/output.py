"""Settings as text: TOML that reads back as the same values, and values in messages."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from typing import Any

MAX_CHARACTERS = 80  # of a value from a TOML in a message
MAX_DECIMAL_BITS = 10_000  # 3,011 digits; Python refuses to write more than 4,300


@dataclass(frozen=True)
class CommandLineText:
    """A value from the command line, to be converted to the type of its key."""

    text: str


def to_toml(section: Any, omit: Any = None) -> str:
    """A job as TOML without keys that are None, or that are as in `omit`, a job of defaults."""
    lines: list[str] = []
    _write_table(section, "", lines, omit)
    return "\n".join(lines).lstrip("\n") + "\n"


def _write_table(section: Any, name: str, lines: list[str], omit: Any) -> None:
    fields = [(f.name, getattr(section, f.name)) for f in dataclasses.fields(section)]
    defaults = {f.name: f.default for f in dataclasses.fields(section)}  # of another choice's keys
    values = [
        (k, v)
        for k, v in fields
        if v is not None
        and not dataclasses.is_dataclass(v)
        and (omit is None or v != getattr(omit, k, defaults[k]))
    ]
    if name and values:
        lines.append(f"\n[{name}]")
    lines += [f"{key} = {_toml_value(value, omit is not None)}" for key, value in values]
    for key, value in fields:
        if dataclasses.is_dataclass(value):
            omitted = getattr(omit, key, None)
            _write_table(value, f"{name}.{key}".lstrip("."), lines, omitted)


def _toml_value(value: Any, omit_defaults: bool = False) -> str:
    value = value.text if isinstance(value, CommandLineText) else value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return "inf" if value == math.inf else "-inf" if value == -math.inf else repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_toml_value(item, omit_defaults) for item in value) + "]"
    if dataclasses.is_dataclass(value):
        fields = [(f.name, getattr(value, f.name), f.default) for f in dataclasses.fields(value)]
        value = {k: v for k, v, default in fields if not omit_defaults or v != default}
    if isinstance(value, dict):
        pairs = (f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None)
        return "{ " + ", ".join(pairs) + " }"
    if isinstance(value, int) and value.bit_length() > MAX_DECIMAL_BITS:
        return hex(value)
    # integers are as in JSON; dates, which no key has, may be in messages
    return _quote_string(value)


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _quote_string(key)


def _quote_string(value: Any) -> str:
    """A string as in JSON, with the one character that only TOML escapes."""
    return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007F")


def format_value(value: Any) -> str:
    """A value in a message: as typed on the command line; else as in TOML, cut if it is long."""
    if isinstance(value, CommandLineText):
        return value.text
    text = _toml_value(value) if value is not None else "none"
    return text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 3] + "..."
