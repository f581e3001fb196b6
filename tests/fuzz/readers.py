"""Every reader of files that may come from a stranger, and the valid file to mutate for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import xxhash

from titanlite.checkpoint.manifest import MANIFEST_FILE, manifest_hash
from titanlite.data import open_corpus, open_tokenizer
from titanlite.data.text import TextRules, list_file_ranges, read_documents
from titanlite.data.text_files import describe_file, find_files
from titanlite.errors import UserError
from titanlite.job import read_job
from titanlite.parallelize.schedule import read_schedule_csv
from titanlite.storage import StorageFolder
from titanlite_corpus.chat.encode import ChatEncoder
from titanlite_corpus.chat.template import open_chat_template
from titanlite_corpus.commands import inspect as inspect_data
from titanlite_corpus.recipe import load_recipe
from titanlite_corpus.web_pages import read_web_pages
from titanlite_lab.checkpoints import from_hugging_face
from titanlite_lab.commands import report as report_run
from titanlite_lab.commands import scaling_laws
from titanlite_lab.compare import compare_runs, format_comparison, verdict
from titanlite_lab.generate import load_generator
from titanlite_planner import hardware
from titanlite_planner.commands import plan

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


def run_command(main: Callable[[list[str]], int], *argv: object) -> None:
    """Run a script; raises UserError if it refuses its input, so that a valid file is noticed."""
    if main([str(argument) for argument in argv]):
        raise UserError("refused")


def report_and_compare(path: Path) -> None:
    comparison = compare_runs(path, path, 1e-4)
    format_comparison(comparison), verdict(comparison)
    run_command(report_run.main, path)


def show_dump(path: Path) -> None:
    for option in ("--json", "--full"):
        run_command(inspect_data.main, "dump", path, option)


def predict_rows(path: Path) -> None:
    run_command(plan.main, "--rows", path, "--out", path.with_name("out.csv"), "--table")


def plan_on_hardware(path: Path) -> None:
    """A search over few layouts: each uses every number of the hardware."""
    hardware._read_tables.cache_clear()  # of the file that had this path before
    job = ("--model", "llama3/8B", "--seq-len", 2048, "--global-batch", 64, "--quick")
    fixed = ("--fix", "recompute=full", "--fix", "micro_batch=1", "--fix", "tensor=4")
    run_command(plan.main, *job, *fixed, "--gpus", "16xX1", "--hardware", path)


def fit_scaling_law(path: Path) -> None:
    law = path.with_name("law.json")
    run_command(scaling_laws.main, "fit", path, "--bootstraps", 2, "--out", law)


def allocate_by_law(path: Path) -> None:
    for budget in ("--flops=1e21", "--loss=2.5"):
        run_command(scaling_laws.main, "optimum", "--law", path, budget)


def read_pages(path: Path) -> None:
    for _ in read_web_pages(describe_file(path), TextRules(), lambda problem: None):
        pass


def render_chat(path: Path) -> None:
    tokenizer = open_tokenizer("bytes")
    template = open_chat_template(str(path), tokenizer)
    chat = [{"role": role, "content": "x"} for role in ("system", "user", "assistant") * 2]
    ChatEncoder(tokenizer, template).encode(json.dumps(chat), "a test")


READERS = {
    "chat template": Reader("tokenizer_config.json", render_chat),
    "manifest": Reader("step", load_checkpoint, "manifest.json", fix_hashes),
    "chunks": Reader("step", load_checkpoint, "chunks.json", fix_hashes),
    "shards": Reader("step", load_checkpoint, "*.distcp", fix_hashes),
    "safetensors": Reader("hf", convert_hugging_face, "*.safetensors"),
    "Hugging Face JSON": Reader("hf", convert_hugging_face, "*.json"),
    "Hugging Face index": Reader("sharded", convert_hugging_face, "*.index.json"),
    "idx": Reader("corpus", read_corpus, "*.idx"),
    "foreign idx": Reader("foreign", read_corpus, "*.idx"),
    "corpus manifest": Reader("corpus", read_corpus, "manifest.json"),
    "tokenizer.json": Reader("tokenizer.json", read_tokenizer),
    "ranks": Reader("tokenizer.model", read_tokenizer),
    "TOML": Reader(
        "run.toml",
        lambda path: read_job(["--job.config_file", str(path)], 1, here=False),
    ),
    "recipe": Reader("recipe.toml", load_recipe),
    "schedule": Reader("schedule.csv", read_schedule_csv),
    "Parquet": Reader("text.parquet", read_text),
    "JSONL": Reader("text.jsonl", read_text),
    **({"web pages": Reader("pages.warc", read_pages)} if find_spec("fastwarc") else {}),
    "records of a run": Reader("run", report_and_compare, "*.*"),
    "guard's dump": Reader("step-1.json", show_dump),
    "rows of runs": Reader("rows.csv", predict_rows),
    "hardware": Reader("hardware.toml", plan_on_hardware),
    "scaling table": Reader("scaling.csv", fit_scaling_law),
    "scaling law": Reader("law.json", allocate_by_law),
}
