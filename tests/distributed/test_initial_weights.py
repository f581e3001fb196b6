"""A run starts from the same weights under every layout, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import xxhash
from torch.distributed.tensor import DTensor

from tests.distributed.oracle import FAMILY, SEED, SGD, SHAPE, Layout, sharded, tied, whole
from tests.distributed.ranks import run_on_ranks
from titanlite.parallelize.weight_init import BLOCK_VALUES, init_weights

BLOCKS = replace(SHAPE, dim=64, vocab_size=5003)  # matrices of several blocks of rows, all uneven
LAYOUTS = [
    Layout(),
    Layout(shard=3),
    Layout(shard=4),
    Layout(replicate=2, shard=2),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(shard=2, tensor=2),
    Layout(replicate=2, shard=2, tensor=2),
    Layout(context=2, shard=2),
    Layout(pipeline=2, shard=2),
    Layout(pipeline=2, tensor=2, schedule="ZBVZeroBubble", stages=4, microbatch=9),
]


def fingerprints(layout, shape) -> dict[str, str]:
    model, _, _ = sharded(layout, replace(SGD, shape=shape))
    return {name: fingerprint(p) for name, p in model.named_parameters()}


def fingerprint(parameter) -> str:
    return xxhash.xxh3_128_hexdigest(whole(parameter).numpy().tobytes())


@cache
def plain_fingerprints(shape) -> dict[str, str]:
    model = FAMILY.build(shape)
    init_weights(model, FAMILY.init_roles, shape.n_layers, SEED)
    return {name: fingerprint(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_starts_from_the_same_bits(layout):
    right = plain_fingerprints(BLOCKS)
    assert BLOCKS.vocab_size * BLOCKS.dim > 4 * BLOCK_VALUES
    ranks = run_on_ranks(fingerprints, layout.degrees.ranks, layout, BLOCKS)
    for found in ranks:
        assert found == {name: right[name] for name in found}
    assert {name for found in ranks for name in found} == set(right)
    if layout.pipeline == 1:
        assert all(found.keys() == right.keys() for found in ranks)


def bytes_held(layout, shape) -> int:
    model, _, _ = sharded(layout, replace(SGD, shape=shape))
    return sum(p.to_local().untyped_storage().nbytes() for p in model.parameters())


def test_a_rank_holds_its_stages_and_nothing_else():
    layout = Layout(pipeline=2, less=(0, 0))
    shape = replace(BLOCKS, n_layers=4)
    whole_model = 4 * FAMILY.count_parameters(shape)
    first, last = run_on_ranks(bytes_held, 2, layout, shape)
    assert first + last == whole_model  # and each an end and half of the blocks
    assert abs(last - first) == 4 * shape.dim  # the last norm


def test_tied_weights_start_as_one_parameter():
    shape = tied(SGD).shape
    found = run_on_ranks(fingerprints, 2, Layout(shard=2), shape)[0]
    assert found == plain_fingerprints(shape) and "output.weight" not in found


def test_weights_depend_on_seed_and_name_and_have_the_promised_spread():
    model = FAMILY.build(SHAPE)
    init_weights(model, FAMILY.init_roles, SHAPE.n_layers, seed=1)
    first, second = model.layers["0"].attention, model.layers["1"].attention
    assert not torch.equal(first.wq.weight, second.wq.weight)
    before = first.wq.weight.clone()
    init_weights(model, FAMILY.init_roles, SHAPE.n_layers, seed=2)
    assert not torch.equal(before, first.wq.weight)
    assert 0.018 < model.output.weight.std() < 0.022
    assert model.layers["0"].feed_forward.w2.weight.std() < 0.012
    assert torch.all(model.norm.weight == 1)


def memory_beside_the_shards(layout, shape) -> tuple[int, int]:
    """(most bytes alive at once in one tensor while the model is made, bytes of the shards)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class HeartbeatWatchdog(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and not isinstance(out, DTensor):
                if out.device.type != "meta":
                    largest = max(largest, out.untyped_storage().nbytes())
            return out

    with HeartbeatWatchdog():
        model, _, _ = sharded(layout, replace(SGD, shape=shape))
    shards = [p.to_local().untyped_storage().nbytes() for p in model.parameters()]
    return largest, max(shards)


def test_no_rank_holds_a_whole_matrix_while_the_model_is_made():
    layout, shape = Layout(shard=4), FAMILY.flavors["debugmodel"]
    whole_matrix = shape.vocab_size * shape.dim * 4
    for largest, shard in run_on_ranks(memory_beside_the_shards, 4, layout, shape):
        assert shard < whole_matrix / 2 and largest < whole_matrix / 2, (largest, shard)
