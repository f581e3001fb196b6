"""Turn text into shards: python scripts/prepare_data.py TEXT --tokenizer t.model --out corpus

Run it again after an interruption: it goes on where it stopped. --verify FOLDER reads every byte of
what was prepared, and compares it with what was written.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from titanlite.data import open_tokenizer, verify_corpus
from titanlite.data.prepare import (
    STALL_SECONDS,
    TRAIN,
    VALIDATION,
    PreparedCorpus,
    prepare_corpus,
)
from titanlite.data.text import DOCUMENT_BYTES, INPUT_KINDS
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help=INPUT_KINDS)
    parser.add_argument("--tokenizer", help='ranks, tokenizer.json, or "bytes"')
    parser.add_argument("--out", metavar="DIR", help="gets train/ and validation/")
    parser.add_argument("--validation-share", type=float, default=0.01, help="documents; 0.01")
    parser.add_argument("--bos", action="store_true", help="BOS before each document, as Llama has")
    parser.add_argument("--workers", type=int, help="processes; all cores if not given")
    parser.add_argument(
        "--document-mib", type=int, default=DOCUMENT_BYTES >> 20, help="longest document; 128"
    )
    parser.add_argument(
        "--follow-symlinks", action="store_true", help="also out of the folders given"
    )
    parser.add_argument(
        "--stall-seconds", type=float, default=STALL_SECONDS, help="end workers that wait so long"
    )
    parser.add_argument("--verify", metavar="FOLDER", help="compare all of a corpus; no INPUT")
    args = parser.parse_args()
    if args.verify is None and not (args.inputs and args.tokenizer and args.out):
        parser.error("INPUT, --tokenizer and --out are required, or --verify FOLDER alone")
    if args.verify is not None and args.inputs:
        parser.error("--verify FOLDER takes no INPUT")
    if args.document_mib < 1 or args.stall_seconds <= 0:
        parser.error("--document-mib and --stall-seconds must be above 0")
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
        if args.verify is not None:
            with bar:
                print(verified(Path(args.verify), show))
            return EXIT_DONE
        tokenizer = open_tokenizer(args.tokenizer)
        with bar:
            made = prepare_corpus(
                args.inputs,
                tokenizer,
                args.out,
                args.validation_share,
                bos=args.bos,
                workers=args.workers,
                follow_symlinks=args.follow_symlinks,
                document_bytes=args.document_mib << 20,
                stall_seconds=args.stall_seconds,
                progress=show,
            )
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(f"{args.out}: {summary(made)}")
    return EXIT_DONE


def verified(folder: Path, show: Callable[[int, int], None]) -> str:
    """Verify a folder of shards, or train/ and validation/ in it; raises DataError."""
    sides = [folder / side for side in (TRAIN, VALIDATION) if (folder / side).is_dir()]
    lines = []
    for side in sides or [folder]:
        manifest = verify_corpus(side, progress=show)
        lines.append(f"{side}: {manifest.tokens:,} tokens in {len(manifest.shards)} shards, intact")
    return "\n".join(lines)


def summary(made: PreparedCorpus) -> str:
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
