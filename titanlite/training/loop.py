"""The loop: one step after the other, and what is due between them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import torch
from torch import Tensor

from titanlite.distributed.mesh import Mesh
from titanlite.distributed.session import tighten_timeouts
from titanlite.settings import Built, Positive, Range
from titanlite.training.engine import Engine
from titanlite.training.state import TrainState
from titanlite.training.step import take_step


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
    dtype: Annotated[
        Literal["bfloat16", "float32"], Built(("float32",), "Training in pure bfloat16")
    ] = "float32"  # type of the weights, gradients and moments that are kept
    mixed_precision_param: Literal["bfloat16", "float32"] = "bfloat16"
    # type that weights are cast to for computing, in every layout
    mixed_precision_reduce: Literal["float32"] = "float32"  # type gradients are summed in
    gc_freq: Positive = 50  # steps between two garbage collections, on all ranks together
    gc_debug: Annotated[bool, Built((False,), "Debugging garbage")] = False
    # collect at every step, and tell of cycles that hold tensors


class Meter(Protocol):
    """What the loop needs of a clock."""

    def waiting(self) -> AbstractContextManager: ...
    def paused(self) -> AbstractContextManager: ...
    def step_done(self, tokens: int) -> None: ...
    def read(self) -> dict[str, Any]: ...


class Sinks(Protocol):
    """Where the loop tells what happened."""

    def step(self, record: dict[str, Any]) -> None: ...
    def event(self, step: int, name: str, **fields: Any) -> None: ...


@dataclass(frozen=True)
class Between:
    """What is due between two steps: when, and what is then done."""

    log_freq: int
    validate_freq: int  # 0: never
    validate: Callable[[], dict[str, float]]  # loss by name of the text
    save_due: Callable[[int, bool], bool]  # (step, is it the last)
    save: Callable[[], str]  # returns where


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
    train_timeout_seconds: int,
    between: Between,
    meter: Meter,
    sinks: Sinks,
    profiler: Any,
) -> None:
    """Train from where `state` is to `config.steps`."""
    first_step = state.step
    gc.collect()
    gc.disable()  # ranks collecting at different moments stall each other's collectives
    try:
        while state.step < config.steps:
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
            )
            meter.step_done(global_batch * inputs.shape[1])
            with meter.paused():
                if state.step == 1 or state.step % between.log_freq == 0 or _last(state, config):
                    shown = {"loss": result.loss.item(), "grad_norm": result.grad_norm.item()}
                    sinks.step(_record(state, lr, shown, meter.read()))
                _what_is_due(state, config, between, sinks)
                if state.step % config.gc_freq == 0:
                    gc.collect(1)
                if state.step == first_step + 1:
                    tighten_timeouts(train_timeout_seconds)
                profiler.step()  # writing a trace takes a while
    finally:
        gc.enable()


def _what_is_due(
    state: TrainState, config: TrainingConfig, between: Between, sinks: Sinks
) -> None:
    last = _last(state, config)
    if between.validate_freq and (last or state.step % between.validate_freq == 0):
        for name, loss in between.validate().items():
            perplexity = float(torch.tensor(loss, dtype=torch.float64).exp())  # inf, not an error
            sinks.event(state.step, "validation", name=name, loss=loss, perplexity=perplexity)
    if between.save_due(state.step, last):
        sinks.event(state.step, "checkpoint_saved", path=between.save())


def _last(state: TrainState, config: TrainingConfig) -> bool:
    return state.step == config.steps


def _record(
    state: TrainState, lr: float, shown: dict[str, float], measured: dict[str, Any]
) -> dict[str, Any]:
    return {
        "step": state.step,
        **shown,
        "lr": lr,
        "tokens": state.tokens,
        "samples": state.position,
        **measured,
    }
