"""Search the layouts of a model on a cluster: the fastest that fit, found by branch and bound.

Candidates are grouped: degrees, micro-batch and precision (a frame), then the schedule, then the
options that lower the memory and cost time. A group is skipped if its optimistic time, without
these options, is no better than what was found. The order of the groups does not change the
result. A test compares the result with that of trying all candidates.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError, UserError
from titanlite.job import Job, JobConfig
from titanlite.runtime.out_of_memory import GIB
from titanlite_planner.forked import PROGRESS_SECONDS
from titanlite_planner.hardware import Cluster
from titanlite_planner.job_workload import workload_of
from titanlite_planner.memory.estimate import estimate_memory, first_too_large
from titanlite_planner.memory.offloaded import offloaded_bytes
from titanlite_planner.memory.rank import MemoryEstimate
from titanlite_planner.plan.layout_space import (
    Frame,
    LayoutChoice,
    LayoutSpace,
    StepOptions,
    recomputes_no_less,
)
from titanlite_planner.plan.planned_job import planned_config, planned_job
from titanlite_planner.time.efficiency import Efficiency
from titanlite_planner.time.step import StepTime, estimate_step
from titanlite_planner.workload import Workload

# A frame's bound is the time of its first schedule, with the bubble of each schedule. Their stages
# and transfers differ too, by less than this factor.
BOUND_MARGIN = 0.93
HOST_SHARE = 0.8  # of the host memory; the rest: processes, checkpoints, data
PROBES = 20  # at least 20 frames are tried before a problem counts as one of all layouts


FrameKey = tuple[Degrees, int, str]


def frame_key(frame: Frame) -> FrameKey:
    """Degrees, micro-batch and precision: a frame for any global batch."""
    return frame.degrees, frame.micro_batch, frame.precision


@dataclass(frozen=True)
class PlannedLayout:
    """A layout that fits, and its estimates."""

    choice: LayoutChoice
    job: Job
    workload: Workload
    memory: MemoryEstimate
    time: StepTime


@dataclass
class SearchCounts:
    """How many groups and candidates the search visited."""

    frames: int = 0
    memory_estimates: int = 0
    time_estimates: int = 0
    next_line: float = field(default_factory=lambda: time.monotonic() + PROGRESS_SECONDS)
    refused: list[UserError] = field(default_factory=list)  # candidates that train.py refuses

    def add(self, frames: int = 0, memory: int = 0, times: int = 0) -> None:
        """Count visits."""
        self.frames += frames
        self.memory_estimates += memory
        self.time_estimates += times

    def disable_progress(self) -> None:
        """Print nothing: the process that waits for this one reports."""
        self.next_line = math.inf

    def print_progress(self) -> None:
        """Print how far the search is, every PROGRESS_SECONDS."""
        if time.monotonic() >= self.next_line:
            self.next_line = time.monotonic() + PROGRESS_SECONDS
            estimates = (
                f"{self.memory_estimates:,} memory and {self.time_estimates:,} time estimates"
            )
            print(f"searching: {estimates} so far", file=sys.stderr)


@dataclass(frozen=True)
class SearchResult:
    """The fastest layouts, one for each frame, the best first."""

    best: list[PlannedLayout]
    counts: SearchCounts


@dataclass(frozen=True)
class SearchTarget:
    """What all candidates of a search have in common."""

    base: JobConfig  # the settings that the search does not choose
    cluster: Cluster
    usable_bytes: float  # of a GPU's memory
    efficiency: Efficiency | None = None  # None: that of the GPU type


class Estimates:
    """Times and memory of candidates, for searches of one model that differ in the cluster."""

    def __init__(self) -> None:
        self._times: dict[object, dict[LayoutChoice, StepTime]] = {}
        self._bytes_too_large: dict[float, dict[LayoutChoice, float | None]] = {}

    def times(self, target: SearchTarget) -> dict[LayoutChoice, StepTime]:
        """Those known for a cluster; the memory of its GPUs changes no time."""
        gpu = dataclasses.replace(target.cluster.gpu, memory_gib=0.0)
        key = dataclasses.replace(target.cluster, gpu=gpu), target.efficiency
        return self._times.setdefault(key, {})

    def bytes_too_large(self, target: SearchTarget) -> dict[LayoutChoice, float | None]:
        """By candidate: bytes of the first rank that does not fit, or None if all fit.

        Clusters with the same usable memory share them.
        """
        return self._bytes_too_large.setdefault(target.usable_bytes, {})


class LayoutSearch:
    """One search in a space of layouts."""

    def __init__(
        self,
        space: LayoutSpace,
        target: SearchTarget,
        keep: int = 10,
        at_least: Mapping[FrameKey, float] | None = None,
        estimates: Estimates | None = None,
    ):
        """`at_least`: seconds that no candidate of a frame is faster than, where they are known; a
        closer bound is estimated when it is needed. `estimates`: those of an earlier search of this
        model, to use again.
        """
        self.space, self.target, self.keep = space, target, keep
        self._at_least = at_least or {}
        self.bounds: dict[FrameKey, float] = {}
        self.counts = SearchCounts()
        self._best: list[PlannedLayout] = []
        self._limit = math.inf  # seconds that no layout may take
        self._bases: dict[str, Workload] = {}  # by precision
        self.estimates = estimates or Estimates()
        self._times = self.estimates.times(target)
        self._bytes_too_large = self.estimates.bytes_too_large(target)
        self._ratios: dict[tuple[int, int], dict[tuple[str, int], float]] = {}
        self._too_large: list[tuple[float, LayoutChoice]] = []  # with the bytes of one rank
        self._shards: dict[LayoutChoice, tuple[float, float]] = {}  # (too few, enough) to fit

    def run(self) -> SearchResult:
        """The `keep` fastest layouts; raises ConfigError if none is legal, or none fits."""
        if not self.frames:
            raise self._nothing_is_legal()
        self.counts.add(frames=len(self.frames))
        self._search()
        if not self._best:
            raise self._nothing_fits()
        return SearchResult(self._best, self.counts)

    def among(
        self, frames: list[Frame], fixed: Mapping[str, Any], limit: float = math.inf
    ) -> PlannedLayout | None:
        """The fastest layout of some frames that fits, if it takes at most `limit` seconds.

        `fixed` are choices as in the space. What this search knows is not estimated again.
        """
        space = dataclasses.replace(self.space, fixed=fixed)
        if fixed.get("schedule") != self.space.fixed.get("schedule"):
            frames = [frame for frame in frames if any(True for _ in space.schedules(frame))]
        other = LayoutSearch(space, self.target, 1, self.bounds, self.estimates)
        just_above = math.nextafter(limit, math.inf)  # `_limit` is exclusive
        return other._search_within(self, frames, just_above)

    def _search_within(
        self, parent: LayoutSearch, frames: list[Frame], limit: float
    ) -> PlannedLayout | None:
        """The fastest layout below `limit`, with the counts and workloads of `parent`."""
        self.frames = frames  # in place of all frames of the space
        self.counts, self._bases = parent.counts, parent._bases
        self._limit = limit
        self._search()
        return self._best[0] if self._best else None

    def _search(self) -> None:
        usable = self.target.usable_bytes
        frames = [f for f in self._accepted_frames if self._least_bytes(f) <= usable]
        known = (self._at_least.get(frame_key(frame), 0.0) for frame in frames)
        # (bound, number of the frame, whether the bound was estimated)
        bounds = [(bound, number, False) for number, bound in enumerate(known)]
        heapq.heapify(bounds)
        while bounds and bounds[0][0] < self._slowest_kept:
            self.counts.print_progress()
            _, number, estimated = heapq.heappop(bounds)
            if estimated:
                self._visit(frames[number])
            else:
                heapq.heappush(bounds, (self._bound(frames[number]), number, True))

    def points(self, step: PlannedLayout) -> list[tuple[float, float]]:
        """(bytes, seconds) of all options of a layout, those that do not fit included."""
        options = self.space.options(step.choice.frame, step.choice.schedule)
        choices = [dataclasses.replace(step.choice, options=each) for each in options]
        return [(self.needed_bytes(each), self.estimate_time(each).total) for each in choices]

    def _nothing_is_legal(self) -> ConfigError:
        space = self.space
        fixed = "".join(f", {name} = {value}" for name, value in space.fixed.items())
        return ConfigError(
            f"No layout of {space.gpus} GPUs{fixed} can train this model on {space.global_batch}"
            f" sequences of {space.seq_len} tokens: the data-parallel ranks must divide the"
            " sequences, the tensor-parallel ranks the heads, the pipeline ranks must not be more"
            " than the blocks.",
            fix="Use a global batch with more common factors with the number of GPUs, or fix less.",
        )

    def _nothing_fits(self) -> UserError:
        """Why no layout was found."""
        if self.counts.refused:
            return self.counts.refused[0]
        if any(enough < math.inf for _, enough in self._shards.values()):  # so a GPU has enough
            host = self.target.cluster.machine.host_gib
            return ConfigError(
                f"Nothing fits: what is offloaded needs more than {HOST_SHARE:.0%} of the host"
                f" memory, {host:g} GiB for each GPU.",
                fix="Do not fix offloading, or give the machine's host_gib with --hardware.",
            )
        if self._too_large:
            needed, frame = self._smallest()
            what = f"the smallest layout found, {frame.degrees}, needs"
        else:
            needed, frame = min(
                ((self._least_bytes(frame), frame) for frame in self._accepted_frames),
                key=lambda pair: pair[0],
            )
            what = f"parameters and gradients alone need, with {frame.degrees},"
        return ConfigError(
            f"Nothing fits: a GPU has {self.target.usable_bytes / GIB:.1f} GiB to use, and {what}"
            f" {needed / GIB:.1f} GiB.",
            fix="Use more GPUs, GPUs with more memory, shorter sequences, or fewer bytes per"
            " parameter (optimizer.state_dtype, training.dtype).",
        )

    @cached_property
    def frames(self) -> list[Frame]:
        return list(self.space.frames())

    @cached_property
    def _accepted_frames(self) -> list[Frame]:
        """The frames of the precisions that train.py accepts; raises UserError without any."""
        accepted, refused = set(), []
        for precision in self.space.precisions:
            try:
                self._base_workload(precision)
                accepted.add(precision)
            except UserError as problem:
                refused.append(problem)
        if not accepted:
            raise refused[0]
        return [frame for frame in self.frames if frame.precision in accepted]

    def _workload_of(self, choice: LayoutChoice) -> Workload:
        """The workload of a candidate."""
        return self.space.workload(choice, self._base_workload(choice.frame.precision))

    def _base_workload(self, precision: str) -> Workload:
        """The workload of any legal layout of this precision: a choice replaces what differs."""
        if precision not in self._bases:
            self._bases[precision] = self._find_workload(precision)
        return self._bases[precision]

    def _find_workload(self, precision: str) -> Workload:
        frames = [frame for frame in self.frames if frame.precision == precision]
        problems: list[UserError] = []
        for frame in frames[:: max(1, len(frames) // PROBES)]:
            choice = self._first_choice(frame)
            try:
                return workload_of(planned_job(planned_config(self.target.base, choice), choice))
            except UserError as problem:
                problems.append(problem)
        raise problems[0] if problems else ConfigError(f"No layout computes in {precision}.")

    def _first_choice(self, frame: Frame) -> LayoutChoice:
        schedule, stages = next(self.space.schedules(frame))
        return LayoutChoice(frame, schedule, stages, self.space.options(frame, schedule)[0])

    @property
    def _slowest_kept(self) -> float:
        """Step time that a layout must be below to be among those kept."""
        return self._best[-1].time.total if len(self._best) == self.keep else self._limit

    def estimate_time(self, choice: LayoutChoice) -> StepTime:
        """The time of a step."""
        if choice not in self._times:  # a bound and a visit need the same one
            self.counts.add(times=1)
            workload = self._workload_of(choice)
            cluster, efficiency = self.target.cluster, self.target.efficiency
            self._times[choice] = estimate_step(workload, cluster, efficiency)
        return self._times[choice]

    def needed_bytes(self, choice: LayoutChoice) -> float:
        """Memory of the worst rank at its peak."""
        self.counts.add(memory=1)
        return estimate_memory(self._workload_of(choice)).total

    def _estimate_fit(self, choice: LayoutChoice) -> bool:
        """Whether the worst rank has enough memory; the first that has not decides."""
        if choice not in self._bytes_too_large:
            self.counts.add(memory=1)
            workload = self._workload_of(choice)
            self._bytes_too_large[choice] = first_too_large(workload, self.target.usable_bytes)
        needed = self._bytes_too_large[choice]
        if needed is not None:
            self._too_large.append((needed, choice))
        return needed is None

    def _smallest(self) -> tuple[float, Frame]:
        """The candidate that needs least of those that do not fit.

        One rank of each was estimated, which is a lower bound; so they are estimated in this order.
        """
        smallest: tuple[float, Frame] | None = None
        for at_least, choice in sorted(self._too_large, key=lambda known: known[0]):
            if smallest and at_least >= smallest[0]:
                break
            needed = self.needed_bytes(choice)
            if smallest is None or needed < smallest[0]:
                smallest = needed, choice.frame
        assert smallest is not None, "at least one candidate does not fit"
        return smallest

    def fits_the_host(self, choice: LayoutChoice) -> bool:
        """Whether what is offloaded fits into the host memory of each GPU."""
        available = HOST_SHARE * self.target.cluster.machine.host_gib * GIB
        return offloaded_bytes(self._workload_of(choice)) <= available

    def _fits_the_gpu(self, choice: LayoutChoice) -> bool:
        """Whether a candidate fits: so do those with more shards and fewer replicas."""
        frame, shard = choice.frame, choice.frame.degrees.shard
        others = dataclasses.replace(frame.degrees, replicate=1, shard=1)
        key = dataclasses.replace(choice, frame=dataclasses.replace(frame, degrees=others))
        too_few, enough = self._shards.get(key, (0.0, math.inf))
        if shard <= too_few:
            return False
        if shard < enough:
            if self._estimate_fit(choice):
                enough = shard
            else:
                too_few = shard
            self._shards[key] = too_few, enough
        return shard >= enough

    def _least_bytes(self, frame: Frame) -> float:
        """Parameters and gradients of an average rank, as far as they are on the GPU at once."""
        workload, degrees = self._base_workload(frame.precision), frame.degrees
        if workload.offload_parameters:
            return 0.0
        each = workload.numerics.parameter_bytes
        if not workload.step_in_backward:
            each += workload.numerics.gradient_bytes
        return each * self._parameters * degrees.replicate / degrees.ranks

    @cached_property
    def _parameters(self) -> int:
        return self.space.spec.count_parameters(self.space.sizes)

    def _bound(self, frame: Frame) -> float:
        """Seconds that no candidate of the frame is faster than."""
        key = frame_key(frame)
        if key not in self.bounds:
            self.bounds[key] = self._schedule_bounds(frame)[0][0]
        return self.bounds[key]

    def _schedule_bounds(self, frame: Frame) -> list[tuple[float, int, str, int]]:
        """(bound, number, schedule, stages per rank) of the frame's schedules, the best first.

        The number keeps the order of equal bounds.
        """
        first = self.estimate_time(self._first_choice(frame))
        busy = first.total - first.bubble
        idle = self._idle_ratios(frame)
        bounds = [
            ((busy + first.bubble * ratio) * BOUND_MARGIN, number, *schedule)
            for number, (schedule, ratio) in enumerate(idle.items())
        ]
        return sorted(bounds)

    def _idle_ratios(self, frame: Frame) -> dict[tuple[str, int], float]:
        """The bubble of each schedule, relative to that of the first one."""
        key = frame.degrees.pipeline, frame.n_microbatches
        if key not in self._ratios:
            idle = {
                (schedule, stages): self.estimate_time(
                    LayoutChoice(frame, schedule, stages, self.space.options(frame, schedule)[0])
                ).bubble
                for schedule, stages in self.space.schedules(frame)
            }
            first = next(iter(idle.values())) or 1.0
            self._ratios[key] = {schedule: seconds / first for schedule, seconds in idle.items()}
        return self._ratios[key]

    def _visit(self, frame: Frame) -> None:
        """Keep the fastest candidate of the frame that fits, if it is fast enough."""
        found = None
        for bound, _, schedule, stages in self._schedule_bounds(frame):
            limit = min(self._slowest_kept, found.time.total if found else math.inf)
            if bound >= limit:
                break
            found = self._fastest_of_schedule(frame, schedule, stages, limit) or found
        if found is not None:
            kept = sorted([*self._best, found], key=lambda step: step.time.total)
            self._best = kept[: self.keep]

    def _fastest_of_schedule(
        self, frame: Frame, schedule: str, stages: int, limit: float
    ) -> PlannedLayout | None:
        """The fastest candidate of a schedule that fits, if it takes less than `limit` seconds."""
        options = self.space.options(frame, schedule)
        group = LayoutChoice(frame, schedule, stages, options[0])
        if self.estimate_time(group).total >= limit:
            return None  # as all others, which take longer
        if not self._fits_the_gpu(dataclasses.replace(group, options=options[-1])):
            return None
        return self._fastest_that_fits(group, options, limit)

    def _fastest_that_fits(
        self, group: LayoutChoice, all_options: list[StepOptions], limit: float
    ) -> PlannedLayout | None:
        """The fastest of a group's options that fit, if it takes less than `limit` seconds."""
        best, fitting = None, list[StepOptions]()
        by_recompute: dict[str, list[StepOptions]] = defaultdict(list)
        for options in all_options:
            by_recompute[options.recompute].append(options)
        slow: list[str] = []  # recomputations that take too long by themselves
        for name, same in by_recompute.items():
            if any(recomputes_no_less(name, other) for other in slow):
                continue
            first, last = (dataclasses.replace(group, options=same[end]) for end in (0, -1))
            if self.estimate_time(first).total >= limit:
                slow.append(name)  # and with other options longer still
                continue
            if not self._fits_the_gpu(last):
                continue  # the others need more
            for options in same:
                choice = dataclasses.replace(group, options=options)
                if any(options.costs_no_less_than(other) for other in fitting):
                    continue
                if not self._fits_the_gpu(choice):
                    continue
                if not self.fits_the_host(choice):
                    continue
                time = self.estimate_time(choice).total
                if time < limit:
                    step = self.checked(choice)
                    if step is None:
                        continue
                    best, limit = step, time
                fitting.append(options)
        return best

    def checked(self, choice: LayoutChoice) -> PlannedLayout | None:
        """The candidate with its job; None if train.py refuses it."""
        try:
            job = planned_job(planned_config(self.target.base, choice), choice)
        except UserError as problem:
            self.counts.refused.append(problem)
            return None
        workload = self._workload_of(choice)
        return PlannedLayout(
            choice, job, workload, estimate_memory(workload), self.estimate_time(choice)
        )
