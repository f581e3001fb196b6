"""Measure one part of the data pipeline on one core: python -m benchmarks.data_speed PART CORPUS

PART is `stream`, `order` or `tokenizer`. Prints a JSON object of figures by name.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from statistics import median

import numpy as np
import torch

from titanlite.data import (
    SampleOrder,
    SourceConfig,
    open_sample_stream,
    open_tokenizer,
    prefetch,
    rank_slices,
)
from titanlite_corpus.bpe import train_bpe


def measure_stream(corpus: Path) -> dict[str, float]:
    """Million tokens/s of the sample stream, and of torchdata's loader over the same samples."""
    torch.set_num_threads(1)
    batch, seconds = 32, 1.5
    sources = [SourceConfig("text", str(corpus / "train"))]
    stream = open_sample_stream(sources, seq_len=2048, seed=0, vocab_size=2**31)

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 10**9

        def __getitem__(self, position):
            inputs, labels = stream.read(position, 1)
            return inputs[0], labels[0]

    loaders: dict[str, Callable[[], Iterator]] = {
        "read": lambda: (stream.read(p, batch) for p in range(0, 10**9, batch)),
        "prefetch thread": lambda: prefetch(stream.read, rank_slices(0, repeat(batch), 0, 1)),
    }
    if importlib.util.find_spec("torchdata"):
        from torchdata.stateful_dataloader import StatefulDataLoader

        for workers in (0, 2):
            loaders[f"StatefulDataLoader, {workers} workers"] = lambda workers=workers: iter(
                StatefulDataLoader(Samples(), batch, num_workers=workers)
            )
    speeds = {}
    for name, open_loader in loaders.items():
        batches = open_loader()
        next(batches)
        tokens, start = 0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            tokens += next(batches)[0].numel()
        speeds[f"stream, {name}"] = tokens / (time.perf_counter() - start) / 1e6
        del batches
    return speeds


def measure_order(corpus: Path) -> dict[str, float]:
    """Nanoseconds per sample to compute which source it comes from."""
    figures, positions = {}, np.arange(65_536)
    for samples in (10**3, 10**9):
        order, times = SampleOrder(0, [("a", 0.7, samples), ("b", 0.3, samples)]), []
        for _ in range(5):
            start = time.perf_counter()
            order.sample_at(positions)
            times.append((time.perf_counter() - start) / len(positions) * 1e9)
        figures[f"order of {samples:.0e} samples, 2 sources"] = median(times)
    return figures


def measure_tokenizer(corpus: Path) -> dict[str, float]:
    """MB/s of a tokenizer with 4,096 ids on the source files of Python's standard library."""
    folder = Path(sysconfig.get_path("stdlib"))
    texts = [path.read_text("utf-8", errors="replace") for path in sorted(folder.glob("*.py"))]
    if not (corpus / "tokenizer.model").exists():
        train_bpe(texts, 4096, corpus / "tokenizer.model")
    tokenizer = open_tokenizer(str(corpus / "tokenizer.model"))
    start = time.perf_counter()
    for text in texts:
        tokenizer.encode(text)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    speed = megabytes / (time.perf_counter() - start)
    return {"tokenizing with 4,096 ids, one core": speed}


if __name__ == "__main__":
    parts = {"stream": measure_stream, "order": measure_order, "tokenizer": measure_tokenizer}
    print(json.dumps(parts[sys.argv[1]](Path(sys.argv[2]))))
