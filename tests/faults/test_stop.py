"""A run that is asked to stop saves and exits, and the same command resumes it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from conftest import HANG_SECONDS, ROOT
from tests.faults.launch import LaunchedRun, events_of, lines_of, steps_of
from titanlite.runtime.stop import SECOND_CTRL_C_SECONDS

LONG = ("--training.steps", "2000", "--checkpoint.interval", "1000", "--validation.enable", "false")


def argv_of(run_toml, *argv) -> tuple[str, ...]:
    return ("--job.config_file", str(run_toml), *argv)


@pytest.mark.parametrize(
    "number, rank, ranks", [(signal.SIGTERM, 2, 4), (signal.SIGUSR1, 1, 2), (signal.SIGUSR2, 0, 1)]
)
def test_a_signal_to_any_one_rank_saves_the_run_and_ends_all_ranks(
    number, rank, ranks, run_toml, tmp_path
):
    out = tmp_path / "out"
    with LaunchedRun(ranks, out, *argv_of(run_toml, *LONG)) as run:
        run.wait_for(lambda: len(steps_of(out)) > 3)
        seen = max(steps_of(out))
        run.signal(rank, number)
        assert run.wait() == [75] * ranks, run.output
    last = max(steps_of(out))
    # the step in which the signal arrives, and one whose all-reduce may have started
    assert last - seen <= 4
    assert [e["step"] for e in events_of(out, "checkpoint_saved")] == [last]
    assert [(e["step"], e["reason"]) for e in events_of(out, "stopped")] == [(last, number.name)]
    if number == signal.SIGTERM:
        steps = ("--training.steps", str(last + 2))
        with LaunchedRun(
            2, out, *argv_of(run_toml, *steps, "--lr_scheduler.total_steps", "2000")
        ) as run:
            assert run.wait() == [0, 0], run.output
        assert steps_of(out) == list(range(1, last + 3))
        assert [e["step"] for e in events_of(out, "resumed")] == [last]


def test_a_run_saves_and_ends_before_its_time_limit(run_toml, tmp_path):
    out, began = tmp_path / "out", time.monotonic()
    with LaunchedRun(2, out, *argv_of(run_toml, *LONG, "--job.time_limit_minutes", "0.08")) as run:
        assert run.wait() == [75] * 2, run.output
    assert time.monotonic() - began < 90  # all its steps would take minutes
    last = max(steps_of(out))
    assert [e["step"] for e in events_of(out, "checkpoint_saved")] == [last]
    assert events_of(out, "stopped")[0]["reason"] == "time_limit"


def signal_in(step: int, kill_in_validation: bool = False) -> None:
    """Send SIGTERM to this rank before `step`; with `kill_in_validation`, SIGKILL after it."""
    from titanlite.runtime import StopRequest
    from titanlite.training.spmd_engine import SpmdEngine

    reason, evaluate, calls = StopRequest.reason, SpmdEngine.evaluate, []

    def reason_after_signal(self, seconds):
        calls.append(seconds)  # the first call is before the first step
        if len(calls) == step + 1:
            os.kill(os.getpid(), signal.SIGTERM)
            while not self.received:
                time.sleep(0.01)
        return reason(self, seconds)

    def evaluate_or_die(self, *batch):
        if kill_in_validation and len(calls) > step:
            os.kill(os.getpid(), signal.SIGKILL)
        return evaluate(self, *batch)

    StopRequest.reason, SpmdEngine.evaluate = reason_after_signal, evaluate_or_die


def validations_of(out) -> list[tuple]:
    return [(e["step"], e["loss"]) for e in events_of(out, "validation")]


def test_a_run_that_is_stopped_has_the_validations_of_an_undisturbed_one(run_toml, tmp_path):
    def train(name, prepare=None) -> list:
        argv = argv_of(run_toml, "--job.dump_folder", str(tmp_path / name))
        argv += ("--training.local_batch_size", "4")
        with LaunchedRun(2, tmp_path / name, *argv, prepare=prepare) as run:
            return run.wait()

    assert train("undisturbed") == [0, 0]
    expected = validations_of(tmp_path / "undisturbed")
    assert [s for s, _ in expected] == [3, 6]
    for step, killed in ((3, False), (6, False), (6, True)):
        name = f"stopped {step} {killed}"
        codes = train(name, partial(signal_in, step, killed))
        if killed:
            assert -signal.SIGKILL in codes
        else:
            assert codes == [75 if step < 6 else 0] * 2
        assert steps_of(tmp_path / name) == list(range(1, step + 1))
        for _ in range(1 if killed else 2):  # the second start has nothing to do
            assert train(name) == [0, 0]
        assert validations_of(tmp_path / name) == expected


def test_a_resume_reports_the_settings_that_changed_since_the_checkpoint(run_toml, tmp_path):
    out, argv = tmp_path / "out", argv_of(run_toml, "--lr_scheduler.total_steps", "9")
    changed = {  # of each section that may change
        "optimizer.lr": 0.01,
        "optimizer.weight_decay": 0.0,
        "training.max_norm": 0.5,
        "training.mixed_precision_param": "bfloat16",
        "lr_scheduler.warmup_steps": 1,
        "loss.z_loss": 1e-3,
        "guard.nonfinite": "off",
    }
    layout = ("--parallelism.tensor_parallel_degree", "2", "--training.local_batch_size", "4")
    options = [text for key, value in changed.items() for text in (f"--{key}", str(value))][2:]
    (tmp_path / "base.toml").write_text("[optimizer]\nlr = 0.01\n")  # the first one
    (tmp_path / "changed.toml").write_text(f'include = ["{run_toml}", "base.toml"]\n')
    options += ["--job.config_file", str(tmp_path / "changed.toml")]
    options += ["--validation.enable", "false"]  # slow under tensor parallel
    resumed = ("--training.steps", "3"), ("--training.steps", "5", *layout, *options)
    for number, more in enumerate((*resumed, ("--training.steps", "5", *options))):
        with LaunchedRun(2 if number == 1 else 1, out, *argv[2 if number else 0 :], *more) as run:
            assert run.wait() == [0] * len(run.processes), run.output
            assert run.output.count("changed since the checkpoint:") == (number == 1), run.output
            if number == 1:
                assert "optimizer.lr 0.0008 -> 0.01, " in run.output
    (event,) = events_of(out, "settings_changed")
    assert event["step"] == 3
    assert event["changes"].keys() == {*changed, "training.steps"}
    assert {key: new for key, (_, new) in event["changes"].items()} == {
        **changed,
        "training.steps": 5,
    }


def stop_in_micro_batch(folder: str) -> None:
    """Steps of 2 s at least under a limit of 1 s: step 3 waits for a signal within it."""
    from titanlite.runtime import StopRequest
    from titanlite.training import loop

    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "1"}
    requests, phases = [], []
    reason, set_phase = StopRequest.reason, loop._Loop._set_phase

    def keep(self, seconds):
        requests.append(self)
        return reason(self, seconds)

    def wait_after_micro_batch(self, phase):
        step = self.run.state.step + 1
        phases.append((step, phase))
        if phase.startswith("forward"):
            time.sleep(0.4)
        if phases.count((3, phase)) == 2 and phase.startswith("forward"):
            Path(folder, f"in_step_3.{os.getpid()}").touch()
            while not requests[0].received:
                time.sleep(0.01)
        set_phase(self, phase)

    StopRequest.reason, loop._Loop._set_phase = keep, wait_after_micro_batch


@pytest.mark.parametrize("pipeline", [1, 2])
def test_a_step_that_torchrun_would_not_wait_for_is_abandoned_and_repeated(
    pipeline, run_toml, tmp_path
):
    layout = ("--parallelism.pipeline_parallel_degree", str(pipeline))
    if pipeline > 1:
        layout += ("--parallelism.pipeline_parallel_schedule", "1F1B")
    out, whole = tmp_path / "out", tmp_path / "whole"
    layout += ("--training.local_batch_size", str(pipeline), "--training.steps", "4")
    options = argv_of(run_toml, *layout, "--validation.enable", "false")
    started = partial(stop_in_micro_batch, str(tmp_path))
    with LaunchedRun(2, out, *options, "--checkpoint.interval", "100", prepare=started) as run:
        run.wait_for(lambda: len(list(tmp_path.glob("in_step_3.*"))) == 2)
        for rank in (0, 1):
            run.signal(rank, signal.SIGTERM)
        assert run.wait() == [75, 75], run.output
        assert "torchrun kills the ranks 1 s after the signal" in run.output
        assert "step 3 is abandoned" in run.output and "Traceback" not in run.output
    assert [e["step"] for e in events_of(out, "checkpoint_saved")] == [2]
    assert steps_of(out) == [1, 2]
    for folder in (out, whole):
        with LaunchedRun(2, folder, *options, "--job.dump_folder", str(folder)) as run:
            assert run.wait() == [0, 0], run.output
    runs = [
        [(e["step"], e["loss"], e["grad_norm"]) for e in lines_of(f) if "event" not in e]
        for f in (out, whole)
    ]
    assert runs[0] == runs[1]


SIGNALLED = """
import math, os, signal, sys, time
from titanlite.runtime.stop import StopRequest

request = StopRequest(limit_seconds=30.0)
request.install_handlers(lambda: None)
for number in map(int, sys.argv[1:]):
    began = time.monotonic()
    os.kill(os.getpid(), number)
    while request.received != number:
        time.sleep(0.001)
    print(math.isinf(request.seconds_left), request.limit_begins >= began)
"""


def test_only_signals_after_which_torchrun_kills_start_its_limit(python):
    numbers = [str(int(s)) for s in (signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2)]
    read_end, broken = os.pipe()  # as after `2>&1 | head`
    os.close(read_end)
    done = subprocess.run(
        [python, "-c", SIGNALLED, *numbers],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=broken,
        text=True,
        timeout=HANG_SECONDS,
    )
    os.close(broken)
    assert done.stdout.splitlines() == ["True True", "False True", "False False"]


def block_save(fifo: str) -> None:
    """Make the save of step 3 wait in a system call until the FIFO is written to."""
    from titanlite.storage import StorageFolder

    fsync_folder, blocked = StorageFolder.fsync_folder, []

    def wait_and_fsync(self) -> None:
        if self.name == "step-3" and not blocked:
            blocked.append(True)
            print("slow disk", flush=True)
            with open(fifo, "rb") as stream:
                stream.read()
        fsync_folder(self)

    StorageFolder.fsync_folder = wait_and_fsync


@pytest.mark.parametrize("second", [None, signal.SIGINT, signal.SIGTERM], ids=str)
def test_ctrl_c_in_a_save_finishes_it_and_a_second_one_ends_immediately(second, run_toml, tmp_path):
    out, fifo = tmp_path / "out", tmp_path / "fifo"
    os.mkfifo(fifo)
    argv = argv_of(run_toml, "--training.steps", "5", "--validation.enable", "false")
    with LaunchedRun(1, out, *argv, prepare=partial(block_save, str(fifo))) as run:
        run.wait_for(lambda: "slow disk" in run.output)
        run.signal(0, signal.SIGINT)
        run.wait_for(lambda: "a second Ctrl-C ends" in run.output)
        if second:
            time.sleep(SECOND_CTRL_C_SECONDS)
            run.signal(0, second)  # torchrun forwards it as SIGTERM
        else:
            fifo.write_bytes(b"")
        assert run.wait() == [130 if second else 75], run.output
        assert "Traceback" not in run.output and "checkpoint failed" not in run.output
    end = json.loads((out / "starts.jsonl").read_text().splitlines()[-1])
    assert (end["event"], end["code"]) == ("end", 130 if second else 75)
    with LaunchedRun(1, out, *argv) as run:
        assert run.wait() == [0], run.output
    # without a second Ctrl-C: the save of step 3, one more step that had started, and its save
    assert [e["step"] for e in events_of(out, "resumed")] == ([] if second else [4])
    assert steps_of(out) == [1, 2, 3, 4, 5]


def test_ctrl_c_without_checkpoints_ends_immediately_without_traceback(run_toml, tmp_path):
    out, argv = tmp_path / "out", argv_of(run_toml, *LONG, "--checkpoint.enable", "false")
    with LaunchedRun(1, out, *argv) as run:
        run.wait_for(lambda: len(steps_of(out)) > 1)
        run.signal(0, signal.SIGINT)
        assert run.wait() == [130], run.output
        assert "Traceback" not in run.output and "KeyboardInterrupt" not in run.output


def start_under_launcher(command: list, tmp_path, **more: str) -> subprocess.Popen:
    """Start a command that uses torchrun in its own process group, as a shell does."""
    path = f"{tmp_path}:{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PATH": path}
    with (tmp_path / "log").open("w") as log:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment | more,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def wait_for(process: subprocess.Popen, condition, tmp_path) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while not condition():
        assert process.poll() is None and time.monotonic() < deadline, (
            tmp_path / "log"
        ).read_text()
        time.sleep(0.05)


SRUN = """#!/usr/bin/env bash
# As SLURM does on one node: the task is in its own process group, which receives the signals.
while [[ $1 == -* ]]; do shift; done
setsid "$@" &
trap 'kill -USR1 -- -$!' USR1
while kill -0 $!; do wait $! && code=0 || code=$?; done 2>/dev/null
exit $code
"""
SCONTROL = """#!/usr/bin/env bash
echo "$@" > "$(dirname "$0")/requeued"
"""


def test_slurm_time_limit_saves_once_without_torchrun_restarts_and_requeues_the_job(
    run_toml, tmp_path, python
):
    out = tmp_path / "out"
    for name, script in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "1", "SLURM_STEP_NODELIST": "here"}
    slurm |= {"SLURM_STEP_NUM_NODES": "1", "SLURM_NODEID": "0"}
    limits = {"RANKS_PER_NODE": "2", "MAX_RESTARTS": "3", "PYTHON_EXEC": python}
    batch = ["bash", str(ROOT / "scripts" / "slurm.sh"), *argv_of(run_toml, *LONG)]
    process = start_under_launcher(batch, tmp_path, **slurm, **limits)
    wait_for(process, lambda: len(steps_of(out)) > 3, tmp_path)
    process.send_signal(signal.SIGUSR1)  # as `--signal=B:USR1@300` does, to the batch shell alone
    code, log = process.wait(HANG_SECONDS), (tmp_path / "log").read_text()
    assert code == 75 and log.count("already stopped in this launch") == 1, log
    assert [e["reason"] for e in events_of(out, "stopped")] == ["SIGUSR1"]
    starts = [json.loads(line) for line in (out / "starts.jsonl").read_text().splitlines()]
    assert [(line["event"], line.get("code")) for line in starts] == [("start", None), ("end", 75)]
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    last, total = max(steps_of(out)), ("--lr_scheduler.total_steps", "2000")
    with LaunchedRun(2, out, *argv_of(run_toml, "--training.steps", str(last + 1), *total)) as run:
        assert run.wait() == [0, 0], run.output  # the next launch resumes
    assert [e["step"] for e in events_of(out, "resumed")] == [last]


def test_ctrl_c_at_torchrun_saves_the_run(run_toml, tmp_path, python):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    argv = [*command, "train.py", *argv_of(run_toml, *LONG)]
    process = start_under_launcher(argv, tmp_path, PYTHON_EXEC=python)  # for its ranks
    wait_for(process, lambda: len(steps_of(out)) > 1, tmp_path)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    process.wait(HANG_SECONDS)
    log = (tmp_path / "log").read_text()
    assert json.loads((out / "starts.jsonl").read_text().splitlines()[-1])["code"] == 75, log
    assert [e["step"] for e in events_of(out, "checkpoint_saved")] == [max(steps_of(out))]
    assert log.count("a second Ctrl-C ends") == 1
