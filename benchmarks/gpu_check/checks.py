"""All checks, in the order in which they run: the most important first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.gpu_check.bandwidth import check_collectives, check_copies, check_matmul_peak
from benchmarks.gpu_check.gpu_tests import check_gpu_tests
from benchmarks.gpu_check.outcome import Check, Machine, Outcome
from benchmarks.gpu_check.runs import (
    check_overlap,
    check_recipe,
    check_saving,
    layout_recipes,
    one_device_recipes,
)


def all_checks(devices: int) -> list[Check]:
    """Every check, whether or not a machine with `devices` devices can run it."""
    recipes = [*one_device_recipes(), *layout_recipes(max(devices, 2))]
    return [
        Check("matmul", check_matmul_peak),
        Check("copies", check_copies, needs_cuda=True),
        Check("collectives", check_collectives, min_devices=2),
        *(Check(r.name, check_recipe(r), r.needs_cuda, r.devices) for r in recipes),
        Check("save with pinned memory, resume", check_saving),
        Check("overlap of transfers and matmuls", check_overlap, needs_cuda=True),
        Check("tests/gpu", check_gpu_tests, needs_cuda=True),
    ]


def run_checks(checks: Sequence[Check], machine: Machine) -> Iterator[Outcome]:
    """Run all checks, and yield each outcome as soon as it is known."""
    for check in checks:
        yield from check.outcomes(machine)
