"""benchmarks.gpu_check: its report shows what differs, what failed and what was skipped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.gpu_check import runs
from benchmarks.gpu_check.__main__ import parse_arguments
from benchmarks.gpu_check.bandwidth import measure_collectives
from benchmarks.gpu_check.checks import all_checks, run_checks
from benchmarks.gpu_check.gpu_tests import check_gpu_tests, read_results
from benchmarks.gpu_check.outcome import (
    Check,
    CheckFailed,
    CheckSkipped,
    Machine,
    Outcome,
    command_environment,
    run_command,
)
from benchmarks.gpu_check.report import report
from benchmarks.gpu_check.runs import (
    JOB,
    Recipe,
    check_recipe,
    compare_with_reference,
    one_device_recipes,
    overlap_job,
)
from benchmarks.gpu_check.trace_overlap import ALL_GATHERS, COPIES, overlap_in_trace
from tests.distributed.ranks import run_on_ranks
from titanlite.models import FAMILIES
from titanlite.parallelize import activation_offload
from titanlite.parallelize.float8 import Gpu

ROOT = Path(__file__).parents[2]


def write_metrics(folder: Path, losses: list[float]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    fields = {"grad_norm": 1.0, "lr": 0.1, "tokens": 8, "samples": 1}
    lines = [{"step": n, "loss": loss, **fields} for n, loss in enumerate(losses, 1)]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))


def test_a_run_with_other_losses_than_the_cpu_fails(tmp_path):
    write_metrics(tmp_path / "reference SGD", [2.0, 1.0])
    write_metrics(tmp_path / "good", [2.0, 1.0 + 5e-5])
    write_metrics(tmp_path / "bad", [2.0, 1.0 + 5e-3])
    machine, recipe = Machine(1, False, tmp_path), Recipe("fp32", {}, tolerance=1e-4)
    assert compare_with_reference(machine, recipe, tmp_path / "good").status == "passed"
    with pytest.raises(CheckFailed, match="5.0e-03"):
        compare_with_reference(machine, recipe, tmp_path / "bad")


def test_a_reference_that_failed_is_not_compared_with(tmp_path, monkeypatch):
    def fail(command, **_):
        (tmp_path / "reference SGD").mkdir()
        raise CheckFailed("exit code 1: no compiler", "traceback")

    monkeypatch.setattr(runs, "prepare_text", lambda machine: tmp_path)
    monkeypatch.setattr(runs, "weights_for_all_devices", lambda machine, settings: {})
    monkeypatch.setattr(runs, "run_command", fail)
    write_metrics(tmp_path / "run", [2.0, 1.0])
    for _ in range(2):  # the second time for the same reason, not for missing metrics
        with pytest.raises(CheckFailed, match="the reference on the CPU failed: .*no compiler"):
            compare_with_reference(
                Machine(1, False, tmp_path), Recipe("fp32", {}, 1e-4), tmp_path / "run"
            )


def test_all_runs_of_a_model_start_from_weights_that_the_cpu_drew(tmp_path, monkeypatch):
    started_from: dict[str, str | None] = {}

    def record(command, **_):
        first = next(index for index, part in enumerate(command) if part.startswith("--"))
        settings = dict(zip(command[first::2], command[first + 1 :: 2], strict=True))
        folder = Path(settings["--job.dump_folder"])
        started_from[folder.name] = settings.get("--checkpoint.initial_load_path")
        write_metrics(folder, [2.0, 1.0])

    monkeypatch.setattr(runs, "prepare_text", lambda machine: tmp_path)
    monkeypatch.setattr(runs, "run_command", record)
    machine = Machine(1, False, tmp_path)
    for recipe in one_device_recipes()[:2]:
        list(check_recipe(recipe)(machine))
    assert started_from.pop("weights of 2 blocks") is None
    weights = str(tmp_path / "weights of 2 blocks" / "checkpoint" / "step-1")
    assert started_from == dict.fromkeys(["fp32", "bf16", "reference SGD"], weights)


def test_a_corpus_that_could_not_be_prepared_is_not_trained_on(tmp_path, monkeypatch):
    def fail(command, **_):
        (tmp_path / "corpus").mkdir(exist_ok=True)
        raise CheckFailed("exit code 2: the disk is full")

    monkeypatch.setattr(runs, "run_command", fail)
    for _ in range(2):  # the second time for the same reason, not for a missing corpus
        with pytest.raises(CheckFailed, match="disk is full"):
            runs.prepare_text(Machine(1, False, tmp_path))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--devices", "0"], "must be at least 1"),
        (["--minutes", "-3"], "must be above 0"),
        (["--only", "bf61"], "matches no check"),
        (["--out", "/proc/report.md"], "cannot be written"),
    ],
)
def test_a_wrong_argument_is_refused_before_minutes_of_checks(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse_arguments(arguments)
    assert message in capsys.readouterr().err


def test_the_overlap_in_a_trace_counts_each_moment_once(tmp_path):
    def kernel(name: str, start: float, duration: float, cat: str = "kernel") -> dict:
        return {"cat": cat, "name": name, "ph": "X", "ts": start, "dur": duration}

    events = [
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 0, 10),
        kernel("sm90_xmma_gemm_bf16bf16", 4, 4),
        kernel("nvjet_tst_128x256", 6, 10),  # overlaps with the matmul before
        kernel("ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage)", 20, 10),
        kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 6, 10),
        kernel("void at::native::elementwise_kernel", 20, 10),
        kernel("Memcpy DtoH (Device -> Pinned)", 12, 8, "gpu_memcpy"),
        {"cat": "cpu_op", "name": "aten::gemm", "ph": "X", "ts": 0, "dur": 99},
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    gathers = overlap_in_trace(path, ALL_GATHERS)
    assert (gathers.transfer_us, gathers.matmul_us, gathers.both_us) == (20, 12, 6)
    assert gathers.share == 0.3
    copies = overlap_in_trace(path, COPIES)
    assert (copies.transfer_us, copies.both_us) == (8, 4)


def test_a_check_that_fails_leaves_the_others_running_and_its_log_in_the_report(tmp_path):
    def fail(machine):
        raise CheckFailed("exit code 1: no kernel image", "line one\n```\nline three")

    def crash(machine):
        raise ZeroDivisionError("division by zero")

    def skip(machine):
        raise CheckSkipped("no such tool")

    checks = [
        Check("broken", fail),
        Check("crashed", crash),
        Check("absent", skip),
        Check("gpu only", lambda machine: iter(()), needs_cuda=True),
        Check("two devices", lambda machine: iter(()), min_devices=2),
        Check("good", lambda machine: [Outcome("good", "passed", "a | b")]),
    ]
    outcomes = list(run_checks(checks, Machine(1, False, tmp_path)))
    assert [o.status for o in outcomes] == ["failed", "failed"] + 3 * ["skipped"] + ["passed"]
    text = report({"torch": "2.13.0"}, "GPU0 GPU1\nX NV18", outcomes)
    assert text.startswith("# GPU check: 1 passed, 2 failed, 3 skipped\n")
    assert "````text\nline one\n```\nline three\n````" in text  # a fence that the log cannot close
    assert "| good | passed | a / b |" in text and "NV18" in text and "needs 2 devices" in text


def test_no_check_starts_after_the_time_limit(tmp_path):
    machine = Machine(1, False, tmp_path, end=0.0)
    (outcome,) = Check("late", lambda machine: pytest.fail("it ran")).outcomes(machine)
    assert outcome.status == "skipped" and "--minutes" in outcome.result


def test_a_command_that_hangs_is_ended_with_its_children_and_its_output_kept():
    program = (
        "import subprocess, sys; print('started', flush=True);"
        "subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    )
    with pytest.raises(CheckFailed, match="not finished") as error:
        run_command([sys.executable, "-c", program], timeout=3)
    assert error.value.log == "started"


def test_a_run_does_not_join_the_group_of_the_torchrun_around_it(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    environment = command_environment()
    assert environment["NCCL_DEBUG"] == "INFO"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & environment.keys()


def test_each_failed_gpu_test_is_reported_with_its_traceback(tmp_path):
    path = tmp_path / "results.xml"
    path.write_text(
        "<testsuites><testsuite>"
        '<testcase classname="tests.gpu.test_flash" name="test_a"/>'
        '<testcase classname="tests.gpu.test_flash" name="test_b"><skipped/></testcase>'
        '<testcase classname="tests.gpu.test_flash" name="test_c">'
        '<failure message="assert 1 == 2&#10;more">def test_c: ...</failure></testcase>'
        "</testsuite></testsuites>"
    )
    failed, others = read_results(path)
    assert (failed.name, failed.result) == ("tests.gpu.test_flash::test_c", "assert 1 == 2")
    assert failed.log == "def test_c: ..."
    assert others.result == "1 passed, 1 skipped"


def collectives_of_two() -> dict[str, dict[str, float]]:
    return measure_collectives("cpu")


def test_every_collective_is_measured_on_real_ranks():
    for results in run_on_ranks(collectives_of_two, 2):
        assert set(results) == {"all-reduce", "all-gather", "reduce-scatter", "all-to-all"}
        assert all(speed > 0 for by_size in results.values() for speed in by_size.values())


def test_the_script_checks_a_machine_without_a_gpu(python, tmp_path):
    out = tmp_path / "report.md"
    command = [python, "-m", "benchmarks.gpu_check", "--only", "[fo]*"]
    process = subprocess.run([*command, "--out", str(out)], capture_output=True, text=True)
    assert process.returncode == 0, process.stdout + process.stderr
    text = out.read_text()
    assert "| fp32 | passed | largest difference from the CPU in fp32: loss 0.0e+00" in text
    assert "| overlap of transfers and matmuls | skipped | needs CUDA |" in text


def test_every_kind_of_parallelism_is_checked_with_eight_devices():
    names = " ".join(check.name for check in all_checks(8))
    for kind in ("shard", "replicate"):
        assert f"data_parallel_{kind}_degree" in names
    for kind in ("tensor", "context", "pipeline"):
        assert f"{kind}_parallel_degree" in names


class Scale(nn.Module):
    """A block that saves its input for backward."""

    def __init__(self, dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def offloading_jobs() -> dict[str, dict[str, str]]:
    """The settings of the checks that offload activations."""
    recipes = {recipe.name: {**JOB, **recipe.settings} for recipe in one_device_recipes()}
    jobs = {"overlap": {**JOB, **overlap_job(devices=1)}, **recipes}
    return {n: job for n, job in jobs.items() if job.get("activation_checkpoint.offload") == "true"}


def test_checks_of_activation_offload_have_activations_to_offload(monkeypatch):
    """The last two blocks stay on the device, as do small tensors: a check could copy nothing."""
    sent: list[Tensor] = []

    class Transfers(activation_offload._Transfers):
        def to_host(self, tensors: list[Tensor]):
            sent.extend(tensors)
            return super().to_host(tensors)

    monkeypatch.setattr(activation_offload, "_Transfers", Transfers)
    assert len(offloading_jobs()) == 2
    for name, job in offloading_jobs().items():
        sent.clear()
        dim = int(job.get("model.dim", FAMILIES["llama3"].flavors[job["model.flavor"]].dim))
        blocks = nn.ModuleDict({str(n): Scale(dim) for n in range(int(job["model.n_layers"]))})
        activation_offload.offload_activations(blocks, "cpu")
        shape = (int(job["training.global_batch_size"]), int(job["training.seq_len"]), dim)
        x = torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True)
        for block in blocks.values():
            x = block(x)
        x.sum().backward()
        assert sent, name


def test_float8_is_not_checked_on_a_gpu_without_it(tmp_path, monkeypatch):
    gpu = Gpu("NVIDIA A100-SXM4-80GB", (8, 0))
    monkeypatch.setattr("benchmarks.gpu_check.runs.find_gpu", lambda device: gpu)
    recipes = [recipe for recipe in one_device_recipes() if "Float8" in recipe.name]
    assert len(recipes) == 2
    for recipe in recipes:
        check = Check(recipe.name, check_recipe(recipe), recipe.needs_cuda)
        (outcome,) = check.outcomes(Machine(1, True, tmp_path))
        assert outcome.status == "skipped" and "A100" in outcome.result


def test_gpu_tests_are_skipped_without_pytest(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.gpu_check.gpu_tests.find_spec", lambda name: None)
    with pytest.raises(CheckSkipped, match="pip install"):
        list(check_gpu_tests(Machine(1, True, tmp_path)))
