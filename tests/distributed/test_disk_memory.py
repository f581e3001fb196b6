"""Files for what is offloaded: they have no name, and a disk that cannot hold them is refused."""

from __future__ import annotations

import os
import re

import pytest
import torch

from titanlite.distributed import disk_memory
from titanlite.distributed.disk_memory import PAGE, DiskFile, DiskThread, FileMemory
from titanlite.errors import UserError


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(disk_memory, "PIECE_BYTES", 2 * PAGE)
    monkeypatch.setattr(disk_memory, "measure_gb_per_s", lambda *_: (0.3, 0.25))


def test_a_killed_run_leaves_nothing_in_the_folder(tmp_path):
    file = DiskFile(str(tmp_path), PAGE)
    assert os.fstat(file.number).st_blocks * 512 >= PAGE  # reserved
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_refused_at_the_start_with_the_bytes_needed_and_free(tmp_path):
    needed = disk_memory.free_bytes(str(tmp_path)) + (1 << 40)
    with pytest.raises(UserError, match=f"{tmp_path}: {needed:,} bytes are needed .* are free"):
        DiskFile(str(tmp_path), needed)


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(UserError, match="none: No such file or directory"):
        DiskFile(str(tmp_path / "none"), PAGE)


def test_a_slow_disk_is_refused_with_its_bandwidth(tmp_path, monkeypatch):
    DiskThread(str(tmp_path), "cpu", "a state")
    monkeypatch.setattr(disk_memory, "measure_gb_per_s", lambda *_: (0.3, 0.05))
    text = re.escape("writes 0.30 GB/s, reads 0.05 GB/s")
    with pytest.raises(UserError, match=f"{text} on this rank, but at least 0.2"):
        DiskThread(str(tmp_path), "cpu", "a state")


@pytest.mark.parametrize("direct", [True, False])
def test_memory_and_transfers_of_a_file_see_each_others_bytes(direct, tmp_path, monkeypatch):
    """As a checkpoint that is loaded or saved between two steps; the last page is not full."""
    if not direct:
        monkeypatch.setattr(os, "O_DIRECT", 0)
    disk, file = DiskThread(str(tmp_path), "cpu", "a state"), DiskFile(str(tmp_path), 4 * PAGE)
    file._is_direct = direct
    memory = FileMemory(file)
    loaded, seen = torch.arange(3 * PAGE + 5).to(torch.uint8), torch.empty(3 * PAGE + 5).byte()
    of_memory = torch.frombuffer(memory, dtype=torch.uint8)[: len(loaded)]
    for value in (loaded, loaded.flip(0)):
        of_memory.copy_(value)
        memory.drop_pages()
        disk.transfer(file, [(0, seen)], writes=False).result()
        assert torch.equal(seen, value)
        disk.transfer(file, [(0, value + 1)], writes=True).result()
        assert torch.equal(of_memory, value + 1)


def test_an_error_of_the_disk_is_not_lost_when_only_later_calls_are_waited_for(
    tmp_path, monkeypatch
):
    disk, file = DiskThread(str(tmp_path), "cpu", "a state"), DiskFile(str(tmp_path), PAGE)
    tensor = torch.zeros(PAGE)
    disk.transfer(file, [(PAGE, tensor[:8])], writes=True).result()  # a write makes the file longer
    disk.transfer(file, [(4 * PAGE, tensor)], writes=False)
    with pytest.raises(UserError, match="offload_folder = .*: the file ended early"):
        disk.transfer(file, [(0, tensor[:8])], writes=True).result()
