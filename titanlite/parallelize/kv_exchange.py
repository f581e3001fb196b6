"""Context parallel, the communication: exchange of keys and values, and of their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from titanlite.distributed.collectives import start_all_gather, start_all_to_all_rows

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

    def _start_exchange(self, sent: Tensor, receiver: int, sender: int) -> Callable[[], Tensor]:
        """Send to one rank; returns a function that waits for the tensor of another."""
        sent_rows, received_rows = [0] * self.ranks, [0] * self.ranks
        sent_rows[receiver] = received_rows[sender] = sent.numel()
        buffer, wait_for_rows = start_all_to_all_rows(
            self.group, sent.reshape(-1), sent_rows, received_rows
        )

        def wait() -> Tensor:
            wait_for_rows()
            return buffer.view(sent.shape)

        return wait


class KVAllGather(KVExchange):
    """One all-gather while computing with the own shard; memory for full sequences.

    Each gradient is sent to the shard's rank while the next one is computed (the bytes are those of
    a reduce-scatter), and added in the order of the ring, so that both have equal bits.
    """

    def iterate_shards(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        wait_for_shards = start_all_gather(self.group, own)
        first, *others = self.sources()
        yield first, own
        shards = wait_for_shards()
        for source in others:
            yield source, shards[source]

    def sum_gradients(self, own: Tensor, gradient_of: ShardGradient) -> Tensor:
        shards = self.iterate_shards(own)
        total = gradient_of(*next(shards))
        assert total is not None, "queries attend to keys of their own rank, the first source"
        wait_for_part: Callable[[], Tensor] | None = None
        for step, (source, keys_values) in enumerate(shards, 1):
            gradient = gradient_of(source, keys_values)
            if wait_for_part is not None:
                total.add_(wait_for_part())
            if gradient is None:  # the receiver does not know
                gradient = torch.zeros_like(total)
            wait_for_part = self._start_exchange(gradient, source, (self.rank + step) % self.ranks)
        return total if wait_for_part is None else total.add_(wait_for_part())


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
        # A shard's gradient follows it around the ring, one step behind; every rank adds its part.
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
        receiver, sender = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        return self._start_exchange(tensor, receiver, sender)


# parallelism.context_parallel_rotate_method -> exchange
KV_EXCHANGES: dict[str, type[KVExchange]] = {"allgather": KVAllGather, "alltoall": KVRing}
