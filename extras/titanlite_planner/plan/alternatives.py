"""Layouts to choose from: the simplest that is as fast as any, and what others trade for it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

from titanlite.errors import ConfigError, UserError
from titanlite_planner.plan.layout_space import PUBLISHED, Frame, LayoutChoice, has_short_context
from titanlite_planner.plan.search import LayoutSearch, PlannedLayout

TIE = 0.03  # relative difference of two estimates that is below their error
RECOMMENDED = f"the simplest within {TIE:.0%} of the fastest"
OFFLOADS = ("offload_activations", "offload_optimizer")


class Alternative(NamedTuple):
    """A layout, and what it is the best of."""

    step: PlannedLayout
    labels: list[str]


def unproven_features(choice: LayoutChoice, seq_len: int) -> list[str]:
    """What of a layout is in no published run, so that its estimate was never compared."""
    degrees, options = choice.frame.degrees, choice.options
    short = has_short_context(seq_len, degrees.context)
    schedule = degrees.pipeline > 1 and choice.schedule not in PUBLISHED["schedule"]
    found = {
        f"CP with {seq_len // degrees.context:,} tokens a rank": short,
        f"schedule {choice.schedule}": schedule,
        f"recompute {options.recompute}": options.recompute not in PUBLISHED["recompute"],
        "activation offload": options.offload_activations,
        "optimizer offload": options.offload_optimizer,
    }
    return [name for name, is_used in found.items() if is_used]


def _complexity(frame: Frame, seq_len: int) -> int:
    """Kinds of parallelism beside FSDP or replicas; one without published runs counts twice."""
    degrees = frame.degrees
    hybrid = degrees.replicate > 1 and degrees.shard > 1
    kinds = (hybrid, *(n > 1 for n in (degrees.context, degrees.tensor, degrees.pipeline)))
    unproven = unproven_features(LayoutChoice(frame), seq_len)
    return sum(kinds) + (degrees.expert > 1) + len(unproven)


def find_simplest(search: LayoutSearch, limit: float) -> PlannedLayout | None:
    """The layout with the fewest kinds of parallelism and no offload, if one takes `limit` seconds.

    Of several, the fastest. An offload counts as two kinds: no published run has one.
    """
    groups: dict[int, list[tuple[list[Frame], dict[str, Any]]]] = {}
    by_complexity: dict[int, list[Frame]] = {}
    for frame in search.frames:
        key = _complexity(frame, search.space.seq_len)
        by_complexity.setdefault(key, []).append(frame)
    searched = [search.space.values(name, (False, True)) for name in OFFLOADS]
    for key, frames in by_complexity.items():
        for offloads in itertools.product(*searched):
            fixed = dict(search.space.fixed) | dict(zip(OFFLOADS, offloads, strict=True))
            groups.setdefault(key + 2 * sum(offloads), []).append((frames, fixed))
    for _, searches in sorted(groups.items()):
        found = [step for frames, fixed in searches if (step := search.among(frames, fixed, limit))]
        if found:
            return min(found, key=lambda step: step.time.total)
    return None


class _Category(NamedTuple):
    """Layouts of one kind, of which the best is always shown."""

    label: str
    has_frame: Callable[[Frame], bool]
    fixed: dict[str, Any]

    def contains(self, choice: LayoutChoice) -> bool:
        has = {**vars(choice.options), "schedule": choice.schedule}
        return self.has_frame(choice.frame) and has.items() >= self.fixed.items()


NO_OFFLOAD = dict.fromkeys(OFFLOADS, False)
CATEGORIES = (  # with TP and with PP: as they are used, if that fits, or with everything else
    (_Category("the best without CP", lambda frame: frame.degrees.context == 1, {}),),
    (_Category("the best without offload", lambda frame: True, NO_OFFLOAD),),
    (
        _Category(
            "the best with TP, without CP, PP or offload",
            lambda f: f.degrees.tensor > 1 and f.degrees.context * f.degrees.pipeline == 1,
            NO_OFFLOAD,
        ),
        _Category("the best with TP", lambda frame: frame.degrees.tensor > 1, {}),
    ),
    (
        _Category(
            "the best with PP, without CP, replicas or offload",
            lambda f: f.degrees.pipeline > 1 and f.degrees.context * f.degrees.replicate == 1,
            NO_OFFLOAD | {"schedule": "Interleaved1F1B"},
        ),
        _Category("the best with PP", lambda frame: frame.degrees.pipeline > 1, {}),
    ),
)


def find_alternatives(search: LayoutSearch) -> list[Alternative]:
    """The recommended layout, the fastest, and the best of each category; ties are one layout.

    Raises ConfigError if no layout is legal, or none fits.
    """
    try:
        fastest = search.run().best[0]
    except ConfigError as error:
        counts = "" if search.counts.refused else other_gpu_counts(search)
        raise ConfigError(error.message, fix=f"{error.fix} {counts}".strip()) from None
    limit = fastest.time.total * (1 + TIE)
    first = find_simplest(search, limit) or fastest
    shown = [Alternative(first, [RECOMMENDED])]
    if first.choice == fastest.choice:
        shown[0].labels.append("the fastest")
    else:
        shown.append(Alternative(fastest, ["the fastest"]))
    for categories in CATEGORIES:
        for category in categories:
            same = [row for row in shown if category.contains(row.step.choice)]
            tied = [row for row in same if row.step.time.total <= limit]
            if not tied:
                frames = list(filter(category.has_frame, search.frames))
                step = search.among(frames, {**category.fixed, **search.space.fixed})
                if step is None or not category.contains(step.choice):
                    continue
                tied = [row for row in same if row.step.choice == step.choice]
                if not tied:
                    shown.append(Alternative(step, [category.label]))
                    break
            tied[0].labels.append(category.label)
            break
    return shown


MOST_GPUS = 2**20
SIZES_TRIED = 16  # between a number of GPUs that is too small and twice as many


def other_gpu_counts(search: LayoutSearch) -> str:
    """A number of GPUs that fits, or the nearest that have a layout; empty if none is found."""
    gpus = search.space.gpus
    if search.frames:
        enough = _smallest_that_fits(search)
        return f"The smallest number of GPUs that fits: {enough:,}." if enough else ""
    step = 2 ** (gpus.bit_length() - 2) if gpus > 1 else 1
    while step >= max(1, gpus // 64):
        below = next(filter(_legal(search), range(gpus // step * step, 0, -step)), None)
        above = range((gpus // step + 1) * step, 2 * gpus + 1, step)
        found = [n for n in (below, next(filter(_legal(search), above), None)) if n]
        if found:
            return f"Numbers of GPUs with a layout: {', '.join(f'{n:,}' for n in found)}."
        step //= 2
    return ""


def _legal(search: LayoutSearch) -> Callable[[int], bool]:
    return lambda gpus: any(True for _ in dataclasses.replace(search.space, gpus=gpus).frames())


def _smallest_that_fits(search: LayoutSearch) -> int | None:
    """GPUs: doubled until the model fits with full recomputation, then in multiples of a server."""
    least = {"recompute": "full", "micro_batch": 1} | dict(search.space.fixed)

    def fits(gpus: int) -> bool:
        space = dataclasses.replace(search.space, gpus=gpus, fixed=least)
        cluster = search.target.cluster.resized(gpus)
        try:
            LayoutSearch(space, dataclasses.replace(search.target, cluster=cluster), 1).run()
        except UserError:
            return False
        return True

    doubled = itertools.takewhile(
        lambda gpus: gpus <= MOST_GPUS, (search.space.gpus << n for n in itertools.count(1))
    )
    enough = next(filter(fits, doubled), None)
    if enough is None:
        return None
    server = search.target.cluster.machine.gpus
    step = max(1 if enough <= server else server, enough // 2 // SIZES_TRIED)
    between = range((enough // 2 // step + 1) * step, enough, step)
    return next(filter(fits, between), enough)
