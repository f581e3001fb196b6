"""Checks of a job: all errors of a configuration are reported together, before anything starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch.torch_version import TorchVersion

from conftest import HANG_SECONDS, ROOT
from titanlite.errors import ConfigError, UserError, UserErrors, format_error
from titanlite.extensions import load_extensions
from titanlite.job import read_job
from titanlite.job.config import JOB_PROPERTIES, JobConfig
from titanlite.job.data import log_mixture, open_job_stream, open_job_tokenizer
from titanlite.job.torchtitan_keys import MOVED
from titanlite.models import FAMILIES
from titanlite.parallelize.float8 import torchao
from titanlite.settings import all_keys, read_toml
from titanlite.settings.sources import TRAIN_CONFIGS
from titanlite.training.state import Counters
from titanlite_corpus.shard_writer import ShardWriter


def error_text(run_toml, *argv, ranks=1) -> str:
    """The error message of an invalid job."""
    with pytest.raises(UserError) as raised:
        read_job(["--job.config_file", str(run_toml), *argv], ranks)
    return format_error(raised.value)


def open_stream(job):
    """The training data of a job."""
    tokenizer = open_job_tokenizer(job.config)
    return open_job_stream(job.config, job.sizes.vocab_size, tokenizer)


def read_valid(run_toml, *argv, ranks=1):
    """The job of a valid configuration."""
    return read_job(["--job.config_file", str(run_toml), *argv], ranks)


FLOAT8 = "--quantize.linear.float8."
GROUPED_MM, GROUPED_FQNS = "quantize.grouped_mm.float8", "--quantize.grouped_mm.float8.fqns"
FLOAT8_EXPERTS = ["--model.name=glm4_moe", f"--model.converters={GROUPED_MM}"]
FLOAT8_EXPERTS += [f"{GROUPED_FQNS}=experts"]
TENSORWISE = [f"{FLOAT8}recipe_name", "tensorwise"]
SHORT_SCHEDULE = [  # in tokens; the run consumes 768
    *("--lr_scheduler.warmup_steps", "none", "--lr_scheduler.warmup_tokens", "0"),
    *("--lr_scheduler.total_tokens", "500"),
]
LINEAR = ["--model.name", "qwen3_next"]
PIPELINE = ["--parallelism.pipeline_parallel_degree", "2"]
NOISE_SCALE = ["--metrics.noise_scale_freq", "3", "--optimizer.early_step_in_backward", "true"]
MUP_BASE = ["--mup.base.dim", "32", "--mup.base.n_heads", "2", "--mup.base.hidden_dim", "64"]
KV_HEADS = ["--mup.base.n_kv_heads", "1"]
SOPHIA = ["--optimizer.name=Sophia"]
ON_DISK = ["--optimizer.offload", "true", "--optimizer.offload_folder", "/nvme"]
IN_BACKWARD = ["--optimizer.early_step_in_backward", "true", "--training.max_norm", "0"]


@pytest.mark.parametrize(
    "argv, ranks, message",
    [
        (
            ["--parallelism.tensor_parallel_degree", "3"],
            4,
            "does not divide the number of ranks, 4",
        ),
        (["--parallelism.data_parallel_shard_degree", "3"], 4, "is 3, not the number of ranks, 4"),
        (["--parallelism.tensor_parallel_degree", "8"], 8, "does not divide model.n_heads = 4"),
        (
            ["--parallelism.tensor_parallel_degree", "3", "--model.n_heads", "6"],
            3,
            "n_kv_heads = 2",
        ),
        (
            ["--parallelism.tensor_parallel_degree", "4", "--model.hidden_dim", "66"],
            4,
            "hidden_dim",
        ),
        (
            ["--parallelism.tensor_parallel_degree", "4", "--training.seq_len", "46"],
            4,
            "seq_len = 46",
        ),
        (
            ["--optimizer.state_dtype", "8bit", "--optimizer.name", "SGD"],
            1,
            "Those with state_dtype: AdamW, Adam, Muon.",
        ),
        (["--optimizer.state_dtype", "bfloat16", "--optimizer.beta2", "0.999"], 1, "at most 0.996"),
        (
            ["--training.dtype", "bfloat16", "--optimizer.beta2", "0.999"],
            1,
            'with training.dtype = "bfloat16" moments are bfloat16',
        ),
        (
            [
                "--training.dtype",
                "bfloat16",
                "--optimizer.name",
                "SGD",
                "--optimizer.momentum",
                "0.999",
            ],
            1,
            'or training.dtype = "float32"',
        ),
        (
            ["--training.steps", "150", "--lr_scheduler.total_steps", "100"],
            1,
            "the last 50 steps would learn nothing",
        ),
        (
            ["--optimizer.name", "Muon", "--training.enable_cpu_offload", "true"],
            1,
            "Muon would compute matmuls on the CPU",
        ),
        (IN_BACKWARD[:-2], 1, "training.max_norm = 1 clips"),
        ([*IN_BACKWARD, *PIPELINE], 2, "reuse each weight for later micro-batches"),
        ([*IN_BACKWARD, "--training.enable_cpu_offload", "true"], 1, "would save no device memory"),
        ([*SOPHIA, "--training.mixed_precision_param=float16"], 1, "have no loss scale"),
        ([*SOPHIA, "--model.name=glm4_moe", "--model.mtp_layers=1"], 1, "is of one cross-entropy"),
        ([*ON_DISK, "--checkpoint.async_mode", "async"], 1, "an asynchronous save and a memory"),
        ([*ON_DISK, "--checkpoint.memory_interval", "5"], 1, "an asynchronous save and a memory"),
        ([*IN_BACKWARD, "--training.mixed_precision_param", "float16"], 1, "gradient overflows"),
        ([*IN_BACKWARD], 2, "accumulate over 2 micro-batches"),
        ([*IN_BACKWARD, "--training.clipping", "adaptive"], 1, "clips after backward"),
        ([*IN_BACKWARD, "--metrics.noise_scale_freq", "9"], 1, "true would apply it"),
        (["--profiling.enable_memory_snapshot", "true"], 1, "of GPUs only"),
        (["--training.global_batch_size", "9"], 2, "Use 8 or 12"),
        (["--training.batch_size_ramp", "0:2 10K:8"], 2, "its sizes 2 are not multiples of"),
        (
            ["--training.batch_size_ramp", "2 +2 over 1K", *SHORT_SCHEDULE],
            1,
            "0 after lr_scheduler.total_tokens = 500",
        ),
        (["--training.local_batch_size", "3"], 1, "Use 6 or 9"),
        (["--model.n_kv_heads", "3"], 1, "does not divide model.n_heads"),
        (["--model.dim", "34"], 1, "not a multiple of model.n_heads"),
        (["--model.dim", "36"], 1, "must be even"),
        (["--model.vocab_size", "200"], 1, "less than the 258 ids"),
        (["--model.flavor", "9B"], 1, "must be one of debugmodel, quickstart, 1B"),
        (["--model.name=qwen3", "--model.flavor=30B-A3B"], 1, 'model.name = "qwen3_moe"'),
        (["--model.name=deepseek_v3", "--model.flavor=16B"], 1, "moonlight-16B is another model"),
        (["--model.name=deepseek_v3", "--model.flavor=671B"], 1, 'Use "V3-671B"'),
        (["--model.name=deepseek_v3", "--model.flavor=debugmodel"], 1, 'Use "tiny"'),
        (
            ["--model.initialization=torchtitan", *MUP_BASE, *KV_HEADS],
            1,
            "torchtitan has no muP",
        ),
        (["--data.sources", "[]"], 1, "nothing to train on"),
        (["--data.validation", "[]"], 1, "data.validation is empty"),
        (
            ["--data.validation", '[{ name = "a", path = "x" }, { name = "a", path = "y" }]'],
            1,
            "several sets have the name a",
        ),
        (
            ["--data.tokenizer", "nowhere.model", "--data.sources", '[{name="a", path="nowhere"}]'],
            1,
            "no such folder",
        ),
        (["--data.tokenizer", "nowhere.model"], 1, "titanlite: data.tokenizer"),
        (["--training.seq_len", "100000000"], 1, "one sample needs"),
        (
            ["--checkpoint.enable", "false", "--checkpoint.initial_load_path", "nowhere"],
            1,
            "would start from scratch",
        ),
        (["--checkpoint.folder", "nosuch://bucket/run"], 1, "checkpoint.folder: nosuch://bucket"),
        (
            ["--checkpoint.allow_changes", "debug.sed"],
            1,
            "Use model, mup.base, lora, base_weights, optimizer.name",
        ),
        (["--mup.base.dim", "64"], 1, "n_heads: is missing, and has no default"),
        ([*MUP_BASE, "--mup.base.n_kv_heads", "3"], 1, "mup.base.n_kv_heads = 3: does not divide"),
        (MUP_BASE, 1, "n_kv_heads is missing"),
        ([*MUP_BASE, *KV_HEADS, "--optimizer.name", "SGD"], 1, "training.max_norm = 1 scales down"),
        ([*MUP_BASE, *KV_HEADS, "--optimizer.name", "Adam"], 1, "Adam adds optimizer.weight_decay"),
        (
            [
                *(*MUP_BASE, *KV_HEADS, "--optimizer.name", "Adafactor"),
                *("--optimizer.scale_parameter", "false"),
                *("--optimizer.groups", '[{ match = ["output.*"], scale_parameter = true }]'),
            ],
            1,
            "muP has no rule for the learning rate of optimizer.name = Adafactor",
        ),
        (["--checkpoint.exclude_from_loading", "lr_scheduler"], 1, '"dataloader" | "train_state"'),
        (["--checkpoint.initial_load_in_hf", "true"], 1, "initial_load_path is not set"),
        (
            ["--checkpoint.last_save_in_hf", "true", "--model.qk_norm", "true"],
            1,
            "has no such key",
        ),
        (
            ["--checkpoint.enable", "false", "--job.time_limit_minutes", "9"],
            1,
            "checkpoint.enable = false, so nothing would be saved",
        ),
        (
            ["--checkpoint.load_only", "true", "--job.time_limit_minutes", "9"],
            1,
            "checkpoint.load_only = true, so nothing would be saved",
        ),
        (
            ["--model.vocab_size", "259", "--parallelism.tensor_parallel_degree", "32"],
            32,
            "so the last rank would have none",
        ),
        (["--model.dim", "20"], 1, "model.dim / model.n_heads = 5: RoPE"),
        (["--model.head_dim", "5"], 1, "model.head_dim = 5: RoPE"),
        (
            ["--model.dim", "8", "--model.n_heads", "16", "--optimizer.state_dtype", "8bit"],
            1,
            "model.dim = 8: is not a multiple of model.n_heads = 16",
        ),
        (["--model.dim.x", "3"], 1, 'model.dim = { x = "3" }: must be an integer'),
        (["--data.mixture.temperature", "0.01"], 1, "data.mixture.temperature = 0.01: must be"),
        (
            [
                "--activation_checkpoint.mode",
                "selective",
                "--activation_checkpoint.selective_ac_option",
                "ops",
            ],
            1,
            'such as "2", or "op"',
        ),
        (["--activation_checkpoint.mode", "memory_budget"], 1, "blocks are not compiled"),
        (
            [
                "--activation_checkpoint.mode",
                "selective",
                "--activation_checkpoint.offload",
                "true",
                "--activation_checkpoint.selective_ac_option",
                "op",
            ],
            1,
            "cannot be offloaded",
        ),
        (["--compile.enable", "true", "--compile.backend", "inducter"], 1, "unknown to this torch"),
        (
            [
                "--optimizer.state_dtype",
                "8bit",
                "--model.hidden_dim",
                "96",
                "--parallelism.tensor_parallel_degree",
                "2",
            ],
            2,
            "which splits quantisation blocks of 32",
        ),
        (["--compile.components", "modell"], 1, "components"),
        (
            ["--training.dtype", "bfloat16", "--training.mixed_precision_param", "float16"],
            1,
            "requires float32 parameters",
        ),
        (["--profiling.profile_freq", "2"], 1, "at least 4"),
        (
            ["--parallelism.context_parallel_degree", "3", "--training.seq_len", "52"],
            3,
            "multiple of 6",
        ),
        (
            ["--parallelism.context_parallel_degree", "2", "--validation.seq_len", "50"],
            2,
            "cannot shard validation.seq_len = 50 evenly over 2 context-parallel ranks",
        ),
        (
            [
                "--parallelism.context_parallel_degree",
                "2",
                "--parallelism.tensor_parallel_degree",
                "4",
                "--training.seq_len",
                "12",
            ],
            8,
            "each shard over 4 tensor-parallel ranks. Set training.seq_len to a multiple of 8",
        ),
        (
            [*LINEAR, "--parallelism.context_parallel_degree", "2", "--training.seq_len", "8"],
            2,
            "has 2 tokens, and model.conv_width = 4 needs 3",
        ),
        (
            [*LINEAR, "--parallelism.tensor_parallel_degree", "2", "--model.linear_key_heads", "1"],
            2,
            "does not divide model.linear_key_heads = 1",
        ),
        (["--parallelism.context_parallel_load_balancer", "ptrr"], 1, '"headtail" | "none"'),
        (
            [*PIPELINE, "--parallelism.pipeline_parallel_microbatch_size", "3"],
            2,
            "Use a divisor of 2",
        ),
        ([*PIPELINE, "--training.local_batch_size", "1"], 2, "requires 2 or more micro-batches"),
        (
            [
                *PIPELINE,
                "--parallelism.pipeline_parallel_schedule",
                "DualPipeV",
                "--model.n_layers",
                "4",
            ],
            2,
            "requires 4 or more micro-batches on 2 ranks; training.local_batch_size = 2 in",
        ),
        (
            [*PIPELINE, "--parallelism.pipeline_parallel_schedule", "Interleaved1F1B"],
            2,
            "makes 4 stages of 2 blocks",
        ),
        ([*PIPELINE, "--parallelism.pipeline_parallel_schedule", "1f1b"], 2, 'Did you mean "1F1B"'),
        (
            [
                *PIPELINE,
                "--parallelism.pipeline_parallel_layers_per_stage",
                "1",
                "--model.n_layers",
                "3",
            ],
            2,
            "requires 1 stage per rank; parallelism.pipeline_parallel_layers_per_stage",
        ),
        (
            [
                *[*PIPELINE, "--model.tied_embeddings", "true"],
                "--parallelism.module_fqns_per_model_part",
                '[["tok_embeddings", "layers.0", "layers.1", "norm"], ["output"]]',
            ],
            2,
            "no parameter of its own.",
        ),
        (
            [
                *PIPELINE,
                "--parallelism.pipeline_parallel_schedule",
                "ZBVZeroBubble",
                "--model.n_layers",
                "4",
                "--parallelism.fsdp_reshard_after_forward",
                "always",
            ],
            2,
            "would compute wrong gradients",
        ),
        (
            [*PIPELINE, "--parallelism.pipeline_parallel_schedule_csv", "nowhere.csv"],
            2,
            "cannot be read",
        ),
        (
            [*PIPELINE, "--parallelism.module_fqns_per_model_part", '[["layers.0"], ["output"]]'],
            2,
            "no stage has tok_embeddings, layers.1, norm",
        ),
        (["--attention.backend", "cudnn"], 1, "requires a GPU, and this job runs on CPUs"),
        (
            ["--attention.backend", "math", "--attention.mask", "document"],
            1,
            'it has no variable-length support. Use "auto", or flash, fa3, fa4',
        ),
        (
            ["--attention.backend", "math", "--parallelism.context_parallel_degree", "2"],
            2,
            "cannot be used with context parallel: it does not return the log-sum-exp that merges"
            ' partial results. Use "auto", or flash, cudnn, fa3, fa4',
        ),
        (["--attention.mask", "document", "--data.tokenizer", "none.model"], 1, "data.tokenizer"),
        (["--attention.mask", "documents"], 1, 'Did you mean "document"'),
        (
            ["--model.converters", "quantize.linear.float8"],
            1,
            "(a CPU) has no Float8 matmuls; a GPU of compute capability 8.9",
        ),
        (TENSORWISE, 1, "Set quantize.linear.float8.emulate = true"),
        (
            [f"{FLOAT8}recipe_name", "rowwise", f"{FLOAT8}enable_fsdp_float8_all_gather", "true"],
            1,
            'needs recipe_name = "tensorwise", not "rowwise"',
        ),
        (
            [
                f"{FLOAT8}recipe_name",
                "rowwise_with_gw_hp",
                f"{FLOAT8}filter_fqns",
                "auto_filter_small_kn",
            ],
            1,
            "torchao has no measurements for",
        ),
        (
            [*TENSORWISE, f"{FLOAT8}filter_fqns", "output,outptu"],
            1,
            '"outptu" matches no linear layer. Remove it; the linear layers are layers.*.attention',
        ),
        (
            [*TENSORWISE, f"{FLOAT8}filter_fqns", "auto_filter_small_kn"],
            1,
            "too small to be faster",
        ),
        (
            [*TENSORWISE, f"{FLOAT8}filter_fqns", "attention,feed_forward"],
            1,
            "no linear layer would be Float8",
        ),
        (
            [*TENSORWISE, "--parallelism.tensor_parallel_degree", "2"],
            2,
            "shards of layers.*.attention.wk 8x32, layers.*.attention.wv 8x32;",
        ),
        ([*TENSORWISE, "--training.seq_len", "20"], 1, "a micro-batch of 40 tokens a rank"),
        (
            [
                *TENSORWISE,
                f"{FLOAT8}enable_fsdp_float8_all_gather",
                "true",
                "--training.global_batch_size",
                "12",
            ],
            3,
            "3 ranks do not divide the rows of layers.*.attention.wq (32), layers.*.attention.wk",
        ),
        (["--training.compile", "true"], 1, "is now compile.enable"),
        (["--model.converters", "mx"], 1, '(mx): must be "quantize.linear.float8" | "quantize.gr'),
        (FLOAT8_EXPERTS, 1, "this device (a CPU) has no grouped Float8 matmuls; a GPU of compute"),
        (FLOAT8_EXPERTS, 1, '"float32": Float8 matmuls of experts give bfloat16'),
        ([*FLOAT8_EXPERTS, "--model.expert_hidden_dim", "40"], 1, "layers.*.moe.experts.w1 40x32"),
        ([*FLOAT8_EXPERTS, f"{GROUPED_FQNS}=w1"], 1, "fqns = ['w1']: matches no experts"),
        (["--model.converters", GROUPED_MM], 1, "fqns = []: matches no experts of the model"),
        (
            ["--model.converters=quantize.grouped_mm.mx", "--quantize.grouped_mm.mx.fqns=experts"],
            1,
            "[quantize.grouped_mm.mx]: is not available in this version",
        ),
        (["--optimizer.name", "AdamX"], 1, 'Did you mean "Adam"?'),
        (
            ["--model.name=glm4_moe", "--model.mtp_layers=3", "--training.seq_len=3"],
            1,
            "model.mtp_layers = 3: training.seq_len = 3 has no token so far ahead. Use at most 2",
        ),
        (["--model.name=qwen3_next", "--model.mtp_layers=2"], 1, "at least 0 and at most 1"),
        (["--model.mtp_layers=1"], 1, "Those with mtp_layers: qwen3_next"),
        (["--job.device", "cuda"], 1, "finds no CUDA device"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_an_invalid_setting_is_refused_with_the_reason(run_toml, argv, ranks, message):
    if argv[:1] == ["--job.device"] and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    assert message in error_text(run_toml, *argv, ranks=ranks)


@pytest.fixture
def gpu_of_capability(monkeypatch):
    """A function that makes torch report one GPU of a compute capability."""

    def report(*capability: int) -> None:
        for name, value in (
            ("is_available", True),
            ("device_count", 1),
            ("get_device_name", "NVIDIA GPU"),
            ("get_device_capability", capability),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    return report


FLOAT8_STATE = ["--optimizer.state_dtype", "float8"]
EMULATED = [*TENSORWISE, f"{FLOAT8}emulate", "true"]
COMPILED = ["--compile.enable", "true"]


@pytest.mark.parametrize(
    "argv, message",
    [
        (FLOAT8_STATE, 'Use "8bit", which takes the same memory, torch 2.13 or newer, or'),
        ([*FLOAT8_STATE, "--optimizer.implementation", "for-loop"], ""),
        ([*FLOAT8_STATE, "--training.enable_cpu_offload", "true"], ""),
        (["--optimizer.state_dtype", "8bit"], ""),
        ([*EMULATED, *COMPILED], "Use torch 2.13 or newer, compile.enable = false, or"),
        ([*EMULATED, *COMPILED, "--compile.components", "loss"], ""),
        ([*EMULATED, *COMPILED, "--compile.backend", "aot_eager"], ""),
        (EMULATED, ""),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_float8_that_inductor_cannot_compile_for_the_gpu_is_refused(
    run_toml, gpu_of_capability, monkeypatch, argv, message
):
    """tests/cuda_trace/test_compile_for_target.py compiles it for these GPUs."""
    argv = ["--job.device", "cuda", *argv]
    gpu_of_capability(8, 0)
    read_valid(run_toml, *argv)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.12.1"))
    if message:
        text = error_text(run_toml, *argv)
        assert message in text and "NVIDIA GPU, of compute capability 8.0" in text
    else:
        read_valid(run_toml, *argv)
    gpu_of_capability(8, 9)
    read_valid(run_toml, *argv)


def test_a_gpu_without_float8_matmuls_is_refused(run_toml, gpu_of_capability):
    argv = ["--job.device", "cuda", *TENSORWISE]
    gpu_of_capability(8, 0)
    assert "this device (NVIDIA GPU, of compute capability 8.0) has no" in error_text(
        run_toml, *argv
    )
    gpu_of_capability(8, 9)
    read_valid(run_toml, *argv)


def test_a_validation_set_without_the_bos_of_the_sources_is_refused(run_toml, tmp_path):
    with ShardWriter(tmp_path / "bos" / "0", 258) as writer:
        writer.add([256, *[5] * 400, 257])
        writer.close()
    sources = ("--data.sources", f'[{{ name = "bos", path = "{tmp_path}/bos" }}]')
    text = error_text(run_toml, *sources)
    assert "documents begin with BOS in data.sources, and not in data.validation code." in text


def test_a_corpus_without_end_of_document_ids_refuses_document_masks(run_toml, tmp_path):
    """Megatron-LM writes such a corpus without --append-eod."""
    with ShardWriter(tmp_path / "bare", 258) as writer:
        writer.add(list(b"no end-of-document" * 40))
        writer.close()
    sources = ("--data.sources", f'[{{ name = "bare", path = "{tmp_path}/bare" }}]')
    text = error_text(run_toml, *sources, "--attention.mask", "document")
    assert 'the last id of "bare" is not the end-of-document id' in text
    assert text.count("the last id of") == 1  # the validation set has end-of-document ids
    read_valid(run_toml, *sources)
    job = read_valid(run_toml, "--attention.mask", "document")
    assert job.transforms.document_mask and open_stream(job).document_end_id == 257


TEN_ERRORS = """
[training]
stepz = 100
seq_len = "long"
local_batch_size = 0
mixed_precision_param = "bfloat61"
[optimizer]
lr = true
[lr_scheduler]
decay_ratio = 1.5
[parallelism]
tensor_parallel_degree = 3
expert_parallel_comm_backend = "deepep"
[modle]
dim = 3
[checkpoint]
enable_checkpoint = true
"""
EXPECTED_LINES = [
    ("training.stepz = 100", "training.steps"),
    ('training.seq_len = "long"', "integer of at least 1"),
    ("training.local_batch_size = 0", "at least 1"),
    ('training.mixed_precision_param = "bfloat61"', 'Did you mean "bfloat16"'),
    ("optimizer.lr = true", "a number of at least 0"),
    ("lr_scheduler.decay_ratio = 1.5", "at least 0 and at most 1"),
    ("tensor_parallel_degree 3", "ranks, 2"),
    ('parallelism.expert_parallel_comm_backend = "deepep"', 'Use "standard"'),
    ("[modle]", "Did you mean model"),
    ("checkpoint.enable_checkpoint = true", "checkpoint.enable"),
]


def run_train(python: str, command, toml) -> subprocess.CompletedProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [python, *command, str(ROOT / "train.py"), "--job.config_file", str(toml)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=HANG_SECONDS,
    )


def test_ten_errors_are_ten_lines_and_exit_2_under_python(python, run_toml, tmp_path):
    toml = tmp_path / "ten.toml"
    toml.write_text(f'include = ["{run_toml.name}"]\n{TEN_ERRORS}')
    os.environ["WORLD_SIZE"] = "2"  # so that the job is checked for two ranks
    try:
        process = run_train(python, [], toml)
    finally:
        del os.environ["WORLD_SIZE"]
    lines = [line for line in process.stderr.splitlines() if line.startswith("  ")]
    assert process.returncode == 2 and len(lines) == len(EXPECTED_LINES) == 10, process.stderr
    for (fact, fix), line in zip(EXPECTED_LINES, sorted(lines, key=_index_of), strict=True):
        assert fact in line and fix in line, line
    assert "Traceback" not in process.stderr


def _index_of(line: str) -> int:
    return next(n for n, (fact, _) in enumerate(EXPECTED_LINES) if fact in line)


@pytest.mark.slow
def test_config_errors_are_printed_once_under_torchrun(python, run_toml, tmp_path):
    toml = tmp_path / "ten.toml"
    toml.write_text(f'include = ["{run_toml.name}"]\n{TEN_ERRORS}')
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    process = run_train(python, torchrun, toml)
    assert process.stderr.count("training.stepz") == 1 and process.stderr.count("10 problems") == 1
    assert "exitcode  : 2" in process.stderr.replace("exitcode : 2", "exitcode  : 2")


def test_independent_errors_are_all_reported(run_toml):
    text = error_text(
        run_toml, "--training.steps", "0", "--data.sources", "[]", "--model.n_kv_heads", "3"
    )
    assert text.startswith("titanlite: 3 problems")


@pytest.mark.parametrize(
    "argv",
    [
        ["--attention.mask", "document", "--data.tokenizer", "none"],
        [*NOISE_SCALE, "--parallelism.fsdp_gradient_reduction", "last_microbatch"],
        ["--training.batch_size_ramp", "junk", "--training.global_batch_size", "8"],
    ],
    ids=lambda argv: argv[0],
)
def test_degrees_that_do_not_fit_hide_no_other_problem(run_toml, argv):
    alone = re.sub(
        r"^(titanlite: (\d problems\n)?| *\d\. )", "", error_text(run_toml, *argv), flags=re.M
    )
    together = error_text(run_toml, *argv, "--parallelism.tensor_parallel_degree", "3", ranks=2)
    assert "does not divide the number of ranks" in together
    assert [problem for problem in alone.splitlines() if problem not in together] == []


@pytest.mark.parametrize(
    "argv, key",
    [
        (["--model.name", "qwen", "--model.flavor", "0.6B"], "model.name = "),
        (
            [
                "--parallelism.tensor_parallel_degree",
                "x",
                "--parallelism.data_parallel_shard_degree",
                "2",
            ],
            "parallelism.tensor_parallel_degree = ",
        ),
    ],
    ids=["name", "degree"],
)
def test_a_refused_key_causes_no_further_problem(run_toml, argv, key):
    assert error_text(run_toml, *argv, ranks=4).startswith(f"titanlite: {key}")


def test_the_effective_configuration_loads_as_the_same_job(run_toml, tmp_path):
    job = read_valid(run_toml, "--optimizer.lr", "1e-3", *MUP_BASE, *KV_HEADS)
    written = tmp_path / "written.toml"
    written.write_text(job.as_toml())
    assert read_valid(written).as_toml() == job.as_toml()


def test_mup_accepts_a_group_whose_own_settings_have_a_rule(run_toml):
    groups = """[
        { match = ["output.*"], name = "Adafactor", scale_parameter = false },
        { match = ["tok_embeddings.*"], name = "Adam", weight_decay = 0.0 },
    ]"""
    read_valid(run_toml, *MUP_BASE, *KV_HEADS, "--optimizer.groups", groups)


def test_the_base_model_of_mup_is_a_property_of_the_job(run_toml):
    job = read_valid(run_toml, *MUP_BASE, *KV_HEADS)
    base = {"dim": 32, "n_heads": 2, "hidden_dim": 64, "n_kv_heads": 1, "head_dim": None}
    base["expert_hidden_dim"] = None
    assert job.properties(open_stream(job))["mup.base"] == base
    assert "tuned at dim 32; width x" in job.summary(torch.device("cpu"), None)
    assert read_valid(run_toml).properties(open_stream(job))["mup.base"] is None


def test_global_batch_size_minus_1_follows_the_layout_and_is_checked_on_resume(run_toml):
    derived = read_valid(run_toml, "--training.global_batch_size", "-1", ranks=2)
    assert derived.global_batch == 4
    stream = open_stream(derived)
    assert derived.properties_to_check(stream)["training.global_batch_size"] == 4
    known_later = {"base_weights"}  # when the weights under adapters are read
    assert set(derived.properties(stream)) | known_later == set(JOB_PROPERTIES)
    explicit = read_valid(run_toml, ranks=2)
    assert explicit.global_batch == 8
    assert "training.global_batch_size" not in explicit.properties_to_check(stream)
    ramp = ("--training.batch_size_ramp", "0:2 1K:8")
    saved = read_valid(run_toml, *ramp).properties(stream)
    assert saved["training.batch_size_ramp"] == "0:2 1K:8"
    assert (
        derived.properties_to_check(stream)["training.batch_size_ramp"] is None
    )  # so it is refused
    assert "training.batch_size_ramp" not in explicit.properties_to_check(stream)


def test_the_start_shows_the_ramp_and_the_tokens_of_the_run(run_toml):
    job = read_valid(run_toml, "--training.batch_size_ramp", "2 +2 over 1K")
    summary = job.summary(torch.device("cpu"), None)
    assert "2 to 8 sequences in 4 sizes over 1,000 tokens" in summary
    # four steps of 2 sequences of 48 tokens, up to token 334, then two of 4
    assert "length     6 steps, 768 tokens" in summary
    (warning,) = job.warnings
    assert "is longer than training.steps = 6; the last batch has 4 sequences" in warning
    plain = read_valid(run_toml)
    assert "length     6 steps, 2,304 tokens" in plain.summary(torch.device("cpu"), None)
    assert not plain.warnings


@pytest.mark.parametrize(
    ("schedule", "option", "reason"),
    [
        ("ZBVZeroBubble", ["--compile.enable", "true"], "blocks are compiled"),
        ("ZBVZeroBubble", ["--activation_checkpoint.mode", "full"], "blocks are recomputed"),
        ("ZBVZeroBubble", [], None),
        ("ZBVZeroBubble", ["--model.name=glm4_moe", "--model.mtp_layers=1"], "further tokens"),
        ("Interleaved1F1B", ["--activation_checkpoint.mode", "full"], None),
    ],
)
def test_a_schedule_whose_backwards_are_not_split_is_warned_about(
    run_toml, schedule, option, reason
):
    sizes = ["--model.n_layers", "4", "--training.local_batch_size", "4"]
    argv = ["--parallelism.pipeline_parallel_schedule", schedule, *option]
    job = read_valid(run_toml, *PIPELINE, *sizes, *argv, ranks=2)
    assert [reason in warning for warning in job.warnings] == ([True] if reason else [])


def test_the_start_shows_optimizer_schedule_and_guard(run_toml):
    group = '[{ match = ["output.*"], name = "SGD" }]'
    argv = [
        "--optimizer.groups",
        group,
        "--lr_scheduler.decay_ratio",
        "0.5",
        "--guard.spike",
        "skip",
    ]
    summary = read_valid(run_toml, *argv).summary(torch.device("cpu"), None)
    assert "weight decay 0.1; output.*: name SGD" in summary
    assert "2 steps of warmup, linear decay to 0 x peak over the last 3 of 6 steps" in summary
    assert "inf and NaN: skip the step; spikes: skip the step" in summary


def test_the_start_shows_the_experts(run_toml):
    text = re.sub("hidden_dim.*|n_kv_heads.*", "", run_toml.read_text())
    run_toml.write_text(text)
    argv = ("--model.name=qwen3_moe", "--model.flavor=debugmodel", "--model.n_experts=8")
    argv += ("--model.expert_hidden_dim=24", "--model.n_active_experts=2")
    parallel = ("--parallelism.expert_parallel_degree=2", "--experts.aux_loss_coef=0.01")
    summary = read_valid(run_toml, *argv, *parallel, ranks=2).summary(torch.device("cpu"), None)
    expected = "8 of width 24 per block, 2 per token; 4 on each of 2 ranks;"
    assert f"  experts    {expected} balancing: auxiliary loss 0.01" in summary
    none = read_valid(run_toml, *argv, "--experts.aux_loss_coef=0")
    assert "2 per token; balancing: none\n" in none.summary(torch.device("cpu"), None)


def test_a_toml_cannot_name_a_module_to_import(run_toml, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "of_a_stranger.py").write_text("raise SystemExit('it was imported')")
    run_toml.write_text(run_toml.read_text().replace("[job]", '[job]\nimport = "of_a_stranger"'))
    argv = load_extensions(["--job.config_file", str(run_toml)])
    with pytest.raises(UserError, match='job.import = "of_a_stranger".*on the command line'):
        read_job(argv, 1)


def test_no_moved_key_is_a_current_key():
    assert not set(MOVED) & set(all_keys(JobConfig))


def test_ranks_to_check_without_a_check_are_refused(run_toml):
    assert "Remove it, or set job.check = true" in error_text(run_toml, "--job.check_ranks=8")


@pytest.mark.parametrize("name", [path.stem for path in sorted(TRAIN_CONFIGS.glob("*.toml"))])
def test_every_shipped_toml_is_found_by_name_and_passes_all_checks(name, corpus):
    ranks = {
        "llama3_8b": 8,
        "llama3_70b": 64,
        "llama3_405b": 1024,
        "qwen3_30b_a3b": 32,
        "gpt_oss_20b": 32,
        "deepseek_v3_v3-671b": 2048,
    }.get(name, 2)
    argv = ["--job.config_file", name, "--job.check=true", f"--job.check_ranks={ranks}"]
    argv += ["--data.tokenizer", "bytes"]
    if name == "gpt2_characters":  # fewer token ids than bytes have
        argv += ["--model.vocab_size", "258"]
    for side, key in (("train", "sources"), ("validation", "validation")):
        argv += [f"--data.{key}", f'[{{ name = "text", path = "{corpus}/{side}" }}]']
    assert read_job(argv, 1).degrees.ranks == ranks
    assert read_toml(name)  # not empty


def test_each_missing_source_is_its_own_error(run_toml, tmp_path):
    sources = ", ".join(f'{{ name = "{n}", path = "{tmp_path}/{n}" }}' for n in "ab")
    with pytest.raises(UserErrors) as raised:
        read_valid(run_toml, "--data.sources", f"[{sources}]")
    assert len(raised.value.problems) == 2


@pytest.mark.parametrize("converter", ["quantize.linear.float8", "float8"])
def test_float8_can_be_enabled_with_the_converters_key_of_torchtitan(run_toml, converter):
    converters = ["--model.converters", converter, f"{FLOAT8}emulate", "true"]
    job = read_valid(run_toml, *converters, f"{FLOAT8}filter_fqns", "output")
    assert (job.transforms.float8.recipe_name, job.transforms.float8.emulate) == (
        "tensorwise",
        True,
    )
    assert "float8     tensorwise, emulated" in job.summary(torch.device("cpu"), None)
    rowwise = read_valid(run_toml, *converters, f"{FLOAT8}recipe_name", "rowwise")
    assert rowwise.transforms.float8.recipe_name == "rowwise"
    without = read_valid(
        run_toml, f"{FLOAT8}filter_fqns", "output"
    )  # as in the TOMLs of torchtitan
    assert without.transforms.float8.recipe_name is None
    assert "  float8  " not in without.summary(torch.device("cpu"), None)


def test_experts_are_float8_with_the_converter_of_torchtitan_only(run_toml, gpu_of_capability):
    """Its TOMLs have the names of experts without it. Torch has the kernel for Hopper only."""
    without = [argument for argument in FLOAT8_EXPERTS if "converters" not in argument]
    assert read_valid(run_toml, *without).transforms.float8.experts is None
    job = read_valid(run_toml, *FLOAT8_EXPERTS, f"--{GROUPED_MM}.emulate=true")
    assert job.transforms.float8.experts.fqns == ["experts"]
    assert "float8     experts, experts emulated" in job.summary(torch.device("cpu"), None)
    on_gpu = [*FLOAT8_EXPERTS, "--job.device=cuda", "--training.mixed_precision_param=bfloat16"]
    gpu_of_capability(9, 0)
    assert read_valid(run_toml, *on_gpu).transforms.float8.recipe_name is None
    gpu_of_capability(10, 0)
    assert "10.0) has no grouped Float8 matmuls" in error_text(run_toml, *on_gpu)


def test_float8_is_checked_for_the_target_machine(run_toml):
    """The size rules of real Float8 GEMMs apply, although this CPU could emulate other sizes."""
    argv = [*TENSORWISE, "--job.check=true", "--job.check_ranks=2"]
    argv += ["--parallelism.tensor_parallel_degree", "2"]
    text = error_text(run_toml, *argv)
    assert "no Float8 matmuls" not in text and "8x32" in text
    filtered = [*argv, f"{FLOAT8}filter_fqns", "attention"]
    assert read_valid(run_toml, *filtered).transforms.float8.filter_fqns == ["attention"]
    assert read_valid(run_toml, *argv, f"{FLOAT8}emulate", "true").degrees.tensor == 2


def test_a_missing_torchao_is_reported(run_toml, monkeypatch):
    torchao.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao.float8", None)  # imports of it fail
    assert 'Install it with "pip install torchao"' in error_text(run_toml, *TENSORWISE)
    assert read_valid(run_toml).transforms.float8.recipe_name is None
    monkeypatch.undo()
    torchao.cache_clear()


@pytest.mark.parametrize("flavor", ["1B", "3B"])
@pytest.mark.parametrize("degree", [2, 4, 8, 16])
def test_tied_embeddings_can_be_in_two_stages(flavor, degree):
    """Balanced by cost, the output layer of 1B would be alone on the last of 8 ranks."""
    argv = [f"--model.flavor={flavor}", f"--parallelism.pipeline_parallel_degree={degree}"]
    argv += [f"--training.local_batch_size={degree}", "--training.seq_len=8192"]
    job = read_job(argv, degree, here=False)
    stages = job.pipeline.stages
    assert stages[-1][-2:] == ["norm", "output"] and len(stages) == degree
    assert [name for names in stages for name in names] == list(
        job.spec.module_flops(job.sizes, 8192)
    )


def test_a_schedule_csv_must_fit_the_job(run_toml, tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    argv = [*PIPELINE, "--parallelism.pipeline_parallel_schedule_csv", str(file)]
    assert read_valid(run_toml, *argv, ranks=2).pipeline.n_microbatches == 2
    larger_batch = [*argv, "--training.local_batch_size", "4"]
    text = error_text(run_toml, *larger_batch, ranks=2)
    assert "requires 2 micro-batches on 2 ranks" in text
    argv[1] = "4"  # pipeline_parallel_degree
    text = error_text(run_toml, *argv, ranks=4)
    assert "is for 2 ranks and 2 stages; the job has 4 ranks" in text
    assert "Change the file or parallelism.pipeline_parallel_degree." in text


def test_heads_are_not_orthogonalized_apart_in_a_family_without_head_projections(
    run_toml, monkeypatch
):
    argv = ["--optimizer.name", "Muon", "--optimizer.muon_per_head", "true"]
    read_valid(run_toml, *argv)
    monkeypatch.setitem(FAMILIES, "llama3", replace(FAMILIES["llama3"], head_projections=()))
    assert "does not list the layers that project to heads" in error_text(run_toml, *argv)


def test_the_mixture_is_logged_with_changes_of_weights(run_toml, monkeypatch):
    logged: list[str] = []
    monkeypatch.setattr(
        "titanlite.job.data.logger.info", lambda text, *values: logged.append(text % values)
    )
    phase = "{ first_token = 96, weights = { code = 0.5 }, ramp_tokens = 96 }"
    job = read_valid(run_toml, "--data.mixture.phases", f"[{phase}]")
    log_mixture(open_stream(job), job.batches, job.config.training.steps, Counters())
    rolled_back = Counters(step=5, position=30, gaps=((4, 24),))  # positions 4 to 23 were skipped
    log_mixture(open_stream(job), job.batches, 5, rolled_back)
    text, after_rollback = logged
    assert "480 tokens" in after_rollback, after_rollback  # of 10 samples
    assert re.search(r"code  100.00% of the samples: .* epochs", text)
    assert "from token 96 on, gradually until token 192: code 100.00%" in text


def test_the_data_must_suffice_from_where_the_run_is(run_toml, corpus):
    """As after a change of the batch: 4 steps of 2 sequences were taken, now they are larger."""
    source = f'[{{ name = "code", path = "{corpus}/train", max_epochs = 1.0 }}]'
    job = read_valid(run_toml, "--data.sources", source, "--training.steps", "100000")
    stream = open_stream(job)
    left = stream.length // job.global_batch
    log_mixture(stream, job.batches, left, Counters())
    log_mixture(stream, job.batches, left + 10, Counters(step=10, position=0))
    with pytest.raises(ConfigError, match="all sources of a phase have reached max_epochs"):
        log_mixture(stream, job.batches, left + 10, Counters(step=9, position=0))
