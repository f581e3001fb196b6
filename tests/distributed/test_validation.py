"""Validation loss and sample order are the same under every layout."""

from __future__ import annotations

import math
from functools import cache
from itertools import islice, repeat

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tests.distributed.oracle import FAMILY, SEED, SGD, SIZES, Layout, build_sharded
from tests.distributed.ranks import run_on_ranks
from titanlite.data import SourceConfig, open_sample_stream, open_validation, rank_slices
from titanlite.data.shards import open_corpus
from titanlite.labels import IGNORE_INDEX
from titanlite.parallelize.weight_init import init_weights
from titanlite.training import validate

SEQ_LEN = 52  # of validation; unrelated to the length of the corpus
SAMPLES = 37  # not a multiple of any layout's ranks times batch size


def open_set(path):
    return open_validation(SourceConfig("code", path), seq_len=SEQ_LEN, vocab_size=258)


def validate_under(layout, path, counts) -> list[float]:
    _, mesh, engine = build_sharded(layout, SGD)
    validation_set, cpu = open_set(path), torch.device("cpu")
    return [validate(engine, validation_set, count, 3, mesh, cpu) for count in counts]


def are_weights_sharded_after_validation(layout, path) -> bool:
    model, mesh, engine = build_sharded(layout, SGD)
    validate(engine, open_set(path), 4, 2, mesh, torch.device("cpu"))
    return all(isinstance(parameter, DTensor) for parameter in model.parameters())


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(shard=2, pipeline=2)], ids=str)
def test_validation_leaves_the_weights_sharded(layout, corpus):
    """A checkpoint would otherwise save gathered weights, which the next step makes stale."""
    path = str(corpus / "validation")
    sharded = run_on_ranks(are_weights_sharded_after_validation, layout.degrees.ranks, layout, path)
    assert all(sharded)


@cache
def validate_in_one_process(path, count) -> float:
    """Mean loss over tokens, one sample at a time, without an engine."""
    model, validation_set = FAMILY.build(SIZES), open_set(path)
    init_weights(model, FAMILY.init_roles, SIZES.n_layers, SEED)
    total = tokens = 0.0
    with torch.no_grad():
        for sample in range(count):
            inputs, labels = validation_set.read(sample, 1)
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
    counts = [SAMPLES, open_set(path).samples]  # the last sample of the set is partial
    assert counts[1] > SAMPLES + 12
    by_rank = run_on_ranks(validate_under, layout.degrees.ranks, layout, path, counts)
    for losses in by_rank:
        for loss, count in zip(losses, counts, strict=True):
            assert loss == pytest.approx(validate_in_one_process(path, count), rel=2e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_global_batch_has_the_same_samples_in_the_same_order_on_any_ranks(ranks, corpus):
    source = [SourceConfig("code", str(corpus / "train"))]
    stream = open_sample_stream(source, seq_len=64, seed=3, vocab_size=258)
    steps, batch, position = 5, 12, 7
    expected = [stream.read(position + step * batch, batch)[0] for step in range(steps)]
    by_rank = [
        islice(stream.prefetch(rank_slices(position, repeat(batch), rank, ranks)), steps)
        for rank in range(ranks)
    ]
    for batch_inputs, slices in zip(expected, zip(*by_rank, strict=True), strict=True):
        assert torch.equal(torch.cat([inputs for inputs, _ in slices]), batch_inputs)


def test_an_epoch_has_each_sample_once_under_changing_layouts(corpus):
    """A run is resumed with other numbers of ranks and batch sizes."""
    stream = open_sample_stream(
        [SourceConfig("code", str(corpus / "train"))], seq_len=64, seed=3, vocab_size=258
    )
    samples = (open_corpus(str(corpus / "train")).tokens - 1) // 64
    seen, position = [], 0
    for ranks, batch, steps in ((1, 8, 3), (4, 16, 2), (3, 9, 4), (2, 2, samples)):
        slices = [rank_slices(position, repeat(batch), rank, ranks) for rank in range(ranks)]
        for _ in range(steps):
            for rank_slice in slices:
                start, sequences = next(rank_slice)
                seen += range(start, start + sequences)
            position += batch
    assert sorted(seen[:samples]) == list(range(samples))
    _, epochs, order = stream._order.sample_at(np.array(seen[:samples]))
    assert set(epochs) == {0} and sorted(order) == list(range(samples))


def test_an_untrained_model_has_the_loss_of_a_uniform_distribution(corpus):
    loss = validate_in_one_process(str(corpus / "validation"), 4)
    assert loss == pytest.approx(math.log(SIZES.vocab_size), abs=0.1)
