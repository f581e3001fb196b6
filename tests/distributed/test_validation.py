"""Validation says the same under every layout, and every layout reads the same samples."""

from __future__ import annotations

import math
from functools import cache
from itertools import islice

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.distributed.oracle import FAMILY, SEED, SGD, SHAPE, Layout, build_sharded
from tests.distributed.ranks import run_on_ranks
from titanlite.data import SourceConfig, open_sample_stream, open_validation, rank_slices
from titanlite.data.shards import open_corpus
from titanlite.labels import IGNORE_INDEX
from titanlite.parallelize.weight_init import init_weights
from titanlite.training import validate

SEQ_LEN = 52  # of validation; not that of the corpus, and no divisor of it
ASKED = 37  # samples: no multiple of any layout's ranks times rows


def text_of(path):
    return open_validation(SourceConfig("code", path), seq_len=SEQ_LEN, vocab_size=258)


def validation_under(layout, path, counts) -> list[float]:
    _, mesh, engine = build_sharded(layout, SGD)
    text, cpu = text_of(path), torch.device("cpu")
    return [validate(engine, text, count, 3, mesh, cpu) for count in counts]


def kinds_of_weights_after_validation(layout, path) -> set[bool]:
    model, mesh, engine = build_sharded(layout, SGD)
    validate(engine, text_of(path), 4, 2, mesh, torch.device("cpu"))
    return {isinstance(parameter, DTensor) for parameter in model.parameters()}


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(shard=2, pipeline=2)], ids=str)
def test_validation_leaves_weights_sharded_for_what_comes_next(layout, corpus):
    """Saving, most of all: the gathered ones are whole, plain, and about to be out of date."""
    path = str(corpus / "validation")
    kinds = run_on_ranks(kinds_of_weights_after_validation, layout.degrees.ranks, layout, path)
    assert all(kind == {True} for kind in kinds)


@cache
def validation_of_one_process(path, count) -> float:
    """Mean over tokens, one sample after the other, by a plain loop."""
    model, text = FAMILY.build(SHAPE), text_of(path)
    init_weights(model, FAMILY.init_roles, SHAPE.n_layers, SEED)
    total = tokens = 0.0
    with torch.no_grad():
        for sample in range(count):
            inputs, labels = text.read(sample, 1)
            loss = F.cross_entropy(
                model(inputs)[0], labels[0], reduction="sum", ignore_index=IGNORE_INDEX
            )
            total, tokens = total + loss.item(), tokens + (labels != IGNORE_INDEX).sum().item()
    return total / tokens


@pytest.mark.parametrize(
    "layout",
    [
        Layout(),
        Layout(shard=3),
        Layout(tensor=2, loss_parallel=False),
        Layout(context=2, shard=2),
        Layout(pipeline=2, context=2, microbatch=4),
    ],
    ids=str,
)
def test_validation_counts_every_token_once_under_every_layout(layout, corpus):
    path = str(corpus / "validation")
    counts = [ASKED, text_of(path).samples]  # the last sample of all is a short one
    assert counts[1] > ASKED + 12
    found = run_on_ranks(validation_under, layout.degrees.ranks, layout, path, counts)
    for losses in found:
        for loss, count in zip(losses, counts, strict=True):
            assert loss == pytest.approx(validation_of_one_process(path, count), rel=2e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_global_batch_is_the_same_samples_in_the_same_order_for_any_ranks(ranks, corpus):
    source = [SourceConfig("code", str(corpus / "train"))]
    stream = open_sample_stream(source, seq_len=64, seed=3, vocab_size=258)
    steps, batch, position = 5, 12, 7
    plain = [stream.read(position + step * batch, batch)[0] for step in range(steps)]
    parts = [
        islice(stream.prefetch(rank_slices(position, batch, rank, ranks)), steps)
        for rank in range(ranks)
    ]
    for whole, pieces in zip(plain, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat([inputs for inputs, _ in pieces]), whole)


def test_positions_show_each_sample_once_whatever_the_layouts_of_a_run(corpus):
    """Stopped and resumed with other ranks and another batch, an epoch is still each sample once."""
    stream = open_sample_stream(
        [SourceConfig("code", str(corpus / "train"))], seq_len=64, seed=3, vocab_size=258
    )
    samples = (open_corpus(str(corpus / "train")).tokens - 1) // 64
    seen, position = [], 0
    for ranks, batch, steps in ((1, 8, 3), (4, 16, 2), (3, 9, 4), (2, 2, samples)):
        slices = [rank_slices(position, batch, rank, ranks) for rank in range(ranks)]
        for _ in range(steps):
            for part in slices:
                start, rows = next(part)
                seen += range(start, start + rows)
            position += batch
    assert sorted(seen[:samples]) == list(range(samples))
    _, epochs, order = stream._order.sample_at(np.array(seen[:samples]))
    assert set(epochs) == {0} and sorted(order) == list(range(samples))


def test_data_and_models_ignore_the_same_label():
    """Neighbours, who cannot ask each other."""
    assert IGNORE_INDEX == IGNORE_INDEX


def test_ln_of_the_vocabulary_is_where_an_untrained_model_stands(corpus):
    loss = validation_of_one_process(str(corpus / "validation"), 4)
    assert loss == pytest.approx(math.log(SHAPE.vocab_size), abs=0.1)
