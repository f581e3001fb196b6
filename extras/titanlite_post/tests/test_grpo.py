"""GRPO: every layout computes what autograd computes on one process, each completion unpacked."""

from __future__ import annotations

import dataclasses
from functools import cache
from math import log

import pytest
import torch
from torch import Tensor

from tests.distributed.oracle import (
    SEED,
    Layout,
    Recipe,
    build_sharded,
    fit_recipe,
    own_rows,
    parse_layouts,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.parallelize.weight_init import init_weights
from titanlite_post.grpo import (
    Completions,
    GroupTensors,
    GRPOSection,
    RewardObjective,
    RolloutData,
    place_group,
)
from titanlite_post.tests.test_preferences import (
    LAYOUTS,
    RECIPES,
    SEQ_LEN,
    WINDOWS,
    check_gradients,
    take_gradients,
)

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
def groups(vocab_size: int) -> list[Completions]:
    """A prompt for each sequence, with completions of different lengths; some are left out.

    Old log-probabilities are so near to those of initial weights that some ratios are clipped.
    """
    generator = torch.Generator().manual_seed(5)

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


def columns_of(vocab_size: int) -> tuple[GroupTensors, Tensor]:
    """(the batch, log-probabilities of a reference: those that the generator had, [B, T])"""
    rows = [place_group(group, SEQ_LEN, by_std=True) for group in groups(vocab_size)]
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
    return results


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
