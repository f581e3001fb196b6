"""parallelism.fsdp_gradient_reduction: gradients are reduced as often as the user chose."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.oracle import SGD, Layout, batch_at, build_sharded
from tests.distributed.ranks import run_on_ranks


class ReduceScatterCounter(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "reduce_scatter" in str(function)
        return function(*args, **(kwargs or {}))


RECIPE = replace(SGD, batch=12, seq_len=12)


def count_reductions(layout) -> int:
    _, mesh, engine = build_sharded(layout, RECIPE)
    sequences = RECIPE.batch // layout.degrees.data
    own_slice = slice(mesh.batch_rank * sequences, (mesh.batch_rank + 1) * sequences)
    inputs, labels = (tensor[own_slice] for tensor in batch_at(0, RECIPE))
    with ReduceScatterCounter() as counter:
        engine.forward_backward(engine.prepare(inputs, labels), torch.tensor(1.0))
    return counter.count


@pytest.mark.parametrize(
    "layout", [Layout(shard=2), Layout(shard=2, pipeline=2, microbatch=1)], ids=str
)
def test_gradients_are_reduced_after_each_micro_batch_or_once_per_step(layout):
    def counts(**changes) -> list[int]:
        ranks = layout.degrees.ranks
        return run_on_ranks(count_reductions, ranks, replace(layout, **changes))

    one_microbatch = counts()
    assert min(one_microbatch) > 0
    assert counts(accumulate=3) == [3 * count for count in one_microbatch]
    assert counts(accumulate=3, reduction="last_microbatch") == one_microbatch
