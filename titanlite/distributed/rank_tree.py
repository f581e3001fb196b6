"""Messages along a tree of ranks, for what all ranks must agree on.

gloo's all-reduce and all-gather pass each value around a ring, so their duration grows with the
number of ranks; its gather and scatter connect rank 0 to every other rank. Along a tree the
duration grows with the logarithm of that number, and a rank has at most three connections.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

FANOUT = 2  # children of a rank: 14 levels for 16,384 ranks


class RankTree:
    """The ranks of a group as a tree with rank 0 at its root.

    Every rank must call its methods in the same order. `group` must support tensors in host memory;
    None: the default group. Without a process group, the tree has one rank.
    """

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group, self.rank, self.size = group, 0, 1
        if dist.is_initialized():
            self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.is_root = self.rank == 0
        self.parent = (self.rank - 1) // FANOUT  # -1 for rank 0
        self.children = children_of(self.rank, self.size)

    def max(self, values: Iterable[int]) -> list[int]:
        """The maximum of each value over all ranks, on every rank."""
        largest = torch.tensor(list(values), dtype=torch.int64)
        received = [torch.empty_like(largest) for _ in self.children]
        self._receive(received, self.children)
        for other in received:
            torch.maximum(largest, other, out=largest)
        if not self.is_root:
            self._send(largest, [self.parent])
            self._receive([largest], [self.parent])
        self._send(largest, self.children)
        return largest.tolist()

    def broadcast(self, content: bytes) -> bytes:
        """Rank 0's bytes, on every rank; the argument of the other ranks is ignored."""
        message = _to_tensor(content) if self.is_root else self._receive_bytes(self.parent)
        self._send_bytes(message, self.children)
        return message.numpy().tobytes()

    def gather(self, content: bytes) -> list[bytes]:
        """The bytes of all ranks in rank order, on rank 0; an empty list on the others."""
        by_rank = {self.rank: content}
        for child in self.children:
            by_rank |= _unpack(self._receive_bytes(child))
        if not self.is_root:
            self._send_bytes(_pack(by_rank), [self.parent])
            return []
        return [by_rank[rank] for rank in range(self.size)]

    def scatter(self, contents: list[bytes]) -> bytes:
        """This rank's entry of rank 0's list; the argument of the other ranks is ignored."""
        by_rank: Mapping[int, bytes] = dict(enumerate(contents))
        if not self.is_root:
            by_rank = _unpack(self._receive_bytes(self.parent))
        for child in self.children:
            below = subtree_of(child, self.size)
            self._send_bytes(_pack({rank: by_rank[rank] for rank in below}), [child])
        return by_rank[self.rank]

    def _send(self, tensor: Tensor, ranks: list[int]) -> None:
        self._wait([dist.isend(tensor, group=self.group, group_dst=rank) for rank in ranks])

    def _receive(self, tensors: list[Tensor], ranks: list[int]) -> None:
        pairs = zip(tensors, ranks, strict=True)
        self._wait([dist.irecv(tensor, group=self.group, group_src=rank) for tensor, rank in pairs])

    def _wait(self, works: list[dist.Work | None]) -> None:
        # Without an argument, these waits would ignore a timeout that was set after the group was
        # created. There is no public way to read it (torch 2.11 to 2.15).
        if works:
            group = self.group or dist.group.WORLD
            assert group is not None
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            for work in works:
                assert work is not None  # None only on ranks outside of the group
                work.wait(timeout)

    def _send_bytes(self, message: Tensor, ranks: list[int]) -> None:
        self._send(torch.tensor([message.numel()]), ranks)
        if message.numel():
            self._send(message, ranks)

    def _receive_bytes(self, rank: int) -> Tensor:
        size = torch.empty(1, dtype=torch.int64)
        self._receive([size], [rank])
        message = torch.empty(int(size.item()), dtype=torch.uint8)
        if message.numel():
            self._receive([message], [rank])
        return message


def children_of(rank: int, size: int, fanout: int = FANOUT) -> list[int]:
    """The ranks whose parent is `rank`, in a tree of `size` ranks."""
    first = fanout * rank + 1
    return list(range(first, min(first + fanout, size)))


def subtree_of(rank: int, size: int, fanout: int = FANOUT) -> list[int]:
    """The ranks that rank 0 reaches through `rank`, which is the first of them."""
    ranks = [rank]
    for below in ranks:  # grows while it is read
        ranks.extend(children_of(below, size, fanout))
    return ranks


def _to_tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(content, np.uint8).copy())


def _pack(by_rank: Mapping[int, bytes]) -> Tensor:
    """One message: the number of entries, a table [rank, bytes] of them, and their contents."""
    table = [(rank, len(content)) for rank, content in by_rank.items()]
    head = np.array([(len(table), 0), *table], np.int64).tobytes()
    return _to_tensor(b"".join([head, *by_rank.values()]))


def _unpack(message: Tensor) -> dict[int, bytes]:
    content = message.numpy().tobytes()
    entries, _ = np.frombuffer(content, np.int64, 2)
    table = np.frombuffer(content, np.int64, 2 * (1 + entries)).reshape(-1, 2)[1:].tolist()
    by_rank, start = {}, 16 * (1 + entries)
    for rank, size in table:
        by_rank[rank] = content[start : start + size]
        start += size
    return by_rank
