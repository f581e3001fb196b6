"""Context parallel, the communication: exchange of keys and values, and of their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.collectives import (
    reduce_scatter_sum,
    start_all_gather,
    start_all_to_all_rows,
)

# (source rank, its keys and values) -> their gradient from this rank's queries, fp32; None: zero.
ShardGradient = Callable[[int, Tensor], Tensor | None]


class KVExchange(ABC):
    """Exchange of keys and values [2, B, Hkv, T, K] between the ranks of a group."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()

    def sources(self) -> list[int]:
        """Ranks in the order in which their keys and values are used; this rank is first."""
        return [(self.rank - step) % self.ranks for step in range(self.ranks)]

    @abstractmethod
    def iterate_shards(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (source rank, its keys and values) in the order of `sources`."""

    @abstractmethod
    def sum_gradients(self, own: Tensor, gradient_of: ShardGradient) -> Tensor:
        """Gradient of this rank's keys and values, in fp32, summed over the queries of all ranks.

        Calls `gradient_of` for the keys and values of each rank.
        """


class KVAllGather(KVExchange):
    """One all-gather while computing with the own shard; memory for full sequences.

    The reduce-scatter of the gradients overlaps with nothing, because it needs all of them.
    """

    def iterate_shards(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        wait_for_shards = start_all_gather(self.group, own)
        first, *others = self.sources()
        yield first, own
        shards = wait_for_shards()
        for source in others:
            yield source, shards[source]

    def sum_gradients(self, own: Tensor, gradient_of: ShardGradient) -> Tensor:
        gradients = own.new_empty((self.ranks, *own.shape), dtype=torch.float32)
        for source, keys_values in self.iterate_shards(own):
            gradient = gradient_of(source, keys_values)
            gradients[source] = 0.0 if gradient is None else gradient
        return reduce_scatter_sum(self.group, gradients)


class KVRing(KVExchange):
    """A ring: sends each shard to the next rank while computing with it; memory for two shards."""

    def iterate_shards(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        *sources, last = self.sources()
        shard = own
        for source in sources:
            wait_for_shard = self._send_to_next_rank(shard)
            yield source, shard
            shard = wait_for_shard()
        yield last, shard

    def sum_gradients(self, own: Tensor, gradient_of: ShardGradient) -> Tensor:
        # A shard's gradient follows the shard around the ring, one step behind; every rank adds
        # its part.
        wait_for_sum: Callable[[], Tensor] | None = None
        for source, keys_values in self.iterate_shards(own):
            gradient = gradient_of(source, keys_values)
            if wait_for_sum is not None:
                received = wait_for_sum()
                gradient = received if gradient is None else gradient.add_(received)
            assert gradient is not None, (
                "queries attend to keys of their own rank, the first source"
            )
            wait_for_sum = self._send_to_next_rank(gradient)
        assert wait_for_sum is not None
        return wait_for_sum()  # one more step, and each gradient is back on its shard's rank

    def _send_to_next_rank(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Send to the next rank; returns a function that waits for the previous rank's tensor."""
        sent, received = [0] * self.ranks, [0] * self.ranks
        sent[(self.rank + 1) % self.ranks] = tensor.numel()
        received[(self.rank - 1) % self.ranks] = tensor.numel()
        buffer, wait_for_rows = start_all_to_all_rows(
            self.group, tensor.reshape(-1), sent, received
        )

        def wait() -> Tensor:
            wait_for_rows()
            return buffer.view(tensor.shape)

        return wait


# parallelism.context_parallel_rotate_method -> exchange
KV_EXCHANGES: dict[str, type[KVExchange]] = {"allgather": KVAllGather, "alltoall": KVRing}
