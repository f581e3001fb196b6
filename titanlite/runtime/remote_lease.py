"""The lease on a folder that a URL names, where nothing but whole files can be put.

The object `lease-N.json` is the Nth taking of the lease, and the highest number holds the folder.
A job takes it by creating the next number, which one of several can do where the store knows
conditional puts (S3, Google Cloud Storage). Only its holder rewrites an object: to count a
heartbeat up, and to say that it is released. So no late heartbeat can undo what another job did.

Where a store does not know conditional puts, two jobs that start at the same moment can both
believe that they hold the folder. The later put wins, and the other job finds out at its next
heartbeat, and before each commit and each deletion.
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
    describe,
    is_alive,
    parse_holder,
    refusal,
    this_process,
)
from titanlite.storage import StorageFolder, StorageUnreachable

HEARTBEAT_SECONDS = 10.0  # each is a request that is paid for
STALE_SECONDS = 60.0


def acquire_remote_lease(
    folder: StorageFolder,
    key: str,
    *,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    stale_seconds: float = STALE_SECONDS,
) -> RemoteLease:
    """Hold the folder that the setting `key` names; only one rank of a job asks for it.

    Raises ConfigError where another job holds it, CheckpointError where the store fails.
    """
    holder = this_process()
    while True:
        numbers = lease_numbers(folder)
        if numbers:
            _wait_for_end(folder, numbers[-1], key, stale_seconds)
        number = max(numbers, default=0) + 1
        lease = RemoteLease(folder, replace(holder, number=number), heartbeat_seconds)
        if lease.create():
            break
    for older in numbers:
        with suppress(FileNotFoundError, StorageUnreachable):  # whoever is next deletes it
            folder.delete(_name(older))
    lease.start()
    return lease


def lease_numbers(folder: StorageFolder) -> list[int]:
    """The numbers of the leases that are there, the holder's last."""
    found = (re.fullmatch(r"lease-(\d{1,18})\.json", name) for name in folder.sizes())
    return sorted(int(match[1]) for match in found if match)


class RemoteLease:
    """A folder that this process holds; `lost` says how it lost it, where it did."""

    def __init__(self, folder: StorageFolder, holder: Holder, heartbeat_seconds: float):
        self.folder, self.number, self.lost = folder, holder.number, ""
        self._holder, self._heartbeat_seconds = holder, heartbeat_seconds
        self._beats = 0
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)

    def create(self) -> bool:
        """Put the lease where there is none; whether it is ours now."""
        if self.folder.create(_name(self.number), self._content()):
            return True
        # The answer to a put that succeeded may be lost, and the repeated put is refused.
        with suppress(FileNotFoundError):
            return _read(self.folder, self.number).holder == self._holder
        return False

    def start(self) -> None:
        """Begin to count heartbeats."""
        self._thread.start()

    def check(self) -> None:
        """Raise CheckpointError unless the store says, now, that this process holds the folder."""
        last = max(lease_numbers(self.folder), default=0)
        try:
            holder = _read(self.folder, last).holder
        except FileNotFoundError:
            self.lost = f"{self.folder}: the lease of this job was removed."
        else:
            if holder != self._holder:
                self.lost = f"{self.folder}: {describe(holder)} has taken it from this job."
        if self.lost:
            raise CheckpointError(self.lost)

    def close(self) -> None:
        """Give the folder back, unless somebody else holds it by now."""
        self._closed.set()
        self._thread.join(self._heartbeat_seconds)
        with suppress(CheckpointError):  # what stays is a dead process's lease
            self.check()
            self.folder.write_atomically(_name(self.number), self._content(released=True))

    def _keep(self) -> None:
        while not self.lost and not self._closed.wait(self._heartbeat_seconds):
            with suppress(CheckpointError):  # a store that fails is asked again
                self.check()
                self._beats += 1
                self.folder.write_atomically(_name(self.number), self._content())

    def _content(self, released: bool = False) -> bytes:
        state = {"holder": asdict(self._holder), "beats": self._beats, "released": released}
        return json.dumps(state, indent=1).encode()


def _name(number: int) -> str:
    return f"lease-{number:06}.json"


@dataclass(frozen=True)
class _State:
    """What a lease says; `content` only ever tells whether it changed."""

    holder: Holder | None  # None: it cannot be read
    released: bool
    content: bytes


def _read(folder: StorageFolder, number: int) -> _State:
    content = folder.read(_name(number))
    with suppress(ValueError, TypeError, KeyError):
        state = parse_json(content)
        holder = parse_holder(json.dumps(state["holder"]).encode())
        return _State(holder, state["released"] is True, content)
    return _State(None, False, content)


def _wait_for_end(folder: StorageFolder, number: int, key: str, stale_seconds: float) -> None:
    """Return when the lease is released, gone or its holder is dead; else refuse."""
    with suppress(FileNotFoundError):  # gone
        state = _read(folder, number)
        if state.released:
            return
        who, alive, why = describe(state.holder), is_alive(state.holder), "that process is gone"
        if alive is None:
            logger.info(
                "%s: held by %s; watching its heartbeat for up to %g s", folder, who, stale_seconds
            )
            now = _watch(folder, number, state, stale_seconds)
            if now.released:
                return
            alive, why = now != state, f"its heartbeat stood still for {stale_seconds:g} s"
        if alive:
            raise refusal(key, folder, who)
        logger.warning("%s: taken over from %s: %s", folder, who, why)


def _watch(folder: StorageFolder, number: int, state: _State, seconds: float) -> _State:
    """What is there once it is not `state`; that itself when so many seconds have passed."""
    end = time.monotonic() + seconds
    while (now := _read(folder, number)) == state and time.monotonic() < end:
        time.sleep(min(1.0, seconds / 20))
    return now
