"""Types that declare which values a key may have, and their description for users."""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Union


@dataclass(frozen=True)
class Range:
    """The bounds of a number, both inclusive; `also` lists allowed values outside the bounds."""

    low: float = -math.inf
    high: float = math.inf
    also: tuple[float, ...] = ()

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high or value in self.also

    def __str__(self) -> str:
        bounds = [f"at least {self.low:g}"] if self.low > -math.inf else []
        bounds += [f"at most {self.high:g}"] if self.high < math.inf else []
        return " and ".join(bounds) + "".join(f", or {value:g}" for value in self.also)


@dataclass(frozen=True)
class Supported:
    """The implemented values of a key. The type of the key also has torchtitan's other values.

    These other values are rejected with an error that names the missing `feature`.
    """

    values: tuple[Hashable, ...]
    feature: str  # what the other values need


@dataclass(frozen=True)
class OneOf:
    """The allowed values of a string, such as the keys of an extension point's dictionary.

    `names` is called when a value is checked, so the dictionary may be defined after the section.
    """

    names: Callable[[], Iterable[str]]


Positive = Annotated[int, Range(1)]
NotNegative = Annotated[int, Range(0)]
Fraction = Annotated[float, Range(0, 1)]


@cache
def type_hints(schema: type) -> dict[str, Any]:
    """The type of each field, including its `Range`, `Supported` or `OneOf`."""
    return typing.get_type_hints(schema, include_extras=True)


@cache
def all_keys(schema: type, prefix: str = "") -> list[str]:
    """Every key of a schema, as `section.key`."""
    keys: list[str] = []
    for name, hint in type_hints(schema).items():
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        keys += all_keys(hint, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]
    return keys


def resolve_names(hint: Any) -> Any:
    """A type with a `OneOf` rule as the Literal of its names; any other type unchanged."""
    for rule in getattr(hint, "__metadata__", ()):
        if isinstance(rule, OneOf):
            return Literal[tuple(rule.names())]
    return hint


def describe_type(hint: Any) -> str:
    """A type as text for users: "an integer of at least 1"."""
    hint = resolve_names(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        bounds = [str(rule) for rule in arguments[1:] if isinstance(rule, Range)]
        return describe_type(arguments[0]) + "".join(f" of {bound}" for bound in bounds)
    if origin in (Union, types.UnionType):
        members = ("none" if a is type(None) else describe_type(a) for a in arguments)
        return " or ".join(members)
    if origin is Literal:
        return " | ".join(json.dumps(value) for value in arguments)
    if origin is list:
        item = describe_type(arguments[0])
        plural = {"an integer": "integers", "a number": "numbers", "a string": "strings"}
        return f"a list of {plural.get(item, item)}"
    if origin is dict:
        return f"a table of {describe_type(arguments[1]).split(maxsplit=1)[-1]}s by name"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(type_hints(typing.cast(type, hint))) + "}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names[hint]
