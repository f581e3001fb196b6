"""Settings of deduplication and decontamination."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from titanlite.errors import ConfigError
from titanlite.settings import Positive, Range

MAX_PERMUTATIONS = 4096  # bands * rows: each takes 4 bytes a document; a table may have 100,000
BENCHMARK_SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class DeduplicateConfig:
    """[deduplicate] Which duplicates are removed; of equal documents the first one is kept."""

    exact: bool = True  # remove documents whose text is equal, byte for byte
    near: bool = True  # remove near duplicates, found by MinHash
    ngram_words: Positive = 5  # words in an n-gram of MinHash
    bands: Positive = 14  # documents match if all rows of one band are equal; more bands match more
    rows: Positive = 8  # minima in a band; with more rows, only pairs that are more similar match
    # (5-grams and 14 bands of 8 rows: FineWeb, arXiv:2406.17557, section 3.4)
    lines: Literal["off", "line", "paragraph"] = "off"  # also remove repeated lines or paragraphs
    line_documents: Positive = 6  # a line in more documents than this remains only in the first
    # (6: Llama 3, arXiv:2407.21783, section 3.1.1)
    line_characters: Positive = 30  # shorter lines are kept: headings, brackets, "return x"
    benchmarks: list[str] = field(default_factory=list)  # files or folders of benchmark texts
    benchmark_ngram_words: Annotated[int, Range(5)] = 13  # words in an n-gram of a benchmark
    # (13: GPT-3, arXiv:2005.14165, appendix C)
    benchmark_matches: Positive = 1  # remove documents with at least this many of these n-grams


def check_deduplicate(config: DeduplicateConfig) -> list[ConfigError]:
    """Problems that the types of the settings do not exclude."""
    problems = []
    if config.bands * config.rows > MAX_PERMUTATIONS:
        problems.append(
            ConfigError(
                f"deduplicate.bands = {config.bands} times deduplicate.rows = {config.rows} is"
                f" {config.bands * config.rows:,} permutations; at most {MAX_PERMUTATIONS:,}.",
                fix="Use fewer; FineWeb has 14 bands of 8 rows.",
            )
        )
    for name in config.benchmarks:
        path = Path(name)
        if not path.exists():
            reason = "no such file or folder."
        elif path.is_file() and path.suffix not in BENCHMARK_SUFFIXES:
            reason = f"must be a folder, or a file that ends in {', '.join(BENCHMARK_SUFFIXES)}."
        elif path.is_dir() and not list_benchmark_files([name]):
            reason = f"the folder has no file that ends in {', '.join(BENCHMARK_SUFFIXES)}."
        else:
            continue
        key = "deduplicate.benchmarks"
        problems.append(ConfigError(f'{key}: "{name}": {reason}'))
    return problems


def list_benchmark_files(names: list[str]) -> list[Path]:
    """The files that `deduplicate.benchmarks` names, those in folders included, sorted."""
    files = set()
    for path in map(Path, names):
        found = path.rglob("*") if path.is_dir() else [path]
        files |= {file for file in found if file.suffix in BENCHMARK_SUFFIXES and file.is_file()}
    return sorted(files)
