"""The precision asked for is the precision used, in every layout."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.oracle import SGD, Layout, batch_at, spread
from tests.distributed.ranks import run_on_ranks
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from titanlite.models import valid_tokens
from titanlite.optim import OptimizerConfig, build_optimizer

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class SeenTypes(TorchDispatchMode):
    """The types of what matrix products and reductions are really given."""

    def __init__(self):
        super().__init__()
        self.products: set[torch.dtype] = set()
        self.reductions: set[torch.dtype] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in PRODUCTS:
            self.products.update(a.dtype for a in args if isinstance(a, torch.Tensor))
        if "reduce_scatter" in str(function) or "allreduce" in str(function):
            self.reductions.update(_types(args))
        return function(*args, **(kwargs or {}))


def _types(value):
    if isinstance(value, torch.Tensor):
        yield value.dtype
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _types(item)


def types_of_a_step(layout) -> dict:
    model, mesh, engine = spread(layout, SGD, dtype=torch.bfloat16)
    optimizer = build_optimizer(model, OptimizerConfig())
    rows = layout.local_batch(SGD)
    mine = slice(mesh.batch_rank * rows, mesh.batch_rank * rows + rows)
    inputs, labels = (part[mine] for part in batch_at(0, SGD))
    activations, rotary = set(), set()
    for block in model.layers.values():
        block.register_forward_hook(lambda module, args, out: activations.add(out.dtype))
        block.attention.register_forward_pre_hook(
            lambda module, args: rotary.update(table.dtype for table in args[1])
        )
    with SeenTypes() as seen:
        loss = engine.forward_backward(inputs, labels, valid_tokens(labels))
    gradients = {p.grad.dtype for p in model.parameters()}
    optimizer.step()
    moments = {
        (value.to_local() if isinstance(value, DTensor) else value).dtype
        for state in optimizer.state.values()
        for name, value in state.items()
        if name != "step"
    }
    return {
        "products": seen.products,
        "gradient reductions": seen.reductions,
        "activations": activations,
        "rotary tables": rotary,
        "gradients": gradients,
        "weights": {p.dtype for p in model.parameters()},
        "moments": moments,
        "loss": loss.dtype,
    }


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(shard=2),
        Layout(replicate=2),
        Layout(tensor=2),
        Layout(shard=2, tensor=2),
        Layout(context=2),
        Layout(pipeline=2, microbatch=9, less=(0, 0)),
    ],
    ids=str,
)
def test_bf16_computes_in_bf16_and_keeps_and_reduces_in_fp32(layout):
    for seen in run_on_ranks(types_of_a_step, layout.degrees.ranks, layout):
        assert seen["products"] == {torch.bfloat16}
        assert seen["activations"] == {torch.bfloat16}
        assert seen["gradients"] == seen["weights"] == seen["moments"] == {torch.float32}
        assert seen["rotary tables"] == {torch.float32}  # bf16 cannot count to 1,000
        assert seen["loss"] == torch.float32
        if layout.degrees.data * layout.context > 1 and layout.tensor == 1:
            assert seen["gradient reductions"] == {torch.float32}
