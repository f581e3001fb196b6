"""Checks of the [optimizer] section."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from titanlite.errors import ConfigError
from titanlite.optim.config import OPTIMIZERS, OptimizerConfig
from titanlite.optim.low_memory import UNQUANTIZED
from titanlite.settings import format_value


def check_optimizer_config(config: OptimizerConfig, param_dtype: str) -> Iterator[ConfigError]:
    """Reject keys that a group's optimizer lacks, and states that do not suit training.dtype."""
    for section in _sections(config):
        yield from _check_moment_rates(section, param_dtype)
        yield from _check_muon_state(section)
        yield from _check_group_keys(section)
        if config.early_step_in_backward and not section.has("early_step_in_backward"):
            yield ConfigError(
                f"optimizer.early_step_in_backward = true: {section.key('name')} is"
                f" {section.config.name}, which updates only after backward.",
                fix="Remove optimizer.early_step_in_backward, or use"
                f" {_having('early_step_in_backward')}.",
            )


class _Section(NamedTuple):
    """[optimizer], or the settings of one of its groups."""

    config: OptimizerConfig
    own_keys: Mapping[str, Any] = MappingProxyType({})  # of a group: those that it sets
    group: int | None = None  # index in optimizer.groups

    def has(self, key: str) -> bool:
        return any(field.name == key for field in dataclasses.fields(self.config))

    def sets(self, *keys: str) -> bool:
        """Whether it is [optimizer], or a group that sets one of the keys."""
        return self.group is None or any(key in self.own_keys for key in keys)

    def key(self, name: str) -> str:
        """A key as users write it in an error."""
        prefix = "optimizer" if self.group is None else f"optimizer.groups[{self.group}]"
        return f"{prefix}.{name}"


def _sections(config: OptimizerConfig) -> Iterator[_Section]:
    """[optimizer], then the settings of each of its groups."""
    yield _Section(config)
    for index, group in enumerate(config.groups):
        overrides = group.overrides()
        yield _Section(config.replace(**overrides), overrides, index)


def _having(key: str) -> str:
    names = {name: [f.name for f in dataclasses.fields(keys)] for name, keys in OPTIMIZERS.items()}
    return ", ".join(name for name, keys in names.items() if key in keys)


def _check_group_keys(section: _Section) -> Iterator[ConfigError]:
    """Reject keys of a group that its optimizer does not have; the reader knows no groups."""
    for key, value in section.own_keys.items():
        if not section.has(key):
            yield ConfigError(
                f"{section.key(key)} = {format_value(value)}: {section.config.name} has no such"
                " key.",
                fix=f"Remove it. Those with {key}: {_having(key)}.",
            )


def whole_matrix_optimizers(config: OptimizerConfig) -> list[str]:
    """Names of the optimizers of a job whose update needs whole matrices: Muon and SOAP."""
    configs = [section.config for section in _sections(config)]
    return list(dict.fromkeys(c.name for c in configs if c.recipe.hidden_only))


def _check_muon_state(section: _Section) -> Iterator[ConfigError]:
    """Reject state dtypes that Muon does not have: those with one scale per block of a row."""
    config = section.config
    if config.name == "Muon" and section.sets("name") and config.state_dtype not in UNQUANTIZED:
        yield ConfigError(
            f'optimizer.state_dtype = "{config.state_dtype}": {section.key("name")} is Muon, whose'
            f" momentum is stored in {' or '.join(UNQUANTIZED)}.",
            fix='Use optimizer.state_dtype = "bfloat16".',
        )


def _check_moment_rates(section: _Section, param_dtype: str) -> Iterator[ConfigError]:
    """Reject decay rates so near to 1 that bfloat16 rounds away a moment's change per step."""
    config = section.config
    follows_params = config.state_dtype == "float32" and param_dtype == "bfloat16"
    if not follows_params and config.state_dtype != "bfloat16":
        return
    source = "training.dtype" if follows_params else "optimizer.state_dtype"
    alternative = 'training.dtype = "float32".'
    if section.has("state_dtype"):
        alternative = 'optimizer.state_dtype = "8bit", whose scales are float32.'
    highest = 1 - torch.finfo(torch.bfloat16).eps / 2
    for key in config.recipe.moment_rates:
        if section.sets(key, "name") and (rate := getattr(config, key)) > highest:
            yield ConfigError(
                f'{section.key(key)} = {rate:g}: with {source} = "bfloat16" moments are bfloat16,'
                f" which rounds away a change of {1 - rate:g} of their value per step.",
                fix=f"Use at most {highest:g}, or {alternative}",
            )
