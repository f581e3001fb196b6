"""Check that a GPU machine computes what the CPU computes: python -m benchmarks.gpu_check

In about five minutes: matmul, copy and collective bandwidth; a short run of each kind of job,
whose losses must be those of one CPU process in fp32; a checkpoint that is resumed; the overlap of
transfers and matmuls in a trace; tests/gpu. All GPUs are used; --devices or
`torchrun --nproc_per_node N -m benchmarks.gpu_check` selects fewer. The report is one Markdown
file to paste into an issue. Without a GPU, the same runs use the CPU, and the rest is skipped.
Exit code: 0 nothing failed, 1 something failed, 2 wrong arguments. A skipped check has not failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.gpu_check.checks import all_checks, run_checks
from benchmarks.gpu_check.outcome import Check, Machine, Outcome
from benchmarks.gpu_check.report import gpu_topology, report, summary
from benchmarks.machine import describe
from titanlite.log import pluralize

EXIT_FAILED = 1


def main(argv: list[str]) -> int:
    if int(os.environ.get("RANK", 0)) > 0:
        return 0  # under torchrun the first process does everything, and starts its own processes
    args = parse_arguments(argv)
    cuda = torch.cuda.is_available()
    devices = pluralize(args.devices, "GPU") if cuda else f"no GPU; {args.devices} on the CPU"
    entries = describe("-m benchmarks.gpu_check", argv) | {"devices checked": devices}
    topology, outcomes = gpu_topology(), list[Outcome]()
    with tempfile.TemporaryDirectory() as folder:
        end = time.monotonic() + 60 * args.minutes
        machine = Machine(args.devices, cuda, Path(folder), end)
        for outcome in run_checks(select_checks(machine.devices, args.only), machine):
            print(f"{outcome.status:8}{outcome.name}: {outcome.result}", flush=True)
            outcomes.append(outcome)
            # after each check, so that a script that is killed leaves a report of what it knew
            args.out.write_text(report(entries, topology, outcomes), encoding="utf-8")
    print(f"\n{summary(outcomes)}; report: {args.out}")
    return EXIT_FAILED if any(outcome.status == "failed" for outcome in outcomes) else 0


def parse_arguments(argv: list[str]) -> argparse.Namespace:
    """The arguments; --devices defaults to torchrun's number of processes, else to all GPUs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    existing = torch.cuda.device_count() if torch.cuda.is_available() else 0
    parser.add_argument(
        "--devices",
        type=int,
        default=int(os.environ.get("LOCAL_WORLD_SIZE", 0)) or existing or 1,
        help="number of GPUs, or of CPU processes without a GPU (default: all GPUs, or 1)",
    )
    parser.add_argument(
        "--minutes", type=float, default=5, help="start no check after this time (default: 5)"
    )
    parser.add_argument(
        "--only",
        default="*",
        metavar="PATTERN",
        help='checks whose name matches, such as "bf16*"; what matches none lists all names',
    )
    out = Path("gpu_check.md")
    parser.add_argument("--out", type=Path, default=out, help=f"the report (default: {out})")
    args = parser.parse_args(argv)
    if args.devices < 1:
        parser.error(f"--devices {args.devices}: must be at least 1.")
    if existing and args.devices > existing:
        parser.error(f"--devices {args.devices}: this machine has {pluralize(existing, 'GPU')}.")
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: must be above 0.")
    if not select_checks(args.devices, args.only):
        names = "\n  ".join(check.name for check in all_checks(args.devices))
        parser.error(f"--only {args.only!r} matches no check. Checks:\n  {names}")
    try:  # now, not after five minutes of checks
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.open("a").close()
    except OSError as error:
        parser.error(f"--out {args.out}: cannot be written: {error.strerror}.")
    return args


def select_checks(devices: int, pattern: str) -> list[Check]:
    """The checks whose name matches a shell pattern."""
    return [check for check in all_checks(devices) if fnmatch.fnmatch(check.name, pattern)]


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the script without a traceback
    sys.exit(main(sys.argv[1:]))
