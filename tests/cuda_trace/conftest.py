"""One worker for all traces."""

from __future__ import annotations

import pytest

from tests.cuda_trace.traces import TraceWorker


@pytest.fixture(scope="session")
def worker(tmp_path_factory):
    worker = TraceWorker(tmp_path_factory.mktemp("traces"))
    yield worker
    worker.close()
