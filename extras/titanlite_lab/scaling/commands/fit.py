"""`fit`: fit a law to a table or to a folder of runs."""

from __future__ import annotations

import argparse
import math
from operator import attrgetter
from pathlib import Path

from numpy.linalg import LinAlgError

from titanlite.errors import DataError
from titanlite.metrics import METRICS_FILE
from titanlite_lab.loss_curve import smooth
from titanlite_lab.report.history import RunHistory, read_run
from titanlite_lab.scaling import isoflop
from titanlite_lab.scaling.commands.arguments import pair, positive_int
from titanlite_lab.scaling.files import TableColumns, read_table, write_law
from titanlite_lab.scaling.fit import FIT_METHODS, FittedLaw, LossPoints, fit_law
from titanlite_lab.scaling.laws import LAW_FIELDS, PARAMETER_COUNTS, ScalingLaw
from titanlite_lab.scaling.picture import IsoFlopCurve, LawPicture, draw_scaling_law
from titanlite_lab.scaling.runs import measure_run, points_of_runs


def add_fit_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("source", type=Path, help="a CSV file with a header, or a folder that contains runs")
    add("--method", choices=FIT_METHODS, default="huber", help="how --out is fitted")
    add("--bootstraps", type=positive_int, default=1000, help="for the errors (default: 1000)")
    add("--out", type=Path, help="write the law, for `optimum --law`")
    add("--picture", type=Path, help="draw the fit to this file")
    table = parser.add_argument_group("of a table")
    table.add_argument("--parameters", default="parameters", metavar="COLUMN")
    table.add_argument("--tokens", default="tokens", metavar="COLUMN")
    table.add_argument("--flops", default="", metavar="COLUMN", help="instead of tokens: 6 N D")
    table.add_argument("--loss", default="loss", metavar="COLUMN")
    table.add_argument("--where", action="append", default=[], metavar="COLUMN=VALUE", type=pair)
    table.add_argument("--drop-highest", type=int, default=0, metavar="K", help="losses to drop")
    runs = parser.add_argument_group("of a folder of runs")
    runs.add_argument("--count", choices=PARAMETER_COUNTS, default="all", help="what N counts")
    runs.add_argument(
        "--validation", metavar="NAME", help='validation set; "" is the training loss'
    )


def run_fit(arguments: argparse.Namespace) -> None:
    try:
        _fit(arguments)
    except (ArithmeticError, LinAlgError) as error:
        raise DataError(
            f"{arguments.source}: its losses cannot be fitted ({error.args[-1]}).",
            fix="Check the columns, and leave out what is far from all other values.",
        ) from None


def _fit(arguments: argparse.Namespace) -> None:
    if arguments.source.is_dir():
        points, curves = _points_of_folder(arguments)
    else:
        columns = TableColumns(
            arguments.parameters, arguments.tokens, arguments.flops, arguments.loss
        )
        where = dict(arguments.where)
        points = read_table(arguments.source, columns, where, arguments.drop_highest)
        curves = isoflop.curves_of(points)
    _print_points(points)
    others = [name for name in FIT_METHODS if name != arguments.method]
    fits = [fit_law(points, name, arguments.bootstraps) for name in (arguments.method, *others)]
    for fitted in fits:
        _print_fit(fitted)
    parabolas, envelope = isoflop.fit_parabolas(points), isoflop.training_envelope(curves)
    _print_exponents(fits, parabolas, envelope, float(points.flops.max()))
    if arguments.out:
        write_law(fits[0], float(points.flops.max()), arguments.out)
        print(arguments.out)
    if arguments.picture:
        draw_scaling_law(_picture(points, fits[0], parabolas, envelope), arguments.picture)
        print(arguments.picture)


def _points_of_folder(
    arguments: argparse.Namespace,
) -> tuple[LossPoints, list[isoflop.TrainingCurve]]:
    """The last losses of all runs below a folder, and their smoothed training curves."""
    folders = sorted(path.parent for path in arguments.source.rglob(METRICS_FILE))
    if not folders:
        raise DataError(f"{arguments.source}: has no run.", fix="Give a folder with runs.")
    histories = [read_run(folder) for folder in folders]
    runs = [_measure(history) for history in histories]
    points, validation = points_of_runs(
        runs, arguments.count, arguments.validation, str(arguments.source)
    )
    print(f"loss: {f'validation set {validation}' if validation else 'training, last 10 %'}")
    curves = [
        isoflop.TrainingCurve(float(run.counts[arguments.count]), run.tokens, smooth(run.losses))
        for run in runs
    ]
    return points, curves


def _measure(history: RunHistory):
    return measure_run(str(history.folder), history.config, history.steps, history.events)


def _print_points(points: LossPoints) -> None:
    counted = PARAMETER_COUNTS.get(points.count, f"column {points.count!r} of the table")
    print(f"{len(points)} losses of {points.source}")
    for name, values in (("N", points.parameters), ("D", points.tokens), ("6ND", points.flops)):
        print(f"  {name:4} {values.min():.3g} to {values.max():.3g}")
    print(f"  N counts {counted}")


def _print_fit(fitted: FittedLaw) -> None:
    print(f"\n{fitted.method}: {FIT_METHODS[fitted.method]}")
    reached, tried = fitted.starts
    print(f"  objective {fitted.objective:.9g}, reached from {reached} of {tried} starts")
    full, projected = fitted.condition
    print(f"  condition number {full:.1e} (all parameters), {projected:.3g} (alpha, beta alone)")
    errors = fitted.errors()
    for name in LAW_FIELDS:
        if errors[name] == 0:
            continue  # fixed in this law
        low, high = fitted.interval(attrgetter(name))
        value = getattr(fitted.law, name)
        print(f"  {name:6} {value:12.6g} ± {errors[name]:<10.4g} 95 %: {low:.4g} to {high:.4g}")
    if fitted.method == "kaplan":
        _print_as_kaplan(fitted.law)
    for name in fitted.undetermined():
        kind, other = ("N", "D") if name == "alpha" else ("D", "N")
        print(f"  {name} is not determined: cover a wider range of {kind} at a large {other}")


def _print_as_kaplan(law: ScalingLaw) -> None:
    n_c, d_c = law.A ** (1 / law.alpha), law.B
    exponents = f"alpha_N {law.alpha * law.power:.4f}, alpha_D {law.power:.4f}"
    print(f"  as Kaplan et al. write it: {exponents}, N_c {n_c:.3g}, D_c {d_c:.3g}")


def _print_exponents(
    fits: list[FittedLaw],
    parabolas: list[isoflop.Parabola],
    envelope: isoflop.OptimalSizes,
    largest: float,
) -> None:
    print("\noptimal N = factor x FLOPs^a")
    for fitted in fits:
        a, error = fitted.law.exponents[0], fitted.errors()["exponent"]
        print(f"  {fitted.method:24} a = {a:.3f} ± {error:.3f}")
    print(f"  {'approach 1, lowest curve':24} {_exponent(envelope)}")
    optima = isoflop.parabola_optima(parabolas)
    print(f"  {'approach 2, parabolas':24} {_exponent(optima)}, {len(optima.flops)} budgets")
    for parabola in parabolas:
        if parabola.problem:
            print(f"    {parabola.flops:.3g} FLOPs: not used, {parabola.problem}")
    bias = isoflop.parabola_bias(fits[0].law, parabolas)
    found, true = bias.exponents
    if math.isfinite(found):
        print(
            f"  Approach 2 on exact losses of the {fits[0].method} law, at the same N and D:"
            f" a = {found:.3f} instead of {true:.3f};"
        )
        far = 1000 * largest
        print(
            f"  at {far:.1e} FLOPs its N is {bias.size_ratio(far):.2f} x the optimum, which wastes"
            f" {bias.wasted(far):.1%} of the budget."
        )


def _exponent(sizes: isoflop.OptimalSizes) -> str:
    exponent = sizes.exponent
    return f"a = {exponent:.3f}" if math.isfinite(exponent) else "too few optimal sizes"


def _picture(
    points: LossPoints,
    fitted: FittedLaw,
    parabolas: list[isoflop.Parabola],
    envelope: isoflop.OptimalSizes,
) -> LawPicture:
    law, errors = fitted.law, fitted.errors()
    title = f"{len(points)} losses of {points.source}: E {law.irreducible:.3f}"
    title += f", alpha {law.alpha:.3f} ± {errors['alpha']:.3f}"
    title += f", beta {law.beta:.3f} ± {errors['beta']:.3f}" if errors["beta"] else ""
    curves = [
        IsoFlopCurve(
            parabola.flops,
            parabola.points.parameters,
            parabola.points.losses,
            parabola.loss,
            None if parabola.problem else parabola.minimum,
        )
        for parabola in parabolas
    ]
    return LawPicture(
        title,
        points.count,
        points.parameters,
        points.tokens,
        points.losses,
        law.loss,
        lambda flops: law.optimum(flops)[0],
        lambda flops: fitted.interval(lambda one: one.optimum(flops)[0]),
        curves,
        (envelope.flops, envelope.parameters),
    )
