"""A run that hangs writes the last collectives of every rank before it ends, or ends without."""

from __future__ import annotations

import ctypes
import os
import pickle
import subprocess
import time

import torch

from conftest import HANG_SECONDS
from tests.faults.launch import LaunchedRun
from titanlite.distributed.flight_recorder import FlightRecorder
from titanlite.runtime import watchdog
from titanlite.training import step as training_step

HANGING_STEP = 3


def hang_on_rank_1() -> None:
    """Block rank 1 before it clips gradients; rank 0 waits for it in the sum of their norms."""
    clip, steps = training_step.clip_gradients, []

    def block_and_clip(*args, **options):
        steps.append(None)
        if len(steps) == HANGING_STEP and os.environ["RANK"] == "1":
            time.sleep(600)
        return clip(*args, **options)

    training_step.clip_gradients = block_and_clip


def hang_in_the_recorder_too() -> None:
    """Block in the recorder of torch as a GPU that hangs does: in C, and with the GIL."""
    hang_on_rank_1()
    torch._C._distributed_c10d._dump_fr_trace = lambda: ctypes.PyDLL(None).pause()
    watchdog.TRACES_SECONDS = 1


def run_until_it_hangs(run_toml, out, prepare) -> str:
    """The output of a run that the watchdog ends."""
    argv = (
        *("--job.config_file", str(run_toml), "--job.dump_folder", str(out)),
        *("--validation.enable", "false", "--comm.train_timeout_seconds", "6"),
    )
    with LaunchedRun(2, out, *argv, prepare=prepare) as run:
        assert run.wait() == [1, 1], run.output
    assert f"All 2 ranks have been in step {HANGING_STEP}, step for" in run.output
    assert {file.name for file in (out / "stacks").iterdir()} == {"rank_0.txt", "rank_1.txt"}
    return run.output


def test_a_hang_writes_the_collectives_of_every_rank_and_says_how_to_read_them(
    python, run_toml, tmp_path
):
    out = tmp_path / "out"
    output = run_until_it_hangs(run_toml, out, hang_on_rank_1)
    folder = out / "comm_traces" / "cpu"
    assert (
        output.count(f"  last collectives of each rank, to compare: torchfrtrace {folder}\n") == 1
    )
    traces = {file.name: pickle.loads(file.read_bytes()) for file in folder.iterdir()}
    assert set(traces) == {"rank_0", "rank_1"}
    # rank 0 has issued collectives that rank 1 has not
    counts = [len(traces[f"rank_{rank}"]["entries"]) for rank in (0, 1)]
    assert counts[0] > counts[1] > 0
    frames = [frame for entry in traces["rank_0"]["entries"] for frame in entry["frames"]]
    assert any("titanlite" in frame["filename"] for frame in frames)

    if torch.__version__.startswith("2.11."):
        return  # its analyzer reads traces of NCCL only
    command = [python, "-m", "torch.distributed.flight_recorder.fr_trace", str(folder)]
    analyzed = subprocess.run(command, capture_output=True, text=True, timeout=HANG_SECONDS)
    assert analyzed.returncode == 0, analyzed.stderr
    report = analyzed.stdout + analyzed.stderr
    assert "Not all ranks joining collective" in report and "missing ranks: {1}" in report


def test_a_recorder_that_hangs_does_not_keep_a_rank_alive(run_toml, tmp_path):
    out = tmp_path / "out"
    run_until_it_hangs(run_toml, out, hang_in_the_recorder_too)
    assert not list((out / "comm_traces").rglob("rank_*"))


def test_traces_of_an_earlier_start_are_set_aside(tmp_path):
    """The analyzer reads all files of a folder; those of two starts do not fit together."""
    recorder = FlightRecorder(tmp_path / "traces", 100)
    folder = tmp_path / "traces" / "cpu"
    folder.mkdir(parents=True)
    for start in ("first", "second"):
        (folder / "rank_0").write_text(start)
        (folder / "rank_note").write_text("of the user")
        recorder.enable(torch.device("cpu"), rank=1)  # only rank 0 moves files
        assert (folder / "rank_0").exists()
        recorder.enable(torch.device("cpu"), rank=0)
        assert [file.name for file in folder.iterdir()] == ["rank_note"]
        assert (tmp_path / "traces_before" / "cpu" / "rank_0").read_text() == start
