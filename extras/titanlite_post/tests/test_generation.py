"""Batched generation by the training model: the same ids and log-probs under every layout."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.distributed.oracle import CPU, SEED, SGD, Layout, Recipe, build_parallel, fit_recipe
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import recipe_of
from titanlite.models.label_sampling import GOLDEN, add_noise, mix_int64
from titanlite.parallelize.weight_init import init_weights
from titanlite_post.generation import Generation, ShardedGenerator

pytestmark = pytest.mark.slow

NEW, VOCABULARY = 24, 500  # the model's has 509 ids
ENDS = (*range(3, 30),)  # so many that most sequences end, at different times
LENGTHS = (5, 9, 3, 7, 12, 4)
PROMPTS = [[(31 * row + 7 * at) % VOCABULARY for at in range(n)] for row, n in enumerate(LENGTHS)]
PROMPTS[1][4] = ENDS[0]  # of a prompt: ends nothing
NUMBERS = [10 + 3 * row for row in range(len(PROMPTS))]
LLAMA = SGD
FAMILIES = {
    name: recipe_of(name)
    for name in ("gpt_oss", "gemma3", "deepseek_v3", "mixtral", "qwen3_next", "gpt2")
} | {"llama3": LLAMA}


@torch.no_grad()
def enlarge_weights(model: torch.nn.Module) -> None:
    """With the initial weights, attention is uniform and all ids are equally likely."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)


def generate_with(
    layout: Layout, recipe: Recipe, prompts=PROMPTS, numbers=NUMBERS, gather_weights=True
) -> list[Generation]:
    """This rank's completions, of its part of the prompts."""
    sharded, parallel = build_parallel(layout, fit_recipe(recipe, layout))
    enlarge_weights(sharded.model)
    generator = ShardedGenerator(
        sharded,
        parallel,
        CPU,
        seed=SEED,
        ends=ENDS,
        vocab_size=VOCABULARY,
        gather_weights=gather_weights,
    )
    ranks, rank = layout.degrees.batch, parallel.mesh.batch_rank
    return generator.generate(prompts[rank::ranks], numbers[rank::ranks], NEW)


def run_cases(cases: list[tuple[Layout, str]]) -> list[list[Generation]]:
    return [generate_with(layout, FAMILIES[family]) for layout, family in cases]


@torch.no_grad()
def reference(layout: Layout, family: str) -> list[Generation]:
    """Each sequence alone, token by token, by forwards of all of its tokens without a cache."""
    recipe = fit_recipe(FAMILIES[family], layout)
    model = recipe.spec.build(recipe.sizes)
    init_weights(model, recipe.spec, recipe.sizes, SEED)
    enlarge_weights(model)
    return [complete(model, p, number) for p, number in zip(PROMPTS, NUMBERS, strict=True)]


def complete(model, prompt: list[int], number: int) -> Generation:
    ids, log_probs = list(prompt), []
    for index in range(NEW):
        logits = model(torch.tensor([ids]))[0, -1:]
        id = sample(logits[:, :VOCABULARY], number, index)
        ids.append(id)
        log_probs.append(logits.log_softmax(-1)[0, id].item())
        if id in ENDS:
            break
    return Generation(ids[len(prompt) :], log_probs, ids[-1] in ENDS)


def sample(logits: Tensor, number: int, index: int) -> int:
    key = mix_int64(mix_int64(torch.tensor([number])) + SEED)
    key = mix_int64(key + torch.tensor(index) * GOLDEN) & (2**63 - 1)
    return int(add_noise(logits, key, 0)[1])


def compare(found: list[Generation], expected: list[Generation]) -> float:
    """The largest difference of a log-prob; the ids must be equal."""
    assert [g.ids for g in found] == [g.ids for g in expected]
    assert [g.ended for g in found] == [g.ended for g in expected]
    pairs = zip(found, expected, strict=True)
    return max(abs(a - b) for f, e in pairs for a, b in zip(f.log_probs, e.log_probs, strict=True))


ON_ONE = [(Layout(), family) for family in FAMILIES]
ON_TWO = [
    *((Layout(shard=2), family) for family in ("llama3", "gpt_oss", "qwen3_next")),
    *((Layout(tensor=2), family) for family in FAMILIES),
    (Layout(tensor=2, loss_parallel=False), "llama3"),
    *((Layout(context=2), family) for family in ("llama3", "gpt_oss", "qwen3_next")),
    (Layout(pipeline=2, microbatch=6), "llama3"),
    (Layout(pipeline=2, microbatch=6), "gemma3"),
    (Layout(pipeline=2, schedule="Interleaved1F1B", stages=4), "deepseek_v3"),
    (Layout(pipeline=2, schedule="ZBVZeroBubble", stages=4), "llama3"),
    (Layout(shard=2, expert=2), "mixtral"),
    (Layout(shard=2, expert=2), "qwen3_next"),
    (Layout(shard=2, compile="eager"), "llama3"),
]
ON_FOUR = [
    (Layout(replicate=2, shard=2), "llama3"),
    (Layout(shard=2, tensor=2), "llama3"),
    (Layout(pipeline=2, tensor=2), "gpt_oss"),
    (Layout(shard=2, context=2, expert=4), "mixtral"),
]


@pytest.mark.parametrize(("ranks", "cases"), [(1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)])
def test_every_layout_samples_what_a_loop_without_a_cache_samples(ranks, cases):
    results = run_on_ranks(run_cases, ranks, cases)
    worst = {}
    for index, (layout, family) in enumerate(cases):
        expected = reference(layout, family)
        batches = layout.degrees.batch
        seen = set()
        for rank, by_case in enumerate(results):
            # dimensions from the outermost: pipeline, replicate, shard, context, tensor
            part = rank // (layout.context * layout.tensor) % batches
            seen.add(part)
            worst[f"{layout} {family}"] = compare(by_case[index], expected[part::batches])
        assert len(seen) == batches
        ends = [len(g.ids) for g in expected if g.ended]
        assert len(set(ends)) > 1, "sequences end at the same time"
    print(worst)
    assert max(worst.values()) < 1e-5, worst
