"""Turn text into shards of token ids.

titanlite prepare --recipe python_library
titanlite prepare TEXT --tokenizer tokenizer.model --out corpus

The first form reads, filters, deduplicates, tokenizes, shuffles and packs, as the recipe says; the
second one only tokenizes. After an interruption, run the same command again: it continues where it
stopped.

`--verify FOLDER` compares every byte of a prepared corpus with the recorded hashes.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
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
from titanlite.data.text import MAX_DOCUMENT_BYTES
from titanlite.data.text_files import INPUT_KINDS
from titanlite.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_USER_ERROR, UserError, format_error
from titanlite.log import configure_log, pluralize
from titanlite_corpus.engine import STALL_SECONDS, LocalEngine, TaskEngine
from titanlite_corpus.extras import import_extra
from titanlite_corpus.prepare import (
    PreparedCorpus,
    PrepareSettings,
    prepare_corpus,
)
from titanlite_corpus.sides import TRAIN, VALIDATION


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="*", metavar="INPUT", help=INPUT_KINDS)
    _add_recipe_arguments(add)
    add(
        "--tokenizer",
        metavar="FILE",
        help='a file of tiktoken ranks, a tokenizer.json, or "bytes"',
    )
    add("--out", metavar="FOLDER", help="where train/ and validation/ are written")
    add(
        "--validation-share",
        type=float,
        default=0.01,
        metavar="FRACTION",
        help="fraction of the documents that goes to validation/ (default: 0.01)",
    )
    add("--bos", action="store_true", help="begin each document with BOS, as Llama does")
    add("--workers", type=int, metavar="N", help="number of processes (default: all cores)")
    add(
        "--document-mib",
        type=int,
        default=MAX_DOCUMENT_BYTES >> 20,
        metavar="MIB",
        help="refuse documents larger than this (default: 128)",
    )
    add(
        "--stall-seconds",
        type=float,
        default=STALL_SECONDS,
        metavar="SECONDS",
        help="with several workers: stop if none makes progress for this time (default: 600)",
    )
    add(
        "--verify",
        metavar="FOLDER",
        help="verify a prepared corpus instead; takes no INPUT",
    )
    args = parser.parse_args(argv)
    _check_arguments(args, parser)
    return args


def _add_recipe_arguments(add: Callable[..., object]) -> None:
    add("--recipe", metavar="FILE.toml", help="how the corpus is made; takes no INPUT")
    add(
        "--replace",
        action="store_true",
        help="with --recipe: replace the corpus that another recipe made in the same folder",
    )
    add(
        "--allow-code",
        action="store_true",
        help="with --recipe: import and call the functions that its filter.rules name",
    )
    add(
        "--clean",
        action="store_true",
        help="with --recipe: then remove the work that would speed up a changed recipe",
    )
    add(
        "--engine",
        choices=("local", "dask"),
        default="local",
        help="with --recipe: this machine (default), or the workers of a Dask cluster",
    )
    add(
        "--engine-address",
        metavar="ADDRESS",
        help="with --engine dask: of its scheduler, tcp://HOST:PORT, or its scheduler file (.json)",
    )


def _check_arguments(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """End the program unless the arguments fit together."""
    if (args.engine == "dask") != (args.engine_address is not None):
        parser.error("--engine dask and --engine-address ADDRESS belong together")
    if args.engine == "dask" and (args.recipe is None or args.workers is not None):
        parser.error("--engine dask needs --recipe FILE.toml, and has workers of its own")
    if args.recipe is not None and (args.inputs or args.tokenizer or args.out or args.verify):
        parser.error("--recipe FILE.toml has the inputs, the tokenizer and the output folder")
    if args.recipe is None and (args.replace or args.clean or args.allow_code):
        parser.error("--replace, --clean and --allow-code need --recipe FILE.toml")
    short_form = args.recipe is None and args.verify is None
    if short_form and not (args.inputs and args.tokenizer and args.out):
        parser.error(
            "INPUT, --tokenizer and --out are required, or --recipe FILE.toml or --verify FOLDER"
        )
    if args.verify is not None and args.inputs:
        parser.error("--verify FOLDER takes no INPUT")
    if args.workers is not None and args.workers < 1:
        parser.error("--workers must be at least 1")
    if args.document_mib < 1 or args.stall_seconds <= 0:
        parser.error("--document-mib and --stall-seconds must be above 0")


class ReadingBar(Progress):
    """Progress bar of the bytes read, on stderr."""

    def __init__(self):
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        super().__init__(TextColumn("reading"), *columns, console=Console(stderr=True))

    def show(self, done: int, total: int) -> None:
        task = self.tasks[0].id if self.tasks else self.add_task("reading")
        self.update(task, completed=done, total=total)


def main(argv: list[str]) -> int:
    args = parse_arguments(argv)
    configure_log()
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries rely on it
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: says how to continue
    try:
        result = run(args)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    except KeyboardInterrupt:
        print("interrupted; run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED
    # End quietly if `| head` closes stdout. Set only now: libraries rely on SIGPIPE being ignored.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(result)
    return EXIT_DONE


def run(args: argparse.Namespace) -> str:
    """Do what the arguments say, and summarise it; raises UserError."""
    if args.verify is not None:
        return verify(Path(args.verify))
    return prepare(args) if args.recipe is None else follow_recipe(args)


def follow_recipe(args: argparse.Namespace) -> str:
    """Make the corpus of a recipe; raises UserError."""
    import_extra("pyarrow", "corpus", "--recipe")
    from titanlite_corpus.pipeline import make_corpus
    from titanlite_corpus.progress_bars import StageBars
    from titanlite_corpus.recipe import load_recipe
    from titanlite_corpus.report import write_corpus_report
    from titanlite_corpus.summary import summarise_corpus

    recipe = load_recipe(args.recipe, args.allow_code)
    page = Path(recipe.recipe.out, "report.html")
    with open_engine(args, recipe.work) as engine, StageBars() as bars:
        result = make_corpus(
            recipe,
            engine,
            bars,
            args.replace,
            report=lambda stages: write_corpus_report(stages, f"Corpus {page.parent}", page),
        )
    if args.clean:
        shutil.rmtree(recipe.work, ignore_errors=True)
    return summarise_corpus(result, recipe.work)


def open_engine(args: argparse.Namespace, work: Path) -> AbstractContextManager[TaskEngine]:
    """What runs the tasks of a recipe; raises ConfigError when entered."""
    if args.engine == "dask":
        from titanlite_corpus.dask_engine import DaskEngine

        return DaskEngine(args.engine_address, work, args.stall_seconds)
    return nullcontext(LocalEngine(args.workers, args.stall_seconds))


def prepare(args: argparse.Namespace) -> str:
    """Prepare a corpus and summarise the result; raises DataError."""
    settings = PrepareSettings(
        args.validation_share,
        bos=args.bos,
        workers=args.workers,
        document_bytes=args.document_mib << 20,
        stall_seconds=args.stall_seconds,
    )
    tokenizer = open_tokenizer(args.tokenizer)
    with ReadingBar() as bar:
        prepared = prepare_corpus(args.inputs, tokenizer, args.out, settings, progress=bar.show)
    return f"{args.out}: {summarise(prepared)}"


def summarise(prepared: PreparedCorpus) -> str:
    """Counts of tokens and documents, the speed, and the pieces that were reused."""
    lines = [
        f"train {_tokens_in(prepared.documents, 'document', prepared.tokens)}",
        "validation "
        + _tokens_in(prepared.validation_documents, "document", prepared.validation_tokens),
    ]
    if prepared.encoded_bytes:
        megabytes = prepared.encoded_bytes / 1e6
        speed = megabytes / prepared.seconds
        lines.append(f"{megabytes:.1f} MB in {prepared.seconds:.1f} s, {speed:.1f} MB/s")
    if prepared.reused_pieces:
        lines.append(
            f"reused {prepared.reused_pieces} of {pluralize(prepared.pieces, 'piece')} from an"
            " earlier run"
        )
    return "\n  ".join(lines)


def verify(folder: Path) -> str:
    """Verify a folder of shards, or all train/ and validation/ in it; raises DataError."""
    parents = [folder, *sorted(path for path in folder.glob("[!.]*") if path.is_dir())]
    sides = [parent / side for parent in parents for side in (TRAIN, VALIDATION)]
    sides = [side for side in sides if side.is_dir()]
    lines = []
    with ReadingBar() as bar:
        for side in sides or [folder]:
            manifest = verify_corpus(side, progress=bar.show)
            content = _tokens_in(len(manifest.shards), "shard", manifest.tokens)
            lines.append(f"{side}: {content}, intact")
    return "\n".join(lines)


def _tokens_in(count: int, noun: str, tokens: int) -> str:
    return f"{pluralize(tokens, 'token')} in {pluralize(count, noun)}"
