"""Whole runs with meters: a slow rank is named, and replicas that differ end the run."""

from __future__ import annotations

import os
import socket
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from tests.faults.launch import LaunchedRun, events_of
from titanlite.distributed.collectives import local_shard
from titanlite.errors import EXIT_DIVERGED, TrainingDiverged
from titanlite.meters import replica_check
from titanlite.meters.metered_run import ReplicaCheckConfig
from titanlite.meters.replica_check import ReplicaFinding

SLOW_RANK, DAMAGED_RANK, DAMAGED_STEP = 1, 1, 5
WEIGHT = "layers.0.feed_forward.w1.weight"


def prepare_faults() -> None:
    """Rank 1 takes 30 % longer by its own clock, and one bit of its weights flips in step 5."""
    import torch

    from titanlite.job import build as builders
    from titanlite.meters import straggler

    build, seconds, forwards = builders.build_model, [0.0], [0]
    rank = int(os.environ["RANK"])

    def count_forward(*_) -> None:
        seconds[0] += 1.3 if rank == SLOW_RANK else 1.0
        forwards[0] += 1
        if forwards[0] == DAMAGED_STEP and rank == DAMAGED_RANK:  # one micro-batch a step
            parameter = local_shard(dict(model[0].named_parameters())[WEIGHT].detach())
            parameter.view(-1).view(torch.int32)[7] ^= 1 << 12  # a lower bit may be rounded away

    def build_and_count(*args, **options):
        sharded = build(*args, **options)
        model.append(sharded.model)
        sharded.model.register_forward_pre_hook(count_forward)
        return sharded

    model: list = []
    builders.build_model = build_and_count
    straggler.thread_time = lambda: seconds[0]
    straggler.perf_counter = lambda: 0.0


def test_a_slow_rank_and_a_flipped_bit_are_named_and_the_state_is_not_saved(run_toml, tmp_path):
    out = tmp_path / "out"
    argv = (
        "--job.config_file", str(run_toml), "--training.local_batch_size", "4",
        "--training.steps", "8", "--validation.enable", "false",
        "--parallelism.data_parallel_replicate_degree", "2", "--checkpoint.interval", "3",
        "--replica_check.freq", "2", "--straggler.freq", "2",
        "--metrics.layer_norms_freq", "3", "--training.clipping", "adaptive",
    )  # fmt: skip
    with LaunchedRun(2, out, *argv, prepare=prepare_faults) as run:
        assert run.wait() == [EXIT_DIVERGED] * 2, run.output
    host = socket.gethostname()
    slow = events_of(out, "straggler")
    assert [(e["step"], e["rank"], e["host"], e["measure"]) for e in slow] == [
        (step, SLOW_RANK, host, "host") for step in (2, 4)
    ]
    assert slow[0]["seconds"] == 1.3 and slow[0]["median_seconds"] == 1.0
    (mismatch,) = events_of(out, "replica_mismatch")
    named = (mismatch["step"], mismatch["ranks"], mismatch["value"], mismatch["replicas"])
    assert named == (6, [0, 1], WEIGHT, 2)
    assert f"replicas differ at step 6: {WEIGHT} on rank 0 ({host}), 1 ({host})" in run.output
    assert "Traceback" not in run.output
    assert [folder.name for folder in (out / "checkpoint").glob("step-*")] == ["step-3"]
    assert [event["step"] for event in events_of(out, "layer_norms")] == [3, 6]


def test_the_noise_scale_continues_after_a_restart(run_toml, tmp_path):
    def run_parts(name: str, *parts: int) -> list[tuple[int, float]]:
        out = tmp_path / name
        for steps in parts:
            argv = (
                "--job.config_file", str(run_toml), "--job.dump_folder", str(out),
                "--training.steps", str(steps), "--lr_scheduler.total_steps", "6",
                "--validation.enable", "false", "--metrics.noise_scale_freq", "2",
            )  # fmt: skip
            with LaunchedRun(1, out, *argv) as run:
                assert run.wait() == [0], run.output
        return [(event["step"], event["noise"]) for event in events_of(out, "noise_scale")]

    whole = run_parts("whole", 6)
    assert [step for step, _ in whole] == [2, 4, 6]
    assert run_parts("interrupted", 3, 6) == whole  # due before the next step, and after a restart
    assert len({noise for _, noise in whole}) == 3


def test_replicas_that_differ_can_be_logged_only(monkeypatch):
    finding = ReplicaFinding([3], ["node7"], 4, WEIGHT)
    check = SimpleNamespace(find=lambda: [finding])
    events: list = []
    sinks = SimpleNamespace(event=lambda step, name, **fields: events.append((step, name, fields)))
    saves = SimpleNamespace(
        due=lambda step, ends: step == 7, due_in_memory=lambda step, ends: step == 9
    )
    mesh = SimpleNamespace(degrees=SimpleNamespace(ranks=2))
    settings = SimpleNamespace(mesh=mesh)
    run = SimpleNamespace(sinks=sinks, state=None, step_settings=settings, checkpointer=saves)
    run.finish_save = lambda step: None
    monkeypatch.setattr(replica_check, "ReplicaCheck", lambda state, mesh: check)
    for action in ("warn", "stop"):
        config = ReplicaCheckConfig(freq=10, action=action)
        metered = SimpleNamespace(run=run, replica_check=config)
        periodic = replica_check.build_replica_check(metered).action
        due = [
            step
            for step in range(1, 22)
            if periodic.is_due(SimpleNamespace(step=step, ends_run=False))
        ]
        assert due == [7, 9, 10, 20]
        with pytest.raises(TrainingDiverged) if action == "stop" else nullcontext():
            periodic.run(SimpleNamespace(step=7))
    assert events == [(7, "replica_mismatch", finding._asdict())] * 2
