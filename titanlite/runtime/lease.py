"""The lease on a local folder: one job at a time writes there, and a dead job is replaced.

`lease.json` names the process that holds the folder; its modification time is the heartbeat. A
holder on this host is alive while its process is. A holder on another host is judged by its
heartbeat alone: it is dead if the time did not change for `STALE_SECONDS` on our clock, whatever
other clocks show. Leases are numbered, for fencing; `lease.count` counts them.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from functools import partial
from pathlib import Path

from titanlite.errors import CheckpointError, ConfigError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.threads import DeviceThread

LEASE_FILE = "lease.json"
COUNT_FILE = "lease.count"  # one byte for each lease ever taken; only appended to
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 30.0  # a network file system may show a heartbeat some seconds late
MISSING_SECONDS = 1.0  # another job may move a lease and put it back, which takes milliseconds


def acquire_lease(
    folder: Path,
    key: str = "job.dump_folder",
    *,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    stale_seconds: float = STALE_SECONDS,
    dead: set[Process] | None = None,
) -> Lease:
    """Acquire the folder that the setting `key` names; only one rank of a job calls it.

    Takes over the lease of a dead job: immediately if its process is known to be gone, otherwise
    after `stale_seconds` without a heartbeat. Raises ConfigError if another job holds the folder.
    `dead`: processes found without a heartbeat; one that held several folders is waited for once.
    """
    path = folder / LEASE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        while (created := _create_lease_file(path)) is None:
            _remove_dead_lease(path, key, stale_seconds, dead)
    except OSError as error:
        raise ConfigError(
            f"{key} = {folder}: {error.filename or path}: {error.strerror or error}.",
            fix=f"Use a writable folder, or another {key}.",
        ) from error
    return Lease(path, *created, heartbeat_seconds)


class Lease:
    """A folder that this process holds. `lost`: the reason why it lost the folder, else empty."""

    def __init__(self, path: Path, number: int, content: bytes, heartbeat_seconds: float):
        self.path, self.number, self.lost = path, number, ""
        self._content, self._heartbeat_seconds = content, heartbeat_seconds
        self._closed = threading.Event()
        self._thread = DeviceThread(self._send_heartbeats, "lease")
        self._thread.start()

    def close(self) -> None:
        """Release the folder, unless another job has taken it over."""
        self._closed.set()
        self._thread.join(self._heartbeat_seconds)  # not longer: its file system may hang
        with suppress(OSError):  # a lease that is left behind counts as dead
            if self.path.read_bytes() == self._content:
                self.path.unlink()

    def check(self) -> None:
        """Read the file, and raise CheckpointError unless this process still holds the folder."""
        try:
            seen = _read_lease_file(self.path)
            if seen is None:  # perhaps another job is putting it back, see _rename_away
                time.sleep(MISSING_SECONDS)
                seen = _read_lease_file(self.path)
        except OSError as error:
            raise CheckpointError(
                f"{self.path}: cannot be read, so another job may have taken it:"
                f" {error.strerror or error}."
            ) from error
        self._set_lost(seen.content if seen else None)
        if self.lost:
            raise CheckpointError(self.lost)

    def _set_lost(self, content: bytes | None) -> None:
        """Set `lost` if the lease file has other content, or is missing (None)."""
        if content is None:
            self.lost = f"{self.path}: was removed, so another job may write there now."
        elif content != self._content:
            holder = describe_holder(parse_holder(content))
            self.lost = f"{self.path}: {holder} has taken it from this job."

    def _send_heartbeats(self) -> None:
        times_missing = 0
        while not self.lost and not self._closed.wait(self._heartbeat_seconds):
            try:
                content = self._touch()
            except FileNotFoundError:
                # Once is not enough: another job may be putting it back, see _rename_away.
                times_missing += 1
                if times_missing == 2:
                    self._set_lost(None)
            except OSError:  # a file system that hangs or is away; others see no heartbeat either
                continue
            else:
                times_missing = 0
                self._set_lost(content)

    def _touch(self) -> bytes:
        """Update the file's time if it is this job's; returns its content."""
        with self.path.open("r+b") as file:
            content = file.read()
            if content == self._content:
                os.utime(file.fileno())  # by descriptor: the path may be another job's by now
            return content


# --- acquire a lease -----------------------------------------------------------------------------


@dataclass(frozen=True)
class LeaseSnapshot:
    """A lease at one moment; `content` and `mtime` are only compared for equality."""

    holder: Holder | None  # None: it cannot be read
    content: bytes
    mtime: int = 0  # ns, by the file system's clock; 0 in an object store
    released: bool = False


def find_dead_lease(
    read: Callable[[], LeaseSnapshot | None],
    where: object,
    stale_seconds: float,
    refuse: Callable[[str], ConfigError],
    dead: set[Process] | None = None,
) -> tuple[LeaseSnapshot, str] | None:
    """A dead job's lease, with a text about it; None once there is none or it is released.

    Waits up to `stale_seconds` for a heartbeat if only that can show whether the holder is alive.
    Raises `refuse(holder)` if it is. `dead`: see `acquire_lease`.
    """
    dead = set() if dead is None else dead
    seen = read()
    if seen is None or seen.released:
        return None
    name, alive = describe_holder(seen.holder), is_process_alive(seen.holder)
    reason, process = "that process has ended", seen.holder.process if seen.holder else None
    if alive is None and process in dead:
        return seen, f"{name}: no heartbeat in another folder"
    if alive is None:
        logger.info(
            "%s: held by %s; watching its heartbeat for up to %g s", where, name, stale_seconds
        )
        deadline = time.monotonic() + stale_seconds
        while (now := read()) == seen and time.monotonic() < deadline:
            time.sleep(min(1.0, stale_seconds / 20))
        if now is None or now.released:
            return None
        if now.holder != seen.holder:  # another job's by now
            return find_dead_lease(read, where, stale_seconds, refuse, dead)
        alive, reason = now != seen, f"no heartbeat for {stale_seconds:g} s"
    if alive:
        raise refuse(name)
    if process is not None:
        dead.add(process)
    return seen, f"{name}: {reason}"


def _create_lease_file(path: Path) -> tuple[int, bytes] | None:
    """Write the lease if there is none; returns its number and content, or None."""
    try:
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
    except FileExistsError:
        with suppress(FileNotFoundError):  # released in the meantime
            # A dangling link or a FIFO would be waited for forever.
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise OSError(errno.EINVAL, "is not a regular file", str(path)) from None
        return None
    try:
        number = _next_number(path.with_name(COUNT_FILE))  # only by the job that created `path`
        content = json.dumps(asdict(new_holder(number)), indent=1).encode()
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    return number, content


def _next_number(path: Path) -> int:
    """Append a byte to the count file; returns its size."""
    with path.open("ab", buffering=0) as file:
        file.write(b".")
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_size


def _remove_dead_lease(
    path: Path, key: str, stale_seconds: float, dead_processes: set[Process] | None
) -> None:
    """Remove a dead job's lease, unless it is gone already; raises ConfigError if it is alive."""
    refuse = partial(lease_conflict_error, key, path.parent)
    read = partial(_read_lease_file, path)
    dead = find_dead_lease(read, path, stale_seconds, refuse, dead_processes)
    if dead is None:
        return
    judged, text = dead
    with _folder_lock_on_this_host(path.parent):
        # it may be another lease by now; of several callers, one removes it
        removed = _read_lease_file(path) == judged and _rename_away(path, judged)
    if removed:
        logger.warning("%s: taken over from %s", path, text)


def _read_lease_file(path: Path) -> LeaseSnapshot | None:
    """The lease file now; opened each time, because NFS asks its server on open."""
    try:
        with path.open("rb") as file:
            mtime = os.fstat(file.fileno()).st_mtime_ns
            content = file.read()
            return LeaseSnapshot(parse_holder(content), content, mtime)
    except FileNotFoundError:
        return None


def _rename_away(path: Path, judged: LeaseSnapshot) -> bool:
    """Remove the judged lease even if jobs on other hosts try the same.

    No system call removes a file only if it has a given content. So the file is renamed, which one
    job alone can do, read again, and put back if it is another job's lease by now.
    """
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return False
    unchanged = _read_lease_file(aside) == judged
    if not unchanged:
        with suppress(FileExistsError):  # a third job was faster; the owner will notice
            os.link(aside, path)
    aside.unlink()
    return unchanged


@contextmanager
def _folder_lock_on_this_host(folder: Path) -> Iterator[None]:
    """Exclude other processes of this host; between hosts, the renaming has to be enough."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # NFS cannot lock folders
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def lease_conflict_error(key: str, folder: object, holder: str) -> ConfigError:
    """The error for a folder that another job holds."""
    return ConfigError(
        f"{key} = {folder}: another job is writing there: {holder}.",
        fix=f"Use another {key}, or end that process first.",
    )


# --- the holder of a lease -----------------------------------------------------------------------


@dataclass(frozen=True)
class Process:
    """What identifies a process, also on other hosts and after it has ended."""

    host: str
    boot: str  # boot id of the host: two hosts may have one name (containers, cloned images)
    processes: int | None  # the pid namespace of `pid`; None: /proc does not show it
    pid: int
    process_started: int | None  # ticks since boot: identifies a process whose pid is reused


@dataclass(frozen=True)
class Holder(Process):
    """The process that a lease names; its fields are the keys of `lease.json`."""

    started: float  # by the host's clock, for display only
    token: str  # unique for each lease
    number: int = 0  # larger than that of every lease before

    @property
    def process(self) -> Process:
        return Process(self.host, self.boot, self.processes, self.pid, self.process_started)


def parse_holder(content: bytes) -> Holder | None:
    """The holder that a lease names; None if it cannot be read, as after a crash while writing."""
    try:
        holder = Holder(**parse_json(content))
        valid = holder.pid in range(1, 1 << 31) and isinstance(holder.number, int)
        return holder if valid and describe_holder(holder) else None
    except (ValueError, TypeError, OverflowError, OSError):
        return None


def describe_holder(holder: Holder | None) -> str:
    """A holder as text, for log lines and errors."""
    if holder is None:
        return "an unknown process (the lease cannot be read)"
    since = datetime.fromtimestamp(holder.started).astimezone()
    return f"process {holder.pid} on {holder.host} (since {since:%Y-%m-%d %H:%M:%S %z})"


def is_process_alive(process: Process | None) -> bool | None:
    """Whether a process is alive; None if only its heartbeat can show it."""
    here = current_process()
    if process is None or here.processes is None or here.process_started is None:
        return None
    if any(getattr(process, key) != getattr(here, key) for key in ("host", "boot", "processes")):
        return None
    try:
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's process, perhaps hidden in /proc
        pass
    state, started = _read_process_state(process.pid)
    if started is None:
        return None
    return started == process.process_started and state not in "ZX"  # a zombie writes nothing


def new_holder(number: int) -> Holder:
    """This process as the holder of a new lease."""
    process = asdict(current_process())
    return Holder(**process, started=time.time(), token=uuid.uuid4().hex, number=number)


def current_process() -> Process:
    boot, processes = "", None
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        if os.readlink("/proc/self") == str(os.getpid()):  # else /proc is of another namespace
            processes = os.stat("/proc/self/ns/pid").st_ino
    _, started = _read_process_state("self")
    return Process(socket.gethostname(), boot, processes, os.getpid(), started)


def process_age() -> float:
    """Seconds since this process was started; 0 where /proc does not show it."""
    _, started = _read_process_state("self")
    if started is None:
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _read_process_state(pid: int | str) -> tuple[str, int | None]:
    """A process's state letter, and when it started in ticks since boot."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", None
    fields = text.rpartition(")")[2].split()  # the process name before it may contain ") "
    return fields[0], int(fields[19])
