"""Folders and processes of a run: lock, lease, start log, watchdog, stop signals, memory advice."""

from __future__ import annotations

from titanlite.runtime.folder_lock import RunFolderLock, lock_run_folders
from titanlite.runtime.out_of_memory import MemoryUsage, explain_out_of_memory
from titanlite.runtime.stop import StopRequest, stop_reason_name
from titanlite.runtime.watchdog import HeartbeatWatchdog, end_launcher, exit_when_launcher_dies

__all__ = [
    "HeartbeatWatchdog",
    "MemoryUsage",
    "RunFolderLock",
    "StopRequest",
    "end_launcher",
    "exit_when_launcher_dies",
    "explain_out_of_memory",
    "lock_run_folders",
    "stop_reason_name",
]
