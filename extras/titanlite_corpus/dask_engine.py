"""Run calls on a Dask cluster that is already there: many machines with a common file system.

Dask places calls, balances them, and repeats those of workers and machines that are lost. So a
call may run twice, also at the same time; the folder of a task is committed once.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import socket
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

import titanlite
from titanlite.errors import ConfigError, DataError, UserError
from titanlite.files import parse_json
from titanlite.log import logger, pluralize
from titanlite_corpus.engine import STALL_SECONDS, EngineCall, count_progress_with
from titanlite_corpus.extras import import_extra

AGAIN = "then run the same command again: finished tasks are reused."
CONNECT_SECONDS = 20.0
_REPORT_SECONDS = 5.0  # between two progress messages of a task
# shards may depend on them; those of an extra may be missing on all machines
_PACKAGES = (
    *("distributed", "numpy", "pyarrow", "xxhash", "tiktoken", "tokenizers"),
    *("fastwarc", "resiliparse", "datasets", "py3langid", "jinja2"),
)


class DaskEngine:
    """A `TaskEngine` on the cluster of an existing scheduler; a context manager.

    `address` is that of the scheduler (tcp://host:8786), or the path of its scheduler file (.json).
    `folder` is on the file system that all machines share. Raises ConfigError if the scheduler is
    not reached or has other versions; DataError if the connection is lost, if workers die again and
    again with the same call, or if no call makes progress for `stall_seconds`.
    """

    def __init__(self, address: str, folder: Path, stall_seconds: float = STALL_SECONDS):
        self._address, self._folder, self._stall_seconds = address, folder, stall_seconds
        self._client: Any = None
        self._context: _CommandContext | None = None
        self._marker: Any = None
        self._progress_time = time.monotonic()

    def __enter__(self) -> DaskEngine:
        self._client = _connect(self._address)
        try:
            _check_versions(self._client)
            for worker, threads in self._client.nthreads().items():
                if threads > 1:  # Python executes one at a time
                    logger.warning("%s runs %d tasks at once: use --nthreads 1", worker, threads)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._marker is not None:
            self._marker.close()
        self._client.close(timeout=2)

    def run(self, calls: Sequence[EngineCall]) -> Iterator[tuple[int, Any]]:
        """Yield (index of the call, its result) as calls finish; raises what a call raises."""
        if not calls:
            return
        run, finished = uuid.uuid4().hex, queue.SimpleQueue[Any]()
        # Dask's dashboard groups keys by what is before the first "-"
        keys = [f"{call.name.replace('/', '-')}-{run}-{n}" for n, call in enumerate(calls)]
        context = self._open_context()
        futures = self._client.map(_run_on_worker, calls, [context] * len(calls), key=keys)
        indices = {key: index for index, key in enumerate(keys)}
        running = {future.key: future for future in futures}
        try:
            for future in futures:
                future.add_done_callback(finished.put)
            del futures, future  # the scheduler keeps a result as long as its future exists
            self._progress_time = time.monotonic()
            while running:
                future = self._next(finished, [calls[indices[key]] for key in running])
                index = indices[future.key]
                yield index, self._result(future, calls[index])
                del running[future.key]
        finally:
            if running:
                self._client.cancel(list(running.values()), force=True)

    def _open_context(self) -> _CommandContext:
        """What workers check; made once, when the folder exists."""
        if self._context is None:
            folder = self._folder.absolute()
            self._marker = tempfile.NamedTemporaryFile(dir=folder, prefix=".dask-")  # noqa: SIM115
            topic = f"titanlite-{uuid.uuid4().hex}"
            self._context = _CommandContext(
                os.getcwd(), self._marker.name, topic, describe_environment()
            )
            self._client.subscribe_topic(topic, self._note_progress)
        return self._context

    def _note_progress(self, _: object) -> None:
        self._progress_time = time.monotonic()

    def _next(self, finished: queue.SimpleQueue, running: Sequence[EngineCall]) -> Any:
        """The next finished future; raises DataError if no call makes progress for too long."""
        warned = False
        while True:
            try:
                future = finished.get(timeout=self._stall_seconds / 20)
                self._progress_time = time.monotonic()
                return future
            except queue.Empty:
                idle = time.monotonic() - self._progress_time
            if idle > self._stall_seconds:
                raise self._stalled_error(running)
            if idle <= self._stall_seconds / 5:
                warned = False
            elif not warned:
                warned = True
                logger.warning(
                    "no task has made progress for %.0f s on %s; the limit is %.0f s",
                    idle,
                    pluralize(self._count_workers(), "worker"),
                    self._stall_seconds,
                )

    def _count_workers(self) -> int:
        """Workers that the scheduler knows; none if it cannot be reached."""
        try:
            return len(self._client.nthreads())
        except (OSError, TimeoutError):
            return 0

    def _stalled_error(self, running: Sequence[EngineCall]) -> DataError:
        workers = pluralize(self._count_workers(), "worker")
        first = min((call.name for call in running), default="none")
        return DataError(
            f"{self._address}: no task has made progress for {self._stall_seconds:g} s on"
            f" {workers}; {len(running)} are not finished, the first is {first}.",
            fix=f"Check or start workers, {AGAIN} --stall-seconds allows more time.",
        )

    def _result(self, future: Any, call: EngineCall) -> Any:
        """The result of a call; raises its error."""
        from distributed import KilledWorker

        try:
            # waits if the worker that had the result died, until another one made it again
            return future.result(timeout=self._stall_seconds)
        except UserError:  # of the call
            raise
        except KilledWorker as error:
            raise DataError(
                f"{call.name}: {error.allowed_failures + 1} workers died while they ran it, the"
                f" last one was {error.last_worker.address}; perhaps memory ran out.",
                fix="See the logs of the workers. Start fewer of them on a machine, or with a"
                f" larger --memory-limit, {AGAIN}",
            ) from None
        except CancelledError:
            raise DataError(
                f"{self._address}: the connection to the scheduler was lost.",
                fix=f"Start the scheduler and workers, {AGAIN}",
            ) from None
        except TimeoutError:
            raise self._stalled_error([call]) from None
        except Exception as error:
            if missing := _missing_module(error):
                raise ConfigError(
                    f'{self._address}: the cluster has no Python module "{missing}".',
                    fix="Install the same packages for the scheduler, all workers and this"
                    " command.",
                ) from None
            raise


def _missing_module(error: BaseException | None) -> str | None:
    """The name of the module that was not found, by this error or one that caused it."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError):
            return error.name
        error = error.__cause__ or error.__context__
    return None


def _connect(address: str) -> Any:
    """A client of a scheduler; raises ConfigError."""
    distributed = import_extra("distributed", "dask", "--engine dask")
    _quieten_dask()
    if address.endswith(".json"):
        address = _read_scheduler_file(address)
    try:
        asyncio.run(_probe(address))  # a Client that fails leaves a thread that prints tracebacks
        with warnings.catch_warnings():  # versions are checked by _check_versions
            warnings.simplefilter("ignore")
            return distributed.Client(
                address, timeout=CONNECT_SECONDS, set_as_default=False, name="titanlite"
            )
    except (OSError, ValueError, TypeError, KeyError) as error:
        reason = str(error).split("\n")[0]
        raise ConfigError(
            f"--engine-address {address}: no Dask scheduler answers ({reason}).",
            fix="Start one with `dask scheduler`, which prints its address; it must have the"
            f" version of distributed that is installed here, {version('distributed')}.",
        ) from None


def _read_scheduler_file(path: str) -> str:
    """The address in the file that `dask scheduler --scheduler-file` wrote."""
    try:
        return str(parse_json(Path(path).read_bytes())["address"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--engine-address {path}: is not a scheduler file ({error}).",
            fix="Start the scheduler with `dask scheduler --scheduler-file FILE.json`.",
        ) from None


async def _probe(address: str) -> None:
    """Connect to a scheduler once; raises OSError or ValueError."""
    from distributed.comm import connect

    connection = await connect(address, timeout=CONNECT_SECONDS)
    await connection.close()


def _quieten_dask() -> None:
    """What Dask logs about a lost connection becomes one error; hide its log."""
    for name in ("distributed", *logging.root.manager.loggerDict):
        if name.split(".")[0] == "distributed":
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _check_versions(client: Any) -> None:
    """Raise ConfigError if scheduler or workers have another Python or Dask than this process."""
    versions = client.get_versions()
    here = _relevant_versions(versions["client"])
    others = {"the scheduler": versions["scheduler"], **versions["workers"]}
    differences = [
        f"{name} has {key} {there[key]}, this process {value}"
        for name, there in ((n, _relevant_versions(v)) for n, v in others.items())
        for key, value in here.items()
        if there[key] != value
    ]
    if differences:
        more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
        raise ConfigError(
            f"versions differ: {'; '.join(differences[:3])}{more}.",
            fix="Install the same versions everywhere.",
        )


def _relevant_versions(versions: dict[str, Any]) -> dict[str, str]:
    packages = versions["packages"]
    python = ".".join(packages["python"].split(".")[:2])
    return {"python": python, "dask": packages["dask"], "distributed": packages["distributed"]}


# --- on workers ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _CommandContext:
    """What a worker needs to have in common with the command, and where progress is reported."""

    directory: str  # the current directory: paths may be relative
    marker: str  # a file that exists while the command runs
    topic: str
    environment: dict[str, str]

    def check(self) -> None:
        """Enter the directory; raises UserError if this worker cannot run tasks of the command."""
        host = socket.gethostname()
        here = describe_environment()
        for name, value in self.environment.items():
            if here[name] != value:
                raise ConfigError(
                    f"worker on {host}: has {name} {here[name]}, the command {value}.",
                    fix="Install the same versions everywhere, and restart the workers.",
                )
        try:
            if os.getcwd() != self.directory:
                os.chdir(self.directory)
            os.stat(self.marker)
        except OSError as error:
            raise DataError(
                f"worker on {host}: {error.filename} cannot be used ({error.strerror}).",
                fix="Use a file system that all machines mount at the same path, and run the"
                " command in a folder of it.",
            ) from None


@lru_cache
def describe_environment() -> dict[str, str]:
    """Versions that shards may depend on, and a hash of titanlite's own code that makes them."""
    digest = xxhash.xxh3_64()
    for folder in (Path(__file__).parent, Path(titanlite.__file__).parent / "data"):
        for path in sorted(folder.rglob("*.py")):
            if "tests" not in path.parts:
                name = f"{folder.name}/{path.relative_to(folder)}\0"
                digest.update(name.encode() + path.read_bytes())
    versions = {"python": "{}.{}".format(*sys.version_info), "titanlite": digest.hexdigest()}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "(not installed)"
    return versions


class TaskCancelled(Exception):
    """The command ended, so nobody needs the result of this call."""


class _ProgressReport(threading.local):
    """The progress of the call that runs in each thread of a worker."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._key: Any = None
        self._topic, self._reported = "", 0.0

    def start(self, worker: Any, topic: str) -> None:
        """A call begins in this thread."""
        self._worker, self._key, self._topic = worker, worker.get_current_task(), topic
        self._reported = 0.0

    def __call__(self) -> None:
        """Send a message that the call makes progress; raises TaskCancelled if nobody waits."""
        task = self._worker.state.tasks.get(self._key)
        if task is None or task.state == "cancelled":  # Dask does not interrupt a thread
            raise TaskCancelled
        if time.monotonic() - self._reported > _REPORT_SECONDS:
            self._reported = time.monotonic()
            self._worker.log_event(self._topic, str(self._key))


_progress_report = _ProgressReport()


def _run_on_worker(call: EngineCall, context: _CommandContext) -> Any:
    """The result of a call; raises UserError if this worker cannot run it."""
    from distributed import get_worker

    _progress_report.start(get_worker(), context.topic)
    count_progress_with(_progress_report)
    context.check()
    return call.function(*call.arguments)
