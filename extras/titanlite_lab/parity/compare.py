"""Compare the answer of another trainer with a parity bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from titanlite.errors import DataError
from titanlite.log import pluralize
from titanlite_lab.parity.bundle import (
    BundleFacts,
    GradientSummary,
    StepScalars,
    StepTolerances,
    TensorFiles,
    gradient_error,
    gradients_folder,
    read_facts,
    read_scalars,
    read_summaries,
    read_tolerances,
    relative_error,
    size_of,
)

MAX_LISTED = 8


@dataclass(frozen=True)
class ParityMeasurement:
    """One number or tensor of one step, compared."""

    step: int
    kind: str  # loss, gradient, grad_norm or update
    name: str  # Hugging Face's name of a tensor; empty for the whole step
    error: float  # relative; inf if one of the values is NaN or inf, or a tensor is missing
    tolerance: float

    @property
    def differs(self) -> bool:
        return self.error > self.tolerance

    def __str__(self) -> str:
        what = {"gradient": f"the gradient of {self.name}", "update": f"the update of {self.name}"}
        by = f"by {self.error:.1e} (tolerance {self.tolerance:.1e})"
        return f"{what.get(self.kind, self.kind)} in step {self.step}, {by}"


def compare_answer(bundle: Path, answer: Path) -> list[ParityMeasurement]:
    """All measurements in the order of execution; raises DataError for files that are not valid.

    A step computes its loss, the gradients as backward completes them, their norm, and the update.
    """
    facts = read_facts(bundle)
    tolerances = read_tolerances(bundle, facts.steps)
    expected, actual = (read_scalars(folder, facts.steps) for folder in (bundle, answer))
    for theirs in actual:
        _refuse_unknown(answer, theirs.step, theirs.update_norms, facts)
    return [
        measurement
        for step in zip(expected, actual, tolerances, strict=True)
        for measurement in _compare_step(bundle, answer, facts, *step)
    ]


def _compare_step(
    bundle: Path,
    answer: Path,
    facts: BundleFacts,
    expected: StepScalars,
    actual: StepScalars,
    tolerances: StepTolerances,
) -> Iterator[ParityMeasurement]:
    step = expected.step
    error = relative_error(actual.loss, expected.loss)
    yield ParityMeasurement(step, "loss", "", error, tolerances.loss)
    with ExitStack() as files:
        for name, error in _gradient_errors(bundle, answer, facts, step, files):
            yield ParityMeasurement(step, "gradient", name, error, tolerances.gradients[name])
    error = relative_error(actual.grad_norm, expected.grad_norm)
    yield ParityMeasurement(step, "grad_norm", "", error, tolerances.grad_norm)
    largest = max(expected.update_norms.values())
    for name in (name for name in facts.order if name in actual.update_norms):
        error = relative_error(actual.update_norms[name], expected.update_norms[name], largest)
        yield ParityMeasurement(step, "update", name, error, tolerances.update_norms[name])


def _gradient_errors(
    bundle: Path, answer: Path, facts: BundleFacts, step: int, files: ExitStack
) -> Iterator[tuple[str, float]]:
    """(name, relative error) of every gradient of a step."""
    theirs = TensorFiles(gradients_folder(answer, step), files)
    _refuse_unknown(theirs.folder, step, theirs, facts)
    expected: Mapping[str, GradientSummary] | TensorFiles = (
        TensorFiles(gradients_folder(bundle, step), files)
        if facts.gradients_are_full
        else read_summaries(bundle, step)
    )
    largest = max(size_of(_expected(expected, name)) for name in facts.order)
    for name in facts.order:
        reference = _expected(expected, name)
        if name not in theirs:
            yield name, float("inf") if size_of(reference) else 0.0
            continue
        gradient = theirs.read(name)
        if list(gradient.shape) != list(reference.shape):
            raise DataError(
                f"{theirs.folder}: {name} has shape {list(gradient.shape)}; in weights/ of the"
                f" bundle it has {list(reference.shape)}.",
                fix="Write each gradient in the shape of the Hugging Face tensor.",
            )
        yield name, gradient_error(gradient, reference, largest)


def _expected(
    tensors: Mapping[str, GradientSummary] | TensorFiles, name: str
) -> Tensor | GradientSummary:
    return tensors.read(name) if isinstance(tensors, TensorFiles) else tensors[name]


def _refuse_unknown(place: Path, step: int, names, facts: BundleFacts) -> None:
    """Raise DataError for names that the bundle does not have."""
    unknown = sorted(set(names) - set(facts.order))
    if unknown:
        more = f" and {len(unknown) - MAX_LISTED} more" if len(unknown) > MAX_LISTED else ""
        raise DataError(
            f"{place}: step {step} has tensors that the bundle does not have:"
            f" {', '.join(unknown[:MAX_LISTED])}{more}.",
            fix=f"Use the names of weights/, such as {facts.order[0]}; write a tied tensor once.",
        )


# --- text -----------------------------------------------------------------------------------------


def format_measurements(measurements: list[ParityMeasurement]) -> str:
    """A table: for each step and kind, how many differ, and the worst one."""
    groups: dict[tuple[int, str], list[ParityMeasurement]] = {}
    for measurement in measurements:
        groups.setdefault((measurement.step, measurement.kind), []).append(measurement)
    rows = [["step", "compared", "differ", "largest error", "tolerance", "where"]]
    for (step, kind), group in groups.items():
        worst = max(group, key=lambda m: m.error / m.tolerance)
        count = kind if len(group) == 1 else f"{len(group)} {kind}s"
        differ = sum(measurement.differs for measurement in group)
        numbers = [f"{worst.error:.1e}", f"{worst.tolerance:.1e}"]
        rows.append([str(step), count, str(differ or ""), *numbers, worst.name])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )


def parity_verdict(measurements: list[ParityMeasurement]) -> str:
    """One line: both agree, or what differs first in the order of execution."""
    different = [measurement for measurement in measurements if measurement.differs]
    if not different:
        return f"They agree: {pluralize(len(measurements), 'measurement')} within their tolerances."
    missing = " It is missing, inf or NaN." if different[0].error == float("inf") else ""
    count = f"{len(different)} of {len(measurements)} differ."
    return f"They differ: first {different[0]}.{missing} {count}"
