"""Gradients are reduced as often as parallelism.fsdp_gradient_reduction says, by a plain sum."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
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


class DivisionRecorder(TorchDispatchMode):
    """Record the elements of all quotients that are vectors, as FSDP's buffers are."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if "div" in str(function) and result.dim() == 1:
            self.elements.append(result.numel())
        return result


def reduce_on_one_rank(factor: float | None) -> tuple[int, dict[str, Tensor]]:
    """(elements of the longest quotient in a step, gradients); a factor replaces the model's."""
    model, _, engine = build_sharded(Layout(), RECIPE)
    for module in model.modules():
        if factor is not None and isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(factor)
    inputs, labels = batch_at(0, RECIPE)
    with DivisionRecorder() as recorder:
        engine.forward_backward(engine.prepare(inputs, labels), torch.tensor(1.0))
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    return max(recorder.elements, default=0), gradients


def test_one_rank_does_not_divide_its_gradients():
    """A division by 1 allocates the gradients of a group a second time."""
    [(longest_quotient, gradients)] = run_on_ranks(reduce_on_one_rank, 1, None)
    smallest_weight = min(g.numel() for g in gradients.values() if g.dim() > 1)
    assert longest_quotient < smallest_weight
    [(_, divided_by_one)] = run_on_ranks(reduce_on_one_rank, 1, 1.0)
    assert all(torch.equal(gradients[name], divided_by_one[name]) for name in gradients)
