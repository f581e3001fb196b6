"""The balancing of experts: its state in checkpoints, and what it refuses."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.distributed.moe_family import MOE_FAMILY
from tests.faults.launch import LaunchedRun
from titanlite.errors import UserError, format_error
from titanlite.job import read_job
from titanlite.models import FAMILIES


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
    ],
    ids=lambda value: value[-2] if isinstance(value, tuple) else None,
)
def test_what_a_model_has_nothing_for_is_refused(run_toml, monkeypatch, argv, message):
    monkeypatch.setitem(FAMILIES, "moe", MOE_FAMILY)
    flavor = [] if "--model.name" in argv else ["--model.name", "moe", "--model.flavor", "mini"]
    with pytest.raises(UserError) as raised:
        read_job(["--job.config_file", str(run_toml), *flavor, *argv], 1)
    assert message in format_error(raised.value)
