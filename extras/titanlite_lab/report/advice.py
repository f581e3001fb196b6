"""Advice from what a run recorded: each with the figure that it follows from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import numpy as np

from titanlite.log import pluralize
from titanlite_lab.loss_curve import smooth
from titanlite_lab.report.chart import format_number
from titanlite_lab.report.history import RunHistory, finite_median

MAX_DATA_FRACTION = 0.05  # of a step spent waiting for its batch
MAX_SAVING_FRACTION = 0.03  # of the wall time
MAX_LOST_FRACTION = 0.1  # of the wall time, for start-up, repeated steps and stops together
MIN_MFU = 0.3  # of a GPU in bfloat16; well-tuned dense models reach 0.4 to 0.6
MIN_GPU_TFLOPS = 20.0  # peak; a device below it is a CPU, whose MFU means little
MAX_CLIPPED_FRACTION = 0.5  # of the steps
PLATEAU_FRACTION = 0.2  # of the run: its last part
PLATEAU_IMPROVEMENT = 0.001  # relative; less than this over the last part is a plateau
DIVERGENCE_RISE = 0.1  # relative, of the final smoothed loss above its minimum
MIN_POINTS = 20  # step lines that a statement about a trend needs


Level = Literal["problem", "hint"]


class Advice(NamedTuple):
    """One observation with its figure, and what to do."""

    level: Level
    title: str
    figure: str  # the number behind it
    action: str


def advise(run: RunHistory) -> list[Advice]:
    """All advice for a run, problems first."""
    found = [advice for rule in RULES for advice in rule(run)]
    return sorted(found, key=lambda advice: advice.level != "problem")


def _diverged(run: RunHistory) -> Iterator[Advice]:
    for event in run.events_named("diverged"):
        yield Advice(
            "problem",
            "The run ended because training diverged",
            f"{event.get('reason') or 'inf or NaN'} at step {event['step']}, loss"
            f" {_format(event.get('loss'))}, gradient norm {_format(event.get('grad_norm'))}",
            "Lower optimizer.lr, lengthen lr_scheduler.warmup_steps, or look at the samples of that"
            " step.",
        )
    loss = _smoothed_loss(run)
    if len(loss) >= MIN_POINTS and loss[-1] > (1 + DIVERGENCE_RISE) * loss.min():
        yield Advice(
            "problem",
            "The loss rises",
            f"smoothed loss {loss[-1]:.3f} at the end, {loss.min():.3f} at its minimum",
            "Lower optimizer.lr, or roll back to a checkpoint before the rise.",
        )


def _plateau(run: RunHistory) -> Iterator[Advice]:
    loss = _smoothed_loss(run)
    if len(loss) < MIN_POINTS:
        return
    last = max(2, round(len(loss) * PLATEAU_FRACTION))
    improvement = 1 - loss[-1] / loss[-last]
    rates = run.column("lr")
    if 0 <= improvement < PLATEAU_IMPROVEMENT and rates[-1] > 0.5 * max(rates):
        yield Advice(
            "hint",
            "The loss has stopped falling, and the learning rate is still high",
            f"{improvement:.2%} lower over the last {PLATEAU_FRACTION:.0%} of the steps",
            "Decay the learning rate now (lr_scheduler.decay_ratio), or stop.",
        )


def _overfitting(run: RunHistory) -> Iterator[Advice]:
    for name, events in run.validation_sets.items():
        losses = [event["loss"] for event in events]
        best = min(losses)
        if len(losses) > 3 and losses[-1] > 1.02 * best and run.column("loss")[-1] < best:
            at = events[losses.index(best)]["step"]
            yield Advice(
                "hint",
                f"The validation loss of {name} rises while the training loss falls",
                f"{best:.3f} at step {at}, {losses[-1]:.3f} at step {events[-1]['step']}",
                "Use more data, fewer epochs, or more weight decay; keep the checkpoint of"
                f" step {at}.",
            )


def _slow_data(run: RunHistory) -> Iterator[Advice]:
    waiting = finite_median(run.column("data_seconds"))
    fraction = waiting / max(1e-9, waiting + finite_median(run.column("step_seconds")))
    if fraction > MAX_DATA_FRACTION:
        yield Advice(
            "problem",
            "Steps wait for data",
            f"{fraction:.0%} of the median step, {waiting:.3g} s",
            "Move the corpus to a faster disk, or make fewer and larger shards.",
        )


def _low_mfu(run: RunHistory) -> Iterator[Advice]:
    mfu = finite_median(run.column("mfu"))
    if mfu < MIN_MFU and finite_median(run.column("tflops_per_device")) > MIN_GPU_TFLOPS * mfu:
        yield Advice(
            "hint",
            "The devices compute less than they could",
            f"median MFU {mfu:.1%}",
            "Enable compile, use a larger training.local_batch_size, recompute less, or use less"
            " tensor parallelism; a profile (profiling.enable_profiling) shows what waits.",
        )


def _lost_time(run: RunHistory) -> Iterator[Advice]:
    goodput = run.goodput
    if goodput.saving > MAX_SAVING_FRACTION * goodput.total:
        yield Advice(
            "hint",
            "Saving blocks training",
            f"{goodput.saving / goodput.total:.1%} of the wall time, {goodput.saving:.0f} s",
            'Set checkpoint.async_mode = "async_with_pinned_mem", or a larger checkpoint.interval.',
        )
    lost = goodput.startup + goodput.repeated + goodput.stopped
    if len(run.starts) > 1 and lost > MAX_LOST_FRACTION * goodput.total:
        yield Advice(
            "problem",
            "Restarts cost much of the time",
            f"{lost / goodput.total:.0%} of the wall time over {len(run.starts)} starts:"
            f" {goodput.stopped:.0f} s stopped, {goodput.startup:.0f} s starting,"
            f" {goodput.repeated:.0f} s of repeated steps",
            "See how the starts ended in the table of starts; save more often"
            " (checkpoint.interval) to repeat fewer steps.",
        )


def _clipped(run: RunHistory) -> Iterator[Advice]:
    limit = run.config.get("training.max_norm", 0)
    norms = np.array(run.column("grad_norm"))[len(run.steps) // 10 :]
    norms = norms[np.isfinite(norms)]
    by_norm = run.config.get("training.clipping", "norm") == "norm"
    if not by_norm or not limit or len(norms) < MIN_POINTS:
        return
    fraction = float((norms > limit).mean())
    if fraction > MAX_CLIPPED_FRACTION:
        yield Advice(
            "hint",
            "Most steps are clipped",
            f"{fraction:.0%} of the steps have a gradient norm above training.max_norm = {limit:g}",
            f"The median norm is {finite_median(norms.tolist()):.3g}: a training.max_norm above it"
            " clips outliers only.",
        )


_REPORTED: dict[str, tuple[Level, str, str]] = {  # event -> (level, title, action)
    "hardware_fault": (
        "problem",
        "The replay of a step gave other bits",
        "Take the named host out of the job, and test its memory and its GPU.",
    ),
    "rolled_back": (
        "hint",
        "The guard rolled back",
        "Look at the dumped batches in the folder guard/ before the next run uses this data.",
    ),
    "step_skipped": (
        "hint",
        "Steps were skipped",
        "A few are harmless. If they repeat, lower optimizer.lr or look at the data.",
    ),
    "replica_mismatch": (
        "problem",
        "Replicas that should be equal differ",
        "Take the named host out of the job, and resume from a checkpoint before the first report.",
    ),
    "straggler": (
        "problem",
        "A rank is slower than the others",
        "All ranks wait for it: check its clocks and temperature, or take its host out of the job.",
    ),
}


def _reported(run: RunHistory) -> Iterator[Advice]:
    """What the run itself reported, once for each kind of event."""
    for name, (level, title, action) in _REPORTED.items():
        events = run.events_named(name)
        if not events:
            continue
        # The step of a roll-back is the one that it went back to.
        shown = ", ".join(str(event.get("from_step", event["step"])) for event in events[:5])
        more = f" and {len(events) - 5} more" if len(events) > 5 else ""
        named = [host for event in events for host in (event.get("host"), *event.get("hosts", ()))]
        hosts = sorted({str(host) for host in named if host})
        where, times = f"; {', '.join(hosts)}" if hosts else "", pluralize(len(events), "time")
        yield Advice(level, title, f"{times}, at step {shown}{more}{where}", action)


def _format(value: float | None) -> str:
    return "inf or NaN" if value is None else format_number(value)


def _smoothed_loss(run: RunHistory) -> np.ndarray:
    loss = smooth(np.array(run.column("loss")), 0.05)
    return loss[np.isfinite(loss)]


RULES: tuple[Callable[[RunHistory], Iterator[Advice]], ...] = (
    _diverged,
    _plateau,
    _overfitting,
    _slow_data,
    _low_mfu,
    _lost_time,
    _clipped,
    _reported,
)
