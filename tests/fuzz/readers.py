"""Every reader of files that may come from a stranger, and the valid file to mutate for it."""

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
from titanlite.runtime.start_log import last_step, read_starts
from titanlite.storage import StorageFolder
from titanlite_corpus.chat.encode import ChatEncoder
from titanlite_corpus.chat.template import open_chat_template
from titanlite_lab.loss_curve import read_metrics

TEXT = "def f(x):\n    return 'é' * 3  # <|endoftext|> \0 日本\n"


@dataclass(frozen=True)
class Reader:
    """Reads one kind of file as a user's command does."""

    seed: str  # a file or folder in the folder of seeds
    read: Callable[[Path], object]
    file: str = ""  # glob of the file to mutate in the folder; empty: the seed is a file
    fix_hashes: Callable[[Path, str, bytes], None] | None = None  # as an attacker can


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


def convert_hugging_face(path: Path) -> None:
    from_hugging_face(StorageFolder(path), StorageFolder(path.with_name("converted")))


def fix_hashes(folder: Path, name: str, content: bytes) -> None:
    """Update the hashes in a checkpoint's manifest to those of a mutated file."""
    path = folder / MANIFEST_FILE
    try:
        body = json.loads(path.read_bytes())
        body.pop("hash", None)
        if name != MANIFEST_FILE:
            record = {"bytes": len(content), "hash": xxhash.xxh3_128(content).hexdigest()}
            body["files"][name] |= record
        path.write_text(json.dumps({**body, "hash": manifest_hash(body)}))
    except (ValueError, AttributeError, TypeError, KeyError, RecursionError):
        pass  # the manifest is no longer a JSON object


def load_checkpoint(path: Path) -> None:
    load_generator(StorageFolder(path), torch.device("cpu"))


def read_jsonl_files(path: Path) -> None:
    read_metrics(path)
    read_starts(path.read_bytes())
    last_step(path.read_bytes())


def render_chat(path: Path) -> None:
    tokenizer = open_tokenizer("bytes")
    template = open_chat_template(str(path), tokenizer)
    chat = [{"role": role, "content": "x"} for role in ("system", "user", "assistant") * 2]
    ChatEncoder(tokenizer, template).encode(json.dumps(chat), "a test")


READERS = {
    "chat template": Reader("tokenizer_config.json", render_chat),
    "manifest": Reader("step", load_checkpoint, "manifest.json", fix_hashes),
    "chunks": Reader("step", load_checkpoint, "chunks.json", fix_hashes),
    "metadata": Reader("old", load_checkpoint, ".metadata", fix_hashes),
    "shards": Reader("step", load_checkpoint, "*.distcp", fix_hashes),
    "safetensors": Reader("hf", convert_hugging_face, "*.safetensors"),
    "config.json": Reader("hf", convert_hugging_face, "config.json"),
    "Hugging Face index": Reader("sharded", convert_hugging_face, "*.index.json"),
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
    "metrics": Reader("metrics.jsonl", read_jsonl_files),
}
