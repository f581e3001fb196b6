"""Norms of the weights, and of their change in one step, measured around the optimizer's update."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor, nn

from titanlite.distributed.tensors import local_shard
from titanlite.optim.clip import shard_norms


class WeightNorms(NamedTuple):
    """2-norms of this rank's shard of a parameter, 0-d in fp32."""

    weight: Tensor  # before the update
    update: Tensor


class UpdateNorms:
    """Measures the updates of one step after `arm`; otherwise it costs nothing.

    In that step it keeps a copy of the weights, but only while they are updated, when the
    activations are freed already.
    """

    def __init__(self) -> None:
        self._armed = False
        self._norms: dict[nn.Parameter, WeightNorms] = {}

    def arm(self) -> None:
        """Measure the updates until `take`."""
        self._armed = True

    def take(self) -> dict[nn.Parameter, WeightNorms]:
        """The norms of the parameters that were updated since `arm`."""
        norms, self._norms, self._armed = self._norms, {}, False
        return norms

    @contextmanager
    def around(self, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
        """Measure what the block changes in `parameters`, if armed."""
        if not self._armed:
            yield
            return
        copies = [local_shard(parameter.detach()).clone() for parameter in parameters]
        yield
        while copies:  # freed one by one
            parameter, old = parameters[len(copies) - 1], copies.pop().float()
            (weight,) = shard_norms([old])
            (update,) = shard_norms([old.sub_(local_shard(parameter.detach()))])
            self._norms[parameter] = WeightNorms(weight, update)
