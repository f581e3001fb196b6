"""The error of a rank is printed, and its exit code kept, even if leaving the group blocks."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from functools import partial

import pytest
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.faults.launch import LaunchedRun
from titanlite.checkpoint.tensor_writer import CollectiveSave
from titanlite.distributed import error_report, process_group
from titanlite.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USER_ERROR, DataError
from titanlite.runtime import watchdog

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


def test_a_user_error_of_one_rank_does_not_wait_for_rank_0(run_toml, tmp_path):
    """Rank 0 never prints it; meanwhile, nobody would end the other ranks."""
    argv = ("--job.config_file", str(run_toml), "--validation.enable", "false")
    prepare = partial(fail_on_rank_1, ERRORS["an error of the user"][0])
    began = time.monotonic()
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=prepare) as run:
        assert run.wait() == [1, EXIT_USER_ERROR], run.output
    assert time.monotonic() - began < error_report.RANK_0_SECONDS, "rank 1 waited for rank 0"
    assert run.output.count("an injected error.\n") == 1, run.output
    assert "rank 1: titanlite: an injected error.\n" in run.output
    assert "Traceback" not in run.output


def test_a_rank_that_dies_before_the_watchdog_runs_is_not_reported_as_a_bug(run_toml, tmp_path):
    """gloo connects the ranks only then, so this is where the others notice."""
    argv = ("--job.config_file", str(run_toml), "--comm.init_timeout_seconds", "5")
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=die_after_joining) as run:
        assert run.wait() == [1, -signal.SIGKILL], run.output
    assert "Traceback" not in run.output
    assert reports_that_connecting_failed(run.output), run.output


def die_after_joining() -> None:
    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    if os.environ["RANK"] == "1":
        watchdog.connect_ranks = die


def test_a_rank_that_freezes_before_the_watchdog_runs_does_not_block_the_others(run_toml, tmp_path):
    argv = ("--job.config_file", str(run_toml), "--comm.init_timeout_seconds", "5")
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=freeze_after_joining) as run:
        assert run.wait(40, excluded=(1,))[0] == 1, run.output
    assert reports_that_connecting_failed(run.output), run.output


def reports_that_connecting_failed(output: str) -> bool:
    """Whether rank 0 reports it: gloo fails, or the time limit ends the rank."""
    of_gloo = "titanlite: Rank 0 of 2 reached the store at 127.0.0.1:"
    return "rank 0: connecting to the other ranks has taken 10 s" in output or (
        of_gloo in output and "Check whether another rank failed before" in output
    )


def freeze_after_joining() -> None:
    if os.environ["RANK"] == "1":
        watchdog.connect_ranks = lambda: os.kill(os.getpid(), signal.SIGSTOP)


def test_an_error_of_all_ranks_keeps_its_code_if_the_store_is_gone(run_toml, tmp_path):
    argv = ("--job.config_file", str(run_toml), "--validation.enable", "false")
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=fail_without_a_store) as run:
        assert run.wait() == [EXIT_USER_ERROR] * 2, run.output
    assert run.output.count("an injected error.\n") == 1 and "Traceback" not in run.output


def fail_without_a_store() -> None:
    """Raise an error on all ranks; the store then disappears."""
    dist.PrefixStore.set = lose_store
    dist.PrefixStore.wait = lose_store

    def fail(*_) -> None:
        raise ERRORS["an error of the user"][0].mark_on_all_ranks()

    register_optimizer_step_pre_hook(fail)


def lose_store(*_) -> None:
    raise dist.DistNetworkError("Connection reset by peer")


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_bug_of_one_rank_in_a_save_is_printed_with_its_traceback(mode, run_toml, tmp_path):
    """The other ranks wait for it inside the save."""
    argv = ("--job.config_file", str(run_toml), "--validation.enable", "false")
    prepare = fail_in_save_on_rank_1
    out = tmp_path / "out"
    with LaunchedRun(2, out, *argv, "--checkpoint.async_mode", mode, prepare=prepare) as run:
        assert run.wait() == [1, EXIT_BUG], run.output
    assert run.output.count("an injected bug\n") == 1, run.output
    assert "rank 1 of 2:\nTraceback" in run.output and "rank 0 of 2" not in run.output
    assert "Rank 1 (" in run.output and "has left at step " in run.output


def fail_in_save_on_rank_1() -> None:
    """Fail where the ranks do not exchange errors."""

    def fail(*_) -> None:
        raise ERRORS["a bug"][0]

    if os.environ["RANK"] == "1":
        CollectiveSave.run = fail


def test_an_unsafe_compile_cache_is_reported_once(run_toml, tmp_path):
    folder = tmp_path / f"titanlite_{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    argv = ("--job.config_file", str(run_toml), "--compile.enable", "true")
    prepare = partial(use_temporary_folder, str(tmp_path))
    with LaunchedRun(2, tmp_path / "out", *argv, prepare=prepare) as run:
        assert run.wait() == [EXIT_USER_ERROR] * 2, run.output
    assert run.output.count(f"{folder}: other users can write to it") == 1, run.output
    assert "rank 0: " not in run.output and "Traceback" not in run.output


def use_temporary_folder(folder: str) -> None:
    tempfile.tempdir = folder
    os.environ.pop("TORCHINDUCTOR_CACHE_DIR", None)


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


def test_ctrl_c_while_rank_0_prints_an_error_is_not_a_bug(monkeypatch):
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(error_report.time, "sleep", interrupt)
    assert error_report.ErrorReport().finish(DataError("no such file.")) == EXIT_INTERRUPTED
