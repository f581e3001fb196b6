"""Cost of a run and of failures, and calibration to measured runs."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest

from titanlite.errors import DataError
from titanlite_planner.accuracy.calibrate import (
    MeasuredRun,
    calibrate,
    calibration_report,
    read_measured_run,
)
from titanlite_planner.hardware import parse_gpus
from titanlite_planner.model_shape import ModelShape
from titanlite_planner.plan.cost import CostAssumptions, estimate_cost, failure_cost
from titanlite_planner.time.efficiency import find_efficiency
from titanlite_planner.time.step import StepTime, estimate_step
from titanlite_planner.workload import Layout, Workload

MODEL = ModelShape("1B", 16, 2048, 32, 8, 64, 8192, 128256, tied_embeddings=True)
RUN = Workload(MODEL, Layout(shard=8, micro_batch=4), 2048)
H100 = parse_gpus("8xH100")


def test_a_run_costs_its_steps():
    assumed = CostAssumptions(dollars_per_gpu_hour=2.0, gpu_hours_between_failures=1e12)
    tokens = 1000 * RUN.layout.global_batch * RUN.seq_len
    cost = estimate_cost(RUN, H100, StepTime(matmuls=3.6), tokens, assumed)
    assert cost.steps == 1000
    assert cost.gpu_hours == pytest.approx(8, rel=0.01)
    assert cost.dollars == pytest.approx(16, rel=0.01)
    assert cost.kwh == pytest.approx(8 * 1.275 * 1.1, rel=0.01)
    assert cost.co2_tonnes == pytest.approx(8 * 1.275 * 1.1 * 0.385 / 1000, rel=0.01)
    assert cost.checkpoint_gib == pytest.approx(12 * 1.235e9 / 2**30, rel=0.01)
    assert cost.stored_gib == 3 * cost.checkpoint_gib


def test_a_gpu_without_a_price_costs_nothing_known():
    step = estimate_step(RUN, parse_gpus("8xGB300"))
    assert estimate_cost(RUN, parse_gpus("8xGB300"), step, 1e9).dollars is None


def test_the_interval_between_checkpoints_loses_least():
    found = failure_cost(3.0, 30.0, 0.0)
    assert found.young_s == pytest.approx(math.sqrt(2 * 30 * 3 * 3600))

    def lost(interval):
        return 30 / (interval + 30) + (interval + 30) / 2 / 10800

    assert found.lost_fraction == pytest.approx(lost(found.daly_s))
    assert all(lost(found.daly_s) <= lost(found.daly_s * factor) for factor in (0.8, 1.25))
    assert failure_cost(0.001, 30.0, 0.0).lost_fraction <= 0.99  # saves take longer than it runs


def test_calibration_finds_the_speed_of_a_slower_machine(tmp_path):
    slower = find_efficiency("H100").scaled(0.8)
    workloads = [dataclasses.replace(RUN, seq_len=length) for length in (1024, 4096, 16384)]
    runs = [
        MeasuredRun(tmp_path, workload, estimate_step(workload, H100, slower).total, 10)
        for workload in workloads
    ]
    found = calibrate(runs, H100)
    assert max(found.before) < -0.15
    assert all(abs(error) < 0.03 for error in found.after)
    assert "matmul = " in calibration_report(runs, found)


START = {"time": 0, "host": "a", "pid": 1, "ranks": 1, "from_step": 0}


def write_run(folder, seconds):
    (folder / "config.toml").write_text('[model]\nflavor = "debugmodel"\n')
    (folder / "starts.jsonl").write_text(json.dumps({"event": "start", **START}) + "\n")
    lines = [json.dumps({"step": n, "step_seconds": s, "data_seconds": 0.5}) for n, s in seconds]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 9')


def test_a_run_is_read_without_its_first_steps(tmp_path):
    write_run(tmp_path, [(1, 100.0), (2, 1.0), (3, 3.0), (4, 2.0)])
    run = read_measured_run(tmp_path)
    assert (run.seconds, run.steps) == (2.5, 3)
    assert run.workload.model.n_layers == 6


def test_a_folder_that_no_run_wrote_is_refused(tmp_path):
    with pytest.raises(DataError, match="cannot be read"):
        read_measured_run(tmp_path)
    write_run(tmp_path, [(1, 100.0)])
    with pytest.raises(DataError, match="has 1 logged steps"):
        read_measured_run(tmp_path)
