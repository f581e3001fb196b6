"""Remove exact and near duplicates, repeated lines, and documents that contain benchmark texts."""

from __future__ import annotations

from titanlite_corpus.deduplicate.benchmarks import hash_benchmark_files
from titanlite_corpus.deduplicate.config import DeduplicateConfig, check_deduplicate
from titanlite_corpus.deduplicate.minhash import match_probability
from titanlite_corpus.deduplicate.plan import PartSizes, deduplicate

__all__ = [
    "DeduplicateConfig",
    "PartSizes",
    "check_deduplicate",
    "deduplicate",
    "hash_benchmark_files",
    "match_probability",
]
