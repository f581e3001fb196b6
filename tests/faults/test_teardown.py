"""The error of a rank is printed, and its exit code kept, even if leaving the group blocks."""

from __future__ import annotations

import time
from functools import partial

import pytest
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.faults.launch import LaunchedRun
from titanlite.distributed import process_group
from titanlite.errors import EXIT_BUG, EXIT_USER_ERROR, DataError

ERRORS = {
    "a bug": (ValueError("an injected bug"), EXIT_BUG),
    "an error of the user": (DataError("an injected error."), EXIT_USER_ERROR),
}


def fail_and_block_in_teardown(error: Exception) -> None:
    """Raise an error in the first step; leaving the process group then blocks, as NCCL may."""

    def fail(*_) -> None:
        raise error

    def block(*_) -> None:
        print("leaving the process group", flush=True)
        time.sleep(600)

    register_optimizer_step_pre_hook(fail)
    dist.destroy_process_group = block
    dist.distributed_c10d._abort_process_group = block
    process_group.LEAVE_SECONDS = 1


@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_is_printed_before_a_teardown_that_blocks(kind, run_toml, tmp_path):
    error, code = ERRORS[kind]
    argv = ("--job.config_file", str(run_toml), "--validation.enable", "false")
    prepare = partial(fail_and_block_in_teardown, error)
    with LaunchedRun(1, tmp_path / "out", *argv, prepare=prepare) as run:
        assert run.wait() == [code], run.output
    printed, left, after = run.output.partition("leaving the process group\n")
    assert left and str(error) in printed and str(error) not in after, run.output
    if kind == "a bug":
        assert "rank 0 of 1:\nTraceback" in printed
        assert "in take_step" in printed
    assert "rank 0: aborting collectives has taken 1 s, and is in" in after


def test_an_error_of_one_rank_is_printed_by_that_rank_only(run_toml, tmp_path):
    """The other rank reports that it lost this one."""
    argv = ("--job.config_file", str(run_toml), "--validation.enable", "false")
    prepare = partial(fail_on_rank_1, ERRORS["a bug"][0])
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=prepare) as run:
        assert run.wait() == [1, EXIT_BUG], run.output
    assert run.output.count("an injected bug\n") == 1 and "rank 1 of 2:\nTraceback" in run.output
    assert "rank 0 of 2" not in run.output
    assert "Rank 1 (" in run.output and "has left at step " in run.output


def fail_on_rank_1(error: Exception) -> None:
    def fail(*_) -> None:
        if dist.get_rank() == 1:
            raise error

    register_optimizer_step_pre_hook(fail)


def test_the_exit_code_stays_if_collectives_cannot_be_aborted(run_toml, tmp_path):
    """As after an illegal memory access, when every later call to CUDA fails."""
    error, code = ERRORS["an error of the user"]
    argv = ("--job.config_file", str(run_toml), "--validation.enable", "false")
    prepare = partial(fail_twice, error)
    with LaunchedRun(1, tmp_path / "out", *argv, prepare=prepare) as run:
        assert run.wait() == [code], run.output
    assert "collectives could not be aborted: CUDA error" in run.output
    assert "Traceback" not in run.output


def fail_twice(error: Exception) -> None:
    """Raise an error in the first step, and another one in teardown."""

    def fail(*_) -> None:
        raise error

    def fail_to_abort(*_) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    register_optimizer_step_pre_hook(fail)
    dist.distributed_c10d._abort_process_group = fail_to_abort
