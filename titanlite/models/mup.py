"""Maximal update parametrization (muP): how a model's parameters scale with its width.

The hyperparameters are tuned on a base model, and used to train a wider model of the same family.
Each parameter of the wider model has a `WidthScale`: its fan-in, its fan-out and its multiplier
relative to the base model. `parallelize/weight_init.py` scales the initial weights by it, and
`optim/mup.py` the learning rates (Tensor Programs V, https://arxiv.org/abs/2203.03466, table 3).

The forward pass is unchanged. Where muP has a multiplier in the forward pass, a parameter absorbs
it: with tied embeddings the gain of the last norm absorbs that of the logits; if the heads become
wider, the query projection (or the gain of the query norm) absorbs that of the attention logits,
which are divided by the head width, not by its root.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from titanlite.errors import ConfigError
from titanlite.models.sizes import SizesT
from titanlite.models.spec import ModelSpec, first_match
from titanlite.settings import Positive


@dataclass(frozen=True)
class BaseWidths:
    """Widths of the base model; all other sizes are those of [model]."""

    dim: Positive
    n_heads: Positive
    hidden_dim: Positive | None = None  # required if the family has it, as the next
    n_kv_heads: Positive | None = None
    head_dim: Positive | None = None  # default: dim / n_heads
    expert_hidden_dim: Positive | None = None  # required if the family has experts


@dataclass(frozen=True)
class MupConfig:
    """[mup] Scale initial weights and learning rates with the width of the model."""

    base: BaseWidths | None = None
    # widths of the model that the learning rate was tuned on, named as in [model]; none: no scaling


@dataclass(frozen=True)
class WidthScale:
    """Sizes of one parameter, divided by its sizes in the base model."""

    fan_in: float = 1.0  # inputs that an output sums over; of embeddings and gains always 1
    fan_out: float = 1.0
    larger_fan: float = 1.0  # of the larger side of a matrix
    multiplier: float = 1.0  # absorbed from the forward pass; 1: none
    init_factor: float = 1.0  # multiplies the initial weights


def check_mup_base(
    config: MupConfig, spec: ModelSpec[SizesT], sizes: SizesT
) -> Iterator[ConfigError]:
    """Reject a base model with sizes that the family has not, or that do not fit together."""
    if config.base is None:
        return
    if first_match(spec.init_roles, "norm.weight") == "zeros":
        yield ConfigError(
            f'mup.base: the norms of model.name = "{spec.name}" multiply by 1 + weight, which'
            " cannot absorb the multipliers of muP.",
            fix="Remove [mup], or use another family.",
        )
        return
    if "decay" in spec.init_roles.values():
        yield ConfigError(
            f'mup.base: muP is not derived for the linear attention of model.name = "{spec.name}".',
            fix="Remove [mup], or use another family.",
        )
        return
    given = {name for name, value in dataclasses.asdict(config.base).items() if value is not None}
    known = {field.name for field in dataclasses.fields(sizes)}
    wrong = [f"it has no {name}" for name in sorted(given - known)]
    required = ("hidden_dim", "n_kv_heads", "expert_hidden_dim")
    wrong += [f"{name} is missing" for name in required if name in known - given]
    if wrong:
        yield ConfigError(
            f'mup.base: does not fit model.name = "{spec.name}": {", ".join(wrong)}.',
            fix="Set the widths of the model that the learning rate was tuned on.",
        )
        return
    for problem in spec.find_size_problems(base_sizes(config.base, sizes)):
        message = problem.message.replace("model.", "mup.base.")
        fix = problem.fix and problem.fix.replace("model.", "mup.base.")
        yield ConfigError(message, fix=fix)


def base_sizes(base: BaseWidths, sizes: SizesT) -> SizesT:
    """The sizes of the base model, as deep as the model of `sizes`."""
    defaults = {field.name: field.default for field in dataclasses.fields(sizes)}
    widths = {name: width for name, width in dataclasses.asdict(base).items() if width is not None}
    if base.head_dim is None and defaults.get("head_dim") == 0:
        widths["head_dim"] = 0  # dim / n_heads; other families have one width in all of their sizes
    known = defaults.keys()
    return dataclasses.replace(sizes, **{k: v for k, v in widths.items() if k in known})


def width_scales(
    config: MupConfig, spec: ModelSpec[SizesT], sizes: SizesT
) -> dict[str, WidthScale]:
    """The scale of each parameter, by its name; empty without muP."""
    if config.base is None:
        return {}
    base = base_sizes(config.base, sizes)
    own_shapes, base_shapes = _shapes_by_name(spec, sizes), _shapes_by_name(spec, base)
    roles = {name: first_match(spec.parameter_roles, name) for name in own_shapes}
    multipliers = _absorbed_multipliers(spec, sizes, base, set(roles.values()))
    return {
        name: _scale(role, own_shapes[name], base_shapes[name], multipliers.get(role, 1.0))
        for name, role in roles.items()
    }


def _shapes_by_name(spec: ModelSpec[SizesT], sizes: SizesT) -> dict[str, torch.Size]:
    with torch.device("meta"):
        model = spec.build(sizes)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _absorbed_multipliers(
    spec: ModelSpec[SizesT], sizes: SizesT, base: SizesT, roles: set[str | None]
) -> Mapping[str | None, float]:
    """The multiplier that parameters of a role absorb from the forward pass.

    A multiplier c in the forward pass can be dropped if a parameter in which its input is linear,
    and the updates of this parameter, are multiplied by c.
    """
    query = "query_gain" if "query_gain" in roles else "query"
    multiplier = math.sqrt(base.head_width / sizes.head_width)
    multipliers: dict[str | None, float] = {query: multiplier, "query_bias": multiplier}
    if spec.tied_parameters(sizes):
        multipliers["output_gain"] = base.dim / sizes.dim
    return multipliers


def _scale(
    role: str | None, shape: torch.Size, base_shape: torch.Size, multiplier: float
) -> WidthScale:
    if shape[-1] == 1:  # biases of experts [E, N, 1]
        shape, base_shape = shape[:-1], base_shape[:-1]
    fan_out = shape[-1] / base_shape[-1]  # of embeddings and gains, which sum over no inputs
    if role in ("embedding", "gain", "query_bias", "query_gain", "output_gain"):
        return WidthScale(1.0, fan_out, fan_out, multiplier, multiplier)
    fan_in, fan_out = shape[-1] / base_shape[-1], shape[-2] / base_shape[-2]
    larger_fan = max(shape[-2:]) / max(base_shape[-2:])
    std = 1 / fan_in if role == "output" else fan_in**-0.5
    return WidthScale(fan_in, fan_out, larger_fan, multiplier, std * multiplier)
