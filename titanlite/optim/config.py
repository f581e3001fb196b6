"""[optimizer]: the optimizer, its hyperparameters and those of groups of parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, cast

from titanlite.optim.adafactor import AdafactorKeys
from titanlite.optim.adam import AdamKeys, AdamWKeys, StateDtype
from titanlite.optim.elementwise import LionKeys, SGDKeys
from titanlite.optim.lr_schedule import LR_DECAYS, LRSchedulerConfig, weight_decay_types
from titanlite.optim.muon import MuonKeys
from titanlite.optim.recipe import OptimizerKeys, OptimizerRecipe, matches_any
from titanlite.optim.soap import SOAPKeys
from titanlite.optim.sophia import SophiaKeys
from titanlite.settings import Fraction, KeyedSection, NotNegative, OneOf, Positive, Range

OPTIMIZERS: dict[str, type[OptimizerKeys]] = {
    # values of optimizer.name; a new optimizer is one line here
    "AdamW": AdamWKeys,
    "Adam": AdamKeys,
    "SGD": SGDKeys,
    "Adafactor": AdafactorKeys,
    "Lion": LionKeys,
    "Muon": MuonKeys,
    "SOAP": SOAPKeys,
    "Sophia": SophiaKeys,
}

_SCHEDULE_KEYS = {key.name for key in dataclasses.fields(LRSchedulerConfig)}


@dataclass(frozen=True)
class ParameterGroupConfig:
    """One entry of optimizer.groups; other keys are those of [optimizer] and [lr_scheduler]."""

    match: list[str]  # name patterns of its parameters; the first group that matches applies
    lr_factor: Annotated[float, Range(0)] = 1.0  # multiplies the learning rate
    name: Annotated[str, OneOf(OPTIMIZERS.keys)] | None = None  # as optimizer.name
    weight_decay: Annotated[float, Range(0)] | None = None  # also for names in optimizer.no_decay
    beta1: Fraction | None = None  # as optimizer.beta1
    beta2: Fraction | None = None  # as optimizer.beta2
    eps: Annotated[float, Range(0)] | None = None  # as optimizer.eps
    momentum: Fraction | None = None  # as optimizer.momentum
    nesterov: bool | None = None  # as optimizer.nesterov
    beta2_decay: Annotated[float, Range(-1, -0.1)] | None = None  # as optimizer.beta2_decay
    clip_threshold: Annotated[float, Range(0.01)] | None = None  # as optimizer.clip_threshold
    scale_parameter: bool | None = None  # as optimizer.scale_parameter
    precondition_frequency: Positive | None = None  # as optimizer.precondition_frequency
    muon_momentum: Fraction | None = None  # as optimizer.muon_momentum
    muon_per_head: bool | None = None  # as optimizer.muon_per_head
    warmup_steps: NotNegative | None = None  # as lr_scheduler.warmup_steps
    warmup_tokens: NotNegative | None = None  # as lr_scheduler.warmup_tokens
    decay_ratio: Fraction | None = None  # as lr_scheduler.decay_ratio
    decay_type: Annotated[str, OneOf(LR_DECAYS.keys)] | None = None  # as lr_scheduler.decay_type
    min_lr_factor: Fraction | None = None  # as lr_scheduler.min_lr_factor
    weight_decay_type: Annotated[str, OneOf(weight_decay_types)] | None = None
    # as lr_scheduler.weight_decay_type
    final_weight_decay_factor: Annotated[float, Range(0)] | None = None
    # as lr_scheduler.final_weight_decay_factor

    def matches(self, name: str) -> bool:
        return matches_any(name, self.match)

    def overrides(self) -> dict[str, Any]:
        """The keys of [optimizer] that this group sets."""
        return {k: value for k, value in self._set_keys() if k not in _SCHEDULE_KEYS}

    def schedule_overrides(self) -> dict[str, Any]:
        """The keys of [lr_scheduler] that this group sets."""
        return {k: value for k, value in self._set_keys() if k in _SCHEDULE_KEYS}

    def _set_keys(self) -> Iterator[tuple[str, Any]]:
        for key in dataclasses.fields(self):
            value = getattr(self, key.name)
            if key.name not in ("match", "lr_factor") and value is not None:
                yield key.name, value

    def describe(self) -> str:
        factor = {"lr_factor": self.lr_factor} if self.lr_factor != 1 else {}
        keys = {**factor, **self.overrides(), **self.schedule_overrides()}
        return ", ".join(f"{key} {value}" for key, value in keys.items())


@dataclass(frozen=True)
class OptimizerConfig(KeyedSection):
    """[optimizer] The optimizer; further keys are those of the optimizer `name`."""

    KEY: ClassVar[str] = "name"
    name: Annotated[str, OneOf(OPTIMIZERS.keys)] = "AdamW"
    # algorithm; Adam and SGD add weight decay to the gradients, the others apply it to the weights;
    # Muon and SOAP update the matrices inside the blocks, and AdamW all other parameters
    lr: Annotated[float, Range(0)] = 8e-4  # peak learning rate
    weight_decay: Annotated[float, Range(0)] = 0.1
    # multiplied by the weights and the learning rate, and subtracted; Adam and SGD: see `name`
    no_decay: list[str] = field(
        default_factory=lambda: ["*norm.weight", "*bias", "*.b[123]", "*.sinks.weight", "*.A_log"]
    )
    # name patterns of parameters without weight decay; the default: all that are vectors
    groups: list[ParameterGroupConfig] = field(default_factory=list)
    # parameters with other settings: { match = ["output.*"], lr_factor = 0.5 }

    # values for optimizers whose class in OPTIMIZERS does not have these keys; a section that is
    # read from a TOML also inherits from that class
    implementation: ClassVar[str] = "for-loop"
    early_step_in_backward: ClassVar[bool] = False
    state_dtype: ClassVar[StateDtype] = "float32"
    offload: ClassVar[bool] = False
    offload_folder: ClassVar[str] = ""
    muon_per_head: ClassVar[bool] = False

    @classmethod
    def choices(cls) -> Mapping[str, type]:
        return OPTIMIZERS

    def __str__(self) -> str:
        groups = [f"{', '.join(group.match)}: {group.describe()}" for group in self.groups]
        own = f"{self.name}, peak learning rate {self.lr:g}, weight decay {self.weight_decay:g}"
        state = f", {self.state_dtype} moments" if self.state_dtype != "float32" else ""
        return own + state + "".join(f"; {group}" for group in groups)

    @property
    def low_memory(self) -> bool:
        """Whether Adam's moments take less GPU memory than in torch's own optimizers."""
        return self.state_dtype != "float32" or self.offload

    @property
    def recipe(self) -> OptimizerRecipe:
        """How the optimizer `name` is built with these settings."""
        return cast(OptimizerKeys, self).build_recipe(self.lr)

    def group_of(self, name: str) -> ParameterGroupConfig | None:
        return next((group for group in self.groups if group.matches(name)), None)

    def of_parameter(self, name: str, optimizer: str | None = None) -> OptimizerConfig:
        """The settings of one parameter, by its name; `optimizer` replaces their `name`."""
        group = self.group_of(name)
        weight_decay = 0.0 if matches_any(name, self.no_decay) else self.weight_decay
        keys = {"weight_decay": weight_decay, **(group.overrides() if group else {})}
        return self.replace(**{**keys, **({"name": optimizer} if optimizer else {})})
