"""The results of an evaluation: values of each task, as a table and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from titanlite.checkpoint import CheckpointManifest

STDERR = "_stderr"  # suffix of the standard error of a metric


@dataclass(frozen=True)
class TaskScores:
    """The values of one task."""

    documents: int
    values: dict[str, float]  # by metric; a standard error has the suffix `STDERR`


@dataclass(frozen=True)
class EvaluationResult:
    """What was measured on one model."""

    model: str  # folder of the checkpoint, or of the Hugging Face export
    step: int | None  # of the checkpoint; None: unknown
    weights: str  # hash of the checkpoint's weights; "" for an export
    tasks: dict[str, TaskScores]
    settings: dict[str, Any]  # that change results
    versions: dict[str, str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        """The result as JSON values."""
        return asdict(self)

    def rows(self) -> Iterator[tuple[str, int, str, float, float | None]]:
        """(task, documents, metric, value, standard error) of all values."""
        for task, scores in self.tasks.items():
            for metric, value in scores.values.items():
                if not metric.endswith(STDERR):
                    yield task, scores.documents, metric, value, scores.values.get(metric + STDERR)

    def __str__(self) -> str:
        lines = [("task", "documents", "metric", "value", "stderr")]
        for task, documents, metric, value, error in self.rows():
            shown = "" if error is None else f"± {error:.4f}"
            lines.append((task, str(documents), metric, f"{value:.4f}", shown))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        texts = (
            f"{a:{widths[0]}}  {b:>{widths[1]}}  {c:{widths[2]}}  {d:>{widths[3]}}  {e}"
            for a, b, c, d, e in lines
        )
        return "\n".join(text.rstrip() for text in texts)


def scores_of_tasks(raw: Mapping[str, Any]) -> dict[str, TaskScores]:
    """The scores in the results of `lm_eval.evaluator.evaluate`, of tasks and of groups."""
    counts, samples = raw.get("n-samples", {}), raw.get("samples", {})
    scores = {}
    for task, fields in raw["results"].items():
        values: dict[str, float] = {}
        for key, value in fields.items():
            metric, comma, filter_name = key.partition(",")
            if not comma or STDERR in metric or not isinstance(value, (int, float)):
                continue
            name = metric if filter_name == "none" else f"{metric}/{filter_name}"
            values[name] = float(value)
            own = [s.get(metric) for s in samples.get(task, []) if s.get("filter") == filter_name]
            if (error := _mean_stderr(own, float(value))) is not None:
                values[name + STDERR] = error
        documents = counts.get(task, {}).get("effective", fields.get("sample_len", 0))
        scores[task] = TaskScores(int(documents or 0), dict(sorted(values.items())))
    return scores


def _mean_stderr(samples: Sequence[Any], mean: float) -> float | None:
    """The standard error of a metric that is the mean over its samples; else None.

    Other metrics get none: lm-eval would estimate it by resampling, in a process for each core.
    """
    numbers = [float(s) for s in samples if isinstance(s, (bool, int, float))]
    if len(numbers) < 2 or len(numbers) < len(samples):
        return None
    if not math.isclose(sum(numbers) / len(numbers), mean, rel_tol=1e-9, abs_tol=1e-12):
        return None
    variance = sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1)
    return math.sqrt(variance / len(numbers))


def weights_hash(manifest: CheckpointManifest) -> str:
    """A hash of the model's weights that two checkpoints share only if all weights are equal."""
    digest = xxhash.xxh3_128()
    for name, tensor in sorted(manifest.tensors.items()):
        if name.startswith("model."):
            digest.update(f"{name} {tensor.dtype} {tensor.shape} {tensor.hash}\n".encode())
    return digest.hexdigest()
