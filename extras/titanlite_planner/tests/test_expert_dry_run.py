"""A dry run and the formula agree on the memory and the traffic of experts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.distributed.moe_family import MOE_FAMILY, MoESizes
from titanlite.job import read_job
from titanlite.models import FAMILIES, ExpertSizes
from titanlite_planner.dry_run.ranks import _kinds
from titanlite_planner.tests.test_dry_run import compare

pytestmark = pytest.mark.slow

SIZES = MoESizes(
    dim=256,
    n_layers=2,
    n_heads=8,
    n_kv_heads=4,
    hidden_dim=768,
    vocab_size=1024,
    experts=ExpertSizes(count=8, active=4, hidden_dim=128, shared_dim=64),
)
FAMILY = replace(MOE_FAMILY, flavors={"small": SIZES})
LAYOUTS = {
    # 4 experts over 3 ranks: no dimension divides evenly
    "EP 2, full": (6, {"expert_parallel_degree": 2}, "full"),
    "EP 4, TP 2, op": (4, {"expert_parallel_degree": 4, "tensor_parallel_degree": 2}, "op"),
    "EP 2, TP 2 of experts": (
        4,
        {
            "expert_parallel_degree": 2,
            "expert_tensor_parallel_degree": 2,
            "tensor_parallel_degree": 2,
        },
        "selective",
    ),
    # one group of torch for the exchange and for FSDP
    "EP 2 of 2 ranks": (2, {"expert_parallel_degree": 2}, "none"),
    "TP 2, EP 2, own tokens": (
        4,
        {
            "expert_parallel_degree": 2,
            "expert_tensor_parallel_degree": 1,
            "tensor_parallel_degree": 2,
        },
        "none",
    ),
    "PP 2, ZBV": (
        2,
        {"pipeline_parallel_degree": 2, "pipeline_parallel_schedule": "ZBVZeroBubble"},
        "none",
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_formula_equals_a_dry_run(name, monkeypatch):
    monkeypatch.setitem(FAMILIES, "moe", FAMILY)
    ranks, degrees, recompute = LAYOUTS[name]
    argv = [f"--parallelism.{key}={degree}" for key, degree in degrees.items()]
    argv += ["--model.name=moe", "--model.flavor=small", "--training.seq_len=512"]
    if "pipeline_parallel_degree" in degrees:
        argv += ["--training.local_batch_size=4", "--model.n_layers=4"]
    if recompute == "op":
        argv.append("--activation_checkpoint.selective_ac_option=op")
    else:
        argv.append(f"--activation_checkpoint.mode={recompute}")
    for step, estimate in compare(argv, ranks):
        exchanged = any(kind.name == "all-to-all" for kind in step.collectives)
        assert exchanged == ("expert_parallel_degree" in degrees)
        assert estimate.total == pytest.approx(step.peak_bytes, rel=0.05)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen3_moe", ["--parallelism.tensor_parallel_degree=2", "--model.n_layers=2"]),
        (
            "gpt_oss",
            [
                "--model.n_layers=2",
                "--parallelism.tensor_parallel_degree=2",
                "--parallelism.expert_parallel_degree=4",
                "--activation_checkpoint.mode=none",
            ],
        ),
        (
            "gpt_oss",  # a CPU repeats keys and values
            ["--job.device=cpu", "--model.n_layers=2", "--activation_checkpoint.mode=none"],
        ),
        (
            "deepseek_v3",  # its first block has no experts
            [
                "--model.n_layers=3",
                "--parallelism.pipeline_parallel_degree=2",
                "--parallelism.expert_parallel_degree=2",
                "--training.local_batch_size=2",
                "--activation_checkpoint.mode=full",
            ],
        ),
        (
            "gemma3",  # four norms in a block
            [
                "--parallelism.tensor_parallel_degree=2",
                "--model.n_layers=2",
                "--model.full_attention_every=2",
            ],
        ),
        (
            "deepseek_v3",
            [
                "--model.n_layers=3",
                "--model.n_dense_layers=2",
                "--model.n_experts=32",
                "--activation_checkpoint.mode=full",
            ],
        ),
    ],
)
def test_the_estimate_of_a_family_equals_a_dry_run(family, options):
    flavor = next(iter(FAMILIES[family].flavors))
    argv = [f"--model.name={family}", f"--model.flavor={flavor}", "--training.seq_len=512"]
    limit = 0.01 if family == "gpt_oss" else 0.03  # its copies of keys and values are 2 to 4 %
    for step, estimate in compare([*argv, *options], 4):
        assert estimate.total == pytest.approx(step.peak_bytes, rel=limit)


def test_blocks_with_experts_and_without_are_of_different_kinds():
    argv = ["--model.name=deepseek_v3", "--model.n_layers=8", "--model.n_dense_layers=3"]
    argv += ["--parallelism.pipeline_parallel_degree=4", "--training.local_batch_size=4"]
    argv += ["--parallelism.pipeline_parallel_layers_per_stage=2"]
    argv += ["--activation_checkpoint.selective_ac_option=3"]
    job = read_job(["--model.flavor=tiny", *argv], 4, here=False)
    assert [ranks for _, ranks in _kinds(job)] == [(0,), (1,), (2,), (3,)]


def test_the_traffic_of_latent_attention_equals_a_dry_run():
    argv = ["--model.name=deepseek_v3", "--model.flavor=tiny", "--training.seq_len=512"]
    argv.append("--model.n_layers=2")
    assert compare([*argv, "--parallelism.tensor_parallel_degree=2"], 2)
