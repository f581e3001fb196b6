"""Predict every row of a file of published measurements, and write the predictions."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from titanlite.errors import ConfigError, DataError
from titanlite.runtime.out_of_memory import GIB
from titanlite_planner.accuracy.published_rows import Row, framework_facts, read_row
from titanlite_planner.hardware import Cluster
from titanlite_planner.memory.estimate import estimate_memory
from titanlite_planner.time.efficiency import Efficiency
from titanlite_planner.time.step import StepTime, estimate_step
from titanlite_planner.workload import Workload

COLUMNS = ("id", "step_s", "rest_gib", "peak_gib", "fits", "note")
NEEDED = (
    "id", "source", "framework", "hardware", "gpus", "precision", "model", "hidden", "layers",
    "heads", "kv_heads", "ffn", "vocab", "seq", "gbs", "mbs", "tp", "sp", "pp", "vp", "cp", "ep",
    "dp", "fsdp", "recompute", "note",
)  # fmt: skip


# Between these fractions of a GPU's memory, published runs both fitted and did not.
FITS, DOES_NOT_FIT = 0.8, 1.05


@dataclass(frozen=True)
class RowMemory:
    """Memory of the worst rank of a row."""

    rest_gib: float
    peak_gib: float  # as the framework reports it
    fits: bool | None
    # None: not said, because it is too close, or because what is recomputed is not published

    @classmethod
    def estimate(cls, row: Row, workload: Workload, cluster: Cluster) -> RowMemory:
        """The estimate for a row's workload."""
        memory, facts = estimate_memory(workload), framework_facts(row)

        def reported_gib(total: float) -> float:
            return total * facts.reported_memory / GIB + facts.process_gib

        worst = reported_gib(memory.total)
        used = worst / cluster.gpu.memory_gib
        fits = None
        if row["recompute"].strip() and not FITS < used <= DOES_NOT_FIT:
            fits = used <= FITS
        reported = memory.ranks[-1] if facts.reported_rank == "last" else memory.worst
        layout, at_rest = workload.layout, reported.resting
        if facts.gather_buffer and layout.tensor > 1 and layout.sequence_parallel:
            tokens = layout.micro_batch * workload.seq_len // layout.context
            at_rest += tokens * workload.model.dim * workload.numerics.activation_bytes
        return cls(at_rest / GIB, reported_gib(reported.total), fits)


@dataclass(frozen=True)
class Prediction:
    """What is predicted for a row; what cannot be is None, with the reason in the note."""

    row: Row
    step: StepTime | None
    note: str
    workload: Workload | None = None
    cluster: Cluster | None = None
    memory: RowMemory | None = None

    @property
    def memory_error(self) -> float | None:
        """Relative error of the predicted peak."""
        measured = _read_measurement(self.row.get("mem_GiB", ""))
        return self.memory.peak_gib / measured - 1 if self.memory and measured else None

    @property
    def measured(self) -> float | None:
        """Published seconds of a step."""
        return _read_measurement(self.row.get("step_s", ""))

    @property
    def error(self) -> float | None:
        """Relative error of the predicted seconds."""
        if self.step is None or not self.measured:
            return None
        return self.step.total / self.measured - 1


def _read_measurement(text: str) -> float | None:
    """The positive number that a cell has, if it has one."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 < number < math.inf else None


def read_rows(path: Path) -> list[Row]:
    """The rows of a file; raises DataError if it lacks columns."""
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            missing = [name for name in NEEDED if name not in (reader.fieldnames or ())]
            if missing:
                raise DataError(
                    f'"{path}" lacks the columns {", ".join(missing)}.',
                    fix="benchmarks/published_runs.csv has the schema.",
                )
            return [{key: value or "" for key, value in row.items() if key} for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f'"{path}" cannot be read: {reason}.') from None


def predict_rows(
    rows: Sequence[Row], sets: Mapping[str, Efficiency] | None = None
) -> list[Prediction]:
    """A prediction for each row; `sets` are efficiencies by GPU type instead of the fitted ones."""
    predictions = []
    for row in rows:
        run = read_row(row)
        if isinstance(run, str):
            predictions.append(Prediction(row, None, run))
            continue
        workload, cluster, notes, untimed = run
        efficiency = (sets or {}).get(cluster.gpu.name)
        try:
            step = None if untimed else estimate_step(workload, cluster, efficiency)
        except ConfigError as error:  # a GPU without units for the precision
            step, untimed = None, error.message
        estimated = None
        if workload.model.latent is None:
            estimated = RowMemory.estimate(row, workload, cluster)
        else:
            notes = [*notes, "the memory of latent attention is not modelled"]
        note = "; ".join([*notes, *filter(None, [untimed])])
        predictions.append(Prediction(row, step, note, workload, cluster, estimated))
    return predictions


def write_predictions(predictions: Sequence[Prediction], path: Path) -> None:
    """Write a CSV file with COLUMNS; raises ConfigError if that is not possible."""
    lines: list[tuple[str, ...]] = [COLUMNS]
    for prediction in predictions:
        step = f"{prediction.step.total:.5g}" if prediction.step else ""
        memory = prediction.memory
        cells: tuple[str, ...] = ("", "", "")
        if memory:
            fits = "" if memory.fits is None else "yes" if memory.fits else "no"
            cells = (f"{memory.rest_gib:.2f}", f"{memory.peak_gib:.2f}", fits)
        name, note = map(_as_text, (prediction.row["id"], prediction.note))
        lines.append((name, step, *cells, note))
    try:
        with open(path, "w", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(lines)
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be written ({error.strerror}).", fix="Give another --out."
        ) from None


def _as_text(cell: str) -> str:
    """A cell that a spreadsheet does not compute as a formula."""
    return f"'{cell}" if cell.startswith(("=", "+", "-", "@")) else cell
