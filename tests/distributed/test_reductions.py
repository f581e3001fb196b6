"""How often gradients are reduced is what the user chose, and weighs memory against traffic."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.oracle import SGD, Layout, batch_at, sharded
from tests.distributed.ranks import run_on_ranks


class Reductions(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


RECIPE = replace(SGD, batch=12, seq_len=12)


def reductions(layout) -> int:
    _, mesh, engine = sharded(layout, RECIPE)
    rows = RECIPE.batch // layout.degrees.data
    mine = slice(mesh.batch_rank * rows, (mesh.batch_rank + 1) * rows)
    inputs, labels = (part[mine] for part in batch_at(0, RECIPE))
    with Reductions() as seen:
        engine.forward_backward(inputs, labels, torch.tensor(1.0))
    return seen.count


@pytest.mark.parametrize(
    "layout", [Layout(shard=2), Layout(shard=2, pipeline=2, microbatch=1)], ids=str
)
def test_gradients_are_reduced_with_each_micro_batch_or_once(layout):
    def counted(**changes) -> list[int]:
        ranks = layout.degrees.ranks
        return run_on_ranks(reductions, ranks, replace(layout, **changes))

    once = counted()
    assert min(once) > 0
    assert counted(accumulate=3) == [3 * count for count in once]
    assert counted(accumulate=3, reduction="last_microbatch") == once
