"""Context parallel of linear attention: states and convolution inputs pass from rank to rank.

What a part of a sequence does to the state [K, V] before it is affine: S -> A S + b, with A
[K, K] and b [K, V] for each head. Every rank computes its tokens from a state of zero, and A as if
it were K more columns of a state that starts as the identity. All ranks gather (A, b) of all parts,
and compute the states before their own from them. A token that reads x^T A then adds x^T A S to
its output. So each head costs (V + K) / V times its work without context parallel, and gathers
K (K + V) fp32 elements of each part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titanlite.distributed.collectives import all_gather_tensor, all_to_all_tensor
from titanlite.kernels.delta_rule import DeltaRule, ShortConvolution, gated_delta_rule
from titanlite.kernels.documents import DocumentIndex
from titanlite.parallelize.compile import replace_forward
from titanlite.parallelize.context_attention import resolve_group
from titanlite.parallelize.context_tiles import SequenceShard


@dataclass(frozen=True)
class SequenceParts:
    """The parts of a sequence, one or two for each rank, in the order of the sequence."""

    group_name: str
    rank: int
    order: tuple[tuple[int, int], ...]  # (rank, which of its parts)

    @property
    def count(self) -> int:
        """Parts of a rank."""
        return max(part for _, part in self.order) + 1

    def split(self, x: Tensor) -> Tensor:
        """Each part as a sequence: [B, T, ...] -> [B * parts, T / parts, ...]."""
        return x.unflatten(1, (self.count, -1)).flatten(0, 1)

    def join(self, x: Tensor) -> Tensor:
        """Inverse of `split`."""
        return x.unflatten(0, (-1, self.count)).flatten(1, 2)

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensors [B, ...] of all parts in their order; x [B * parts, ...] are this rank's."""
        gathered = gather_over_ranks(x.contiguous(), self.group_name)
        by_part = gathered.unflatten(1, (-1, self.count))  # [ranks, B, parts, ...]
        return [by_part[rank, :, part] for rank, part in self.order]

    def own(self, by_part: list[Tensor]) -> Tensor:
        """Of a tensor [B, ...] for each part in their order, this rank's: [B * parts, ...].

        The result depends on all of them, if only formally: what the first rank gathers is not used
        otherwise, and its backward would leave out the collective that the others wait for.
        """
        numbers = [self.order.index((self.rank, part)) for part in range(self.count)]
        stacked = torch.stack(by_part, 1)
        return torch.stack([stacked[:, number] for number in numbers], 1).flatten(0, 1)


def build_sequence_parts(cp: DeviceMesh, shard: SequenceShard) -> SequenceParts:
    """The parts of the sequences that `shard` partitions over the ranks of a mesh."""
    parts = 2 if shard.balanced else 1
    numbers = {
        number: (rank, part)
        for rank in range(shard.ranks)
        for part, (number, _) in enumerate(replace(shard, rank=rank).chunks(parts))
    }
    order = tuple(numbers[number] for number in sorted(numbers))
    return SequenceParts(cp.get_group().group_name, shard.rank, order)


def compute_over_ranks(module: nn.Module, parts: SequenceParts) -> None:
    """Replace the forward of a module of linear attention, if it is one."""
    if isinstance(module, ShortConvolution):
        replace_forward(module, _convolve_over_ranks, parts)
    elif isinstance(module, DeltaRule):
        replace_forward(module, _apply_delta_rule_over_ranks, parts)


def _convolve_over_ranks(
    convolution: ShortConvolution,
    parts: SequenceParts,
    x: Tensor,
    documents: DocumentIndex | None = None,
    cache: None = None,
) -> Tensor:
    """`ShortConvolution.forward`; the inputs before a part come from the rank that has them."""
    assert cache is None, "generation runs on one process"
    starts = None if documents is None else parts.split(starts_of_tiles(documents, x))
    own, seen = parts.split(x), convolution.width - 1
    last = own[:, -seen:]
    if starts is not None:  # what follows does not see tokens before the last start
        later_starts = F.pad(starts[:, -seen:], (0, 1))[:, 1:].flip(1).cumsum(1).flip(1)
        last = last.masked_fill((later_starts > 0).unsqueeze(-1), 0)
    _, *others = reversed(parts.gather(last))
    before = parts.own([torch.zeros_like(others[0]), *reversed(others)])
    return parts.join(convolution.convolve(own, before, starts))


def _apply_delta_rule_over_ranks(module: nn.Module, parts: SequenceParts, *inputs: Any) -> Tensor:
    """`DeltaRule.forward`, whose arguments are `inputs`, over the tokens of all ranks."""
    q, k, v, log_decay, beta, documents, cache = inputs
    assert cache is None, "generation runs on one process"
    starts = None if documents is None else parts.split(starts_of_tiles(documents, v))
    widths = [v.shape[-1], k.shape[-1]]
    v = F.pad(v.to(torch.promote_types(v.dtype, torch.float32)), (0, widths[1]))
    q, k, v, log_decay, beta = map(parts.split, (q, k, v, log_decay, beta))
    identity = F.pad(torch.eye(widths[1], dtype=v.dtype, device=v.device), (widths[0], 0))
    identity = identity.expand(len(v), v.shape[2], -1, -1)  # [B * parts, H, K, V + K]
    out, last = gated_delta_rule(q, k, v, log_decay, beta, starts, identity)
    states: list[Tensor] = []
    for added, kept in (each.split(widths, -1) for each in parts.gather(last)):
        states.append(kept @ states[-1] + added if states else added)
    before = parts.own([torch.zeros_like(states[0]), *states[:-1]])
    out, reads = out.split(widths, -1)  # [B * parts, T / parts, H, V], [..., K]
    return parts.join(out + (reads.transpose(1, 2) @ before).transpose(1, 2))


def starts_of_tiles(documents: DocumentIndex, x: Tensor) -> Tensor:
    """Whether a document starts at each of this rank's tokens x [B, T, ...]: bool [B, T].

    By the table of `encode_document_tiles`: each document of a chunk has a causal tile; if it began
    before the chunk, it has other tiles, too, with the same first query.
    """
    batch, tokens = x.shape[:2]
    table, behind = documents.on_device, batch * tokens
    is_causal, first = table[:, 1] == 1, table[:, 2] * tokens + table[:, 4]
    starts = torch.zeros(behind + 1, dtype=torch.bool, device=x.device)
    starts = starts.index_fill(0, torch.where(is_causal, first, behind), True)
    starts = starts.index_fill(0, torch.where(is_causal, behind, first), False)
    return starts[:-1].view(batch, tokens)


# --- communication: custom operators, as in context_attention.py ----------------------------------


@torch.library.custom_op("titanlite::gather_over_ranks", mutates_args=())
def gather_over_ranks(own: Tensor, group_name: str) -> Tensor:
    """Stack the tensors of all ranks of a group: [ranks, ...]."""
    return all_gather_tensor(resolve_group(group_name), own)


@torch.library.custom_op("titanlite::sum_own_over_ranks", mutates_args=())
def sum_own_over_ranks(by_rank: Tensor, group_name: str) -> Tensor:
    """Sum what all ranks have for this rank in `by_rank` [ranks, ...]."""
    return all_to_all_tensor(resolve_group(group_name), by_rank).sum(0)


@gather_over_ranks.register_fake
def _empty_gathered(own: Tensor, group_name: str) -> Tensor:
    return own.new_empty(resolve_group(group_name).size(), *own.shape)


@sum_own_over_ranks.register_fake
def _empty_sum(by_rank: Tensor, group_name: str) -> Tensor:
    return by_rank.new_empty(by_rank.shape[1:])


def _save_group(ctx, inputs, output) -> None:
    _, ctx.group_name = inputs


def _gather_backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
    return sum_own_over_ranks(grad.contiguous(), ctx.group_name), None


gather_over_ranks.register_autograd(_gather_backward, setup_context=_save_group)
