"""Errors of predicted step times: by kind of row, against a naive model, and as a ranking."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from titanlite_planner.accuracy.rows import Prediction
from titanlite_planner.model_shape import flops_per_token
from titanlite_planner.workload import Workload

REPEATABILITY = 0.03
# relative difference of repeated runs of one layout (BLOOM's chronicle; 2 to 6 % between releases
# of one framework): the order of two measurements that are closer is not known
PRECISION_NAMES = {"bfloat16": "bf16", "float8": "fp8", "float4": "fp4", "float32": "fp32"}


class ErrorSummary(NamedTuple):
    """Relative errors of some rows."""

    rows: int
    median: float  # of the absolute errors
    within_20: float  # fraction of rows
    worst_low: float
    worst_high: float
    naive_median: float
    naive_within_20: float


class LayoutRanking(NamedTuple):
    """Measured and predicted order of layouts of one model on one machine."""

    name: str
    layouts: int
    tau: float  # Kendall, of all pairs
    tau_apart: float  # of those that differ by more than REPEATABILITY
    rank_of_best: int  # of the best measured layout, among the predicted


def model_flops(workload: Workload) -> float:
    """Causal FLOPs of a step: 6 per matmul weight and token, and attention over half the tokens."""
    tokens = workload.layout.global_batch * workload.seq_len
    return flops_per_token(workload.model, workload.seq_len) * tokens


def naive_work(workload: Workload) -> float:
    """FLOPs of one GPU times the pipeline bubble: what the naive model divides by a constant."""
    layout = workload.layout
    bubble = 1 + (layout.pipeline - 1) / layout.stages_per_rank / layout.n_microbatches
    recomputed = 4 / 3 if workload.recompute == "full" else 1.0
    return model_flops(workload) * recomputed / layout.gpus * bubble


def naive_errors(predictions: Sequence[Prediction]) -> dict[str, float]:
    """Error of the naive model by row id: one constant for each GPU type, the median rate."""
    rates = defaultdict(list)
    for prediction in predictions:
        assert prediction.workload and prediction.measured
        rate = naive_work(prediction.workload) / prediction.measured
        rates[_gpu(prediction)].append(rate)
    constants = {gpu: statistics.median(found) for gpu, found in rates.items()}
    errors = {}
    for prediction in predictions:
        assert prediction.workload and prediction.measured
        seconds = naive_work(prediction.workload) / constants[_gpu(prediction)]
        errors[prediction.row["id"]] = seconds / prediction.measured - 1
    return errors


def _gpu(prediction: Prediction) -> str:
    assert prediction.cluster
    return prediction.cluster.gpu.name


def kind_of_row(prediction: Prediction) -> str:
    """Such as "dense bf16", or "MoE fp8"."""
    assert prediction.workload
    density = "MoE" if prediction.workload.model.experts else "dense"
    return f"{density} {PRECISION_NAMES[prediction.workload.numerics.matmuls]}"


def summarise_errors(predictions: Sequence[Prediction]) -> dict[str, ErrorSummary]:
    """Summaries by kind of row; by kind and GPU type; by kind, GPU type and framework."""
    compared = [prediction for prediction in predictions if prediction.error is not None]
    naive: dict[str, float] = {}
    for kind in ("dense", "MoE"):  # the naive model has constants of its own for each precision
        for precision in PRECISION_NAMES.values():
            rows = [p for p in compared if kind_of_row(p) == f"{kind} {precision}"]
            naive |= naive_errors(rows)
    groups: dict[str, list[Prediction]] = defaultdict(list)
    for prediction in compared:
        kind = kind_of_row(prediction)
        framework = re.sub(r"\s*\(.*\)", "", prediction.row["framework"])
        for name in (
            kind,
            f"{kind}, {_gpu(prediction)}",
            f"{kind}, {_gpu(prediction)}, {framework}",
        ):
            groups[name].append(prediction)
    return {name: _error_summary(groups[name], naive) for name in sorted(groups)}


def _error_summary(predictions: Sequence[Prediction], naive: Mapping[str, float]) -> ErrorSummary:
    errors = [p.error for p in predictions if p.error is not None]
    simple = [abs(naive[p.row["id"]]) for p in predictions]
    return ErrorSummary(
        len(errors),
        statistics.median(map(abs, errors)),
        _within_20(errors),
        min(errors),
        max(errors),
        statistics.median(simple),
        _within_20(simple),
    )


def _within_20(errors: Sequence[float]) -> float:
    return sum(abs(error) <= 0.2 for error in errors) / len(errors)


def kendall_tau(
    measured: Sequence[float], predicted: Sequence[float], resolution: float = 0.0
) -> float:
    """(pairs in the same order - pairs in the opposite order) / all pairs: tau a.

    Pairs whose measurements differ by a smaller fraction than `resolution` are left out; NaN if
    all do.
    """
    pairs = [
        (i, j)
        for i in range(len(measured))
        for j in range(i)
        if abs(measured[i] / measured[j] - 1) >= resolution
    ]
    signs = [(measured[i] - measured[j]) * (predicted[i] - predicted[j]) for i, j in pairs]
    agree, differ = sum(sign > 0 for sign in signs), sum(sign < 0 for sign in signs)
    return (agree - differ) / len(pairs) if pairs else math.nan


def rank_layouts(predictions: Sequence[Prediction]) -> list[LayoutRanking]:
    """Rankings of the sets of three or more layouts of one model, machine and table.

    Compared by GPU seconds per token. Layouts that were measured repeatedly count once, with their
    mean.
    """
    sets: dict[str, dict[Workload, list[tuple[float, float]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for prediction in predictions:
        name = _set_of(prediction)
        if name is None or prediction.error is None:
            continue
        assert prediction.workload and prediction.step and prediction.measured
        layout = prediction.workload.layout
        scale = layout.gpus / (layout.global_batch * prediction.workload.seq_len)
        found = (prediction.measured * scale, prediction.step.total * scale)
        sets[name][prediction.workload].append(found)
    rankings = []
    for name, layouts in sets.items():
        measured = [statistics.mean(pair[0] for pair in found) for found in layouts.values()]
        predicted = [found[0][1] for found in layouts.values()]
        if len(measured) < 3:
            continue
        best = predicted[measured.index(min(measured))]
        rank = 1 + sum(other < best for other in predicted)
        tau, apart = (kendall_tau(measured, predicted, x) for x in (0.0, REPEATABILITY))
        rankings.append(LayoutRanking(name, len(measured), tau, apart, rank))
    return rankings


def _set_of(prediction: Prediction) -> str | None:
    """The table that a row is in, with its model; None if the source compares no layouts."""
    row, workload = prediction.row, prediction.workload
    if workload is None:
        return None
    model = workload.model
    if "bigscience" in row["source"]:
        day = re.search(r"\b0\d-\d\d\b", row["note"])
        shape = f"{model.dim} x {model.n_layers}, {model.n_heads} heads"
        return f"BLOOM {day[0] if day else ''}, {shape}, {row['gpus']} GPUs, batch {row['gbs']}"
    if "torchtitan" in row["source"]:
        table = "asyncTP" if "asyncTP" in row["source"] else ["", *row["source"].split("_")][-2]
        return f"torchtitan {table}, {row['model']}, {row['gpus']} GPUs"
    if "nanotron" in row["source"]:
        return f"nanotron {row['model']}, {row['gpus']} GPUs"
    if "SimuMax" in row["source"]:
        many = workload.layout.global_batch * workload.layout.tensor * workload.layout.pipeline
        return f"SimuMax {row['model']}, {workload.seq_len} tokens, {many // 8} micro-batches"
    return None


def error_table(predictions: Sequence[Prediction]) -> str:
    """The errors and rankings as Markdown."""
    lines = [
        "| rows | number | median error | within ±20 % | lowest | highest | naive median"
        " | naive ±20 % |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, found in summarise_errors(predictions).items():
        title = f"**{name}**" if "," not in name else name
        lines.append(
            f"| {title} | {found.rows} | {found.median:.1%} | {found.within_20:.0%}"
            f" | {found.worst_low:+.0%} | {found.worst_high:+.0%} | {found.naive_median:.1%}"
            f" | {found.naive_within_20:.0%} |"
        )
    lines += [
        "",
        "| layouts of one model on one machine | number | Kendall τ"
        f" | τ of pairs more than {REPEATABILITY:.0%} apart | rank of the best |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {found.name} | {found.layouts} | {found.tau:.2f} | {found.tau_apart:.2f}"
        f" | {found.rank_of_best} |"
        for found in rank_layouts(predictions)
    ]
    lines += ["", *_memory_lines(predictions)]
    refused = Counter(
        re.sub(r" of .* is not modelled", " is not modelled", prediction.note.split("; ")[-1])
        for prediction in predictions
        if prediction.step is None
    )
    lines += ["", "| not predicted, because | rows |", "| --- | ---: |"]
    lines += [f"| {note} | {number} |" for note, number in refused.most_common()]
    return "\n".join(lines)


def _memory_lines(predictions: Sequence[Prediction]) -> list[str]:
    """Errors of the peak memory as Markdown, for all rows and by framework."""
    errors: dict[str, list[float]] = {"all": []}
    for prediction in predictions:
        if (error := prediction.memory_error) is not None:
            errors["all"].append(error)
            errors.setdefault(prediction.row["framework"], []).append(error)
    lines = [
        "| peak memory of | rows | median error | median, with its sign | lowest | highest |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {name} | {len(found)} | {statistics.median(map(abs, found)):.1%}"
        f" | {statistics.median(found):+.1%} | {min(found):+.0%} | {max(found):+.0%} |"
        for name, found in errors.items()
        if found
    ]
    return lines
