"""The lease on a local folder: one job at a time writes there, and a dead one is not waited for.

`lease.json` says who holds the folder; its modification time is the heartbeat. A holder on this
host is alive while its process is. Of one elsewhere only the heartbeat tells: it is dead when its
time was seen to stand still for long enough, on our clock, whatever the clocks of others say.
Each taking gets a larger number than those before, a fencing number, counted in `lease.count`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path

from titanlite.errors import CheckpointError, ConfigError
from titanlite.files import parse_json
from titanlite.log import logger

LEASE_FILE = "lease.json"
COUNT_FILE = "lease.count"  # a byte for each taking of the lease; only ever appended to
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0  # a network file system may show a heartbeat some seconds late
MISSING_SECONDS = 1.0  # a lease that another job puts back is away for milliseconds


def acquire_lease(
    folder: Path,
    key: str = "job.dump_folder",
    *,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    stale_seconds: float = STALE_SECONDS,
) -> Lease:
    """Hold the folder that the setting `key` names; only one rank of a job asks for it.

    A lease whose holder died is taken over, at once where that can be seen, else after watching its
    heartbeat for `stale_seconds`. Raises ConfigError where another job holds the folder.
    """
    path = folder / LEASE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (created := _create(path)) is None:
            _clear_the_way(path, key, stale_seconds)
    except OSError as error:
        raise ConfigError(
            f"{key} = {folder}: {error.filename or path}: {error.strerror or error}.",
            fix=f"Use a folder that can be written, or another {key}.",
            keys=(key,),
        ) from error
    return Lease(path, *created, heartbeat_seconds)


class Lease:
    """A folder that this process holds; `lost` says how it lost it, where it did."""

    def __init__(self, path: Path, number: int, content: bytes, heartbeat_seconds: float):
        self.path, self.number, self.lost = path, number, ""
        self._content, self._heartbeat_seconds = content, heartbeat_seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *raised) -> None:
        self.close()

    def close(self) -> None:
        """Give the folder back, unless somebody else holds it by now."""
        self._closed.set()
        self._thread.join(self._heartbeat_seconds)  # not longer: its file system may hang
        with suppress(OSError):  # what stays is a dead process's lease
            if self.path.read_bytes() == self._content:
                self.path.unlink()

    def check(self) -> None:
        """Raise CheckpointError unless the file says, now, that this process holds the folder."""
        try:
            seen = _look(self.path)
            if seen is None:  # for a moment, while who judged an older lease puts ours back
                time.sleep(MISSING_SECONDS)
                seen = _look(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read, so another job may have taken it:"
                f" {error.strerror or error}."
            ) from error
        self._judge(seen.content if seen else None)
        if self.lost:
            raise CheckpointError(self.lost)

    def _judge(self, found: bytes | None) -> None:
        if found is None:
            self.lost = f"{self.path}: was removed, so another job may write there now."
        elif found != self._content:
            self.lost = f"{self.path}: {describe(parse_holder(found))} has taken it from this job."

    def _keep(self) -> None:
        looks_without = 0
        while not self.lost and not self._closed.wait(self._heartbeat_seconds):
            try:
                found = self._beat()
            except FileNotFoundError:
                # Once is not enough: who judged an older lease may be putting ours back.
                looks_without += 1
                if looks_without == 2:
                    self._judge(None)
            except OSError:  # a file system that hangs or is away; others see no heartbeat either
                continue
            else:
                looks_without = 0
                self._judge(found)

    def _beat(self) -> bytes:
        """Touch the file if it is ours; returns what it holds."""
        with self.path.open("r+b") as file:
            found = file.read()
            if found == self._content:
                os.utime(file.fileno())  # by descriptor: the name may be another's by now
            return found


# --- taking it -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Seen:
    """What one look at a lease showed; `mtime` only ever tells whether it changed."""

    content: bytes
    mtime: int


def _create(path: Path) -> tuple[int, bytes] | None:
    """Write the lease where there is none; returns its number and content, or None."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        with suppress(FileNotFoundError):  # given back in between
            if not stat.S_ISREG(os.lstat(path).st_mode):  # a link to nothing or a FIFO has no end
                raise OSError(errno.EINVAL, "is not a regular file", str(path)) from None
        return None
    try:
        number = _count(path.with_name(COUNT_FILE))  # after creating: only one job at a time counts
        content = json.dumps(asdict(replace(this_process(), number=number)), indent=1).encode()
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return number, content


def _count(path: Path) -> int:
    """Count one more taking of the lease, and return how many there were."""
    with path.open("ab", buffering=0) as file:
        file.write(b".")
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _clear_the_way(path: Path, key: str, stale_seconds: float) -> None:
    """Take a dead job's lease away, or refuse; on return it is worth trying to create one."""
    seen = _look(path)
    if seen is None:
        return
    holder = parse_holder(seen.content)
    who, alive, why = describe(holder), is_alive(holder), "that process is gone"
    if alive is None:
        logger.info(
            "%s: held by %s; watching its heartbeat for up to %g s", path, who, stale_seconds
        )
        now = _watch(path, seen, stale_seconds)
        if now is None or now.content != seen.content:  # given back, or another's: judge anew
            return
        alive, why = now != seen, f"its heartbeat stood still for {stale_seconds:g} s"
    if alive:
        raise _refusal(path, key, who)
    if _take_away(path, seen):
        logger.warning("%s: taken over from %s: %s", path, who, why)


def _look(path: Path) -> _Seen | None:
    """What is there; opened each time, which is when NFS asks its server for the news."""
    try:
        with path.open("rb") as file:
            mtime = os.fstat(file.fileno()).st_mtime_ns
            return _Seen(file.read(), mtime)
    except FileNotFoundError:
        return None


def _watch(path: Path, seen: _Seen, seconds: float) -> _Seen | None:
    """What is there once it is not as `seen`; that itself when so many seconds have passed."""
    end = time.monotonic() + seconds
    while (now := _look(path)) == seen and time.monotonic() < end:
        time.sleep(min(1.0, seconds / 20))
    return now


def _take_away(path: Path, judged: _Seen) -> bool:
    """Remove a lease if it still is the one that was judged; of many who try, one does."""
    with _one_at_a_time(path.parent):
        return _look(path) == judged and _rename_away(path, judged)


def _rename_away(path: Path, judged: _Seen) -> bool:
    """The same where another host may come in between.

    Nothing removes a file on condition of what it holds. So it is renamed, which one alone can do,
    looked at again, and put back if it had changed hands.
    """
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    is_it = _look(aside) == judged
    if not is_it:
        with suppress(FileExistsError):  # a third was quicker, and the one put back will see it
            os.link(aside, path)
    aside.unlink()
    return is_it


@contextmanager
def _one_at_a_time(folder: Path) -> Iterator[None]:
    """Only one process of this host goes in; across hosts the renaming has to do."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # NFS locks no folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _refusal(path: Path, key: str, who: str) -> ConfigError:
    seen = _look(path)
    with tempfile.TemporaryFile(dir=path.parent) as probe:  # the file system's clock, not ours
        now = os.fstat(probe.fileno()).st_mtime_ns
    age = max(0, now - seen.mtime) / 1e9 if seen else 0.0
    return refusal(key, path.parent, f"{who}; its last heartbeat was {age:.0f} s ago")


def refusal(key: str, folder: object, who: str) -> ConfigError:
    """The error for a folder that another job holds."""
    return ConfigError(
        f"{key} = {folder}: another job is writing there: {who}.",
        fix=f"Use another {key}, or end that process first.",
        keys=(key,),
    )


# --- who holds it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """What a lease says of the process that took it."""

    host: str
    boot: str  # of that host: containers on one host may share a name, and hosts an image
    processes: int | None  # the namespace that `pid` is a number in; None: /proc does not say
    pid: int
    process_started: int | None  # in ticks since boot, so that a pid used again is another process
    started: float  # by that host's clock, for people only
    token: str  # of this one taking
    number: int = 0  # larger than that of every taking before


def parse_holder(content: bytes) -> Holder | None:
    """Whom a lease names; None where it cannot be read, as after a crash while it was written."""
    try:
        holder = Holder(**parse_json(content))
        sane = holder.pid in range(1, 1 << 31) and isinstance(holder.number, int)
        return holder if sane and describe(holder) else None
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def describe(holder: Holder | None) -> str:
    """A holder in words, for log lines and errors."""
    if holder is None:
        return "a process that it does not name"
    since = datetime.fromtimestamp(holder.started).astimezone()
    return f"process {holder.pid} on {holder.host} (since {since:%Y-%m-%d %H:%M:%S %z})"


def is_alive(holder: Holder | None) -> bool | None:
    """Whether that process is there; None where only its heartbeat can tell."""
    here = this_process()
    if holder is None or here.processes is None or here.process_started is None:
        return None
    if any(getattr(holder, key) != getattr(here, key) for key in ("host", "boot", "processes")):
        return None
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's, whose /proc may be hidden from us
        pass
    state, started = _process(holder.pid)
    if started is None:
        return None
    return started == holder.process_started and state not in "ZX"  # a zombie writes nothing


def this_process() -> Holder:
    """This process as the holder of a new lease."""
    boot, processes = "", None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if os.readlink("/proc/self") == str(os.getpid()):  # else /proc counts in another namespace
            processes = os.stat("/proc/self/ns/pid").st_ino
    started = _process("self")[1]
    host, token = socket.gethostname(), uuid.uuid4().hex
    return Holder(host, boot, processes, os.getpid(), started, time.time(), token)


def _process(pid: int | str) -> tuple[str, int | None]:
    """A process's state letter and when it started, in ticks since boot."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[19])
