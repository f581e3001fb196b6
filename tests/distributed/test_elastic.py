"""A run goes on with the ranks that are present, with the same batches and losses."""

from __future__ import annotations

import signal
import time
from functools import partial
from types import SimpleNamespace

import pytest

from tests.distributed.test_train import losses_of, torchrun
from tests.faults.launch import LaunchedRun, events_of, lines_of, steps_of
from tests.faults.test_rollback import inject
from titanlite.elastic import spares
from titanlite_lab.drill.injector import NumericalFault

RAGGED = (  # 3 to 7 sequences of two sources, which 4 and 3 ranks cannot divide
    *("--elastic.enable=true", "--training.local_batch_size=1", "--validation.enable=false"),
    *("--training.global_batch_size=7", "--training.batch_size_ramp=0:3 300:5 700:7"),
    *("--lr_scheduler.total_steps=10", "--metrics.source_loss_freq=1"),
    *("--checkpoint.interval=2", "--guard.nonfinite=rollback", "--guard.rollback_steps=1"),
)
FAULT = NumericalFault("gradient", step=6, value="nan", times=2)  # the step and its replay
EIGHT_BIT = ("--optimizer.state_dtype=8bit", "--optimizer.implementation=for-loop")


@pytest.mark.parametrize("optimizer", [("--optimizer.name=Muon",), EIGHT_BIT], ids=["Muon", "8bit"])
def test_a_run_on_4_then_3_then_4_ranks_matches_one_process(
    run_toml, corpus, tmp_path, optimizer, request
):
    """With `--layouts 2`, also a roll-back on the last 4 ranks, then 2 ranks, then 4."""
    is_sweep = request.config.getoption("--layouts") > 1
    sources = (
        f'[{{ name = "code", path = "{corpus}/train", weight = 0.7 }},'
        f' {{ name = "optim", path = "{corpus}/validation", weight = 0.3 }}]'
    )
    whole, changed = tmp_path / "whole", tmp_path / "changed"

    def train(ranks: int, folder, steps: int) -> None:
        argv = ("--job.config_file", str(run_toml), "--job.dump_folder", str(folder))
        argv += (*RAGGED, *optimizer, "--data.sources", sources, "--training.steps", str(steps))
        prepare = partial(inject, FAULT) if is_sweep else None
        with LaunchedRun(ranks, folder, *argv, prepare=prepare) as run:
            assert run.wait() == [0] * ranks, run.output

    train(1, whole, 10 if is_sweep else 6)
    for ranks, steps in ((4, 2), (3, 4), (4, 6), *((2, 8), (4, 10))[: 2 * is_sweep]):
        train(ranks, changed, steps)
    assert len(events_of(changed, "rolled_back")) == is_sweep
    assert losses_of(changed) == pytest.approx(losses_of(whole), rel=1e-5)
    for name in ("samples", "tokens", "lr"):
        counted = [[x[name] for x in lines_of(f) if "event" not in x] for f in (whole, changed)]
        assert counted[0] == counted[1], name
    by_source = [events_of(folder, "source_losses") for folder in (whole, changed)]
    for expected, found in zip(*by_source, strict=True):
        assert found["tokens"] == expected["tokens"]
        for name, loss in expected["loss"].items():  # None: the source is not in this batch
            assert found["loss"][name] == (loss and pytest.approx(loss, rel=1e-5))


def spared(folder, run_toml, *argv) -> tuple[str, ...]:
    """Arguments of a run whose fifth rank is a spare."""
    own = ("--training.steps=12", "--validation.enable=false", "--training.local_batch_size=1")
    tensor = ("--elastic.enable=true", "--parallelism.tensor_parallel_degree=2")
    return ("--job.config_file", str(run_toml), f"--job.dump_folder={folder}", *own, *tensor, *argv)


def test_the_fifth_rank_of_torchrun_waits_as_a_spare_and_exits_with_the_run(
    run_toml, tmp_path, python
):
    _, _, *argv = spared(tmp_path / "out", run_toml, "--training.steps=2")
    run = torchrun(python, 5, run_toml, *argv)
    assert run.returncode == 0, run.stderr
    assert "ranks 4-4 wait as spares" in run.stderr + run.stdout
    assert "4 of 5 ranks work, 1 wait as spares; 0.0% of the" in run.stderr + run.stdout
    assert steps_of(tmp_path / "out") == [1, 2]


def ticks(pid: int) -> int:
    """CPU time of a process, in clock ticks."""
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13]))


def test_a_spare_exits_with_the_code_of_the_run_and_costs_no_cpu(run_toml, tmp_path):
    out = tmp_path / "out"
    with LaunchedRun(5, out, *spared(out, run_toml, "--training.steps=100000")) as run:
        run.wait_for(lambda: len(steps_of(out)) >= 2)
        before = [ticks(process.pid) for process in run.processes]
        run.wait_for(lambda: len(steps_of(out)) >= 8)
        spent = [ticks(p.pid) - old for p, old in zip(run.processes, before, strict=True)]
        assert spent[4] * 5 <= min(spent[:4]), spent
        run.signal(0, signal.SIGTERM)
        assert run.wait() == [75] * 5, run.output


def wait_in_milliseconds() -> None:
    """Let a spare take each of its waits of a second in some milliseconds."""
    spares.time = SimpleNamespace(sleep=lambda seconds: time.sleep(0.005))


def test_a_signal_ends_a_spare_at_once_and_the_run_goes_on(run_toml, tmp_path):
    """torchrun sends it before it restarts the ranks, and kills those that stay for 30 seconds.

    Until then the spare waits, even for a single rank, which sends no heartbeats.
    """
    out = tmp_path / "out"
    argv = spared(out, run_toml, "--parallelism.tensor_parallel_degree=1")
    argv += ("--elastic.layouts=[{ ranks = 1 }]", "--comm.init_timeout_seconds=100")
    with LaunchedRun(2, out, *argv, prepare=wait_in_milliseconds) as run:
        run.wait_for(lambda: len(steps_of(out)) >= 8)
        run.signal(1, signal.SIGUSR1)  # the ranks that work handle it
        time.sleep(0.1)
        run.signal(1, signal.SIGTERM)
        assert run.wait() == [0, 75], run.output
