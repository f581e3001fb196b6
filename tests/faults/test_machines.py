"""A run that loses whole machines, and gets them back, has the losses of an undisturbed one."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from conftest import HANG_SECONDS, ROOT
from tests.faults.launch import LaunchedRun, events_of, lines_of, steps_of
from tests.faults.machines import Network, why_no_machines
from titanlite.checkpoint import list_steps, read_checkpoint_manifest
from titanlite.checkpoint.tensor_reader import read_tensors
from titanlite.storage import StorageFolder


def wait_until(network: Network, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        logs = "\n".join(network.log(number) for number in network.machines)
        assert time.monotonic() < deadline, logs
        assert all(machine.poll() is None for machine in network.machines.values()), logs
        time.sleep(0.05)


def wait_for_step(network: Network, out, step: int) -> None:
    wait_until(network, lambda: max(steps_of(out), default=0) >= step)


def undisturbed(run_toml, folder, steps: int, options: list[str]) -> list[dict]:
    """The step lines of one process that trains as long."""
    argv = ["--job.config_file", str(run_toml), "--job.dump_folder", str(folder), *options]
    with LaunchedRun(1, folder, *argv, "--training.steps", str(steps)) as run:
        assert run.wait() == [0], run.output
    return [line for line in lines_of(folder) if "event" not in line]


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    folder = StorageFolder(checkpoint)
    tensors = read_checkpoint_manifest(folder).tensors
    names = [name.removeprefix("model.") for name in tensors if name.startswith("model.")]
    weights = {name: torch.empty(tensors[f"model.{name}"].shape) for name in names}
    read_tensors(folder, {"model": weights}, no_dist=True)
    return weights


def check_curve(run_toml, tmp_path, options: list[str]) -> None:
    """The step lines of the run, and its newest weights on the disk, are those of one process."""
    lines = [line for line in lines_of(tmp_path / "out") if "event" not in line]
    alone = undisturbed(run_toml, tmp_path / "alone", lines[-1]["step"], options)
    assert [line["step"] for line in lines] == [line["step"] for line in alone]
    for key in ("loss", "grad_norm"):
        assert [d[key] for d in lines] == pytest.approx([d[key] for d in alone], rel=1e-5), key
    for key in ("lr", "tokens", "samples"):
        assert [d[key] for d in lines] == [d[key] for d in alone], key
    folders = [tmp_path / run / "checkpoint" for run in ("out", "alone")]
    newest = max(set.intersection(*(set(list_steps(StorageFolder(f)).steps) for f in folders)))
    found, expected = (weights_of(folder / f"step-{newest}") for folder in folders)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        error = float((found[name] - weight).norm() / weight.norm())
        assert error < 1e-5, (name, newest, error)


def wait_for_return(network: Network, out, number: int) -> dict:
    """The event of the return with this number, counted from 1, and some steps after it."""
    wait_until(network, lambda: len(events_of(out, "returned")) >= number)
    event = events_of(out, "returned")[number - 1]
    wait_for_step(network, out, event["step"] + 7)
    return event


COMMON = ["--training.steps", "100000", "--lr_scheduler.total_steps", "100000"]
COMMON += ["--training.global_batch_size", "7", "--checkpoint.keep_latest_k", "0"]
COMMON += ["--checkpoint.interval", "20"]
COMMON += ["--validation.enable", "false"]
ELASTIC = ["--elastic.enable", "true", "--elastic.lost_after_seconds", "5"]


@pytest.mark.slow
def test_a_lost_machine_and_its_return_do_not_show_in_the_losses(run_toml, tmp_path):
    if reason := why_no_machines():
        pytest.skip(reason)
    out, options = tmp_path / "out", ["--training.local_batch_size", "1", *COMMON]
    argv = ["--job.config_file", str(run_toml), "--job.dump_folder", str(out), *options, *ELASTIC]
    argv = [str(ROOT / "train.py"), *argv]
    with Network(tmp_path) as network:
        for number in range(3):
            network.start(number, "1:3", *argv)
        wait_for_step(network, out, 25)
        first = next(n for n in range(3) if "default job" in network.log(n))  # it has rank 0
        network.kill(first)
        lost = wait_for_return(network, out, 1)
        network.start(first, "1:3", *argv)
        joined = wait_for_return(network, out, 2)
    name = f"machine{first}"
    assert [lost[key] for key in ("left", "joined", "ranks_before", "ranks")] == [name, "", 3, 2]
    assert [joined[key] for key in ("left", "joined", "ranks_before", "ranks")] == ["", name, 2, 3]
    assert lost["lost_steps"] <= 20 and joined["lost_steps"] == 0
    check_curve(run_toml, tmp_path, options)


DENSE = """
    { ranks = 4, tensor_parallel_degree = 2, pipeline_parallel_degree = 2, local_batch_size = 2 },
    { ranks = 3, data_parallel_replicate_degree = 3, data_parallel_shard_degree = 1 },
    { ranks = 2, context_parallel_degree = 2 },
"""
EXPERTS = """
    { ranks = 4, data_parallel_replicate_degree = 2, expert_parallel_degree = 2 },
    { ranks = 3, expert_parallel_degree = 3 },
    { ranks = 2, tensor_parallel_degree = 2, expert_parallel_degree = 2 },
"""
# all experts are active: in hundreds of steps, rounding would change which are selected
EXPERT_SIZES = 'name = "mixtral"\nexpert_hidden_dim = 24\nn_experts = 6\nn_active_experts = 6'


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [DENSE, EXPERTS], ids=["dense", "experts"])
def test_many_lost_machines_do_not_show_in_the_losses(run_toml, tmp_path, request, layouts):
    """As many as `--layouts`, one or two at once, with memory checkpoints."""
    if reason := why_no_machines():
        pytest.skip(reason)
    out, faults, draw = tmp_path / "out", request.config.getoption("--layouts"), random.Random(1)
    options = ["--training.local_batch_size", "1", *COMMON]
    if layouts is EXPERTS:
        run_toml.write_text(run_toml.read_text().replace("hidden_dim = 64", EXPERT_SIZES))
    elastic = tmp_path / "elastic.toml"
    elastic.write_text(f"{run_toml.read_text()}[elastic]\nlayouts = [{layouts}]")
    job = ["--job.config_file", str(elastic), "--job.dump_folder", str(out)]
    argv = [str(ROOT / "train.py"), *job, *options, *ELASTIC, "--checkpoint.memory_interval", "3"]
    argv += ["--job.max_crashes", "0", "--parallelism.pipeline_parallel_microbatch_size", "1"]
    dead, returns, lost_steps = set(), 0, []
    with Network(tmp_path) as network:
        for number in range(4):
            network.start(number, "2:4", *argv)
        wait_for_step(network, out, 10)
        while faults > 0:
            if dead and (len(dead) == 2 or draw.random() < 0.5):
                network.start(number := dead.pop(), "2:4", *argv)
                wait_for_return(network, out, returns := returns + 1)
                continue
            count = draw.randint(1, 2 - len(dead))
            for number in draw.sample(sorted(network.machines), count):
                network.kill(number)
                dead.add(number)
            faults -= count
            event = wait_for_return(network, out, returns := returns + 1)
            lost_steps.append((count, event["lost_steps"]))
    print(lost_steps, events_of(out, "returned"))
    assert all(lost <= (3 if count == 1 else 20) + 1 for count, lost in lost_steps), lost_steps
    check_curve(run_toml, tmp_path, options)
