"""Measure the rules of the filters on one core, and compare their decisions with datatrove's.

python -m benchmarks.filter_speed TEXTS.jsonl [--documents N]

Prints a JSON object: MB/s of CPU time of each rule; where datatrove is installed (pip install
'datatrove[processing]' spacy) also of its filter in the same run, with its own words (spaCy) and
with words at white space, and how many decisions differ, by the two reasons ("": kept).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from titanlite_corpus.documents import TEXT, build_table
from titanlite_corpus.filters import FilterConfig, filter_table, open_rules
from titanlite_corpus.filters.text_block import TextBlock, divide_into_blocks

RULES = ["length", "gopher_quality", "gopher_repetition", "c4", "fineweb", "personal_data"]
RULES += ["language"] if importlib.util.find_spec("py3langid") else []
COMPARED = ("gopher_quality", "gopher_repetition", "c4", "fineweb")
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("texts", type=Path, help='a .jsonl with a "text" in each line')
    parser.add_argument("--documents", type=int, default=2000, help="the first N (default: 2000)")
    arguments = parser.parse_args()
    pa.set_cpu_count(1)
    lines = arguments.texts.read_text("utf-8").splitlines()[: arguments.documents]
    texts = [text for line in lines if (text := json.loads(line)["text"]).strip()]
    table = build_table(texts, "texts", [str(number) for number in range(len(texts))])
    size = sum(len(text.encode()) for text in texts) / 1e6
    result: dict[str, Any] = {"documents": len(texts), "MB": round(size, 1)}
    result["MB/s"] = {rule: round(size / seconds(table, [rule]), 1) for rule in RULES}
    result["MB/s"]["all but language"] = round(size / seconds(table, RULES[:6]), 1)
    if importlib.util.find_spec("datatrove"):
        result["datatrove"] = {
            f"{rule}, {words} words": compare(rule, words, texts, table)
            for words in ("white space", "spaCy")
            for rule in COMPARED
        }
    print(json.dumps(result, indent=1, ensure_ascii=False))


def seconds(table: Any, names: list[str]) -> float:
    """CPU seconds of the fastest of some runs."""
    rules, times = open_rules(FilterConfig(rules=names)), []
    for _ in range(REPEATS):
        start = time.process_time()
        filter_table(table, rules)
        times.append(time.process_time() - start)
    return min(times)


def decide(table: Any, name: str) -> list[str]:
    """The reason to remove each document, by one rule; "" for those that are kept."""
    ((_, rule),) = open_rules(FilterConfig(rules=[name]))
    reasons: list[str] = []
    for _, texts in divide_into_blocks(table[TEXT].chunk(0)):
        checks = rule.apply(TextBlock(texts), np.ones(len(texts), bool)).checks
        for number in range(len(texts)):
            reasons.append(next((c.name for c in checks if c.failed[number]), ""))
    return reasons


def compare(rule: str, words: str, texts: list[str], table: Any) -> dict[str, Any]:
    """datatrove's speed and decisions, and those that differ from ours."""
    from datatrove.data import Document

    filters, theirs = open_datatrove(words), []
    one = filters[rule]()
    start = time.process_time()
    for text in texts:
        decision = one.filter(Document(text=text, id=""))
        theirs.append("" if decision is True else decision[1])
    used = time.process_time() - start
    ours = decide(table, rule)
    pairs = [(a, b) for a, b in zip(theirs, ours, strict=True) if (a == "") != (b == "")]
    return {
        "MB/s": round(sum(len(text.encode()) for text in texts) / 1e6 / used, 2),
        "removed by datatrove": sum(reason != "" for reason in theirs),
        "removed by titanlite": sum(reason != "" for reason in ours),
        "differ": {f"{a!r} / {b!r}": n for (a, b), n in Counter(pairs).most_common()},
    }


def open_datatrove(words: str) -> dict[str, Callable[[], Any]]:
    """datatrove's filters, which split words with spaCy or at white space."""
    import datatrove.utils.text
    import datatrove.utils.word_tokenizers as word_tokenizers
    from datatrove.pipeline.filters import (
        C4QualityFilter,
        FineWebQualityFilter,
        GopherQualityFilter,
        GopherRepetitionFilter,
    )

    spacy = word_tokenizers.SpaCyTokenizer("en")

    class WhiteSpace:
        """Words at white space; sentences of spaCy."""

        word_tokenize = staticmethod(str.split)
        span_tokenize = spacy.span_tokenize

    chosen = spacy if words == "spaCy" else WhiteSpace()
    word_tokenizers.load_word_tokenizer = lambda language: chosen
    datatrove.utils.text.split_into_parts.cache_clear()
    return {
        "gopher_quality": GopherQualityFilter,
        "gopher_repetition": GopherRepetitionFilter,
        "c4": C4QualityFilter,
        "fineweb": FineWebQualityFilter,
    }


if __name__ == "__main__":
    main()
