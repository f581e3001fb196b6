"""The optimizers of a model, built from [optimizer]."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from titanlite.models.mup import WidthScale
from titanlite.optim.config import OptimizerConfig
from titanlite.optim.fp32_vectors import is_low_vector, updating_vectors_in_float32
from titanlite.optim.lr_schedule import UNSCHEDULED, RateSchedule
from titanlite.optim.optimizer_set import INITIAL_WEIGHT_DECAY, LR_FACTOR, SCHEDULE, OptimizerSet
from titanlite.optim.recipe import MatrixFacts, OptimizerRecipe

_RecipeOfParameter = tuple[str, nn.Parameter, OptimizerRecipe]  # with its name


def build_optimizer(
    model: nn.Module,
    config: OptimizerConfig,
    facts: MatrixFacts | None = None,
    schedule: RateSchedule = UNSCHEDULED,
    widths: Mapping[str, WidthScale] | None = None,
) -> OptimizerSet:
    """The optimizers over the shards of a model's parameters.

    `facts`: needed if one of them is for hidden matrices. `widths`: the muP scale of each
    parameter, by name; empty or None: no scaling.
    """
    kinds: list[tuple[tuple, list[_RecipeOfParameter]]] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        recipe = recipe_of_parameter(name, parameter.shape, config, facts)
        _members_of(kinds, (recipe.optimizer_class, recipe.options)).append(
            (name, parameter, recipe)
        )
    optimizers = []
    for (optimizer_class, options), parameters in kinds:
        if any(is_low_vector(parameter) for _, parameter, _ in parameters):
            optimizer_class = updating_vectors_in_float32(optimizer_class)
        groups = _parameter_groups(parameters, config, facts, schedule, widths or {})
        optimizers.append(optimizer_class(groups, **options))
    return OptimizerSet(optimizers, config.lr, schedule)


def _members_of(groups: list[tuple[Any, list]], key: Any) -> list:
    """The list of `key`, which may have no hash; it is added if the key is new."""
    if all(other != key for other, _ in groups):
        groups.append((key, []))
    return next(members for other, members in groups if other == key)


def recipe_of_parameter(
    name: str, shape: torch.Size, config: OptimizerConfig, facts: MatrixFacts | None
) -> OptimizerRecipe:
    """The recipe for a parameter: that of its settings, or AdamW's.

    An optimizer for hidden matrices leaves other parameters to AdamW. But a group that names such
    an optimizer uses it for all its matrices, hidden or not.
    """
    section = config.of_parameter(name)
    recipe = section.recipe
    if not recipe.hidden_only:
        return recipe
    assert facts is not None, f"{section.name} needs the facts of the model"
    group = config.group_of(name)
    is_named = group is not None and group.name is not None
    if facts.is_hidden(name, shape) or (is_named and len(shape) == 2):
        return recipe
    return config.of_parameter(name, "AdamW").recipe


def _parameter_groups(
    parameters: Iterable[_RecipeOfParameter],
    config: OptimizerConfig,
    facts: MatrixFacts | None,
    schedule: RateSchedule,
    widths: Mapping[str, WidthScale],
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: the parameters with equal settings are one group."""
    groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
    for name, parameter, recipe in parameters:
        section, group = config.of_parameter(name), config.group_of(name)
        lr_factor, weight_decay = group.lr_factor if group else 1.0, section.weight_decay
        if name in widths:
            assert recipe.mup_rule is not None, (
                f"muP has no rule for {section.name}; check_mup_optimizers should have refused it"
            )
            mup_factor = recipe.mup_rule(widths[name])
            # lr * weight_decay stays that of the base model: 1 / (lr * weight_decay) is the number
            # of steps that the weights average over (https://arxiv.org/abs/2405.13698).
            lr_factor, weight_decay = lr_factor * mup_factor, weight_decay / mup_factor
        keys = {
            "weight_decay": weight_decay,
            INITIAL_WEIGHT_DECAY: weight_decay,
            LR_FACTOR: lr_factor,
            SCHEDULE: schedule.replace(group.schedule_overrides()) if group else schedule,
        }
        if recipe.parameter_options is not None:
            assert facts is not None, f"{section.name} needs the facts of the model"
            keys |= recipe.parameter_options(name, facts)
        _members_of(groups, keys).append(parameter)
    return [{"params": members, **keys} for keys, members in groups]
