"""A pickle as plain data, without unpickling it: nothing in it is imported, called or looked up.

Only older checkpoints need it, whose chunks are listed nowhere but in DCP's `.metadata`. Every
class becomes a `Record` that holds what the pickle says of it. Opcodes that DCP does not need are
refused, and no opcode costs more memory than its own bytes, times a constant.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_NUMBERS = {  # opcodes whose argument is a number
    name: struct.Struct(form)
    for form, names in {
        "<B": ("PROTO", "BININT1", "BINGET", "BINPUT"),
        "<H": ("BININT2",),
        "<i": ("BININT",),
        "<I": ("LONG_BINGET", "LONG_BINPUT"),
        "<Q": ("FRAME",),
    }.items()
    for name in names
}
_SIZED = {  # and those whose argument begins with its length
    name: struct.Struct(form)
    for name, form in {"LONG1": "<B", "SHORT_BINUNICODE": "<B", "BINUNICODE": "<I"}.items()
}
_IGNORED = {"PROTO", "FRAME"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(eq=False, slots=True)
class Record:
    """An object that a pickle describes: its class, by name alone, and its content."""

    kind: str  # module.name
    arguments: Any = ()  # what its class would be called with
    state: Any = None


@dataclass(eq=False, slots=True)
class _ClassName:
    name: str


def read_inert_pickle(content: bytes) -> Any:
    """The value of a pickle; raises ValueError where it holds more than DCP's metadata needs.

    Lists, tuples and dicts may share parts, or contain themselves: a caller who walks through
    them counts his steps, and neither compares, hashes nor prints them.
    """
    reader = _Reader()
    try:
        for name, argument in _opcodes(content):
            reader.execute(name, argument)
        (value,) = reader.stack
    except (IndexError, struct.error):
        raise ValueError("a pickle that takes more than it has") from None
    return value


def _opcodes(content: bytes) -> Iterator[tuple[str, Any]]:
    """Name and argument of every opcode, up to STOP; no argument of an unknown one is looked at."""
    at = 0
    while (name := _NAMES.get(content[at])) != "STOP":
        at, argument = at + 1, None
        if name in _NUMBERS:
            (argument,) = _NUMBERS[name].unpack_from(content, at)
            at += _NUMBERS[name].size
        elif name in _SIZED:
            (size,) = _SIZED[name].unpack_from(content, at)
            at += _SIZED[name].size
            raw, at = content[at : at + size], at + size
            long = name == "LONG1"
            argument = int.from_bytes(raw, "little", signed=True) if long else raw.decode()
        elif name == "GLOBAL":
            end = content.index(b"\n", content.index(b"\n", at) + 1)
            argument, at = content[at:end].decode().replace("\n", "."), end + 1
        yield str(name), argument


class _Reader:
    def __init__(self):
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def execute(self, name: str, argument: Any) -> None:
        stack = self.stack
        if name in _VALUES:
            stack.append(argument)
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif name in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            if argument not in (None, len(self.memo)):  # else 5 bytes could ask for 2^32 entries
                raise ValueError("a pickle whose memo has gaps")
            self.memo.append(stack[-1])
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "MARK":
            self.marks.append(len(stack))
        elif name in _TUPLES:
            stack.append(self._take(len(stack) - _TUPLES[name]))
        elif name == "TUPLE":
            stack.append(self._take(self.marks.pop()))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("APPEND", "APPENDS"):
            start = len(stack) - 1 if name == "APPEND" else self.marks.pop()
            items = self._take(start)
            _must_be(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            start = len(stack) - 2 if name == "SETITEM" else self.marks.pop()
            self._set_items(self._take(start))
        elif name not in _IGNORED:
            self._describe(name, argument)

    def _describe(self, name: str, argument: Any) -> None:
        """The opcodes that would import, call or change an object, were they executed."""
        stack = self.stack
        if name == "GLOBAL":
            stack.append(_ClassName(argument))
        elif name == "STACK_GLOBAL":
            parts = self._take(len(stack) - 2)
            stack.append(_ClassName(".".join(_must_be(part, str) for part in parts)))
        elif name in ("NEWOBJ", "REDUCE"):
            kind, arguments = self._take(len(stack) - 2)
            stack.append(Record(_must_be(kind, _ClassName).name, _must_be(arguments, tuple)))
        elif name == "BUILD":
            (state,) = self._take(len(stack) - 1)
            _must_be(stack[-1], Record).state = state
        else:
            raise ValueError(f"a pickle with {name}, which has no place in it")

    def _take(self, start: int) -> tuple[Any, ...]:
        """What is on the stack from `start` on, which then is no longer there."""
        if start < 0:
            raise IndexError
        taken = tuple(self.stack[start:])
        del self.stack[start:]
        return taken

    def _set_items(self, items: tuple[Any, ...]) -> None:
        table = _must_be(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, Record)):  # hashing nested tuples could take for ever
                raise ValueError(f"a pickle with a {type(key).__name__} as a key")
            table[key] = value


def _must_be(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a pickle with a {type(value).__name__} instead of a {kind.__name__}")
    return value
