"""The losses of titanlite's runs, as points to fit a scaling law to."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from titanlite.errors import DataError
from titanlite.models import FAMILIES, ModelSizes, ModelSpec
from titanlite.models.spec import ModelConfig
from titanlite.settings import raise_together
from titanlite_lab.scaling.fit import LossPoints

_FINAL_PART = 0.1  # of a run, over which the training loss is averaged


def count_parameters_by_kind(spec: ModelSpec[Any], sizes: ModelSizes) -> dict[str, int]:
    """Parameters of a model by each of PARAMETER_COUNTS."""
    with torch.device("meta"):
        model = spec.build(sizes)
    parameters = spec.count_parameters(sizes)
    embedding = 0 if spec.tied_parameters(sizes) else sizes.vocab_size * sizes.dim
    return {
        "all": parameters,
        "matmul": parameters - embedding,  # a tied embedding is the output layer too
        "blocks": sum(p.numel() for p in model.get_submodule(spec.blocks_path).parameters()),
    }


@dataclass(frozen=True)
class ScalingRun:
    """What a run recorded of its losses; arrays [k] of its step lines."""

    name: str
    counts: Mapping[str, int]
    vocab_size: int
    tokens: np.ndarray
    losses: np.ndarray
    validation: Mapping[str, float]  # last loss of each set
    finished: bool

    def loss(self, validation: str) -> float:
        """The last loss of a validation set; of "", the mean training loss at the end."""
        if validation:
            return self.validation[validation]
        last = self.tokens >= (1 - _FINAL_PART) * self.tokens[-1]
        return float(self.losses[last].mean())


def measure_run(
    name: str,
    config: Mapping[str, Any],
    steps: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]],
) -> ScalingRun:
    """From the effective configuration, "section.key" -> value, and the lines of metrics.jsonl."""
    schema = ModelConfig.schema_for(config.get("model.name", "llama3"))
    names = {field.name for field in dataclasses.fields(schema)}
    sections = (key.partition(".") for key in config)
    model = {k: config[f"model.{k}"] for s, _, k in sections if s == "model" and k in names}
    if model.get("name", "llama3") not in FAMILIES or "training.steps" not in config:
        raise DataError(f"{name}: its config.toml is missing, or is not that of a run.")
    spec = FAMILIES[model.get("name", "llama3")]
    sizes = spec.sizes_of(schema(**model))
    validation = {
        str(event["name"]): float(event["loss"])
        for event in events
        if event["event"] == "validation" and event["loss"] is not None
        and event["step"] == steps[-1]["step"]
    }  # fmt: skip
    pairs = [(float(s["tokens"]), float(s["loss"])) for s in steps if s["loss"] is not None]
    tokens, losses = np.array(pairs or [(np.nan, np.nan)]).T
    return ScalingRun(
        name,
        count_parameters_by_kind(spec, sizes),
        sizes.vocab_size,
        tokens,
        losses,
        validation,
        steps[-1]["step"] >= config["training.steps"],
    )


def points_of_runs(
    runs: Sequence[ScalingRun], count: str, validation: str | None, source: str
) -> tuple[LossPoints, str]:
    """(losses at the ends of runs, the validation set they are of; "": the training loss).

    `validation` None: the validation set of the runs, or if they have none the training loss.
    Raises all problems.
    """
    problems: list[DataError] = []
    if unfinished := [run.name for run in runs if not run.finished]:
        problems.append(
            DataError(
                f"{', '.join(unfinished)}: did not reach training.steps, so the learning rate did"
                " not decay.",
                fix="Resume them, or move their folders away.",
            )
        )
    if len({run.vocab_size for run in runs}) > 1:
        problems.append(
            DataError(f"{source}: runs of different vocabularies; losses per token do not compare.")
        )
    common = sorted(set.intersection(*(set(run.validation) for run in runs)) if runs else ())
    known = sorted({name for run in runs for name in run.validation})
    if validation is None and len(known) <= 1:
        validation = known[0] if known else ""
    if validation is None or (validation and validation not in common):
        wanted = f"--validation {validation}" if validation else "several validation sets"
        shown = ", ".join(common) or "no set"
        problems.append(
            DataError(
                f"{source}: {wanted}: all finished runs have the last loss of {shown}.",
                fix='Give one of them, or "" for the training loss.',
            )
        )
    raise_together(problems)
    chosen = validation or ""
    points = LossPoints(
        np.array([float(run.counts[count]) for run in runs]),
        np.array([run.tokens[-1] for run in runs]),
        np.array([run.loss(chosen) for run in runs]),
        count,
        source,
    )
    return points, chosen
