"""GPUs and machines: what a person writes is found, and what he adds is checked."""

from __future__ import annotations

import os
import time

import pytest

from titanlite.errors import ConfigError
from titanlite_planner.hardware import cluster_names, find_cluster, measure_cpu, parse_gpus
from titanlite_planner.time import cpu_rates
from titanlite_planner.time.cpu_rates import CpuRates, measure_rates

OWN = """
[gpus.X1]
peak_tflops = { bfloat16 = 500 }
memory_gib = 64
memory_gb_per_s = 2000
machine = "lab"

[machines.lab]
gpu = "X1"
gpus = 4
link_domain = 4
link_gb_per_s = 100
network_gbit_per_s = 80
"""


@pytest.mark.parametrize(
    ("text", "gpus", "gpu", "machine"),
    [
        ("512xH100", 512, "H100", "dgx-h100"),
        ("8 x a100-40gb", 8, "A100-40GB", "dgx-a100-40gb"),
        ("16xp5.48xlarge", 16, "H100", "p5.48xlarge"),
        ("72xGB200", 72, "GB200", "gb200-nvl72"),
    ],
)
def test_a_number_and_a_name_are_a_cluster(text, gpus, gpu, machine):
    cluster = parse_gpus(text)
    assert (cluster.gpus, cluster.gpu.name, cluster.machine.name) == (gpus, gpu, machine)


@pytest.mark.parametrize("text", ["H100", "0xH100", "8xH1000", "8x"])
def test_an_unknown_cluster_is_refused(text):
    with pytest.raises(ConfigError, match=r"not a number of GPUs|neither a GPU"):
        parse_gpus(text)


def test_every_gpu_and_machine_has_peaks_and_a_source():
    for name in cluster_names():
        cluster = find_cluster(name, 8)
        assert cluster.gpu.peak_flops("bfloat16") > 1e14, name
        assert cluster.gpu.source, name
        assert cluster.machine.source, name
        assert (cluster.dollars_per_hour is None) == (not cluster.machine.price_source), name


def test_a_ring_is_as_fast_as_the_slowest_link_that_it_crosses():
    dgx, rack = parse_gpus("64xH100"), parse_gpus("64xGB200")
    assert dgx.bandwidth(8, 1) == 450e9  # NVLink
    assert dgx.bandwidth(16, 1) == 400e9  # two servers, eight network cards each
    assert dgx.bandwidth(8, 8) == 50e9  # one card in each of eight servers
    assert dgx.bandwidth(4, 4) == 100e9  # two cards in each of two
    assert rack.bandwidth(64, 1) == 900e9
    assert rack.bandwidth(144, 1) == 900e9  # 72 network cards, but links of 900 GB/s
    assert not rack.crosses_network(8, 8)


def test_a_person_adds_a_gpu_in_ten_lines(tmp_path):
    (tmp_path / "own.toml").write_text(OWN)
    cluster = parse_gpus("8xX1", tmp_path / "own.toml")
    assert cluster.gpu.peak_flops("bfloat16") == 5e14
    assert cluster.bandwidth(8, 1) == 40e9
    with pytest.raises(ConfigError, match="no matmul units for float8"):
        cluster.gpu.peak_flops("float8")


def test_all_problems_of_a_hardware_file_are_listed(tmp_path):
    wrong = OWN.replace("memory_gib = 64", "memory = 64").replace("gpus = 4", "gpus = -4")
    wrong = wrong.replace('gpu = "X1"', 'gpu = "X2"').replace(
        "peak_tflops = { bfloat16 = 500 }", ""
    )
    (tmp_path / "own.toml").write_text(wrong)
    with pytest.raises(ConfigError) as caught:
        parse_gpus("8xX1", tmp_path / "own.toml")
    for part in ("unknown keys: memory", "lacks memory_gib", "gpus = -4", "X2", "peak_tflops"):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("peak_tflops = 500", "peak_tflops = 500: must be a table of positive numbers by float32"),
        ("peak_tflops = { bf16 = 500 }", "must be a table of positive numbers by float32"),
        ("device = 5", "device = 5: must be text"),
        ('machine = ["lab"]', "must be text"),
        ("attention_tflops = 300", "must be a table"),
        ("multiprocessors = 100.5", "must be a positive integer"),
        ("memory_gib = inf", "memory_gib = inf: must be a positive number"),
        ("memory_gib = { bfloat16 = 5 }", "must be a positive number"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(line, problem, tmp_path):
    key = line.partition(" ")[0]
    others = [other for other in OWN.splitlines() if not other.startswith(f"{key} =")]
    (tmp_path / "own.toml").write_text("\n".join(others).replace("[gpus.X1]", f"[gpus.X1]\n{line}"))
    with pytest.raises(ConfigError, match=problem):
        parse_gpus("8xX1", tmp_path / "own.toml")


@pytest.mark.parametrize("text", ["gpus = 5", "[gpus]\nX1 = 5", '[[machines]]\ngpu = "X1"'])
def test_what_is_not_a_table_is_refused(text, tmp_path):
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read: .* is not a table"):
        parse_gpus("8xX1", tmp_path / "own.toml")


@pytest.mark.slow
def test_a_cpu_is_measured_on_the_spot_by_as_many_processes_as_it_has_ranks(tmp_path, monkeypatch):
    measure = cpu_rates._rates_of_process

    def measure_in_a_file(stopwatch):
        (tmp_path / str(os.getpid())).touch()
        return measure(stopwatch)

    monkeypatch.setattr(cpu_rates, "_rates_of_process", measure_in_a_file)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    cluster = measure_cpu(2, seconds=0.01)
    assert len(list(tmp_path.iterdir())) == 2
    assert cluster.gpu.peak_flops("float32") > 1e8
    assert cluster.gpu.attention_tflops["float32"] > 1e-4
    assert cluster.gpu.memory_gb_per_s > 0.1
    assert cluster.machine.link_gb_per_s > 0.001
    assert cluster.machine.link_domain == 2
    assert not cluster.overlaps


def test_a_step_waits_for_the_slowest_process_and_processes_divide_the_cores(
    monkeypatch,
):
    fast, slow = ({"bfloat16": rate, "float32": rate} for rate in (4.0, 2.0))
    ranks = [CpuRates(fast, fast, 3.0, 8.0), CpuRates(slow, fast, 5.0, 6.0)]
    monkeypatch.setattr(cpu_rates, "run_in_processes", lambda functions, at_once: ranks)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert measure_rates(2, 0.01, time.perf_counter) == CpuRates(slow, fast, 3.0, 6.0)
    half = {"bfloat16": 1.0, "float32": 1.0}
    assert measure_rates(4, 0.01, time.perf_counter) == CpuRates(half, slow, 1.5, 3.0)
