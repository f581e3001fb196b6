"""The validation loss of nanoGPT's model of characters, to be compared with its published figure.

python -m benchmarks.nanogpt TEXT [--out FILE] [--set training.steps=100 …]

TEXT is tiny Shakespeare (1,115,394 characters), or another text. As there, the first nine tenths of
it are for training, and every character is a token. The job is gpt2_characters:
GPT-2 with 4 layers, 4 heads and 128 channels, without dropout, 2,000 steps of 12 x 64 tokens.
nanoGPT estimates its loss from 240 random windows; this is the loss of the whole validation part.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
from benchmarks.table_rows import grid, write_table
from titanlite_corpus.shard_writer import ShardWriter
from titanlite_lab.run_metrics import read_metrics

ROOT = Path(__file__).parents[1]
JOB = ROOT / "titanlite/train_configs/gpt2_characters.toml"
TRAIN_SHARE = 0.9
PUBLISHED, TOLERANCE = 1.88, 0.03  # https://github.com/karpathy/nanoGPT#quick-start


@dataclass(frozen=True)
class ValidationPoint:
    """The validation loss after some steps."""

    step: int
    loss: float


def write_characters(text: str, folder: Path) -> int:
    """Write the two parts of a text as shards of character ids; returns the vocabulary's size."""
    characters = sorted(set(text))
    id_of = {character: number for number, character in enumerate(characters)}
    ids = np.fromiter((id_of[character] for character in text), np.int64, len(text))
    end = int(TRAIN_SHARE * len(ids))
    for name, part in (("train", ids[:end]), ("validation", ids[end:])):
        with ShardWriter(folder / name, len(characters)) as writer:
            writer.add(part)
            writer.close()
    return len(characters)


def train_characters(text: str, folder: Path, settings: Sequence[str]) -> list[ValidationPoint]:
    """Train once, in a process of its own; `settings` are key=value."""
    vocab_size = write_characters(text, folder / "corpus")
    sources = {"sources": "train", "validation": "validation"}
    command = [sys.executable, "train.py", "--job.config_file", str(JOB), "--job.device", "cpu"]
    command += ["--job.dump_folder", str(folder / "run"), "--checkpoint.enable", "false"]
    command += ["--model.vocab_size", str(vocab_size)]
    for key, name in sources.items():
        path = folder / "corpus" / name
        command += [f"--data.{key}", f'[{{ name = "text", path = "{path}" }}]']
    command += [f"--{setting}" for setting in settings]
    subprocess.run(command, cwd=ROOT, check=True)
    _, events = read_metrics(folder / "run/metrics.jsonl")
    found = [event for event in events if event["event"] == "validation"]
    return [ValidationPoint(e["step"], e["loss"]) for e in found if e["loss"] is not None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path)
    parser.add_argument("--out", type=Path, help="Markdown file of the result")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", dest="settings")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text = arguments.text.read_text("utf-8")
        points = train_characters(text, Path(folder), arguments.settings)
    lines = [(str(point.step), f"{point.loss:.4f}") for point in points]
    markdown = grid(("steps", "validation loss"), lines, "rr")
    met = abs(points[-1].loss - PUBLISHED) <= TOLERANCE
    print(f"{markdown}\nnanoGPT: {PUBLISHED} +- {TOLERANCE}: {'met' if met else 'not met'}")
    if arguments.out:
        entries = {"text": f"{len(text):,} characters", "published": f"{PUBLISHED} (nanoGPT)"}
        write_table(
            arguments.out,
            describe("-m benchmarks.nanogpt", sys.argv[1:]) | entries,
            markdown,
            points,
        )


if __name__ == "__main__":
    main()
