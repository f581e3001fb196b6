"""Every optimizer makes one process's update under every layout, and resumes under any other.

All get the same fixed gradients. Those of a real backward differ between layouts by rounding, which
the sign of Lion and the quotient of Adam magnify: only losses would then be comparable.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.checkpoint.saving import bits, load, open_checkpointer, save_and_wait
from tests.distributed.oracle import (
    FAMILY,
    SEED,
    SGD,
    Layout,
    build_sharded,
    merge_parts,
    one_process,
    relative_error,
    run_layouts,
    shard_and_offset,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.test_resume import merge_bits
from titanlite.distributed.collectives import local_shard
from titanlite.optim import (
    MatrixFacts,
    OptimizerConfig,
    OptimizerSet,
    build_optimizer,
    owned_matrices,
)
from titanlite.optim.sophia import Sophia
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.state import TrainState

LAYOUTS = {
    "fsdp3": Layout(shard=3),  # 32 rows over 3 ranks, and a matrix of 2 rows: a rank has none
    "tp2": Layout(tensor=2),
    "tp4": Layout(tensor=4),  # more ranks than key-value heads: these are replicated
    "fsdp2tp2": Layout(shard=2, tensor=2),
    "hsdp": Layout(replicate=2, shard=2),
    "pp2": Layout(pipeline=2),
}
LOOP = {"implementation": "for-loop"}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"name": "SGD"},
    "Nesterov": {"name": "SGD", "momentum": 0.9, "nesterov": True, "implementation": "foreach"},
    "Lion": {"name": "Lion", "beta2": 0.98},
    "Sophia": {"name": "Sophia", "gamma": 1e-3, "beta2": 0.9},
    "Adafactor": {"name": "Adafactor"},
    "Muon": {"name": "Muon", "muon_per_head": True},
    "Adafactor unclipped": {"name": "Adafactor", "clip_threshold": 1e3, "scale_parameter": False},
    "SOAP": {"name": "SOAP", "precondition_frequency": 2},  # and AdamW
    "AdamW": {"name": "AdamW"},
    "Adam": {"name": "Adam", **LOOP},
    "AdamW 16-bit": {"name": "AdamW", "state_dtype": "bfloat16", **LOOP},
    "AdamW 8-bit": {"name": "AdamW", "state_dtype": "8bit", **LOOP},
    "AdamW 4-bit": {"name": "AdamW", "state_dtype": "4bit", **LOOP},
}
# The others resume in test_resume.py and test_memory_options.py.
RESUMED = ("Nesterov", "Lion", "Sophia", "Adafactor", "Muon", "SOAP")
STEPS, STOP, LR = 4, 2, 0.05
# Each of 2 tensor-parallel ranks has whole quantisation blocks of the rows that TP shards.
SIZES = replace(SGD.sizes, head_dim=64, hidden_dim=256)
RECIPE = replace(SGD, sizes=SIZES, batch=6, seq_len=12)  # a block for each of two stages


def optimizers_of(layout: Layout) -> list[str]:
    """All; those with quantised states only where each rank has whole blocks."""
    return [name for name in OPTIMIZERS if layout.tensor <= 2 or "-bit" not in name]


@cache
def build_once(layout: Layout) -> tuple[nn.Module, list[Tensor]]:
    """(model, its initial weights) under a layout, for all optimizers."""
    model, _, _ = build_sharded(layout, RECIPE)
    return model, [local_shard(p.detach()).clone() for p in model.parameters()]


@torch.no_grad()
def build(layout: Layout, name: str) -> TrainState:
    """A model with its initial weights and an optimizer under a layout; no step is taken."""
    model, initial = build_once(layout)
    for parameter, weight in zip(model.parameters(), initial, strict=True):
        local_shard(parameter).copy_(weight)
        parameter.grad = None
    return TrainState(model, optimizer_of(model, name))


def optimizer_of(model: nn.Module, name: str) -> OptimizerSet:
    config = OptimizerConfig.of(lr=LR, weight_decay=0.1, **OPTIMIZERS[name])
    return build_optimizer(model, config, MatrixFacts(FAMILY, RECIPE.sizes))


def update(model: nn.Module, optimizers: OptimizerSet, steps: range) -> None:
    for step in steps:
        for name, parameter in model.named_parameters():
            parameter.grad = _like(parameter, gradient(name, parameter.shape, step))
        for sophia in (optimizer for optimizer in optimizers if isinstance(optimizer, Sophia)):
            sophia.update_hessian(torch.tensor(7.0), torch.tensor(True))
        optimizers.set_lr(LR / (step + 1))
        optimizers.step(torch.tensor(True))


@cache
def gradient(name: str, shape: torch.Size, step: int) -> Tensor:
    """A global gradient: rows of different size, some of them 0."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    values = torch.randn(shape, generator=generator)
    values *= torch.logspace(-3, 1, shape[0]).view(-1, *[1] * (len(shape) - 1))
    values[step::7] = 0
    return values


def _like(parameter: Tensor, values: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(values, mesh, placements, src_data_rank=None)


def tensors_of(model: nn.Module, optimizers: OptimizerSet) -> dict[str, Tensor]:
    """Weights and states by name; a step count is the same on every rank."""
    tensors = {}
    for name, parameter in model.named_parameters():
        tensors[name] = parameter.detach()
        for key, value in optimizers.state[parameter].items():
            tensors[f"{name}.{key}"] = value
    return tensors


def train_all(layout: Layout) -> dict[str, dict[str, tuple]]:
    """For each optimizer: shards of weights and states after all steps."""
    owned_matrices.ROUND_ELEMENTS = 1  # one matrix at a time, so several rounds
    result = {}
    for name in optimizers_of(layout):
        state = build(layout, name)
        update(state.model, state.optimizer, range(STEPS))
        tensors = tensors_of(state.model, state.optimizer)
        result[name] = {key: shard_and_offset(tensor) for key, tensor in tensors.items()}
        if name == "Muon":
            reject_a_step(state.model, state.optimizer)
            for key, tensor in tensors_of(state.model, state.optimizer).items():
                assert torch.equal(local_shard(tensor), result[name][key][2]), key
    return result


def reject_a_step(model: nn.Module, optimizers: OptimizerSet) -> None:
    """All ranks take part, and one of them has a NaN, which would reach the whole matrix."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        if dist.get_rank() == 0 and local_shard(parameter.grad).numel():
            local_shard(parameter.grad).view(-1)[0] = torch.nan
    optimizers.step(torch.tensor(False))
    optimizers.uncount_steps(1)
    optimizers.zero_grad()


@cache
def expected_of(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(initial weights, weights and states after all steps) of one process without titanlite's."""
    model = FAMILY.build(RECIPE.sizes)
    init_weights(model, FAMILY, RECIPE.sizes, SEED)
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    optimizers = optimizer_of(model, name)
    update(model, optimizers, range(STEPS))
    return start, tensors_of(model, optimizers)


# Replicas and stages resume below; context parallel shards as FSDP does.
@pytest.mark.parametrize("layout", ["fsdp3", "tp4", "fsdp2tp2"])
def test_update_and_state_equal_one_process(layout):
    by_rank = run_on_ranks(train_all, LAYOUTS[layout].degrees.ranks, LAYOUTS[layout])
    for name in optimizers_of(LAYOUTS[layout]):
        start, expected = expected_of(name)
        merged = merge_parts([rank[name] for rank in by_rank])
        assert merged.keys() == expected.keys()
        for key, right in expected.items():
            right, base = right.double(), start.get(key, torch.zeros(())).double()
            error = relative_error(merged[key].double() - base, right - base)
            assert error <= 1e-5, f"{name}, {key}: {error:.1e}"


def save_all(layout: Layout, folder: str) -> dict[str, dict[str, bytes]]:
    """Train each optimizer to step STOP and save; returns the saved bits."""
    saved = {}
    for name in RESUMED:
        state = build(layout, name)
        update(state.model, state.optimizer, range(STOP))
        save_and_wait(open_checkpointer(f"{folder}/{name}"), state)
        saved[name] = bits(state)
    return saved


def load_all(layout: Layout, folder: str) -> dict[str, tuple[dict[str, bytes], dict[str, tuple]]]:
    """For each optimizer: (loaded bits, shards after the remaining steps)."""
    result = {}
    for name in RESUMED:
        state = build(layout, name)
        load(open_checkpointer(f"{folder}/{name}"), state)
        loaded = bits(state)
        update(state.model, state.optimizer, range(STOP, STEPS))
        tensors = tensors_of(state.model, state.optimizer)
        result[name] = loaded, {key: shard_and_offset(value) for key, value in tensors.items()}
    return result


@pytest.mark.parametrize(
    "before, after", [("fsdp2tp2", "fsdp3"), ("hsdp", "tp2"), ("fsdp3", "pp2")]
)
def test_a_run_saved_under_one_layout_resumes_under_another(before, after, tmp_path):
    ranks = LAYOUTS[before].degrees.ranks
    saved = run_on_ranks(save_all, ranks, LAYOUTS[before], str(tmp_path))
    resumed = run_on_ranks(load_all, LAYOUTS[after].degrees.ranks, LAYOUTS[after], str(tmp_path))
    for name in RESUMED:
        loaded = merge_bits([rank[name][0] for rank in resumed])
        assert loaded == merge_bits([rank[name] for rank in saved]), name
        _, expected = expected_of(name)
        for key, value in merge_parts([rank[name][1] for rank in resumed]).items():
            assert relative_error(value.double(), expected[key].double()) <= 1e-5, (name, key)


def test_training_under_fsdp_and_tp_gives_one_processs_losses():
    """With gradients of a real backward, clipped. SOAP magnifies their rounding."""
    recipes = [
        replace(RECIPE, max_norm=0.5, lr=1e-3, options=tuple(OPTIMIZERS[name].items()))
        for name in RESUMED
    ]
    records = run_on_ranks(run_layouts, 4, [(Layout(shard=2, tensor=2), r) for r in recipes])[0]
    for recipe, record in zip(recipes, records, strict=True):
        expected = one_process(recipe)
        rel = 1e-4 if recipe.section.name == "SOAP" else 1e-5
        assert record.losses == pytest.approx(expected.losses, rel=rel), recipe.options
        assert record.losses[0] != record.losses[1]


def count_all_reduces(layout: Layout) -> tuple[int, int]:
    """(all-reduces, bytes that they add up) of a step of Adafactor."""
    state, sizes, all_reduce = build(layout, "Adafactor"), [], dist.all_reduce

    def counted(tensor, *args, **options):
        sizes.append(tensor.nbytes)
        return all_reduce(tensor, *args, **options)

    dist.all_reduce = counted
    update(state.model, state.optimizer, range(1))
    return len(sizes), sum(sizes)


def test_adafactor_needs_two_all_reduces_in_each_dimension_that_shards():
    model = FAMILY.build(RECIPE.sizes)
    parameters = list(model.parameters())
    columns = sum(p.shape[1] for p in parameters if p.dim() == 2)
    # vectors: their sum of squares and of updates, matrices: 3 sums, the columns, the updates
    sums = sum(4 if p.dim() == 2 else 2 for p in parameters)
    assert run_on_ranks(count_all_reduces, 2, Layout(shard=2))[0] == (2, 4 * (columns + sums))
    assert run_on_ranks(count_all_reduces, 4, Layout(replicate=2, shard=2))[0][0] == 2
    assert run_on_ranks(count_all_reduces, 4, Layout(shard=2, tensor=2))[0][0] == 4
