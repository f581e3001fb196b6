"""Pseudo-random bits as a pure function of a key and a counter."""

from __future__ import annotations

import numpy as np
import xxhash

GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: its multiples are evenly spaced

_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x: np.ndarray) -> np.ndarray:
    """64 pseudo-random bits for each uint64, a bijection: SplitMix64's finaliser.

    Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014.
    """
    x = x ^ (x >> np.uint64(30))  # the one allocation of the result
    x *= _FIRST
    x ^= x >> np.uint64(27)
    x *= _SECOND
    x ^= x >> np.uint64(31)
    return x


def hash_key(text: str) -> np.ndarray:
    """A hash of a text, uint64 [1], to which callers add counters before `mix`."""
    key = xxhash.xxh3_64_intdigest(text.encode())
    return np.array([key], dtype=np.uint64)  # a scalar would warn when it overflows
