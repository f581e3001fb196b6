"""Start threads on the CUDA device of the thread that starts them.

CUDA's current device belongs to a thread, and a new thread starts on device 0. Almost any CUDA call
there would create a context on device 0, about 0.5 GB, in the process of every other GPU's rank.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from threading import Thread
from typing import Any


class DeviceThread(Thread):
    """A daemon thread that first selects the CUDA device of the thread that calls `start`.

    A daemon: a process must be able to exit while a thread waits for a disk or another rank.
    """

    def __init__(self, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()):
        super().__init__(target=target, name=name, args=args, daemon=True)
        self._select_device: Callable[[], None] = _do_nothing

    def start(self) -> None:
        self._select_device = _device_selector()
        super().start()

    def run(self) -> None:
        """Select the device, and call the target."""
        self._select_device()
        super().run()


def open_thread_pool(workers: int) -> ThreadPoolExecutor:
    """A pool of threads that first select the CUDA device of the thread that calls this."""
    return ThreadPoolExecutor(workers, initializer=_device_selector())


def _device_selector() -> Callable[[], None]:
    """A function that selects the CUDA device of this thread in another one; no-op without CUDA.

    After an illegal memory access all CUDA calls fail; threads that end the process must still run.
    """
    torch = sys.modules.get("torch")  # not imported here: programs without torch start threads too
    if torch is None or not torch.cuda.is_initialized():
        return _do_nothing
    with suppress(RuntimeError):
        return partial(_select, torch.cuda.set_device, torch.cuda.current_device())
    return _do_nothing


def _select(set_device: Callable[[int], None], device: int) -> None:
    with suppress(RuntimeError):
        set_device(device)


def _do_nothing() -> None:
    pass
