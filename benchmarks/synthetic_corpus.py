"""Write a corpus with known duplicates, junk and languages: python -m benchmarks.synthetic_corpus

Every document is a JSON line with its `kind` and, for a duplicate, the number of its original in
`of`. The content depends on the seed and the size only.
"""

from __future__ import annotations

import argparse
import gzip
import json
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
    "french": 0.05,
    "symbols": 0.02,  # junk: hardly any letters
    "repeated": 0.03,  # junk: one line again and again
    "short": 0.03,  # junk: a few words
    "mail": 0.05,  # English with mail addresses
}
COMMON = {  # the most frequent words of each language, which language identification looks at
    "english": "the of and to in is that it was for on are as with his they at be this from have or"
    " by one had not but what all were when we there can an your which their said if do will each"
    " about how up out them then she many some so these would other into has more two time like",
    "german": "der die und in den von zu das mit sich des auf für ist im dem nicht ein eine als"
    " auch es an werden aus er hat dass sie nach wird bei einer um am sind noch wie einem über"
    " einen so zum war haben nur oder aber vor zur bis mehr durch man sein wurde sei",
    "french": "de la le et les des en un du une que est pour qui dans a par plus pas au sur ne se"
    " le ce il sont avec mais comme ou si leur y dont elle deux ces son été aux cette être fait"
    " nous vous tout bien où même aussi très sans peut entre après",
}
_FILES = ("web.jsonl", "web-zst.jsonl.zst", "web-gz.jsonl.gz", "web.parquet")
_WORDS = 20_000  # that are not common, of each language
_SYMBOLS = list("#@{}[]<>/\\|=+*~^$%&;:_")


class DocumentGenerator:
    """Documents in order; numbers their originals."""

    def __init__(self, seed: int):
        self._random = np.random.default_rng(seed)
        self._vocabularies = {name: self._make_words(text) for name, text in COMMON.items()}
        self._originals: list[tuple[int, list[str]]] = []  # the last ones: (number, words)
        self._kinds = [*SHARES, "once"]
        shares = list(SHARES.values())
        self._weights = [*shares, 1 - sum(shares)]

    def _make_words(self, common: str) -> np.ndarray:
        letters = np.array(list("etaoinshrdlucmfwypvbgk"))
        lengths = self._random.integers(3, 11, _WORDS)
        rare = ["".join(self._random.choice(letters, n)) for n in lengths]
        return np.array(common.split() + rare, dtype=object)

    def generate(self) -> Iterator[dict]:
        """Endless documents."""
        number = 0
        while True:
            for kind in self._random.choice(self._kinds, 1000, p=self._weights):
                kind = "once" if not self._originals and kind in ("exact", "near") else str(kind)
                of, text = self._make(kind, number)
                yield {"id": number, "kind": kind, "of": of, "text": text}
                number += 1

    def _make(self, kind: str, number: int) -> tuple[int, str]:
        """(number of the original, or its own; text) of a document."""
        random = self._random
        if kind == "symbols":
            return number, "".join(random.choice(_SYMBOLS, random.integers(200, 800)))
        if kind == "short":
            return number, " ".join(self._words("english", random.integers(1, 8)))
        if kind == "repeated":
            line = " ".join(self._words("english", 8))
            return number, "\n".join([line] * int(random.integers(20, 80)))
        if kind in ("exact", "near"):
            of, words = self._originals[random.integers(len(self._originals))]
            if kind == "near":
                words = list(words)
                for place in random.choice(len(words), max(1, len(words) // 50), replace=False):
                    words[place] = self._words("english", 1)[0]
            return of, _as_text(words)
        language = kind if kind in COMMON else "english"
        words = self._words(language, int(random.lognormal(5.6, 0.8)) + 60)
        if kind == "mail":
            words[len(words) // 2] = f"{words[0]}.{number}@mail.example.com"
        if kind == "once":
            self._originals.append((number, words))
            del self._originals[:-20_000]
        return number, _as_text(words)

    def _words(self, language: str, count: int) -> list[str]:
        """Words of a language: six of ten are common ones."""
        vocabulary, common = self._vocabularies[language], len(COMMON[language].split())
        rare = self._random.integers(common, len(vocabulary), count)
        frequent = (self._random.random(count) ** 2 * common).astype(int)
        places = np.where(self._random.random(count) < 0.6, frequent, rare)
        return vocabulary[places].tolist()


def _as_text(words: list[str]) -> str:
    """Sentences of 12 words and paragraphs of 5 sentences."""
    sentences = [" ".join(words[n : n + 12]).capitalize() + "." for n in range(0, len(words), 12)]
    return "\n\n".join(" ".join(sentences[n : n + 5]) for n in range(0, len(sentences), 5))


def write_corpus(folder: Path, size: int, seed: int = 0) -> dict[str, int]:
    """Write about `size` bytes of text in four kinds of files; returns documents by kind."""
    folder.mkdir(parents=True, exist_ok=True)
    documents, counts = DocumentGenerator(seed).generate(), {}
    for number, name in enumerate(_FILES):
        share = size // 2 if number == 0 else size // 6
        with _Writer(folder / name) as writer:
            while writer.bytes < share:
                document = next(documents)
                writer.add(document)
                counts[document["kind"]] = counts.get(document["kind"], 0) + 1
    return counts


class _Writer:
    """Writes documents to one file, by its suffix."""

    def __init__(self, path: Path):
        self.bytes = 0
        self._path, self._rows = path, []
        self._file = None
        if path.suffix == ".gz":
            self._file = gzip.GzipFile(path, "wb", 1, mtime=0)
        elif path.suffix == ".zst":
            self._file = pyarrow.CompressedOutputStream(str(path), "zstd")
        elif path.suffix == ".jsonl":
            self._file = open(path, "wb")  # noqa: SIM115 (closed in __exit__)
        else:
            schema = pyarrow.schema([("id", "int64"), ("kind", "string"), ("text", "string")])
            self._parquet = pyarrow.parquet.ParquetWriter(path, schema)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *_) -> None:
        if self._file is not None:
            self._file.close()
        else:
            self._flush_rows()
            self._parquet.close()

    def add(self, document: dict) -> None:
        """Append a document."""
        self.bytes += len(document["text"].encode())
        if self._file is not None:
            self._file.write(json.dumps(document, ensure_ascii=False).encode() + b"\n")
            return
        self._rows.append(document)
        if len(self._rows) == 4000:
            self._flush_rows()

    def _flush_rows(self) -> None:
        table = pyarrow.Table.from_pylist(self._rows, self._parquet.schema)
        self._parquet.write_table(table)
        self._rows.clear()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("outputs/synthetic"), metavar="FOLDER")
    parser.add_argument("--gb", type=float, default=2.0, help="of text (default: 2)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    counts = write_corpus(args.out, int(args.gb * 1e9), args.seed)
    for kind, count in sorted(counts.items()):
        print(f"{kind:10} {count:10,} documents")


if __name__ == "__main__":
    main()
