"""The batch-size ramp: sizes and totals at named points, and by arithmetic instead of a loop."""

from __future__ import annotations

import random
import re
from itertools import islice, repeat

import pytest

from titanlite.data import rank_slices
from titanlite.errors import ConfigError
from titanlite.training.batch_schedule import (
    BatchSchedule,
    BatchStage,
    build_batch_schedule,
    check_batch_size,
)
from titanlite.training.config import TrainingConfig


def ramp(text: str | None, final: int, seq_len: int = 10) -> BatchSchedule:
    training = TrainingConfig(global_batch_size=final, batch_size_ramp=text, seq_len=seq_len)
    return build_batch_schedule(training, final)


def test_sizes_of_a_table_at_named_points():
    batches = ramp("0:512 10B:1024, 1.5T:4096", 4096, seq_len=4096)
    at = (0, 10**10 - 1, 10**10, 1_499_999_999_999, 1_500_000_000_000, 10**15)
    assert [batches.batch_at(tokens) for tokens in at] == [512, 512, 1024, 1024, 4096, 4096]
    assert batches.largest == 4096


def test_sizes_of_a_linear_ramp_at_named_points():
    """Megatron-LM's example: --rampup-batch-size 32 32, up to 128, in three equal parts."""
    batches = ramp("32 +32 over 12B", 128)
    at = (0, 4 * 10**9 - 1, 4 * 10**9, 8 * 10**9, 12 * 10**9 - 1, 12 * 10**9)
    assert [batches.batch_at(tokens) for tokens in at] == [32, 32, 64, 96, 96, 128]
    assert str(batches) == "32 to 128 sequences in 4 sizes over 12,000,000,000 tokens"
    uneven = ramp("1+1 over 1000", 4)  # a part begins at the first whole token
    assert [stage.first_token for stage in uneven.stages] == [0, 334, 667, 1000]


def test_a_step_has_the_size_at_its_first_token():
    batches = ramp("0:4 100:8 300:16", 16)  # 10 tokens a sequence
    assert list(islice(batches.batches_from(0), 8)) == [4, 4, 4, 8, 8, 8, 16, 16]
    assert [batches.tokens_after(steps) for steps in range(8)] == [
        0, 40, 80, 120, 200, 280, 360, 520,
    ]  # fmt: skip


def random_schedule(numbers: random.Random) -> BatchSchedule:
    count = numbers.randint(1, 6)
    firsts = [0, *sorted(numbers.sample(range(1, 3000), count - 1))]
    sizes = sorted(numbers.sample(range(1, 40), count))
    stages = tuple(BatchStage(*stage) for stage in zip(firsts, sizes, strict=True))
    return BatchSchedule(stages, numbers.randint(1, 30))


@pytest.mark.parametrize("seed", range(200))
def test_totals_by_arithmetic_equal_those_of_a_loop(seed):
    numbers = random.Random(seed)
    batches, tokens = random_schedule(numbers), 0
    for step, size in enumerate(islice(batches.batches_from(0), 100)):
        assert batches.tokens_after(step) == tokens
        assert size == batches.batch_at(tokens)
        tokens += size * batches.seq_len


def test_the_total_of_a_long_run_takes_no_loop_over_its_steps():
    batches = ramp("32 +32 over 12B", 32 * 50, seq_len=2048)
    steps = 10**15
    total = batches.tokens_after(steps)  # a loop would take years
    before = 12 * 10**9  # from then on, each step has the final size
    assert total > before and total - batches.tokens_after(steps - 1) == 32 * 50 * 2048


@pytest.mark.parametrize("seed", range(50))
def test_each_sample_is_consumed_once_under_a_ramp_with_layouts_that_change(seed):
    """The run stops at random steps, and goes on under another number of ranks."""
    numbers = random.Random(seed)
    stages = random_schedule(numbers).stages
    batches = BatchSchedule(tuple(BatchStage(t, 12 * size) for t, size in stages), 2)
    seen: list[int] = []
    position = tokens = 0
    sizes = []
    for _ in range(4):
        ranks, steps = numbers.choice([1, 2, 3, 4, 6]), numbers.randint(1, 12)
        readers = [
            rank_slices(position, batches.batches_from(tokens), rank, ranks)
            for rank in range(ranks)
        ]
        for _ in range(steps):
            slices = [next(reader) for reader in readers]
            assert len({sequences for _, sequences in slices}) == 1
            for start, sequences in slices:
                seen += range(start, start + sequences)
            sizes.append(sum(sequences for _, sequences in slices))
            position += sizes[-1]
            tokens += sizes[-1] * batches.seq_len
    assert seen == list(range(position))
    assert sizes == list(islice(batches.batches_from(0), len(sizes)))  # as without a stop


def test_a_ramp_of_one_size_is_shown():
    """The summary of a job crashed on it, although the table is valid."""
    assert str(ramp("0:512", 512)) == "512 sequences"


def test_without_a_ramp_every_batch_has_the_same_size():
    batches = ramp(None, 12)
    assert list(islice(batches.batches_from(77), 3)) == [12, 12, 12]
    assert batches.tokens_after(10**9) == 12 * 10**10
    assert [*islice(rank_slices(7, repeat(12), 1, 2), 2)] == [(13, 6), (25, 6)]


@pytest.mark.parametrize(
    ("text", "final", "message"),
    [
        ("0:512 10B:1024", 2048, "ends at 1024 sequences, but training.global_batch_size = 2048"),
        ("5:512 10B:1024", 1024, "must begin at 0 tokens"),
        ("0:512 10B:256 20B:1024", 1024, "its tokens and sizes must increase"),
        ("0:512 20B:768 10B:1024", 1024, "its tokens and sizes must increase"),
        ("0:0 10B:1024", 1024, "must begin at 0"),
        ("", 1024, "must begin at 0 tokens"),
        ("512", 1024, '"512" is not TOKENS:SIZE. Write a table such as'),
        ("0:512 10B:big", 1024, '"10B:big" is not TOKENS:SIZE'),
        ("0:512 10G:1024", 1024, '"10G" is not a whole number of tokens'),
        ("0:512 1.5:1024", 1024, '"1.5" is not a whole number of tokens'),
        ("0:512 -3:1024", 1024, '"-3" is not a whole number'),
        ("32 +40 over 12B", 128, "by a multiple of the increment 40"),
        ("128 +32 over 12B", 128, "must be more than the start 128"),
        ("0 +32 over 12B", 128, "must be more than the start 0"),
        ("32 +0 over 12B", 128, "increment 0"),
        ("32 +32 over 2", 128, "has 3 increments in 2 tokens; at most one a token"),
        ("1 +1 over 12B", 2**62, "10,000 in all. Use a larger increment"),
        ("9" * 5000, 128, "is not TOKENS:SIZE"),
        ("0:" + "9" * 5000, 128, "is not TOKENS:SIZE"),
        ("9" * 5000 + ":8", 128, "is not a whole number of tokens"),
        ("32 +32 over", 128, '"32" is not TOKENS:SIZE'),
        ("0:512 10B:1024", -1, "-1 depends on the layout. Set training.global_batch_size"),
    ],
)
def test_a_ramp_that_cannot_be_followed_is_refused(text, final, message):
    training = TrainingConfig(global_batch_size=final, batch_size_ramp=text, local_batch_size=1)
    (error,) = check_batch_size(training, 1)
    assert message in str(error) and str(error).startswith(
        f'training.batch_size_ramp = "{text[:70]}'
    )
    assert len(str(error)) < 400 and error.fix and "training.batch_size_ramp" in error.keys
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_batch_schedule(training, final)


def test_sizes_that_the_ranks_cannot_divide_are_refused_by_name():
    training = TrainingConfig(
        local_batch_size=4, global_batch_size=60, batch_size_ramp="12 +4 over 1M"
    )
    assert not [*check_batch_size(training, 1)]
    final, sizes = check_batch_size(training, 2)
    assert "training.global_batch_size = 60: is not a multiple of" in str(final)
    assert "its sizes 12, 20, 28, 36, 44, 52 are not multiples of training.local_batch" in str(
        sizes
    )
    assert "Use multiples of 8, or another local_batch_size." in str(sizes)
