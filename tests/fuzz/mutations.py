"""Random mutations of a file: of any bytes, of values in JSON, or of words in a table or a TOML."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

EDGES = (
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
TOKENS = (  # that have a meaning in some file format
    *(
        b"[" * 3000,
        b'{"a":' * 3000,
        b"(" * 3000,
        b"..",
        b"/etc/passwd",
        b"../" * 8,
        b"\0",
        b"\n",
        b'"',
    ),
    *(
        b"1e999",
        b"-1",
        b"NaN",
        b"null",
        b"true",
        b"[]",
        b"{}",
        b"999999999999999999999",
        b"\xff\xfe",
    ),
    *(b"cos\nsystem\n", b"\x80\x04", b"R", b"b", b"o", b"i", b"\x93", b"\x81", b"q", b"\x94", b"."),
    *(
        b"PK\x03\x04",
        b"PK\x01\x02",
        b"PK\x05\x06",
        b"PAR1",
        b"include = ['a.toml']",
        b"[a]\n",
        b"a = 1\n",
    ),
)
STRINGS = (
    "",
    "..",
    "/etc/passwd",
    "../../../etc/passwd",
    "\0",
    "a" * 100_000,
    "(a+)+$",
    "[",
    "F8_E4M3",
    "é",
)
NUMBERS = (
    0,
    1,
    -1,
    2**31,
    2**63,
    10**30,
    1e30,
    1e308,
    float("nan"),
    float("inf"),
    -0.5,
    True,
    False,
    None,
)


def mutate(content: bytes, random: Random, suffix: str) -> bytes:
    """A mutated copy of `content`; about half of the files of a known suffix stay well-formed."""
    if suffix in STRUCTURED and random.random() < 0.6:
        try:
            for _ in range(random.choice((1, 1, 1, 2, 4))):
                content = STRUCTURED[suffix](content, random)
            return content
        except (RecursionError, MemoryError):  # in json.dumps
            return b"[" * 100_000 + b"]" * 100_000
    for _ in range(random.choice((1, 1, 2, 4, 16))):
        content = mutate_bytes(content, random)
    return content


def mutate_json(content: bytes, random: Random) -> bytes:
    return json.dumps(mutate_value(json.loads(content), random)).encode()


def mutate_line(content: bytes, random: Random) -> bytes:
    """One line of JSON lines replaced or removed, or moved elsewhere."""
    lines = content.splitlines()
    line = lines.pop(random.randrange(len(lines)))
    if not lines or random.random() < 0.9:
        lines.insert(random.randrange(len(lines) + 1), line)
    number = random.randrange(len(lines))
    lines[number] = mutate_json(lines[number], random)
    return b"\n".join(lines) + b"\n"


def mutate_word(content: bytes, random: Random) -> bytes:
    """One word or number replaced by an extreme number, a string or another word."""
    words = list(re.finditer(rb"[\w.+-]+", content))
    word = random.choice(words)
    match random.randrange(4):
        case 0:
            new = random.choice(words)[0]
        case 1:
            new = random.choice(STRINGS).encode()
        case _:
            new = str(random.choice((*NUMBERS, *EDGES, 1e-300, 7, 10**6))).encode()
    return content[: word.start()] + new + content[word.end() :]


STRUCTURED = {
    ".json": mutate_json,
    ".jsonl": mutate_line,
    ".csv": mutate_word,
    ".toml": mutate_word,
}


def mutate_bytes(content: bytes, random: Random) -> bytes:
    """`content` with some bytes flipped, removed, repeated, randomised, replaced or added."""
    begin = random.randrange(len(content) + 1)
    end = min(len(content), begin + random.choice((1, 1, 2, 4, 8, 64, 4096)))
    head, part, tail = content[:begin], content[begin:end], content[end:]
    match random.randrange(8):
        case 0:
            part = bytes(byte ^ 1 << random.randrange(8) for byte in part[:1]) + part[1:]
        case 1:
            part = b""
        case 2:
            part *= random.choice((2, 3, 100))
        case 3:
            part = random.randbytes(len(part))
        case 4:
            part = random.choice(TOKENS)
        case 5:
            part += random.choice(TOKENS)
        case 6:  # a binary integer
            width, order = random.choice((1, 2, 4, 8)), random.choice(("little", "big"))
            edge = random.choice(EDGES) % 256**width
            part, tail = edge.to_bytes(width, order), content[begin + width :]
        case 7:
            tail = tail if random.random() < 0.5 else b""  # truncated
    return head + part + tail


def mutate_value(value: Any, random: Random) -> Any:
    """A JSON value with one entry, at any depth, replaced, removed, repeated or nested."""
    if isinstance(value, (dict, list)) and value and random.random() < 0.9:
        key = (
            random.choice(list(value)) if isinstance(value, dict) else random.randrange(len(value))
        )
        copy = value.copy()
        match random.randrange(8):
            case 0:
                del copy[key]
            case 1 if isinstance(copy, dict):
                copy[random.choice((*STRINGS, *copy))] = copy[key]
            case 1:
                copy += [copy[key]] * random.choice((1, 1000))
            case _:
                copy[key] = mutate_value(copy[key], random)
        return copy
    match random.randrange(6):
        case 0 | 1:
            return random.choice(NUMBERS)
        case 2:
            return random.choice(STRINGS)
        case 3:
            return random.choice(([], {}, [[]], {"": {}}, [value], {"a": value}, [value] * 1000))
        case 4:
            nested: Any = value
            for _ in range(random.choice((10, 100, 900))):
                nested = [nested] if random.random() < 0.5 else {"type": nested}
            return nested
        case _:
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return value * random.choice((-1, 2, 2**20)) + 1 if number else [value]
