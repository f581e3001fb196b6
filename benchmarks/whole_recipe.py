"""MB/s a core of a whole recipe, and of the same stages in datatrove.

python -m benchmarks.whole_recipe --datatrove-python VENV/bin/python [--mb 20]

CPU time of the process and of all its children: reading a .jsonl, the filters of Gopher, C4 and
FineWeb, near duplicates by MinHash, tokenising with one tokenizer.json, shuffling documents.
datatrove's environment: pip install 'datatrove[processing]' spacy tokenizers orjson 'xxhash<4'
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks.corpus_engine import ROOT, environment
from benchmarks.synthetic_corpus import DocumentGenerator

RECIPE = """
out = "{folder}/titanlite"
tokenizer = "{folder}/tokenizer.json"
validation_share = 0.0
[[sources]]
name = "web"
inputs = ["{folder}/texts/web.jsonl"]
[filter]
rules = ["gopher_quality", "gopher_repetition", "c4", "fineweb"]
[deduplicate]
exact = false
[shuffle]
"""
VOCABULARY = 8192


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--mb", type=float, default=20, help="of text (default: 20)")
    add("--datatrove-python", default=sys.executable, metavar="FILE", help="Python that has it")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        size = write_text(folder, args.mb * 1e6)
        recipe = folder / "recipe.toml"
        recipe.write_text(RECIPE.format(folder=folder))
        ours = [sys.executable, "scripts/prepare_data.py", "--recipe", str(recipe)]
        rates = {"titanlite": measure("titanlite", [*ours, "--workers", "1"], size)}
        inputs = (str(folder / "texts"), str(folder / "tokenizer.json"))
        for words in ("spacy", "whitespace"):
            theirs = [args.datatrove_python, "-m", "benchmarks.datatrove_recipe", *inputs]
            label = f"datatrove, words by {words}"
            rates[label] = measure(label, [*theirs, str(folder / words), words], size)
        for label, rate in rates.items():
            print(f"{label}: titanlite is {rates['titanlite'] / rate:.1f} times as fast")


def write_text(folder: Path, size: float) -> int:
    """Write texts and a tokenizer.json that was trained on them; returns the bytes of text."""
    texts: list[str] = []
    (folder / "texts").mkdir()
    with open(folder / "texts" / "web.jsonl", "w") as file:
        for document in DocumentGenerator(seed=0).generate():
            texts.append(document["text"])
            file.write(json.dumps({"text": document["text"], "id": str(document["id"])}) + "\n")
            size -= len(texts[-1].encode())
            if size <= 0:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=sorted(alphabet)
    )
    tokenizer.train_from_iterator(texts[:2000], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return sum(len(text.encode()) for text in texts)


def measure(label: str, command: list[str], size: int) -> float:
    """MB/s of CPU time of a command and its children."""
    before = cpu_seconds()
    single = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    child = subprocess.run(
        command, cwd=ROOT, env={**environment(), **single}, stdout=subprocess.PIPE, text=True
    )
    if child.returncode:
        sys.exit(f"{label}: failed with {child.returncode}")
    seconds = cpu_seconds() - before
    print(f"{label}: {size / 1e6 / seconds:.2f} MB/s, {seconds:.1f} s of CPU\n{child.stdout}")
    return size / 1e6 / seconds


def cpu_seconds() -> float:
    """CPU time of all children that have ended, and of theirs."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
