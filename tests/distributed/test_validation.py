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

from tests.distributed.oracle import (
    FAMILY,
    SEED,
    SGD,
    SIZES,
    Layout,
    build_sharded,
    parse_layouts,
)
from tests.distributed.ranks import run_on_ranks
from titanlite.data import (
    SourceConfig,
    open_sample_stream,
    open_tokenizer,
    open_validation,
    prefetch,
    rank_slices,
)
from titanlite.data.shards import open_corpus
from titanlite.labels import IGNORE_INDEX
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.validation import ValidationResult, validate

SEQ_LEN = 52  # of validation; unrelated to the length of the corpus
SAMPLES = 37  # not a multiple of any layout's ranks times batch size


def open_set(path, tokenizer=None):
    return open_validation(
        SourceConfig("code", path), seq_len=SEQ_LEN, vocab_size=258, tokenizer=tokenizer
    )


def validate_under(layout, path, counts) -> list[ValidationResult]:
    _, mesh, engine = build_sharded(layout, SGD)
    validation_set, cpu = open_set(path, open_tokenizer("bytes")), torch.device("cpu")
    return [validate(engine, validation_set, count, 3, mesh, cpu) for count in counts]


def validate_without_tokenizer(path) -> ValidationResult:
    _, mesh, engine = build_sharded(Layout(), SGD)
    return validate(engine, open_set(path), 2, 2, mesh, torch.device("cpu"))


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
def validate_in_one_process(path, count) -> ValidationResult:
    """One sample at a time, without an engine; the text is decoded, not counted by token."""
    model, validation_set = FAMILY.build(SIZES), open_set(path)
    tokenizer = open_tokenizer("bytes")
    init_weights(model, FAMILY, SIZES, SEED)
    total = tokens = 0.0
    text_bytes = 0
    with torch.no_grad():
        for sample in range(count):
            inputs, labels = validation_set.read(sample, 1)
            loss = F.cross_entropy(
                model(inputs)[0], labels[0], reduction="sum", ignore_index=IGNORE_INDEX
            )
            valid = [id for id in labels[0].tolist() if id != IGNORE_INDEX]
            total, tokens = total + loss.item(), tokens + len(valid)
            text_bytes += len([id for id in valid if id != tokenizer.eos_id])
    return ValidationResult(total / tokens, total / math.log(2) / text_bytes)


@pytest.mark.parametrize(
    "layout",
    parse_layouts(
        "one; shard=3; tensor=2,loss_parallel=False; context=2,shard=2;"
        "pipeline=2,context=2,microbatch=4"
    ),
    ids=str,
)
def test_validation_counts_every_token_once_under_every_layout(layout, corpus):
    path = str(corpus / "validation")
    counts = [SAMPLES, open_set(path).samples]  # the last sample of the set is partial
    assert counts[1] > SAMPLES + 12
    by_rank = run_on_ranks(validate_under, layout.degrees.ranks, layout, path, counts)
    for results in by_rank:
        for result, count in zip(results, counts, strict=True):
            expected = validate_in_one_process(path, count)
            assert result.loss == pytest.approx(expected.loss, rel=2e-6)
            assert result.bits_per_byte == pytest.approx(expected.bits_per_byte, rel=2e-6)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
def test_a_global_batch_has_the_same_samples_in_the_same_order_on_any_ranks(ranks, corpus):
    source = [SourceConfig("code", str(corpus / "train"))]
    stream = open_sample_stream(source, seq_len=64, seed=3, vocab_size=258)
    steps, batch, position = 5, 12, 7
    expected = [stream.read(position + step * batch, batch)[0] for step in range(steps)]
    by_rank = [
        islice(prefetch(stream.read, rank_slices(position, repeat(batch), rank, ranks)), steps)
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


def test_without_a_tokenizer_bits_per_byte_are_null(corpus):
    (result,) = run_on_ranks(validate_without_tokenizer, 1, str(corpus / "validation"))
    assert result.loss > 0 and result.bits_per_byte is None


def test_an_untrained_model_has_the_loss_of_a_uniform_distribution(corpus):
    loss = validate_in_one_process(str(corpus / "validation"), 4).loss
    assert loss == pytest.approx(math.log(SIZES.vocab_size), abs=0.1)
