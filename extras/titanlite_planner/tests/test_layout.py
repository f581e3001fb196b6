"""The layout plot shows every rank, its stages and its idle time, and no text overlaps."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from titanlite.errors import DataError
from titanlite.parallelize.schedule import PipelineAction, build_schedule_order
from titanlite_planner.pictures.gantt import PipelineTimeline
from titanlite_planner.pictures.layout import MeshCoordinate, StageCost, draw_layout
from titanlite_planner.time.simulation import TimedAction, simulate_schedule

pytest.importorskip("matplotlib")


def mesh(pipeline=1, replicate=1, shard=1, context=1, tensor=1) -> list[MeshCoordinate]:
    degrees = (pipeline, replicate, shard, context, tensor)
    return [
        MeshCoordinate(n, *position) for n, position in enumerate(product(*map(range, degrees)))
    ]


def even_stages(ranks: int, per_rank: int = 1) -> list[StageCost]:
    count = ranks * per_rank
    return [StageCost(n, n % ranks, f"layers {2 * n}-{2 * n + 1}", 1 / count) for n in range(count)]


def simulate(name: str, ranks: int, microbatches: int, per_rank: int = 1) -> PipelineTimeline:
    """Timeline of a schedule if all stages cost the same."""
    order = build_schedule_order(name, ranks, ranks * per_rank, microbatches)
    rows = simulate_schedule(order, [1.0] * (ranks * per_rank))
    return PipelineTimeline("computed", rows, "forwards")


def gpipe(ranks: int, microbatches: int) -> PipelineTimeline:
    return simulate("GPipe", ranks, microbatches)


def looped(ranks: int, microbatches: int, per_rank: int = 2) -> PipelineTimeline:
    return simulate("LoopedBFS", ranks, microbatches, per_rank)


def timed(kind: str, microbatch: int, start: float, end: float) -> TimedAction:
    return TimedAction(PipelineAction(kind, 0, microbatch), start, end)


def texts_in(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text(encoding="utf-8"))


def draw(tmp_path, coordinates, stages, timelines=()) -> tuple[Path, list[str]]:
    """(the PNG, every text of the SVG)"""
    png, svg = draw_layout("a title", coordinates, stages, timelines, tmp_path / "new" / "layout")
    assert (png.name, svg.name) == ("layout.png", "layout.svg")
    return png, texts_in(svg)


@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (4, 8), (4, 4), (16, 64)])
def test_the_bubble_matches_the_formula(ranks, microbatches):
    formula = (ranks - 1) / (microbatches + ranks - 1)
    assert gpipe(ranks, microbatches).bubble == pytest.approx(formula)
    assert simulate("1F1B", ranks, microbatches).bubble == pytest.approx(formula)


def test_the_bubble_is_the_same_in_seconds_since_1970():
    simulated = gpipe(2, 4)
    rows: list[list[TimedAction]] = [[] for _ in simulated.ranks]
    for row, actions in zip(rows, simulated.ranks, strict=True):
        for action, begin, finish in actions:
            start = 1_763_718_853.123 + 0.0003 * begin  # a trace has a start and a duration
            row.append(TimedAction(action, start, start + 0.0003 * (finish - begin)))
    measured = PipelineTimeline("measured", rows, "s")
    assert measured.bubble == pytest.approx(simulated.bubble, abs=1e-3)


def test_overlapping_actions_of_a_rank_are_rejected():
    first, second = timed("forward", 0, 0.0, 1.0), timed("forward", 1, 0.9, 2.0)
    with pytest.raises(DataError, match="pipeline rank 1 is busy until 1"):
        PipelineTimeline("measured", [[], [second, first]], "s")
    with pytest.raises(DataError, match="pipeline rank 0"):
        PipelineTimeline("measured", [[first, timed("forward", 1, 2.0, 1.5)]], "s")
    with pytest.raises(DataError, match="no action takes any time"):
        PipelineTimeline("measured", [[], []], "s")


def test_every_rank_and_the_modules_of_every_stage_are_text(tmp_path):
    stages = [
        StageCost(0, 0, "tok_embeddings, layers 0-15", 0.475),
        StageCost(1, 1, "layers 16-31, norm, output", 0.525),
    ]
    png, texts = draw(tmp_path, mesh(pipeline=2, shard=2, tensor=2), stages)
    assert png.read_bytes().startswith(b"\x89PNG")
    assert sorted(filter(str.isdigit, texts)) == sorted(map(str, [*range(8), 0, 1]))  # and stages
    assert {"a title", "pipeline 2", "shard 2", "tensor 2"} <= set(texts)
    assert not any("context" in text or "replicate" in text for text in texts)  # of degree 1
    assert {stage.modules for stage in stages} | {"47.5 %", "52.5 %"} <= set(texts)


def test_every_timeline_is_drawn_with_its_idle_time(tmp_path):
    coordinates, stages = mesh(pipeline=4), even_stages(4)
    _, texts = draw(tmp_path, coordinates, stages)
    assert not any("idle" in text or "time" in text for text in texts)
    computed = simulate("1F1B", 4, 8)
    measured = PipelineTimeline("measured, iteration_10", gpipe(4, 4).ranks, "s")
    _, texts = draw(tmp_path, coordinates, stages, [computed, measured])
    assert {"computed: 27.3 % idle", "measured, iteration_10: 42.9 % idle"} <= set(texts)
    assert {"time, forwards", "time, s", "idle", "forward", "backward"} <= set(texts)
    assert (
        texts.count("7") == 2 * 4
    )  # forward and backward on every rank of the first timeline only


def test_the_area_of_boxes_is_proportional_to_time(tmp_path):
    from matplotlib.image import imread

    png, _ = draw(tmp_path, mesh(pipeline=4), even_stages(4), [gpipe(4, 4)])
    picture = imread(png)[..., :3]

    def area(colour: str) -> int:
        parts = np.array([int(colour[i : i + 2], 16) for i in (0, 2, 4)]) / 255
        return int((np.abs(picture - parts).max(axis=-1) < 0.02).sum())

    assert area("d97b29") / area("2f6fb2") == pytest.approx(2.0, rel=0.1)
    all_rows = 9.9 * 150 * 4 * 0.88 * 0.36 * 150  # pixels of four rows
    assert (area("d97b29") + area("2f6fb2")) / all_rows == pytest.approx(1 - 3 / 7, rel=0.05)


def test_a_timeline_of_another_pipeline_is_rejected(tmp_path):
    with pytest.raises(DataError, match="run stages"):
        draw(tmp_path, mesh(pipeline=4), even_stages(4), [gpipe(2, 4)])
    with pytest.raises(DataError, match="Pipeline rank 3 has no stage"):
        draw(tmp_path, mesh(pipeline=4), even_stages(3))


def test_equal_arguments_give_identical_files(tmp_path):
    arguments = mesh(pipeline=2, tensor=2), even_stages(2, 2), [looped(2, 4)]
    first = draw_layout("x", *arguments, tmp_path / "a")
    second = draw_layout("x", *arguments, tmp_path / "b")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


LAYOUTS = {
    "one": (mesh(), even_stages(1), []),
    "64, sharded": (mesh(shard=64), even_stages(1), []),
    "all five": (mesh(2, 2, 2, 2, 2), even_stages(2, 2), [looped(2, 4)]),
    "odd": (mesh(pipeline=3, shard=7, tensor=3), even_stages(3, 3), [looped(3, 5, 3)]),
    "512": (mesh(replicate=2, shard=32, tensor=8), even_stages(1), []),
    "16 x 64": (mesh(pipeline=16, shard=4, tensor=8), even_stages(16), [gpipe(16, 64)] * 2),
    "64 stages": (mesh(pipeline=8), even_stages(8, 8), [looped(8, 8, 8)]),
    "many stages per rank": (mesh(pipeline=2, context=2), even_stages(2, 60), []),
    "long names": (
        mesh(pipeline=2),
        [StageCost(n, n, ", ".join(f"layers.{n}.{k}" for k in range(60)), 0.5) for n in (0, 1)],
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_no_text_overlaps_another_or_leaves_the_page(name, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    draw_layout("a long title, of $1 or $2, " * 9, *LAYOUTS[name], tmp_path / "layout")
    figure = drawn[0]
    renderer = figure.canvas.get_renderer()
    texts = figure.axes[0].texts
    left, low, right, high = np.array([t.get_window_extent(renderer).extents for t in texts]).T
    assert min(left.min(), low.min()) >= 0
    assert right.max() <= figure.bbox.width and high.max() <= figure.bbox.height
    assert figure.bbox.width == pytest.approx(1695) and figure.bbox.height < 5000
    overlap_x = np.minimum.outer(right, right) - np.maximum.outer(left, left)
    overlap_y = np.minimum.outer(high, high) - np.maximum.outer(low, low)
    overlapping = np.argwhere(np.triu((overlap_x > 0.5) & (overlap_y > 0.5), 1))
    assert [(texts[a].get_text(), texts[b].get_text()) for a, b in overlapping] == []


def test_too_many_ranks_are_labelled_as_a_range_and_abbreviated(tmp_path):
    _, texts = draw(tmp_path, mesh(shard=128, tensor=16), even_stages(1))
    assert "ranks 0 … 2047" in texts and "1024" not in texts
    _, texts = draw(tmp_path, mesh(pipeline=2, shard=1024, tensor=8), even_stages(2))
    assert any(text.startswith("Shown: 4,096 of 16,384 ranks") for text in texts)
    assert {"ranks 0 … 2047", "ranks 8192 … 10239", "shard 1024"} <= set(texts)


def test_a_rank_with_two_stages_shows_both_colours(tmp_path):
    from matplotlib.image import imread

    png, _ = draw(tmp_path, mesh(pipeline=2, shard=4), even_stages(2, 2))
    picture = np.round(imread(png)[..., :3] * 255).astype(int)
    colours, counts = np.unique(picture.reshape(-1, 3), axis=0, return_counts=True)
    large = colours[counts > 4000]  # larger than a legend symbol
    assert len(large) == 4 + 2  # stages, and the page and the panels
