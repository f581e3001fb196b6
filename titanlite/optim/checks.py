"""Checks of the [optimizer] section."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from titanlite.errors import ConfigError
from titanlite.kernels.gpu import FLOAT8_FALLBACK_SINCE, Gpu
from titanlite.optim.adam import UNQUANTIZED
from titanlite.optim.build import OPTIMIZERS, OptimizerConfig, recipe_of
from titanlite.optim.groups import ParameterGroupConfig, matches_any
from titanlite.settings import format_value

# Keys that every optimizer uses; the recipe of an optimizer lists the others that it uses.
COMMON_KEYS = ("name", "lr", "weight_decay", "no_decay", "groups")
NEEDED_BY_ALL = ("early_step_in_backward",)  # keys that every optimizer of a job must use


def check_optimizer_config(config: OptimizerConfig, param_dtype: str) -> Iterator[ConfigError]:
    """Reject settings without an effect, and moments whose decay bfloat16 would round away.

    `param_dtype`: training.dtype.
    """
    sections = list(_sections(config))
    for section in sections:
        yield from _check_moment_rates(section, param_dtype)
        yield from _check_nesterov(section)
        yield from _check_muon_state(section)
        if section.is_group:
            yield from _check_unused_keys(section, section.own_keys, [section])
    base = sections[0]
    for key in base.own_keys:
        # Groups that set the key themselves do not take it from [optimizer].
        users = [s for s in sections if key not in s.own_keys or not s.is_group]
        yield from _check_unused_keys(base, [key], users)
    if config.low_memory and config.implementation == "foreach":
        keys = tuple(k for k in ("state_dtype", "offload") if k in base.own_keys)
        stated = " and ".join(f"{key} = {format_value(getattr(config, key))}" for key in keys)
        yield ConfigError(
            f"optimizer.{stated}: updates one parameter at a time, which optimizer.implementation ="
            ' "foreach" does not.',
            fix='Use "fused" (one compiled kernel per parameter), or "for-loop".',
            keys=(*(f"optimizer.{key}" for key in keys), "optimizer.implementation"),
        )


class _Section(NamedTuple):
    """[optimizer], or the settings of one of its groups."""

    config: OptimizerConfig
    own_keys: list[str]  # those that it sets; of [optimizer], those that are not the default
    group: int | None = None  # index in optimizer.groups

    @property
    def is_group(self) -> bool:
        return self.group is not None

    def uses(self, key: str) -> bool:
        return key in COMMON_KEYS or key in recipe_of(self.config).uses

    def key(self, name: str) -> str:
        """A key as users write it in an error."""
        prefix = "optimizer" if self.group is None else f"optimizer.groups[{self.group}]"
        return f"{prefix}.{name}"

    def key_in_toml(self, name: str) -> str:
        return "optimizer.groups" if self.is_group else f"optimizer.{name}"


def _sections(config: OptimizerConfig) -> Iterator[_Section]:
    """[optimizer], then the settings of each of its groups."""
    default = OptimizerConfig()
    names = [field.name for field in dataclasses.fields(config)]
    yield _Section(config, [n for n in names if getattr(config, n) != getattr(default, n)])
    for index, group in enumerate(config.groups):
        overrides: dict[str, Any] = group.overrides()
        yield _Section(dataclasses.replace(config, **overrides), list(overrides), index)


def _check_unused_keys(
    section: _Section, keys: Iterable[str], users: list[_Section]
) -> Iterator[ConfigError]:
    """Reject keys of `section` that no optimizer uses.

    `users`: the sections that have these keys. All must use those of `NEEDED_BY_ALL`.
    """
    for key in keys:
        combine = all if key in NEEDED_BY_ALL else any
        if combine(user.uses(key) for user in users):
            continue
        optimizers = dict.fromkeys(user.config.name for user in users)
        supporting = [n for n in OPTIMIZERS if _supports(section.config, n, key)]
        yield ConfigError(
            f"{section.key(key)} = {format_value(getattr(section.config, key))}: applies to"
            f" {_and(supporting)} only; {section.key('name')} is {_and(optimizers)}.",
            fix=f"Remove {section.key(key)}, or use {supporting[0]}.",
            keys=tuple(dict.fromkeys((section.key_in_toml(key), section.key_in_toml("name")))),
        )


def _supports(config: OptimizerConfig, name: str, key: str) -> bool:
    return key in recipe_of(dataclasses.replace(config, name=name)).uses


def _and(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _check_nesterov(section: _Section) -> Iterator[ConfigError]:
    config = section.config
    if config.nesterov and not config.momentum and section.uses("nesterov"):
        yield ConfigError(
            f"{section.key('nesterov')} = true: {section.key('momentum')} is 0, so there is no"
            " momentum to look ahead by.",
            fix=f"Set {section.key('momentum')}, for example to 0.9, or remove nesterov.",
            keys=(section.key_in_toml("nesterov"), section.key_in_toml("momentum")),
        )


def check_group_patterns(
    groups: Sequence[ParameterGroupConfig], names: Collection[str]
) -> Iterator[ConfigError]:
    """Reject patterns that match none of the model's parameters, and groups that get none."""
    left = set(names)
    for index, group in enumerate(groups):
        key = f"optimizer.groups[{index}].match"
        for pattern in group.match:
            if not any(matches_any(name, [pattern]) for name in names):
                yield ConfigError(
                    f'{key} = "{pattern}": matches no parameter of the model.',
                    fix=_similar_names(pattern, names),
                    keys=("optimizer.groups",),
                )
        matched = {name for name in names if group.matches(name)}
        if matched and not matched & left:
            yield ConfigError(
                f"{key} = {format_value(group.match)}: every parameter that matches is in an"
                " earlier group, and the first group that matches applies.",
                fix="Move this group up, or leave it out.",
                keys=("optimizer.groups",),
            )
        left -= matched


def _similar_names(pattern: str, names: Collection[str]) -> str:
    """The fix for a pattern that matches nothing: the names that resemble it most."""
    shown = difflib.get_close_matches(pattern, names, 2, 0.5) or list(names)[:2]
    return f"* matches any text. Names of the model are, for example, {' and '.join(shown)}."


def whole_matrix_optimizers(config: OptimizerConfig) -> list[str]:
    """Names of the optimizers of a job whose update needs whole matrices: Muon and SOAP."""
    configs = [section.config for section in _sections(config)]
    return list(dict.fromkeys(c.name for c in configs if recipe_of(c).hidden_only))


def _check_muon_state(section: _Section) -> Iterator[ConfigError]:
    """Reject state dtypes that Muon does not have: those with one scale per block of a row."""
    config = section.config
    is_new = not section.is_group or "name" in section.own_keys
    if config.name == "Muon" and is_new and config.state_dtype not in UNQUANTIZED:
        yield ConfigError(
            f'optimizer.state_dtype = "{config.state_dtype}": {section.key("name")} is Muon, whose'
            f" momentum is stored in {' or '.join(UNQUANTIZED)}.",
            fix='Use optimizer.state_dtype = "bfloat16".',
            keys=tuple(dict.fromkeys(("optimizer.state_dtype", section.key_in_toml("name")))),
        )


def _check_moment_rates(section: _Section, param_dtype: str) -> Iterator[ConfigError]:
    """Reject decay rates so near to 1 that bfloat16 rounds away a moment's change per step."""
    config = section.config
    state_dtype = config.state_dtype if section.uses("state_dtype") else "float32"
    follows_params = state_dtype == "float32" and param_dtype == "bfloat16"
    if not follows_params and state_dtype != "bfloat16":
        return
    source = "training.dtype" if follows_params else "optimizer.state_dtype"
    alternative = 'training.dtype = "float32".'
    if section.uses("state_dtype"):
        alternative = 'optimizer.state_dtype = "8bit", whose scales are float32.'
    highest = 1 - torch.finfo(torch.bfloat16).eps / 2
    for key in recipe_of(config).moment_rates:
        is_own = not section.is_group or {key, "name"} & set(section.own_keys)
        if is_own and (rate := getattr(config, key)) > highest:
            yield ConfigError(
                f'{section.key(key)} = {rate:g}: with {source} = "bfloat16" moments are bfloat16,'
                f" which rounds away a change of {1 - rate:g} of their value per step.",
                fix=f"Use at most {highest:g}, or {alternative}",
                keys=(section.key_in_toml(key), source),
            )


def check_optimizer_device(config: OptimizerConfig, gpu: Gpu | None) -> Iterator[ConfigError]:
    """Reject an update that inductor cannot compile for this GPU. `gpu` None: a CPU."""
    is_compiled = config.state_dtype == "float8" and config.implementation == "fused"
    if is_compiled and gpu is not None and not gpu.compiles_float8:
        yield ConfigError(
            f'optimizer.state_dtype = "float8": torch {torch.__version__} compiles its update for'
            f" GPUs of compute capability 8.9 or later only; this device is {gpu}.",
            fix=f'Use "8bit", which takes the same memory, torch {FLOAT8_FALLBACK_SINCE} or newer,'
            ' or optimizer.implementation = "for-loop", which does not compile and is slower.',
            keys=("optimizer.state_dtype", "optimizer.implementation"),
        )
