"""Compare the ends of two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.metrics import METRICS_FILE
from titanlite.storage import StorageFolder
from titanlite_lab.drill.run import Drill
from titanlite_lab.run_metrics import read_metrics

TOLERANCE = 1e-5  # relative, between losses of different layouts
MAX_DAMAGE = 0.02  # relative, between the validation losses of a poisoned run and a clean one


def read_losses(out: Path) -> dict[int, float]:
    """The loss of each step in a metrics.jsonl."""
    steps, _ = read_metrics(out / METRICS_FILE)
    return {line["step"]: line["loss"] for line in steps}


def find_differences(undisturbed: Drill, disturbed: Drill, bit_equal: bool) -> list[str]:
    """What differs between the last checkpoints and the losses of two runs."""
    last = undisturbed.complete_checkpoints()[-1].name
    if not (disturbed.checkpoints / last).exists():
        return [f"the disturbed run has no {last}"]
    expected, actual = (
        read_checkpoint_manifest(StorageFolder(drill.checkpoints / last))
        for drill in (undisturbed, disturbed)
    )
    differences = []
    if bit_equal:
        tensors, progress = actual.tensors, actual.progress
        differences += [
            name for name, tensor in expected.tensors.items() if tensors.get(name) != tensor
        ]
        differences += [
            key
            for key, value in expected.progress.items()
            if _without_fault_counts(progress.get(key)) != _without_fault_counts(value)
        ]
    elif actual.progress["position"] != expected.progress["position"]:
        differences.append("position")
    losses = read_losses(disturbed.out)
    for step, loss in read_losses(undisturbed.out).items():
        other = losses.get(step)
        if other is None or abs(other - loss) > (0 if bit_equal else TOLERANCE * abs(loss)):
            differences.append(f"loss of step {step}: {other}, expected {loss}")
    return differences


def _without_fault_counts(value: Any) -> Any:
    """A part of the progress without the hardware faults that the guard counted."""
    if not isinstance(value, dict):
        return value
    return {k: _without_fault_counts(v) for k, v in value.items() if k != "hardware_faults"}


def find_worse_validation(clean: Drill, poisoned: Drill) -> list[str]:
    """What the last validation losses of a poisoned run differ in from those of a clean one."""
    expected, actual = (_last_validation_losses(drill.out) for drill in (clean, poisoned))
    for name, loss in expected.items():
        print(f"validation loss of {name}: {actual.get(name)}, without poison {loss}")
    return [
        f"validation loss of {name}: {actual.get(name)}, without poison {loss}"
        for name, loss in expected.items()
        if name not in actual or abs(actual[name] - loss) > MAX_DAMAGE * loss
    ]


def _last_validation_losses(out: Path) -> dict[str, float]:
    _, events = read_metrics(out / METRICS_FILE)
    return {line["name"]: line["loss"] for line in events if line["event"] == "validation"}
