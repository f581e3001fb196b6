"""The tests of tests/gpu."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from benchmarks.gpu_check.outcome import (
    CheckFailed,
    CheckSkipped,
    Machine,
    Outcome,
    Status,
    run_command,
)
from benchmarks.gpu_check.runs import MAX_RUN_SECONDS


def check_gpu_tests(machine: Machine) -> Iterator[Outcome]:
    """Run tests/gpu with pytest; each failed test is an outcome of its own."""
    if find_spec("pytest") is None:
        raise CheckSkipped("needs pytest: pip install '.[dev]'")
    results = machine.folder / "gpu_tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "tests/gpu", f"--junitxml={results}"]
    try:
        run_command(command, timeout=MAX_RUN_SECONDS)
    except CheckFailed:
        if not results.exists():  # pytest itself failed
            raise
    yield from read_results(results)


def read_results(results: Path) -> Iterator[Outcome]:
    """Outcomes from the JUnit XML of pytest: one for all that passed, one for each that failed."""
    passed = skipped = 0
    for case in ElementTree.parse(results).iter("testcase"):
        problem = case.find("failure")
        if problem is None:
            problem = case.find("error")
        if problem is not None:
            name = f"{case.get('classname', '')}::{case.get('name', '')}"
            message = (problem.get("message") or "").splitlines()
            failure = CheckFailed(message[0] if message else "failed", problem.text or "")
            yield Outcome(name, "failed", str(failure), log=failure.log)
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    if passed or skipped:
        status: Status = "passed" if passed else "skipped"
        yield Outcome("tests/gpu", status, f"{passed} passed, {skipped} skipped")
