"""All checks, in the order in which they run: the most important first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby

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
    return [
        Check("matmul", check_matmul_peak),
        Check("copies", check_copies, needs_cuda=True),
        Check("collectives", check_collectives, min_devices=2),
        *(
            Check(r.name, check_recipe(r), r.needs_cuda, r.devices, beside_others=True)
            for r in one_device_recipes()
        ),
        Check("save with pinned memory, resume", check_saving, beside_others=True),
        Check("tests/gpu", check_gpu_tests, needs_cuda=True, beside_others=True),
        *(
            Check(r.name, check_recipe(r), r.needs_cuda, r.devices)
            for r in layout_recipes(max(devices, 2))
        ),
        Check("overlap of transfers and matmuls", check_overlap, needs_cuda=True),
    ]


def run_checks(checks: Sequence[Check], machine: Machine) -> Iterator[Outcome]:
    """Run all checks, and yield their outcomes in order.

    Most of a short run is the import of torch, so those that measure no speed run side by side.
    """
    with ThreadPoolExecutor(machine.runs_at_once) as pool:
        for side_by_side, group in groupby(checks, lambda check: check.beside_others):
            if not side_by_side:
                for check in group:
                    yield from check.outcomes(machine)
                continue
            started = [pool.submit(list[Outcome], check.outcomes(machine)) for check in group]
            for future in started:
                yield from future.result()
