"""Arguments that several commands share: numbers, and laws by their file or name."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from titanlite_lab.scaling.files import StoredLaw, read_law
from titanlite_lab.scaling.ladder import LadderSize
from titanlite_lab.scaling.laws import published_law


def positive(text: str) -> float:
    if not 0 < (number := float(text)) < math.inf:
        raise argparse.ArgumentTypeError("must be a positive number")
    return number


def positive_int(text: str) -> int:
    if (number := int(text)) < 2:
        raise argparse.ArgumentTypeError("must be at least 2")
    return number


def numbers(text: str) -> tuple[float, ...]:
    return tuple(positive(part) for part in text.split(","))


def sizes(text: str) -> tuple[LadderSize, ...]:
    sizes = []
    for part in text.split(","):
        numbers = [int(number) for number in part.split("x")]
        if len(numbers) > 2 or min(numbers) < 1:
            raise argparse.ArgumentTypeError(f"{part}: must be DIM or DIMxLAYERS")
        sizes.append(LadderSize(*numbers))
    return tuple(sizes)


def pair(text: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError("must be COLUMN=VALUE")
    return column, value


def find_law(name: str) -> StoredLaw:
    path = Path(name)
    return read_law(path) if path.is_file() else StoredLaw(published_law(name))
