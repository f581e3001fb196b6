"""Evaluate the checkpoints of a run as they appear, in a process beside the run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titanlite.checkpoint import (
    CheckpointConfig,
    checkpoint_folder,
    list_steps,
    read_checkpoint_manifest,
)
from titanlite.checkpoint.manifest import CheckpointManifest
from titanlite.errors import CheckpointError, ConfigError, UserError
from titanlite.files import parse_json, parse_toml
from titanlite.log import logger
from titanlite.metrics import MetricsConfig
from titanlite.storage import StorageFolder
from titanlite_lab.evaluation.results import EvaluationResult, weights_hash

EVALUATIONS_FILE = "evaluations.jsonl"  # in the folder of the run
POLL_SECONDS = 10.0  # between two looks at the folder of the checkpoints


@dataclass(frozen=True)
class Watch:
    """Which checkpoints of which run are evaluated."""

    run: Path  # its job.dump_folder
    every: int = 1  # steps: only checkpoints of a multiple, and that of the last step
    until: int | None = None  # end after the checkpoint of this step; None: of training.steps

    @property
    def file(self) -> Path:
        """Where the results are written: a JSON line for each task of a checkpoint."""
        return self.run / EVALUATIONS_FILE


def watch_run(watch: Watch, evaluate: Callable[[StorageFolder], EvaluationResult]) -> None:
    """Evaluate the newest checkpoint that is due until the last one is evaluated.

    A checkpoint whose weights the results have already is not evaluated again, so the same command
    continues after an interruption. Raises ConfigError for a folder that is not a run.
    """
    if not watch.run.is_dir():
        raise ConfigError(f"--watch {watch.run}: there is no such folder.", fix="Give a run.")
    failed: set[str] = set()  # weights, which are not tried twice
    while True:
        saved = list(_checkpoints(watch))  # once: the run may save another one meanwhile
        found = next(_due_checkpoints(watch, saved, failed), None)
        if found is None:
            if saved and saved[0][1].step >= _last_step(watch, saved[0][1]):
                return
            time.sleep(POLL_SECONDS)
            continue
        folder, manifest = found
        try:
            result = evaluate(folder)
        except UserError as error:  # for example, retention has removed it meanwhile
            logger.error("step %d: %s", manifest.step, error)
            failed.add(weights_hash(manifest))
            continue
        _append(watch, manifest.step, result)


def _due_checkpoints(
    watch: Watch, saved: list[tuple[StorageFolder, CheckpointManifest]], failed: set[str]
) -> Iterator[tuple[StorageFolder, CheckpointManifest]]:
    """The checkpoints of `saved` that are to be evaluated, the newest first."""
    done = {line["weights"] for line in read_evaluations(watch.run)} | failed
    for folder, manifest in saved:
        is_last = manifest.step == _last_step(watch, manifest)
        due = is_last or manifest.step % watch.every == 0
        if due and weights_hash(manifest) not in done:
            yield folder, manifest


def _last_step(watch: Watch, manifest: CheckpointManifest) -> float:
    return watch.until or manifest.job.get("training", {}).get("steps", math.inf)


def _checkpoints(watch: Watch) -> Iterator[tuple[StorageFolder, CheckpointManifest]]:
    """The committed checkpoints of the run, the newest first."""
    name = _setting(watch.run, "checkpoint", "folder")
    folder = checkpoint_folder(watch.run, CheckpointConfig(folder=name))
    if not list_steps(folder).steps:  # the folder of the checkpoints itself was given
        folder = StorageFolder(watch.run)
    for step in reversed(list_steps(folder).steps):
        step_folder = folder / f"step-{step}"
        try:
            yield step_folder, read_checkpoint_manifest(step_folder)
        except CheckpointError:  # being written, or removed since
            continue


def _setting(run: Path, section: str, key: str) -> str:
    """A setting of the run, as its config.toml has it."""
    defaults = {"checkpoint": CheckpointConfig, "metrics": MetricsConfig}
    try:
        table = parse_toml((run / "config.toml").read_text("utf-8"))
    except (FileNotFoundError, ValueError):
        table = {}
    return str(table.get(section, {}).get(key, getattr(defaults[section], key)))


def _append(watch: Watch, step: int, result: EvaluationResult) -> None:
    """Write the lines of a result, to TensorBoard too if the run does, and print it."""
    content = result.to_json()
    logs = watch.run / _setting(watch.run, "metrics", "save_tb_folder")
    if logs.is_dir():
        from torch.utils.tensorboard import SummaryWriter  # the run has it

        with SummaryWriter(str(logs)) as board:
            for name, scores in content["tasks"].items():
                for key, value in scores["values"].items():
                    board.add_scalar(f"evaluation/{name}/{key}", value, step)
    cut_off = watch.file.exists() and not watch.file.read_bytes().endswith(b"\n")
    with watch.file.open("a", encoding="utf-8") as file:
        if cut_off:  # the last line, by a crash
            file.write("\n")
        for name, scores in content["tasks"].items():
            line = {"event": "evaluation", "step": step, "name": name, **scores["values"]}
            line |= {"documents": scores["documents"], "seconds": content["seconds"]}
            line |= {"weights": content["weights"], "time": time.time()}
            file.write(json.dumps(line) + "\n")
    logger.info("step %d: %.1f s\n\n%s\n", step, result.seconds, result)


def read_evaluations(run: Path) -> list[dict[str, Any]]:
    """The lines of the results of a run, of a damaged file those that can be read."""
    try:
        lines = (run / EVALUATIONS_FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            record = parse_json(line)
        except ValueError:  # cut off by a crash
            continue
        if isinstance(record, dict) and {"step", "name", "weights"} <= record.keys():
            found.append(record)
    return found
