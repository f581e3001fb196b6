"""The lease on a folder in an object store, which can only write whole objects.

The object `lease-N.json` is lease number N, and the highest number holds the folder. A job acquires
the folder by creating the next number; of several jobs one succeeds, if the store supports
conditional puts (S3, Google Cloud Storage). Only the holder rewrites its object, to count up the
heartbeat and to release it. So no late heartbeat can undo what another job did.

Without conditional puts, two jobs that start simultaneously can both believe that they hold the
folder. The later put wins; the other job notices at a heartbeat, and before a commit or deletion.
"""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from titanlite.errors import CheckpointError
from titanlite.files import parse_json
from titanlite.log import logger
from titanlite.runtime.lease import (
    Holder,
    LeaseSnapshot,
    Process,
    describe_holder,
    find_dead_lease,
    lease_conflict_error,
    new_holder,
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
    dead: set[Process] | None = None,
) -> RemoteLease:
    """Acquire the folder of the setting `key`, on one rank; raises ConfigError if it is held.

    `dead`: see `acquire_lease`.
    """
    refuse = partial(lease_conflict_error, key, folder)
    while True:
        numbers = lease_numbers(folder)
        if numbers:
            read = partial(_read_lease_object, folder, numbers[-1])
            if found := find_dead_lease(read, folder, stale_seconds, refuse, dead):
                logger.warning("%s: taken over from %s", folder, found[1])
        number = max(numbers, default=0) + 1
        lease = RemoteLease(folder, new_holder(number), heartbeat_seconds)
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
        seen = _read_lease_object(self.folder, self.number)
        return seen is not None and seen.holder == self._holder

    def start(self) -> None:
        self._thread.start()

    def check(self) -> None:
        """Read the store, and raise CheckpointError unless this process still holds the folder."""
        seen = _read_lease_object(self.folder, max(lease_numbers(self.folder), default=0))
        if seen is None:
            self.lost = f"{self.folder}: the lease of this job was removed."
        elif seen.holder != self._holder:
            self.lost = f"{self.folder}: {describe_holder(seen.holder)} has taken it from this job."
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


def _read_lease_object(folder: StorageFolder, number: int) -> LeaseSnapshot | None:
    try:
        content = folder.read(_lease_object_name(number))
    except FileNotFoundError:
        return None
    with suppress(ValueError, TypeError, KeyError):
        state = parse_json(content)
        holder = parse_holder(json.dumps(state["holder"]).encode())
        return LeaseSnapshot(holder, content, released=state["released"] is True)
    return LeaseSnapshot(None, content)
