"""MinHash signatures, and the keys of their bands.

An n-gram's 32-bit hash h is permuted by h -> a h + b modulo 2^32 with odd a, a bijection; the
minimum of each permutation over a document is its signature (Broder, 1997). This is the family, and
with seed 1 these are the permutations, of datasketch 2 (`scheme="affine32"`). An affine family is
only pairwise independent; it suffices here because h itself is mixed (Mitzenmacher, Vadhan: Why
simple hash functions work, SODA 2008), and the tests measure it.

Collisions. Two n-grams have the same 32-bit hash with probability 2^-32, which adds m / 2^33 to the
similarity of documents with m n-grams: 10^-5 at 10^5 n-grams, and the eighth power of it to the
probability that a band matches. A band's key has 64 bits: 14 bands of 10^9 documents contain
14 * 10^18 / 2 / 2^64 = 0.4 pairs of different bands with the same key; 10^8 documents 0.004.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from titanlite.data.random_bits import GOLDEN, mix
from titanlite_corpus.deduplicate.words import HashedDocuments
from titanlite_corpus.hashing import mix32

_SEED = 1


def match_probability(similarity: float, bands: int, rows: int) -> float:
    """Probability that documents of this Jaccard similarity match: the S-curve."""
    return 1 - (1 - similarity**rows) ** bands


@cache
def permutations(number: int) -> tuple[np.ndarray, np.ndarray]:
    """a and b of each permutation, uint32. numpy guarantees that RandomState never changes."""
    random = np.random.RandomState(_SEED)
    a = random.randint(0, 1 << 31, number, dtype=np.uint32) * np.uint32(2) + np.uint32(1)
    return a, random.randint(0, 1 << 32, number, dtype=np.uint32)


def compute_signatures(ngrams: HashedDocuments, number: int) -> np.ndarray:
    """Minima of each permutation, uint32 [number, documents with n-grams]."""
    hashes = mix32((ngrams.hashes >> np.uint64(32)).astype(np.uint32))
    counts = ngrams.counts[ngrams.counts > 0]
    starts = np.cumsum(counts) - counts
    minima = np.empty((number, len(starts)), np.uint32)
    if len(starts):
        permuted = np.empty_like(hashes)
        for row, a, b in zip(minima, *permutations(number), strict=True):
            np.multiply(hashes, a, out=permuted)
            permuted += b
            np.minimum.reduceat(permuted, starts, out=row)
    return minima


def band_keys(signatures: np.ndarray, bands: int) -> np.ndarray:
    """A 64-bit hash of each band of each document, uint64 [bands, documents]."""
    number, documents = signatures.shape
    minima = signatures.reshape(bands, number // bands, documents)  # [bands, rows, documents]
    keys = np.zeros((bands, documents), np.uint64)
    for row in range(minima.shape[1]):
        keys = mix(keys + minima[:, row] + GOLDEN)
    return keys
