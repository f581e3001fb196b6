"""The fraction of its published peaks that a GPU reaches: one set of numbers for each GPU type.

`efficiency.toml` has the fitted sets, and says how they were fitted.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from titanlite.files import parse_toml

DEFAULT = "default"  # the set of a GPU type that was not fitted


@dataclass(frozen=True)
class Efficiency:
    """Fractions of the published figures of a GPU and of its links."""

    matmul: float  # of the dense peak, for a large matmul in bfloat16 or float32
    attention: float  # of the same peak, for a long sequence with heads of 128
    memory: float  # of the memory's bandwidth
    link: float  # of the bandwidth between the GPUs of a domain
    network: float
    float8: float  # of the peak in float8
    float4: float

    def scaled(self, factor: float) -> Efficiency:
        """Every fraction times `factor`, at most 1."""
        values = dataclasses.asdict(self).items()
        return Efficiency(**{name: min(1.0, value * factor) for name, value in values})


@cache
def efficiency_sets() -> dict[str, Efficiency]:
    """The sets in `efficiency.toml`, by GPU type."""
    text = files("titanlite_planner.time").joinpath("efficiency.toml").read_text(encoding="utf-8")
    return {name: Efficiency(**table) for name, table in parse_toml(text)["efficiency"].items()}


@cache
def find_efficiency(gpu: str) -> Efficiency:
    """The set of a GPU type, or that of types that were not fitted."""
    sets = efficiency_sets()
    return sets.get(gpu, sets[DEFAULT])
