"""MB/s a core of the stages of a corpus: python -m benchmarks.corpus_stages [--mb 50]

Processor time of one process, on the synthetic corpus. Tokenising is compared with tiktoken's own
`encode_ordinary_batch` on the same texts, with the same ranks.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiktoken

from benchmarks.synthetic_corpus import write_corpus
from titanlite.data.bpe import train_bpe
from titanlite.data.tokenizer import SPLIT_PATTERN, Tokenizer, open_tokenizer, parse_ranks
from titanlite_corpus.documents import TEXT, read_tables
from titanlite_corpus.engine import LocalEngine
from titanlite_corpus.read import CorpusSource, ReadConfig, plan_reading
from titanlite_corpus.shuffle import ShuffleConfig, plan_shuffle, plan_shuffled_shards
from titanlite_corpus.task import Task, run_tasks
from titanlite_corpus.tokenise import TokeniseSettings, plan_tokenising


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=50, help="of text (default: 50)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), int(args.mb * 1e6))


def measure(folder: Path, size: int) -> None:
    """Print one line per stage."""
    write_corpus(folder / "text", size)
    work, engine = folder / "work", LocalEngine(workers=1)

    def run(name: str, tasks: list[Task], text: float) -> list[dict]:
        return timed(name, text, lambda: run_tasks(tasks, work, engine))

    sources = [CorpusSource(file.suffixes[-1], [str(file)]) for file in (folder / "text").iterdir()]
    tables: list[Task] = []
    for source in sources:
        tasks = plan_reading(source, ReadConfig())
        size = sum(c["bytes_out"] for c in run_tasks(tasks, folder / "warm", engine))
        run(f"read {source.name}", tasks, size)
        tables += tasks
    texts = [text for task in tables for t in read_tables(work / task.key) for text in t[TEXT]]
    texts = [text.as_py() for text in texts]
    total = sum(len(text.encode()) for text in texts)
    train_bpe(texts[:2000], 8192, folder / "tokenizer.model")
    tokenizer = open_tokenizer(str(folder / "tokenizer.model"))
    compare_tokenising(folder, tokenizer, texts, total)
    chunks = plan_tokenising(tables, tokenizer, TokeniseSettings(validation_share=0.01, bos=False))
    counts = run("tokenise (stage)", chunks, total)
    tokens = sum(count["tokens_out"] for count in counts)
    print(f"{total / tokens:.2f} bytes per token")
    chunks = plan_shuffle(chunks, ShuffleConfig(), tokenizer.vocab_size)
    run("shuffle", chunks, total)
    shards = plan_shuffled_shards(chunks, "train", 4, tokenizer.vocab_size)
    run("shards", shards, total)


def compare_tokenising(folder: Path, tokenizer: Tokenizer, texts: list[str], total: int) -> None:
    """The rate of tiktoken's own batches, and of ours, in turns."""
    ranks = parse_ranks("", (folder / "tokenizer.model").read_bytes())
    encoding = tiktoken.Encoding(
        "own", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={}
    )
    for _ in range(3):
        timed(
            "tiktoken's batch",
            total,
            lambda: encoding.encode_ordinary_batch(texts, num_threads=1),
        )
        timed("encode_array", total, lambda: [tokenizer.encode_array(text) for text in texts])


def timed(name: str, size: float, call: Callable[[], Any]) -> Any:
    """Call, and print the bytes per second of processor time."""
    started = time.process_time()
    result = call()
    seconds = time.process_time() - started
    print(f"{name:20} {size / 1e6 / seconds:8.1f} MB/s a core", flush=True)
    return result


if __name__ == "__main__":
    main()
