"""Losses of pairs: every layout computes what autograd computes on one process, unpacked."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.oracle import (
    SEED,
    SGD,
    Layout,
    Recipe,
    build_sharded,
    fit_recipe,
    merge_parts,
    own_rows,
    parse_layouts,
    relative_error,
    shard_and_offset,
)
from tests.distributed.ranks import run_on_ranks
from tests.distributed.recipes import MOE
from titanlite.labels import DOCUMENT_END, SAME_DOCUMENT
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.batch import Batch
from titanlite.training.state import Counters, TrainState
from titanlite.training.step import StepSettings, compute_gradients
from titanlite_post.preferences import DPOSection, PreferenceObjective

WINDOWS, SEQ_LEN = 8, 48
DENSE = replace(SGD, batch=WINDOWS, seq_len=SEQ_LEN, documents=True)
RECIPES = {"dense": DENSE, "experts": replace(MOE, batch=WINDOWS, seq_len=SEQ_LEN, documents=True)}
SECTIONS = {
    "dpo": DPOSection("dpo", beta=0.5),
    "ipo": DPOSection("ipo", beta=0.5),
    "simpo": DPOSection("simpo", beta=2.0, margin=0.5),
}
LAYOUTS = {
    "dense": [
        "accumulate=4",
        "shard=2,accumulate=2; tensor=2; context=2; context=2,rotate=alltoall,balancer=none"
        "; pipeline=2,microbatch=1; pipeline=2,schedule=ZBVZeroBubble; replicate=2",
        "shard=2,tensor=2; pipeline=2,context=2,microbatch=2; pipeline=2,shard=2"
        ",schedule=Interleaved1F1B; replicate=2,shard=2,accumulate=2",
    ],
    "experts": ["shard=2,expert=2; tensor=2,expert=2,expert_tensor=1; pipeline=2"],
}


@cache
def pairs(vocab_size: int, seed: int = 3) -> list[list[tuple[Tensor, int]]]:
    """Windows of pairs; of each answer its ids, and how many of them are of the prompt."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    windows = []
    for row in range(WINDOWS):
        answers = []
        for _ in range(row % 3):  # also windows without a pair
            prompt = torch.randint(1, vocab_size, (draw(1, 5),), generator=generator)
            for _ in range(2):
                answer = torch.randint(1, vocab_size, (draw(1, 7),), generator=generator)
                answers.append((torch.cat((prompt, answer)), len(prompt)))
        windows.append(answers)
    return windows


def packed(vocab_size: int, seed: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and labels [B, T] as `PackedSource` gives them."""
    inputs = torch.zeros(WINDOWS, SEQ_LEN + 1, dtype=torch.int64)
    labels = torch.full((WINDOWS, SEQ_LEN + 1), SAME_DOCUMENT)  # of the input before
    for row, answers in enumerate(pairs(vocab_size, seed)):
        place = 0
        for ids, prompt in answers:
            inputs[row, place : place + len(ids)] = ids
            labels[row, place + prompt : place + len(ids)] = ids[prompt:]
            labels[row, place] = DOCUMENT_END
            place += len(ids)
        labels[row, place] = DOCUMENT_END
    return inputs[:, :-1].clone(), labels[:, 1:].clone()


def reference_table(sequences: range) -> Tensor:
    """Log-probabilities of a reference: any numbers."""
    generator = torch.Generator().manual_seed(4)
    return -20 * torch.rand(WINDOWS, 2, 2, generator=generator)[list(sequences)]


@cache
def one_process(recipe: Recipe, name: str) -> tuple[float, dict[str, Tensor]]:
    """The loss and gradients by the papers' formulas, one answer after the other, unpacked."""
    model = recipe.spec.build(recipe.sizes)
    init_weights(model, recipe.spec, recipe.sizes, SEED, recipe.widths)
    section, losses = SECTIONS[name], []
    for row, answers in enumerate(pairs(recipe.sizes.vocab_size)):
        ratios = []
        for number, (ids, prompt) in enumerate(answers):
            logits = model(ids[None, :-1])[0, prompt - 1 :]
            log_prob = -F.cross_entropy(logits, ids[prompt:], reduction="sum")
            tokens = len(ids) - prompt
            known = reference_table(range(row, row + 1))[0, number // 2, number % 2]
            if name == "dpo":
                ratios.append(log_prob - known)
            else:
                ratios.append((log_prob - (known if name == "ipo" else 0.0)) / tokens)
        for chosen, rejected in zip(ratios[::2], ratios[1::2], strict=True):
            margin = chosen - rejected
            if name == "ipo":
                losses.append((margin - 1 / (2 * section.beta)) ** 2)
            else:
                gamma = section.margin if name == "simpo" else 0.0
                losses.append(-torch.log(torch.sigmoid(section.beta * margin - gamma)))
    loss = torch.stack(losses).mean()
    loss.backward()
    return loss.item(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def take_gradients(built, batch: Batch, objective: Callable) -> tuple[float, dict[str, tuple]]:
    """(loss, gradients of this rank) with an objective, of what `build_sharded` returned."""
    model, mesh, engine = built
    state = TrainState(model, _NoOptimizer(), counters=Counters())
    settings = StepSettings(mesh, 0.0, objective=objective)
    result = compute_gradients(state, engine, batch, settings=settings)
    named = model.named_parameters()
    return result.loss.item(), {n: shard_and_offset(p.grad) for n, p in named if p.grad is not None}


def run_layouts(layouts: list[Layout], recipe: Recipe, names: list[str]):
    """Of each layout and loss: (loss, gradients of this rank)."""
    results = []
    for layout in layouts:
        for name in names:
            _, mesh, engine = built = build_sharded(layout, fit_recipe(recipe, layout))
            known = None if name == "simpo" else lambda at, n: reference_table(range(at, at + n))
            objective = PreferenceObjective(SECTIONS[name], engine, mesh, known)
            batch = engine.prepare(*own_rows(mesh, *packed(recipe.sizes.vocab_size)))
            results.append(take_gradients(built, batch, objective))
    return results


class _NoOptimizer:
    """What `compute_gradients` asks of an optimizer."""

    def follow_schedule(self, *_) -> float:
        return 0.0


def check_gradients(of_ranks, loss: float, gradients: dict[str, Tensor]) -> None:
    """Compare what `take_gradients` returned on all ranks with one process."""
    merged = merge_parts([grads for _, grads in of_ranks])
    assert [own for own, _ in of_ranks] == pytest.approx([loss] * len(of_ranks), rel=1e-5)
    assert merged.keys() == gradients.keys()
    errors = {n: relative_error(merged[n], grad) for n, grad in gradients.items()}
    assert max(errors.values()) < 1e-5, errors


@pytest.mark.parametrize(
    ("family", "text"), [(f, text) for f, texts in LAYOUTS.items() for text in texts]
)
def test_every_layout_matches_one_process_with_unpacked_answers(family, text):
    layouts, recipe = parse_layouts(text), RECIPES[family]
    ranks = layouts[0].degrees.ranks
    # one layout measures all losses, which differ in a few lines, and the others one
    names = list(SECTIONS) if ranks == 2 and family == "dense" else ["dpo"]
    results = run_on_ranks(run_layouts, ranks, layouts, recipe, names)
    cases = [(layout, name) for layout in layouts for name in names]
    for (layout, name), of_ranks in zip(cases, zip(*results, strict=True), strict=True):
        check_gradients(of_ranks, *one_process(fit_recipe(recipe, layout), name))


class _PaddedModel:
    """What the loss of TRL asks of a model: log-probabilities of the answers [B, T]."""

    training = True

    def __init__(self, model: torch.nn.Module):
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor, **_) -> SimpleNamespace:
        log_probs = -F.cross_entropy(
            self.model(input_ids[:, :-1]).mT, labels[:, 1:], ignore_index=-100, reduction="none"
        )
        others = dict.fromkeys(("entropy", "mean_logits"), log_probs.detach())
        return SimpleNamespace(log_probs=log_probs, is_top1=log_probs > 0, **others)


@pytest.mark.parametrize("name", ["dpo", "ipo"])
def test_dpo_and_ipo_have_the_loss_and_gradients_of_trl(name):
    trl = pytest.importorskip("trl.trainer.dpo_trainer")
    rows, masks, known = [], [], []
    for row, answers in enumerate(pairs(DENSE.sizes.vocab_size)):
        rows += [F.pad(ids, (0, 12 - len(ids))) for ids, _ in answers]
        masks += [
            F.pad(torch.arange(len(ids)) >= prompt, (0, 12 - len(ids))).long()
            for ids, prompt in answers
        ]
        known += reference_table(range(row, row + 1)).flatten()[: len(answers)]
    inputs = {
        "input_ids": torch.stack(rows[::2] + rows[1::2]),
        "completion_mask": torch.stack(masks[::2] + masks[1::2]),
        "attention_mask": torch.ones(len(rows), 12),
        "ref_chosen_logps": torch.stack(known[::2]),
        "ref_rejected_logps": torch.stack(known[1::2]),
    }
    model = DENSE.spec.build(DENSE.sizes)
    init_weights(model, DENSE.spec, DENSE.sizes, SEED)
    padded, metrics = _PaddedModel(model), defaultdict(lambda: defaultdict(list))
    accelerator = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    trainer = SimpleNamespace(
        model=padded,
        accelerator=accelerator,
        beta=SECTIONS[name].beta,
        loss_types=["sigmoid" if name == "dpo" else name],
        loss_weights=[1.0],
        f_divergence_type="reverse_kl",
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        use_weighting=False,
        ld_alpha=None,
        _metrics=metrics,
        _total_train_tokens=0,
        _tp_size=1,
    )
    loss = trl.DPOTrainer._compute_loss(trainer, padded, inputs, False)
    loss.backward()
    expected_loss, expected = one_process(DENSE, name)
    assert loss.item() == pytest.approx(expected_loss, rel=1e-5)
    grads = dict(model.named_parameters())
    assert max(relative_error(grads[n].grad, grad) for n, grad in expected.items()) < 1e-5
