"""The answer of a search as text: the best layouts, why others lose, what would change it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from titanlite.files import parse_toml
from titanlite.log import pluralize
from titanlite.runtime.out_of_memory import GIB
from titanlite_planner.accuracy.row_errors import PRECISION_NAMES
from titanlite_planner.memory.estimate import estimate_memory
from titanlite_planner.memory.rank import MemoryEstimate
from titanlite_planner.plan.alternatives import TIE, Alternative, unproven_features
from titanlite_planner.plan.changes import ChangedAnswer, explain_loss
from titanlite_planner.plan.cost import RunCost, estimate_cost
from titanlite_planner.plan.layout_space import LayoutChoice
from titanlite_planner.plan.request import PlanRequest
from titanlite_planner.plan.search import PlannedLayout, SearchCounts
from titanlite_planner.recomputation import describe_recomputation
from titanlite_planner.time.efficiency import find_efficiency
from titanlite_planner.time.kernels import ALIGNMENT, KernelTimes

MEMORY_PARTS = (
    "parameters",
    "gradients",
    "optimizer_state",
    "gathered",
    "unsharded_gradients",
    "activations",
    "logits",
    "received",
    "step_temporaries",
)
FEW_TOKENS = 2048  # a step, for each GPU: less than it needs to hide the communication of FSDP
RELIABLE = 0.8  # fraction of rows within 20 %, below which estimates are called rough
MATMULS = {
    "bf16": "",
    "float8": "Float8 matmuls",
    "float8 gather": "Float8 matmuls and FSDP all-gather",
}


def plan_cost(request: PlanRequest, step: PlannedLayout) -> RunCost:
    """The cost of the whole training with a planned layout."""
    return estimate_cost(step.workload, request.cluster, step.time, request.tokens)


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
    request: PlanRequest,
    counts: SearchCounts,
    layouts: Sequence[Alternative],
    changes: Sequence[ChangedAnswer],
) -> Iterator[str]:
    """The whole report, for a terminal of 100 columns."""
    best = layouts[0].step
    yield from _header(request, counts, best)
    yield ""
    yield from _table(request, layouts)
    yield ""
    yield _error_band(request, best)
    yield _assumptions(request, best)
    yield ""
    yield from _parts_of_best(best)
    yield ""
    yield from _cost_of_best(request, best)
    if changes:
        yield ""
        yield from _changes(changes)


def _header(request: PlanRequest, counts: SearchCounts, best: PlannedLayout) -> Iterator[str]:
    base, space, cluster = request.base, request.space, request.cluster
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
    vocabulary, gpu = space.sizes.vocab_size, cluster.gpu
    each = request.tokens_per_step // cluster.gpus
    if cluster.gpus > 1 and each < FEW_TOKENS:
        yield (
            f"warning: {request.tokens_per_step:,} tokens a step are {each:,} for each GPU, which"
            " is idle most of the time; use a larger --global-batch, or fewer GPUs"
        )
    tensor = best.choice.frame.degrees.tensor
    share, aligned = -(-vocabulary // tensor), tensor * ALIGNMENT
    slower = KernelTimes(gpu, find_efficiency(gpu.name)).unaligned(share, "bfloat16")
    if slower > 1:
        yield (
            f"model.vocab_size = {vocabulary}: not a multiple of {aligned}, so the output layer of"
            f" layout 1 takes {slower:.1f} times as long; {vocabulary + -vocabulary % aligned} is"
            " fast"
        )


def _table(request: PlanRequest, layouts: Sequence[Alternative]) -> Iterator[str]:
    steps = [layout.step for layout in layouts]
    costs = [plan_cost(request, step) for step in steps]
    width = max(len("layout"), *(len(str(step.choice.frame.degrees)) for step in steps))
    heading = " memory    step  tokens/s   MFU  bubble     days     cost"
    units = f"    GiB       s     a GPU     %       %  {request.tokens:.2g} tokens"
    yield f" #  {'layout':<{width}}  {'batch':<8}{heading}"
    yield f"    {'':<{width}}  {'':<8}{units}"
    for number, (step, cost) in enumerate(zip(steps, costs, strict=True), 1):
        frame, seconds = step.choice.frame, step.time.total
        batch = f"{frame.micro_batch} x {frame.n_microbatches}"
        rate = request.tokens_per_step / seconds / request.cluster.gpus
        yield (
            f"{number:>2}  {frame.degrees!s:<{width}}  {batch:<8} {step.memory.total / GIB:6.1f}"
            f" {seconds:7.2f} {rate:9,.0f} {100 * cost.mfu:5.1f}"
            f" {100 * step.time.bubble / seconds:7.1f} {cost.days:8,.1f}"
            f" {_format_dollars(cost.dollars):>8}"
        )
        recommended = "recommended: " if number == 1 else ""
        yield f"    {recommended}{'; '.join(layouts[number - 1].labels)}"
        yield f"    {describe_choice(step.choice)}"
        if number > 1:
            yield f"    {_compared(step, steps[0])}"
        if unproven := unproven_features(step.choice, request.space.seq_len):
            yield f"    in no published run: {', '.join(unproven)}"
    yield "    batch: micro-batch x accumulation steps (micro-batches of the pipeline with PP)"


def _error_band(request: PlanRequest, step: PlannedLayout) -> str:
    """How wrong estimates of this kind of model on this GPU were."""
    gpu, workload = request.cluster.gpu.name, step.workload
    precision = PRECISION_NAMES[workload.numerics.matmuls]
    kind = f"{'MoE' if workload.model.experts else 'dense'} {precision}"
    found = published_errors().get(f"{kind}, {gpu}")
    if found is None:
        return f"error: no published run of {kind} on {gpu} was compared; expect 20 % or more"
    rough = "warning: rough estimates: " if found["within_20"] < RELIABLE else ""
    return (
        f"error: {rough}{kind} on {gpu}: median {found['median']:.1%},"
        f" {found['within_20']:.0%} within 20% of {pluralize(found['rows'], 'published run')}"
    )


def _assumptions(request: PlanRequest, step: PlannedLayout) -> str:
    machine, workload = request.cluster.machine, step.workload
    kernel = {"native": "the GPU's own attention kernel", "flash2": "FlashAttention-2"}
    return (
        f"assumed: {'compiled' if workload.compiled else 'eager'};"
        f" {kernel.get(workload.attention_kernel, workload.attention_kernel)}; links in a domain of"
        f" {pluralize(machine.link_domain, 'GPU')} {machine.link_gb_per_s:g} GB/s, network"
        f" {machine.network_gbit_per_s:g} Gb/s, for each GPU and direction"
    )


@cache
def published_errors() -> dict[str, Any]:
    """Rows, median error and fraction within 20 %, by kind and GPU; of benchmarks/planner_page."""
    text = files("titanlite_planner.accuracy").joinpath("published_errors.toml").read_text("utf-8")
    return parse_toml(text)


def memory_parts(estimate: MemoryEstimate) -> dict[str, float]:
    """Bytes of the worst rank at its peak by what they hold, without those that are 0."""
    worst = estimate.worst._asdict()
    parts = {name: worst[name] for name in MEMORY_PARTS}
    return {name: size for name, size in parts.items() if size > 1.0}


PART_TITLES = {
    "memory_bound": "memory-bound operations",
    "tensor": "TP communication",
    "context": "CP communication",
    "expert": "EP communication",
    "shard": "FSDP communication",
    "replicate": "gradients of replicas",
    "pipeline": "pipeline transfers",
    "host": "waiting for kernel launches",
}


def part_title(name: str) -> str:
    """What a part of the time or of the memory is called in tables and pictures."""
    return PART_TITLES.get(name, name.replace("_", " "))


def _format_dollars(dollars: float | None) -> str:
    if dollars is None:
        return "no price"
    for unit, name in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if dollars >= unit:
            return f"${dollars / unit:.3g}{name}"
    return f"${dollars:.2f}"


def _compared(step: PlannedLayout, best: PlannedLayout) -> str:
    slower = step.time.total / best.time.total - 1
    name = f"{abs(slower):.1%} {'slower' if slower > 0 else 'faster'} than layout 1"
    if abs(slower) <= TIE:
        return f"{name}: less than the error of the estimate"
    least = TIE / 10 * best.time.total
    lost = [(part, seconds) for part, seconds in explain_loss(step, best) if abs(seconds) >= least]
    return f"{name}: " + ", ".join(f"{part_title(p)} {seconds:+.2g} s" for p, seconds in lost)


def _parts_of_best(step: PlannedLayout) -> Iterator[str]:
    time, memory = step.time, step.memory
    yield "time of layout 1, s"
    yield from _text_bars({part_title(n): part for n, part in time.parts.items() if part > 0})
    yield ""
    mode = "compiled" if step.workload.compiled else "eager"
    yield f"memory of layout 1, GiB, {mode}, {memory.reason}"
    yield from _text_bars({part_title(n): part / GIB for n, part in memory_parts(memory).items()})
    yield f"  {describe_recomputation(step.workload)}"
    if step.workload.compiled and step.workload.recompute != "memory_budget":
        yield f"  eager, as its dry run counts it: {eager_bytes(step) / GIB:.1f} GiB"


def eager_bytes(step: PlannedLayout) -> float:
    """Peak memory of the worst rank without compilation."""
    return estimate_memory(dataclasses.replace(step.workload, compiled=False)).total


def _cost_of_best(request: PlanRequest, step: PlannedLayout) -> Iterator[str]:
    cost = plan_cost(request, step)
    failures, price = cost.failures, request.cluster.dollars_per_hour
    default = ", 20 a parameter without --tokens," if request.default_tokens else ""
    yield f"cost of {request.tokens:.3g} tokens{default} with layout 1: {cost.steps:,} steps"
    source = request.cluster.machine.price_source or "no source"
    money = "no price is known" if price is None else f"${price:.2f} each ({source})"
    yield f"  GPU-hours   {cost.gpu_hours:,.0f}, {money}: {_format_dollars(cost.dollars)}"
    if cost.kwh is not None and cost.co2_tonnes is not None:
        yield f"  energy      {cost.kwh:,.0f} kWh, {cost.co2_tonnes:,.0f} t of CO2"
    yield (
        f"  failures    one in {failures.hours_between_failures:,.1f} h; with a checkpoint every"
        f" {failures.daly_s / 60:,.0f} min they cost {failures.lost_fraction:.1%} of the time,"
        " which the days include"
    )
    yield f"  checkpoint  {cost.checkpoint_gib:,.0f} GiB each"


def _text_bars(parts: dict[str, float]) -> Iterator[str]:
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
        if (choice := change.choice) is None:
            yield f"{label} {change.reason}"
            continue
        speed = f"tokens/s x {change.speed:.2f}"
        if change.same_layout:
            yield f"{label} {speed}, the same layout"
        else:
            yield f"{label} {speed}, {choice.frame.degrees}, micro-batch {choice.frame.micro_batch}"
            yield f"  {'':<{width}}  {describe_choice(choice)}"
