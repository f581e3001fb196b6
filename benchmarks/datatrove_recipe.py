"""The stages of `benchmarks.whole_recipe` in datatrove, which it runs in a process of their own.

python -m benchmarks.datatrove_recipe TEXTS TOKENIZER.json OUT spacy|whitespace

One process, without the pool of its executor. Prints the documents left by each stage as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datatrove.utils.text
import datatrove.utils.word_tokenizers as word_tokenizers
from datatrove.pipeline.dedup import (
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.dedup.minhash import MinhashConfig
from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.pipeline.tokens import DocumentTokenizer
from datatrove.pipeline.writers import JsonlWriter
from loguru import logger


def main() -> None:
    texts, tokenizer, out, words = sys.argv[1:]
    logger.remove()
    if words == "whitespace":
        split_at_white_space()
    work, config = Path(out), MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8)
    kept, signatures, pairs, removed = (str(work / name) for name in ("kept", "sig", "dup", "rm"))
    counts = {}
    counts["filter"] = run(
        JsonlReader(texts),
        GopherQualityFilter(),
        GopherRepetitionFilter(),
        C4QualityFilter(),
        FineWebQualityFilter(),
        JsonlWriter(kept, compression=None),
    )
    run(JsonlReader(kept), MinhashDedupSignature(signatures, config))
    for bucket in range(config.num_buckets):
        MinhashDedupBuckets(signatures, pairs, config=config).run(None, bucket, config.num_buckets)
    MinhashDedupCluster(pairs, removed, config).run(None)
    tokenize = DocumentTokenizer(str(work / "tokens"), tokenizer, eos_token="<|endoftext|>", seed=0)
    run(JsonlReader(kept), MinhashDedupFilter(removed), tokenize)
    counts["duplicates"] = tokenize.stats["tokens"].n
    print(json.dumps(counts))


def run(*steps) -> int:
    """Run the steps one after the other; returns the number of documents that come out."""
    data = None
    for step in steps:
        data = step.run(data)
    return sum(1 for _ in data or ())


def split_at_white_space() -> None:
    """Let datatrove split words at white space, and sentences by spaCy."""
    spacy = word_tokenizers.SpaCyTokenizer("en")

    class WhiteSpace:
        word_tokenize = staticmethod(str.split)
        span_tokenize = spacy.span_tokenize
        sent_tokenize = spacy.sent_tokenize

    chosen = WhiteSpace()
    word_tokenizers.load_word_tokenizer = lambda language: chosen
    datatrove.utils.text.load_word_tokenizer = word_tokenizers.load_word_tokenizer
    datatrove.pipeline.dedup.minhash.load_word_tokenizer = word_tokenizers.load_word_tokenizer
    datatrove.utils.text.split_into_parts.cache_clear()


if __name__ == "__main__":
    main()
