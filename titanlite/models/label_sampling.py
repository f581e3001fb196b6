"""Labels that a model draws from its own predictions, the same under every layout.

The noise of a token and a token id is a function of the seed, the position of the sequence, and
both: no rank draws from a generator. Where rounding decides between two ids, layouts may differ.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

GOLDEN = 0x9E3779B97F4A7C15 - 2**64  # 2^64 / golden ratio, as int64
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64), (31, 1))
CHUNK_ELEMENTS = 1 << 22  # logits that get their noise together: 32 MiB of integers


def mix_int64(x: Tensor) -> Tensor:
    """`titanlite.data.random_bits.mix` of int64, on any device; multiplication wraps around."""
    for shift, factor in _ROUNDS:
        x = (x ^ ((x >> shift) & (2 ** (64 - shift) - 1))) * factor
    return x


def sampling_keys(seed: int, first: int, labels: Tensor) -> Tensor:
    """A random number of at least 0 for each valid label [B, T]; ignored labels stay.

    `first`: position of the first sequence in the order of samples.
    """
    rows, columns = (torch.arange(n, device=labels.device) for n in labels.shape)
    keys = mix_int64(mix_int64(mix_int64(rows + first) + seed).unsqueeze(1) + columns * GOLDEN)
    return torch.where(labels >= 0, keys & (2**63 - 1), labels)


def draw_labels(
    logits: Tensor, keys: Tensor, first_id: int, reduce_max: Callable[[Tensor], Tensor]
) -> Tensor:
    """Token ids [N] drawn from the softmax of logits [N, V'] by keys [N]; negative keys stay.

    `first_id`: that of the first logit; `reduce_max`: over the ranks that shard the vocabulary.
    """
    best, ids = add_noise(logits, keys, first_id)
    is_best = reduce_max(best.clone()) == best  # which reduces in place
    return torch.where(keys >= 0, reduce_max(torch.where(is_best, ids, -1)), keys)


def add_noise(logits: Tensor, keys: Tensor, first_id: int) -> tuple[Tensor, Tensor]:
    """(largest sum of a logit and its Gumbel noise, its token id), each [N], of logits [N, V'].

    The id of the largest sum over the vocabulary is a sample of the softmax
    (https://arxiv.org/abs/1611.00712).
    """
    best, ids = torch.empty_like(keys, dtype=torch.float32), torch.empty_like(keys)
    columns = torch.arange(first_id, first_id + logits.shape[-1], device=keys.device) * GOLDEN
    size = max(1, CHUNK_ELEMENTS // max(1, logits.shape[-1]))
    for start in range(0, len(keys), size):
        rows = slice(start, start + size)
        bits = (mix_int64(keys[rows].unsqueeze(1) + columns) >> 32) & (2**32 - 1)
        # The smallest of exponential variables wins, and a float is finest near 0.
        exponential = -torch.log1p(-(bits.float() + 0.5) * 2**-32)
        best[rows], index = (logits[rows].float() - exponential.log()).max(-1)
        ids[rows] = index + first_id
    return best, ids
