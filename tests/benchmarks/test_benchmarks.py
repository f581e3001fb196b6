"""Benchmarks: their computations, their tables, and one complete run."""

from __future__ import annotations

import dataclasses
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import goodput
from benchmarks.cases import gpu
from benchmarks.gpu_plans import (
    FAMILY,
    RECOMPUTE,
    STATES,
    Plan,
    estimate_peak,
    plans,
    share_of_peak,
)
from benchmarks.memory_probe import transient_bytes
from benchmarks.processes import Task, alternate, failure_reason

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("memory", [False, True])
def test_the_simulation_of_failures_agrees_with_the_formula(memory):
    """To the first order: the formula counts losses that a failure soon after another has not."""
    replaced_at_once = dataclasses.replace(goodput.Cluster(), repair=1.0)
    strategy = goodput.Strategy("", fewer=True, memory=memory, spares=1000)
    found = [goodput.simulate(replaced_at_once, strategy, 720 * 3600.0, seed) for seed in range(9)]
    mean = sum(found) / len(found)
    assert mean == pytest.approx(goodput.expected_goodput(replaced_at_once, memory), abs=0.015)


def test_the_page_has_the_simulation_of_failures():
    page = (ROOT / "docs" / "explanation" / "control-plane.md").read_text()
    assert "\n".join(goodput.table(goodput.Cluster(), 30, 50)) in page


# --- measuring -----------------------------------------------------------------------------------


def test_a_burst_of_other_load_does_not_change_a_speed():
    task = Task(seq_len=10, batch=1, steps=6, skipped=2)
    idle, disturbed = [9.0, 18.0, 19.0, 20.0, 21.0, 22.0], [9.0, 18.0, 19.0, 20.0, 27.0, 28.0]
    assert task.speed(idle) == task.speed(disturbed) == 10.0


def test_compared_programs_alternate_so_that_each_runs_first_sometimes():
    order = []
    results = alternate(
        3, a=lambda: order.append("a") or len(order), b=lambda: order.append("b") or len(order)
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert results == {"a": [1, 4, 5], "b": [2, 3, 6]}


def test_a_failed_run_is_reported_with_its_error():
    log = "07:54 starting\ntitanlite: compile.enable = true: no such thing | here. Use false.\n"
    assert failure_reason(log) == "compile.enable = true: no such thing / here. Use false."
    several = "titanlite: 2 problems\n  1. a = 1: no.\n  2. b = 2: no.\nnoise of a library\n"
    assert failure_reason(several) == "2 problems 1. a = 1: no. 2. b = 2: no."
    assert failure_reason("Traceback:\n  x\nValueError: no\n\n") == "ValueError: no"


def test_transient_memory_is_measured_between_two_optimizer_steps():
    def allocated(time: int, total: int) -> dict:
        return {"name": "[memory]", "ts": time, "args": {"Total Allocated": total}}

    steps = [
        {"name": "Optimizer.step#AdamW.step", "ph": "X", "ts": ts, "dur": 2} for ts in (10, 0, 20)
    ]
    totals = {5: 900, 11: 800, 13: 100, 15: 350, 19: 120, 21: 999}  # by time
    events = [allocated(time, total) for time, total in totals.items()]
    assert transient_bytes(events + steps) == 350 - 100


# --- computing -----------------------------------------------------------------------------------


def test_causal_and_full_mfu_differ_by_half_of_attention():
    sizes = FAMILY.flavors["8B"]
    full = share_of_peak(6_667, sizes, 8192, 989.5e12, full_attention=True)
    causal = share_of_peak(6_667, sizes, 8192, 989.5e12)
    assert full == pytest.approx(0.390, abs=0.001)  # torchtitan's published MFU
    attention = 12 * 32 * 4096 * 8192 * 6_667 / 989.5e12
    assert full - causal == pytest.approx(attention / 2)
    assert share_of_peak(6_667, sizes, 8192, None) is None


def test_the_largest_micro_batch_is_tried_first_and_recomputation_last():
    """Of a model that needs 10 bytes a sequence, and 100 for a state that 8-bit moments halve."""

    def peak(plan: Plan) -> float:
        state = 50 if "8-bit" in plan.state.name else 100
        return state + plan.micro_batch * 10 * (1 - plan.recompute.recomputed / 2)

    def tried(usable: float, compiled: bool = False) -> list[tuple[int, int, int]]:
        found = plans(4096, usable, compiled, peak)
        return [(RECOMPUTE.index(p.recompute), STATES.index(p.state), p.micro_batch) for p in found]

    assert tried(1000)[:4] == [(0, 0, 8), (0, 0, 6), (0, 0, 4), (0, 0, 3)]
    assert tried(125)[:2] == [(0, 0, 2), (0, 1, 7)]
    assert [tried(usable)[0] for usable in (70, 66, 63)] == [(0, 1, 2), (2, 1, 2), (3, 1, 2)]
    assert (1, 0, 8) in tried(1000, compiled=True)
    assert not tried(50)


def test_a_plan_needs_what_the_planner_estimates_for_its_job():
    """8B in bf16 with 8-bit moments needed 58 GiB on an H100 (benchmarks/gpu.md)."""
    plan = Plan(STATES[3], RECOMPUTE[2], 1)
    assert estimate_peak("8B", 8192, plan) / 2**30 == pytest.approx(58, rel=0.15)
    whole = dataclasses.replace(plan, state=STATES[0])
    assert estimate_peak("8B", 8192, whole) > 100e9


# --- tables --------------------------------------------------------------------------------------


def test_gpu_runs_are_compared_with_runs_of_the_same_size():
    def result(mode: str, speed: float | None, first: float) -> gpu.GpuRow:
        return gpu.GpuRow("8B", 8192, mode, tokens_per_second=speed, first_step_seconds=first)

    eager, compiled, float8 = gpu.add_ratios(
        [
            result("bf16 eager", 100.0, 4.0),
            result("bf16 compiled", 120.0, 16.0),
            result("Float8 rowwise compiled", 180.0, 20.0),
        ]
    )
    assert (float8.times_bf16_compiled, float8.compile_seconds) == (1.5, 16.0)
    assert (eager.compile_seconds, compiled.times_bf16_compiled) == (None, 1.0)
    assert gpu.add_ratios([result("bf16 compiled", None, 0.0)])[0].times_bf16_compiled is None
    steps = [{"tokens": n, "time": t} for n, t in ((1, 0.0), (100, 50.0), (200, 60.0), (300, 70.0))]
    assert gpu.speed_of(steps) == 10.0


def test_a_gpu_table_without_figures_is_not_published():
    blank = gpu.GpuRow("1B", 2048, "bf16 eager", missed="no CUDA device")
    measured = dataclasses.replace(blank, tokens_per_second=1.0, missed="")
    assert "1B | 2,048 | bf16 eager | no CUDA device | not measured |" in gpu.gpu_table([blank])
    assert not gpu.has_figures([blank]) and gpu.has_figures([blank, measured])


def test_every_gpu_mode_is_a_valid_job(corpus, monkeypatch):
    """A CPU job may refuse some values, but no key may be unknown."""
    from titanlite.errors import UserError
    from titanlite.job import read_job

    monkeypatch.chdir(ROOT)
    for mode in gpu.MODES:
        blank = gpu.GpuRow("8B", 8192, mode)
        plan = Plan(STATES[0], RECOMPUTE[1], 1)
        arguments = gpu.as_arguments(gpu.settings_of_run(blank, plan, "out", corpus, 3))
        try:
            read_job([*arguments, "--job.device", "cpu"], 1)
        except UserError as error:
            for problem in getattr(error, "problems", [error]):
                assert "unknown" not in str(problem), problem


# --- a complete run ------------------------------------------------------------------------------


def test_the_script_measures_a_case_and_writes_its_table(tmp_path, monkeypatch, capsys):
    out = tmp_path / "order.md"
    arguments = ["--case", "order", "--rounds", "1", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["benchmark.py", *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))  # as for a command; it imports checkout.py
    runpy.run_path(str(ROOT / "scripts" / "benchmark.py"), run_name="__main__")
    record = json.loads(out.with_suffix(".json").read_text())
    assert record["command"] == f"python scripts/benchmark.py {' '.join(arguments)}"
    # The installed version may lack the local part: "2.14.1" for a torch "2.14.1+cu130".
    assert record["torch"].split("+")[0] == torch.__version__.split("+")[0]
    figures = [row for row in record["rows"] if row["unit"] == "ns/sample"]
    assert len(figures) == 2 and all(row["each"][0] > 0 for row in figures)
    assert out.read_text() in capsys.readouterr().out


def test_the_control_plane_is_measured_and_its_table_written(python, tmp_path):
    """No other test runs it, and its command is in the documentation."""
    out = tmp_path / "table.md"
    command = [python, "-m", "benchmarks.control_plane", "--ranks", "2", "3"]
    subprocess.run([*command, "--out", str(out)], check=True, capture_output=True, cwd=ROOT)
    text = out.read_text()
    assert text.startswith("- command: python -m benchmarks.control_plane --ranks 2 3 --out")
    for name in ("sockets", "start: CPU of the store", "next save", "heartbeat", "load"):
        assert f"| {name}" in text
