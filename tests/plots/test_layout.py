"""The picture of a layout shows every rank, what it holds and when it idles."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from titanlite.errors import DataError
from titanlite.plots.layout import (
    DrawnAction,
    DrawnTimeline,
    MeshCoordinate,
    StageCost,
    draw_layout,
)

pytest.importorskip("matplotlib")


def mesh(pipeline=1, replicate=1, shard=1, context=1, tensor=1) -> list[MeshCoordinate]:
    degrees = (pipeline, replicate, shard, context, tensor)
    return [MeshCoordinate(n, *at) for n, at in enumerate(product(*map(range, degrees)))]


def even_stages(ranks: int, a_rank: int = 1) -> list[StageCost]:
    count = ranks * a_rank
    return [StageCost(n, n % ranks, f"layers {2 * n}-{2 * n + 1}", 1 / count) for n in range(count)]


def simulated(order: list[list[tuple[str, int, int]]], name: str = "computed") -> DrawnTimeline:
    """Each (kind, stage, micro-batch) as soon as its rank and the stage before it allow; a forward
    lasts 1, a backward 2."""
    last = max(stage for row in order for _, stage, _ in row)
    rows: list[list[DrawnAction]] = [[] for _ in order]
    ends: dict[tuple[str, int, int], float] = {}
    while any(len(row) < len(wanted) for row, wanted in zip(rows, order, strict=True)):
        for row, wanted in zip(rows, order, strict=True):
            for kind, stage, number in wanted[len(row) :]:
                needs = [("forward", stage, number)] if kind == "backward" else []
                nearer = stage - 1 if kind == "forward" else stage + 1
                needs += [(kind, nearer, number)] if 0 <= nearer <= last else []
                if not all(need in ends for need in needs):
                    break
                start = max([row[-1].end if row else 0.0, *(ends[need] for need in needs)])
                row.append(
                    DrawnAction(kind, stage, number, start, start + 1 + (kind == "backward"))
                )
                ends[kind, stage, number] = row[-1].end
    return DrawnTimeline(name, rows, "forwards")


def gpipe(ranks: int, microbatches: int) -> DrawnTimeline:
    steps = list(product(("forward", "backward"), range(microbatches)))
    return simulated([[(kind, rank, number) for kind, number in steps] for rank in range(ranks)])


def one_forward_one_backward(ranks: int, microbatches: int) -> DrawnTimeline:
    order = []
    for rank in range(ranks):
        forwards = [("forward", rank, n) for n in range(microbatches)]
        backwards = [("backward", rank, n) for n in range(microbatches)]
        ahead = ranks - rank
        steady = [x for pair in zip(backwards, forwards[ahead:], strict=False) for x in pair]
        order.append(forwards[:ahead] + steady + backwards[microbatches - ahead :])
    return simulated(order)


def looped(ranks: int, microbatches: int, a_rank: int = 2) -> DrawnTimeline:
    """All forwards stage by stage, then all backwards."""
    order = []
    for rank in range(ranks):
        mine, numbers = range(rank, ranks * a_rank, ranks), range(microbatches)
        row = [("forward", stage, n) for stage in mine for n in numbers]
        order.append(row + [("backward", stage, n) for stage in reversed(mine) for n in numbers])
    return simulated(order)


def words_of(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def draw(tmp_path, places, stages, timelines=()) -> tuple[Path, list[str]]:
    """(the PNG, every text of the SVG)"""
    png, svg = draw_layout("a title", places, stages, timelines, tmp_path / "new" / "layout")
    assert (png.name, svg.name) == ("layout.png", "layout.svg")
    return png, words_of(svg)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (4, 4), (16, 64)])
def test_the_idle_share_is_what_one_computes_by_hand(ranks, microbatches):
    by_hand = (ranks - 1) / (microbatches + ranks - 1)
    assert gpipe(ranks, microbatches).bubble == pytest.approx(by_hand)
    assert one_forward_one_backward(ranks, microbatches).bubble == pytest.approx(by_hand)


def test_the_idle_share_is_the_same_on_a_clock_that_began_in_1970():
    there = gpipe(2, 4)
    rows: list[list[DrawnAction]] = [[] for _ in there.ranks]
    for row, actions in zip(rows, there.ranks, strict=True):
        for action in actions:
            start = 1_763_718_853.123 + 0.0003 * action.start  # a trace has a start and a duration
            end = start + 0.0003 * (action.end - action.start)
            row.append(DrawnAction(action.kind, action.stage, action.microbatch, start, end))
    assert DrawnTimeline("measured", rows, "s").bubble == pytest.approx(there.bubble, abs=1e-3)


def test_a_rank_that_does_two_things_at_once_is_refused():
    first, second = DrawnAction("forward", 0, 0, 0.0, 1.0), DrawnAction("forward", 0, 1, 0.9, 2.0)
    with pytest.raises(DataError, match="pipeline rank 1 is busy until 1"):
        DrawnTimeline("measured", [[], [second, first]], "s")
    with pytest.raises(DataError, match="pipeline rank 0"):
        DrawnTimeline("measured", [[first, DrawnAction("forward", 0, 1, 2.0, 1.5)]], "s")
    with pytest.raises(DataError, match="nothing in it takes any time"):
        DrawnTimeline("measured", [[], []], "s")


def test_every_rank_and_what_every_stage_holds_is_there_as_text(tmp_path):
    stages = [
        StageCost(0, 0, "tok_embeddings, layers 0-15", 0.475),
        StageCost(1, 1, "layers 16-31, norm, output", 0.525),
    ]
    png, words = draw(tmp_path, mesh(pipeline=2, shard=2, tensor=2), stages)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(filter(str.isdigit, words)) == sorted(map(str, [*range(8), 0, 1]))  # and stages
    assert {"a title", "pipeline 2", "shard 2", "tensor 2"} <= set(words)
    assert not any("context" in text or "replicate" in text for text in words)  # of degree 1
    assert {stage.holds for stage in stages} | {"47.5 %", "52.5 %"} <= set(words)


def test_idling_is_drawn_and_told_for_every_timeline_and_only_then(tmp_path):
    places, stages = mesh(pipeline=4), even_stages(4)
    _, words = draw(tmp_path, places, stages)
    assert not any("idle" in text or "time" in text for text in words)
    computed = one_forward_one_backward(4, 8)
    measured = DrawnTimeline("measured, iteration_10", gpipe(4, 4).ranks, "s")
    _, words = draw(tmp_path, places, stages, [computed, measured])
    assert {"computed: 27.3 % idle", "measured, iteration_10: 42.9 % idle"} <= set(words)
    assert {"time, forwards", "time, s", "idle", "forward", "backward"} <= set(words)
    assert words.count("7") == 2 * 4  # forward and backward on every rank of the first alone


def test_boxes_are_as_long_as_what_they_stand_for(tmp_path):
    from matplotlib.image import imread

    png, _ = draw(tmp_path, mesh(pipeline=4), even_stages(4), [gpipe(4, 4)])
    picture = imread(png)[..., :3]

    def area(colour: str) -> int:
        parts = np.array([int(colour[at : at + 2], 16) for at in (0, 2, 4)]) / 255
        return int((np.abs(picture - parts).max(axis=-1) < 0.02).sum())

    assert area("d97b29") / area("2f6fb2") == pytest.approx(2.0, rel=0.1)
    whole = 9.9 * 150 * 4 * 0.88 * 0.36 * 150  # pixels of four rows
    assert (area("d97b29") + area("2f6fb2")) / whole == pytest.approx(1 - 3 / 7, rel=0.05)


def test_a_timeline_of_another_pipeline_is_refused(tmp_path):
    with pytest.raises(DataError, match="run stages"):
        draw(tmp_path, mesh(pipeline=4), even_stages(4), [gpipe(2, 4)])
    with pytest.raises(DataError, match="Pipeline rank 3 holds no stage"):
        draw(tmp_path, mesh(pipeline=4), even_stages(3))


def test_the_same_input_makes_the_same_files(tmp_path):
    asked = mesh(pipeline=2, tensor=2), even_stages(2, 2), [looped(2, 4)]
    once = draw_layout("x", *asked, tmp_path / "a")
    again = draw_layout("x", *asked, tmp_path / "b")
    assert [path.read_bytes() for path in once] == [path.read_bytes() for path in again]


LAYOUTS = {
    "one": (mesh(), even_stages(1), []),
    "64, sharded": (mesh(shard=64), even_stages(1), []),
    "all five": (mesh(2, 2, 2, 2, 2), even_stages(2, 2), [looped(2, 4)]),
    "odd": (mesh(pipeline=3, shard=7, tensor=3), even_stages(3, 3), [looped(3, 5, 3)]),
    "512": (mesh(replicate=2, shard=32, tensor=8), even_stages(1), []),
    "16 x 64": (mesh(pipeline=16, shard=4, tensor=8), even_stages(16), [gpipe(16, 64)] * 2),
    "64 stages": (mesh(pipeline=8), even_stages(8, 8), [looped(8, 8, 8)]),
    "many a rank": (mesh(pipeline=2, context=2), even_stages(2, 60), []),
    "long words": (
        mesh(pipeline=2),
        [StageCost(n, n, ", ".join(f"layers.{n}.{k}" for k in range(60)), 0.5) for n in (0, 1)],
        [],
    ),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_text_meets_another_or_leaves_the_page(name, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_layout("a long title, of $1 or $2, " * 9, *LAYOUTS[name], tmp_path / "layout")
    figure = drawn[0]
    pen = figure.canvas.get_renderer()
    texts = figure.axes[0].texts
    left, low, right, high = np.array([t.get_window_extent(pen).extents for t in texts]).T
    assert min(left.min(), low.min()) >= 0
    assert right.max() <= figure.bbox.width and high.max() <= figure.bbox.height
    assert figure.bbox.width == pytest.approx(1695) and figure.bbox.height < 5000
    across = np.minimum.outer(right, right) - np.maximum.outer(left, left)
    down = np.minimum.outer(high, high) - np.maximum.outer(low, low)
    meet = np.argwhere(np.triu((across > 0.5) & (down > 0.5), 1))
    assert [(texts[a].get_text(), texts[b].get_text()) for a, b in meet] == []


def test_too_many_ranks_for_numbers_are_told_by_their_ends_and_a_part_says_so(tmp_path):
    _, words = draw(tmp_path, mesh(shard=128, tensor=16), even_stages(1))
    assert "ranks 0 … 2047" in words and "1024" not in words
    _, words = draw(tmp_path, mesh(pipeline=2, shard=1024, tensor=8), even_stages(2))
    assert any(text.startswith("Shown: 4,096 of 16,384 ranks") for text in words)
    assert {"ranks 0 … 2047", "ranks 8192 … 10239", "shard 1024"} <= set(words)


def test_a_rank_with_two_stages_shows_both_colours(tmp_path):
    from matplotlib.image import imread

    png, _ = draw(tmp_path, mesh(pipeline=2, shard=4), even_stages(2, 2))
    picture = np.round(imread(png)[..., :3] * 255).astype(int)
    colours, counts = np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)
    large = colours[counts > 4000]  # more than a stage's sign in the key
    assert len(large) == 4 + 2  # of stages, beside paper and panels
