"""The tensors of a model and its optimizer, by name, as checkpoints store them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from titanlite.distributed.tensors import local_shard

State = dict[str, dict[str, Any]]  # "model" or "optimizer" -> name -> tensor

# Flattened, so that optimizer state is keyed by parameter name, whatever its param groups are.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def model_and_optimizer_state(
    model: nn.Module, optimizers: Iterable[torch.optim.Optimizer] | None = None
) -> State:
    """The tensors themselves, not copies: to load a checkpoint is to read into them."""
    weights = get_model_state_dict(model, options=_BY_NAME)
    state: State = {"model": {name: _unwrap(weight) for name, weight in weights.items()}}
    if optimizers is not None:
        # Learning rates and weight decays come from the job: only optimizer state is saved. Missing
        # state (a fresh AdamW has none) is created by this call, so that it can be read into.
        full = get_optimizer_state_dict(model, tuple(optimizers), options=_BY_NAME)
        state["optimizer"] = {n: value for n, value in full.items() if n.startswith("state.")}
    return state


def _unwrap(weight: Any) -> Tensor:
    """A weight without the tensor subclass that wraps it for Float8, in the same memory."""
    assert isinstance(weight, Tensor)
    local = weight.to_local() if isinstance(weight, DTensor) else weight
    if not is_traceable_wrapper_subclass(local):  # torch's own check, though not a public function
        return weight
    inner = local_shard(local)
    if not isinstance(weight, DTensor):
        return inner
    return DTensor.from_local(
        inner,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=weight.shape,
        stride=weight.stride(),
    )
