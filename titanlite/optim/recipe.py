"""What an optimizer declares: its keys of [optimizer], and a recipe that says how it is built."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from titanlite.models import ModelSizes, ModelSpec, first_match
from titanlite.optim.mup import MupRule


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Whether one of the patterns matches a parameter name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@dataclass(frozen=True)
class MatrixFacts:
    """Facts about a model that optimizers of hidden matrices need."""

    spec: ModelSpec[Any]
    sizes: ModelSizes
    compute_dtype: torch.dtype = torch.float32  # of the model's matmuls

    def is_hidden(self, name: str, shape: Sequence[int]) -> bool:
        """Whether a parameter is a matrix inside a block, or a stack of them: experts.

        A matrix of one column is a bias. The weight of a depthwise convolution is no matrix either:
        it multiplies each channel by itself.
        """
        is_gain = first_match(self.spec.parameter_roles, name) == "gain"
        is_matrix = len(shape) in (2, 3) and shape[-1] > 1 and not is_gain
        return is_matrix and name.startswith(f"{self.spec.blocks_path}.")

    def head_rows(self, name: str) -> int:
        """Rows of a matrix that belong to one head; 0 if its rows are not heads."""
        patterns = [f"{layer}.weight" for layer in self.spec.head_projections]
        return self.sizes.head_width if matches_any(name, patterns) else 0


StateBytes = Callable[[torch.Size, int], float]
# (global shape of a parameter, bytes per element of the parameter) -> bytes of its optimizer state


def _two_moments(shape: torch.Size, param_bytes: int) -> float:
    return 2 * shape.numel() * param_bytes


def no_state(shape: torch.Size, param_bytes: int) -> float:
    return 0.0


def one_moment(shape: torch.Size, param_bytes: int) -> float:
    """State bytes of one moment in the dtype of the parameter."""
    return shape.numel() * param_bytes


@dataclass(frozen=True)
class OptimizerRecipe:
    """An optimizer class with its arguments, and the facts that checks and estimates need."""

    optimizer_class: type[torch.optim.Optimizer]
    options: dict[str, Any]  # arguments other than the parameter groups
    state_bytes: StateBytes = _two_moments  # on the device
    owner_flops: Callable[[torch.Size], float] | None = None
    # if the rank that owns a matrix has all of its state: FLOPs of its update, by its shape
    moment_rates: tuple[str, ...] = ()
    # keys of the decay rates of moments that follow the dtype of the parameters or state_dtype
    hidden_only: bool = False
    # for the matrices inside the blocks; AdamW updates the other parameters
    parameter_options: Callable[[str, MatrixFacts], dict[str, Any]] | None = None
    # keys of the parameter group of one parameter, by its name
    mup_rule: MupRule | None = None
    # how muP scales the learning rate; None: refused with muP


@dataclass(frozen=True)
class OptimizerKeys:
    """The keys of [optimizer] that one optimizer has; a frozen dataclass inherits from it.

    An optimizer that can update each parameter by itself in any backward, without communication,
    has the key `early_step_in_backward`. A group may set what `ParameterGroupConfig` lists.
    """

    def build_recipe(self, lr: float) -> OptimizerRecipe:
        """How the optimizer is built; `lr`: the peak learning rate."""
        raise NotImplementedError
