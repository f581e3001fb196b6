"""Saving, finding and loading the checkpoints of one run."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.convert import to_hugging_face
from titanlite.checkpoint.hf import CONFIG, open_hugging_face
from titanlite.checkpoint.manifest import (
    Manifest,
    check_hashes,
    read_manifest,
    versions,
    write_manifest,
)
from titanlite.checkpoint.place import Place
from titanlite.checkpoint.retention import steps_to_remove
from titanlite.checkpoint.saved_model import write_files
from titanlite.checkpoint.store import Stage, read_tensors, state_of, write_tensors
from titanlite.distributed.collectives import agree, attempt, on_rank_0, problems_of_all
from titanlite.distributed.limits import Limit
from titanlite.errors import CheckpointError, UserError
from titanlite.log import logger

T = TypeVar("T")

# Times checkpoint.timeout_seconds, which the watchdog keeps: it can say who hangs, a group cannot.
PATIENCE = 2


@dataclass(frozen=True)
class Saved:
    """What became of one save."""

    step: int
    place: Place
    seconds: float  # from the call to the commit
    blocked_seconds: float  # in which the caller did nothing else, in `save` and in `wait`
    problem: str = ""  # why there is no checkpoint; empty: there is one


@dataclass(frozen=True)
class Found:
    """A checkpoint to start from, and the newer ones that were refused for it."""

    place: Place
    manifest: Manifest | None  # None: it is a Hugging Face folder
    refused: list[str]
    initial: bool = False  # of another run

    @property
    def step(self) -> int:
        """The step of this run that it is of."""
        return 0 if self.initial or self.manifest is None else self.manifest.step


class Checkpointer:
    """The checkpoints of one run: `folder/step-N`, each whole or not there at all.

    Every rank makes one at the same point, and calls its methods together with the others.
    """

    def __init__(
        self,
        folder: Place,
        config: CheckpointConfig,
        *,
        facts: dict[str, Any],
        job: dict[str, Any],
        layout: str,
        files: Mapping[str, bytes] | None = None,  # small ones that every checkpoint holds too
    ):
        self.folder, self.config = folder, config
        self.about = {"facts": facts, "job": job, "layout": layout}  # what a manifest says of us
        self.files = dict(files or {})
        self.failures = 0
        self.save_seconds = 0.0  # what the last save took
        # Its own group: collectives of the writing thread must not meet those of training.
        self.group = None
        if config.enable:
            patience = timedelta(seconds=PATIENCE * config.timeout_seconds)
            self.group = dist.new_group(backend="gloo", timeout=patience)
        self.stage = Stage(config.async_mode == "async_with_pinned_mem")
        self._write: _Write | None = None

    def due(self, step: int, last: bool) -> bool:
        """Whether step `step` (counted from 1, just finished) is to be saved."""
        config = self.config
        first = step == 1 and config.enable_first_step_checkpoint
        return self.saves and (first or last or step % config.interval == 0)

    @property
    def saves(self) -> bool:
        return self.config.enable and not self.config.load_only

    # --- saving --------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        progress: dict[str, Any],
        final: bool = False,
        before_commit: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin to write a checkpoint; `wait` says what became of it.

        When it returns, the tensors may change: under an asynchronous mode they were copied, else
        they were written. At most one save is in flight: the one before must have been waited for.
        `final`: nothing comes after it, so that it may be made smaller. `before_commit` is called on
        the rank that commits, perhaps in another thread, when all files but the manifest are on the
        disk: what must not be older than the checkpoint is written there.
        """
        assert self._write is None, "one save at a time"
        config, began = self.config, time.monotonic()
        state = state_of(model, None if final and config.last_save_model_only else optimizer)
        if final and config.last_save_model_only:
            dtype = getattr(torch, config.export_dtype)
            state = {"model": {name: value.to(dtype) for name, value in state["model"].items()}}
        place = self.folder / f"step-{step}"

        def commit(files, tensors) -> None:
            files |= write_files(place, self.files)
            written = {"files": files, "tensors": tensors, "versions": versions()}
            before_commit()
            seconds = time.monotonic() - began
            write_manifest(
                place, Manifest(step, progress, seconds=seconds, **self.about, **written)
            )
            try:  # it is a checkpoint now, whatever becomes of the others
                self._let_go()
            except OSError as error:
                logger.warning("%s: could not be put in order: %s", self.folder, error)
            if final and config.last_save_in_hf:
                self._export(place)

        if config.async_mode == "disabled":
            self._write = _Write(step, place, began, config.timeout_seconds)
            self._write.run(lambda: write_tensors(place, state, self.group, commit))
        else:
            copy, ready = self.stage.copy(state), self.stage.ready()

            def write() -> None:
                ready()
                write_tensors(place, copy, self.group, commit)

            self._write = _Write(step, place, began, config.timeout_seconds)
            self._write.run_aside(write)

    @property
    def writing(self) -> bool:
        """Whether this rank still writes; only a look, which need not be together."""
        return self._write is not None and not self._write.done.is_set()

    @property
    def limit(self) -> Limit | None:
        """The time limit on the save in flight; None where there is none."""
        write = self._write
        return None if write is None or write.done.is_set() else write.limit

    @property
    def blocking(self) -> bool:
        """Whether `save` returns only when the checkpoint is written."""
        return self.config.async_mode == "disabled"

    def wait(self) -> Saved | None:
        """What became of the save in flight, the same on every rank; None where there is none."""
        write = self._write
        if write is None:
            return None
        began = time.monotonic()
        if not write.done.wait(PATIENCE * self.config.timeout_seconds):
            raise CheckpointError(f"{write.place}: writing it hangs.")
        self._write = None
        blocked = write.blocked_seconds + time.monotonic() - began
        problem = " ".join(problems_of_all(write.problem, self.group))
        if problem:
            self.failures += 1
            if dist.get_rank() == 0:
                _clear(write.place, unless=manifests.NAME)  # makes room on a disk that is full
        else:
            self.save_seconds = write.seconds
        return Saved(write.step, write.place, write.seconds, blocked, problem)

    # --- loading -------------------------------------------------------------------------------

    def find(self) -> Found | None:
        """The newest true checkpoint of this run, else the initial one, else none.

        Raises CheckpointError where there are some and none of them is true: a run never starts
        anew without a word.
        """
        config = self.config
        if not config.enable:
            return None
        steps, litter = _once(lambda: _step_folders(self.folder))
        if config.load_step != -1 and config.load_step not in steps:
            there = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"checkpoint.load_step = {config.load_step}: {self.folder} has no checkpoint of"
                f" that step. Those there: {there}.",
                fix="Use one of them, or -1 for the newest.",
            ).known_to_all()
        wished = steps[::-1] if config.load_step == -1 else [config.load_step]
        refused: list[str] = []
        for step in wished:
            place = self.folder / f"step-{step}"
            manifest, problem = self._verified(place)
            if not problem:
                _once(lambda: self._clean(litter))
                return Found(place, manifest, refused)
            refused.append(problem)
        if refused:
            raise CheckpointError(
                f"{self.folder}: none of the checkpoints asked for is whole and true:"
                f" {' '.join(refused)}",
                fix="Restore one of them, or start from nothing in another job.dump_folder.",
            ).known_to_all()
        _once(lambda: self._clean(litter))
        if config.initial_load_path is None:
            return None
        place = Place(config.initial_load_path)
        manifest, problem = (None, "") if config.initial_load_in_hf else self._verified(place)
        if problem:
            raise CheckpointError(f"checkpoint.initial_load_path: {problem}").known_to_all()
        return Found(place, manifest, [], initial=True)

    def load(
        self,
        found: Found,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        facts: dict[str, Any],
        *,
        finished_at: int | None = None,
    ) -> dict[str, Any] | None:
        """Read a checkpoint into this layout's shards; returns its progress.

        None where only weights were taken. `facts` are those of this job. A run that has taken
        its `finished_at` steps needs no optimizer.
        """
        config, place, manifest = self.config, found.place, found.manifest
        if manifest is None:
            return self._load_hugging_face(place, model, facts)
        model_only = found.initial and config.initial_load_model_only
        _check_facts(place, manifest.facts, facts, model_only, config.allow_changes)
        self.save_seconds = manifest.seconds
        done = manifest.step == finished_at and not manifest.has("optimizer")
        skip = model_only or done or "optimizer" in config.exclude_from_loading
        if not skip and not manifest.has("optimizer"):
            raise CheckpointError(
                f"{place}: holds the model alone, without the optimizer's moments"
                " (checkpoint.last_save_model_only), so this run cannot go on from it.",
                fix='Use an earlier one (checkpoint.load_step), or start its moments anew:'
                " checkpoint.exclude_from_loading = [\"optimizer\"].",
            ).known_to_all()
        read_tensors(place, state_of(model, None if skip else optimizer), self.group)
        return None if model_only else _without(config.exclude_from_loading, manifest.progress)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there whole, by their sizes, oldest first."""
        return [step for step in _step_folders(self.folder)[0] if self._is_whole(step)]

    def turn_back(self, step: int) -> None:
        """Set aside what this run holds of later steps, damaged or turned away from.

        Else the next start would go on from there, and retention would take its steps for the
        latest. Nothing is deleted.
        """
        if self.saves:
            _once(lambda: self._set_aside([s for s in _step_folders(self.folder)[0] if s > step]))

    def _export(self, place: Place) -> None:
        """Write a checkpoint for Hugging Face too, beside it."""
        out = self.folder / f"{place.name}-hf"
        if out.exists():  # of a run that ended here before, or was cut short
            out.remove(first=CONFIG)
        note = to_hugging_face(place, out, dtype=getattr(torch, self.config.export_dtype))
        logger.info("%s: written for Hugging Face. %s", out, note)

    def _load_hugging_face(self, place: Place, model: nn.Module, facts: dict[str, Any]) -> None:
        folder, problem = attempt(lambda: open_hugging_face(place))
        agree(problem)
        own = {"model": dataclasses.asdict(folder.shape)}
        _check_facts(place, own, facts, True, self.config.allow_changes)
        read_tensors(place, state_of(model), self.group, reader=folder.reader())

    def _verified(self, place: Place) -> tuple[Manifest | None, str]:
        """A checkpoint's manifest, and what is wrong with it for any rank, or nothing.

        Each rank reads the manifest for itself, so that a folder that is not shared is found here,
        and a part of the other bytes.
        """

        def verify() -> Manifest:
            manifest = read_manifest(place, sizes=self.config.verify != "off")
            if self.config.verify == "full":
                check_hashes(place, manifest, _share(manifest))
            return manifest

        manifest, problem = attempt(verify)
        problems = problems_of_all("" if problem is None else str(problem), self.group)
        return manifest, " ".join(problems)

    def _clean(self, litter: list[str]) -> None:
        """Remove what a crash has left; whoever holds the run's lease knows that nobody writes."""
        for name in litter if self.saves else ():
            logger.warning("%s: removed: writing or removing it was cut short", self.folder / name)
            _clear(self.folder / name)

    def _set_aside(self, steps: list[int]) -> None:
        taken = set(self.folder.folders())
        for step in steps:
            number = 1
            while (aside := f"step-{step}.aside-{number}") in taken:
                number += 1
            (self.folder / f"step-{step}").rename(aside)
            logger.warning(
                "%s: set aside as %s: the run goes on from before it",
                self.folder / f"step-{step}",
                aside,
            )

    def _is_whole(self, step: int) -> bool:
        try:
            read_manifest(self.folder / f"step-{step}")
        except CheckpointError:
            return False
        return True

    def _let_go(self) -> None:
        config = self.config
        for step in steps_to_remove(self.steps(), config.keep_latest_k, config.keep_every):
            _clear(self.folder / f"step-{step}")


class _Write:
    """One save on its way, here or in a thread of its own."""

    def __init__(self, step: int, place: Place, began: float, timeout_seconds: float):
        self.step, self.place, self.began = step, place, began
        what = f"Rank {dist.get_rank()}: the save of step {step}"
        self.limit = Limit(what, timeout_seconds, "checkpoint.timeout_seconds")
        self.seconds = self.blocked_seconds = 0.0
        self.problem, self.done = "", threading.Event()

    def run(self, write: Callable[[], None]) -> None:
        self._run(write)
        self.blocked_seconds = self.seconds

    def run_aside(self, write: Callable[[], None]) -> None:
        # A daemon: a rank that fails must not stay because its save waits for the others.
        threading.Thread(target=self._run, args=(write,), name="save", daemon=True).start()
        self.blocked_seconds = time.monotonic() - self.began

    def _run(self, write: Callable[[], None]) -> None:
        self.limit.thread = threading.get_ident()
        try:
            write()
        except BaseException as error:
            self.problem = str(error) if isinstance(error, UserError) else repr(error)
            if not isinstance(error, Exception):  # Ctrl-C ends the run; a failed save does not
                raise
        finally:
            self.seconds = time.monotonic() - self.began
            self.done.set()


def _once(act: Callable[[], T]) -> T:
    """Touch the folder from rank 0, and let every rank know how it went."""

    def touch() -> T:
        try:
            return act()
        except OSError as error:
            raise CheckpointError(f"{error.filename or ''}: {error.strerror or error}.") from error

    return on_rank_0(touch)


def _step_folders(folder: Place) -> tuple[list[int], list[str]]:
    """Steps that say they are checkpoints, oldest first; and the names of what never became one."""
    steps, litter = [], []
    for name in folder.folders():
        match = re.fullmatch(r"step-(\d+)(\.removed)?", name)
        if match and match[2]:
            litter.append(name)
        elif match:
            files = (folder / name).sizes()
            cut_short = manifests.UNFINISHED in files and manifests.NAME not in files
            (litter.append(name) if cut_short or not files else steps.append(int(match[1])))
    return sorted(steps), litter


def _share(manifest: Manifest) -> list[str]:
    """The files that this rank reads when all ranks verify a checkpoint together."""
    by_size = sorted(manifest.files, key=lambda name: manifest.files[name].bytes)
    return by_size[dist.get_rank() :: dist.get_world_size()]


def _clear(place: Place, unless: str = "") -> None:
    """Take away what nobody needs; that it could not be done is no reason to stop a run.

    A folder that has the file `unless` is left alone.
    """
    try:
        if place.exists() and unless not in place.sizes():
            place.remove(first=manifests.NAME)
    except OSError as error:
        logger.warning("%s: could not be removed: %s", place, error)


def _check_facts(
    place: Place,
    saved: dict[str, Any],
    wanted: dict[str, Any],
    model_only: bool,
    allowed: list[str],
) -> None:
    """Raise CheckpointError with every fact of this job that is not the checkpoint's."""
    names = {"model"} if model_only else wanted.keys() & saved.keys()  # an older one says less
    differing = {}
    for name in names - set(allowed):
        old, new = saved.get(name), wanted.get(name)
        if isinstance(old, dict) and isinstance(new, dict):
            keys = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
            pairs = [f"{key}: {old.get(key)} saved, {new.get(key)} now" for key in keys]
        else:
            pairs = [f"{old} saved, {new} now"] if old != new else []
        if pairs:
            differing[name] = f"{name} ({'; '.join(pairs)})"
    if differing:
        names = sorted(differing)
        quoted = ", ".join(f'"{name}"' for name in names)
        raise CheckpointError(
            f"{place}: was saved by another job: {', '.join(differing[name] for name in names)}.",
            fix="Set them as they were saved; or allow it: checkpoint.allow_changes ="
            f" [{quoted}]; or start in another job.dump_folder, where"
            " checkpoint.initial_load_path takes the weights alone.",
        ).known_to_all()


def _without(parts: list[str], progress: dict[str, Any]) -> dict[str, Any]:
    kept = dict(progress)
    if "dataloader" in parts:
        kept["position"] = 0
    if "train_state" in parts:
        kept |= {"step": 0, "tokens": 0}
    return kept
