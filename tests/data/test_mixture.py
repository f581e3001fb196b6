"""Mixtures whose weights change and whose sources are limited: exact functions of the position."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest

from titanlite.checkpoint.job_properties import check_job_properties
from titanlite.data import MixtureConfig, PhaseConfig, describe_mixture, repeated_sources
from titanlite.data.mixing import SourceShare, SourceSize, plan_phases
from titanlite.data.mixture import BLOCK, Phase, temper
from titanlite.data.order import OrderedSource, SampleOrder
from titanlite.errors import CheckpointError, DataError, UserErrors
from titanlite.storage import StorageFolder

SIZES = {"web": 40_000, "code": 9_000, "math": 700}
WEIGHTS = [0.7, 0.2, 0.1]
TURN = 10 * BLOCK + 1234  # inside a block


def build_order(weights=WEIGHTS, phases=(), seed=3, **limits: int) -> SampleOrder:
    sources = [
        OrderedSource(name, weight, samples, limits.get(name))
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
    order = SampleOrder(1, [OrderedSource("easy first", 1.0, 5000, shuffled=False)])
    _, epoch, sample = order.sample_at(np.arange(7000))
    assert sample.tolist() == [*range(5000), *range(2000)] and epoch[-1] == 1


def test_the_order_after_a_change_of_weights_is_the_same_as_in_earlier_versions():
    order = build_order(phases=[Phase(TURN, [0.1, 0.3, 0.6])], math=30_000)
    positions = np.array([TURN - 1, TURN, TURN + 1, TURN + 9999, 90_000, 10**9])
    found = [column.tolist() for column in order.sample_at(positions)]
    assert found == KNOWN


KNOWN = [[0, 2, 0, 1, 1, 1], [0, 6, 0, 1, 2, 83328], [27028, 51, 2297, 8076, 221, 3234]]


def test_phases_and_limits_need_no_memory_for_a_billion_samples():
    def peak_bytes(scale: int) -> int:
        tracemalloc.start()
        try:
            sources = [OrderedSource("a", 3.0, scale, 2 * scale), ("b", 1.0, scale)]
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
    sources = [SourceSize("web", 0.7, tokens), SourceSize("code", 0.3, tokens)]
    return plan_phases(config, sources, seq_len=16)


def test_a_phase_begins_with_the_first_sample_at_its_token_and_keeps_other_weights():
    phases = [PhaseConfig(160, {"code": 1.0}), PhaseConfig(161, {"web": 0.0})]
    weights, planned = plan(MixtureConfig(phases=phases))
    assert weights == [0.7, 0.3]
    assert planned == [Phase(10, [0.7, 1.0]), Phase(11, [0.0, 1.0])]


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


def properties(phases=None, **sources: str) -> dict:
    sources = sources or {"web": "0.7", "code": "0.3"}
    described = {
        name: f"number {number}, weight {weight}, content {name}"
        for number, (name, weight) in enumerate(sources.items())
    }
    content = {name: f"hash of {name}" for name in sources}
    facts = {"training.seq_len": 16, "data.sources": described, "data.content": content}
    return facts if phases is None else {**facts, "data.phases": phases}


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
    assert refusal(properties(), properties(late)) == ""  # saved by an older version
    for saved in (properties(), properties({})):
        error = refusal(saved, properties(early))
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
