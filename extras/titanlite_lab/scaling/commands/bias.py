"""`bias`: what isoFLOP parabolas find on exact losses of a law."""

from __future__ import annotations

import argparse
import math

import numpy as np

from titanlite_lab.scaling import isoflop
from titanlite_lab.scaling.commands.arguments import find_law, positive

BIAS_WIDTHS = (1.5, 2.0, 4.0, 8.0, 16.0)  # of the sizes around the optimum, as factors
BIAS_BUDGETS = np.geomspace(1e18, 1e21, 7)
BIAS_SIZES = 15
BEYOND = 1000  # the power law is extrapolated to this multiple of the largest budget


def add_bias_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--law", default="hoffmann", help="as of `optimum`")
    parser.add_argument(
        "--offset", type=positive, default=1.0, help="sizes around this multiple of the optimum"
    )
    parser.add_argument(
        "--drift", type=float, default=0.0, help="the offset grows as FLOPs^DRIFT (default: 0)"
    )


def run_bias(arguments: argparse.Namespace) -> None:
    law = find_law(arguments.law).law
    far = BEYOND * BIAS_BUDGETS[-1]
    print(f"law: {law.source or arguments.law}, no noise; true a = {law.exponents[0]:.4f}")
    print(f"  {'sizes':>14} {'a':>8} {'N / optimum':>12} {'wasted':>8}   at {far:.0e} FLOPs")
    for width in BIAS_WIDTHS:
        offsets = arguments.offset * (BIAS_BUDGETS / BIAS_BUDGETS[0]) ** arguments.drift
        grid = isoflop.isoflop_grid(law, BIAS_BUDGETS, width, BIAS_SIZES, offsets)
        bias = isoflop.parabola_bias(law, isoflop.fit_parabolas(grid))
        if not math.isfinite(bias.exponents[0]):
            print(f"  1/{width:g} to {width:g} x: no minimum within the sizes")
            continue
        sizes = f"1/{width:g} to {width:g} x"
        print(
            f"  {sizes:>14} {bias.exponents[0]:8.4f} {bias.size_ratio(far):12.3f}"
            f" {bias.wasted(far):8.2%}"
        )
