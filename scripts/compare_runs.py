"""Do two runs learn the same? python scripts/compare_runs.py RUN_A RUN_B

At every step that both have: loss, grad_norm, lr and validation losses up to the tolerance, tokens
and samples exactly. Exits with 0 if they agree, 1 if they part, 2 if it cannot be said.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.plots.compare import compare_runs, describe, draw_comparison, verdict

EXIT_PARTED = 1
TOLERANCE = 1e-4  # above the rounding of 20 fp32 steps, far below a mistake
EXPECT = """\
What to expect of one job under two layouts, with AdamW:
  fp32  1e-7 in loss and 1e-6 in grad_norm at step 1, about 1e-5 by step 20. Then AdamW, which
        divides small gradients by small gradients, amplifies rounding: grad_norm of a small model
        is 1e-4 apart at step 40, 1e-2 (loss: 1e-3) after hundreds, and both learn equally well.
  bf16  1e-3 in grad_norm at step 1, more than 1e-1 (loss: 1e-2) at step 50.
A mistake in a layout usually shows in grad_norm within two steps, as 1e-2 or more. So take 20 steps:
  --training.mixed_precision_param float32 --training.steps 20 --metrics.log_freq 1
"""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXPECT, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    run = "a job.dump_folder, or its metrics.jsonl"
    parser.add_argument("a", metavar="RUN_A", type=Path, help=run)
    parser.add_argument("b", metavar="RUN_B", type=Path, help=run)
    allowed = "how large |a - b| / max(|a|, |b|) may be; %(default)g if not given"
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help=allowed)
    parser.add_argument("--out", type=Path, help="the picture; RUN_B/compare.png if not given")
    asked = parser.parse_args(argv)
    beside = asked.b if asked.b.is_dir() else asked.b.parent
    png = asked.out or beside / "compare.png"
    try:
        comparison = compare_runs(asked.a, asked.b, asked.tolerance)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    print(describe(comparison), end="\n\n")
    try:
        draw_comparison(comparison, png)
        print(f"picture: {png}", end="\n\n")
    except UserError as error:  # a picture less is no reason to hide what was found
        print(format_error(error), file=sys.stderr)
    print(verdict(comparison))
    return EXIT_PARTED if comparison.parted else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
