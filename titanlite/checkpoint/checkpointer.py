"""Saving, finding and loading the checkpoints of one run."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from titanlite.checkpoint import manifest as manifests
from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.convert import to_hugging_face
from titanlite.checkpoint.huggingface import CONFIG, open_hugging_face
from titanlite.checkpoint.listing import CheckpointListing, list_steps, set_aside
from titanlite.checkpoint.manifest import (
    CheckpointManifest,
    check_hashes,
    read_checkpoint_manifest,
    versions,
    write_checkpoint_manifest,
)
from titanlite.checkpoint.retention import all_but_last, steps_to_remove
from titanlite.checkpoint.saved_model import write_files
from titanlite.checkpoint.tensor_io import (
    HostStaging,
    model_and_optimizer_state,
    read_tensors,
    write_tensors,
)
from titanlite.distributed.collectives import (
    capture_user_error,
    gather_problems,
    raise_on_all_ranks,
    run_on_rank_0,
)
from titanlite.distributed.time_limit import TimeLimit
from titanlite.errors import CheckpointError, UserError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.storage import StorageFolder, StorageUnreachable

T = TypeVar("T")

# Times checkpoint.timeout_seconds, which the watchdog keeps: it can say who hangs, a group cannot.
PATIENCE = 2
# The checkpoint.load_step that was applied last, so that a restart does not go back once more.
LOAD_STEP_FILE = "load_step.json"


@dataclass(frozen=True)
class SaveResult:
    """What became of one save."""

    step: int
    folder: StorageFolder
    seconds: float  # from the call to the commit
    blocked_seconds: float  # in which the caller did nothing else, in `save` and in `wait`
    problem: str = ""  # why there is no checkpoint; empty: there is one


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to start from, and the newer ones that were refused for it."""

    folder: StorageFolder
    manifest: CheckpointManifest | None  # None: it is a Hugging Face folder
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
        folder: StorageFolder,
        config: CheckpointConfig,
        *,
        facts: dict[str, Any],
        job: dict[str, Any],
        layout: str,
        files: Mapping[str, bytes] | None = None,  # small ones that every checkpoint holds too
        check_lease: Callable[[], int] = lambda: 0,
    ):
        """`check_lease` is called on rank 0 before anything in the folder is committed or removed.

        It returns the number of the lease that this job holds, and raises CheckpointError where
        another job holds it by now.
        """
        self.folder, self.config, self.check_lease = folder, config, check_lease
        self.about = {"facts": facts, "job": job, "layout": layout}  # what a manifest says of us
        self.files = dict(files or {})
        self.failures = 0
        self.save_seconds = 0.0  # what the last save took
        # Its own group: collectives of the writing thread must not meet those of training.
        self.group = None
        if config.enable:
            patience = timedelta(seconds=PATIENCE * config.timeout_seconds)
            self.group = dist.new_group(backend="gloo", timeout=patience)
        self.stage = HostStaging(config.async_mode == "async_with_pinned_mem")
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
        state = model_and_optimizer_state(
            model, None if final and config.last_save_model_only else optimizer
        )
        if final and config.last_save_model_only:
            dtype = getattr(torch, config.export_dtype)
            state = {"model": {name: value.to(dtype) for name, value in state["model"].items()}}
        place = self.folder / f"step-{step}"

        def commit(files, tensors) -> None:
            files |= write_files(place, self.files)
            written = {"files": files, "tensors": tensors, "versions": versions()}
            before_commit()
            seconds, lease = time.monotonic() - began, self.check_lease()  # immediately before it
            about = {**self.about, **written}
            write_checkpoint_manifest(
                place, CheckpointManifest(step, progress, seconds=seconds, lease=lease, **about)
            )
            try:  # it is a checkpoint now, whatever becomes of the others
                self._remove_surplus()
            except (OSError, CheckpointError) as error:
                logger.warning("%s: no older checkpoint was removed: %s", self.folder, error)
            if final and config.last_save_in_hf:
                self._export(place)

        if config.async_mode == "disabled":
            self._write = _Write(step, place, began, config.timeout_seconds)
            self._write.run(
                lambda: write_tensors(place, state, self.group, commit, self.check_lease)
            )
        else:
            copy, ready = self.stage.copy(state), self.stage.ready()

            def write() -> None:
                ready()
                write_tensors(place, copy, self.group, commit, self.check_lease)

            self._write = _Write(step, place, began, config.timeout_seconds)
            self._write.run_aside(write)

    @property
    def writing(self) -> bool:
        """Whether this rank still writes; only a look, which need not be together."""
        return self._write is not None and not self._write.done.is_set()

    @property
    def limit(self) -> TimeLimit | None:
        """The time limit on the save in flight; None where there is none."""
        write = self._write
        return None if write is None or write.done.is_set() else write.limit

    @property
    def blocking(self) -> bool:
        """Whether `save` returns only when the checkpoint is written."""
        return self.config.async_mode == "disabled"

    def wait(self) -> SaveResult | None:
        """What became of the save in flight, the same on every rank; None where there is none."""
        write = self._write
        if write is None:
            return None
        began = time.monotonic()
        if not write.done.wait(PATIENCE * self.config.timeout_seconds):
            raise CheckpointError(f"{write.folder}: writing it hangs.")
        self._write = None
        blocked = write.blocked_seconds + time.monotonic() - began
        problem = " ".join(gather_problems(write.problem, self.group))
        if problem:
            self.failures += 1
            # Makes room on a disk that is full. The others wait, in the group with patience.
            self._on_rank_0(lambda: self._remove(write.folder, unless=manifests.NAME))
        else:
            self.save_seconds = write.seconds
        return SaveResult(write.step, write.folder, write.seconds, blocked, problem)

    # --- loading -------------------------------------------------------------------------------

    def find(self) -> FoundCheckpoint | None:
        """The newest true checkpoint of this run, else the initial one, else none.

        Raises CheckpointError where there are some and none of them is true: a run never starts
        anew without a word.
        """
        config = self.config
        if not config.enable:
            return None
        seen = self._on_rank_0(self._look)
        listing, load_step = CheckpointListing(**seen["listing"]), config.load_step
        if self.saves and listing.steps and load_step == seen["applied_load_step"] != -1:
            logger.info(
                "checkpoint.load_step = %d was applied by an earlier start: resuming from the"
                " newest checkpoint. To go back again, delete %s/%s.",
                load_step,
                self.folder,
                LOAD_STEP_FILE,
            )
            load_step = -1
        if load_step != -1 and load_step not in listing.steps:
            there = ", ".join(map(str, listing.steps)) or "none"
            raise CheckpointError(
                f"checkpoint.load_step = {load_step}: {self.folder} has no checkpoint of"
                f" that step. Those there: {there}.",
                fix="Use one of them, or -1 for the newest.",
            ).mark_on_all_ranks()
        refused: list[str] = []
        for step in listing.steps[::-1] if load_step == -1 else [load_step]:
            place = self.folder / f"step-{step}"
            manifest, problem = self._verified(place)
            if not problem:
                self._on_rank_0(lambda: self._clean(listing.unfinished))
                return FoundCheckpoint(place, manifest, refused)
            refused.append(problem)
        if refused:
            raise CheckpointError(
                f"{self.folder}: none of the checkpoints asked for is whole and true:"
                f" {' '.join(refused)}",
                fix="Restore one of them, or start from nothing in another job.dump_folder.",
            ).mark_on_all_ranks()
        self._on_rank_0(lambda: self._clean(listing.unfinished))
        if config.initial_load_path is None:
            return None
        place = StorageFolder(config.initial_load_path)
        manifest, problem = (None, "") if config.initial_load_in_hf else self._verified(place)
        if problem:
            raise CheckpointError(f"checkpoint.initial_load_path: {problem}").mark_on_all_ranks()
        return FoundCheckpoint(place, manifest, [], initial=True)

    def load(
        self,
        found: FoundCheckpoint,
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
        config, place, manifest = self.config, found.folder, found.manifest
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
                fix="Use an earlier one (checkpoint.load_step), or start its moments anew:"
                ' checkpoint.exclude_from_loading = ["optimizer"].',
            ).mark_on_all_ranks()
        read_tensors(
            place, model_and_optimizer_state(model, None if skip else optimizer), self.group
        )
        return None if model_only else _without(config.exclude_from_loading, manifest.progress)

    def steps(self) -> list[int]:
        """The steps of the checkpoints that are there whole, by their sizes, oldest first."""
        return [step for step in list_steps(self.folder).steps if self._is_whole(step)]

    def set_aside_later_steps(self, step: int) -> None:
        """Set aside what this run holds of later steps, damaged or turned away from.

        Else the next start would go on from there, and retention would take its steps for the
        latest. Nothing is deleted before this run has saved (checkpoint.keep_aside_k).
        """
        if self.saves:
            self._on_rank_0(lambda: self._turn_back(step))

    def _export(self, place: StorageFolder) -> None:
        """Write a checkpoint for Hugging Face too, beside it."""
        self.check_lease()
        out = self.folder / f"{place.name}-hf"
        if out.exists():  # of a run that ended here before, or was cut short
            out.remove(first=CONFIG)
        note = to_hugging_face(place, out, dtype=getattr(torch, self.config.export_dtype))
        logger.info("%s: written for Hugging Face. %s", out, note)

    def _load_hugging_face(
        self, place: StorageFolder, model: nn.Module, facts: dict[str, Any]
    ) -> None:
        folder, problem = capture_user_error(lambda: open_hugging_face(place))
        raise_on_all_ranks(problem)
        own = {"model": dataclasses.asdict(folder.sizes)}
        _check_facts(place, own, facts, True, self.config.allow_changes)
        read_tensors(place, model_and_optimizer_state(model), self.group, reader=folder.reader())

    def _verified(self, place: StorageFolder) -> tuple[CheckpointManifest | None, str]:
        """A checkpoint's manifest, and what is wrong with it for any rank, or nothing.

        Each rank reads the manifest for itself, so that a folder that is not shared is found here,
        and a part of the other bytes.
        """

        def verify() -> CheckpointManifest:
            manifest = read_checkpoint_manifest(place, sizes=self.config.verify != "off")
            if self.config.verify == "full":
                check_hashes(place, manifest, _share(manifest))
            return manifest

        manifest, problem = capture_user_error(verify)
        problems = gather_problems("" if problem is None else str(problem), self.group)
        if problems:
            silent = str(problem) if isinstance(problem, StorageUnreachable) else ""
            if unreachable := gather_problems(silent, self.group):  # it may well be valid
                raise CheckpointError(" ".join(unreachable)).mark_on_all_ranks()
        return manifest, " ".join(problems)

    def _on_rank_0(self, act: Callable[[], T]) -> T:
        """Touch the folder from rank 0, and let every rank know how it went.

        The others wait in the group of this checkpointer: in an object store, many checkpoints or
        a large one take longer to look through or to remove than training has patience for.
        """

        def touch() -> T:
            try:
                return act()
            except OSError as error:
                raise CheckpointError(
                    f"{error.filename or self.folder}: {error.strerror or error}."
                ) from error

        return run_on_rank_0(touch, self.group)

    def _look(self) -> dict[str, Any]:
        """What is in the folder, as values that ranks can exchange."""
        applied = -1
        try:
            applied = parse_json(self.folder.read(LOAD_STEP_FILE))["load_step"]
            if self.saves and self.config.load_step == -1:  # a change, so that it may be set again
                self.check_lease()
                self.folder.delete(LOAD_STEP_FILE)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except (ValueError, TypeError, KeyError):
            logger.warning("%s/%s: is damaged, and ignored", self.folder, LOAD_STEP_FILE)
        return {"listing": asdict(list_steps(self.folder)), "applied_load_step": applied}

    def _clean(self, unfinished: list[str]) -> None:
        """Remove what a crash has left; whoever holds the run's lease knows that nobody writes."""
        for name in unfinished if self.saves else ():
            logger.warning("%s: removed: writing or removing it was cut short", self.folder / name)
            self._remove(self.folder / name)

    def _turn_back(self, step: int) -> None:
        self.check_lease()
        for later in list_steps(self.folder).steps:
            if later > step:
                place = self.folder / f"step-{later}"
                name = set_aside(place)
                logger.warning("%s: set aside as %s: the run goes on from before it", place, name)
        if self.config.load_step != -1:  # last: a start that dies before this goes back again
            applied = {"load_step": self.config.load_step}
            self.folder.write_atomically(LOAD_STEP_FILE, json.dumps(applied).encode())

    def _is_whole(self, step: int) -> bool:
        try:
            read_checkpoint_manifest(self.folder / f"step-{step}")
        except CheckpointError:
            return False
        return True

    def _remove_surplus(self) -> None:
        config = self.config
        names = all_but_last(list_steps(self.folder).aside, config.keep_aside_k)
        steps = steps_to_remove(self.steps(), config.keep_latest_k, config.keep_every)
        for name in (*names, *(f"step-{step}" for step in steps)):
            self._remove(self.folder / name)

    def _remove(self, place: StorageFolder, unless: str = "") -> None:
        """Remove what nobody needs; that it could not be done is no reason to stop a run.

        A folder that has the file `unless` is left alone, as is every one of another job.
        """
        try:
            self.check_lease()
            if place.exists() and unless not in place.sizes():
                place.remove(first=manifests.NAME)
        except (OSError, CheckpointError) as error:
            logger.warning("%s: could not be removed: %s", place, error)


class _Write:
    """One save on its way, here or in a thread of its own."""

    def __init__(self, step: int, place: StorageFolder, began: float, timeout_seconds: float):
        self.step, self.folder, self.began = step, place, began
        what = f"Rank {dist.get_rank()}: the save of step {step}"
        self.limit = TimeLimit(what, timeout_seconds, "checkpoint.timeout_seconds")
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


def _share(manifest: CheckpointManifest) -> list[str]:
    """The files that this rank reads when all ranks verify a checkpoint together."""
    by_size = sorted(manifest.files, key=lambda name: manifest.files[name].bytes)
    return by_size[dist.get_rank() :: dist.get_world_size()]


def _check_facts(
    place: StorageFolder,
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
        if "order version" in differing.get("data.sources", ""):
            differing["data.sources"] += (
                " (this version of titanlite orders such sources otherwise: allowed, the run goes on"
                " at its position in the new order, so some samples repeat and others are left out)"
            )
        quoted = ", ".join(f'"{name}"' for name in names)
        raise CheckpointError(
            f"{place}: was saved by another job: {', '.join(differing[name] for name in names)}.",
            fix="Set them as they were saved; or allow it: checkpoint.allow_changes ="
            f" [{quoted}]; or start in another job.dump_folder, where"
            " checkpoint.initial_load_path takes the weights alone.",
        ).mark_on_all_ranks()


def _without(parts: list[str], progress: dict[str, Any]) -> dict[str, Any]:
    kept = dict(progress)
    if "dataloader" in parts:
        kept["position"] = 0
    if "train_state" in parts:
        kept |= {"step": 0, "tokens": 0}
    return kept
