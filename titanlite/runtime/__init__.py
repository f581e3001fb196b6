"""What owns a run's folders and processes: lock, lease, start log, watchdog, stop signals."""

from __future__ import annotations

from titanlite.runtime.folder_lock import RunFolderLock, lock_run_folders
from titanlite.runtime.stop import StopRequest, stop_reason_name
from titanlite.runtime.watchdog import HeartbeatWatchdog, exit_with_launcher

__all__ = [
    "HeartbeatWatchdog",
    "RunFolderLock",
    "StopRequest",
    "exit_with_launcher",
    "lock_run_folders",
    "stop_reason_name",
]
