"""Inject faults into a run and check that it ends as a run without faults does.

python -m titanlite_lab drill --faults 20 --ranks 2 --out drill -- --job.config_file run.toml

Trains once without faults in OUT/undisturbed, and once in OUT/disturbed with random faults; after
each fault the same torchrun command is started again. Both runs must end at the same step with
bit-equal weights, optimizer state, data position and losses. With several --layout, each start uses
the next layout, given as overrides of the job; then only the data position must be equal, and the
losses must agree to 1e-5. With --poison, both runs meet a stretch of random tokens, which the
guard should handle (guard.spike = "rollback"). A third run, in OUT/clean, does not meet it: the
validation losses must agree with its to 2 %. Exit code 0 if the runs agree, 2 if not.
"""

from __future__ import annotations

import argparse
import random
import re
import shlex
import sys
from pathlib import Path
from typing import Any

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite_lab.drill.comparison import TOLERANCE, find_differences, find_worse_validation
from titanlite_lab.drill.faults import PROCESS_FAULTS
from titanlite_lab.drill.numerical import NUMERICAL_FAULTS, kill_in_a_roll_back
from titanlite_lab.drill.run import Drill

MAX_SHOWN_DIFFERENCES = 20
MAX_RUN_SECONDS = 24 * 3600
FAULTS = PROCESS_FAULTS | NUMERICAL_FAULTS | {"kill_in_a_roll_back": kill_in_a_roll_back}


def parse_drill_arguments(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kinds, times and ranks")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=FAULTS,
        default=list(PROCESS_FAULTS),
        metavar="KIND",
        help="kinds of faults to choose from; default: those of processes, disks and files"
        f" ({', '.join(PROCESS_FAULTS)}); numerical: {', '.join(NUMERICAL_FAULTS)}; with --poison:"
        " kill_in_a_roll_back",
    )
    parser.add_argument(
        "--longest", type=float, default=3.0, help="maximum seconds of training before a fault"
    )
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        help='overrides for one start, as "--parallelism.tensor_parallel_degree 2"; repeatable',
    )
    parser.add_argument(
        "--poison",
        type=parse_poison,
        metavar="FIRST:LAST",
        help="positions in the order of samples that are random tokens, in every start",
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "job", nargs="+", help="after --: arguments of train.py; the job must be deterministic"
    )
    return parser.parse_args(argv)


def parse_poison(text: str) -> dict[str, Any]:
    """FIRST:LAST as a NumericalFault of the data."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None:
        raise argparse.ArgumentTypeError("must be FIRST:LAST, two positions such as 480:512")
    return {"kind": "data", "start": int(match[1]), "end": int(match[2]) + 1}


def run_drill(args: argparse.Namespace) -> int:
    """Train without and with faults, and compare; raises CheckpointError if a run fails."""
    layouts = [shlex.split(text) for text in args.layout] or [[]]
    argv = [*args.job, "--checkpoint.enable=true", "--guard.max_hardware_faults=1000000"]
    poison = args.poison

    def build_drill(name: str, layouts: list[list[str]], poison=poison) -> Drill:
        generator = random.Random(args.seed)
        return Drill(args.out / name, argv, args.ranks, layouts, generator, args.longest, poison)

    undisturbed, disturbed = (
        build_drill("undisturbed", layouts[:1]),
        build_drill("disturbed", layouts),
    )
    clean = build_drill("clean", layouts[:1], None)
    try:
        for drill in (undisturbed, clean) if poison else (undisturbed,):
            if drill.wait(drill.start(), MAX_RUN_SECONDS):
                raise drill.failure("the run without faults failed")
        print("run without faults: done", flush=True)
        for number in range(1, args.faults + 1):
            kind = disturbed.random.choice(args.kinds)
            report = FAULTS[kind](disturbed)
            names = [path.name for path in disturbed.complete_checkpoints()[-2:]]
            print(
                f"{number:3}. {report}; newest checkpoints: {', '.join(names) or 'none'}",
                flush=True,
            )
        if disturbed.wait(disturbed.start(), MAX_RUN_SECONDS):
            raise disturbed.failure("the last start failed")
    finally:  # an error, or Ctrl-C: leave no process behind
        for drill in (undisturbed, disturbed, clean):
            drill.kill()
    differences = find_differences(undisturbed, disturbed, bit_equal=len(layouts) == 1)
    if poison:
        differences += find_worse_validation(clean, disturbed)
    for difference in differences[:MAX_SHOWN_DIFFERENCES]:
        print(f"differs: {difference}")
    equal = "bit-equal" if len(layouts) == 1 else f"equal to {TOLERANCE:g}"
    verdict = "DIFFERENT" if differences else equal
    print(f"{disturbed.starts} starts, {args.faults} faults: {verdict}")
    return EXIT_USER_ERROR if differences else EXIT_DONE


def main(argv: list[str]) -> int:
    args = parse_drill_arguments(argv)
    if args.out.exists():
        print(f"titanlite: --out {args.out}: exists; name a new folder.", file=sys.stderr)
        return EXIT_USER_ERROR
    args.out.mkdir(parents=True)
    try:
        return run_drill(args)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
