"""GRPO: every layout computes what autograd computes on one process, each completion unpacked."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from functools import cache
from math import log

import pytest
import torch
from torch import Tensor

from tests.distributed.low_precision import (
    MAX_ERROR_RATIO,
    Weights,
    error_ratios,
    load_trained,
    train_weights,
)
from tests.distributed.low_precision import RECIPE as PRECISION
from tests.distributed.oracle import (
    SEED,
    Layout,
    Recipe,
    build_sharded,
    fit_recipe,
    merge_parts,
    own_rows,
    parse_layouts,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.mesh import Mesh
from titanlite.elastic.rows import RankSlice
from titanlite.models import valid_tokens
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.batch import Batch
from titanlite.training.engine import Engine
from titanlite.training.spmd_engine import ignore_phase
from titanlite.training.step import StepInputs
from titanlite_post.grpo import (
    Completions,
    GroupTensors,
    GRPOSection,
    RewardObjective,
    RolloutData,
    place_group,
)
from titanlite_post.preferences import DPOSection, PreferenceObjective
from titanlite_post.tests.test_preferences import (
    LAYOUTS,
    RECIPES,
    SEQ_LEN,
    WINDOWS,
    check_gradients,
    packed,
    take_gradients,
)

PRECISE = replace(PRECISION, batch=WINDOWS, seq_len=SEQ_LEN, documents=True)
PRECISE = replace(PRECISE, sizes=replace(PRECISE.sizes, n_layers=4))  # as a pipeline needs
BATCHES = 3  # in bf16, whose median error is compared
SECTION = GRPOSection(group_size=4, kl_weight=0.3, clip=0.2)
REWARDS = (
    [1.0, 0.0, 0.5, None],
    [0.0, 0.0, 3.0, 0.0],
    [1.0] * 4,
    [None] * 4,
    [None, 2.0, 1.0, 2.0],
)
OBJECTIVES = {
    "on-policy": (),
    "ratio": ("old",),
    "kl": ("reference",),
    "both": ("old", "reference"),
}


@cache
def groups(vocab_size: int, seed: int = 5) -> list[Completions]:
    """A prompt for each sequence, with completions of different lengths; some are left out.

    Old log-probabilities are so near to those of initial weights that some ratios are clipped.
    """
    generator = torch.Generator().manual_seed(seed)

    def ids(longest: int) -> list[int]:
        count = int(torch.randint(1, longest + 1, (), generator=generator))
        return torch.randint(1, vocab_size, (count,), generator=generator).tolist()

    def near(ids: list[int], width: float) -> list[float]:
        return (
            width * (torch.rand(len(ids), generator=generator) - 0.5) - log(vocab_size)
        ).tolist()

    found = []
    for row in range(WINDOWS):
        prompt, completions = ids(4), [ids(7) for _ in range(4)]
        tables = [[near(each, width) for each in completions] for width in (2.0, 1.0)]
        found.append(Completions(prompt, completions, tables[0], REWARDS[row % 5], tables[1]))
    return found


def columns_of(vocab_size: int, seed: int = 5) -> tuple[GroupTensors, Tensor]:
    """(the batch, log-probabilities of a reference: those that the generator had, [B, T])"""
    rows = [place_group(group, SEQ_LEN, by_std=True) for group in groups(vocab_size, seed)]
    columns = GroupTensors(*map(torch.stack, zip(*rows, strict=True)))
    return columns, columns.sampled + 0.25


@cache
def one_process(recipe: Recipe, name: str) -> tuple[float, dict[str, Tensor], list[float]]:
    """Loss, gradients and the other means by the papers' formulas, one completion after another."""
    model = recipe.spec.build(recipe.sizes)
    init_weights(model, recipe.spec, recipe.sizes, SEED)
    losses, kls, outside, gaps, parts = [], [], [], [], OBJECTIVES[name]
    for group in groups(recipe.sizes.vocab_size):
        known = torch.tensor([reward for reward in group.rewards if reward is not None])
        for number, reward in enumerate(group.rewards):
            if reward is None:
                continue
            spread = known.std(correction=0) if len(known.unique()) > 1 else 1.0
            advantage = (reward - known.mean()) / spread
            ids = torch.tensor(group.prompt + group.ids[number])
            logits = model(ids[None, :-1])[0, len(group.prompt) - 1 :]
            targets = ids[len(group.prompt) :]
            log_probs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
            sampled = torch.tensor(group.sampled[number])
            old = torch.tensor(group.old[number]) if "old" in parts else log_probs.detach()
            ratio, clip = (log_probs - old).exp(), SECTION.clip
            surrogate = ratio.clamp(1 - clip, 1 + clip) * advantage
            difference = sampled + 0.25 - log_probs
            kl = difference.exp() - difference - 1 if "reference" in parts else 0 * difference
            losses.append(-torch.minimum(ratio * advantage, surrogate) + SECTION.kl_weight * kl)
            outside.append(torch.sign(advantage) * ratio.detach())
            gaps.append((log_probs.detach() - sampled).abs())
            kls.append(kl.detach())
    loss = torch.cat(losses).mean()
    loss.backward()
    signed = torch.cat(outside)
    clipped = (signed > 1 + clip) | ((signed <= 0) & (-signed < 1 - clip) & (signed != 0))
    means = [torch.cat(kls).mean(), clipped.float().mean(), torch.cat(gaps).mean()]
    if "old" in parts:
        assert (signed > 1 + clip).any() and (clipped & (signed < 0)).any() and not clipped.all()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return loss.item(), grads, [mean.item() for mean in means]


def run_layouts(layouts: list[Layout], recipe: Recipe, names: list[str]):
    """Of each layout and objective: (loss, gradients of this rank, other means)."""
    columns, reference = columns_of(recipe.sizes.vocab_size)
    results = []
    for layout in layouts:
        for name in names:
            _, mesh, engine = built = build_sharded(layout, fit_recipe(recipe, layout))
            own = GroupTensors(*own_rows(mesh, *columns))
            (known,) = own_rows(mesh, reference)
            parts = {"old": own.old, "reference": known}
            parts = {
                key: value if key in OBJECTIVES[name] else None for key, value in parts.items()
            }
            data = RolloutData(own.sampled, **parts)
            objective = RewardObjective(SECTION, engine, mesh, lambda data=data: data, lambda: True)
            batch = engine.prepare(own.inputs, own.labels)
            batch = dataclasses.replace(batch, weights=own.advantages)
            results.append((*take_gradients(built, batch, objective), objective.means.tolist()))
        check_first_ratio(engine, mesh, batch, own)
    return results


def check_first_ratio(engine: Engine, mesh: Mesh, batch: Batch, own: GroupTensors) -> None:
    """With the log-probabilities that the trainer has just measured, ratios are exactly 1."""
    data = RolloutData(own.sampled, -engine.token_losses(batch), None)
    objective = RewardObjective(SECTION, engine, mesh, lambda: data, lambda: False)
    rows = RankSlice(0, len(batch.inputs), WINDOWS)
    inputs = StepInputs(batch, 0, 0, valid_tokens(batch.labels).clamp(min=1), 1.0, rows)
    assert torch.equal(objective(inputs, ignore_phase).weights, own.advantages)


@pytest.mark.parametrize(
    ("family", "text"), [(f, text) for f, texts in LAYOUTS.items() for text in texts]
)
def test_every_layout_matches_one_process_with_unpacked_completions(family, text):
    layouts, recipe = parse_layouts(text), RECIPES[family]
    ranks = layouts[0].degrees.ranks
    names = list(OBJECTIVES) if ranks == 1 else ["both"]
    results = run_on_ranks(run_layouts, ranks, layouts, recipe, names)
    cases = [(layout, name) for layout in layouts for name in names]
    for (layout, name), of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        loss, gradients, means = one_process(fit_recipe(recipe, layout), name)
        check_gradients([each[:2] for each in of_ranks], loss, gradients)
        assert all(each[2][1:] == pytest.approx(means, rel=1e-4, abs=1e-6) for each in of_ranks)


def run_in_precision(cases: list[tuple[Layout, torch.dtype]], weights: Weights):
    """Gradients of this rank: [case][loss][batch], of DPO and of GRPO."""
    vocab_size, results = PRECISE.sizes.vocab_size, []
    for layout, dtype in cases:
        built = model, mesh, engine = build_sharded(layout, PRECISE, dtype)
        load_trained(model, weights)
        of_dpo, of_grpo = [], []
        for seed in range(BATCHES):
            section = DPOSection(beta=0.02)
            objective = PreferenceObjective(section, engine, mesh, None)
            batch = engine.prepare(*own_rows(mesh, *packed(vocab_size, seed)))
            of_dpo.append(take_gradients(built, batch, objective)[1])
            model.zero_grad()
            own = GroupTensors(*own_rows(mesh, *columns_of(vocab_size, seed)[0]))
            data = RolloutData(own.sampled, None, None)
            objective = RewardObjective(SECTION, engine, mesh, lambda data=data: data, lambda: True)
            batch = engine.prepare(own.inputs, own.labels)
            batch = dataclasses.replace(batch, weights=own.advantages)
            of_grpo.append(take_gradients(built, batch, objective)[1])
            model.zero_grad()
        results.append((of_dpo, of_grpo))
    return results


def test_bf16_gradients_of_every_layout_are_as_accurate_as_on_one_process():
    """At most 1.5 times the error of one process against fp32, on trained weights."""
    weights = train_weights(PRECISE.sizes)
    one = [(Layout(), torch.float32), (Layout(), torch.bfloat16)]
    exact, reference = (
        [[merge_parts([each]) for each in batches] for batches in losses]
        for losses in run_on_ranks(run_in_precision, 1, one, weights)[0]
    )
    layouts = parse_layouts("tensor=2; context=2; pipeline=2,microbatch=1")
    cases = [(layout, torch.bfloat16) for layout in layouts]
    for layout, *ranks in zip(
        layouts, *run_on_ranks(run_in_precision, 2, cases, weights), strict=True
    ):
        for number, expected in enumerate(exact):
            merged = [
                merge_parts(parts) for parts in zip(*(rank[number] for rank in ranks), strict=True)
            ]
            errors, floor = (
                [
                    {n: ((grads[n] - e).norm() / e.norm()).item() for n, e in right.items()}
                    for grads, right in zip(each, expected, strict=True)
                ]
                for each in (merged, reference[number])
            )
            ratios = error_ratios(errors, floor)
            assert max(ratios.values()) <= MAX_ERROR_RATIO, (str(layout), number, ratios)
