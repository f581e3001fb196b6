"""Look at the data of a corpus or of a run.

  python -m titanlite_corpus inspect sample corpus/train 17 --tokenizer corpus/tokenizer.model
  python -m titanlite_corpus inspect position outputs/my_run 4096
  python -m titanlite_corpus inspect step outputs/my_run 100
  python -m titanlite_corpus inspect search outputs/my_run "def main"
  python -m titanlite_corpus inspect dump outputs/my_run/guard/step-70.json

A run is its job.dump_folder, or the TOML of a job that has not started. Run the script in the
working directory of the run, because paths in a TOML are relative to it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from titanlite.data import SourceConfig, open_tokenizer
from titanlite.errors import (
    EXIT_DONE,
    EXIT_USER_ERROR,
    ConfigError,
    DataError,
    UserError,
    format_error,
)
from titanlite_corpus.inspection.run_data import RunData, open_run_data
from titanlite_corpus.inspection.samples import (
    DEFAULT_SEQ_LEN,
    SampleRecord,
    describe_corpus_samples,
    find_text,
    format_sample,
    read_dump,
)


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)

    def add(name: str, description: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=description, description=description)
        command.add_argument("--json", action="store_true", help="print one JSON object a line")
        command.add_argument("--full", action="store_true", help="print texts in full")
        return command

    sample = add("sample", "samples of a corpus, in the order of its files")
    search = add("search", "where a text is in a corpus, or in the sources of a run")
    position = add("position", "what is at a position of a run")
    step = add("step", "what a step of a run saw")
    dump = add("dump", "a batch that the guard wrote")
    sample.add_argument("corpus", help="folder of shards, or one shard")
    sample.add_argument("number", type=int, help="of the sample, from 0")
    search.add_argument("where", metavar="CORPUS_OR_RUN")
    search.add_argument("text")
    search.add_argument(
        "--limit", type=int, default=10, metavar="N", help="stop after N matches (default: 10)"
    )
    for command in (sample, search):
        command.add_argument("--tokenizer", metavar="FILE", help="of the corpus, to show its text")
        command.add_argument(
            "--seq-len",
            type=int,
            metavar="T",
            help=f"tokens of a sample (default: those of the run or of packed windows, else"
            f" {DEFAULT_SEQ_LEN})",
        )
    position.add_argument("run", help="a run's folder, or the TOML of a job")
    position.add_argument("number", type=int, help="the position, from 0")
    for command in (sample, position):
        command.add_argument("--count", type=int, default=1, metavar="N", help="default: 1")
    step.add_argument("run", help="a run's folder")
    step.add_argument("number", type=int, help="the step, from 1")
    dump.add_argument("file", help="guard/step-N.json of a run")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly if `| head` closes stdout
    try:
        records = inspect(args)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    for record in records:
        text = (
            json.dumps(record, ensure_ascii=False)
            if args.json
            else format_sample(record, args.full)
        )
        print(text if args.json else f"{text}\n")
    if not records and args.command == "search":
        print("not found", file=sys.stderr)
    return EXIT_DONE


def inspect(args: argparse.Namespace) -> list[SampleRecord]:
    """The samples that the arguments ask for; raises UserError."""
    for name in ("count", "limit", "seq_len"):
        if (value := getattr(args, name, None)) is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} {value}: must be at least 1.")
    if args.command == "dump":
        return read_dump(Path(args.file))
    if args.command == "sample":
        tokenizer = open_tokenizer(args.tokenizer) if args.tokenizer else None
        return describe_corpus_samples(
            args.corpus, args.seq_len, args.number, args.count, tokenizer
        )
    if args.command == "search":
        return search(args)
    run = open_run_data(args.run)
    if args.command == "position":
        return run.describe(args.number, args.count)
    batch = run.batch_of(args.number)
    return run.describe(batch.position, batch.samples)


def search(args: argparse.Namespace) -> list[SampleRecord]:
    """The first matches of `args.text`; raises UserError."""
    sources: list[SourceConfig]
    if is_run(args.where):
        run: RunData = open_run_data(args.where)
        sources, seq_len = run.config.data.sources, run.config.training.seq_len
        tokenizer = run.stream.tokenizer
    else:
        sources, seq_len = [SourceConfig("", args.where)], DEFAULT_SEQ_LEN
        tokenizer = None
    if args.tokenizer:
        tokenizer = open_tokenizer(args.tokenizer)
    if tokenizer is None:
        raise DataError(
            f"{args.where}: its ids can only be searched with their tokenizer.",
            fix="Add --tokenizer FILE.",
        )
    matches: Any = (
        match
        for source in sources
        for match in find_text(source, args.text, args.seq_len or seq_len, tokenizer)
    )
    return list(islice(matches, args.limit))


def is_run(path: str) -> bool:
    """Whether a path is that of a run or of a TOML, not of a corpus."""
    return path.endswith(".toml") or (Path(path) / "config.toml").exists()
