"""Balancing of experts, in every layout: the gradients, weights and biases of one process."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace

import pytest

from tests.distributed.moe_family import MOE_FAMILY, MoESizes
from tests.distributed.oracle import SGD, Layout, with_enough_blocks
from tests.distributed.test_oracle import assert_matches_one_process, join_names
from tests.faults.launch import LaunchedRun
from titanlite.errors import UserError, format_error
from titanlite.job import read_job
from titanlite.models import FAMILIES, ExpertSizes, LoadBalancing

SIZES = MoESizes(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    hidden_dim=88,
    vocab_size=509,
    rope_theta=1e4,
    experts=ExpertSizes(count=6, active=2, hidden_dim=20, shared_dim=16, shared_gate=True),
)
SOFTMAX = replace(
    SGD,
    sizes=SIZES,
    batch=12,
    seq_len=24,
    steps=3,
    balancing=LoadBalancing(aux_loss_coef=0.5, z_loss_coef=0.1),
)
# DeepSeek-V3's router; the bias moves so far in a step that it changes what is selected.
GROUPED = ExpertSizes(
    count=8,
    active=3,
    hidden_dim=20,
    score="sigmoid",
    route_scale=2.5,
    groups=4,
    active_groups=2,
    selection_bias=True,
)
SIGMOID = replace(
    SOFTMAX,
    sizes=replace(SIZES, experts=GROUPED),
    balancing=LoadBalancing(0.5, 0.1, bias_update_rate=0.02),
)

LAYOUTS = [
    [Layout(), Layout(accumulate=3, recompute="full"), Layout(recompute="op")],
    [Layout(shard=2, accumulate=3), Layout(context=2)],
    [Layout(pipeline=2, microbatch=2), Layout(pipeline=2, microbatch=2, schedule="ZBVZeroBubble")],
    [
        Layout(replicate=2, shard=2, expert=2),
        Layout(shard=2, tensor=2, expert=2, expert_tensor=2),
        Layout(tensor=2, context=2, expert=2, recompute="full"),
    ],
    [Layout(shard=2, expert=2, accumulate=3), Layout(tensor=2), Layout(tensor=2, expert=2)],
]


@pytest.mark.parametrize("recipe", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("layouts", LAYOUTS, ids=join_names)
def test_balancing_of_every_layout_matches_one_process(layouts, recipe):
    assert_matches_one_process(
        [(x, with_enough_blocks(recipe, x) if x.pipeline > 1 else recipe) for x in layouts]
    )


UPDATES = {
    "Muon": replace(SIGMOID, optimizer="Muon", lr=1e-3),
    "Adafactor": replace(SOFTMAX, optimizer="Adafactor", lr=1e-3),
    "adaptive clipping": replace(SOFTMAX, adaptive=0.05),
}


@pytest.mark.parametrize("update", UPDATES)
def test_updates_of_experts_match_one_process(update):
    assert_matches_one_process([(Layout(shard=2), UPDATES[update])])


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_compiled_blocks_with_experts_match_one_process(recompute):
    assert_matches_one_process([(Layout(compile="aot_eager", recompute=recompute), SOFTMAX)])


def add_family() -> None:
    FAMILIES["moe"] = MOE_FAMILY


def recorded(folder) -> dict[int, tuple]:
    """Loss and load of each step of a run."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    loads = {line["step"]: line for line in lines if line.get("event") == "expert_load"}
    fields = ("load_max", "load_cv", "entropy", "aux_loss", "z_loss", "dropped_tokens")
    return {
        line["step"]: (line["loss"], *(loads[line["step"]][field] for field in fields))
        for line in lines
        if "event" not in line
    }


def test_a_resumed_run_balances_by_the_load_before_the_checkpoint(run_toml, tmp_path):
    """Saved by two pipeline ranks, each with the load of its own blocks; resumed by one process."""
    out = tmp_path / "out"
    argv = (
        *("--job.config_file", str(run_toml), "--model.name", "moe", "--model.flavor", "mini"),
        *("--experts.aux_loss_coef", "0.5", "--experts.z_loss_coef", "0.1"),
        *("--validation.enable", "false", "--training.local_batch_size", "4"),
    )
    pipeline = ("--parallelism.pipeline_parallel_degree", "2")
    with LaunchedRun(2, out, *argv, *pipeline, prepare=add_family) as run:
        assert run.wait() == [0, 0], run.output
    before = recorded(out)
    shutil.rmtree(out / "checkpoint" / "step-6")
    with LaunchedRun(1, out, *argv, prepare=add_family) as run:
        assert run.wait() == [0], run.output
    assert "resumed" in (out / "metrics.jsonl").read_text()
    after = recorded(out)
    assert sorted(after) == [1, 2, 3, 4, 5, 6]
    for step, measured in before.items():
        assert after[step] == pytest.approx(measured, rel=1e-5), step
        assert measured[-1] == 0
    # 0.5 is the loss for a uniform load, as before the first step
    losses = [measured[4] for step, measured in before.items() if step > 1]
    assert max(abs(loss - 0.5) for loss in losses) > 1e-4, "not the load of the previous step"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ("--model.name", "llama3", "--experts.aux_loss_coef", "0.1"),
            'experts.aux_loss_coef = 0.1: model.name = "llama3" has no experts',
        ),
        (
            ("--experts.bias_update_rate", "0.001"),
            'the router of model.name = "moe" selects without a bias',
        ),
        (("--optimizer.name", "SOAP"), "the experts of a block are a stack of them"),
        (("--quantize.grouped_mm.fp8", "true"), "needs groups of 16 rows"),
    ],
    ids=lambda value: value[-2] if isinstance(value, tuple) else None,
)
def test_what_a_model_has_nothing_for_is_refused(run_toml, monkeypatch, argv, message):
    monkeypatch.setitem(FAMILIES, "moe", MOE_FAMILY)
    flavor = [] if "--model.name" in argv else ["--model.name", "moe", "--model.flavor", "mini"]
    with pytest.raises(UserError) as raised:
        read_job(["--job.config_file", str(run_toml), *flavor, *argv], 1)
    assert message in format_error(raised.value)
