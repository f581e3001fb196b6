"""Compare the metrics of two runs: python -m titanlite_lab compare RUN_A RUN_B

At every step that both runs have, loss, z_loss, grad_norm, lr and validation losses must agree
within the tolerance, and tokens and samples exactly. Exit code: 0 the runs agree, 1 they differ, 2
they cannot be compared.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error, printable
from titanlite_lab.compare import compare_runs, draw_comparison, format_comparison, verdict

EXIT_DIFFERENT = 1
TOLERANCE = 3e-5  # above the rounding of 20 fp32 steps (1e-5), far below the effect of a bug
EXPECTED_DIFFERENCES = """\
Expected differences between two layouts of one job, with AdamW:
  fp32  1e-7 in loss and grad_norm at step 1; by step 20, 2e-7 in loss and about 1e-5 in
        grad_norm, except in a step whose gradient norm jumps (2e-4 where it doubled). AdamW
        amplifies rounding, because it divides small gradients by small gradients: grad_norm of a
        small model differs by 1e-3 by step 40, by 1e-2 (loss: 1e-3) after hundreds of steps. Both
        runs converge equally well. SGD does not: 1e-7 in both after 5 steps.
  bf16  1e-3 in grad_norm at step 1, more than 1e-1 (loss: 1e-2) at step 50.
A bug in a layout usually changes grad_norm by 1e-2 or more within two steps. So compare 20 steps:
  --training.mixed_precision_param float32 --training.steps 20 --metrics.log_freq 1
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=EXPECTED_DIFFERENCES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run = "a job.dump_folder, or its metrics.jsonl"
    parser.add_argument("a", metavar="RUN_A", type=Path, help=run)
    parser.add_argument("b", metavar="RUN_B", type=Path, help=run)
    tolerance = "maximum |a - b| / max(|a|, |b|) (default: %(default)g)"
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=tolerance)
    parser.add_argument("--out", type=Path, help="the plot (default: RUN_B/compare.png)")
    arguments = parser.parse_args(argv)
    folder = arguments.b if arguments.b.is_dir() else arguments.b.parent
    out = arguments.out or folder / "compare.png"
    try:
        comparison = compare_runs(arguments.a, arguments.b, arguments.tolerance)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(printable(format_comparison(comparison)), end="\n\n")
    try:
        draw_comparison(comparison, out)
        print(f"plot: {out}", end="\n\n")
    except UserError as error:  # the verdict does not need the plot
        print(format_error(error), file=sys.stderr)
    print(printable(verdict(comparison)))
    return EXIT_DIFFERENT if comparison.different else EXIT_DONE
