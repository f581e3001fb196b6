"""Context parallel: a rank holds a part of every sequence, and attention still sees all of it.

Queries stay where they are. Keys and values of all ranks come by, one rank's after the other, and
what each contributes is merged by its share of the softmax (ring attention,
https://arxiv.org/abs/2310.01889), so no rank ever holds scores, or a mask, of a whole sequence.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional  # of DTensor; same in 2.11 to 2.15
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.collectives import gather, scatter_sum
from titanlite.distributed.mesh import Degrees, ParallelismConfig
from titanlite.errors import ConfigError
from titanlite.parallelize.flash import flash_for

WHOLE = slice(None)
TOKENS = 2  # the dimension of [B, H, T, K] that is shared


@dataclass(frozen=True)
class SequenceShare:
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


def share_of(cp: DeviceMesh, section: ParallelismConfig) -> SequenceShare:
    """This rank's share of every sequence."""
    balanced = section.context_parallel_load_balancer == "headtail"
    return SequenceShare(cp.get_local_rank(), cp.size(), balanced)


def attend_over_ranks(
    model: nn.Module, pattern: str, cp: DeviceMesh, section: ParallelismConfig
) -> None:
    """Let every module of `pattern` attend to the keys and values of all ranks of `cp`."""
    if cp.size() == 1:
        return
    share = share_of(cp, section)
    travel = _TRAVELS[section.context_parallel_rotate_method](cp.get_group())
    for name, module in model.named_modules():
        if fnmatchcase(name, pattern):
            module.forward = partial(_attend, share, travel)


def _attend(
    share: SequenceShare, travel: _Travel, q: Tensor, k: Tensor, v: Tensor, cache: None = None
) -> Tensor:
    assert cache is None, "generation runs on one process"
    return _Attention.apply(q, k, v, share, travel)


class _Attention(torch.autograd.Function):
    """Causal attention of this rank's queries over the keys and values of all ranks."""

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, share: SequenceShare, travel: _Travel):
        """q [B, H, T, K], k and v [B, Hkv, T, K], with T the tokens of this rank."""
        flash = flash_for(q)
        out = lse = None
        for source, (keys, values) in travel.around(torch.stack((k, v))):
            seen = _seen(share, source, q.shape[TOKENS])
            if seen is None:
                continue
            queries, part, causal = seen
            q_, k_, v_ = q[:, :, queries], keys[:, :, part], values[:, :, part]
            new, new_lse = flash.forward(q_, k_, v_, causal)
            if out is None:  # this rank's own part comes first, and every query is in it
                out, lse = new.float(), new_lse.contiguous()
            else:
                _merge(out[:, :, queries], lse[:, :, queries], new, new_lse)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.share, ctx.travel = share, travel
        return out

    @staticmethod
    def backward(ctx, gradient: Tensor):
        q, k, v, out, lse = ctx.saved_tensors
        flash = flash_for(q)
        dq = torch.zeros_like(q, dtype=torch.float32)

        def of_part(source: int, keys_values: Tensor) -> Tensor | None:
            """What this rank's queries add to the gradient of one rank's keys and values."""
            seen = _seen(ctx.share, source, q.shape[TOKENS])
            if seen is None:
                return None
            queries, part, causal = seen
            g_, q_, out_, lse_ = (whole[:, :, queries] for whole in (gradient, q, out, lse))
            keys, values = keys_values[:, :, :, part]
            # With the softmax of the whole row (lse), the parts of a gradient just add up.
            dq_, dk, dv = flash.backward(g_, q_, keys, values, out_, lse_.contiguous(), causal)
            dq[:, :, queries] += dq_
            total = torch.zeros_like(keys_values, dtype=torch.float32)
            total[0, :, :, part], total[1, :, :, part] = dk, dv
            return total

        dk, dv = ctx.travel.back(torch.stack((k, v)), of_part).to(k.dtype)
        return dq.to(q.dtype), dk, dv, None, None


def _seen(share: SequenceShare, source: int, tokens: int) -> tuple[slice, slice, bool] | None:
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


class _Travel(ABC):
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


class _AllGather(_Travel):
    """All at once: one collective, and memory for the keys and values of a whole sequence."""

    def around(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        every = gather(self.group, own)
        for source in self.sources():
            yield source, every[source]

    def back(self, own: Tensor, of_part: OfPart) -> Tensor:
        every = own.new_zeros((self.ranks, *own.shape), dtype=torch.float32)
        for source, keys_values in self.around(own):
            part = of_part(source, keys_values)
            if part is not None:
                every[source] = part
        return scatter_sum(self.group, every)


class _Ring(_Travel):
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
        # The kind that a compiler can follow.
        received = functional.all_to_all_single(held.reshape(-1), come, to, self.group)
        return lambda: functional.wait_tensor(received).view(held.shape)


_TRAVELS = {"allgather": _AllGather, "alltoall": _Ring}


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
