"""Train a byte-level BPE tokenizer.

titanlite tokenizer TEXT --vocab-size 4096 --out corpus/tokenizer.model
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterable, Iterator

from titanlite.data import open_tokenizer
from titanlite.data.text import MAX_DOCUMENT_BYTES, list_file_ranges, read_documents
from titanlite.data.text_files import INPUT_KINDS, find_files
from titanlite.data.tokenizer import well_formed
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.log import configure_log, log_every, pluralize
from titanlite_corpus.bpe import train_bpe

PROGRESS_SECONDS = 10
SAMPLE_BYTES = 1 << 20  # of text whose tokens are counted


class CountedTexts:
    """Texts, how many there were so far, and the first of them."""

    def __init__(self, texts: Iterable[str]):
        self._texts, self._ended = texts, False
        self.documents = self.bytes = 0
        self.first: list[str] = []  # about SAMPLE_BYTES

    def __iter__(self) -> Iterator[str]:
        for text in self._texts:
            if self.bytes < SAMPLE_BYTES:
                self.first.append(well_formed(text))
            self.documents += 1
            self.bytes += len(text) if text.isascii() else len(well_formed(text).encode())
            yield text
        self._ended = True

    @property
    def content(self) -> str:
        """Bytes and documents, as text."""
        return f"{self.bytes / 1e6:.1f} MB in {pluralize(self.documents, 'document')}"

    def describe(self) -> str:
        """A line about the progress."""
        return f"merging pairs of {self.content}" if self._ended else f"read {self.content}"


def tokenizer_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT_KINDS)
    parser.add_argument(
        "--vocab-size",
        type=int,
        required=True,
        metavar="N",
        help="number of token ids, including 256 bytes and 2 special tokens",
    )
    parser.add_argument(
        "--out", required=True, metavar="FILE.model", help="file of tiktoken ranks to write"
    )
    parser.add_argument(
        "--document-mib",
        type=int,
        default=MAX_DOCUMENT_BYTES >> 20,
        metavar="MIB",
        help="refuse documents larger than this (default: 128)",
    )
    args = parser.parse_args(argv)
    if args.document_mib < 1:
        parser.error("--document-mib must be above 0")
    return args


def main(argv: list[str]) -> int:
    configure_log()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries rely on it
    args = tokenizer_arguments(argv)
    try:
        ranges = list_file_ranges(find_files(args.inputs))
        texts = CountedTexts(read_documents(ranges, args.document_mib << 20))
        with log_every(PROGRESS_SECONDS, texts.describe):
            size = train_bpe(texts, args.vocab_size, args.out)
        tokenizer = open_tokenizer(args.out)
        tokens = sum(len(tokenizer.encode(text)) for text in texts.first)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if `| head` closes stdout
    ratio = sum(len(text.encode()) for text in texts.first) / max(1, tokens)
    print(
        f"{args.out}: {size} ids from {texts.content}; {ratio:.2f} bytes per token (in the first"
        f" {pluralize(len(texts.first), 'document')})"
    )
    if size < args.vocab_size:
        print(f"the text has no more pairs to merge: set model.vocab_size = {size} or more")
    if size > args.vocab_size:
        print(
            "128,000 ranks are read with Llama 3's 256 special tokens: set model.vocab_size ="
            f" {size} or more, or give another --vocab-size"
        )
    return EXIT_DONE
