"""Read a pickle as plain data: nothing in it is imported, called or looked up.

Only checkpoints of format 2 need it: their chunks are listed only in DCP's `.metadata`. Every
object becomes an `InertObject` with the data that the pickle records. Opcodes that DCP does not
need are refused, and each opcode costs memory proportional to its own bytes.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OPCODE_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_NUMBER_ARGUMENTS = {  # opcodes whose argument is a number
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
_SIZED_ARGUMENTS = {  # opcodes whose argument begins with its length
    name: struct.Struct(form)
    for name, form in {"LONG1": "<B", "SHORT_BINUNICODE": "<B", "BINUNICODE": "<I"}.items()
}
_IGNORED = {"PROTO", "FRAME"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_VALUES = {"BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINUNICODE", "BINUNICODE"}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(eq=False, slots=True)
class InertObject:
    """An object described by a pickle: the name of its class, and its content."""

    class_name: str  # module.name
    arguments: Any = ()  # of the call that would construct it
    state: Any = None

    def set_state(self, state: Any) -> None:
        """Store what the BUILD opcode would pass to `__setstate__`."""
        self.state = state


@dataclass(eq=False, slots=True)
class _ClassName:
    name: str


def read_inert_pickle(content: bytes) -> Any:
    """The value of a pickle; raises ValueError if it needs more than DCP's metadata does.

    Lists, tuples and dicts may be referenced twice, or contain themselves: a caller must bound its
    traversal, and must not compare, hash or print them.
    """
    machine = _PickleMachine()
    try:
        for opcode, argument in _opcodes(content):
            machine.execute(opcode, argument)
        (value,) = machine.stack
    except (IndexError, struct.error):
        raise ValueError(
            "a pickle that ends early or takes more values than its stack has"
        ) from None
    return value


def _opcodes(content: bytes) -> Iterator[tuple[str, Any]]:
    """Name and argument of every opcode up to STOP; arguments of unknown opcodes are not parsed."""
    position = 0
    while (name := _OPCODE_NAMES.get(content[position])) != "STOP":
        position, argument = position + 1, None
        if name in _NUMBER_ARGUMENTS:
            (argument,) = _NUMBER_ARGUMENTS[name].unpack_from(content, position)
            position += _NUMBER_ARGUMENTS[name].size
        elif name in _SIZED_ARGUMENTS:
            (size,) = _SIZED_ARGUMENTS[name].unpack_from(content, position)
            position += _SIZED_ARGUMENTS[name].size
            raw, position = content[position : position + size], position + size
            is_integer = name == "LONG1"
            argument = int.from_bytes(raw, "little", signed=True) if is_integer else raw.decode()
        elif name == "GLOBAL":
            end = content.index(b"\n", content.index(b"\n", position) + 1)
            argument, position = content[position:end].decode().replace("\n", "."), end + 1
        yield str(name), argument


class _PickleMachine:
    """The stack machine of pickle, without the opcodes that have effects."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []

    def execute(self, opcode: str, argument: Any) -> None:
        stack = self.stack
        if opcode in _VALUES:
            stack.append(argument)
        elif opcode in ("BINGET", "LONG_BINGET"):
            stack.append(self.memo[argument])
        elif opcode in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
            if argument not in (None, len(self.memo)):  # 5 bytes could ask for 2^32 entries
                raise ValueError("a pickle whose memo has gaps")
            self.memo.append(stack[-1])
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode == "MARK":
            self.marks.append(len(stack))
        elif opcode in _TUPLES:
            stack.append(self._pop_from(len(stack) - _TUPLES[opcode]))
        elif opcode == "TUPLE":
            stack.append(self._pop_from(self.marks.pop()))
        elif opcode == "EMPTY_LIST":
            stack.append([])
        elif opcode == "EMPTY_DICT":
            stack.append({})
        elif opcode in ("APPEND", "APPENDS"):
            start = len(stack) - 1 if opcode == "APPEND" else self.marks.pop()
            items = self._pop_from(start)
            _expect_kind(stack[-1], list).extend(items)
        elif opcode in ("SETITEM", "SETITEMS"):
            start = len(stack) - 2 if opcode == "SETITEM" else self.marks.pop()
            self._set_items(self._pop_from(start))
        elif opcode not in _IGNORED:
            self._execute_as_data(opcode, argument)

    def _execute_as_data(self, opcode: str, argument: Any) -> None:
        """Record what an unpickler would import, call or modify."""
        stack = self.stack
        if opcode == "GLOBAL":
            stack.append(_ClassName(argument))
        elif opcode == "STACK_GLOBAL":
            parts = self._pop_from(len(stack) - 2)
            stack.append(_ClassName(".".join(_expect_kind(part, str) for part in parts)))
        elif opcode in ("NEWOBJ", "REDUCE"):
            kind, arguments = self._pop_from(len(stack) - 2)
            class_name = _expect_kind(kind, _ClassName).name
            stack.append(InertObject(class_name, _expect_kind(arguments, tuple)))
        elif opcode == "BUILD":
            (state,) = self._pop_from(len(stack) - 1)
            _expect_kind(stack[-1], InertObject).set_state(state)
        else:
            raise ValueError(f"a pickle with the opcode {opcode}, which DCP's metadata never has")

    def _pop_from(self, start: int) -> tuple[Any, ...]:
        """Remove the values from `start` on from the stack, and return them."""
        if start < 0:
            raise IndexError
        values = tuple(self.stack[start:])
        del self.stack[start:]
        return values

    def _set_items(self, items: tuple[Any, ...]) -> None:
        table = _expect_kind(self.stack[-1], dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, (str, InertObject)):  # hashing nested tuples could never end
                raise ValueError(f"a pickle with a {type(key).__name__} as a key")
            table[key] = value


def _expect_kind(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a pickle with a {type(value).__name__} instead of a {kind.__name__}")
    return value
