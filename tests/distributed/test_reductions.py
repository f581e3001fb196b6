"""Gradients are reduced as often as parallelism.fsdp_gradient_reduction says, by a plain sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.oracle import SGD, Layout, batch_at, build_sharded, own_rows
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
    inputs, labels = own_rows(mesh, *batch_at(0, RECIPE))
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


class CopyCounter(TorchDispatchMode):
    """Counts the elements of weights and gradients of blocks that are copied, cast or divided."""

    def __init__(self, sizes: set[int]):
        super().__init__()
        self.sizes, self.elements = sizes, 0  # sizes of weights, and of a group of them

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(name in str(function) for name in ("copy", "clone", "chunk_cat", "div")):
            tensors = args[0] if isinstance(args[0], (list, tuple)) else args[:1]
            self.elements += sum(t.numel() for t in tensors if t.numel() in self.sizes)
        return function(*args, **(kwargs or {}))


def copies_on_one_rank(layout, dtype, param_dtype) -> int:
    """How often a step copies each weight of the blocks, and its gradient."""
    model, _, engine = build_sharded(layout, RECIPE, dtype=dtype, param_dtype=param_dtype)
    blocks = [[p.numel() for p in block.parameters()] for block in model.layers.values()]
    sizes = {size for block in blocks for size in block if size > SGD.sizes.dim}
    batch = engine.prepare(*batch_at(0, RECIPE))
    with CopyCounter(sizes | set(map(sum, blocks))) as counter:
        engine.forward_backward(batch, torch.tensor(1.0))
    return round(counter.elements / sum(map(sum, blocks)))


THREE = Layout(accumulate=3)
THREE_LAST = Layout(accumulate=3, reduction="last_microbatch")
BF16, FP32 = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("layout", "param_dtype", "copies"),
    [
        (Layout(), BF16, 0),
        (THREE, BF16, 0),
        (THREE_LAST, BF16, 2),  # the first gradient is cast to fp32, and the sum back
        (THREE, FP32, 2 + 3 * 2),  # FSDP casts weights, and each gradient, and copies the results
        (THREE_LAST, FP32, 2 + 3),  # as above, but sums gradients first
    ],
    ids=["bf16", "bf16, 3 micro-batches", "bf16, summed in fp32", "mixed", "mixed, summed first"],
)
def test_one_rank_copies_weights_and_gradients_only_to_cast_them(layout, param_dtype, copies):
    assert run_on_ranks(copies_on_one_rank, 1, layout, BF16, param_dtype) == [copies]
