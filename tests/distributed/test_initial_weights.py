"""Initial weights are bit-equal under every layout."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
import xxhash
from torch.distributed.tensor import DTensor

from tests.distributed.oracle import (
    FAMILY,
    SEED,
    SGD,
    SIZES,
    Layout,
    build_sharded,
    full_value,
    parse_layouts,
    with_tied_embeddings,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.collectives import local_shard
from titanlite.models import FAMILIES
from titanlite.models.mup import BaseWidths, MupConfig, width_scales
from titanlite.parallelize.weight_init import BLOCK_VALUES, init_weights

# Matrices of several blocks of rows, with sizes that no number of ranks divides.
SEVERAL_BLOCKS = replace(SIZES, dim=64, vocab_size=5003)
LAYOUTS = parse_layouts(
    "one; shard=3; shard=4; replicate=2,shard=2; tensor=2; tensor=4; shard=2,tensor=2;"
    "replicate=2,shard=2,tensor=2; context=2,shard=2; pipeline=2,shard=2;"
    "pipeline=2,tensor=2,schedule=ZBVZeroBubble,stages=4,microbatch=9"
)


def hash_weights(layout, sizes, mup_base=None, like_torchtitan=False) -> dict[str, str]:
    recipe = replace(SGD, sizes=sizes, mup_base=mup_base)
    model, _, _ = build_sharded(layout, recipe, like_torchtitan=like_torchtitan)
    return {name: hash_weight(p) for name, p in model.named_parameters()}


def hash_weight(parameter) -> str:
    return xxhash.xxh3_128_hexdigest(full_value(parameter).numpy().tobytes())


@cache
def expected_hashes(sizes, mup_base=None) -> dict[str, str]:
    model = FAMILY.build(sizes)
    widths = width_scales(MupConfig(mup_base), FAMILY, sizes)
    init_weights(model, FAMILY, sizes, SEED, widths)
    return {name: hash_weight(p) for name, p in model.named_parameters()}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_initial_weights_are_bit_equal_under_every_layout(layout):
    expected = expected_hashes(SEVERAL_BLOCKS)
    assert SEVERAL_BLOCKS.vocab_size * SEVERAL_BLOCKS.dim > 4 * BLOCK_VALUES
    ranks = run_on_ranks(hash_weights, layout.degrees.ranks, layout, SEVERAL_BLOCKS)
    for hashes in ranks:
        assert hashes == {name: expected[name] for name in hashes}
    assert {name for hashes in ranks for name in hashes} == set(expected)
    if layout.pipeline == 1:
        assert all(hashes.keys() == expected.keys() for hashes in ranks)


def bytes_of_weights(layout, sizes) -> int:
    model, _, _ = build_sharded(layout, replace(SGD, sizes=sizes))
    return sum(local_shard(p).untyped_storage().nbytes() for p in model.parameters())


def test_a_pipeline_rank_allocates_only_its_own_stages():
    layout = Layout(pipeline=2, less=(0, 0))
    sizes = replace(SEVERAL_BLOCKS, n_layers=4)
    full_model = 4 * FAMILY.count_parameters(sizes)
    first, last = run_on_ranks(bytes_of_weights, 2, layout, sizes)
    assert first + last == full_model  # each has the embedding or the output, and half the blocks
    assert abs(last - first) == 4 * sizes.dim  # the final norm


def test_tied_weights_are_initialised_as_one_parameter():
    sizes = with_tied_embeddings(SGD).sizes
    hashes = run_on_ranks(hash_weights, 2, Layout(shard=2), sizes)[0]
    assert hashes == expected_hashes(sizes) and "output.weight" not in hashes


def test_torchtitans_weights_are_bit_equal_under_every_layout():
    hashes = run_on_ranks(hash_weights, 4, Layout(shard=2, tensor=2), SEVERAL_BLOCKS, None, True)[0]
    model = FAMILY.build(SEVERAL_BLOCKS)
    init_weights(model, FAMILY, SEVERAL_BLOCKS, SEED, like_torchtitan=True)
    assert hashes == {name: hash_weight(p) for name, p in model.named_parameters()}


def test_weights_scaled_by_mup_are_bit_equal_under_every_layout():
    sizes, base = with_tied_embeddings(SGD).sizes, BaseWidths(8, 2, 22, 1)
    hashes = run_on_ranks(hash_weights, 4, Layout(shard=2, tensor=2), sizes, base)[0]
    assert hashes == expected_hashes(sizes, base)
    same = {name for name, value in expected_hashes(sizes).items() if hashes[name] == value}
    unscaled = {name.split(".")[-2] for name in same}  # heads are wider, so q_norm is scaled
    assert unscaled == {"tok_embeddings", "attention_norm", "ffn_norm", "k_norm"}


def stds(model) -> dict[str, float]:
    return {name: p.std().item() for name, p in model.named_parameters() if p.dim() > 1}


def test_torchtitans_initialization_has_its_deviations():
    """As torchtitan 0.2.2 was measured and read: models/*/model/model.py, models/moe/moe.py."""
    family, by_block = FAMILIES["qwen3_moe"], (".wo.", ".w2", ".w3", ".gate.")
    sizes = replace(family.flavors["debugmodel"], n_layers=2)
    model = family.build(sizes)
    init_weights(model, family, sizes, SEED, like_torchtitan=True)
    for name, std in stds(model).items():
        if name == "tok_embeddings.weight":
            expected = 1.0
        elif name == "output.weight":
            expected = 0.98658 * sizes.dim**-0.5  # of a normal truncated at three deviations
            assert model.output.weight.abs().max() <= 3 * sizes.dim**-0.5
        elif any(part in name for part in by_block):
            expected = 0.02 / (2 * (int(name.split(".")[1]) + 1)) ** 0.5
        else:
            expected = 0.02
        assert std == pytest.approx(expected, rel=0.005 if "gate" not in name else 0.05), name
    tied = with_tied_embeddings(SGD).sizes
    model = FAMILY.build(tied)
    init_weights(model, FAMILY, tied, SEED, like_torchtitan=True)
    assert model.tok_embeddings.weight.std().item() == pytest.approx(tied.dim**-0.5, rel=0.05)


@pytest.mark.parametrize(("name", "std"), [("deepseek_v3", 0.006), ("olmo2", 0.02)])
def test_a_family_with_a_published_deviation_has_it_in_all_matrices(name, std):
    family = FAMILIES[name]
    sizes = next(iter(family.flavors.values()))
    model = family.build(sizes)
    init_weights(model, family, sizes, SEED)
    assert all(s == pytest.approx(std, rel=0.06) for s in stds(model).values())


def test_weights_depend_on_seed_and_name_and_have_the_documented_deviation():
    model = FAMILY.build(SIZES)
    init_weights(model, FAMILY, SIZES, seed=1)
    first, second = model.layers["0"].attention, model.layers["1"].attention
    assert not torch.equal(first.wq.weight, second.wq.weight)
    before = first.wq.weight.clone()
    init_weights(model, FAMILY, SIZES, seed=2)
    assert not torch.equal(before, first.wq.weight)
    assert 0.018 < model.output.weight.std() < 0.022
    assert model.layers["0"].feed_forward.w2.weight.std() < 0.012
    assert torch.all(model.norm.weight == 1)


def largest_allocation(layout, sizes) -> tuple[int, int]:
    """(bytes of the largest tensor while the model is built, bytes of the largest shard)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class LargestTensor(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            is_local = isinstance(out, torch.Tensor) and not isinstance(out, DTensor)
            if is_local and out.device.type != "meta":
                largest = max(largest, out.untyped_storage().nbytes())
            return out

    with LargestTensor():
        model, _, _ = build_sharded(layout, replace(SGD, sizes=sizes))
    shards = [local_shard(p).untyped_storage().nbytes() for p in model.parameters()]
    return largest, max(shards)


def test_no_rank_allocates_a_full_matrix_while_the_model_is_built():
    layout, sizes = Layout(shard=4), FAMILY.flavors["debugmodel"]
    full_matrix = sizes.vocab_size * sizes.dim * 4
    for largest, shard in run_on_ranks(largest_allocation, 4, layout, sizes):
        assert shard < full_matrix / 2 and largest < full_matrix / 2, (largest, shard)
