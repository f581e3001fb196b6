"""Saving, finding and loading the checkpoints of one run."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from torch import nn

from titanlite.checkpoint.manifest import Manifest, file_sizes, read_manifest, write_manifest
from titanlite.checkpoint.retention import steps_to_remove
from titanlite.checkpoint.store import read_tensors, write_tensors
from titanlite.distributed.collectives import agree, attempt, on_rank_0
from titanlite.errors import CheckpointError, ConfigError
from titanlite.log import logger
from titanlite.settings import Built, NotNegative, Positive, Range


T = TypeVar("T")


@dataclass(frozen=True)
class CheckpointConfig:
    """[checkpoint] What is kept of a run, and where it starts from."""

    enable: bool = False  # save checkpoints, and go on from the newest one that is there
    folder: str = "checkpoint"  # where they are, under job.dump_folder
    interval: Positive = 500  # steps between two
    initial_load_path: str | None = None  # step-N folder of another run to start from
    initial_load_model_only: bool = True  # take only its weights, and start at position 0
    initial_load_in_hf: Annotated[bool, Built((False,), "Hugging Face loading")] = False
    # it is a folder of safetensors
    initial_load_in_hf_quantized: Annotated[bool, Built((False,), "Quantised loading")] = False
    # and its weights are quantised
    last_save_model_only: Annotated[bool, Built((False,), "A model-only last save")] = False
    # leave the optimizer out of the last one; the run can then not be extended
    last_save_in_hf: Annotated[bool, Built((False,), "Hugging Face saving")] = False
    # write the last one as safetensors
    export_dtype: Annotated[
        Literal["float16", "bfloat16", "float32"], Built(("float32",), "Exporting in low precision")
    ] = "float32"  # precision of a model-only last save
    async_mode: Annotated[
        Literal["disabled", "async", "async_with_pinned_mem"],
        Built(("disabled",), "Asynchronous saving"),
    ] = "disabled"  # train on while a checkpoint is written
    keep_latest_k: NotNegative = 10  # whole checkpoints kept; 0: all
    load_step: Annotated[int, Range(-1)] = -1  # step to go on from; -1: the newest
    exclude_from_loading: Annotated[list[str], Built(([],), "Leaving out parts")] = field(
        default_factory=list
    )  # parts that are not loaded
    enable_first_step_checkpoint: bool = False  # save after step 1 too, to see that it works
    load_only: bool = False  # load, but never save


def checkpoint_problems(config: CheckpointConfig) -> Iterator[ConfigError]:
    """Wishes that would be ignored, and a start that is not there."""
    for key in ("initial_load_path", "load_only"):
        if getattr(config, key) and not config.enable:
            yield ConfigError(
                f"checkpoint.{key}: is set, but checkpoint.enable = false, so nothing is loaded.",
                fix="Set checkpoint.enable = true, or leave it out.",
                keys=(f"checkpoint.{key}",),
            )
    if config.initial_load_path is not None:
        try:
            read_manifest(Path(config.initial_load_path))
        except CheckpointError as error:
            yield ConfigError(
                f"checkpoint.initial_load_path: {error.message}",
                fix=error.fix,
                keys=("checkpoint.initial_load_path",),
            )


class Checkpointer:
    """The checkpoints of one run: `folder/step-N`, each whole or not there at all."""

    def __init__(self, folder: Path, config: CheckpointConfig):
        self.folder, self.config = folder, config

    def due(self, step: int, last: bool) -> bool:
        """Whether step `step` (counted from 1, just finished) is to be saved."""
        config = self.config
        first = step == 1 and config.enable_first_step_checkpoint
        wanted = first or last or step % config.interval == 0
        return wanted and config.enable and not config.load_only

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        progress: dict[str, Any],
        facts: dict[str, Any],
        job: dict[str, Any],
        layout: str,
    ) -> Path:
        """Write a whole checkpoint, then let go of those that are too many; all ranks together."""
        place = self.folder / f"step-{step}"
        _once(lambda: _make_room(place))
        write_tensors(place, model, optimizer)
        _once(
            lambda: write_manifest(
                place,
                Manifest(step, progress, facts, job, layout, _versions(), file_sizes(place)),
            )
        )
        _once(self._let_go)
        return place

    def find(self) -> Path | None:
        """The checkpoint to go on from: of this run, else the initial one, else none."""
        if not self.config.enable:
            return None
        return _once(self._find)

    def load(
        self, place: Path, model: nn.Module, optimizer: torch.optim.Optimizer, facts: dict[str, Any]
    ) -> Manifest | None:
        """Read a checkpoint into this layout's shards; None where only weights were taken."""
        initial = place.parent.resolve() != self.folder.resolve()
        model_only = initial and self.config.initial_load_model_only
        names = ["model"] if model_only else list(facts)
        manifest, problem = attempt(lambda: _read_fitting(place, facts, names))
        agree(problem)  # each rank reads for itself: a folder that is not shared is found here
        read_tensors(place, model, None if model_only else optimizer)
        return None if model_only else manifest

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, oldest first."""
        return sorted(_whole_steps(self.folder))

    def _find(self) -> Path | None:
        steps, wish = self.steps(), self.config.load_step
        if steps and wish == -1:
            return self.folder / f"step-{steps[-1]}"
        if wish in steps:
            if not self.config.load_only:
                self._set_aside([step for step in steps if step > wish])
            return self.folder / f"step-{wish}"
        if wish != -1:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"checkpoint.load_step = {wish}: {self.folder} has no whole checkpoint of that"
                f" step. Those there: {there}.",
                fix="Use one of them, or -1 for the newest.",
            )
        litter = [p.name for p in _step_folders(self.folder).values()]
        if litter:
            logger.warning(
                "%s: no manifest in %s, so they are not checkpoints (a save that was cut short)",
                self.folder,
                ", ".join(sorted(litter)),
            )
        initial = self.config.initial_load_path
        return None if initial is None else Path(initial)

    def _set_aside(self, steps: list[int]) -> None:
        """Keep the future that a run turned away from, but no longer as this run's: else the next
        start would go on from it, and retention would take its steps for the latest."""
        for step in steps:
            place, number = self.folder / f"step-{step}", 1
            while (aside := place.with_name(f"{place.name}.abandoned-{number}")).exists():
                number += 1
            place.rename(aside)
            logger.warning("%s: set aside as %s: the run goes on from before it", place, aside.name)

    def _let_go(self) -> None:
        for step in steps_to_remove(self.steps(), self.config.keep_latest_k):
            _remove(self.folder / f"step-{step}")


def _once(act: Callable[[], T]) -> T:
    """Touch the folder from rank 0, and let every rank know how it went."""

    def touch() -> T:
        try:
            return act()
        except OSError as error:
            raise CheckpointError(f"{error.filename}: {error.strerror}.") from error

    return on_rank_0(touch)


def _read_fitting(place: Path, wanted: dict[str, Any], names: list[str]) -> Manifest:
    """The manifest of a checkpoint whose facts are this job's; else an error with what differs."""
    manifest, differing = read_manifest(place), []
    for name in names:
        old, new = manifest.facts.get(name), wanted[name]
        if isinstance(old, dict) and isinstance(new, dict):
            differing += [
                f"{name}.{key}: {old.get(key)} saved, {new.get(key)} now"
                for key in sorted({*old, *new})
                if old.get(key) != new.get(key)
            ]
        elif old != new:
            differing.append(f"{name}: {old} saved, {new} now")
    if differing:
        raise CheckpointError(
            f"{place}: was saved by another job: {'; '.join(differing)}.",
            fix="Set them as they were saved, or start in another job.dump_folder;"
            " checkpoint.initial_load_path takes the weights alone.",
        )
    return manifest


def _step_folders(folder: Path) -> dict[int, Path]:
    if not folder.is_dir():
        return {}
    named = ((re.fullmatch(r"step-(\d+)", place.name), place) for place in folder.iterdir())
    return {int(match[1]): place for match, place in named if match and place.is_dir()}


def _whole_steps(folder: Path) -> Iterator[int]:
    for step, place in _step_folders(folder).items():
        try:
            read_manifest(place)
        except CheckpointError:
            continue
        yield step


def _make_room(place: Path) -> None:
    """A fresh directory: writing over an old one could mix two generations after a crash."""
    if place.exists():
        _remove(place)
    place.mkdir(parents=True)


def _remove(place: Path) -> None:
    """Take a directory out of sight in one rename, then delete it."""
    gone = place.with_name(f"{place.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)
    place.rename(gone)
    shutil.rmtree(gone)


def _versions() -> dict[str, str]:
    try:
        own = version("titanlite")
    except PackageNotFoundError:  # run from a checkout
        own = "unknown"
    return {"titanlite": own, "torch": torch.__version__}
