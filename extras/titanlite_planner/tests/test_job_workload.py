"""A job becomes the workload that its settings describe."""

from __future__ import annotations

import pytest

from titanlite.errors import ConfigError
from titanlite.job import read_job
from titanlite_planner.job_workload import workload_of
from titanlite_planner.memory.offloaded import offloaded_bytes
from titanlite_planner.time.step import model_parameters


def workload(*argv: str, ranks: int = 1):
    return workload_of(read_job(argv, ranks, here=False))


def test_a_pipelined_job_counts_its_micro_batches_and_blocks():
    pipeline = ["--parallelism.pipeline_parallel_degree", "2"]
    batch = ["--training.local_batch_size", "8", "--training.global_batch_size", "32"]
    layout = workload(*pipeline, *batch, ranks=4).layout
    assert (layout.pipeline, layout.shard, layout.gpus) == (2, 2, 4)
    assert (layout.micro_batch, layout.n_microbatches, layout.runs) == (1, 16, 2)
    assert layout.global_batch == 32
    assert sum(layout.stage_blocks) == 6
    assert not layout.reshard_after_forward  # the default with pipeline parallelism
    idle = ["--training.global_batch_size", "18", "--elastic.enable", "true"]
    ragged = workload(*pipeline, *batch[:2], *idle, ranks=5).layout
    assert (ragged.gpus, ragged.n_microbatches, ragged.runs) == (4, 16, 2)  # time of idle ones


@pytest.mark.parametrize(
    ("settings", "state_bytes"),
    [
        (["--optimizer.name", "SGD"], 0),
        (["--optimizer.offload", "true"], 8),
        (["--optimizer.state_dtype", "bfloat16"], 4),
        (["--training.dtype", "bfloat16"], pytest.approx(4, rel=0.01)),  # vectors: float32
    ],
)
def test_bytes_of_optimizer_state_per_element(settings, state_bytes):
    assert workload(*settings).numerics.state_bytes == state_bytes


def test_the_recomputation_of_a_job():
    mode = "--activation_checkpoint.mode"
    option = ["--activation_checkpoint.selective_ac_option", "op"]
    assert workload(mode, "full").recompute == "full"
    assert workload(mode, "selective").recompute_every == 2
    assert workload(mode, "selective", *option).recompute == "per_operation"


@pytest.mark.parametrize(
    ("settings", "kernel"),
    [
        ("parallelism.context_parallel_degree=2", "native"),
        ("parallelism.context_parallel_degree=2 attention.backend=flash", "flash2"),
        ("parallelism.context_parallel_degree=2 attention.backend=fa3", "native"),
        ("attention.mask=document data.tokenizer=bytes", "flash2"),
        ("training.mixed_precision_param=float32", "flash2"),
        ("debug.deterministic=true", "flash2"),
    ],
)
def test_the_attention_kernel_is_the_one_that_the_gpu_is_expected_to_choose(settings, kernel):
    bf16 = "training.mixed_precision_param=bfloat16"
    argv = [f"--{setting}" for setting in (bf16, *settings.split())]
    assert workload(*argv, ranks=2).attention_kernel == kernel


@pytest.mark.parametrize("section", ["optimizer", "activation_checkpoint"])
def test_offload_to_a_disk_is_refused_and_not_estimated_as_host_memory(section):
    with pytest.raises(ConfigError, match=f"{section}.offload_folder = /nvme"):
        workload(f"--{section}.offload", "true", f"--{section}.offload_folder", "/nvme")


def test_mxfp8_is_refused_and_not_estimated_as_float8():
    with pytest.raises(ConfigError, match='"mxfp8" cannot be estimated'):
        workload("--quantize.linear.float8.recipe_name", "mxfp8")


def test_float8_of_experts_is_refused_and_not_estimated_as_bfloat16():
    experts = ["--model.name=mixtral", "--model.flavor=8x7B", "--model.converters"]
    experts += ["quantize.grouped_mm.float8", "--quantize.grouped_mm.float8.fqns=experts"]
    bf16 = "--training.mixed_precision_param=bfloat16"
    with pytest.raises(ConfigError, match="quantize.grouped_mm.float8 cannot be estimated"):
        workload(*experts, bf16)


def test_what_is_offloaded_is_counted_once():
    def bytes_per_parameter(key: str) -> float:
        offloaded = workload(f"--{key}", "true")
        return offloaded_bytes(offloaded) / model_parameters(offloaded.model)

    assert bytes_per_parameter("optimizer.offload") == 8  # two moments in float32
    assert bytes_per_parameter("training.enable_cpu_offload") == 16  # and parameter and gradient
