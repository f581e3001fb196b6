"""Coordinate check of muP.

  python -m titanlite_lab check-mup --job.config_file TOML [--section.key …]

Trains models of several widths on one small batch with the job's optimizer, with muP and without,
and prints how the change of each module's output scales with the width. The narrowest model has
the widths of mup.base, or without it those of [model]. Exit code 0: with muP, no change grows or
vanishes with the width; 2: one does.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.job import read_job
from titanlite_lab.mup.check import (
    MAX_SLOPE,
    MIN_SLOPE,
    CoordinateCheck,
    WidthCurves,
    measure_widths,
)
from titanlite_lab.mup.picture import draw_coordinate_check


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--factors",
        type=_factors,
        default=(1, 2, 4, 8),
        help="widths, as multiples of the narrowest model's (default: 1,2,4,8)",
    )
    parser.add_argument(
        "--steps", type=_at_least_1, default=10, help="steps of each model (default: 10)"
    )
    parser.add_argument(
        "--seeds", type=_at_least_1, default=3, help="models of each width (default: 3)"
    )
    parser.add_argument(
        "--wider_heads", action="store_true", help="widen the heads instead of adding heads"
    )
    parser.add_argument("--out", type=Path, help="also draw the curves, to this file")
    arguments, job_arguments = parser.parse_known_args(argv)
    try:
        job = read_job(job_arguments, 1, here=False)
        check = CoordinateCheck(
            job, arguments.factors, arguments.steps, arguments.seeds, arguments.wider_heads
        )
        curves = {"with muP": measure_widths(check, True), "without": measure_widths(check, False)}
        if arguments.out:
            panels = {title: of.last_change() for title, of in curves.items()}
            draw_coordinate_check(panels, curves["with muP"].widths, arguments.out)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    _print_table(curves, check.steps)
    steep = curves["with muP"].steep
    limits = f"{MIN_SLOPE:g} … {MAX_SLOPE:g}"
    if steep:
        print(f"failed: with muP, the slope of {', '.join(steep)} is outside {limits}")
    else:
        print(f"passed: with muP, every slope is within {limits}")
    return EXIT_USER_ERROR if steep else EXIT_DONE


def _factors(text: str) -> tuple[int, ...]:
    factors = tuple(int(number) for number in text.split(","))
    if len(set(factors)) < 2 or min(factors) < 1:
        raise argparse.ArgumentTypeError("must be at least two different positive integers")
    return factors


def _at_least_1(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _print_table(curves: dict[str, WidthCurves], steps: int) -> None:
    widths = next(iter(curves.values())).widths
    print(f"Slope of the change after step {steps}, over dim {', '.join(map(str, widths))}:")
    print(f"  {'module':32}" + "".join(f"{title:>10}" for title in curves))
    for module in next(iter(curves.values())).change:
        slopes = "".join(f"{of.slope(module):+10.2f}" for of in curves.values())
        print(f"  {module:32}{slopes}")
