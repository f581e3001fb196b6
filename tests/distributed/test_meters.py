"""The meters of a run measure in every layout what one plain process measures."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.distributed.oracle import (
    CPU,
    FAMILY,
    SEED,
    SGD,
    Layout,
    batch_at,
    build_parallel,
    build_recipe_optimizer,
    own_batch,
    parse_layouts,
    start_run,
    tokens,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.collectives import local_shard
from titanlite.labels import IGNORE_INDEX
from titanlite.meters.layer_norms import KINDS, combine_layer_norms
from titanlite.meters.noise_scale import NoiseMeter, NoiseScale, build_noise_scale
from titanlite.meters.source_losses import SourceLosses
from titanlite.optim import OptimizerInBackward, build_optimizer
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.engine import build_engine
from titanlite.training.state import TrainState
from titanlite.training.step import StepSettings, take_step

RECIPE = replace(SGD, batch=12, sizes=replace(SGD.sizes, n_layers=4))
LAYERS = ["tok_embeddings", *(f"layers.{n}" for n in range(4)), "norm", "output"]
LAYOUTS = (
    "one; accumulate=3; early=True; offload=True",
    "shard=2; replicate=2; tensor=2; context=2; pipeline=2,microbatch=3,accumulate=2;"
    "shard=2,reduction=last_microbatch,accumulate=2",
    "shard=2,tensor=2; replicate=2,shard=2",
    "shard=5",  # with idle sequences
)


def layer_of(name: str) -> str:
    return ".".join(name.split(".")[: 2 if name.startswith("layers.") else 1])


SOURCES = torch.tensor([0, 2, 2, 0, 2, 0, 0, 0, 2, 0, 2, 0])  # of each sequence; 1 has none


def expected() -> tuple[dict[str, list[float]], float, list[float]]:
    """(norms by kind, gradient norm of the first half of the batch, losses of the sources 0 and 2)
    of a plain process."""
    model = FAMILY.build(RECIPE.sizes)
    init_weights(model, FAMILY, RECIPE.sizes, SEED)
    optimizer, (inputs, labels) = build_optimizer(model, RECIPE.section), batch_at(0, RECIPE)

    def backward(rows: int) -> None:
        logits, targets = model(inputs[:rows]).flatten(0, 1), labels[:rows].flatten()
        F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX).backward()

    losses = []
    for source in (0, 2):
        logits = model(inputs[source == SOURCES]).flatten(0, 1)
        of_source = labels[source == SOURCES].flatten()
        losses.append(F.cross_entropy(logits, of_source, ignore_index=IGNORE_INDEX).item())
    backward(RECIPE.batch // 2)
    half = torch.cat([p.grad.flatten() for p in model.parameters()]).norm().item()
    optimizer.zero_grad()
    backward(RECIPE.batch)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    optimizer.step()
    updates = {name: p.detach() - before[name] for name, p in model.named_parameters()}
    norms = {
        kind: [
            torch.cat([t.flatten() for n, t in tensors.items() if layer_of(n) == layer])
            .norm()
            .item()
            for layer in LAYERS
        ]
        for kind, tensors in zip(KINDS, (gradients, before, updates), strict=True)
    }
    return norms, half, losses


def run_step(layout: Layout, metered: bool) -> tuple[str, list, float, list]:
    """(hash of this rank's weights, layer norms, gradient norm of the small batch, losses of the
    sources) of a step."""
    sharded, parallel_layout = build_parallel(layout, RECIPE)
    mesh = parallel_layout.mesh
    engine = build_engine(sharded, parallel_layout, CPU, local_batch=layout.local_batch(RECIPE))
    state = TrainState(sharded.model, build_recipe_optimizer(sharded.model, RECIPE))
    early = OptimizerInBackward(state.model, state.optimizer) if layout.early else None
    noise = NoiseMeter(engine, state, mesh)
    stream = SimpleNamespace(names=["a", "b", "c"], sources_at=lambda at, n: SOURCES[at : at + n])
    of_sources = SourceLosses(stream, sharded.output, parallel_layout)
    if metered:
        state.optimizer.update_norms.arm()
        of_sources.arm()
        if not early:  # which would apply the gradient of the small batch
            noise.arm()
    batch = own_batch(engine, mesh, 0, *batch_at(0, RECIPE))
    settings = StepSettings(mesh, 0.0, early, hooks=(noise, of_sources))
    result = take_step(state, engine, batch, settings=settings)
    weights = hashlib.sha256()
    for parameter in state.model.parameters():
        weights.update(local_shard(parameter.detach()).contiguous().numpy().tobytes())
    combined = combine_layer_norms(state, mesh, result.own_norms, LAYERS, layer_of)
    measurement, losses = noise.take(), of_sources.take()
    return (
        weights.hexdigest(),
        [] if combined is None else combined.tolist(),
        measurement.grad_norm.item() if measurement else 0.0,
        [] if losses is None else losses.tolist(),
    )


def run_steps(layouts: list[Layout]) -> list[tuple]:
    return [(run_step(layout, True), run_step(layout, False)) for layout in layouts]


@pytest.mark.parametrize("text", LAYOUTS)
def test_every_layout_measures_the_same_and_the_step_changes_no_bit(text):
    layouts, (norms, half, losses) = parse_layouts(text), expected()
    for results in run_on_ranks(run_steps, layouts[0].degrees.ranks, layouts):
        for layout, (metered, unmetered) in zip(layouts, results, strict=True):
            weights, combined, small, of_sources = metered
            assert unmetered == (weights, [], 0.0, []), layout
            assert of_sources[::2] == pytest.approx(losses, rel=1e-5), str(layout)
            assert math.isnan(of_sources[1])
            for kind, row in zip(KINDS, combined, strict=True):
                assert row == pytest.approx(norms[kind], rel=1e-5), (str(layout), kind)
            assert layout.early or small == pytest.approx(half, rel=1e-5), str(layout)


ONE_BLOCK = replace(SGD.sizes, n_layers=1)
NOISY = replace(SGD, lr=0.0, batch=16, seq_len=24, sizes=ONE_BLOCK)  # whose weights stay the same
MEASURED_STEPS = 20


def frequent_tokens(step: int, uneven: bool) -> tuple[torch.Tensor, ...]:
    """A batch whose sequences have a gradient in common: few of the token ids occur.

    `uneven`: most labels are ignored, in some sequences nearly all, as in fine-tuning.
    """
    batch, length = NOISY.batch, NOISY.seq_len
    inputs, labels = (part % 64 for part in tokens(step, batch, length, NOISY))
    if uneven:
        share = torch.rand(batch, 1, generator=torch.Generator().manual_seed(step)) ** 3
        labels[torch.arange(length) > share * length] = IGNORE_INDEX
    return inputs, labels


def noise_events(uneven: bool) -> list[dict]:
    """The events of a run in one process that is measured in every second step."""
    state, engine, mesh = start_run(Layout(), NOISY)
    state, events = replace(state, parts={"noise_scale": NoiseScale(decay=0.99)}), []
    sinks = SimpleNamespace(event=lambda step, name, **fields: events.append(fields))
    settings = StepSettings(mesh, 0.0)
    run = SimpleNamespace(engine=engine, state=state, sinks=sinks, step_settings=settings)
    meter = build_noise_scale(SimpleNamespace(run=run, metrics=SimpleNamespace(noise_scale_freq=2)))
    settings = replace(settings, hooks=(meter.hook,))
    meter.action.start(0)
    for step in range(1, 2 * MEASURED_STEPS + 1):
        batch = engine.prepare(*frequent_tokens(step, uneven))
        result = take_step(state, engine, batch, settings=settings)
        info = SimpleNamespace(step=step, result=result)
        if meter.action.is_due(info):
            meter.action.run(info)
    return events


def gradients_of_sequences(uneven: bool) -> Iterator[tuple[torch.Tensor, int]]:
    """The summed gradient of each sequence of the measured steps, and its labels; no ranks."""
    model = FAMILY.build(NOISY.sizes)
    init_weights(model, FAMILY, NOISY.sizes, SEED)
    for step in range(2, 2 * MEASURED_STEPS + 1, 2):
        for inputs, labels in zip(*frequent_tokens(step, uneven), strict=True):
            model.zero_grad()
            logits = model(inputs[None])[0]
            F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, reduction="sum").backward()
            gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
            yield gradient, int((labels != IGNORE_INDEX).sum())


@pytest.mark.parametrize("uneven", [False, True])
def test_the_noise_scale_of_a_model_is_that_of_its_sequences(uneven):
    [events] = run_on_ranks(noise_events, 1, uneven)
    assert len(events) == MEASURED_STEPS
    parts, counts = zip(*gradients_of_sequences(uneven), strict=True)
    gradients, valid = torch.stack(parts), torch.tensor(counts)
    mean = gradients.sum(0) / valid.sum()  # of a label
    spread = (gradients - valid[:, None] * mean).square().sum() / (len(gradients) - 1)
    noise = (spread / valid.double().mean() ** 2).item()  # of a sequence with the mean of labels
    square = mean.square().sum().item() - noise / len(gradients)
    last = events[-1]
    assert last["noise"] == pytest.approx(noise, rel=0.1)
    assert last["critical_batch"] == pytest.approx(noise / square, rel=0.3 if uneven else 0.1)
    assert last["critical_batch_tokens"] == last["critical_batch"] * NOISY.seq_len
