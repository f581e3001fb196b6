"""Batched generation by the training model: the same ids and log-probs under every layout."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tests.distributed.oracle import (
    CPU,
    SEED,
    SGD,
    Layout,
    Recipe,
    batch_at,
    build_parallel,
    fit_recipe,
    own_batch,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import recipe_of
from titanlite.distributed.collectives import local_shard
from titanlite.errors import ConfigError
from titanlite.models.label_sampling import GOLDEN, add_noise, mix_int64
from titanlite.models.router import find_routers
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.engine import build_engine
from titanlite_post.generation import CHECK_EVERY, Generation, ShardedGenerator

pytestmark = pytest.mark.slow

NEW, VOCABULARY = 24, 500  # the model's has 509 ids
ENDS = (*range(3, 30),)  # enough for most sequences to end, at different times
LENGTHS = (5, 9, 3, 7, 12, 4)
PROMPTS = [[(31 * row + 7 * at) % VOCABULARY for at in range(n)] for row, n in enumerate(LENGTHS)]
PROMPTS[1][4] = ENDS[0]  # in a prompt, it ends nothing
NUMBERS = [10 + 3 * row for row in range(len(PROMPTS))]
LLAMA, MIXTRAL = SGD, recipe_of("mixtral")
GPT_OSS, GEMMA, DEEPSEEK = map(recipe_of, ("gpt_oss", "gemma3", "deepseek_v3"))
QWEN, GPT2 = recipe_of("qwen3_next"), recipe_of("gpt2")
INTERLEAVED = Layout(pipeline=2, schedule="Interleaved1F1B", stages=4)


class Case(NamedTuple):
    layout: Layout
    recipe: Recipe
    prompts: int = len(PROMPTS)
    ends: tuple[int, ...] = ENDS

    @property
    def name(self) -> str:
        return f"{self.layout} {self.recipe.spec.name} {self.prompts}"


@torch.no_grad()
def enlarge_weights(model: torch.nn.Module) -> None:
    """With the initial weights, attention is uniform and all ids are equally likely."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(8)


def build(case: Case):
    """(sharded model, layout) of this rank."""
    sharded, parallel = build_parallel(case.layout, fit_recipe(case.recipe, case.layout))
    enlarge_weights(sharded.model)
    return sharded, parallel


def build_generator(case: Case, gather_weights: bool = True):
    """(sharded model, layout, generator) of this rank."""
    sharded, parallel = build(case)
    settings = {"seed": SEED, "ends": case.ends, "vocab_size": VOCABULARY}
    settings["gather_weights"] = gather_weights
    return sharded, parallel, ShardedGenerator(sharded, parallel, CPU, **settings)


def generate(case: Case) -> list[Generation]:
    """This rank's completions: data-parallel ranks have every n-th prompt."""
    _, parallel, generator = build_generator(case)
    own = slice(parallel.mesh.batch_rank, case.prompts, case.layout.degrees.batch)
    calls: list[bool] = []
    completions = generator.generate(PROMPTS[own], NUMBERS[own], NEW, lambda: calls.append(True))
    assert calls  # for the watchdog
    return completions


def run_cases(cases: list[Case]) -> list[list[Generation]]:
    return [generate(case) for case in cases]


def plain_model(recipe: Recipe) -> torch.nn.Module:
    model = recipe.spec.build(recipe.sizes)
    init_weights(model, recipe.spec, recipe.sizes, SEED)
    enlarge_weights(model)
    return model


@torch.no_grad()
def reference(case: Case) -> list[Generation]:
    """Each sequence alone, token by token, by forwards of all of its tokens without a cache."""
    model = plain_model(fit_recipe(case.recipe, case.layout))
    rows = zip(PROMPTS[: case.prompts], NUMBERS, strict=False)
    return [complete(model, prompt, number, case.ends) for prompt, number in rows]


def complete(model, prompt: list[int], number: int, ends: tuple[int, ...]) -> Generation:
    ids, log_probs = list(prompt), []
    for index in range(NEW):
        logits = model(torch.tensor([ids]))[0, -1:]
        id = sample(logits[:, :VOCABULARY], number, index)
        ids.append(id)
        log_probs.append(logits.log_softmax(-1)[0, id].item())
        if id in ends:
            break
    return Generation(ids[len(prompt) :], log_probs, ids[-1] in ends)


def sample(logits: Tensor, number: int, index: int) -> int:
    key = mix_int64(mix_int64(torch.tensor([number])) + SEED)
    key = mix_int64(key + torch.tensor(index) * GOLDEN) & (2**63 - 1)
    return int(add_noise(logits, key, 0)[1])


def compare(found: list[Generation], expected: list[Generation]) -> float:
    """The largest difference of a log-prob; the ids must be equal."""
    assert [g.ids for g in found] == [g.ids for g in expected]
    assert [g.ended for g in found] == [g.ended for g in expected]
    pairs = zip(found, expected, strict=True)
    logs = [zip(f.log_probs, e.log_probs, strict=True) for f, e in pairs]
    return max((abs(a - b) for log in logs for a, b in log), default=0.0)


ON_ONE = [Case(Layout(), recipe) for recipe in (LLAMA, GPT_OSS, QWEN, DEEPSEEK)]
ON_TWO = [
    *(Case(Layout(shard=2), recipe) for recipe in (LLAMA, GPT_OSS, QWEN)),
    Case(Layout(shard=2, compile="eager"), GEMMA),
    Case(Layout(shard=2), LLAMA, prompts=1),  # and none on the other rank
    Case(Layout(shard=2, expert=2), MIXTRAL, prompts=1),
    *(Case(Layout(shard=2, expert=2), recipe) for recipe in (MIXTRAL, QWEN)),
    *(Case(Layout(tensor=2), recipe) for recipe in (GPT_OSS, GEMMA, DEEPSEEK, QWEN, GPT2)),
    Case(Layout(tensor=2, loss_parallel=False), LLAMA, prompts=3),
    *(Case(Layout(context=2), recipe) for recipe in (GPT_OSS, QWEN)),
    Case(Layout(context=2), replace(LLAMA, documents=True), prompts=3),
    *(Case(Layout(pipeline=2, microbatch=6), recipe) for recipe in (LLAMA, GEMMA)),
    Case(INTERLEAVED, DEEPSEEK),
    Case(Layout(pipeline=2, schedule="ZBVZeroBubble", stages=4), LLAMA),
]
ON_FOUR = [
    Case(Layout(replicate=2, shard=2), LLAMA),
    Case(Layout(shard=2, tensor=2, expert=4), DEEPSEEK),
    Case(Layout(tensor=2, pipeline=2), GPT_OSS),
    Case(Layout(shard=2, context=2, expert=4), MIXTRAL),
]


@pytest.mark.parametrize(("ranks", "cases"), [(1, ON_ONE), (2, ON_TWO), (4, ON_FOUR)])
def test_every_layout_samples_what_a_loop_without_a_cache_samples(ranks, cases):
    worst = {}
    for case, *results in zip(cases, *run_on_ranks(run_cases, ranks, cases), strict=True):
        expected, batch = reference(case), case.layout.degrees.batch
        assert case.prompts < 6 or len({len(g.ids) for g in expected}) > 3, "all end together"
        inner = case.layout.context * case.layout.tensor  # ranks with the same prompts in a row
        parts = [expected[rank // inner % batch :: batch] for rank in range(ranks)]
        worst[case.name] = max(map(compare, results, parts))
    assert max(worst.values()) < 1e-5, worst


def train(case: Case, generates: bool):
    """(loss, gradients, selections of experts) of a step, after a generation or without one."""
    sharded, parallel, generator = build_generator(case) if generates else (*build(case), None)
    if generator is not None:
        generator.generate(PROMPTS, NUMBERS, 2)
    size = case.layout.local_batch(case.recipe)
    engine = build_engine(sharded, parallel, CPU, local_batch=size)
    batch = own_batch(engine, parallel.mesh, 0, *batch_at(0, case.recipe))
    loss = engine.forward_backward(batch, torch.tensor(100.0))
    gradients = [local_shard(p.grad) for p in sharded.model.parameters() if p.grad is not None]
    return loss, gradients, [router.counts for router in find_routers(sharded.model)]


def train_twice(cases: list[Case]) -> bool:
    return all(
        torch.equal(a, b)
        for case in cases
        for one, other in zip(train(case, False), train(case, True), strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_generation_changes_no_bit_of_the_next_training_step():
    cases = [
        Case(Layout(shard=2, expert=2), MIXTRAL),
        Case(Layout(context=2), QWEN),
        Case(replace(INTERLEAVED, compile="eager"), fit_recipe(LLAMA, INTERLEAVED)),
    ]
    assert run_on_ranks(train_twice, 2, cases) == [True, True]


def gathered_weights(gathers: bool) -> list[bool]:
    """Whether the weights are gathered after each forward of a generation, after it, and after a
    forward of training."""
    sharded, _, generator = build_generator(Case(Layout(shard=2, reshard="always"), LLAMA), gathers)
    gathered: list[bool] = []

    def watch(*_) -> None:
        kinds = {isinstance(parameter, DTensor) for parameter in sharded.model.parameters()}
        assert len(kinds) == 1
        gathered.append(kinds == {False})

    hook = sharded.model.register_forward_hook(watch)
    generator.generate(PROMPTS, NUMBERS, 2)
    watch()
    sharded.model(torch.tensor([[1, 2]]))
    hook.remove()
    return gathered


@pytest.mark.parametrize("gathers", [True, False])
def test_weights_are_gathered_once_for_a_call_or_for_each_token(gathers):
    forwards = max(LENGTHS) - min(LENGTHS) + 2
    expected = [gathers] * forwards + [False, False]
    assert run_on_ranks(gathered_weights, 2, gathers) == [expected] * 2


def run_on_one() -> None:
    """Of one process, without a reference of another one."""
    frequent = tuple(range(3, 160))
    case = Case(Layout(), LLAMA, ends=frequent)
    sharded, _, generator = build_generator(case)
    calls: list[tuple] = []
    sharded.model.register_forward_hook(lambda model, inputs, _: calls.append(inputs))
    compare(generator.generate(PROMPTS, NUMBERS, NEW), expected := reference(case))
    assert all(g.ended for g in expected)
    needed = max(n + len(g.ids) for n, g in zip(LENGTHS, expected, strict=True)) - min(LENGTHS)
    assert needed <= len(calls) < needed + CHECK_EVERY < max(LENGTHS) - min(LENGTHS) + NEW

    assert generator.generate([], [], NEW) == []
    with pytest.raises(ConfigError, match="no ids"):
        generator.generate([[1], []], [0, 1], NEW)

    samples = 5000
    prompts = [PROMPTS[0]] * samples
    ids = torch.tensor([g.ids[0] for g in generator.generate(prompts, range(samples), 1)])
    with torch.no_grad():
        logits = sharded.model(torch.tensor(PROMPTS[:1]))[0, -1, :VOCABULARY]
    expected_counts = logits.softmax(-1) * samples
    counts = torch.bincount(ids, minlength=VOCABULARY)
    chi_square = ((counts - expected_counts) ** 2 / expected_counts).sum().item()
    degrees = VOCABULARY - 1
    assert abs(chi_square - degrees) < 4 * (2 * degrees) ** 0.5, chi_square


def test_samples_follow_the_softmax_and_stop_when_all_have_ended():
    run_on_ranks(run_on_one, 1)
