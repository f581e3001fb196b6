"""Tasks: pure functions from folders to a folder, named by a hash of all they depend on.

A task's folder appears in one rename, when it is complete. So an interrupted run continues with
the tasks whose folders are missing, and a changed setting reruns only what depends on it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import socket
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from titanlite.data.manifest import hash_file
from titanlite.errors import DataError
from titanlite.files import fsync_folder, parse_json, write_file_atomically
from titanlite.log import logger
from titanlite_corpus.counts import merge_counts
from titanlite_corpus.engine import EngineCall, TaskEngine
from titanlite_corpus.hashing import hash_json

RECORD = "done.json"  # written last in the folder of a task
_UNCOMMITTED = ".uncommitted"  # folder for tasks that are being run
_LOCK = ".lock"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_VISIBLE_TRIES = 90  # about a second each

Counts = dict[str, Any]  # what a task counted, as JSON
TaskFunction = Callable[[Path, list[Path], Any], Counts]


@dataclass(frozen=True)
class Task:
    """One call of a pure function of module level: `function(out, inputs, arguments) -> counts`.

    It reads the folders `inputs` and writes into the empty folder `out`. Counts and arguments are
    JSON. Common counts: `documents_in`, `documents_out`, `bytes_in`, `bytes_out` (of text).
    """

    stage: str
    function: TaskFunction
    arguments: Any
    inputs: tuple[str, ...] = ()  # keys of the tasks whose folders it reads
    version: int = 1  # increase it when the function's result changes

    @cached_property
    def key(self) -> str:
        """ "stage/hash": the folder of its result, within the folder of all work."""
        name = f"{self.function.__module__}.{self.function.__qualname__}"
        content = [name, self.version, self.arguments, self.inputs]
        return f"{self.stage}/{hash_json(content)}"


@dataclass(frozen=True)
class StageProgress:
    """How far a stage is; reported when it begins and after each of its tasks."""

    stage: str
    tasks: int
    done: int
    reused: int  # of those done: by an earlier run
    counts: Counts | None  # of the task that was done now; None when the stage begins


class TaskProgress(Protocol):
    """Called with the progress of a stage."""

    def __call__(self, update: StageProgress, /) -> None: ...


def no_progress(update: StageProgress) -> None:
    """A `TaskProgress` that shows nothing."""


def run_tasks(
    tasks: Sequence[Task], work: Path, engine: TaskEngine, progress: TaskProgress = no_progress
) -> list[Counts]:
    """Run the tasks that have no folder in `work` yet; returns the counts of all, in order.

    `tasks` lists a task after those of its inputs that did not run before. Raises DataError, also
    if the disk is full.
    """
    counts: dict[str, Counts] = {}
    for level in _levels(tasks):
        _run_level(level, work, engine, progress, counts)
    return [counts[task.key] for task in tasks]


def _levels(tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks by depth: those of one level do not depend on each other. Each key once.

    Inputs that are not in the list were run before.
    """
    depths: dict[str, int] = {}
    levels: list[list[Task]] = []
    for task in tasks:
        if task.key in depths:
            continue
        depth = depths[task.key] = 1 + max((depths.get(key, -1) for key in task.inputs), default=-1)
        levels += [[]] if depth == len(levels) else []
        levels[depth].append(task)
    return levels


def _run_level(
    tasks: Sequence[Task],
    work: Path,
    engine: TaskEngine,
    progress: TaskProgress,
    counts: dict[str, Counts],
) -> None:
    """Run the tasks of one level; adds the counts of each to `counts`."""
    for task in tasks:
        if (known := read_counts(work / task.key)) is not None:
            counts[task.key] = known
    totals = Counter(task.stage for task in tasks)
    reused = Counter(task.stage for task in tasks if task.key in counts)
    done = Counter(reused)
    for stage, total in totals.items():
        progress(StageProgress(stage, total, done[stage], reused[stage], None))
    todo = [task for task in tasks if task.key not in counts]
    calls = [EngineCall(execute_task, (task, str(work)), task.key) for task in todo]
    for index, result in engine.run(calls):
        stage = todo[index].stage
        _wait_until_visible(work / todo[index].key)
        counts[todo[index].key] = result
        done[stage] += 1
        progress(StageProgress(stage, totals[stage], done[stage], reused[stage], result))


def _wait_until_visible(folder: Path) -> None:
    """Wait for the result of another machine: a network file system may show it later.

    NFS keeps for 60 s, by default, that a folder does not exist.
    """
    for _ in range(_VISIBLE_TRIES):
        if (folder / RECORD).exists():
            return
        time.sleep(1)
    raise DataError(
        f"{folder}: was made by a worker, but does not appear here.",
        fix="Use a folder on a file system that all workers share.",
    )


def execute_task(task: Task, work: str) -> Counts:
    """Run one task, and commit its folder; raises DataError.

    Two processes may run the same task at once: the first commits, the second finds its folder.
    """
    target = Path(work, task.key)
    if (known := read_counts(target)) is not None:  # its worker was lost after the commit
        return known
    name = f"{task.key.replace('/', '-')}.{socket.gethostname()}.{uuid.uuid4().hex}"
    out = Path(work, _UNCOMMITTED, name)
    try:
        out.mkdir(parents=True)
        started = time.process_time()
        counts = task.function(out, [Path(work, key) for key in task.inputs], task.arguments)
        counts = {**counts, "seconds": round(time.process_time() - started, 3)}
        _write_record(out, counts)
        _commit_folder(out, target)
    except MemoryError as error:
        raise DataError(
            f"{task.key}: memory ran out.",
            fix="Use fewer --workers, then run the same command again: finished tasks are reused.",
        ) from error
    except OSError as error:
        raise _disk_error(Path(work), f" in stage {task.stage}", error) from error
    finally:
        shutil.rmtree(out, ignore_errors=True)
    return counts


@contextmanager
def readable_disk_errors(folder: Path) -> Iterator[None]:
    """Raise an OSError as a DataError that names `folder`."""
    try:
        yield
    except OSError as error:
        raise _disk_error(folder, "", error) from error


def _disk_error(folder: Path, stage: str, error: OSError) -> DataError:
    reason = error.strerror or error
    if error.errno in _FULL_DISK:
        return DataError(
            f"{folder}: cannot be written{stage} ({reason}).",
            fix="Free space on this disk, then run the same command again: finished tasks are"
            " reused.",
        )
    return DataError(f"{error.filename or folder}: failed{stage} ({reason}).")


def _write_record(out: Path, counts: Counts) -> None:
    """Flush the files of a task to the disk, then write their sizes and hashes."""
    files = {}
    for path in sorted(path for path in out.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
        entry = {"bytes": path.stat().st_size, "hash": hash_file(path)}
        files[str(path.relative_to(out))] = entry
    record = json.dumps({"counts": counts, "files": files}, sort_keys=True)
    write_file_atomically(out / RECORD, record.encode())


def _commit_folder(out: Path, target: Path) -> None:
    """Give a complete folder its name; no-op if another process already has."""
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.rename(out, target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return
    fsync_folder(target.parent)


def read_counts(folder: Path) -> Counts | None:
    """The counts of a task's folder; None if it does not exist, or was damaged and removed."""
    try:
        record = parse_json((folder / RECORD).read_bytes())
        sizes = {name: entry["bytes"] for name, entry in record["files"].items()}
        if all((folder / name).stat().st_size == size for name, size in sizes.items()):
            return record["counts"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        if not folder.exists():
            return None
    logger.warning("%s: is damaged, and is made again", folder)
    shutil.rmtree(folder)
    return None


class WorkFolder:
    """A folder of work while one command uses it; a context manager.

    Calling it runs tasks there, as `run_tasks` does. Raises DataError if another command uses it.
    """

    def __init__(self, path: Path, engine: TaskEngine, progress: TaskProgress = no_progress):
        self.path, self._engine, self._progress = path, engine, progress
        self.tasks: dict[str, Task] = {}  # all that were run, by key
        self.counts: dict[str, Counts] = {}  # of each stage, in the order in which they ran
        self.reused_tasks = 0
        self._exit = ExitStack()

    def __enter__(self) -> WorkFolder:
        self.path.mkdir(parents=True, exist_ok=True)
        self._exit.enter_context(_exclusive_use(self.path))
        shutil.rmtree(self.path / _UNCOMMITTED, ignore_errors=True)  # of a run that was killed
        return self

    def __exit__(self, *_) -> None:
        self._exit.close()

    def __call__(self, tasks: Sequence[Task]) -> list[Counts]:
        results = run_tasks(tasks, self.path, self._engine, self._show)
        for stage in dict.fromkeys(task.stage for task in tasks):
            new = [c for t, c in zip(tasks, results, strict=True) if t.stage == stage]
            self.counts[stage] = merge_counts([self.counts.get(stage, {}), *new])
        self.tasks |= {task.key: task for task in tasks}
        return results

    def counts_of(self, task: Task) -> Counts:
        """The counts of a task that ran here."""
        counts = read_counts(self.path / task.key)
        assert counts is not None, task.key
        return counts

    def remove_other_work(self) -> None:
        """Remove the results of all tasks that did not run here: those of other settings."""
        remove_other_work(self.path, list(self.tasks.values()))

    def _show(self, update: StageProgress) -> None:
        self.reused_tasks += update.reused if update.counts is None else 0
        self._progress(update)


def remove_other_work(work: Path, tasks: Sequence[Task]) -> None:
    """Remove the folders in `work` that belong to none of `tasks`."""
    named = {task.key for task in tasks}
    for stage in (folder for folder in work.iterdir() if folder.is_dir()):
        for folder in stage.iterdir():
            if f"{stage.name}/{folder.name}" not in named:
                shutil.rmtree(folder)
        if not any(stage.iterdir()):
            stage.rmdir()


@contextmanager
def _exclusive_use(work: Path) -> Iterator[None]:
    """Hold the lock of a folder of work; raises DataError if another process holds it."""
    with open(work / _LOCK, "w", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{work}: another process is working there.",
                fix="Wait until it ends, or choose another output folder.",
            ) from None
        except OSError as error:  # a file system without locks
            logger.warning("%s: cannot be locked (%s); run one command there", work, error.strerror)
        yield
