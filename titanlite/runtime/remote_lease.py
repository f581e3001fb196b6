"""The lease on a folder in an object store, which can only write whole objects.

The object `lease-N.json` is lease number N, and the highest number holds the folder. A job acquires
the folder by creating the next number; of several jobs one succeeds, if the store supports
conditional puts (S3, Google Cloud Storage). Only the holder rewrites its object, to count up the
heartbeat and to release it. So no late heartbeat can undo what another job did.

Without conditional puts, two jobs that start simultaneously can both believe that they hold the
folder. The later put wins, and the other job notices at its next heartbeat, and before each commit
and each deletion.
"""

from __future__ import annotations

import json
import re
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace

from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.runtime.lease import (
    Holder,
    current_process,
    describe_holder,
    is_holder_alive,
    lease_conflict_error,
    parse_holder,
)
from titanlite.storage import StorageFolder, StorageUnreachable
from titanlite.threads import DeviceThread

HEARTBEAT_SECONDS = 10.0  # each one costs money: three requests (list, get, put)
STALE_SECONDS = 60.0


def acquire_remote_lease(
    folder: StorageFolder,
    key: str,
    *,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    stale_seconds: float = STALE_SECONDS,
) -> RemoteLease:
    """Acquire the folder that the setting `key` names; only one rank of a job calls it.

    Raises ConfigError if another job holds it, CheckpointError if the store fails.
    """
    holder = current_process()
    while True:
        numbers = lease_numbers(folder)
        if numbers:
            _wait_until_free(folder, numbers[-1], key, stale_seconds)
        number = max(numbers, default=0) + 1
        lease = RemoteLease(folder, replace(holder, number=number), heartbeat_seconds)
        if lease.create():
            break
    for older in numbers:
        with suppress(FileNotFoundError, StorageUnreachable):  # the next job deletes it
            folder.delete(_lease_object_name(older))
    lease.start()
    return lease


def lease_numbers(folder: StorageFolder) -> list[int]:
    """The numbers of the leases on a folder, ascending; the last lease holds the folder."""
    matches = (re.fullmatch(r"lease-(\d{1,18})\.json", name) for name in folder.sizes())
    return sorted(int(match[1]) for match in matches if match)


class RemoteLease:
    """A folder that this process holds. `lost`: the reason why it lost the folder, else empty."""

    def __init__(self, folder: StorageFolder, holder: Holder, heartbeat_seconds: float):
        self.folder, self.number, self.lost = folder, holder.number, ""
        self._holder, self._heartbeat_seconds = holder, heartbeat_seconds
        self._beats = 0
        self._closed = threading.Event()
        self._thread = DeviceThread(self._send_heartbeats, "lease")

    def create(self) -> bool:
        """Create the lease object if there is none; returns whether this job created it."""
        if self.folder.create(_lease_object_name(self.number), self._content()):
            return True
        # If the answer to a successful put was lost, the repeated put is refused.
        with suppress(FileNotFoundError):
            return _read_lease_object(self.folder, self.number).holder == self._holder
        return False

    def start(self) -> None:
        """Start the heartbeat."""
        self._thread.start()

    def check(self) -> None:
        """Read the store, and raise CheckpointError unless this process still holds the folder."""
        last = max(lease_numbers(self.folder), default=0)
        try:
            holder = _read_lease_object(self.folder, last).holder
        except FileNotFoundError:
            self.lost = f"{self.folder}: the lease of this job was removed."
        else:
            if holder != self._holder:
                self.lost = f"{self.folder}: {describe_holder(holder)} has taken it from this job."
        if self.lost:
            raise CheckpointError(self.lost)

    def close(self) -> None:
        """Release the folder, unless another job has taken it over."""
        self._closed.set()
        self._thread.join(self._heartbeat_seconds)
        with suppress(CheckpointError):  # an unreleased lease counts as a dead process's
            self.check()
            content = self._content(released=True)
            self.folder.write_atomically(_lease_object_name(self.number), content)

    def _send_heartbeats(self) -> None:
        while not self.lost and not self._closed.wait(self._heartbeat_seconds):
            with suppress(CheckpointError):  # a store that fails is tried again
                self.check()
                self._beats += 1
                self.folder.write_atomically(_lease_object_name(self.number), self._content())

    def _content(self, released: bool = False) -> bytes:
        state = {"holder": asdict(self._holder), "beats": self._beats, "released": released}
        return json.dumps(state, indent=1).encode()


def _lease_object_name(number: int) -> str:
    return f"lease-{number:06}.json"


@dataclass(frozen=True)
class RemoteLeaseState:
    """A lease object at one moment; `content` is only compared for equality."""

    holder: Holder | None  # None: it cannot be read
    released: bool
    content: bytes


def _read_lease_object(folder: StorageFolder, number: int) -> RemoteLeaseState:
    content = folder.read(_lease_object_name(number))
    with suppress(ValueError, TypeError, KeyError):
        state = parse_json(content)
        holder = parse_holder(json.dumps(state["holder"]).encode())
        return RemoteLeaseState(holder, state["released"] is True, content)
    return RemoteLeaseState(None, False, content)


def _wait_until_free(folder: StorageFolder, number: int, key: str, stale_seconds: float) -> None:
    """Return when a lease is released or removed, or its holder is dead.

    Raises ConfigError if the holder is alive.
    """
    with suppress(FileNotFoundError):  # removed
        state = _read_lease_object(folder, number)
        if state.released:
            return
        name, alive = describe_holder(state.holder), is_holder_alive(state.holder)
        reason = "that process has ended"
        if alive is None:
            logger.info(
                "%s: held by %s; watching its heartbeat for up to %g s", folder, name, stale_seconds
            )
            now = _watch_lease_object(folder, number, state, stale_seconds)
            if now.released:
                return
            alive, reason = now != state, f"no heartbeat for {stale_seconds:g} s"
        if alive:
            raise lease_conflict_error(key, folder, name)
        logger.warning("%s: taken over from %s: %s", folder, name, reason)


def _watch_lease_object(
    folder: StorageFolder, number: int, state: RemoteLeaseState, seconds: float
) -> RemoteLeaseState:
    """Wait up to `seconds` for a lease to differ from `state`; returns its last state."""
    deadline = time.monotonic() + seconds
    while (now := _read_lease_object(folder, number)) == state and time.monotonic() < deadline:
        time.sleep(min(1.0, seconds / 20))
    return now
