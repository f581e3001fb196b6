"""Types that declare which values a key may have, and their description for users."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Any, ClassVar, Literal, Union


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
    """The type of each field, including its `Range` or `OneOf`."""
    hints: dict[str, Any] = {}
    for base in reversed(schema.__mro__):  # one by one: Python 3.10 cannot evaluate what is no key
        own = inspect.get_annotations(base)
        own = {k: v for k, v in own.items() if not re.search("ClassVar|KW_ONLY", str(v))}
        scope = vars(sys.modules[base.__module__])
        holder = types.SimpleNamespace(__annotations__=own)
        hints |= typing.get_type_hints(holder, scope, include_extras=True)
    return hints


class KeyedSection:
    """A section with further keys, which depend on the value of its key `KEY`.

    A frozen dataclass inherits from it. `choices` maps each value to a dataclass, whose fields are
    the further keys under that value.
    """

    KEY: ClassVar[str]
    # What a further key that is not set means, for users; such a key is None. If UNSET is None, it
    # has the default of its field.
    UNSET: ClassVar[str | None] = None

    @classmethod
    def choices(cls) -> Mapping[str, type]:
        raise NotImplementedError

    @classmethod
    def schema_for(cls, value: Any) -> type:
        """The section with the further keys under `value`; if it is no choice, of the default."""
        base: Any = _base_of(cls)
        choices = cls.choices()
        is_choice = isinstance(value, str) and value in choices
        return _extend(base, choices[value if is_choice else getattr(cls, cls.KEY)])

    @classmethod
    def of(cls, **keys: Any) -> Any:
        return cls.schema_for(keys.get(cls.KEY, getattr(cls, cls.KEY)))(**keys)

    def replace(self, **keys: Any) -> Any:
        """The section with other values; another choice keeps those of the keys that it has."""
        schema = self.schema_for(keys.get(self.KEY, getattr(self, self.KEY)))
        values = {**self._own_keys(), **keys}
        return schema(**{k: v for k, v in values.items() if k in type_hints(schema)})

    def __reduce__(self) -> tuple:  # pickle does not find a class that `_extend` made
        return partial(_base_of(type(self)).of, **self._own_keys()), ()

    def _own_keys(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(typing.cast(Any, self))}


def _base_of(section: type[KeyedSection]) -> type[KeyedSection]:
    """The section without further keys."""
    return next(c for c in section.__mro__ if KeyedSection in c.__bases__)


@cache
def _extend(section: type[KeyedSection], further: type) -> type:
    if section.UNSET is None:
        bases = (further, section)  # in this order: a key may hide a constant of the section
        return dataclasses.make_dataclass(section.__name__, [], bases=bases, frozen=True)
    hints = type_hints(further)
    keys = [
        (field.name, hints[field.name] | None, dataclasses.field(default=None))
        for field in dataclasses.fields(further)
    ]
    return dataclasses.make_dataclass(section.__name__, keys, bases=(section,), frozen=True)


@cache
def all_keys(schema: type, prefix: str = "") -> list[str]:
    """Every key of a schema, as `section.key`."""
    keys: list[str] = []
    for name, hint in type_hints(schema).items():
        is_section = isinstance(hint, type) and dataclasses.is_dataclass(hint)
        keys += all_keys(hint, f"{prefix}{name}.") if is_section else [f"{prefix}{name}"]
    if issubclass(schema, KeyedSection) and KeyedSection in schema.__bases__:
        further = (name for choice in schema.choices().values() for name in type_hints(choice))
        keys += dict.fromkeys(f"{prefix}{name}" for name in further)
    return keys


def resolve_names(hint: Any) -> Any:
    """A type with a `OneOf` rule as the Literal of its names; any other type unchanged."""
    for rule in getattr(hint, "__metadata__", ()):
        if isinstance(rule, OneOf):
            return Literal[tuple(rule.names())]
    return hint


def _plural(described: str) -> str:
    """ "an integer of at least 1" as "integers of at least 1"; other texts unchanged."""
    return re.sub(r"^an? (\w+)", r"\1s", described)


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
        return f"a list of {_plural(describe_type(arguments[0]))}"
    if origin is dict:
        return f"a table of {_plural(describe_type(arguments[1]))} by name"
    if dataclasses.is_dataclass(hint):
        return "{" + ", ".join(type_hints(typing.cast(type, hint))) + "}"
    names = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}
    return names[hint]
