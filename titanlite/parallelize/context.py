"""Context parallel: a rank holds a part of every sequence, and attention still sees all of it.

Queries stay where they are. Keys and values of all ranks come by, one rank's after the other, and
what each contributes is merged by its share of the softmax (ring attention,
https://arxiv.org/abs/2310.01889), so no rank ever holds scores, or a mask, of a whole sequence.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.collectives import all_gather_tensor, reduce_scatter_sum
from titanlite.distributed.mesh import Degrees, ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.kernels.documents import SupportsDocuments
from titanlite.kernels.flash import flash_kernel_for

WHOLE = slice(None)
TOKENS = 2  # the dimension of [B, H, T, K] that is shared


@dataclass(frozen=True)
class SequenceShard:
    """Which tokens of every sequence a rank holds: one run of them, or, balanced, two.

    A causal query near the end of a sequence costs more than one near its start; with the i-th
    part from the front and the i-th from the back, every rank has the same work.
    """

    rank: int
    ranks: int
    balanced: bool

    def positions(self, length: int, device: torch.device | None = None) -> Tensor:
        """Where in sequences of `length` tokens the tokens of this rank are: [length / ranks]."""
        if self.ranks == 1:
            return torch.arange(length, device=device)
        runs = self._runs(length)
        return torch.cat([torch.arange(r.start, r.stop, device=device) for r in runs])

    def of(self, batch: Tensor) -> Tensor:
        """The part of `batch` [rows, T] that this rank holds: [rows, T / ranks]."""
        if self.ranks == 1:
            return batch
        return torch.cat([batch[:, run] for run in self._runs(batch.shape[1])], dim=1)

    def _runs(self, length: int) -> list[slice]:
        count = self.ranks * (2 if self.balanced else 1)
        width = length // count
        assert width * count == length, f"{length} tokens in {count} parts"
        numbers = [self.rank, count - 1 - self.rank] if self.balanced else [self.rank]
        return [slice(n * width, (n + 1) * width) for n in numbers]

    def runs(self, held: int) -> list[tuple[int, slice]]:
        """(where in the sequence it begins, where among the `held` tokens of this rank it is) of
        each run."""
        runs = self._runs(held * self.ranks)
        width = held // len(runs)
        return [(r.start, slice(n * width, (n + 1) * width)) for n, r in enumerate(runs)]


def build_sequence_shard(cp: DeviceMesh, section: ParallelismConfig) -> SequenceShard:
    """This rank's share of every sequence."""
    balanced = section.context_parallel_load_balancer == "headtail"
    return SequenceShard(cp.get_local_rank(), cp.size(), balanced)


def apply_context_parallel(
    model: nn.Module, pattern: str, cp: DeviceMesh, section: ParallelismConfig
) -> None:
    """Let every module of `pattern` attend to the keys and values of all ranks of `cp`."""
    if cp.size() == 1:
        return
    share = build_sequence_shard(cp, section)
    if isinstance(model, SupportsDocuments) and model.index_documents is not None:
        model.use_document_mask(partial(document_tiles, share))
    travel = section.context_parallel_rotate_method
    for name, module in model.named_modules():
        if fnmatchcase(name, pattern):
            module.forward = partial(_attend, cp.get_group().group_name, share.balanced, travel)


def _attend(
    group: str,
    balanced: bool,
    travel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None = None,
    cache: None = None,
) -> Tensor:
    assert cache is None, "generation runs on one process"
    out, _ = context_parallel_forward(q, k, v, documents, group, balanced, travel)
    return out


class AttentionTile(NamedTuple):
    """Queries of this rank, and keys of one rank that all of them see."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool  # they are the same tokens, and each sees those up to itself


Meetings = Callable[[int], Sequence[AttentionTile]]  # those with the keys of a rank


# Operations of their own: to a compiler, what travels between them is one node of a block's graph.


@torch.library.custom_op("titanlite::attend_over_ranks", mutates_args=())
def context_parallel_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    documents: Tensor | None,
    group: str,
    balanced: bool,
    travel: str,
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries over the keys and values of all ranks of `group`.

    q [B, H, T, K], k and v [B, Hkv, T, K], with T the tokens of this rank, to what they attend to
    [B, H, T, K] and the logarithm of the sum of scores [B, H, T] in fp32.
    """
    flash, (way, meetings) = flash_kernel_for(q), _plan(q, documents, group, balanced, travel)
    out = torch.empty_like(q, dtype=torch.float32)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    for source, (keys, values) in way.around(torch.stack((k, v))):
        for rows, queries, part, causal in meetings(source):
            mine, theirs = (rows, WHOLE, queries), (rows, WHOLE, part)
            new, new_lse = flash.forward(q[mine], keys[theirs], values[theirs], causal)
            if causal:  # a query meets its own document, or sequence, before all else
                out[mine], lse[mine] = new, new_lse
            else:
                _merge(out[mine], lse[mine], new, new_lse)
    return out.to(q.dtype), lse


@torch.library.custom_op("titanlite::attend_over_ranks_backward", mutates_args=())
def context_parallel_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    documents: Tensor | None,
    group: str,
    balanced: bool,
    travel: str,
) -> tuple[Tensor, Tensor]:
    """The gradients of q, and of k and v in one [2, B, Hkv, T, K]."""
    flash, (way, meetings) = flash_kernel_for(q), _plan(q, documents, group, balanced, travel)
    dq = torch.zeros_like(q, dtype=torch.float32)

    def of_part(source: int, keys_values: Tensor) -> Tensor | None:
        """What this rank's queries add to the gradient of one rank's keys and values."""
        if not (met := meetings(source)):
            return None
        total = torch.zeros_like(keys_values, dtype=torch.float32)
        for rows, queries, part, causal in met:
            mine, theirs = (rows, WHOLE, queries), (slice(None), rows, WHOLE, part)
            g_, q_, out_, lse_ = (whole[mine] for whole in (gradient, q, out, lse))
            keys, values = keys_values[theirs]
            # With the softmax of the whole row (lse), the parts of a gradient just add up.
            dq_, dk, dv = flash.backward(g_, q_, keys, values, out_, lse_.contiguous(), causal)
            dq[mine] += dq_
            of_keys, of_values = total[theirs]
            of_keys += dk
            of_values += dv
        return total

    # First, because it fills dq, too; in fp32, where `.to` copies nothing, the order would not show.
    of_keys_values = way.back(torch.stack((k, v)), of_part)
    return dq.to(q.dtype), of_keys_values.to(k.dtype)


def _plan(
    q: Tensor, documents: Tensor | None, group: str, balanced: bool, travel: str
) -> tuple[_KVExchange, Meetings]:
    """How keys come by, and which of them this rank's queries meet."""
    # Private, but how torch's own operations find a group by its name (2.11 to 2.15).
    ranks = dist.distributed_c10d._resolve_process_group(group)
    if documents is not None:
        return _TRAVELS[travel](ranks), DocumentTiles(documents)
    share = SequenceShard(ranks.rank(), ranks.size(), balanced)
    return _TRAVELS[travel](ranks), CausalTiles(share, q.shape[TOKENS])


@context_parallel_forward.register_fake
def _room_for_forward(q, k, v, documents, group, balanced, travel):
    return torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@context_parallel_backward.register_fake
def _room_for_backward(gradient, q, k, v, out, lse, documents, group, balanced, travel):
    return torch.empty_like(q), k.new_empty((2, *k.shape))


def _keep(ctx, inputs, output) -> None:
    q, k, v, documents, *ctx.about = inputs
    ctx.save_for_backward(q, k, v, *output, documents)


def _backward(ctx, gradient: Tensor, _):
    dq, (dk, dv) = context_parallel_backward(gradient, *ctx.saved_tensors, *ctx.about)
    return dq, dk, dv, None, None, None, None


context_parallel_forward.register_autograd(_backward, setup_context=_keep)


@dataclass(frozen=True)
class CausalTiles:
    """Every query meets all keys of its sequence up to its own."""

    share: SequenceShard
    tokens: int  # of this rank, in each sequence

    def __call__(self, source: int) -> Sequence[AttentionTile]:
        seen = _seen(self.share, source, self.tokens)
        return [] if seen is None else [AttentionTile(WHOLE, *seen)]


class DocumentTiles:
    """Every query meets the keys of its document up to its own: `document_tiles` [N, 8]."""

    def __init__(self, documents: Tensor):
        self.by_source: dict[int, list[AttentionTile]] = {}
        for source, causal, *ends in documents.tolist():
            places = (slice(*ends[n : n + 2]) for n in (0, 2, 4))
            self.by_source.setdefault(source, []).append(
                AttentionTile(*places, causal=bool(causal))
            )

    def __call__(self, source: int) -> Sequence[AttentionTile]:
        return self.by_source.get(source, [])


def document_tiles(share: SequenceShard, positions: Tensor) -> Tensor:
    """[N, 8] on the CPU: (rank, causal, and the begin and end of rows, queries, and keys) of all
    that this rank's tokens, at `positions` [B, T] in their documents, have to do with each rank's.

    Tokens of one run and one document meet each other causally. Where a run begins amid a document,
    those of them meet what came before it, wherever that is. On a GPU, the host waits for
    `positions` once in a forward.
    """
    held, found = positions.shape[1], []
    everywhere = [
        (rank, *run) for rank in range(share.ranks) for run in replace(share, rank=rank).runs(held)
    ]
    for row, places in enumerate(positions.cpu()):
        before = []
        for begin, run in share.runs(held):
            starts = (places[run] == 0).nonzero().flatten().add(run.start).tolist()
            ends = [*dict.fromkeys([run.start, *starts]), run.stop]
            found += [(share.rank, 1, row, row + 1, *own, *own) for own in pairwise(ends)]
            opened = begin - places[run.start].item()  # where the first of its documents began
            for rank, other, part in everywhere:
                first, last = max(opened, other), min(begin, other + part.stop - part.start)
                if first < last:
                    keys = (first - other + part.start, last - other + part.start)
                    before.append((rank, 0, row, row + 1, *ends[:2], *keys))
        found += before
    met = torch.tensor(found, dtype=torch.int64)
    torch._dynamo.maybe_mark_dynamic(met, 0)  # else every new N would be compiled for
    return met


def _seen(share: SequenceShard, source: int, tokens: int) -> tuple[slice, slice, bool] | None:
    """(queries of this rank, keys of rank `source` that they see, whether causally), or nothing."""
    if source == share.rank:
        return WHOLE, WHOLE, True
    if not share.balanced:
        return (WHOLE, WHOLE, False) if source < share.rank else None
    half = tokens // 2
    if source < share.rank:  # both runs are after its first one, and before its second one
        return WHOLE, slice(0, half), False
    return slice(half, tokens), WHOLE, False  # the second run is after both of its runs


def _merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Add to `out`, whose scores sum to exp(lse), what other keys contribute; in place."""
    both = torch.logaddexp(lse, new_lse)
    out.mul_((lse - both).exp().unsqueeze(-1)).add_(new * (new_lse - both).exp().unsqueeze(-1))
    lse.copy_(both)


OfPart = Callable[[int, Tensor], Tensor | None]


class _KVExchange(ABC):
    """How keys and values [2, B, Hkv, T, K] of all ranks come by, and how gradients go home."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.rank, self.ranks = group, group.rank(), group.size()

    def sources(self) -> list[int]:
        """The ranks in the order in which theirs come by; this one's own is first."""
        return [(self.rank - step) % self.ranks for step in range(self.ranks)]

    @abstractmethod
    def around(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Every rank with its keys and values."""

    @abstractmethod
    def back(self, own: Tensor, of_part: OfPart) -> Tensor:
        """The gradient of this rank's own keys and values, fp32, summed over all ranks."""


class _KVAllGather(_KVExchange):
    """All at once: one collective, and memory for the keys and values of a whole sequence."""

    def around(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        every = all_gather_tensor(self.group, own)
        for source in self.sources():
            yield source, every[source]

    def back(self, own: Tensor, of_part: OfPart) -> Tensor:
        every = own.new_zeros((self.ranks, *own.shape), dtype=torch.float32)
        for source, keys_values in self.around(own):
            part = of_part(source, keys_values)
            if part is not None:
                every[source] = part
        return reduce_scatter_sum(self.group, every)


class _KVRing(_KVExchange):
    """From rank to rank, each sent on while it is computed with; memory for two ranks' at most."""

    def around(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        held = own
        for source in self.sources():
            last = source == (self.rank + 1) % self.ranks
            coming = None if last else self._pass_on(held)
            yield source, held
            held = own if last else coming()

    def back(self, own: Tensor, of_part: OfPart) -> Tensor:
        coming = None  # the gradient so far of the part that comes next; it travels with it
        for source, keys_values in self.around(own):
            gradient = of_part(source, keys_values)
            if coming is not None:
                so_far = coming()
                gradient = so_far if gradient is None else gradient.add_(so_far)
            coming = self._pass_on(gradient)
        return coming()  # after one more hop, each is at home

    def _pass_on(self, held: Tensor) -> Callable[[], Tensor]:
        """Send to the next rank; returns how to wait for what the one before sends."""
        to, come = [0] * self.ranks, [0] * self.ranks
        to[(self.rank + 1) % self.ranks] = come[(self.rank - 1) % self.ranks] = held.numel()
        received = held.new_empty(held.numel())
        work = dist.all_to_all_single(
            received, held.reshape(-1), come, to, group=self.group, async_op=True
        )

        def wait() -> Tensor:
            work.wait()
            return received.view(held.shape)

        return wait


_TRAVELS = {"allgather": _KVAllGather, "alltoall": _KVRing}


def context_problems(
    degrees: Degrees, section: ParallelismConfig, seq_len: int, key: str
) -> Iterator[ConfigError]:
    """A sequence, set by `key`, that its ranks cannot share evenly."""
    context, tensor = degrees.context, degrees.tensor
    balanced = section.context_parallel_load_balancer == "headtail"
    parts = math.lcm(context * (2 if balanced else 1), context * tensor)
    if context == 1 or seq_len % parts == 0:
        return
    why = f"{context} ranks share each sequence" + (", an early and a late part each" * balanced)
    if tensor > 1:
        why += f", and {tensor} tensor-parallel ranks split each share"
    yield ConfigError(
        f"parallelism.context_parallel_degree = {context}: cannot split {key} = {seq_len}"
        f" evenly: {why}.",
        fix=f"Use a multiple of {parts}.",
        keys=("parallelism.context_parallel_degree", key),
    )
