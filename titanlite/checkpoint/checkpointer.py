"""Save, find and load the checkpoints of one run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor, nn

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.convert import to_hugging_face
from titanlite.checkpoint.finding import (
    FoundCheckpoint,
    find_checkpoint,
    find_first_valid,
    find_initial,
)
from titanlite.checkpoint.huggingface import (
    CONFIG_FILE,
    PUBLISHED_FILE,
    HuggingFaceFolder,
    HuggingFaceReader,
    open_hugging_face,
    read_published_facts,
)
from titanlite.checkpoint.job_properties import check_job_properties
from titanlite.checkpoint.manifest import (
    CheckpointManifest,
    FileRecord,
    TensorRecord,
    software_versions,
    write_checkpoint_manifest,
)
from titanlite.checkpoint.memory_save import MemoryCheckpoints
from titanlite.checkpoint.memory_sets import MemoryReader
from titanlite.checkpoint.model_state import AVERAGE, HostStaging, State, model_and_optimizer_state
from titanlite.checkpoint.save_in_progress import SaveInProgress
from titanlite.checkpoint.step_folders import StepFolders
from titanlite.checkpoint.tensor_reader import read_tensors
from titanlite.checkpoint.tensor_writer import CollectiveSave, write_small_files, write_tensors
from titanlite.distributed.collectives import (
    gather_from_all_ranks,
    gather_problems,
    run_on_all_ranks,
)
from titanlite.distributed.time_limit import TimeLimit
from titanlite.errors import CheckpointError
from titanlite.log import logger
from titanlite.storage import StorageFolder

# Timeout of the group of this module, in units of checkpoint.timeout_seconds. The watchdog ends the
# run earlier, after one unit, because it can name the rank that hangs; a process group cannot.
GROUP_TIMEOUT_FACTOR = 2

BASE = "base_weights"  # the job property: `hash_of_base` of the frozen weights


def hash_of_base(hashes: Iterable[str]) -> str:
    """One hash of those of the files of a Hugging Face folder, or of a checkpoint's tensors."""
    return xxhash.xxh3_128_hexdigest(" ".join(sorted(hashes)).encode())


@dataclass(frozen=True)
class SaveRequest:
    """What to save of a run after a step."""

    step: int
    model: nn.Module
    optimizers: Iterable[torch.optim.Optimizer]
    progress: dict[str, Any]
    average: Mapping[str, Tensor] | None = None  # of the weights, by their names
    before_commit: Callable[[], None] = lambda: None
    # called on the rank that commits, perhaps in another thread, when all files but the manifest
    # are on the disk: it writes what must not be older than the checkpoint


@dataclass(frozen=True)
class SaveResult:
    """The result of one save."""

    step: int
    folder: StorageFolder
    seconds: float  # since the call of `save`; includes the removal of old ones, and an export
    blocked_seconds: float  # spent inside `save` and `wait`
    problem: str = ""  # why the save failed; empty if it succeeded


class Checkpointer:
    """The checkpoints of one run, in `folder/step-N`; each is complete or does not exist.

    Methods are collective unless noted: every rank calls them at the same point.
    """

    def __init__(
        self,
        folder: StorageFolder,
        config: CheckpointConfig,
        *,
        properties: dict[str, Any],
        job: dict[str, Any],
        layout: str,
        files: Mapping[str, bytes] | None = None,
        check_lease: Callable[[], int] = lambda: 0,
    ):
        """`properties` (of the job: see job_properties.py), `job` (its effective configuration)
        and `layout` are stored in each manifest, the small `files` beside it.

        `check_lease` is called on rank 0 before anything in the folder is committed or removed. It
        returns the number of this job's lease, or raises CheckpointError if another job has one.
        """
        self.folder, self.config, self.check_lease = folder, config, check_lease
        self.properties, self.job, self.layout = properties, job, layout
        self.files = dict(files or {})
        self.failures = 0
        self.last_step = -1  # the step that was loaded, or whose save was started last
        self.save_seconds = 0.0  # duration of the last save
        # Its own group: collectives of the writing thread must not mix with those of training.
        self.group = None
        if config.enable:
            timeout = timedelta(seconds=GROUP_TIMEOUT_FACTOR * config.timeout_seconds)
            self.group = dist.new_group(backend="gloo", timeout=timeout)
        self._collective_save = CollectiveSave(self.group)
        self.staging = HostStaging(config.async_mode == "async_with_pinned_mem")
        self.step_folders = StepFolders(folder, config, check_lease, self.group)
        self._save: SaveInProgress | None = None
        self.memory: MemoryCheckpoints | None = None
        if config.saves and config.memory_interval:
            self.memory = MemoryCheckpoints(self.step_folders, config)

    @property
    def groups(self) -> list[dist.ProcessGroup | None]:
        """The process groups of this module, whose timeouts are its own."""
        return [self.group, self.memory.group] if self.memory else [self.group]

    @property
    def blocking(self) -> bool:
        """Whether `save` returns only when the checkpoint is written."""
        return self.config.async_mode == "disabled"

    def due(self, step: int, ends_run: bool) -> bool:
        """Whether to save after step `step`, counted from 1. Not collective."""
        config = self.config
        first = step == 1 and config.enable_first_step_checkpoint
        is_due = first or ends_run or step % config.interval == 0
        return config.saves and is_due and step != self.last_step

    def due_in_memory(self, step: int, ends_run: bool) -> bool:
        """Whether to save after step `step` in memory; not if the disk has it by then.

        Not collective. A save on the disk that is asynchronous may be lost with a machine.
        """
        is_due = self.memory is not None and step % self.config.memory_interval == 0
        return is_due and not ends_run and not (self.blocking and self.due(step, ends_run))

    # --- saving --------------------------------------------------------------------------------

    def save(self, request: SaveRequest, final: bool = False) -> None:
        """Start to write a checkpoint; `wait` returns the result, and must precede the next save.

        The caller may change the tensors after `save` returns: the blocking mode has written them,
        and an asynchronous mode copies them before any later change.

        `final`: the step is training.steps, so the `last_save_*` settings apply.
        """
        assert self._save is None, "the previous save must be waited for first"
        step, started = request.step, time.monotonic()
        self.last_step, state = step, self._state_to_save(request, final)
        folder = self.step_folders.of_step(step)

        def commit(files: dict[str, FileRecord], tensors: dict[str, TensorRecord]) -> None:
            files |= write_small_files(folder, self.files)
            request.before_commit()
            manifest = CheckpointManifest(
                step,
                request.progress,
                facts=self.properties,
                job=self.job,
                layout=self.layout,
                versions=software_versions(),
                seconds=time.monotonic() - started,
                files=files,
                tensors=tensors,
                lease=self.check_lease(),  # immediately before the commit
            )
            write_checkpoint_manifest(folder, manifest)
            self._after_commit(folder, final)

        if not self.blocking:
            state = self.staging.copy(state)
        wait_for_copy = self.staging.wait_function()

        def write() -> None:
            wait_for_copy()
            write_tensors(folder, state, self._collective_save, commit, self.check_lease)

        self._save = SaveInProgress(step, folder, started, self.config.timeout_seconds)
        self._save.start(write, self.blocking)

    def save_in_memory(self, request: SaveRequest) -> None:
        """Like `save`, but in the memory of this and another host; call it when none is written."""
        assert self.memory is not None
        manifest: dict[str, Any] = {"progress": request.progress, "facts": self.properties}
        manifest |= {"job": self.job, "layout": self.layout, "versions": software_versions()}
        manifest["seconds"] = self.save_seconds
        published = self.files.get(PUBLISHED_FILE, b"").decode()
        common = {"manifest": manifest, "published": published}
        state = self._state_to_save(request, final=False)
        self.memory.save(request.step, state, common, request.before_commit)

    @property
    def writing(self) -> bool:
        """Whether this rank is still writing a checkpoint. Not collective."""
        return self._save is not None and not self._save.done.is_set()

    @property
    def save_time_limit(self) -> TimeLimit | None:
        """The time limit of the save in progress, if any. Not collective."""
        save = self._save
        return None if save is None or save.done.is_set() else save.limit

    def wait(self) -> SaveResult | None:
        """Wait for the save in progress; returns its result, or None.

        It is the same on every rank, but for the times. Raises an error that only this rank has.
        """
        save = self._save
        if save is None:
            return None
        started = time.monotonic()
        if not save.done.wait(GROUP_TIMEOUT_FACTOR * self.config.timeout_seconds):
            raise CheckpointError(f"{save.folder}: writing it hangs.")
        self._save = None
        if save.error is not None:  # the others may still wait inside the save
            raise save.error
        blocked = save.blocked_seconds + time.monotonic() - started
        problem = " ".join(gather_problems(save.problem, self.group))
        if problem:
            self.failures += 1
            self.last_step = -1  # so this step is due again
            self.step_folders.remove_failed_save(save.folder)
        else:
            self.save_seconds = save.seconds
        return SaveResult(save.step, save.folder, save.seconds, blocked, problem)

    def _state_to_save(self, request: SaveRequest, final: bool) -> State:
        model, parts = request.model, State()
        if request.average:
            parts[AVERAGE] = dict(request.average)
        if not (final and self.config.last_save_model_only):
            return model_and_optimizer_state(model, request.optimizers) | parts
        parts |= model_and_optimizer_state(model)
        buffers = {name for name, _ in model.named_buffers()}  # fp32 in every precision
        return {
            part: {n: v if n in buffers else v.to(self._export_dtype) for n, v in tensors.items()}
            for part, tensors in parts.items()
        }

    def _after_commit(self, folder: StorageFolder, final: bool) -> None:
        """Remove surplus checkpoints and export the last one; on rank 0, after a commit."""
        try:  # the save has succeeded, even if no older checkpoint can be removed
            self.step_folders.remove_surplus()
        except (OSError, CheckpointError) as error:
            logger.warning("%s: no older checkpoint was removed: %s", self.folder, error)
        if not (final and self.config.last_save_in_hf):
            return
        self.check_lease()
        out = self.folder / f"{folder.name}-hf"
        if out.exists():  # from an earlier run with this last step, or an interrupted export
            out.remove(delete_first=CONFIG_FILE)
        note = to_hugging_face(folder, out, dtype=self._export_dtype)
        logger.info("%s: exported for Hugging Face. %s", out, note)

    @property
    def _export_dtype(self) -> torch.dtype:
        return getattr(torch, self.config.export_dtype)

    # --- loading -------------------------------------------------------------------------------

    def find(self) -> FoundCheckpoint | None:
        """The checkpoint to start from, see `find_checkpoint`; None to start from scratch."""
        if not self.config.enable:
            return None
        if self.memory is None:
            return find_checkpoint(self.step_folders, self.config, self.group)
        found = find_checkpoint(self.step_folders, self.config, self.group, self.memory.find)
        self.memory.begin(found.memory if found else None)
        return found

    def positions(self, with_optimizer: bool = False) -> tuple[dict[int, int], list[str]]:
        """({step: position} of the checkpoints to roll back to, what is wrong with damaged ones).

        `with_optimizer`: only of those that have optimizer state, see last_save_model_only.
        """
        positions, damaged = self.step_folders.positions(with_optimizer)
        return dict(positions), damaged  # pairs until here: JSON has no integer keys

    def find_first_valid(self, steps: Sequence[int]) -> tuple[FoundCheckpoint | None, list[str]]:
        """(the first checkpoint of `steps` that is valid, why those before it were refused)."""
        return find_first_valid(self.step_folders, steps, self.config.verify, self.group)

    def load(
        self,
        found: FoundCheckpoint,
        model: nn.Module,
        optimizers: Iterable[torch.optim.Optimizer],
        required: dict[str, Any],
        *,
        average: Mapping[str, Tensor] | None = None,
        finished_at: float = math.inf,
        completely: bool = False,
    ) -> dict[str, Any] | None:
        """Read a checkpoint into this layout's shards; returns its progress.

        Returns None if the run starts from the weights of another run. `required`: the properties
        that the checkpoint must have, see `Job.properties_to_check`. A run that ended at step
        `finished_at` needs no optimizer state. `completely`: to roll back, without
        checkpoint.exclude_from_loading, which is for starts. Reads `average` if it is there.
        """
        config, folder, manifest = self.config, found.folder, found.manifest
        if BASE in self.properties:
            required = {**required, BASE: self.properties[BASE]}
        if manifest is None:
            self._load_hugging_face(folder, model_and_optimizer_state(model), required)
            return None
        model_only = found.initial and config.initial_load_model_only
        check_job_properties(
            folder,
            manifest.facts,
            required,
            model_only=model_only,
            allowed=config.allow_changes,
            position=manifest.progress.get("position"),
        )
        self.save_seconds = manifest.seconds
        if PUBLISHED_FILE in manifest.files:
            self.files[PUBLISHED_FILE] = folder.read(PUBLISHED_FILE)
        finished = manifest.step >= finished_at and not manifest.has("optimizer")
        excluded: set[str] = set() if completely else set(config.exclude_from_loading)
        if config.saves and not found.initial:  # else each start would begin again at step 0
            excluded.discard("train_state")
        skip_optimizer = model_only or finished or "optimizer" in excluded
        state = model_and_optimizer_state(model, None if skip_optimizer else optimizers)
        if state.get("optimizer") and not manifest.has("optimizer"):  # plain SGD has no state
            raise CheckpointError(
                f"{folder}: has only weights and no optimizer state"
                " (checkpoint.last_save_model_only, or SGD without momentum), so this run cannot"
                " resume from it.",
                fix="Use an earlier checkpoint (checkpoint.load_step), or start the optimizer state"
                ' from scratch: checkpoint.exclude_from_loading = ["optimizer"].',
            ).mark_on_all_ranks()
        if average and manifest.has(AVERAGE) and not model_only:
            state[AVERAGE] = dict(average)
        elif average:
            excluded.add(AVERAGE)
        if required.get("model") != manifest.facts.get("model"):  # see checkpoint.allow_changes
            self._check_all_weights_are_used(found, state["model"])
        if completely and self.memory:
            self.memory.begin()  # what is in memory was rolled back
        self._read_tensors(found, state)
        return None if model_only else _without_excluded(manifest.progress, excluded)

    def load_base(self, weights: dict[str, Tensor], required: dict[str, Any]) -> None:
        """Read the frozen weights from checkpoint.initial_load_path, and record what they are.

        Checkpoints do not keep them, so this is done at every start, and before `load`.
        """
        found, state = find_initial(self.config, self.group), {"model": weights}
        assert found is not None, "checks of the job refuse adapters without it"
        if found.manifest is None:
            source = self._load_hugging_face(found.folder, state, required)
            own = source.files[dist.get_rank() :: dist.get_world_size()]
            own_hashes = run_on_all_ranks(lambda: [*map(found.folder.hash_of, own)])
            hashes = [*chain.from_iterable(gather_from_all_ranks(own_hashes, self.group))]
        else:
            allowed = self.config.allow_changes
            facts, tensors = found.manifest.facts, found.manifest.tensors
            check_job_properties(found.folder, facts, required, model_only=True, allowed=allowed)
            read_tensors(found.folder, state, self.group)
            hashes = [tensor.hash for tensor in tensors.values()]
        self.properties[BASE] = hash_of_base(hashes)

    def _read_tensors(self, found: FoundCheckpoint, state: State) -> None:
        if found.memory is None or found.manifest is None:
            read_tensors(found.folder, state, self.group)
            return
        if published := found.memory.files[0].common["published"]:
            self.files[PUBLISHED_FILE] = published.encode()
        reader = MemoryReader(found.memory, found.manifest)
        read_tensors(found.folder, state, self.group, reader=reader)
        reader.transfer()

    def _check_all_weights_are_used(
        self, found: FoundCheckpoint, weights: Mapping[str, Any]
    ) -> None:
        """Raise CheckpointError if the checkpoint has weights that the model of this job lacks.

        They would be lost in the next checkpoint. `read_tensors` refuses weights that are missing.
        """
        assert found.manifest is not None
        names_by_rank = gather_from_all_ranks([f"model.{name}" for name in weights], self.group)
        used = {name for names in names_by_rank for name in names}
        saved = {name for name in found.manifest.tensors if name.startswith("model.")}
        if unused := sorted(saved - used):
            raise CheckpointError(
                f"{found.folder}: {len(unused)} of its weights are not in the model of this job:"
                f" {', '.join(unused[:4])}{', ...' if len(unused) > 4 else ''}",
                fix="Set [model] as it was saved: checkpoint.allow_changes cannot drop weights.",
            ).mark_on_all_ranks()

    def steps(self) -> list[int]:
        """Steps of the checkpoints with a valid manifest and right file sizes. Not collective."""
        return self.step_folders.valid_steps() if self.config.enable else []

    def set_aside_later_steps(self, step: int) -> None:
        """Set aside the checkpoints of later steps, which are damaged or were rolled back.

        Otherwise the next start would resume from them, and retention would count them as the
        latest. They are deleted only after later saves (checkpoint.keep_aside_k).
        """
        self.last_step = step
        if self.config.saves:
            self.step_folders.set_aside_later(step)

    def _load_hugging_face(
        self, folder: StorageFolder, state: State, required: dict[str, Any]
    ) -> HuggingFaceFolder:
        mtp_layers = (required.get("model") or {}).get("mtp_layers", 0)
        source, published_files = run_on_all_ranks(
            lambda: (open_hugging_face(folder, mtp_layers), read_published_facts(folder))
        )
        self.files |= published_files
        saved = {"model": dataclasses.asdict(source.sizes)}
        allowed = self.config.allow_changes
        check_job_properties(folder, saved, required, model_only=True, allowed=allowed)
        read_tensors(folder, state, self.group, reader=HuggingFaceReader(source))
        return source


def _without_excluded(progress: dict[str, Any], excluded_parts: Collection[str]) -> dict[str, Any]:
    """The progress to resume from, with excluded parts at their start."""
    progress = dict(progress)
    if "dataloader" in excluded_parts:
        progress["position"] = 0
        # they refer to positions of the earlier start
        for key in ("gaps", "rollbacks", "lanes"):
            progress.pop(key, None)
    if AVERAGE in excluded_parts:  # it was not read, so its number of steps is 0
        progress.pop("weight_average", None)
    if "train_state" in excluded_parts:
        progress |= {"step": 0, "tokens": 0}
    return progress
