"""Muon trains to the same weights and momentum under every layout.

test_optimizers.py tests its update from fixed gradients, and that it resumes under another layout.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.oracle import (
    FAMILY,
    SEED,
    Layout,
    Recipe,
    Record,
    batch_at,
    build_recipe_optimizer,
    merge_parts,
    reference_logits,
    relative_error,
    run_until,
    shard_and_offset,
    start_run,
    with_enough_blocks,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.tensors import local_shard
from titanlite.labels import IGNORE_INDEX
from titanlite.optim import OptimizerConfig, owned_matrices
from titanlite.optim.muon import MOMENTUM
from titanlite.parallelize.weight_init import init_weights


@dataclass(frozen=True)
class MuonRecipe(Recipe):
    per_head: bool = False

    @property
    def section(self) -> OptimizerConfig:
        # The eps keeps AdamW, which has the embedding and the output, from dividing rounding errors
        # by gradients of the same size.
        return replace(super().section, muon_per_head=self.per_head, eps=1e-3)


RECIPE = with_enough_blocks(
    MuonRecipe("Muon", max_norm=0.1, lr=2e-3, batch=12, seq_len=24, steps=5), Layout(pipeline=2)
)
PER_HEAD = replace(RECIPE, per_head=True)
ON_TWO_RANKS = [
    Layout(shard=2),
    Layout(tensor=2),
    Layout(replicate=2),
    Layout(context=2),
    Layout(pipeline=2, microbatch=3),
]
ON_FOUR_RANKS = [
    Layout(shard=2, tensor=2),
    Layout(replicate=2, shard=2),
    Layout(tensor=4),  # more ranks than key-value heads: these are replicated
    Layout(pipeline=2, tensor=2, microbatch=3, schedule="Interleaved1F1B"),
    Layout(context=2, shard=2),
]


@cache
def reference(recipe: Recipe) -> dict[str, Tensor]:
    """Weights and momentum after the run of a plain model in this process."""
    model = FAMILY.build(recipe.sizes)
    init_weights(model, FAMILY, recipe.sizes, SEED)
    optimizer = build_recipe_optimizer(model, recipe)
    optimizer.set_lr(recipe.lr)
    for step in range(recipe.steps):
        inputs, labels = batch_at(step, recipe)
        logits = reference_logits(model, inputs, recipe)
        F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX
        ).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in weights_and_momenta(model, optimizer)}


def weights_and_momenta(model, optimizer) -> list[tuple[str, Tensor]]:
    weights = list(model.named_parameters())
    states = [(name, optimizer.state[parameter]) for name, parameter in weights]
    momenta = [(f"{n}.{MOMENTUM}", state[MOMENTUM]) for n, state in states if MOMENTUM in state]
    assert momenta
    return [*weights, *momenta]


def train(cases: list[tuple[Layout, Recipe]]) -> list[dict[str, tuple]]:
    owned_matrices.ROUND_ELEMENTS = 1  # one matrix at a time, so several rounds
    results = []
    for layout, recipe in cases:
        state, engine, mesh = start_run(layout, recipe)
        run_until(state, engine, mesh, recipe, Record(), recipe.steps)
        tensors = weights_and_momenta(state.model, state.optimizer)
        results.append({name: shard_and_offset(tensor) for name, tensor in tensors})
        reject_a_step(state.model, state.optimizer)
        for name, tensor in weights_and_momenta(state.model, state.optimizer):
            assert torch.equal(local_shard(tensor), results[-1][name][2]), (str(layout), name)
    return results


def reject_a_step(model, optimizer) -> None:
    """All ranks take part, and one of them has a NaN, which would reach the whole matrix."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        if dist.get_rank() == 0 and local_shard(parameter.grad).numel():
            local_shard(parameter.grad).view(-1)[0] = torch.nan
    optimizer.step_if(torch.tensor(False))
    optimizer.uncount_steps(1)
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "layouts, ranks", [(ON_TWO_RANKS, 2), (ON_FOUR_RANKS, 4)], ids=["2 ranks", "4 ranks"]
)
def test_weights_and_momentum_after_five_steps_are_those_of_one_process(layouts, ranks):
    cases = [(layout, RECIPE) for layout in layouts]
    cases.append((layouts[0], PER_HEAD))
    by_rank = run_on_ranks(train, ranks, cases)
    for (layout, recipe), *parts in zip(cases, *by_rank, strict=True):
        actual, expected = merge_parts(parts), reference(recipe)
        assert actual.keys() == expected.keys()
        errors = {name: relative_error(actual[name], expected[name]) for name in expected}
        worst = max(errors, key=lambda name: errors[name])
        assert errors[worst] < 1e-5, (str(layout), worst, errors[worst])
