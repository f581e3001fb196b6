"""Find the checkpoint to start from, and verify it on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.manifest import CheckpointManifest, check_hashes, read_checkpoint_manifest
from titanlite.checkpoint.memory_sets import MemorySet
from titanlite.checkpoint.step_folders import LOAD_STEP_FILE, StepFolders
from titanlite.distributed.collectives import capture_user_error, gather_problems
from titanlite.errors import CheckpointError
from titanlite.log import logger
from titanlite.storage import StorageFolder, StorageUnreachable


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint to start from, and why newer ones were refused."""

    folder: StorageFolder
    manifest: CheckpointManifest | None  # None: a Hugging Face folder
    refused: list[str]
    initial: bool = False  # from another run: checkpoint.initial_load_path
    memory: MemorySet | None = None  # it is in the memory of hosts; `folder`: of its first file

    @property
    def step(self) -> int:
        """The step of this run to continue from; 0 for a checkpoint of another run."""
        return 0 if self.initial or self.manifest is None else self.manifest.step


def find_checkpoint(
    step_folders: StepFolders,
    config: CheckpointConfig,
    group: dist.ProcessGroup | None,
    find_in_memory: Callable[[], list[MemorySet]] = list,
) -> FoundCheckpoint | None:
    """The checkpoint to start from: one of this run, else the initial one; else None. Collective.

    Of this run, it is the one of checkpoint.load_step, if that applies, else the newest valid one,
    of an equal step that in memory. Raises CheckpointError if the disk has checkpoints to try but
    none is valid: a run never silently starts from scratch.
    """
    steps, unfinished, applied_load_step = step_folders.list_to_start()
    to_try = _steps_to_try(step_folders.folder, config, steps, applied_load_step)
    sets = find_in_memory() if config.load_step in (-1, applied_load_step) else []
    both: list[int | MemorySet] = [*sets, *to_try]
    candidates = sorted(both, key=_step_of, reverse=True)  # stable: sets come first
    found, refused = find_first_valid(step_folders, candidates, config.verify, group)
    if to_try and not found:
        untried = len(refused) < len(steps)  # only checkpoint.load_step was tried
        problem = "checkpoint.load_step is not valid" if untried else "no valid checkpoint found"
        another = "use another checkpoint.load_step, " if untried else ""
        raise CheckpointError(
            f"{step_folders.folder}: {problem}: {' '.join(refused)}",
            fix=f"Copy an intact one from a backup, {another}or start from scratch in another"
            " job.dump_folder.",
        ).mark_on_all_ranks()
    step_folders.remove_unfinished(unfinished)
    if found:
        return found
    for problem in refused if config.initial_load_path is None else ():
        logger.warning("%s", problem)  # of sets; a run without start has no event
    return find_initial(config, group)


def find_initial(
    config: CheckpointConfig, group: dist.ProcessGroup | None
) -> FoundCheckpoint | None:
    """The checkpoint of checkpoint.initial_load_path, if it is set; a collective."""
    if config.initial_load_path is None:
        return None
    folder = StorageFolder(config.initial_load_path)
    if config.initial_load_in_hf:
        return FoundCheckpoint(folder, None, [], initial=True)
    manifest, problem = verify_on_all_ranks(folder, config.verify, group)
    if problem:
        raise CheckpointError(f"checkpoint.initial_load_path: {problem}").mark_on_all_ranks()
    return FoundCheckpoint(folder, manifest, [], initial=True)


def find_first_valid(
    step_folders: StepFolders,
    steps: Sequence[int | MemorySet],
    verify: str,
    group: dist.ProcessGroup | None,
) -> tuple[FoundCheckpoint | None, list[str]]:
    """The first valid checkpoint of `steps`, and why those before it were refused. Collective."""
    refused: list[str] = []
    for step in steps:
        if isinstance(step, MemorySet):
            manifest, problems = step.verify()
            refused += problems
            if manifest:
                folder = StorageFolder(step.files[0].path).parent
                return FoundCheckpoint(folder, manifest, refused, memory=step), refused
            continue
        folder = step_folders.of_step(step)
        manifest, problem = verify_on_all_ranks(folder, verify, group)
        if not problem:
            return FoundCheckpoint(folder, manifest, refused), refused
        refused.append(problem)
    return None, refused


def _step_of(candidate: int | MemorySet) -> int:
    return candidate.key[1] if isinstance(candidate, MemorySet) else candidate


def _steps_to_try(
    folder: StorageFolder, config: CheckpointConfig, steps: list[int], applied_load_step: int
) -> list[int]:
    """The steps to verify, in order: only checkpoint.load_step if it applies, else newest first."""
    load_step = config.load_step
    if config.saves and steps and load_step == applied_load_step != -1:
        logger.info(
            "checkpoint.load_step = %d was applied by an earlier start: resuming from the"
            " newest checkpoint. To roll back again, delete %s/%s.",
            load_step,
            folder,
            LOAD_STEP_FILE,
        )
        load_step = -1
    if load_step == -1:
        return steps[::-1]
    if load_step not in steps:
        existing = ", ".join(map(str, steps)) or "none"
        raise CheckpointError(
            f"checkpoint.load_step = {load_step}: {folder} has no checkpoint of that step."
            f" Existing steps: {existing}.",
            fix="Use one of them, or -1 for the newest.",
        ).mark_on_all_ranks()
    return [load_step]


def verify_on_all_ranks(
    folder: StorageFolder, verify: str, group: dist.ProcessGroup | None
) -> tuple[CheckpointManifest | None, str]:
    """A checkpoint's manifest, and what is wrong with it on any rank; empty if it is valid.

    Each rank reads the manifest, which detects a folder that is not shared between machines. Rank 0
    compares the sizes of all files; their hashes are divided among the ranks. Raises
    CheckpointError if the storage is unreachable, because the checkpoint may be valid.
    """

    def check() -> CheckpointManifest:
        manifest = read_checkpoint_manifest(
            folder, sizes=verify != "off", files=dist.get_rank() == 0
        )
        if verify == "full":
            by_size = sorted(manifest.files, key=lambda name: manifest.files[name].bytes)
            own = by_size[dist.get_rank() :: dist.get_world_size()]  # the ranks divide the files
            check_hashes(folder, manifest, own)
        return manifest

    manifest, error = capture_user_error(check)
    problems = gather_problems("" if error is None else str(error), group)
    if problems:
        unreachable = str(error) if isinstance(error, StorageUnreachable) else ""
        if storage_problems := gather_problems(unreachable, group):
            raise CheckpointError(" ".join(storage_problems)).mark_on_all_ranks()
    return manifest, " ".join(problems)
