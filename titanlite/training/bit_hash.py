"""A 64-bit hash of the bits of a tensor, computed where the tensor is."""

from __future__ import annotations

import torch
from torch import Tensor

CHUNK = 1 << 22  # elements hashed at a time, which bounds the temporary memory: 100 MB
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by bytes of elements
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """The hash of a plain tensor, a 0-d int64 on its device; does not wait for the device.

    The sum, modulo 2^64, of the elements' bits as integers, each times an odd pseudorandom number
    that depends on its position. An odd factor is invertible, so any change of one element changes
    the hash. A change of several elements is missed with a probability of at most 2^-32.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].to(torch.int64)
        total += part.mul_(_odd_factors(start, part.numel(), part.device)).sum()
    return total


def _odd_factors(start: int, count: int, device: torch.device) -> Tensor:
    """Pseudorandom odd numbers for the positions from `start` on: SplitMix64 of the position.

    https://doi.org/10.1145/2660193.2660195; the arithmetic wraps around, as torch's does.
    """
    mixed = torch.arange(start + 1, start + 1 + count, device=device).mul_(_GOLDEN)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        mixed.bitwise_xor_(_shift_right(mixed, shift)).mul_(factor)
    return mixed.bitwise_xor_(_shift_right(mixed, 31)).bitwise_or_(1)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """A logical shift: torch's shifts copies of the sign in."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)
