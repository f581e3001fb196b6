"""Mixtures whose weights change and whose sources are limited: exact functions of the position."""

from __future__ import annotations

import math
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest

from titanlite.checkpoint.job_properties import check_job_properties
from titanlite.data import MixtureConfig, PhaseConfig, describe_mixture, repeated_sources
from titanlite.data.mixing import SourceShare, describe_changes, plan_phases
from titanlite.data.mixture import BLOCK, Phase, temper
from titanlite.data.order import SampleOrder, SourceOrder
from titanlite.errors import CheckpointError, DataError, UserErrors
from titanlite.storage import StorageFolder

SIZES = {"web": 40_000, "code": 9_000, "math": 700}
WEIGHTS = [0.7, 0.2, 0.1]
TURN = 10 * BLOCK + 1234  # inside a block


def build_order(weights=WEIGHTS, phases=(), seed=3, **limits: int) -> SampleOrder:
    sources = [
        SourceOrder(name, weight, samples, limits.get(name))
        for (name, samples), weight in zip(SIZES.items(), weights, strict=True)
    ]
    return SampleOrder(seed, sources, phases)


def read_all(order: SampleOrder, end: int) -> list[np.ndarray]:
    """(source, epoch, sample) of the positions before `end`."""
    return list(order.sample_at(np.arange(end)))


def check_epochs(columns: list[np.ndarray]) -> None:
    """Each source is read epoch after epoch; each sample once in an epoch, none twice in a part."""
    source, epoch, sample = columns
    for number, samples in enumerate(SIZES.values()):
        own = source == number
        draws = np.arange(own.sum())
        assert np.array_equal(epoch[own], draws // samples)
        pairs = epoch[own] * samples + sample[own]
        assert len(np.unique(pairs)) == len(draws)


@pytest.mark.slow
def test_a_million_samples_have_exact_quotas_and_complete_epochs():
    columns = read_all(build_order(), 10**6)
    counts = np.bincount(columns[0])
    assert np.abs(counts - 10**6 * np.array(WEIGHTS)).max() < 3
    check_epochs(columns)
    by_block = [np.bincount(part, minlength=3) for part in np.array_split(columns[0], 244)]
    assert np.abs(np.cumsum(by_block, 0)[:, 0] / 0.7 - np.cumsum(np.sum(by_block, 1))).max() < BLOCK


def test_weights_change_at_their_position_and_no_sample_is_lost_or_repeated():
    later = [0.1, 0.3, 0.6]
    order = build_order(phases=[Phase(TURN, later), Phase(3 * TURN, WEIGHTS)])
    columns = read_all(order, 4 * TURN)
    check_epochs(columns)
    before, between = columns[0][:TURN], columns[0][TURN : 3 * TURN]
    assert np.abs(np.bincount(before) - TURN * np.array(WEIGHTS)).max() < 5
    assert np.abs(np.bincount(between) - 2 * TURN * np.array(later)).max() < 5
    unchanged = read_all(build_order(), TURN)
    assert all(np.array_equal(a[:TURN], b) for a, b in zip(columns, unchanged, strict=True))
    shuffled = np.random.default_rng(0).permutation(4 * TURN)[:5000]
    for column, part in zip(columns, order.sample_at(shuffled), strict=True):
        assert np.array_equal(column[shuffled], part)
    for position in (0, 1, TURN - 1, TURN, TURN + BLOCK + 5, 3 * TURN + 1):
        counted = np.bincount(columns[0][:position], minlength=3).tolist()
        assert order.mixture.drawn_at(position) == counted


def linear_counts(start: int, ramp: int, before, after, positions: np.ndarray) -> np.ndarray:
    """Samples of each source before each position, without rounding: [N, sources]."""
    inside = np.clip(positions - start, 0, ramp)[:, None]
    gained = np.array(after) - np.array(before)
    later = np.maximum(positions - start - ramp, 0)[:, None]
    return positions[:, None] * np.array(before) + gained * inside**2 / (2 * ramp) + gained * later


@pytest.mark.parametrize("ramp", [50, 3000, 30 * BLOCK + 77])
def test_shares_change_linearly_over_a_ramp_and_no_sample_is_lost_or_repeated(ramp):
    start, later = 1234, [0.1, 0.3, 0.6]
    order = build_order(phases=[Phase(start, [1, 3, 6], ramp), Phase(start + 2 * ramp, WEIGHTS)])
    end = start + 2 * ramp + 500
    columns = read_all(order, end)
    check_epochs(columns)
    counts = np.cumsum(columns[0][:, None] == np.arange(3), axis=0)
    positions = np.arange(1, start + 2 * ramp + 1)
    expected = linear_counts(start, ramp, WEIGHTS, later, positions)
    error = np.abs(counts[positions - 1] - expected)
    steps = start + ramp * np.arange(65) // 64
    assert error[steps - 1].max() < 3  # where the shares change
    assert error.max() < 4 + ramp / 64**2  # a step has the shares of its middle
    numbers = np.random.default_rng(0).permutation(end)[:2000]
    for column, part in zip(columns, order.sample_at(numbers), strict=True):
        assert np.array_equal(column[numbers], part)
    unchanged = read_all(build_order(), start)
    assert all(np.array_equal(a[:start], b) for a, b in zip(columns, unchanged, strict=True))


def test_a_source_that_ends_within_a_ramp_leaves_its_place_to_the_others():
    order = build_order(phases=[Phase(1000, [0.1, 0.3, 0.6], 60_000)], math=1400, web=9000)
    source, *_ = columns = read_all(order, 62_000)
    check_epochs(columns)
    assert np.bincount(source).tolist()[::2] == [9000, 1400]
    last = np.flatnonzero(source == 2)[-1] + 1
    assert 1000 < last < 20_000 and set(source[last : last + 5000]) == {0, 1}
    limited = build_order(phases=[Phase(10, [1, 1, 1], 40_000)], math=99, web=99, code=99)
    assert limited.mixture.end == 297


def test_a_ramp_of_a_billion_samples_has_a_fixed_number_of_segments():
    order = build_order(phases=[Phase(10**9, [0.1, 0.3, 0.6], 10**9)])
    assert len(order.mixture.segments) == 1 + 64 + 1
    drawn = order.mixture.drawn_at(2 * 10**9)
    assert np.abs(np.array(drawn) - 10**9 * (np.array(WEIGHTS) * 1.5 + [0.05, 0.15, 0.3])).max() < 3


def test_a_limited_source_is_read_so_often_and_the_others_share_its_place():
    order = build_order(math=1400, code=20_000)
    end = 200_000
    source, epoch, _ = columns = read_all(order, end)
    check_epochs(columns)
    assert np.bincount(source).tolist()[1:] == [20_000, 1400] and epoch[source == 2].max() == 1
    starts = [segment.start for segment in order.mixture.segments]
    last_math = np.flatnonzero(source == 2)[-1] + 1
    last_code = np.flatnonzero(source == 1)[-1] + 1
    assert starts == [0, last_math, last_code]
    share = np.bincount(source[last_math:last_code])[0] / (last_code - last_math)
    assert share == pytest.approx(0.7 / 0.9, abs=1e-4)
    assert order.mixture.end is None


def test_a_mixture_of_limited_sources_ends():
    order = build_order(web=40_000, code=9_000, math=700)
    assert order.mixture.end == 49_700
    source, epoch, sample = read_all(order, 49_700)
    assert np.bincount(source).tolist() == list(SIZES.values()) and epoch.max() == 0
    assert len(np.unique(source * 10**6 + sample)) == 49_700
    with pytest.raises(DataError, match="end after 49700 samples"):
        order.sample_at(np.array([49_700]))


def test_a_source_that_is_not_shuffled_is_read_in_order():
    order = SampleOrder(1, [SourceOrder("easy first", 1.0, 5000, shuffled=False)])
    _, epoch, sample = order.sample_at(np.arange(7000))
    assert sample.tolist() == [*range(5000), *range(2000)] and epoch[-1] == 1


def test_the_order_after_a_change_of_weights_is_the_same_as_in_earlier_versions():
    order = build_order(phases=[Phase(TURN, [0.1, 0.3, 0.6])], math=30_000)
    positions = np.array([TURN - 1, TURN, TURN + 1, TURN + 9999, 90_000, 10**9])
    found = [column.tolist() for column in order.sample_at(positions)]
    assert found == KNOWN


KNOWN = [[0, 2, 0, 1, 1, 1], [0, 6, 0, 1, 2, 83328], [27028, 51, 2297, 8076, 221, 3234]]


def test_a_limit_that_no_run_reaches_ends_no_segment():
    mixture = SampleOrder(0, [("a", 1.0, 9), SourceOrder("b", 1e-16, 9, 1000)]).mixture
    assert len(mixture.segments) == 1 and mixture.end is None


def test_phases_and_limits_need_no_memory_for_a_billion_samples():
    def peak_bytes(scale: int) -> int:
        tracemalloc.start()
        try:
            sources = [SourceOrder("a", 3.0, scale, 2 * scale), ("b", 1.0, scale)]
            order = SampleOrder(0, sources, [Phase(scale + 77, [1.0, 1.0])])
            order.sample_at(np.arange(scale, scale + 4096))
            order.sample_at(np.arange(9 * scale, 9 * scale + 4096))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(5000)
    assert peak_bytes(10**9) < 1.2 * peak_bytes(5000) < 20_000_000


def test_a_temperature_flattens_the_sizes():
    sizes = [10**12, 10**9, 10**6]
    assert temper([1, 2, 1], sizes, 1.0) == [1e12, 2e9, 1e6]
    assert temper([1, 2, 1], sizes, 3.0) == [1e4, 2e3, 1e2]
    equal = temper([1, 1, 1], sizes, 1e9)
    assert max(equal) / min(equal) == pytest.approx(1, abs=1e-6)


def plan(config: MixtureConfig, tokens: int | None = 1000):
    sources = [
        SimpleNamespace(name=name, config=SimpleNamespace(weight=weight), tokens=tokens)
        for name, weight in (("web", 0.7), ("code", 0.3))
    ]
    return plan_phases(config, sources, seq_len=16)


def test_a_phase_begins_with_the_first_sample_at_its_token_and_keeps_other_weights():
    phases = [PhaseConfig(160, {"code": 1.0}), PhaseConfig(161, {"web": 0.0})]
    weights, planned = plan(MixtureConfig(phases=phases))
    assert weights == [0.7, 0.3]
    assert planned == [Phase(10, [0.7, 1.0]), Phase(11, [0.0, 1.0])]


def test_a_ramp_is_measured_in_samples_and_shown_as_one_change():
    phases = [PhaseConfig(160, {"code": 0.7}, ramp_tokens=1600), PhaseConfig(1760, {"web": 0.0})]
    _, planned = plan(MixtureConfig(phases=phases))
    assert planned == [Phase(10, [0.7, 0.7], 100), Phase(110, [0.0, 0.7])]
    order = SampleOrder(0, [("web", 0.7, 1000), ("code", 0.3, 1000)], planned)
    segments = order.mixture.segments
    assert describe_changes(["web", "code"], segments, 16, 10) == []
    assert describe_changes(["web", "code"], segments, 16, 200) == [
        "from token 160 on, gradually until token 1,760: web 50.00%, code 50.00%",
        "from token 1,760 on: code 100.00%",
    ]
    segments = SampleOrder(
        0, [("web", 0.7, 1000), ("code", 0.3, 1000)], planned[:1]
    ).mixture.segments
    assert describe_changes(["web", "code"], segments, 16, 200) == [
        "from token 160 on, gradually until token 1,760: web 50.00%, code 50.00%"
    ]
    phases[1] = PhaseConfig(1759, {"web": 0.0})
    with pytest.raises(DataError, match="the phase before change until token 1760"):
        plan(MixtureConfig(phases=phases))


def test_all_problems_of_a_mixture_are_reported():
    phases = [PhaseConfig(100, {"wbe": 1.0}), PhaseConfig(100, {"web": 1.0})]
    with pytest.raises(UserErrors) as refused:
        plan(MixtureConfig(temperature=2.0, phases=phases), tokens=None)
    text = str(refused.value)
    assert '"wbe", which is not a source' in text and "is not after 100" in text
    assert 'size of the source "web" is unknown' in text


def test_the_mixture_is_described_with_warnings_for_many_epochs():
    shares = [SourceShare("web", 700, 11_200, 0.5), SourceShare("math", 300, 4800, 6.25)]
    assert describe_mixture(shares) == [
        "web   70.00% of the samples: 11,200 tokens, 0.5 epochs",
        "math  30.00% of the samples: 4,800 tokens, 6.25 epochs",
    ]
    (warning,) = repeated_sources(shares)
    assert '"math" in 6.25 epochs' in warning


# --- checkpoints ---------------------------------------------------------------------------------


def properties(phases: dict, **sources: str) -> dict:
    sources = sources or {"web": "0.7", "code": "0.3"}
    described = {
        name: f"number {number}, weight {weight}, content {name}"
        for number, (name, weight) in enumerate(sources.items())
    }
    content = {name: f"hash of {name}" for name in sources}
    table = {"data.sources": described, "data.content": content, "data.phases": phases}
    return {"training.seq_len": 16, **table}


def refusal(saved: dict, current: dict, position: int = 1000) -> str:
    try:
        check_job_properties(
            StorageFolder("step-9"),
            saved,
            current,
            model_only=False,
            allowed=[],
            position=position,
        )
    except CheckpointError as error:
        return str(error)
    return ""


def test_later_weights_may_change_on_resuming_and_earlier_ones_may_not():
    early, late = {"500": {"web": 1.0}}, {"1000": {"web": 0.2, "code": 0.8}}
    assert refusal(properties({}), properties(late)) == ""
    assert refusal(properties(late), properties({})) == ""
    assert refusal(properties({**early, **late}), properties(early)) == ""
    error = refusal(properties({}), properties(early))
    assert "data.phases (500: None saved, {'web': 1.0} now)" in error
    assert "first_token = 16000" in error
    assert "500:" in refusal(properties(early), properties({}))
    assert refusal(properties(late), properties({}), position=1001) != ""
    assert refusal(properties({}), properties({}, web="0.6", code="0.4")) != ""


def test_a_source_may_be_added_for_a_later_phase_only():
    added = {"web": "0.7", "code": "0.3", "new": "0"}
    late = {"1000": {"web": 0.5, "new": 0.5}}
    assert refusal(properties({}), properties(late, **added)) == ""
    assert refusal(properties({"800": late["1000"]}, **added), properties({})) != ""
    assert refusal(properties({}), properties({}, **{**added, "new": "0.1"})) != ""
    read = properties({"800": late["1000"]}, **added)
    replaced = {**read, "data.content": {**read["data.content"], "new": "another hash"}}
    assert refusal(read, read) == "" and "new: hash of new saved" in refusal(read, replaced)
    assert refusal(properties({}), properties({}, new="0", web="0.7", code="0.3")) != ""


def test_weights_that_are_not_numbers_are_refused():
    for weight in (-1.0, math.inf, math.nan):
        with pytest.raises(DataError, match="weight"):
            build_order(phases=[Phase(TURN, [weight, 1.0, 1.0])])
