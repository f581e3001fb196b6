"""A corpus with known duplicates, junk, languages and addresses, in four kinds of files."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

# The share of each kind of document; the rest is English text that occurs once.
SHARES = {
    "exact": 0.06,  # equal to an earlier document
    "near": 0.06,  # an earlier document with 2 % of its words replaced
    "german": 0.05,
    "symbols": 0.02,  # junk: hardly any letters
    "repeated": 0.03,  # junk: one line again and again
    "short": 0.03,  # junk: a few words
    "mail": 0.05,  # English with mail addresses
}
COMMON = {  # the most frequent words of each language, which the rules of filters look at
    "english": "the of and to in is that it was for on are as with his they at be this from have or"
    " by one had not but what all were when we there can an your which their said if do will each",
    "german": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als"
    " auch es an werden aus er hat dass sie nach wird bei einer um am sind noch wie einem über",
}


class DocumentGenerator:
    """Documents that depend on the seed only, each with its kind."""

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)
        letters = np.array(list("etaoinshrdlucmfwypvbgk"))
        lengths = self._random.integers(3, 11, 2000)
        self._rare = ["".join(self._random.choice(letters, n)) for n in lengths]
        self._originals: list[list[str]] = []

    def generate(self) -> Iterator[dict[str, str]]:
        """Endless documents."""
        kinds, shares = [*SHARES, "once"], [*SHARES.values(), 1 - sum(SHARES.values())]
        while True:
            for kind in map(str, self._random.choice(kinds, 1000, p=shares)):
                copied = kind in ("exact", "near") and not self._originals
                kind = "once" if copied else kind
                yield {"kind": kind, "text": self._make(kind)}

    def _make(self, kind: str) -> str:
        random = self._random
        if kind == "symbols":
            return "".join(random.choice(list("#@{}[]<>/|=+*~^$%&;:_"), random.integers(200, 800)))
        if kind == "short":
            return " ".join(self._words("english", random.integers(1, 8)))
        if kind == "repeated":
            return "\n".join([" ".join(self._words("english", 8))] * int(random.integers(20, 80)))
        if kind in ("exact", "near"):
            words = list(self._originals[random.integers(len(self._originals))])
            if kind == "near":
                for place in random.choice(len(words), max(1, len(words) // 50), replace=False):
                    words[place] = self._words("english", 1)[0]
            return _as_text(words)
        words = self._words(kind if kind in COMMON else "english", int(random.lognormal(5.6, 0.8)))
        if kind == "mail":
            words.insert(0, f"{words[0]}.{words[1]}@mail.example.com")
        if kind == "once":
            self._originals.append(words)
        return _as_text(words)

    def _words(self, language: str, count: int) -> list[str]:
        """Words of a language: six of ten are common ones."""
        common = COMMON[language].split()
        frequent = self._random.random(count) < 0.6
        return [str(self._random.choice(common if known else self._rare)) for known in frequent]


def _as_text(words: list[str]) -> str:
    """Sentences of 12 words and paragraphs of 5 sentences."""
    sentences = [" ".join(words[n : n + 12]).capitalize() + "." for n in range(0, len(words), 12)]
    return "\n\n".join(" ".join(sentences[n : n + 5]) for n in range(0, len(sentences), 5))


def write_corpus(folder: Path, count: int) -> Counter[str]:
    """Write four files of `count` documents each; returns the documents by kind."""
    folder.mkdir()
    generator = DocumentGenerator(33).generate()  # with it, 32 documents have every kind
    files = [[next(generator) for _ in range(count)] for _ in range(4)]
    lines = ["".join(json.dumps(each) + "\n" for each in file).encode() for file in files]
    (folder / "web.jsonl").write_bytes(lines[0])
    (folder / "web-gz.jsonl.gz").write_bytes(gzip.compress(lines[1], mtime=0))
    with pyarrow.CompressedOutputStream(str(folder / "web-zst.jsonl.zst"), "zstd") as stream:
        stream.write(lines[2])
    table = pyarrow.Table.from_pylist(files[3])
    pyarrow.parquet.write_table(table, folder / "web.parquet")
    return Counter(each["kind"] for file in files for each in file)
