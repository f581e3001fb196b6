"""Evaluate checkpoints of a run on downstream tasks, each in a process of its own.

Only rank 0 starts processes, and training waits for one after its last step only. So an evaluation
cannot change a bit of training, and its crash or its memory cannot end the run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from titanlite.checkpoint import CheckpointConfig, read_checkpoint_manifest
from titanlite.checkpoint.manifest import weights_hash
from titanlite.distributed.collectives import AsyncMax
from titanlite.errors import CheckpointError, ConfigError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.metrics import MetricSinks
from titanlite.settings import NotNegative, Positive
from titanlite.storage import StorageFolder
from titanlite.training.periodic import PeriodicAction, StepInfo

POLL_SECONDS = 1.0  # between two looks at the process, after the last step
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
# of the environment; with them, an evaluation would take itself for a rank of this run


@dataclass(frozen=True)
class EvaluationConfig:
    """[evaluation] Evaluating checkpoints on downstream tasks while training, with lm-eval."""

    enable: bool = False  # evaluate checkpoints of the run, in a process of its own
    freq: Positive = 1000
    # steps between two evaluated checkpoints, a multiple of checkpoint.interval; the last
    # checkpoint is evaluated too
    tasks: list[str] = field(default_factory=lambda: ["python"])
    # tasks of titanlite (python: all of them), tasks of lm-eval, or YAML files of tasks
    limit: NotNegative = 0  # documents of each task; 0: all
    batch_size: Positive = 8  # texts of one forward pass
    device: Literal["cpu", "cuda"] = "cpu"  # cuda: the GPU of rank 0, which needs free memory
    threads: Positive = 1  # CPU threads of the evaluation
    timeout_seconds: Positive = 3600  # limit for one evaluation, also after the last step


def check_evaluation_config(
    config: EvaluationConfig, checkpoint: CheckpointConfig, tokenizer: str | None
) -> Iterator[ConfigError]:
    """Reject settings under which nothing could be evaluated."""
    if not config.enable:
        return
    if not checkpoint.saves:
        yield _evaluation_error(
            "enable = true: the run saves no checkpoints, so there is nothing to evaluate.",
            "Set checkpoint.enable = true.",
            "enable",
        )
    if tokenizer is None:
        yield _evaluation_error(
            "enable = true: tasks are text, and data.tokenizer is not set.",
            "Set data.tokenizer.",
            "enable",
        )
    if config.freq % checkpoint.interval:
        below = config.freq - config.freq % checkpoint.interval
        nearest = [str(n) for n in (below, below + checkpoint.interval) if n]
        yield _evaluation_error(
            f"freq = {config.freq}: is not a multiple of checkpoint.interval ="
            f" {checkpoint.interval}.",
            f"Use {' or '.join(nearest)}.",
            "freq",
        )
    if not config.tasks:
        yield _evaluation_error("tasks = []: there is no task.", 'Use ["python"].', "tasks")
    if importlib.util.find_spec("lm_eval") is None:
        yield _evaluation_error(
            "enable = true, but lm-eval is not installed.",
            "pip install 'titanlite[eval]'",
            "enable",
        )


def _evaluation_error(problem: str, fix: str, key: str) -> ConfigError:
    return ConfigError(f"evaluation.{problem}", fix=fix, keys=(f"evaluation.{key}",))


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
        """Evaluate the newest checkpoint up to `step` that should have been evaluated, but was not.

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
        return [sys.executable, "-m", "titanlite.evaluation"]

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


def evaluate_checkpoints(
    evaluator: CheckpointEvaluator | None,
    freq: int,
    is_writing: Callable[[], bool],
    stop_reason: Callable[[], int],
    max_over_ranks: AsyncMax,
    set_phase: Callable[[int, str], None],
) -> PeriodicAction:
    """Evaluate the checkpoints of every `freq` steps, and the last one; `evaluator`: on rank 0.

    `is_writing`: whether this rank is still writing a checkpoint. After the last step the ranks
    wait for the evaluation, until one has a `stop_reason`.
    """

    def look(info: StepInfo) -> None:
        if evaluator is None:
            return
        if info.stop_reason:
            evaluator.stop()  # the next start evaluates that checkpoint
            return
        if info.is_last or info.step % freq == 0:
            evaluator.add(info.step)
        evaluator.poll(is_writing())

    def agree() -> tuple[int, int]:
        """(whether rank 0 is evaluating, why the run is to stop), on all ranks."""
        max_over_ranks.start(evaluator is not None and evaluator.busy, stop_reason())
        busy, reason = max_over_ranks.wait()
        return busy, reason

    def run(info: StepInfo) -> None:
        look(info)
        if info.stop_reason or not info.is_last:
            return
        busy, reason = agree()
        while busy and not reason:
            set_phase(info.step, "evaluate")
            time.sleep(POLL_SECONDS)
            if evaluator is not None:
                evaluator.poll(is_writing())
            busy, reason = agree()
        if evaluator is not None:
            evaluator.stop()

    def start_again(step: int) -> None:
        if evaluator is not None:
            evaluator.resume(step)

    return PeriodicAction("evaluate", lambda info: True, run, start_again=start_again)


def _environment(config: EvaluationConfig) -> dict[str, str]:
    """The environment of an evaluation: as this one, but it is not a rank of the run."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        key: value
        for key, value in os.environ.items()
        if key not in LAUNCHER_VARIABLES and not key.startswith(("MASTER_", "TORCHELASTIC_"))
    }
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
