"""A 64-bit hash of the bits of a tensor, computed on its device."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

ROW = 1 << 16  # elements that are multiplied by the same factors, row after row
ROWS = {"cuda": 64, "cpu": 1}  # at a time: temporary memory of 32 MiB on a GPU; a CPU's cache
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32}  # by element size
_GOLDEN, _MIX_1, _MIX_2 = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """The hash of a plain tensor, a 0-d int64 on its device; does not wait for the device.

    The sum, modulo 2^64, of the elements' bits as integers, each times two odd pseudorandom
    numbers: of its row and of its place in the row. Odd factors are invertible, so any change of
    one element changes the hash. A change of several is missed with a probability of about 2^-32.
    """
    bits = tensor.detach().reshape(-1).view(_INTEGERS[tensor.element_size()])
    if not bits.numel():  # other ranks have all of it
        return torch.zeros((), dtype=torch.int64, device=bits.device)
    factors = _row_factors(bits.device)
    chunk = ROW * ROWS[bits.device.type]
    sums = []
    for part in bits.split(chunk):
        whole = part.numel() // ROW * ROW
        if whole:
            sums.append((part[:whole].view(-1, ROW) * factors).sum(1))
        if whole < part.numel():
            sums.append((part[whole:] * factors[: part.numel() - whole]).sum().view(1))
    rows = torch.cat(sums)
    return (rows * _odd_factors(1 << 40, rows.numel(), rows.device)).sum()


@cache
def _row_factors(device: torch.device) -> Tensor:
    return _odd_factors(0, ROW, device)


def _odd_factors(start: int, count: int, device: torch.device) -> Tensor:
    """Pseudorandom odd numbers for the positions from `start` on: SplitMix64 of the position.

    https://doi.org/10.1145/2660193.2660195; the arithmetic wraps around, as torch's does.
    """
    mixed = torch.arange(start + 1, start + 1 + count, device=device).mul_(_GOLDEN)
    for shift, factor in ((30, _MIX_1), (27, _MIX_2)):
        mixed.bitwise_xor_(_shift_right(mixed, shift)).mul_(factor)
    return mixed.bitwise_xor_(_shift_right(mixed, 31)).bitwise_or_(1)


def _shift_right(values: Tensor, bits: int) -> Tensor:
    """A logical shift; torch's >> is arithmetic, and copies the sign bit."""
    return (values >> bits).bitwise_and_((1 << (64 - bits)) - 1)
