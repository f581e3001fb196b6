"""`optimum`: the model size and the tokens for a budget, or for a loss."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable

import numpy as np

from titanlite.errors import ConfigError
from titanlite_lab.scaling import laws as scaling_laws
from titanlite_lab.scaling.commands.arguments import find_law, positive
from titanlite_lab.scaling.files import StoredLaw
from titanlite_lab.scaling.laws import PARAMETER_COUNTS, Allocation, Demand, ScalingLaw

SIZE_FACTORS = (0.125, 0.25, 0.5, 1.0, 2.0)  # of the optimum, in the table of over-trained models
HOUR = 3600.0


def add_optimum_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    known = ", ".join(scaling_laws.LAWS)
    add("--law", default="besiroglu", help=f"the file of fit --out, or one of {known}")
    budget = parser.add_mutually_exclusive_group(required=True)
    budget.add_argument("--flops", type=positive, help="training FLOPs, 6 N D")
    budget.add_argument("--gpu-hours", type=positive)
    budget.add_argument("--money", type=positive, help="with --price")
    budget.add_argument("--loss", type=positive, help="the cheapest model with this loss")
    add("--peak-tflops", type=positive, help="dense peak of one GPU in the compute dtype")
    add("--mfu", type=positive, help="assumed model FLOPs utilization in training, 0.4 for 40 %%")
    add("--price", type=positive, help="of one GPU-hour")
    add("--inference-tokens", type=positive, default=0.0, help="read and written in its lifetime")
    add("--inference-mfu", type=positive, help="assumed utilization in inference; default --mfu")


def run_optimum(arguments: argparse.Namespace) -> None:
    try:
        _find_optimum(arguments)
    except (ArithmeticError, ValueError) as error:
        raise ConfigError(
            f"--law {arguments.law}: cannot be evaluated here ({error.args[-1]}).",
            fix="Check the parameters of the law.",
        ) from None


def _find_optimum(arguments: argparse.Namespace) -> None:
    stored = find_law(arguments.law)
    law, rate = stored.law, _flops_per_gpu_hour(arguments)
    flop_cost = arguments.mfu / arguments.inference_mfu if arguments.inference_mfu else 1.0
    demand = Demand(arguments.inference_tokens, flop_cost)
    allocate: Callable[[ScalingLaw], Allocation]
    if arguments.loss:

        def allocate(law: ScalingLaw) -> Allocation:
            return scaling_laws.allocate_for_loss(law, arguments.loss, demand)
    else:
        flops = arguments.flops
        if not flops:
            hours = arguments.gpu_hours or arguments.money / arguments.price
            flops = hours * rate

        def allocate(law: ScalingLaw) -> Allocation:
            return scaling_laws.allocate_budget(law, flops, demand)

    best = allocate(law)
    print(f"law: {law.source or arguments.law}")
    print(f"N counts {PARAMETER_COUNTS.get(law.count, f'column {law.count!r} of its table')}")
    _print_allocation(best, [allocate(one) for one in _valid_laws(stored, arguments.loss)])
    _print_cost(best, rate, arguments.price)
    if best.training_flops > stored.largest_flops:
        beyond = best.training_flops / stored.largest_flops
        print(f"extrapolated: {beyond:.3g} times the FLOPs of the largest run that was fitted")
    _print_overtrained(law, best)


def _valid_laws(stored: StoredLaw, loss: float | None) -> list[ScalingLaw]:
    """The bootstraps that can reach the loss."""
    return [one for one in stored.resampled if not loss or loss > one.irreducible]


def _flops_per_gpu_hour(arguments: argparse.Namespace) -> float:
    """FLOPs of a GPU-hour at the assumed MFU, nan if it is not needed; raises all problems."""
    needs = {"--gpu-hours": arguments.gpu_hours, "--money": arguments.money}
    given = [name for name, value in needs.items() if value]
    wanted = {"--peak-tflops": arguments.peak_tflops, "--mfu": arguments.mfu}
    if arguments.money:
        wanted["--price"] = arguments.price
    if given and (missing := [name for name, value in wanted.items() if not value]):
        raise ConfigError(f"{given[0]} needs {', '.join(missing)}.")
    if arguments.inference_mfu and not arguments.mfu:
        raise ConfigError("--inference-mfu needs --mfu.")
    for name, value in (("--mfu", arguments.mfu), ("--inference-mfu", arguments.inference_mfu)):
        if value and value > 1:
            raise ConfigError(f"{name} {value:g}: must be at most 1.", fix="0.4 is 40 %.")
    if not (arguments.peak_tflops and arguments.mfu):
        return math.nan
    return arguments.peak_tflops * 1e12 * arguments.mfu * HOUR


def _print_allocation(best: Allocation, resampled: list[Allocation]) -> None:
    for name, of in (
        ("N", lambda one: one.parameters),
        ("D", lambda one: one.tokens),
        ("D / N", lambda one: one.tokens / one.parameters),
        ("loss", lambda one: one.loss),
        ("training FLOPs", lambda one: one.training_flops),
    ):
        line = f"  {name:16} {of(best):.4g}"
        if resampled:
            low, high = np.quantile([of(one) for one in resampled], (0.025, 0.975))
            if high > low * (1 + 1e-9):
                line += f"  (95 %: {low:.3g} to {high:.3g})"
        print(line)


def _print_cost(best: Allocation, rate: float, price: float | None) -> None:
    if math.isfinite(rate):
        hours = best.training_flops / rate
        cost = f", {hours * price:,.0f} at {price:g} each" if price else ""
        print(f"  {'GPU-hours':16} {hours:,.1f} of training at the assumed MFU{cost}")
    if best.demand.tokens:
        share = 1 - best.training_flops / best.total_flops
        print(f"  {'inference':16} {share:.1%} of the cost")


def _print_overtrained(law: ScalingLaw, best: Allocation) -> None:
    print("the same loss with other sizes:")
    print(f"  {'N':>10} {'D':>10} {'D / N':>8} {'training FLOPs':>15} {'total cost':>11}")
    for factor in SIZE_FACTORS:
        if (other := scaling_laws.overtrained(law, best, factor)) is None:
            print(f"  {factor * best.parameters:10.3g}   does not reach it with any D")
            continue
        training = other.training_flops / best.training_flops
        total = other.total_flops / best.total_flops
        ratio = other.tokens / other.parameters
        print(
            f"  {other.parameters:10.3g} {other.tokens:10.3g} {ratio:8.3g} {training:13.2f} x"
            f" {total:9.2f} x"
        )
