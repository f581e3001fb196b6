"""Job properties: what must not change by accident between a checkpoint and a job that loads it.

They are a table of names and values, such as `model` (its sizes), `data.sources` or `debug.seed`.
The manifest stores those of the job that saved it under the key `facts`. A job that loads the
checkpoint must have equal values, except for names listed in `checkpoint.allow_changes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from titanlite.errors import CheckpointError
from titanlite.storage import StorageFolder

_SHOWN_DIFFERENCES = 12  # of the entries of a table


def check_job_properties(
    folder: StorageFolder,
    saved: dict[str, Any],
    current: dict[str, Any],
    *,
    model_only: bool,
    allowed: Iterable[str],
    position: int | None = None,
) -> None:
    """Raise CheckpointError with every property that differs; names in `allowed` may differ.

    `model_only`: only the property `model` matters. Properties that only one of both has are not
    compared, such as data.content without data.verify. `position`: of the checkpoint in the order
    of samples; what decides only which samples come later is not compared.
    """
    if not model_only and position is not None:
        saved, current = (_until(position, properties) for properties in (saved, current))
    names = {"model"} if model_only else current.keys() & saved.keys()
    differences = {
        name: f"{name} ({difference})"
        for name in sorted(names - set(allowed))
        if (difference := _describe_difference(saved.get(name), current.get(name)))
    }
    if not differences:
        return
    quoted = ", ".join(f'"{name}"' for name in differences)
    later = ""
    if position and not model_only and differences.keys() & {"data.sources", "data.phases"}:
        later = (
            " To change weights from here on, keep those that were saved, and add to"
            f" [data.mixture]: phases = [{{ first_token ="
            f" {position * current.get('training.seq_len', 1)}, weights = {{ … }} }}]."
        )
    fix = (
        "Set them as they were saved; or allow the change: checkpoint.allow_changes ="
        f" [{quoted}]; or start in another job.dump_folder with checkpoint.initial_load_path, which"
        f" loads only the weights.{later}"
    )
    if model_only:  # initial_load_path is in use already
        fix = f"Set [model] as it was saved, or allow it: checkpoint.allow_changes = [{quoted}]."
    if "mtp_layers" in differences.get("model", ""):
        fix = (
            "Set model.mtp_layers as it was saved: a checkpoint keeps its blocks for multi-token"
            " prediction. To train without them, write a folder (titanlite checkpoint to-hf) and"
            " start from it with checkpoint.initial_load_in_hf = true."
        )
    raise CheckpointError(
        f"{folder}: differs from this job: {', '.join(differences.values())}.", fix=fix
    ).mark_on_all_ranks()


def _until(position: int, properties: dict[str, Any]) -> dict[str, Any]:
    """The properties without phases that begin at `position` or later, and without their sources.

    They decide only later samples. So a run may change later weights, and add a source for them.
    """
    phases = {
        start: weights
        for start, weights in dict(properties.get("data.phases") or {}).items()
        if start.isdecimal() and int(start) < position and isinstance(weights, dict)
    }
    read = {name for weights in phases.values() for name in weights}
    sources = properties.get("data.sources")
    if not isinstance(sources, dict):
        return properties
    unread = {name for name, text in sources.items() if ", weight 0, " in str(text)} - read
    kept: dict[str, Any] = {**properties, "data.phases": phases}
    for key in ("data.sources", "data.content"):
        if isinstance(table := properties.get(key), dict):
            kept[key] = {name: value for name, value in table.items() if name not in unread}
    return kept


def _describe_difference(saved: Any, current: Any) -> str:
    """The values that differ; empty if none does. Tables are compared key by key."""
    if isinstance(saved, dict) and isinstance(current, dict):
        different = [
            f"{key}: {saved.get(key)} saved, {current.get(key)} now"
            for key in sorted({*saved, *current}, key=lambda key: (len(key), key))
            if saved.get(key) != current.get(key)
        ]
        if (more := len(different) - _SHOWN_DIFFERENCES) > 0:  # the steps of a gradual change
            different[_SHOWN_DIFFERENCES:] = [f"and {more} more"]
        return "; ".join(different)
    return f"{saved} saved, {current} now" if saved != current else ""
