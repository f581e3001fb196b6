"""Matrix products in 8 bits, by torchao."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from titanlite.settings import Built


@dataclass(frozen=True)
class Float8Config:
    """[quantize.linear.float8] Matrix products in 8 bits."""

    enable_fsdp_float8_all_gather: Annotated[bool, Built((False,), "Float8")] = False
    # gather weights in 8 bits
    precompute_float8_dynamic_scale_for_fsdp: Annotated[bool, Built((False,), "Float8")] = False
    # all scales in one reduction
    recipe_name: Annotated[
        Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, Built((None,), "Float8")
    ] = None  # what shares a scale
    filter_fqns: Annotated[list[str], Built(([],), "Float8")] = field(default_factory=list)
    # modules left in high precision
    emulate: Annotated[bool, Built((False,), "Float8")] = False  # on hardware without it


@dataclass(frozen=True)
class QuantizeLinearConfig:
    float8: Float8Config = field(default_factory=Float8Config)


@dataclass(frozen=True)
class QuantizeConfig:
    linear: QuantizeLinearConfig = field(default_factory=QuantizeLinearConfig)
