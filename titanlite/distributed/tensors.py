"""The local shard of a distributed tensor."""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local_shard(tensor: Tensor) -> Tensor:
    """This rank's shard as a plain tensor that shares its memory, unwrapped from any subclass."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "wait"):  # an AsyncCollectiveTensor whose collective is still running
        return local.wait()
    # Unwrap torchao's Float8 weights. is_traceable_wrapper_subclass is a private API of torch.
    while is_traceable_wrapper_subclass(local):
        local = _wrapped_tensor(local)
    return local


def registered_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters in a model: also the copies that its `parameters` leave out (tied.py)."""
    owned = (module.parameters(recurse=False) for module in model.modules())
    return list(dict.fromkeys(chain.from_iterable(owned)))


def reduce_partial(tensor: Tensor) -> Tensor:
    """The tensor with Partial placements reduced to Replicate; a collective if it has any."""
    if isinstance(tensor, DTensor) and any(p.is_partial() for p in tensor.placements):
        placements = [Replicate() if p.is_partial() else p for p in tensor.placements]
        return tensor.redistribute(placements=placements)
    return tensor


def _wrapped_tensor(wrapper: Any) -> Tensor:
    """The tensor inside a wrapper subclass, in the same memory; does not wait for the device."""
    # `_tensor` is private in torchao (0.18), but its __tensor_flatten__ would wait: it reads the
    # value of a precomputed scale.
    inner = getattr(wrapper, "_tensor", None)
    return getattr(wrapper, wrapper.__tensor_flatten__()[0][0]) if inner is None else inner
