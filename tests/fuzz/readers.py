"""Every reader of files that may come from somebody else: what it is given, and how it reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from titanlite.checkpoint.convert import from_hugging_face
from titanlite.checkpoint.manifest import MANIFEST_FILE, manifest_hash
from titanlite.data import open_corpus, open_tokenizer
from titanlite.data.text import find_files, list_file_ranges, read_documents
from titanlite.generate import load_generator
from titanlite.job import read_job
from titanlite.plots.loss_curve import read_metrics
from titanlite.runtime.start_log import last_step, read_starts
from titanlite.storage import StorageFolder

TEXT = "def f(x):\n    return 'é' * 3  # <|endoftext|> \0 日本\n"


@dataclass(frozen=True)
class Reader:
    """How one kind of file is read, as a command of the user would."""

    seed: str  # a file or folder among the seeds
    read: Callable[[Path], object]
    file: str = ""  # glob of the file in the folder that is changed; empty: the seed is a file
    seal: Callable[[Path, str, bytes], None] | None = None  # make hashes fit, as an attacker can


def read_corpus(path: Path) -> None:
    corpus = open_corpus(path)
    for start in range(0, min(corpus.tokens, 1 << 20), 1 << 14):
        corpus.read(start, min(1 << 14, corpus.tokens - start))


def read_tokenizer(path: Path) -> None:
    tokenizer = open_tokenizer(str(path))
    tokenizer.decode(tokenizer.encode(TEXT))


def read_text(path: Path) -> None:
    for _ in read_documents(list_file_ranges(find_files([path]))):
        pass


def read_weights(path: Path) -> None:
    from_hugging_face(StorageFolder(path), StorageFolder(path.with_name("converted")))


def seal(folder: Path, name: str, content: bytes) -> None:
    """Write hashes into a checkpoint's manifest that are true of the changed file."""
    path = folder / MANIFEST_FILE
    try:
        body = json.loads(path.read_bytes())
        body.pop("hash", None)
        if name != MANIFEST_FILE:
            hash = xxhash.xxh3_128(content).hexdigest()
            body["files"][name] |= {"bytes": len(content), "hash": hash}
        path.write_text(json.dumps({**body, "hash": manifest_hash(body)}))
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        pass  # it is not JSON any more, or not an object


def open_checkpoint(path: Path) -> None:
    load_generator(StorageFolder(path), torch.device("cpu"))


def read_records(path: Path) -> None:
    read_metrics(path)
    read_starts(path.read_bytes())
    last_step(path.read_bytes())


READERS = {
    "manifest": Reader("step", open_checkpoint, "manifest.json", seal),
    "chunks": Reader("step", open_checkpoint, "chunks.json", seal),
    "metadata": Reader("old", open_checkpoint, ".metadata", seal),
    "shards": Reader("step", open_checkpoint, "*.distcp", seal),
    "safetensors": Reader("hf", read_weights, "*.safetensors"),
    "config.json": Reader("hf", read_weights, "config.json"),
    "Hugging Face index": Reader("sharded", read_weights, "*.index.json"),
    "idx": Reader("corpus", read_corpus, "*.idx"),
    "foreign idx": Reader("foreign", read_corpus, "*.idx"),
    "corpus manifest": Reader("corpus", read_corpus, "manifest.json"),
    "tokenizer.json": Reader("tokenizer.json", read_tokenizer),
    "ranks": Reader("tokenizer.model", read_tokenizer),
    "TOML": Reader(
        "run.toml",
        lambda path: read_job(["--job.config_file", str(path)], 1, check_environment=False),
    ),
    "Parquet": Reader("text.parquet", read_text),
    "JSONL": Reader("text.jsonl", read_text),
    "metrics": Reader("metrics.jsonl", read_records),
}
