"""[optimizer]: the optimizer, its hyperparameters and the storage of its state."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import torch
from torch import nn

from titanlite.models.mup import WidthScale
from titanlite.optim.adafactor import Adafactor, adafactor_state_bytes
from titanlite.optim.adam import (
    ConditionalAdam,
    ConditionalAdamW,
    LowMemoryAdam,
    MomentOptions,
    StateDtype,
    moment_bytes,
)
from titanlite.optim.elementwise import SGD, Lion
from titanlite.optim.fp32_vectors import (
    is_low_vector,
    state_bytes_of_parameter,
    updating_vectors_in_float32,
)
from titanlite.optim.groups import ParameterGroupConfig, matches_any
from titanlite.optim.lr_schedule import UNSCHEDULED, RateSchedule
from titanlite.optim.muon import COMPUTE_DTYPE, HEAD_ROWS, Muon
from titanlite.optim.mup import elementwise_update, gradient_update, orthogonal_update
from titanlite.optim.optimizer_set import (
    INITIAL_WEIGHT_DECAY,
    LR_FACTOR,
    SCHEDULE,
    OptimizerSet,
)
from titanlite.optim.owned_matrices import largest_round
from titanlite.optim.recipe import MatrixFacts, OptimizerRecipe
from titanlite.optim.soap import SOAP, soap_flops, soap_state_bytes
from titanlite.settings import Fraction, OneOf, Positive, Range


@dataclass(frozen=True)
class OptimizerConfig:
    """[optimizer] The optimizer, its hyperparameters and the storage of its state."""

    name: Annotated[str, OneOf(OPTIMIZERS.keys)] = "AdamW"
    # algorithm; Adam and SGD add weight decay to the gradients, the others apply it to the weights;
    # Muon and SOAP update the matrices inside the blocks, and AdamW all other parameters
    lr: Annotated[float, Range(0)] = 8e-4  # peak learning rate
    beta1: Fraction = 0.9
    # Adam, SOAP: decay rate of the first moment; Lion: weight of the moment in the update
    beta2: Fraction = 0.95
    # Adam, SOAP: decay rate of the second moment, and of SOAP's statistics; Lion: of the moment
    eps: Annotated[float, Range(0)] = 1e-8  # added to the root of Adam's and SOAP's second moment
    weight_decay: Annotated[float, Range(0)] = 0.1
    # multiplied by the weights and the learning rate, and subtracted; Adam and SGD: see `name`
    momentum: Fraction = 0.0  # of SGD
    nesterov: bool = False  # SGD: look ahead by one step of the momentum
    beta2_decay: Annotated[float, Range(-1, -0.1)] = -0.8
    # Adafactor: exponent c of the decay rate 1 - t^c of its second moment at step t
    clip_threshold: Annotated[float, Range(0.01)] = 1.0
    # Adafactor: largest RMS of a parameter's update, as a factor of the learning rate
    scale_parameter: bool = True
    # Adafactor: multiply the learning rate by the RMS of the parameter (at least 0.001)
    precondition_frequency: Positive = 10  # SOAP: steps between two updates of the eigenbasis
    muon_momentum: Fraction = 0.95  # decay rate of Muon's momentum
    muon_per_head: bool = False
    # Muon: orthogonalize the rows of each head of the query, key and value projections separately
    no_decay: list[str] = field(default_factory=lambda: ["*norm.weight", "*bias"])
    # name patterns of parameters without weight decay
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    # for-loop: one kernel per operation per parameter; foreach: one per operation; fused: one for
    # everything (SGD and Lion: as for-loop)
    groups: list[ParameterGroupConfig] = field(default_factory=list)
    # parameters with other settings: { match = ["output.*"], lr_factor = 0.5 }
    early_step_in_backward: bool = False
    # update each parameter in backward, as soon as its gradient is complete, and free the gradient
    state_dtype: StateDtype = "float32"
    # dtype of Adam's moments, and of Muon's momentum (float32 or bfloat16); float32: same as
    # training.dtype; 8bit, 4bit and float8: one scale per block of up to 128 elements of a row, and
    # float32 for vectors and for rows whose length is not a multiple of 32
    offload: bool = False
    # store Adam's moments in host memory; every step copies them to the GPU and back

    def __str__(self) -> str:
        groups = [f"{', '.join(group.match)}: {group.describe()}" for group in self.groups]
        own = f"{self.name}, peak learning rate {self.lr:g}, weight decay {self.weight_decay:g}"
        state = f", {self.state_dtype} moments" if self.state_dtype != "float32" else ""
        return own + state + "".join(f"; {group}" for group in groups)

    @property
    def low_memory(self) -> bool:
        """Whether Adam's moments take less GPU memory than in torch's own optimizers."""
        return self.state_dtype != "float32" or self.offload


def _sgd(config: OptimizerConfig) -> OptimizerRecipe:
    options = {"lr": config.lr, "momentum": config.momentum, "nesterov": config.nesterov}
    return OptimizerRecipe(
        SGD,
        {**options, "foreach": config.implementation == "foreach"},
        uses=("momentum", "nesterov", "implementation", "early_step_in_backward"),
        state_bytes=_one_moment if config.momentum else _no_state,
        moment_rates=("momentum",),
        mup_rule=gradient_update,
    )


def _lion(config: OptimizerConfig) -> OptimizerRecipe:
    options = {"lr": config.lr, "betas": (config.beta1, config.beta2)}
    return OptimizerRecipe(
        Lion,
        {**options, "foreach": config.implementation == "foreach"},
        uses=("beta1", "beta2", "implementation", "early_step_in_backward"),
        state_bytes=_one_moment,
        moment_rates=("beta2",),
        mup_rule=elementwise_update,
    )


def _adafactor(config: OptimizerConfig) -> OptimizerRecipe:
    own = ("beta2_decay", "clip_threshold", "scale_parameter")
    options = {"lr": config.lr, **{key: getattr(config, key) for key in own}}
    return OptimizerRecipe(
        Adafactor,
        options,
        uses=own,
        state_bytes=adafactor_state_bytes,
        # With the scale, the update depends on max(RMS of the parameter, 0.001). The initial RMS of
        # a wide model is below 0.001, so no muP rule holds.
        mup_rule=None if config.scale_parameter else elementwise_update,
    )


def _adam(config: OptimizerConfig) -> OptimizerRecipe:
    options: dict[str, Any] = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
    }
    foreach, fused = config.implementation == "foreach", config.implementation == "fused"
    decoupled = config.name == "AdamW"
    if config.low_memory:
        moments = MomentOptions(config.state_dtype, config.offload, compiled=fused)
        optimizer_class: type[torch.optim.Optimizer] = LowMemoryAdam
        options |= {"decoupled": decoupled, "moments": moments}
    elif fused:
        optimizer_class = ConditionalAdamW if decoupled else ConditionalAdam
        options |= {"fused": True}
    else:
        optimizer_class = torch.optim.AdamW if decoupled else torch.optim.Adam
        options |= {"foreach": foreach, "fused": False}
    return OptimizerRecipe(
        optimizer_class,
        options,
        uses=(
            *("beta1", "beta2", "eps", "implementation"),
            *("early_step_in_backward", "state_dtype", "offload"),
        ),
        state_bytes=partial(_adam_state_bytes, config),
        moment_rates=("beta1", "beta2"),
        mup_rule=elementwise_update,
    )


def _no_state(shape: torch.Size, param_bytes: int) -> float:
    return 0.0


def _one_moment(shape: torch.Size, param_bytes: int) -> float:
    return shape.numel() * param_bytes


def _adam_state_bytes(config: OptimizerConfig, shape: torch.Size, param_bytes: int) -> float:
    if config.offload:
        return 0.0
    if config.state_dtype == "float32":  # as the weights
        return 2 * shape.numel() * param_bytes
    return moment_bytes(shape, config.state_dtype)


def _muon(config: OptimizerConfig) -> OptimizerRecipe:
    dtype = torch.bfloat16 if config.state_dtype == "bfloat16" else None

    def parameter_options(name: str, facts: MatrixFacts) -> dict[str, Any]:
        rows = facts.head_rows(name) if config.muon_per_head else 0
        return {HEAD_ROWS: rows, COMPUTE_DTYPE: facts.compute_dtype}

    return OptimizerRecipe(
        Muon,
        {"lr": config.lr, "momentum": config.muon_momentum, "state_dtype": dtype},
        uses=(
            *("muon_momentum", "muon_per_head", "state_dtype"),
            *("beta1", "beta2", "eps", "implementation"),  # of AdamW, for the other parameters
        ),
        state_bytes=_one_moment if dtype is None else _one_bfloat16_moment,
        moment_rates=("muon_momentum",),
        hidden_only=True,
        parameter_options=parameter_options,
        # No muP rule per head: the rows of a head do not grow with the width, those of the whole
        # matrix do.
        mup_rule=None if config.muon_per_head else orthogonal_update,
    )


def _soap(config: OptimizerConfig) -> OptimizerRecipe:
    options = {
        "lr": config.lr,
        "betas": (config.beta1, config.beta2),
        "eps": config.eps,
        "precondition_frequency": config.precondition_frequency,
    }
    return OptimizerRecipe(
        SOAP,
        options,
        uses=(
            *("beta1", "beta2", "eps", "precondition_frequency"),
            "implementation",  # of AdamW, for the other parameters
        ),
        state_bytes=soap_state_bytes,
        owner_flops=soap_flops,
        hidden_only=True,
    )


def _one_bfloat16_moment(shape: torch.Size, param_bytes: int) -> float:
    return 2 * shape.numel()


OPTIMIZERS: dict[str, Callable[[OptimizerConfig], OptimizerRecipe]] = {
    # values of optimizer.name; a new optimizer is one line here
    "AdamW": _adam,
    "Adam": _adam,
    "SGD": _sgd,
    "Adafactor": _adafactor,
    "Lion": _lion,
    "Muon": _muon,
    "SOAP": _soap,
}


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
    recipes: list[tuple[OptimizerRecipe, list[_NamedParameter]]] = []
    for name, parameter in model.named_parameters():
        recipe = _recipe_of_parameter(name, parameter.shape, config, facts)
        members = next((members for other, members in recipes if other == recipe), None)
        if members is None:
            recipes.append((recipe, members := []))
        members.append((name, parameter))
    optimizers = []
    for recipe, parameters in recipes:
        optimizer_class = recipe.optimizer_class
        if any(is_low_vector(parameter) for _, parameter in parameters):
            optimizer_class = updating_vectors_in_float32(optimizer_class)
        groups = _parameter_groups(parameters, config, recipe, facts, schedule, widths or {})
        optimizers.append(optimizer_class(groups, **recipe.options))
    return OptimizerSet(optimizers, config.lr, schedule)


def optimizer_state_bytes(
    shapes: Iterable[tuple[str, torch.Size]],
    config: OptimizerConfig,
    param_dtype: torch.dtype,
    facts: MatrixFacts | None = None,
) -> float:
    """Bytes of the state in device memory; `shapes`: (name, global shape) of parameters."""
    total = 0.0
    for name, shape in shapes:
        recipe = _recipe_of_parameter(name, shape, config, facts)
        total += state_bytes_of_parameter(recipe.state_bytes, shape, param_dtype)
    return total


def owner_flops(name: str, shape: torch.Size, config: OptimizerConfig, facts: MatrixFacts) -> float:
    """FLOPs of the update of a parameter whose state is on one rank; 0: every rank has a shard."""
    flops = _recipe_of_parameter(name, shape, config, facts).owner_flops
    return flops(shape) if flops else 0.0


def whole_matrix_bytes(
    shapes: Iterable[tuple[str, torch.Size]], config: OptimizerConfig, facts: MatrixFacts
) -> float:
    """Approximate bytes of the unsharded matrices that a rank has in a step of Muon or SOAP."""
    sizes = [
        shape.numel()
        for name, shape in shapes
        if _recipe_of_parameter(name, shape, config, facts).hidden_only
    ]
    # 6 = received and sent matrices, each of the two rounds in flight (owned_matrices.py), and two
    # temporaries of `orthogonalize`
    return 6 * facts.compute_dtype.itemsize * largest_round(sizes) if sizes else 0.0


_NamedParameter = tuple[str, nn.Parameter]


def recipe_of(section: OptimizerConfig) -> OptimizerRecipe:
    """The entry of `OPTIMIZERS` for these settings: [optimizer], with the keys of a group."""
    return OPTIMIZERS[section.name](section)


def _recipe_of_parameter(
    name: str, shape: torch.Size, config: OptimizerConfig, facts: MatrixFacts | None
) -> OptimizerRecipe:
    """The recipe for a parameter: that of its settings, or AdamW's.

    An optimizer for hidden matrices leaves other parameters to AdamW. But a group that names such
    an optimizer uses it for all its matrices, hidden or not.
    """
    section, _ = settings_of(name, config)
    recipe = recipe_of(section)
    if not recipe.hidden_only:
        return recipe
    assert facts is not None, f"{section.name} needs the facts of the model"
    group = _group_of_parameter(name, config)
    is_named = group is not None and group.name is not None
    if facts.is_hidden(name, shape) or (is_named and len(shape) == 2):
        return recipe
    return recipe_of(dataclasses.replace(section, name="AdamW"))


def _group_of_parameter(name: str, config: OptimizerConfig) -> ParameterGroupConfig | None:
    return next((group for group in config.groups if group.matches(name)), None)


def settings_of(name: str, config: OptimizerConfig) -> tuple[OptimizerConfig, float]:
    """(settings of one parameter, factor of its learning rate), by its name."""
    group = _group_of_parameter(name, config)
    if group is None or group.weight_decay is None:
        weight_decay = 0.0 if matches_any(name, config.no_decay) else config.weight_decay
    else:
        weight_decay = group.weight_decay
    overrides = {**(group.overrides() if group else {}), "weight_decay": weight_decay}
    return dataclasses.replace(config, **overrides), group.lr_factor if group else 1.0


def _parameter_groups(
    parameters: Iterable[_NamedParameter],
    config: OptimizerConfig,
    recipe: OptimizerRecipe,
    facts: MatrixFacts | None,
    schedule: RateSchedule,
    widths: Mapping[str, WidthScale],
) -> list[dict[str, Any]]:
    """Groups for a torch optimizer: the parameters with equal settings are one group."""
    groups: list[tuple[dict[str, Any], list[nn.Parameter]]] = []
    for name, parameter in parameters:
        section, lr_factor = settings_of(name, config)
        group, weight_decay = _group_of_parameter(name, config), section.weight_decay
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
        members = next((members for other, members in groups if other == keys), None)
        if members is None:
            groups.append((keys, members := []))
        members.append(parameter)
    return [{"params": members, **keys} for keys, members in groups]
