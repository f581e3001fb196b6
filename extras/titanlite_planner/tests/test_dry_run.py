"""A dry run, an estimate and a real run agree on memory and traffic."""

from __future__ import annotations

import random

import pytest
import torch

from tests.distributed.ranks import run_on_ranks
from titanlite.errors import EXIT_USER_ERROR, UserError
from titanlite.job import read_job
from titanlite.metrics import cpu_has_bf16_units
from titanlite.parallelize.schedule import SCHEDULES
from titanlite_lab.dispatch import run_command
from titanlite_planner.__main__ import COMMANDS
from titanlite_planner.dry_run.ranks import RankStep, _kinds, dry_run
from titanlite_planner.dry_run.step_recorder import StepRecorder
from titanlite_planner.memory.job import estimate_job_memory, job_traffic
from titanlite_planner.memory.rank import RankMemory
from titanlite_planner.tests.measured_step import measure_step

SIZES = {"dim": 256, "n_heads": 8, "n_kv_heads": 4, "n_layers": 2, "hidden_dim": 768}
COMMON = {**{f"model.{key}": size for key, size in SIZES.items()}, "training.seq_len": 512}
PIPELINE = {"parallelism.pipeline_parallel_degree": 2, "training.local_batch_size": 4}
ZBV = {**PIPELINE, "parallelism.pipeline_parallel_schedule": "ZBVZeroBubble", "model.n_layers": 4}
TIED = {"model.tied_embeddings": "true"}
LARGE_VOCABULARY = {"model.vocab_size": 50_000}
FP32 = {"training.mixed_precision_param": "float32"}
ON_CPU = {"job.device": "cpu"}
LINEAR = {"model.name": "qwen3_5", "model.full_attention_every": 2}
# A CPU without bf16 units multiplies large matrices in bf16 40 times slower than in fp32.
SHORT = {"training.seq_len": 64}
LAYOUTS = {
    "FSDP 3, uneven": (3, {"model.vocab_size": 1001}),
    "HSDP, accumulation, op": (
        4,
        {
            "parallelism.data_parallel_replicate_degree": 2,
            "training.local_batch_size": 2,
            "training.global_batch_size": 16,
            "activation_checkpoint.selective_ac_option": "op",
        },
    ),
    "TP 2, CP 2, full": (
        8,
        {
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.context_parallel_degree": 2,
            "activation_checkpoint.mode": "full",
        },
    ),
    "PP 2, TP 2": (8, {**PIPELINE, "parallelism.tensor_parallel_degree": 2, **TIED}),
    "FSDP 8, TP 2, tied": (
        16,
        {
            **TIED,
            **LARGE_VOCABULARY,
            "parallelism.tensor_parallel_degree": 2,
            "training.seq_len": 256,
            "loss.chunk_tokens": 64,
        },
    ),
    "PP 2, HSDP without shards": (
        4,
        {
            **PIPELINE,
            **TIED,
            **LARGE_VOCABULARY,
            "parallelism.data_parallel_replicate_degree": 2,
            "training.seq_len": 64,
        },
    ),
    "PP 2, ZBV, split backwards, short sequences": (
        2,
        {**ZBV, "activation_checkpoint.mode": "none", "training.seq_len": 128},
    ),
    "FSDP 2, tied, reduced in the last micro-batch": (
        2,
        {
            **TIED,
            **LARGE_VOCABULARY,
            "training.seq_len": 128,
            "training.local_batch_size": 1,
            "training.global_batch_size": 4,
            "parallelism.fsdp_gradient_reduction": "last_microbatch",
        },
    ),
    "FSDP 2, not resharded after forward": (
        2,
        {
            "training.seq_len": 64,
            "training.local_batch_size": 1,
            "parallelism.fsdp_reshard_after_forward": "never",
        },
    ),
    "PP 2, TP 2, CP 2, fp32, CPU": (
        8,
        {
            **PIPELINE,
            **FP32,
            **ON_CPU,
            "parallelism.tensor_parallel_degree": 2,
            "parallelism.context_parallel_degree": 2,
            "model.dim": 512,
            "model.hidden_dim": 2048,
        },
    ),
}
MORE = {  # with `--layouts 2`
    "PP 2, ZBV, split backwards": (2, {**ZBV, "activation_checkpoint.mode": "none"}),
    "PP 2, short sequences": (2, {**PIPELINE, **LARGE_VOCABULARY, "training.seq_len": 64}),
    "PP 2, ZBV, fp32": (
        2,
        {**ZBV, **FP32, "training.seq_len": 1024, "activation_checkpoint.mode": "full"},
    ),
}


def argv_of(settings: dict) -> list[str]:
    return [f"--{key}={value}" for key, value in {**COMMON, **settings}.items()]


def compare(argv: list[str], ranks: int) -> list[tuple[RankStep, RankMemory]]:
    """The dry run of each kind of rank, with the estimate; bytes at rest and traffic are equal."""
    job = read_job(argv, ranks, here=False)
    estimates, collectives = estimate_job_memory(job).ranks, job_traffic(job)
    pairs = []
    for step in dry_run(job):
        estimate = estimates[step.pipeline_rank]
        rest = (estimate.parameters, estimate.rest_gradients, estimate.optimizer_state)
        assert rest == (
            step.resting.parameters,
            step.resting.gradients,
            step.resting.optimizer_state,
        )
        formula = {
            (c.dimension, c.name): (c.calls, c.bytes) for c in collectives[step.pipeline_rank]
        }
        assert formula == {
            (kind.dimension, kind.name): (total.calls, total.bytes)
            for kind, total in step.collectives.items()
        }
        pairs.append((step, estimate))
    return pairs


def pytest_generate_tests(metafunc) -> None:
    if "layout" in metafunc.fixturenames:
        more = MORE if metafunc.config.getoption("--layouts") > 1 else {}
        metafunc.parametrize("layout", [*LAYOUTS, *more])


@pytest.mark.slow
def test_the_estimate_equals_a_dry_run(layout):
    ranks, settings = (LAYOUTS | MORE)[layout]
    for step, estimate in compare(argv_of(settings), ranks):
        assert estimate.total == pytest.approx(step.peak_bytes, rel=0.03)


@pytest.mark.slow
def test_a_rank_with_both_ends_of_the_pipeline_has_two_copies_of_a_tied_embedding():
    (first, _), (second, _) = compare(argv_of({**ZBV, **TIED}), 2)
    ends = 2 * 4 * 2048 * SIZES["dim"] + 4 * SIZES["dim"]  # the embedding, its copy and the norm
    assert first.resting.parameters == second.resting.parameters + ends


@pytest.mark.slow
def test_the_loss_of_a_tied_embedding_has_no_gradient_of_its_positions():
    argv = ["--model.name=gpt2", "--model.flavor=debugmodel", "--model.positions=16384"]
    argv += ["--model.n_layers=2"]
    argv += ["--parallelism.pipeline_parallel_degree=2", "--training.seq_len=256"]
    *_, (step, estimate) = compare([*argv, "--training.local_batch_size=2"], 2)
    assert estimate.total == pytest.approx(step.peak_bytes, rel=0.03)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B"])
def test_micro_batches_need_not_be_a_multiple_of_the_pipeline_ranks(schedule):
    settings = {
        "model.n_layers": 2 if schedule == "1F1B" else 4,
        "parallelism.pipeline_parallel_degree": 2,
        "parallelism.pipeline_parallel_schedule": schedule,
        "training.local_batch_size": 3,
    }
    for step, estimate in compare(argv_of(settings), 2):
        assert estimate.total == pytest.approx(step.peak_bytes, rel=0.05)


TENSOR = {"parallelism.tensor_parallel_degree": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (3, {}),
        (8, {**TENSOR, **PIPELINE}),
    ],
    ids=["FSDP 3", "PP 2, TP 2"],
)
def test_the_estimate_has_the_state_of_the_matrices_that_a_rank_owns(ranks, settings):
    job = read_job(argv_of({**settings, "optimizer.name": "SOAP"}), ranks, here=False)
    estimates = estimate_job_memory(job).ranks
    for step in dry_run(job):
        estimate = estimates[step.pipeline_rank]
        assert step.resting.optimizer_state == estimate.optimizer_state


# With AVX2 alone, the peak of a bf16 step differs by 4 to 6 %: its matmuls have other buffers.
NEEDS_BF16 = pytest.mark.skipif(not cpu_has_bf16_units(), reason="the CPU has no bf16 units")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "FSDP 3, uneven",
        "linear attention",
        pytest.param("PP 2", marks=NEEDS_BF16),
        pytest.param("tied, chunks", marks=NEEDS_BF16),
    ],
)
def test_a_dry_run_equals_a_real_run(name):
    of_name = {
        "FSDP 3, uneven": (3, {**LAYOUTS["FSDP 3, uneven"][1], **SHORT}),
        # four chunks of the delta rule in each sequence; with fewer tokens, most of the peak is at
        # rest, and a fault of the activations would be less than the tolerance
        "linear attention": (
            2,
            {**LINEAR, **FP32, "training.seq_len": 256, "training.local_batch_size": 4},
        ),
        "PP 2": (2, {**PIPELINE, **TIED}),
        "tied, chunks": (2, {**TIED, **SHORT, "model.vocab_size": 8000, "loss.chunk_tokens": 64}),
    }
    ranks, settings = of_name[name]
    argv = argv_of({**settings, **ON_CPU})
    measured = run_on_ranks(measure_step, ranks, argv, ranks)
    for step in dry_run(read_job(argv, ranks, here=False)):
        per_stage = ranks // settings.get("parallelism.pipeline_parallel_degree", 1)
        rest, peak = measured[step.pipeline_rank * per_stage]
        dry = step.resting
        assert rest == (dry.parameters, dry.gradients, dry.optimizer_state)
        assert peak == pytest.approx(step.peak_bytes, rel=0.01)


def test_a_dry_run_counts_the_flops_of_triangular_systems():
    recorder, solve = StepRecorder(lambda *_: ""), torch.ops.aten.linalg_solve_triangular.default
    matrix, right = torch.ones(3, 8, 8), torch.ones(3, 8, 5)
    recorder.observe(solve, (matrix, right), {"upper": False}, right)
    assert recorder.flops.total() == 3 * 5 * (8 * 7 + 8)  # half of 2 * 8 * 8, with a division


def test_a_document_mask_is_run_as_one_document_a_sequence():
    argv = argv_of({**SHORT, **ON_CPU, "data.tokenizer": "bytes"})
    masks = ("causal", "document")
    jobs = [read_job([*argv, f"--attention.mask={m}"], 1, here=False) for m in masks]
    causal, document = ([step.peak_bytes for step in dry_run(job)] for job in jobs)
    assert causal == document


def test_a_dry_run_refuses_an_illegal_layout_as_a_run_does(capfd):
    argv = ["dry-run", "--job.check_ranks=6", "--parallelism.tensor_parallel_degree=4"]
    assert run_command("titanlite_planner", COMMANDS, argv) == EXIT_USER_ERROR
    assert "does not divide the number of ranks" in capfd.readouterr().err


def test_a_dry_run_prints_every_kind_of_rank(capfd):
    argv = ["dry-run", *argv_of(PIPELINE), "--job.check_ranks=64"]
    assert run_command("titanlite_planner", COMMANDS, argv) == 0
    printed = capfd.readouterr().out
    assert "pipeline rank 0: tok_embeddings" in printed
    assert "pipeline rank 1: layers" in printed
    assert "shard                        reduce-scatter" in printed


def test_blocks_that_are_recomputed_and_others_are_of_different_kinds():
    argv = ["--model.n_layers=16", "--parallelism.pipeline_parallel_degree=8"]
    argv += ["--parallelism.pipeline_parallel_layers_per_stage=2", "--training.local_batch_size=8"]
    argv += ["--activation_checkpoint.mode=selective"]
    job = read_job([*argv, "--activation_checkpoint.selective_ac_option=3"], 8, here=False)
    # of blocks 4 and 5, and of 10 and 11, none is recomputed; of two others, one
    assert _kinds(job) == [(0, (0,)), (1, (1, 3, 4, 6)), (2, (2, 5)), (7, (7,))]


def random_settings(rng: random.Random) -> tuple[int, dict]:
    """(ranks, settings) of a layout, which may be illegal."""
    dim, heads = rng.choice([256, 512, 1024]), rng.choice([4, 8, 16])
    degrees = {
        "tensor_parallel_degree": rng.choice([1, 1, 2, 4]),
        "pipeline_parallel_degree": rng.choice([1, 1, 2, 4]),
        "context_parallel_degree": rng.choice([1, 1, 2]),
        "data_parallel_shard_degree": rng.choice([1, 2, 4, 8]),
        "data_parallel_replicate_degree": rng.choice([1, 1, 2]),
    }
    ranks = 1
    for degree in degrees.values():
        ranks *= degree
    settings = {
        "model.dim": dim,
        "model.n_heads": heads,
        "model.n_kv_heads": rng.choice([heads, heads // 2, 2]),
        "model.n_layers": rng.choice([4, 6, 8]),
        "model.hidden_dim": rng.choice([2, 3, 4]) * dim,
        "model.vocab_size": rng.choice([1000, 8192, 50_000]),
        "training.seq_len": rng.choice([512, 1024, 2048]),
        "training.local_batch_size": rng.choice([1, 2, 4, 8]),
        "training.mixed_precision_param": rng.choice(["bfloat16", "bfloat16", "float32"]),
        "activation_checkpoint.mode": rng.choice(["none", "full", "selective"]),
        "activation_checkpoint.selective_ac_option": rng.choice(["2", "op", "3"]),
        "loss.chunk_tokens": rng.choice([0, 256, 4096]),
        "job.device": rng.choice(["cpu", "cuda"]),
        "model.tied_embeddings": rng.choice(["true", "false"]),
        **{f"parallelism.{key}": degree for key, degree in degrees.items()},
    }
    if degrees["pipeline_parallel_degree"] > 1:
        settings["parallelism.pipeline_parallel_schedule"] = rng.choice([*SCHEDULES])
    return ranks, settings


@pytest.mark.slow
def test_estimates_of_random_layouts_equal_dry_runs(request):
    """The traffic and the bytes at rest are equal in all of them."""
    count, seed = (request.config.getoption(name) for name in ("--layouts", "--layout-seed"))
    if count == 1:
        pytest.skip("runs with --layouts 200, for a sweep")
    rng = random.Random(seed)
    errors: list[float] = []
    done = 0
    while done < count:
        ranks, settings = random_settings(rng)
        try:
            read_job(argv_of(settings), ranks, here=False)
        except UserError:
            continue
        for step, estimate in compare(argv_of(settings), ranks):
            errors.append(estimate.total / step.peak_bytes - 1)
        done += 1
    sizes = sorted(map(abs, errors))
    print(
        f"{done} layouts, {len(sizes)} ranks: median {sizes[len(sizes) // 2]:.4f},"
        f" largest {sizes[-1]:.3f}, within 5 %: {sum(size <= 0.05 for size in sizes)}"
    )
    assert sizes[-1] <= 0.05
