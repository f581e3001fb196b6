"""What of a spread tensor is on this rank."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def local_shard(tensor: Tensor) -> Tensor:
    """The plain tensor of this rank, in the same memory: not spread, and not wrapped to travel."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    if hasattr(local, "wait"):  # it is still on its way
        return local.wait()
    while is_traceable_wrapper_subclass(
        local
    ):  # Float8's; torch's own question, if not a public one
        local = getattr(local, local.__tensor_flatten__()[0][0])
    return local
