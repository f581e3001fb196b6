"""Starts evaluations of checkpoints, one after the other, and reports their results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import titanlite
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.checkpoint.manifest import weights_hash
from titanlite.distributed.rendezvous import environment_without_launcher
from titanlite.errors import CheckpointError, ConfigError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.metrics import MetricSinks
from titanlite.storage import StorageFolder
from titanlite.training.evaluation.config import EvaluationConfig


@dataclass(frozen=True)
class _Process:
    """A running evaluation of the checkpoint of a step."""

    step: int
    process: subprocess.Popen[bytes]
    result: Path
    log: Path
    deadline: float  # of time.monotonic()


class CheckpointEvaluator:
    """Evaluates checkpoints one after the other; on rank 0 of a run.

    If several are waiting, the newest one is evaluated.
    """

    def __init__(
        self,
        config: EvaluationConfig,
        folder: Path,
        folder_of_step: Callable[[int], StorageFolder],
        sinks: MetricSinks,
    ):
        """`folder` is where results and logs are written."""
        self._config, self._folder, self._sinks = config, folder, sinks
        self._folder_of_step = folder_of_step
        self._waiting: int | None = None
        self._running: _Process | None = None

    @property
    def busy(self) -> bool:
        """Whether an evaluation is running or waiting."""
        return self._running is not None or self._waiting is not None

    def check_tasks(self) -> None:
        """Raise ConfigError if the tasks cannot be loaded."""
        command = [*self._command(), "--check-tasks", "--tasks", *self._config.tasks]
        run = subprocess.run(command, env=_environment(self._config), capture_output=True)
        if run.returncode:
            reason = _last_message(run.stderr.decode(errors="replace"))
            raise ConfigError(
                f"evaluation.tasks = {self._config.tasks}: {reason}", keys=("evaluation.tasks",)
            )

    def resume(self, step: int) -> None:
        """Evaluate the newest checkpoint up to `step` that is due, unless it has been evaluated.

        Whatever is under way for later steps is given up.
        """
        if self._running and self._running.step > step:
            self.stop()
        self._waiting = None
        due = step - step % self._config.freq
        if not due or (self._running and self._running.step == due):
            return
        try:
            manifest = read_checkpoint_manifest(self._folder_of_step(due))
        except CheckpointError:  # removed since
            return
        if _evaluated_weights(self._result_of(due)) != weights_hash(manifest):
            self._waiting = due

    def add(self, step: int) -> None:
        """Evaluate the checkpoint of `step` as soon as it is committed and no other is running."""
        if self._waiting is not None:
            running = self._running.step if self._running else None
            logger.warning(
                "evaluation of step %s skipped: that of step %s is still running",
                self._waiting,
                running,
            )
        self._waiting = step

    def poll(self, is_saving: bool) -> None:
        """Report the evaluation that has ended, and start the next one; does not wait."""
        if self._running and self._has_ended(self._running):
            self._running = None
        if self._running is None and self._waiting is not None and not is_saving:
            step, self._waiting = self._waiting, None
            folder = self._folder_of_step(step)
            try:
                read_checkpoint_manifest(folder)
            except CheckpointError:  # the save failed, which is reported already
                return
            self._running = self._start(step, folder)

    def stop(self) -> None:
        """End the running evaluation, whose result is lost."""
        if self._running:
            _kill(self._running.process)
        self._running = self._waiting = None

    def _result_of(self, step: int) -> Path:
        return self._folder / f"step-{step}.json"

    def _command(self) -> list[str]:
        return [sys.executable, "-m", "titanlite_lab.evaluation"]

    def _start(self, step: int, checkpoint: StorageFolder) -> _Process:
        config, result = self._config, self._result_of(step)
        log = result.with_suffix(".log")
        result.parent.mkdir(parents=True, exist_ok=True)
        result.unlink(missing_ok=True)
        command = [*self._command(), str(checkpoint), "--tasks", *config.tasks, "--background"]
        command += ["--limit", str(config.limit), "--batch-size", str(config.batch_size)]
        command += ["--device", config.device, "--threads", str(config.threads)]
        command += ["--out", str(result.resolve())]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command,
                env=_environment(config),
                stdin=subprocess.PIPE,  # closed when this process ends, which ends the other
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends the other
            )
        return _Process(step, process, result, log, time.monotonic() + config.timeout_seconds)

    def _has_ended(self, running: _Process) -> bool:
        """Whether the process has ended; its result is then written to the sinks."""
        code = running.process.poll()
        if code is None:
            if time.monotonic() < running.deadline:
                return False
            _kill(running.process)
            reason = f"takes more than evaluation.timeout_seconds = {self._config.timeout_seconds}"
            self._fail(running, reason)
            return True
        _close_stdin(running.process)
        try:
            if code:
                log = running.log.read_text("utf-8", errors="replace")
                reason = _last_message(log) or f"exit code {code}"
                self._fail(running, reason)
            else:
                self._report(running.step, parse_json(running.result.read_bytes()))
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            self._fail(running, f"its result cannot be read ({error})")
        return True

    def _report(self, step: int, result: dict[str, Any]) -> None:
        for name, scores in result["tasks"].items():
            fields = {"documents": scores["documents"], "seconds": result["seconds"]}
            self._sinks.event(step, "evaluation", name=name, **scores["values"], **fields)

    def _fail(self, running: _Process, reason: str) -> None:
        self._sinks.event(running.step, "evaluation_failed", reason=reason, path=str(running.log))


def _environment(config: EvaluationConfig) -> dict[str, str]:
    """The environment of an evaluation: as this one, but it is not a rank of the run."""
    package = str(Path(titanlite.__file__).parents[1])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = environment_without_launcher()
    own |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": str(config.threads)}
    if config.device == "cpu":
        own["CUDA_VISIBLE_DEVICES"] = ""  # even an idle CUDA context takes memory
    return own


def _evaluated_weights(result: Path) -> str | None:
    """The hash of the weights that a result is about; None if there is no result."""
    try:
        return json.loads(result.read_bytes())["weights"]
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _last_message(log: str) -> str:
    """The error that a log ends with."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("titanlite:")]
    return (own or lines or [""])[-1].removeprefix("titanlite:").strip()[:500]


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    _close_stdin(process)


def _close_stdin(process: subprocess.Popen[bytes]) -> None:
    if process.stdin is not None:
        process.stdin.close()
