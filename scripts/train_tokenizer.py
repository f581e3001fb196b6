"""Train a byte-level BPE tokenizer.

python scripts/train_tokenizer.py TEXT --vocab-size 4096 --out corpus/tokenizer.model
"""

from __future__ import annotations

import argparse
import sys

from titanlite.data.bpe import train_bpe
from titanlite.data.text import INPUT_KINDS, find_files, list_file_ranges, read_documents
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT_KINDS)
    parser.add_argument("--vocab-size", type=int, required=True, help="ids, 2 specials included")
    parser.add_argument("--out", required=True, metavar="FILE.model", help="tiktoken ranks")
    args = parser.parse_args()
    try:
        texts = read_documents(list_file_ranges(find_files(args.inputs)))
        size = train_bpe(texts, args.vocab_size, args.out)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{args.out}: {size} ids")
    if size < args.vocab_size:
        print(f"the text has no more pairs to merge: set model.vocab_size = {size} or more")
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
