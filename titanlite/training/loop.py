"""The loop: one step after the other, and what is due between them."""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from titanlite.checkpoint import Checkpointer, SaveResult
from titanlite.distributed.collectives import AsyncMax, raise_on_all_ranks
from titanlite.distributed.mesh import Mesh
from titanlite.distributed.process_group import set_collective_timeouts
from titanlite.errors import CheckpointError, UserError
from titanlite.log import logger
from titanlite.optim import OptimizerInBackward
from titanlite.parallelize.compile import compiled_so_far
from titanlite.runtime.stop import StopRequest
from titanlite.settings import Positive, Range, Supported
from titanlite.training.divergence import FiniteCheck, NonFinite
from titanlite.training.engine import Engine
from titanlite.training.state import TrainState
from titanlite.training.step import StepResult, take_step


@dataclass(frozen=True)
class TrainingConfig:
    """[training] How much is learned, in which batches and precision."""

    local_batch_size: Positive = 8
    # sequences a rank runs at once; under pipeline parallel, in one run of the schedule
    global_batch_size: Annotated[int, Range(1, also=(-1,))] = -1
    # sequences of a step, over all ranks; what local batches do not cover is accumulated;
    # -1: local_batch_size times the data-parallel ranks, so it follows the layout
    seq_len: Positive = 2048  # tokens of a sequence
    max_norm: Annotated[float, Range(0)] = 1.0  # gradients are clipped to this norm; 0: never
    steps: Positive = 10_000  # steps to take, counted from the start of the run
    enable_cpu_offload: bool = False  # keep weights, gradients and moments in host memory
    dtype: Literal["bfloat16", "float32"] = "float32"
    # type of the weights, gradients and moments that are kept; vectors are updated in float32
    mixed_precision_param: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    # type that weights are cast to for computing, in every layout; float16 scales the loss
    mixed_precision_reduce: Literal["float32"] = "float32"  # type gradients are summed in
    gc_freq: Positive = 50  # steps between two garbage collections, on all ranks together
    gc_debug: Annotated[bool, Supported((False,), "Debugging garbage")] = False
    # collect at every step, and tell of cycles that hold tensors


class ThroughputMeter(Protocol):
    """What the loop needs of a clock."""

    def waiting(self) -> AbstractContextManager: ...
    def paused(self) -> AbstractContextManager: ...
    def step_done(self, tokens: int) -> None: ...
    def read(self) -> dict[str, Any]: ...


class HeartbeatWatchdog(Protocol):
    """Who is told how far this rank is."""

    def set_phase(self, step: int, phase: str) -> None: ...
    def set_timeout(self, seconds: float) -> None: ...


class MetricSinks(Protocol):
    """Where the loop tells what happened."""

    def step(self, record: dict[str, Any]) -> None: ...
    def event(self, step: int, name: str, **fields: Any) -> None: ...
    def sync(self) -> None: ...


@dataclass(frozen=True)
class Between:
    """What is due between two steps."""

    log_freq: int
    validate_freq: int  # 0: never
    validate: Callable[[], dict[str, float]]  # loss by name of the text
    compiled: bool  # what is compiled was so in the first step
    trouble: Callable[[], str]  # why this rank cannot go on, or nothing


def run(
    state: TrainState,
    engine: Engine,
    batches: Iterator[tuple[Tensor, Tensor]],
    *,
    config: TrainingConfig,
    global_batch: int,
    lr_at: Callable[[int], float],
    mesh: Mesh,
    device: torch.device,
    between: Between,
    checkpointer: Checkpointer,
    stop: StopRequest,
    watch: HeartbeatWatchdog,
    train_timeout_seconds: int,
    meter: ThroughputMeter,
    sinks: MetricSinks,
    profiler: Any,
    early: OptimizerInBackward | None = None,
) -> int:
    """Train from where `state` is to `config.steps`; returns why it stopped before, or 0.

    Raises CheckpointError when the checkpoint it ends with could not be written, and Diverged when
    a loss, gradient or weight is inf or NaN, before that state is saved.
    """
    council, first_step = AsyncMax(), state.step
    finite = FiniteCheck(state.model, device)
    reason = _asked_before_starting(council, stop)
    gc.collect()
    gc.disable()  # ranks collecting at different moments stall each other's collectives
    began, longest = time.monotonic(), 0.0  # seconds of a turn of the loop
    try:
        while not reason and state.step < config.steps:
            watch.set_phase(state.step + 1, "data")
            turn, began = time.monotonic() - began, time.monotonic()
            if state.step > first_step + 1:
                longest = max(longest, turn)  # perhaps one that validates
            # What is decided now holds after this turn; after the next one it may be too late.
            needed = checkpointer.save_seconds + longest + turn
            trouble = between.trouble()
            council.start(stop.reason(needed), checkpointer.writing, bool(trouble), finite.poll())
            with meter.waiting():
                inputs, labels = next(batches)
            inputs = inputs.to(device, non_blocking=True)
            labels = labels.to(device, non_blocking=True)
            lr = lr_at(state.step)
            result = take_step(
                state,
                engine,
                inputs,
                labels,
                mesh=mesh,
                global_batch=global_batch,
                lr=lr,
                max_norm=config.max_norm,
                early=early,
                now=partial(watch.set_phase, state.step + 1),
            )
            meter.step_done(global_batch * inputs.shape[1])
            if not result.skipped:
                finite.note(state.step, result)
            reason, writing, troubled, diverged = council.wait()
            if troubled:
                raise_on_all_ranks(UserError(trouble) if trouble else None)
            last = state.step == config.steps
            due = checkpointer.due(state.step, last or bool(reason))
            validates = _validation_due(state.step, between.validate_freq, last) and not reason
            with meter.paused():
                if due or validates or last or reason:  # else later: to know it now is to wait
                    council.start(finite.wait(state.step, weights=due))
                    diverged = council.wait()[0] or diverged
                if diverged:
                    watch.set_phase(state.step, "save")
                    _end_diverged(finite.tell_all(council), checkpointer, sinks)
                if result.skipped:
                    _tell_skipped(state, sinks)
                if state.step == 1 or state.step % between.log_freq == 0 or last or reason:
                    record = _record(state, lr, result, meter.read())
                    measured = (record["loss"], record["grad_norm"])
                    if result.skipped or all(map(math.isfinite, measured)):  # else it ends
                        sinks.step(record)
                if validates:
                    _tell_losses(state.step, between.validate(), sinks)
                watch.set_phase(state.step, "save")
                _keep(state, checkpointer, bool(writing), due, last, bool(reason), sinks)
                if state.step % config.gc_freq == 0:
                    gc.collect(1)
                if state.step == first_step + 1:  # it took longer: kernels, buffers, plans
                    if between.compiled:
                        logger.info("%s", compiled_so_far())
                    set_collective_timeouts(train_timeout_seconds, excluded=checkpointer.group)
                    watch.set_timeout(train_timeout_seconds)
                profiler.step()  # writing a trace takes a while
    finally:
        gc.enable()
    return 0 if state.step == config.steps else reason


def _asked_before_starting(council: AsyncMax, stop: StopRequest) -> int:
    council.start(stop.reason(0.0))
    return council.wait()[0]


def _validation_due(step: int, freq: int, last: bool) -> bool:
    return freq > 0 and (last or step % freq == 0)


def _tell_losses(step: int, losses: dict[str, float], sinks: MetricSinks) -> None:
    for name, loss in losses.items():
        perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())  # inf, not an error
        sinks.event(step, "validation", name=name, loss=loss, perplexity=perplexity)


def _end_diverged(found: NonFinite, checkpointer: Checkpointer, sinks: MetricSinks) -> NoReturn:
    """Finish the save in flight, which is of a state from before, and raise Diverged."""
    _tell_saved(checkpointer.wait(), checkpointer, sinks)
    fields = dataclasses.asdict(found)
    sinks.event(fields.pop("step"), "diverged", **fields)
    raise found.error()


def _keep(
    state: TrainState,
    checkpointer: Checkpointer,
    writing: bool,
    due: bool,
    last: bool,
    stopping: bool,
    sinks: MetricSinks,
) -> None:
    """Save if it is due, and tell what became of the save before; the same on every rank."""
    if due or not writing:  # at most one in flight
        _tell_saved(checkpointer.wait(), checkpointer, sinks)
    if not due:
        return
    checkpointer.save(
        state.step,
        state.model,
        state.optimizer,
        progress=state.progress(),
        final=last,
        before_commit=sinks.sync,  # a checkpoint must not survive a power cut that its metrics do not
    )
    if last or stopping or checkpointer.blocking:
        saved = checkpointer.wait()
        _tell_saved(saved, checkpointer, sinks)
        if (last or stopping) and saved and saved.problem:
            raise CheckpointError(saved.problem).mark_on_all_ranks()


def _tell_skipped(state: TrainState, sinks: MetricSinks) -> None:
    assert state.loss_scale is not None
    fields = {"reason": "gradients overflow float16", "loss_scale": state.loss_scale.value}
    sinks.event(state.step, "step_skipped", **fields)


def _tell_saved(saved: SaveResult | None, checkpointer: Checkpointer, sinks: MetricSinks) -> None:
    if saved is None:
        return
    fields = {"path": str(saved.place), "seconds": saved.seconds}
    fields["blocked_seconds"] = saved.blocked_seconds
    if not saved.problem:
        sinks.event(saved.step, "checkpoint_saved", **fields)
        return
    fields |= {"problem": saved.problem, "failures": checkpointer.failures}
    sinks.event(saved.step, "checkpoint_failed", **fields)


def _record(
    state: TrainState, lr: float, result: StepResult, measured: dict[str, Any]
) -> dict[str, Any]:
    return {
        "step": state.step,
        "loss": result.loss.item(),
        "z_loss": result.z_loss.item() or None,  # none at all where loss.z_loss = 0
        "grad_norm": result.grad_norm.item(),
        "lr": lr,
        "tokens": state.tokens,
        "samples": state.position,
        "loss_scale": None if state.loss_scale is None else state.loss_scale.value,
        **measured,
    }
