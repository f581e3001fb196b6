"""Memory snapshots are written when due and on request; tests/gpu checks their content."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from titanlite.metrics.profiler import MemorySnapshots


@pytest.fixture(autouse=True)
def fake_recorder(monkeypatch):
    """Writes text instead of allocations."""
    memory = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda max_entries: None)
    monkeypatch.setattr(memory, "_dump_snapshot", lambda path: Path(path).write_text("written"))


def written(folder) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/rank3_memory_snapshot.pickle"))


def test_snapshots_are_written_periodically_and_on_request(tmp_path):
    with MemorySnapshots(tmp_path / "memory", 3, completed_steps=4, every=4) as snapshots:
        for step in range(5, 11):
            if step == 6:
                (tmp_path / "memory" / "dump_now").touch()
            snapshots.step()
    assert written(tmp_path / "memory") == ["iteration_6", "iteration_8"]


@pytest.mark.parametrize("error, count", [(torch.OutOfMemoryError, 1), (ValueError, 0)])
def test_running_out_of_memory_writes_a_snapshot(error, count, tmp_path):
    with (
        pytest.raises(error),
        MemorySnapshots(tmp_path, 3, completed_steps=4, every=4),
    ):
        raise error("as it happens")
    assert written(tmp_path) == ["iteration_5_exit"] * count
