"""Prove that another trainer computes what titanlite computes.

  python -m titanlite_lab parity write --out BUNDLE --job.config_file TOML [--section.key …]
  python -m titanlite_lab parity compare BUNDLE ANSWER

write: runs the job's plain model for a few steps on one process in fp32 with SGD, and writes the
initial weights, the batches, losses, gradients, norms and tolerances. BUNDLE/README.md says what
another trainer has to write. compare: prints where its answer differs first. Exit code: 0 they
agree, 1 they differ, 2 they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error, printable
from titanlite.job import read_job
from titanlite_lab.parity.compare import compare_answer, format_measurements, parity_verdict
from titanlite_lab.parity.reference import ParitySettings
from titanlite_lab.parity.write import FULL_BYTES, write_bundle

EXIT_DIFFERENT = 1


def main(argv: list[str]) -> int:
    arguments, job_arguments = _parity_parser().parse_known_args(argv)
    try:
        if arguments.command == "write":
            return _write(arguments, job_arguments)
        if job_arguments:
            raise UserError(f"parity compare: {job_arguments[0]}: is not an argument.")
        return _compare(arguments)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR


def _parity_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    write = commands.add_parser("write", allow_abbrev=False)
    write.add_argument("--out", type=Path, required=True, help="a new folder")
    write.add_argument("--steps", type=_at_least(1), default=3, help="default: 3")
    write.add_argument(
        "--sequences", type=_at_least(2), default=4, help="of each batch (default: 4)"
    )
    write.add_argument("--lr", type=float, default=0.1, help="of SGD (default: 0.1)")
    write.add_argument(
        "--max_gradient_gb",
        type=float,
        default=FULL_BYTES / 1e9,
        help="if the gradients of all steps are larger, write their norms and projections only"
        " (default: %(default)g)",
    )
    compare = commands.add_parser("compare")
    compare.add_argument("bundle", metavar="BUNDLE", type=Path, help="what `write` wrote")
    compare.add_argument("answer", metavar="ANSWER", type=Path, help="what the other trainer wrote")
    return parser


def _at_least(minimum: int):
    def convert(text: str) -> int:
        if (number := int(text)) < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}")
        return number

    return convert


def _write(arguments: argparse.Namespace, job_arguments: list[str]) -> int:
    job = read_job(job_arguments, 1, here=False)
    settings = ParitySettings(arguments.steps, arguments.sequences, arguments.lr)
    facts = write_bundle(job, settings, arguments.out, int(arguments.max_gradient_gb * 1e9))
    gradients = "in full" if facts.gradients_are_full else "as norms and projections"
    print(
        f"{arguments.out}: {facts.family}, {facts.parameters:,} parameters, {facts.steps} steps of"
        f" {facts.sequences} x {facts.seq_len} tokens ({facts.data}); gradients {gradients}.\n"
        f"What the other trainer has to write: {arguments.out}/README.md"
    )
    return EXIT_DONE


def _compare(arguments: argparse.Namespace) -> int:
    measurements = compare_answer(arguments.bundle, arguments.answer)
    print(printable(format_measurements(measurements)), end="\n\n")
    print(printable(parity_verdict(measurements)))
    return EXIT_DIFFERENT if any(m.differs for m in measurements) else EXIT_DONE
