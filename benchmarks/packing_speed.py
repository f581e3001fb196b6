"""Packing of a tokenised corpus: padding, truncated documents, speed.

python -m benchmarks.packing_speed CORPUS [--seq-len 2048]

CORPUS is a folder of shards as scripts/prepare_data.py writes them. Then the time of best fit
alone, for lengths of a log-normal distribution.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from titanlite_corpus.packing.best_fit import pack_best_fit
from titanlite_corpus.packing.windows import PackSettings, pack_shard


def measure_corpus(corpus: Path, seq_len: int) -> None:
    """Pack every shard of a corpus, and print what was counted."""
    totals: dict[str, int] = {}
    prefixes = [path.with_suffix("") for path in sorted(corpus.glob("*.bin"))]
    size, started = sum(p.with_suffix(".bin").stat().st_size for p in prefixes), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        for prefix in prefixes:
            _, counts = pack_shard(prefix, Path(folder) / "packed", PackSettings(seq_len, 0))
            totals = {key: totals.get(key, 0) + count for key, count in counts.items()}
    seconds = time.process_time() - started
    documents, labels = totals["documents_in"], totals["labels"]
    print(
        f"seq_len {seq_len}: {documents:,} documents, {totals['tokens_in']:,} tokens,"
        f" {totals['windows']:,} windows\n"
        f"  padding {totals['padding'] / labels:.3%}, ignored labels"
        f" {totals['labels_ignored'] / labels:.3%}\n"
        f"  truncated documents: best fit {totals['documents_truncated'] / documents:.1%},"
        f" concatenated {totals['documents_truncated_if_concatenated'] / documents:.1%}\n"
        f"  {seconds:.2f} s of CPU: {totals['tokens_in'] / seconds / 1e6:.1f} M tokens/s,"
        f" {size / seconds / 1e6:.1f} MB/s of shards"
    )


def measure_best_fit(documents: int, seq_len: int) -> None:
    """Print the speed of best fit alone."""
    draw = np.random.default_rng(0)
    lengths = np.exp(draw.normal(np.log(600), 1.2, documents)).astype(np.int64)
    lengths = np.clip(lengths, 2, seq_len + 1)
    started = time.process_time()
    _, bins = pack_best_fit(lengths, seq_len + 1)
    seconds = time.process_time() - started
    padding = 1 - lengths.sum() / bins / (seq_len + 1)
    print(
        f"best fit of {documents:,} lengths in {seq_len}: {seconds:.2f} s of CPU,"
        f" {documents / seconds / 1e6:.1f} M documents/s, padding {padding:.4%}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("--seq-len", type=int, nargs="+", default=[256, 2048, 8192])
    args = parser.parse_args()
    for length in args.seq_len:
        measure_corpus(args.corpus, length)
    for length, count in ((2048, 10**6), (2048, 10**7), (131_072, 10**6)):
        measure_best_fit(count, length)
