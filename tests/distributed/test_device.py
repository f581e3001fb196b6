"""The GPU of each rank."""

from __future__ import annotations

import pytest

from titanlite.distributed.process_group import gpu_index
from titanlite.errors import ConfigError


@pytest.mark.parametrize(
    ("local_rank", "visible", "by_torchrun", "index"),
    [
        (0, 1, True, 0),
        (3, 8, True, 3),
        (3, 8, False, 3),  # srun without --gpus-per-task: every process sees all GPUs
        (3, 1, False, 0),  # srun --gpus-per-task=1: every process sees its own
    ],
)
def test_each_rank_has_a_gpu_of_its_own(local_rank, visible, by_torchrun, index):
    assert gpu_index(local_rank, visible, by_torchrun) == index


@pytest.mark.parametrize(
    ("local_rank", "visible", "by_torchrun"),
    [
        (1, 1, True),  # torchrun shows all ranks the same GPU
        (8, 8, True),
        (4, 2, False),  # which of the two would it be?
    ],
)
def test_a_rank_without_a_gpu_is_refused(local_rank, visible, by_torchrun):
    with pytest.raises(ConfigError, match=f"rank {local_rank} has no GPU.* sees {visible}."):
        gpu_index(local_rank, visible, by_torchrun)
