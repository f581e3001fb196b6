"""A run that loses whole machines, and gets them back, has the losses of an undisturbed one."""

from __future__ import annotations

import time

import pytest

from conftest import HANG_SECONDS, ROOT
from tests.faults.launch import LaunchedRun, events_of, lines_of
from tests.faults.machines import Network, why_no_machines

STEPS = 60


def wait_for_step(network: Network, out, step: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not any("event" not in line and line["step"] >= step for line in lines_of(out)):
        logs = "\n".join(network.log(number) for number in network.machines)
        assert time.monotonic() < deadline, logs
        assert all(machine.poll() is None for machine in network.machines.values()), logs
        time.sleep(0.05)


def undisturbed(run_toml, folder, steps: int, options: list[str]) -> list[dict]:
    """The step lines of one process that trains as long."""
    argv = ["--job.config_file", str(run_toml), "--job.dump_folder", str(folder), *options]
    with LaunchedRun(1, folder, *argv, "--training.steps", str(steps)) as run:
        assert run.wait() == [0], run.output
    return [line for line in lines_of(folder) if "event" not in line]


@pytest.mark.slow
def test_a_lost_machine_and_its_return_do_not_show_in_the_losses(run_toml, tmp_path):
    if reason := why_no_machines():
        pytest.skip(reason)
    out = tmp_path / "out"
    options = "--training.steps 100000 --lr_scheduler.total_steps 100000 --checkpoint.interval 20"
    options += " --training.global_batch_size 7 --training.local_batch_size 1"
    options += " --elastic.enable true --elastic.lost_after_seconds 5"
    options += " --validation.enable false --checkpoint.keep_latest_k 2"
    argv = ["--job.config_file", str(run_toml), "--job.dump_folder", str(out), *options.split()]
    with Network(tmp_path) as network:
        for number in range(3):
            network.start(number, "1:3", str(ROOT / "train.py"), *argv)
        wait_for_step(network, out, 25)
        first = next(n for n in range(3) if "default job" in network.log(n))  # it has rank 0
        lost_at = max(line["step"] for line in lines_of(out))
        network.kill(first)
        wait_for_step(network, out, lost_at + 10)
        network.start(first, "1:3", str(ROOT / "train.py"), *argv)
        while len(events_of(out, "resumed")) < 2:
            wait_for_step(network, out, 0)
            time.sleep(0.1)
        wait_for_step(network, out, max(line["step"] for line in lines_of(out)) + 10)
    name = f"machine{first}"
    changes = [
        (e["left"], e["joined"], e["ranks_before"], e["ranks"]) for e in events_of(out, "returned")
    ]
    assert changes == [(name, "", 3, 2), ("", name, 2, 3)]
    lost, joined = events_of(out, "returned")
    assert lost["lost_steps"] <= 20 and joined["lost_steps"] == 0
    lines = [line for line in lines_of(out) if "event" not in line]
    alone = undisturbed(run_toml, tmp_path / "alone", lines[-1]["step"], options.split())
    assert [line["step"] for line in lines] == [line["step"] for line in alone]
    for key in ("loss", "grad_norm"):
        assert [d[key] for d in lines] == pytest.approx([d[key] for d in alone], rel=1e-5), key
    for key in ("lr", "tokens", "samples"):
        assert [d[key] for d in lines] == [d[key] for d in alone], key
