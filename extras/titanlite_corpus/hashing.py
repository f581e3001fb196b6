"""Keys by hash: mixing of integers, ranges of sorted keys, and the hash of JSON."""

from __future__ import annotations

import json

import numpy as np
import xxhash


def hash_json(value: object) -> str:
    """Hash of a value that JSON can represent; the order of keys does not matter."""
    return xxhash.xxh3_128_hexdigest(json.dumps(value, sort_keys=True).encode())


def mix32(values: np.ndarray) -> np.ndarray:
    """A bijection of uint32: the finalizer of MurmurHash3 (Appleby)."""
    values = values ^ (values >> np.uint32(16))
    values *= np.uint32(0x85EBCA6B)
    values ^= values >> np.uint32(13)
    values *= np.uint32(0xC2B2AE35)
    values ^= values >> np.uint32(16)
    return values


def find_key_range(sorted_keys: np.ndarray, part: int, parts: int) -> tuple[int, int]:
    """[first, last): the uint64 keys in the range `part` of `parts` equal ranges of 64 bits."""
    bounds = [(1 << 64) * number // parts for number in (part, part + 1)]
    first, last = (
        len(sorted_keys) if bound == 1 << 64 else int(sorted_keys.searchsorted(np.uint64(bound)))
        for bound in bounds
    )
    return first, last
