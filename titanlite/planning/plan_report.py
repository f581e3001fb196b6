"""The answer of a search as text: the best layouts, why others lose, what would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titanlite.log import pluralize
from titanlite.planning.layout_space import LayoutChoice
from titanlite.planning.plan_changes import ChangedAnswer, explain_loss
from titanlite.planning.plan_request import PlanRequest
from titanlite.planning.search import PlannedStep, SearchResult
from titanlite.runtime.out_of_memory import GIB

SECONDS_PER_DAY = 86_400
MATMULS = {
    "bf16": "",
    "float8": "Float8 matmuls",
    "float8 gather": "Float8 matmuls and FSDP all-gather",
}


@dataclass(frozen=True)
class PlanFigures:
    """What a layout means for the whole training."""

    tokens_per_second: float  # of all GPUs
    mfu: float  # model FLOPs, attention counted causally, over the bf16 peak
    bubble: float  # fraction of the step
    days: float
    dollars: float | None  # None without a price


def plan_figures(request: PlanRequest, step: PlannedStep) -> PlanFigures:
    """Figures of a planned layout; the days have no failures and no stops in them."""
    cluster, seconds = request.cluster, step.time.total
    rate = request.tokens_per_step / seconds
    peak = cluster.gpu.peak_flops("bfloat16") * cluster.gpus
    days = request.tokens / rate / SECONDS_PER_DAY
    price = cluster.dollars_per_hour
    return PlanFigures(
        tokens_per_second=rate,
        mfu=step.job.flops_per_token * rate / peak,
        bubble=step.time.bubble / seconds,
        days=days,
        dollars=price * 24 * days * cluster.gpus if price is not None else None,
    )


def describe_choice(choice: LayoutChoice) -> str:
    """The schedule and the options of a layout, such as "1F1B; recompute full"."""
    options, pipelined = choice.options, choice.frame.degrees.pipeline > 1
    stages = f", {choice.stages_per_rank} stages a rank" if choice.stages_per_rank > 1 else ""
    parts = [
        f"{choice.schedule}{stages}" if pipelined else "",
        f"recompute {options.recompute}",
        "reshard after forward" if options.reshard else "",
        "activations offloaded" if options.offload_activations else "",
        "optimizer state offloaded" if options.offload_optimizer else "",
        MATMULS[choice.frame.precision],
    ]
    return "; ".join(filter(None, parts))


def report_lines(
    request: PlanRequest, result: SearchResult, changes: Sequence[ChangedAnswer]
) -> Iterator[str]:
    """The whole report, for a terminal of 100 columns."""
    yield from _header(request, result)
    yield ""
    yield from _table(request, result.best)
    yield ""
    yield from _parts_of_best(request, result.best[0])
    if changes:
        yield ""
        yield from _changes(changes)


def _header(request: PlanRequest, result: SearchResult) -> Iterator[str]:
    base, space, cluster = request.base, request.space, request.cluster
    counts = result.counts
    yield (
        f"{base.model.name} {base.model.flavor}, {space.spec.count_parameters(space.sizes):,}"
        f" parameters, on {cluster.gpus} x {cluster.gpu.name} ({cluster.machine.name})"
    )
    yield (
        f"step: {space.global_batch} sequences x {space.seq_len} tokens ="
        f" {request.tokens_per_step:,} tokens; usable memory {request.usable_bytes / GIB:.1f} of"
        f" {cluster.gpu.memory_gib:.1f} GiB"
    )
    yield (
        f"searched: {pluralize(counts.frames, 'combination')} of degrees and micro-batch,"
        f" {counts.memory_estimates:,} memory and {counts.time_estimates:,} time estimates"
    )


def _table(request: PlanRequest, steps: Sequence[PlannedStep]) -> Iterator[str]:
    figures = [plan_figures(request, step) for step in steps]
    width = max(len("layout"), *(len(str(step.choice.frame.degrees)) for step in steps))
    heading = " memory    step  tokens/s   MFU  bubble     days     cost"
    units = f"    GiB       s     a GPU     %       %  {request.tokens:.2g} tokens"
    yield f" #  {'layout':<{width}}  {'batch':<8}{heading}"
    yield f"    {'':<{width}}  {'':<8}{units}"
    for number, (step, figure) in enumerate(zip(steps, figures, strict=True), 1):
        frame = step.choice.frame
        batch = f"{frame.micro_batch} x {frame.n_microbatches}"
        yield (
            f"{number:>2}  {frame.degrees!s:<{width}}  {batch:<8} {step.memory.total / GIB:6.1f}"
            f" {step.time.total:7.2f} {figure.tokens_per_second / request.cluster.gpus:9,.0f}"
            f" {100 * figure.mfu:5.1f} {100 * figure.bubble:7.1f} {figure.days:8,.1f}"
            f" {_format_dollars(figure.dollars):>8}"
        )
        yield f"    {describe_choice(step.choice)}"
        if number > 1:
            yield f"    {_why_it_loses(step, steps[0])}"


def _format_dollars(dollars: float | None) -> str:
    if dollars is None:
        return "no price"
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if dollars >= unit:
            return f"${dollars / unit:.3g}{name}"
    return f"${dollars:.2f}"


def _why_it_loses(step: PlannedStep, best: PlannedStep) -> str:
    slower = step.time.total / best.time.total - 1
    parts = ", ".join(f"{name} {seconds:+.2g} s" for name, seconds in explain_loss(step, best))
    return f"{slower:.1%} slower: {parts}" if parts else "as fast"


def _parts_of_best(request: PlanRequest, step: PlannedStep) -> Iterator[str]:
    time, memory = step.time, step.memory
    yield "time of layout 1, s"
    yield from _bars({name: part for name, part in time.parts.items() if part > 0})
    yield ""
    yield f"memory of layout 1, GiB, {memory.reason}"
    yield from _bars({name: part / GIB for name, part in memory.parts.items() if part > 0})


def _bars(parts: dict[str, float]) -> Iterator[str]:
    width = max(len(name) for name in parts)
    total = sum(parts.values())
    for name, part in sorted(parts.items(), key=lambda pair: -pair[1]):
        bar = "#" * round(40 * part / total)
        yield f"  {name:<{width}} {part:9.3f} {part / total:6.1%} {bar}".rstrip()


def _changes(changes: Sequence[ChangedAnswer]) -> Iterator[str]:
    yield "what would change the answer"
    width = max(len(change.assumption) for change in changes)
    for change in changes:
        label = f"  {change.assumption:<{width}} "
        if change.best is None:
            yield f"{label} {change.reason}"
            continue
        speed = f"tokens/s x {change.speed:.2f}"
        if change.same_layout:
            yield f"{label} {speed}, the same layout"
        else:
            choice = change.best.choice
            yield f"{label} {speed}, {choice.frame.degrees}, micro-batch {choice.frame.micro_batch}"
            yield f"  {'':<{width}}  {describe_choice(choice)}"
