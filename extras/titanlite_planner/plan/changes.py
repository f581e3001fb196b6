"""Why a layout is slower than another, and what would change the answer of a search."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from titanlite.errors import UserError
from titanlite_planner.forked import run_in_processes
from titanlite_planner.hardware import Cluster
from titanlite_planner.plan.alternatives import OFFLOADS, TIE, find_simplest
from titanlite_planner.plan.layout_space import MATMUL_CHOICES, LayoutChoice
from titanlite_planner.plan.request import PlanRequest
from titanlite_planner.plan.search import Estimates, FrameKey, LayoutSearch, PlannedLayout

MIN_SHARE = 0.1  # parts that make less than this fraction of a difference are not named


def explain_loss(step: PlannedLayout, best: PlannedLayout) -> list[tuple[str, float]]:
    """(part of the time, its difference in seconds) of `step` against `best`.

    The parts in which it is slower come first, the largest difference first.
    """
    parts, best_parts = step.time.parts, best.time.parts
    differences = {
        name: parts.get(name, 0.0) - best_parts.get(name, 0.0) for name in parts | best_parts
    }
    largest = max(map(abs, differences.values()), default=0.0)
    named = [(n, d) for n, d in differences.items() if abs(d) >= max(MIN_SHARE * largest, 1e-9)]
    return sorted(named, key=lambda pair: -pair[1])


@dataclass(frozen=True)
class ChangedAnswer:
    """The recommended layout under one changed assumption."""

    assumption: str
    choice: LayoutChoice | None
    same_layout: bool = False  # as without the change
    speed: float = 0.0  # tokens/s, relative to those without the change
    reason: str = ""  # why there is no layout


def changed_answers(
    request: PlanRequest,
    best: PlannedLayout,
    bounds: Mapping[FrameKey, float],
    estimates: Estimates | None = None,
) -> list[ChangedAnswer]:
    """The answer under other batches, memories, networks and precisions.

    Every layout is compared. `bounds` and `estimates` are those of the search without the change: a
    layout that is too slow by the bounds is not estimated again. The searches run in processes.
    """
    searches = [
        partial(_answer, request, best, bounds, estimates, change)
        for change in _changes_of(request)
    ]
    return list(run_in_processes(searches, os.cpu_count() or 1))


def _answer(
    request: PlanRequest,
    best: PlannedLayout,
    bounds: Mapping[FrameKey, float],
    estimates: Estimates | None,
    change: _ChangedRequest,
) -> ChangedAnswer:
    changed = change.request
    known = {
        (degrees, micro_batch, precision): change.shortest * bound
        for (degrees, micro_batch, _), bound in bounds.items()
        for precision in changed.space.precisions
    }
    search = LayoutSearch(changed.space, changed.target, 1, known, estimates)
    search.counts.disable_progress()
    try:
        limit = search.run().best[0].time.total * (1 + TIE)
    except UserError as problem:
        return ChangedAnswer(change.assumption, None, reason=problem.message)
    found = _same_frame(search, best.choice, limit) or find_simplest(search, limit)
    assert found is not None, "the fastest takes no more than the limit"
    same = _without_counts(found.choice) == _without_counts(best.choice)
    before = request.tokens_per_step / best.time.total
    speed = changed.tokens_per_step / found.time.total / before
    return ChangedAnswer(change.assumption, found.choice, same, speed)


def _same_frame(search: LayoutSearch, choice: LayoutChoice, limit: float) -> PlannedLayout | None:
    """The layout of `choice`, with other options if these are faster, if it still is a tie."""
    degrees, micro_batch = choice.frame.degrees, choice.frame.micro_batch
    frames = [f for f in search.frames if (f.degrees, f.micro_batch) == (degrees, micro_batch)]
    fixed = {name: getattr(choice.options, name) for name in OFFLOADS}
    return search.among(frames, {**fixed, **search.space.fixed}, limit)


def _without_counts(choice: LayoutChoice) -> LayoutChoice:
    """The choice, without the number of micro-batches, which follows from the global batch."""
    return dataclasses.replace(choice, frame=dataclasses.replace(choice.frame, n_microbatches=0))


class _ChangedRequest(NamedTuple):
    """A request that differs in one assumption."""

    assumption: str
    request: PlanRequest
    shortest: float  # a step takes at least this fraction of the time without the change


def _changes_of(request: PlanRequest) -> Iterator[_ChangedRequest]:
    space, cluster = request.space, request.cluster
    batch = space.global_batch

    def with_batch(sequences: int) -> PlanRequest:
        other = dataclasses.replace(space, global_batch=sequences)
        return dataclasses.replace(request, space=other)

    def with_cluster(other: Cluster) -> PlanRequest:
        return dataclasses.replace(request, cluster=other)

    # the longest search first, so that no process waits for it at the end
    peaks = cluster.gpu.peak_tflops
    if tuple(space.precisions) == MATMUL_CHOICES[:1] and "float8" in peaks:
        other = dataclasses.replace(space, precisions=MATMUL_CHOICES[1:])
        float8 = dataclasses.replace(request, space=other)
        yield _ChangedRequest("Float8 matmuls", float8, 0.8 * peaks["bfloat16"] / peaks["float8"])
    yield _ChangedRequest(f"global batch {2 * batch}", with_batch(2 * batch), 1.0)
    if batch % 2 == 0:
        yield _ChangedRequest(f"global batch {batch // 2}", with_batch(batch // 2), 0.5)
    yield _ChangedRequest(
        "twice the memory of a GPU", with_cluster(_with_memory(cluster, 2.0)), 1.0
    )
    yield _ChangedRequest("half the memory of a GPU", with_cluster(_with_memory(cluster, 0.5)), 1.0)
    if cluster.gpus > cluster.machine.link_domain:
        yield _ChangedRequest("twice the network", with_cluster(_with_network(cluster, 2.0)), 0.5)
        yield _ChangedRequest("half the network", with_cluster(_with_network(cluster, 0.5)), 1.0)


def _with_memory(cluster: Cluster, factor: float) -> Cluster:
    gpu = dataclasses.replace(cluster.gpu, memory_gib=cluster.gpu.memory_gib * factor)
    return dataclasses.replace(cluster, gpu=gpu)


def _with_network(cluster: Cluster, factor: float) -> Cluster:
    speed = cluster.machine.network_gbit_per_s * factor
    machine = dataclasses.replace(cluster.machine, network_gbit_per_s=speed)
    return dataclasses.replace(cluster, machine=machine)
