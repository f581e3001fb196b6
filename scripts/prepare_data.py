"""Turn text into shards: python scripts/prepare_data.py TEXT --tokenizer t.model --out corpus

Run it again after an interruption: it goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from titanlite.data import open_tokenizer
from titanlite.data.prepare import Prepared, prepare
from titanlite.data.text import INPUT_KINDS
from titanlite.errors import EXIT_DONE, EXIT_USER, UserError, report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=INPUT_KINDS)
    parser.add_argument("--tokenizer", required=True, help='ranks, tokenizer.json, or "bytes"')
    parser.add_argument("--out", required=True, metavar="DIR", help="gets train/ and validation/")
    parser.add_argument("--validation-share", type=float, default=0.01, help="documents; 0.01")
    parser.add_argument("--bos", action="store_true", help="BOS before each document, as Llama has")
    parser.add_argument("--workers", type=int, help="processes; all cores if not given")
    args = parser.parse_args()
    bar = Progress(
        TextColumn("reading"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
    )

    def show(done: int, of: int) -> None:
        task = bar.tasks[0].id if bar.tasks else bar.add_task("reading")
        bar.update(task, completed=done, total=of)

    try:
        tokenizer = open_tokenizer(args.tokenizer)
        with bar:
            made = prepare(
                args.inputs,
                tokenizer,
                args.out,
                args.validation_share,
                bos=args.bos,
                workers=args.workers,
                progress=show,
            )
    except UserError as error:
        print(report(error), file=sys.stderr)
        return EXIT_USER
    print(f"{args.out}: {summary(made)}")
    return EXIT_DONE


def summary(made: Prepared) -> str:
    """What came of it, in one line for each question."""
    megabytes = made.encoded_bytes / 1e6
    lines = [
        f"train {made.tokens:,} tokens in {made.documents:,} documents",
        f"validation {made.validation_tokens:,} tokens in {made.validation_documents:,} documents",
    ]
    if made.encoded_bytes:
        rate = megabytes / made.seconds
        lines.append(f"{megabytes:.1f} MB in {made.seconds:.1f} s, {rate:.1f} MB/s")
    if made.reused_pieces:
        lines.append(f"{made.reused_pieces} of {made.pieces} pieces were there from an earlier run")
    return "\n  ".join(lines)


if __name__ == "__main__":
    sys.exit(main())
