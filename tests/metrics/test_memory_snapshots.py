"""Memory snapshots are where they were asked for; that torch fills them, tests/gpu sees."""

from __future__ import annotations

import pytest
import torch

from titanlite.metrics.memory_snapshots import MemorySnapshots


class Notes:
    """Writes a word where torch would write allocations."""

    def start(self) -> None:
        pass

    def write(self, place) -> None:
        place.write_text("written")


def written(folder) -> list[str]:
    return sorted(place.parent.name for place in folder.glob("*/rank3_memory_snapshot.pickle"))


def test_snapshots_are_written_as_often_as_said_and_whenever_asked_for(tmp_path):
    with MemorySnapshots(Notes(), tmp_path / "memory", 3, first_step=4, every=4) as snapshots:
        for step in range(5, 11):
            if step == 6:
                (tmp_path / "memory" / "please").touch()
            snapshots.step()
    assert written(tmp_path / "memory") == ["iteration_6", "iteration_8"]


@pytest.mark.parametrize("error, there", [(torch.OutOfMemoryError, 1), (ValueError, 0)])
def test_a_snapshot_shows_why_memory_ran_out(error, there, tmp_path):
    with pytest.raises(error), MemorySnapshots(Notes(), tmp_path, 3, first_step=4, every=4):
        raise error("as it happens")
    assert written(tmp_path) == ["iteration_5_exit"] * there
