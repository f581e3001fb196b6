"""[optimizer]: the optimizer, its hyperparameters and the storage of its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import nn

from titanlite.errors import ConfigError
from titanlite.kernels.gpu import FLOAT8_FALLBACK_SINCE, Gpu
from titanlite.models.mup import WidthScale
from titanlite.optim.adam import LowMemoryAdam, MomentOptions, StateDtype
from titanlite.optim.fp32_vectors import is_low_vector, updating_vectors_in_float32
from titanlite.optim.groups import ParameterGroupConfig, matches_any
from titanlite.optim.mup import MupRule, elementwise_update, gradient_update
from titanlite.optim.optimizer_set import LR_FACTOR, OptimizerSet
from titanlite.optim.torch_adam import ConditionalAdam, ConditionalAdamW
from titanlite.settings import Fraction, OneOf, Range


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer] The optimizer, its hyperparameters and the storage of its state."""

    name: Annotated[str, OneOf(OPTIMIZERS.keys)] = "AdamW"
    # algorithm; Adam adds weight decay to the gradients, AdamW applies it to the weights
    lr: Annotated[float, Range(0)] = 8e-4  # peak learning rate
    beta1: Fraction = 0.9  # decay rate of Adam's first moment
    beta2: Fraction = 0.95  # decay rate of Adam's second moment
    eps: Annotated[float, Range(0)] = 1e-8  # added to the root of Adam's second moment
    weight_decay: Annotated[float, Range(0)] = 0.1  # multiplied by the learning rate in AdamW
    momentum: Fraction = 0.0  # of SGD
    no_decay: list[str] = field(default_factory=lambda: ["*norm.weight", "*bias"])
    # name patterns of parameters without weight decay
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # for-loop: one kernel per operation per parameter; foreach: one per operation; fused: one for
    # everything (SGD: one per operation per parameter, as for-loop)
    groups: list[ParameterGroupConfig] = field(default_factory=list)
    # parameters with other settings: { match = ["output.*"], lr_factor = 0.5 }
    early_step_in_backward: bool = False
    # update each parameter in backward, as soon as its gradient is complete, and free the gradient
    state_dtype: StateDtype = "float32"
    # dtype of Adam's moments; float32: same as training.dtype; 8bit, 4bit and float8: one scale per
    # block of 128 elements of a row, vectors stay float32
    offload: bool = False
    # store Adam's moments in host memory; every step copies them to the GPU and back

    @property
    def low_memory(self) -> bool:
        """Whether Adam's moments take less GPU memory than in torch's own optimizers."""
        return self.state_dtype != "float32" or self.offload


class OptimizerRecipe(NamedTuple):
    """An optimizer class and its arguments other than the parameter groups."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]
    mup_rule: MupRule | None = None  # how muP scales the learning rate; None: refused with muP


def _sgd(config: OptimizerConfig) -> OptimizerRecipe:
    # Not fused: that kernel does not support sharded tensors (torch 2.13). With three mesh
    # dimensions DTensor takes seconds to plan a foreach at the first step.
    foreach = config.implementation == "foreach"
    options = {"lr": config.lr, "momentum": config.momentum, "foreach": foreach}
    return OptimizerRecipe(torch.optim.SGD, options, gradient_update)


def _adam(config: OptimizerConfig) -> OptimizerRecipe:
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    foreach, fused = config.implementation == "foreach", config.implementation == "fused"
    if config.low_memory:
        moments = MomentOptions(config.state_dtype, config.offload, compiled=fused)
        options |= {"decoupled": config.name == "AdamW", "moments": moments}
        return OptimizerRecipe(LowMemoryAdam, options, elementwise_update)
    options |= {"foreach": foreach, "fused": fused}
    decoupled = config.name == "AdamW"
    adamw, adam = torch.optim.AdamW, torch.optim.Adam
    if fused:
        adamw, adam = ConditionalAdamW, ConditionalAdam
    return OptimizerRecipe(adamw if decoupled else adam, options, elementwise_update)


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], OptimizerRecipe]] = {
    # values of optimizer.name; a new optimizer is one line here
    "AdamW": _adam,
    "Adam": _adam,
    "SGD": _sgd,
}
ADAM_NAMES = ("AdamW", "Adam")  # those with the settings of Adam's moments


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, widths: Mapping[str, WidthScale] | None = None
) -> OptimizerSet:
    """The optimizers over the shards of a model's parameters.

    `widths`: the muP scale of each parameter, by name; empty or None: no scaling.
    """
    widths = widths or {}
    recipes: list[tuple[OptimizerRecipe, list[_NamedParameter]]] = []
    for name, parameter in model.named_parameters():
        section, _ = settings_of(name, config)
        recipe = OPTIMIZERS[section.name](section)
        same = next((own for other, own in recipes if other == recipe), None)
        if same is None:
            recipes.append((recipe, same := []))
        same.append((name, parameter))
    optimizers = []
    for recipe, parameters in recipes:
        optimizer_class = recipe.optimizer_class
        if any(is_low_vector(parameter) for _, parameter in parameters):
            optimizer_class = updating_vectors_in_float32(optimizer_class)
        groups = _parameter_groups(parameters, config, recipe.mup_rule, widths)
        optimizers.append(optimizer_class(groups, **recipe.options))
    return OptimizerSet(optimizers)


_NamedParameter = tuple[str, nn.Parameter]


def settings_of(name: str, config: OptimizerConfig) -> tuple[OptimizerConfig, float]:
    """(settings of one parameter, factor of its learning rate), by its name."""
    group = next((group for group in config.groups if group.matches(name)), None)
    if group is None or group.weight_decay is None:
        weight_decay = 0.0 if matches_any(name, config.no_decay) else config.weight_decay
    else:
        weight_decay = group.weight_decay
    overrides = {**(group.overrides() if group else {}), "weight_decay": weight_decay}
    return dataclasses.replace(config, **overrides), group.lr_factor if group else 1.0


def _parameter_groups(
    parameters: Iterable[_NamedParameter],
    config: OptimizerConfig,
    mup_rule: MupRule | None,
    widths: Mapping[str, WidthScale],
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: parameters of equal weight decay and learning-rate factor."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in parameters:
        section, lr_factor = settings_of(name, config)
        weight_decay = section.weight_decay
        if name in widths:
            assert mup_rule is not None, f"checked: muP has a rule for {section.name}"
            mup_factor = mup_rule(widths[name])
            # A step decays by lr * weight_decay, which stays that of the base model: the steps that
            # the weights average over must not depend on the width (https://arxiv.org/abs/2405.13698).
            lr_factor, weight_decay = lr_factor * mup_factor, weight_decay / mup_factor
        groups.setdefault((weight_decay, lr_factor), []).append(parameter)
    return [
        {"params": members, "weight_decay": weight_decay, LR_FACTOR: lr_factor}
        for (weight_decay, lr_factor), members in groups.items()
    ]


def check_optimizer_config(config: OptimizerConfig, param_dtype: str) -> Iterator[ConfigError]:
    """Reject optimizer-state settings that this optimizer lacks, or that round updates to zero.

    `param_dtype`: training.dtype.
    """
    yield from _check_bfloat16_moments(config, param_dtype)
    if not config.low_memory:
        return
    settings = {"state_dtype": f'"{config.state_dtype}"'} if config.state_dtype != "float32" else {}
    settings |= {"offload": "true"} if config.offload else {}
    stated = f"optimizer.{' and '.join(f'{key} = {value}' for key, value in settings.items())}"
    keys = tuple(f"optimizer.{key}" for key in settings)
    if config.name not in ADAM_NAMES:
        yield ConfigError(
            f"{stated}: applies to {' and '.join(ADAM_NAMES)} only; optimizer.name is"
            f" {config.name}.",
            fix=f"Remove {' and '.join(keys)}, or use AdamW.",
            keys=(*keys, "optimizer.name"),
        )
    if config.implementation == "foreach":
        yield ConfigError(
            f"{stated}: updates one parameter at a time, which optimizer.implementation ="
            ' "foreach" does not.',
            fix='Use "fused" (one compiled kernel per parameter), or "for-loop".',
            keys=(*keys, "optimizer.implementation"),
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


def _check_bfloat16_moments(config: OptimizerConfig, param_dtype: str) -> Iterator[ConfigError]:
    """Reject decay rates whose change per step is less than half of bfloat16's last digit."""
    follows_params = config.state_dtype == "float32" and param_dtype == "bfloat16"
    if not follows_params and config.state_dtype != "bfloat16":
        return
    source = "training.dtype" if follows_params else "optimizer.state_dtype"
    alternative = 'optimizer.state_dtype = "8bit", whose scales are float32.'
    if config.name not in ADAM_NAMES:
        alternative = 'training.dtype = "float32".'
    highest = 1 - torch.finfo(torch.bfloat16).eps / 2
    for key in ("beta1", "beta2") if config.name in ADAM_NAMES else ("momentum",):
        if (rate := getattr(config, key)) > highest:
            yield ConfigError(
                f'optimizer.{key} = {rate:g}: with {source} = "bfloat16" moments are bfloat16,'
                f" which rounds away a change of {1 - rate:g} of their value per step.",
                fix=f"Use at most {highest:g}, or {alternative}",
                keys=(f"optimizer.{key}", source),
            )
