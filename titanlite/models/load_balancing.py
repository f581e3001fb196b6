"""How the load of the experts is balanced: the [experts] section, and what a family uses."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Annotated

from titanlite.errors import ConfigError
from titanlite.models.router import ExpertSizes, LoadBalancing
from titanlite.models.sizes import SizesT
from titanlite.models.spec import ModelSpec
from titanlite.settings import Range


@dataclass(frozen=True)
class ExpertsConfig:
    """[experts] How the load of the experts is balanced; unset: as the model family does."""

    aux_loss_coef: Annotated[float, Range(0)] | None = None
    # weight of the auxiliary loss, which is 1 under equal loads; usual: 1e-3 to 1e-2; 0: none
    z_loss_coef: Annotated[float, Range(0)] | None = None
    # weight of the squared log-sum-exp of the router's logits; usual: 1e-3; 0: none
    bias_update_rate: Annotated[float, Range(0)] | None = None
    # change of an expert's selection bias in a step, towards the mean load; usual: 1e-3; 0: none


def resolve_load_balancing(
    config: ExpertsConfig, spec: ModelSpec[SizesT], sizes: SizesT
) -> LoadBalancing:
    """The settings of the section, and the family's where it has none."""
    given = {name: value for name, value in vars(config).items() if value is not None}
    return replace(spec.load_balancing(sizes), **given)


def check_load_balancing(
    config: ExpertsConfig, spec: ModelSpec[SizesT], sizes: SizesT
) -> Iterator[ConfigError]:
    """Reject settings that the model has nothing for."""
    values = {name: value for name, value in vars(config).items() if value is not None}
    experts: ExpertSizes | None = spec.experts(sizes)
    if values and experts is None:
        shown = ", ".join(f"experts.{name} = {value:g}" for name, value in values.items())
        yield ConfigError(
            f'{shown}: model.name = "{spec.name}" has no experts.',
            fix="Remove [experts], or use a family with experts.",
        )
    elif config.bias_update_rate and experts is not None and not experts.selection_bias:
        yield ConfigError(
            f"experts.bias_update_rate = {config.bias_update_rate:g}: the router of model.name ="
            f' "{spec.name}" selects without a bias.',
            fix="Remove it, and use experts.aux_loss_coef.",
        )
