"""64-bit keys by hash: mixing of integers, ranges of sorted keys, and the hash of JSON."""

from __future__ import annotations

import json

import numpy as np
import xxhash


def hash_json(value: object) -> str:
    """Hash of a value that JSON can represent; the order of keys does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def mix64(values: np.ndarray) -> np.ndarray:
    """A bijection of uint64 in which each bit depends on all bits: SplitMix64's finalizer.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    return _mix(values, (30, 27, 31), (0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix32(values: np.ndarray) -> np.ndarray:
    """A bijection of uint32: the finalizer of MurmurHash3 (Appleby)."""
    return _mix(values, (16, 13, 16), (0x85EBCA6B, 0xC2B2AE35))


def _mix(values: np.ndarray, shifts: tuple[int, int, int], factors: tuple[int, int]) -> np.ndarray:
    """Alternate xor-shifts with multiplications by odd factors; allocates the result once."""
    number = values.dtype.type
    values = values ^ (values >> number(shifts[0]))
    for factor, shift in zip(factors, shifts[1:], strict=True):
        values *= number(factor)
        values ^= values >> number(shift)
    return values


def find_key_range(sorted_keys: np.ndarray, part: int, parts: int) -> tuple[int, int]:
    """[first, last): the uint64 keys in the range `part` of `parts` equal ranges of 64 bits."""
    bounds = [(1 << 64) * number // parts for number in (part, part + 1)]
    first, last = (
        len(sorted_keys) if bound == 1 << 64 else int(sorted_keys.searchsorted(np.uint64(bound)))
        for bound in bounds
    )
    return first, last
