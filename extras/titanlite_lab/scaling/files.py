"""Read measured losses from a table, and write and read fitted laws."""

from __future__ import annotations

import csv
import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from titanlite.errors import ConfigError, DataError
from titanlite.files import parse_json, read_regular_file
from titanlite.settings import raise_together
from titanlite_lab.scaling.fit import FittedLaw, LossPoints
from titanlite_lab.scaling.laws import FLOPS_PER_PARAMETER, LAW_FIELDS, ScalingLaw

STORED_SAMPLES = 500  # bootstraps in the file of a law
MAX_TABLE_BYTES = 64 << 20
_MAX_PROBLEMS = 5  # lines of a table that are reported


@dataclass(frozen=True)
class TableColumns:
    """Which columns of a table to read."""

    parameters: str = "parameters"
    tokens: str = "tokens"
    flops: str = ""  # instead of tokens, which are then FLOPs / (6 x parameters)
    loss: str = "loss"

    @property
    def names(self) -> list[str]:
        return [self.parameters, self.flops or self.tokens, self.loss]


def read_table(
    path: Path, columns: TableColumns, where: Mapping[str, str], drop_highest: int = 0
) -> LossPoints:
    """The losses of a CSV file with a header line; raises DataError, with its first problems.

    `where`: only lines with these values. `drop_highest`: number of highest losses to leave out.
    """
    lines = _read_lines(path)
    header = list(lines[0][1]) if lines else []
    wanted = [*columns.names, *where]
    if missing := [name for name in dict.fromkeys(wanted) if name not in header]:
        raise DataError(
            f"{path}: has no column {', '.join(map(repr, missing))}.",
            fix=f"It has {', '.join(map(repr, header)) or 'no line below its header'}.",
        )
    chosen = [pair for pair in lines if all(pair[1][k] == v for k, v in where.items())]
    if not chosen:
        shown = ", ".join(f"{k} = {v}" for k, v in where.items())
        raise DataError(f"{path}: no line has {shown}.")
    rows, problems = [], []
    for number, line in chosen:
        try:
            rows.append([_positive(line[name]) for name in columns.names])
        except ValueError as error:
            problems.append(DataError(f"{path}: line {number}: {error}."))
    raise_together(problems[:_MAX_PROBLEMS])
    table = np.array(rows)
    kept = np.sort(np.argsort(table[:, 2], kind="stable")[: max(0, len(table) - drop_highest)])
    parameters, second, losses = table[kept].T
    tokens = second / (FLOPS_PER_PARAMETER * parameters) if columns.flops else second
    return LossPoints(parameters, tokens, losses, columns.parameters, str(path))


def _read_lines(path: Path) -> list[tuple[int, dict[str, str]]]:
    """(line number, column -> text) of each line below the header."""
    try:
        text = read_regular_file(path, MAX_TABLE_BYTES).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path}: cannot be read ({reason}).") from None
    reader = csv.DictReader(text.splitlines(), restval="")
    try:
        return [(reader.line_num, line) for line in reader]
    except csv.Error as error:
        raise DataError(f"{path}: line {reader.line_num}: {error}.") from None


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ValueError(f"{text[:40]!r} is not a positive number")
    return value


# --- fitted laws ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class StoredLaw:
    """A law, with the laws of the first bootstraps, and the most FLOPs that were measured."""

    law: ScalingLaw
    resampled: Sequence[ScalingLaw] = ()
    largest_flops: float = math.nan


def write_law(fitted: FittedLaw, largest_flops: float, path: Path) -> None:
    """Write a fitted law as JSON; raises ConfigError if `path` cannot be written."""
    content = {
        "law": dataclasses.asdict(fitted.law),
        "method": fitted.method,
        "points": fitted.points,
        "objective": fitted.objective,
        "standard_errors": fitted.errors(),
        "largest_flops": largest_flops,
        "sample_fields": LAW_FIELDS,
        "samples": fitted.samples[:STORED_SAMPLES].tolist(),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}).", fix="Give another --out."
        ) from None


def read_law(path: Path) -> StoredLaw:
    """A law that `write_law` wrote; raises DataError."""
    try:
        content = parse_json(read_regular_file(path, MAX_TABLE_BYTES))
        law = ScalingLaw(**content["law"])
        if not (isinstance(law.count, str) and isinstance(law.source, str) and _is_law(law)):
            raise ValueError("a parameter is not a positive number")
        resampled = [law.with_values(map(float, row)) for row in content["samples"]]
        return StoredLaw(law, list(filter(_is_law, resampled)), float(content["largest_flops"]))
    except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"{path}: is not a fitted law ({type(error).__name__}: {error}).",
            fix="Give the file of scaling-laws fit --out.",
        ) from None


def _is_law(law: ScalingLaw) -> bool:
    """Whether it can be evaluated; A or B of a bootstrap is inf if the points do not fix it."""
    constant, *others = (getattr(law, name) for name in LAW_FIELDS)
    numbers = all(isinstance(n, int | float) and math.isfinite(n) for n in (constant, *others))
    return numbers and constant >= 0 and min(others) > 0
