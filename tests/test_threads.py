"""Threads of a rank use the rank's GPU, not GPU 0, where each would create a context."""

from __future__ import annotations

import threading

import torch
import torch.distributed as dist
from torch import nn

from conftest import HANG_SECONDS
from tests.checkpoint.saving import open_checkpointer
from tests.cuda_trace.streams import record_cuda
from titanlite.checkpoint import SaveRequest
from titanlite.log import log_every
from titanlite.threads import DeviceThread, open_thread_pool

LOCAL_RANK = 5


def calls_by_thread(recorder) -> dict[str, list[str]]:
    """Calls of each thread but this one, in order."""
    calls: dict[str, list[str]] = {}
    for call in recorder.calls:
        if call.thread != threading.current_thread().name:
            calls.setdefault(call.thread, []).append(call.name)
    return calls


def test_a_thread_selects_the_device_of_the_thread_that_starts_it():
    with record_cuda() as recorder:
        torch.cuda.set_device(LOCAL_RANK)
        thread = DeviceThread(torch.cuda.synchronize, "worker")
        thread.start()
        thread.join()
        with open_thread_pool(2) as pool:
            devices = {pool.submit(torch.cuda.current_device).result() for _ in range(8)}
        assert devices == {LOCAL_RANK}
        assert recorder.devices["worker"] == LOCAL_RANK
        assert calls_by_thread(recorder)["worker"] == ["set_device", "synchronize"]


def test_a_thread_runs_after_an_error_that_every_later_cuda_call_raises(monkeypatch):
    """Otherwise the timer would not run that ends a rank whose teardown blocks."""

    def fail(*_) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for broken in ("set_device", "current_device"):
        monkeypatch.setattr(torch.cuda, "current_device", lambda: LOCAL_RANK)
        monkeypatch.setattr(torch.cuda, broken, fail)
        ran = threading.Event()
        thread = DeviceThread(ran.set, "worker")
        thread.start()
        thread.join()
        assert ran.is_set()


def test_the_save_thread_selects_the_device_and_waits_only_for_the_copies(tmp_path):
    """DCP's own loader would wait every 10 MB for whatever training has enqueued."""
    model = nn.Linear(8, 8)
    optimizers = [torch.optim.AdamW(model.parameters())]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with record_cuda() as recorder:
            torch.cuda.set_device(LOCAL_RANK)
            checkpointer = open_checkpointer(tmp_path, async_mode="async_with_pinned_mem")
            checkpointer.save(SaveRequest(1, model, optimizers, progress={}))
            result = checkpointer.wait()
            assert result is not None and not result.problem
            assert calls_by_thread(recorder) == {"save": ["set_device", "synchronize"]}
            events = [call for call in recorder.calls if call.name in ("record", "synchronize")]
            assert [(call.name, call.stream) for call in events] == [
                ("record", "compute"),
                ("synchronize", "compute"),
            ]
            del checkpointer
    finally:
        dist.destroy_process_group()


def test_what_takes_long_writes_a_line_until_it_ends():
    written = threading.Event()
    with log_every(0.01, lambda: written.set() or "first step: 10 s so far"):
        assert written.wait(HANG_SECONDS)
