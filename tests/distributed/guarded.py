"""Runs of the real training loop under a guard, with injected faults, on the ranks of a test."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.oracle import CPU, Layout, Recipe, start_run, tokens
from titanlite.distributed.collectives import AsyncMax, local_shard
from titanlite.errors import UserError
from titanlite.guard.handler import Guard
from titanlite.guard.judge import StepJudge
from titanlite.guard.policy import GuardConfig
from titanlite.job.actions import log_overflows
from titanlite.optim import LossScale
from titanlite.parallelize.float8 import Float8Config
from titanlite.training import periodic
from titanlite.training.batch import Batch
from titanlite.training.loop import train
from titanlite.training.run import Run, StepGuard
from titanlite.training.state import TrainState
from titanlite.training.step import StepSettings

ONE_PROCESS = Layout()
RECIPE = Recipe("AdamW", max_norm=1.0, batch=4, seq_len=32, lr=1e-3)


@dataclass(frozen=True)
class Fault:
    """One bad value on one rank, in the first computation of a step, or in each."""

    position: int  # of the global batch, which the fault follows as bad data would
    kind: str  # gradient, activation or loss
    value: float
    rank: int
    once: bool = False  # not when the step is replayed, as a hardware fault
    name: str = "layers.1.feed_forward.w1"


@dataclass(frozen=True)
class GuardedRun:
    """What to run; the same on all ranks."""

    layout: Layout = ONE_PROCESS
    recipe: Recipe = RECIPE
    guard: GuardConfig | None = None
    faults: tuple[Fault, ...] = ()
    steps: int = 4
    dtype: torch.dtype = torch.float32
    float8: Float8Config = field(default_factory=Float8Config)
    skipped: tuple[int, ...] = ()  # positions that are not in the data
    action_freq: int = 0  # a periodic action that reads the step, every so many steps; 0: none


@dataclass
class GuardedRecord:
    """What one rank saw."""

    digests: list[tuple[int, str, str]] = field(default_factory=list)
    # (completed steps, hash of all state, hash of the state on the device) whenever a batch is read
    events: list[dict[str, Any]] = field(default_factory=list)  # of rank 0
    dumped: list[tuple[int, int, int]] = field(default_factory=list)
    # (step, position, samples) of rank 0
    acted: list[tuple[int, float]] = field(default_factory=list)  # (step, loss) of the action
    final: str = ""  # hash of all state
    position: int = 0
    history: dict[str, Any] = field(default_factory=dict)
    error: str = ""


def run_guarded_cases(cases: list[GuardedRun]) -> list[GuardedRecord]:
    """Several runs one after the other in the same processes."""
    return [run_guarded(case) for case in cases]


def run_guarded(case: GuardedRun) -> GuardedRecord:
    """Train with `titanlite.training.train`; everything around the training is a stand-in."""
    torch.manual_seed(0)
    scale = LossScale(256.0, growth_steps=2000) if case.dtype == torch.float16 else None
    options = {"float8": case.float8} if case.float8.recipe_name else {}
    state, engine, mesh = start_run(case.layout, case.recipe, scale, dtype=case.dtype, **options)
    judge = StepJudge(case.guard, CPU, mesh.tp) if case.guard else None
    parts = {"guard": judge} if judge else {}
    state = TrainState(state.model, state.optimizer, scale, state.counters, parts)
    record, batch_size = GuardedRecord(), case.recipe.batch
    injector = Injector(case.faults, state, batch_size)

    def read(position: int) -> Batch:
        inputs, labels = tokens(position, batch_size, case.recipe.seq_len, case.recipe)
        own = batch_size // mesh.batch.size()
        part = slice(mesh.batch_rank * own, (mesh.batch_rank + 1) * own)
        return engine.prepare(inputs[part], labels[part])

    def open_batches() -> Iterator[Batch]:
        position = state.position // batch_size
        # Positions count the batches that were used, so a run without some batches skips them.
        used = [p for p in range(2 * case.steps) if p not in case.skipped]
        for index in used[position:]:
            record.digests.append((state.step, digest(state), digest(state, on_device=True)))
            yield read(index)

    def event(step: int, name: str, /, **fields: Any) -> None:
        record.events.append({"event": name, "step": step, **fields})

    def dump_batch(step: int, position: int, samples: int) -> str:
        record.dumped.append((step, position, samples))
        return "a file"

    sinks = SimpleNamespace(event=event, step=lambda record: None)
    no_saves = SimpleNamespace(
        save_seconds=0.0,
        writing=False,
        memory=None,
        steps=lambda: [3],
        wait=lambda: None,
        failures=0,
        group=None,
    )
    throughput = SimpleNamespace(
        waiting=nullcontext, paused=nullcontext, step_done=lambda tokens: None
    )
    act = periodic.PeriodicAction(
        "act",
        lambda info: bool(case.action_freq) and info.step % case.action_freq == 0,
        lambda info: record.acted.append((info.step, info.result.loss.item())),
        needs_accepted=True,
    )
    run = Run(
        training=SimpleNamespace(steps=case.steps),  # type: ignore[arg-type]
        device=CPU,
        state=state,
        engine=injector.around(engine),
        open_batches=open_batches,
        step_settings=StepSettings(
            mesh, case.recipe.max_norm, judge=judge.judge if judge else None
        ),
        guard=StepGuard(),
        actions=(log_overflows(state, sinks), act),  # type: ignore[arg-type]
        checkpointer=no_saves,  # type: ignore[arg-type]
        throughput=throughput,  # type: ignore[arg-type]
        sinks=sinks,  # type: ignore[arg-type]
        watchdog=SimpleNamespace(set_phase=lambda step, phase: None),  # type: ignore[arg-type]
        stop_request=SimpleNamespace(reason=lambda seconds: 0, limit_seconds=None),  # type: ignore[arg-type]
        lost_folder=lambda: "",
        max_over_ranks=AsyncMax(),
    )
    # no policy here rolls back
    guard = Guard(run, judge, None, dump_batch, compiles_layers=False)  # type: ignore[arg-type]
    try:
        train(replace(run, guard=guard))
    except UserError as error:
        record.error = f"{error.code}: {error}"
    record.final, record.position = digest(state), state.position
    record.history = asdict(judge.history) if judge else {}
    return record


class Injector:
    """Writes the bad values of faults, by hooks on the model and around the engine."""

    def __init__(self, faults: tuple[Fault, ...], state: TrainState, batch_size: int):
        self._state, self._batch_size = state, batch_size
        self._own = [fault for fault in faults if fault.rank == dist.get_rank()]
        self._done: set[Fault] = set()  # those that came once
        self._active: list[Fault] = []
        self._parameters = dict(state.model.named_parameters())
        modules = dict(state.model.named_modules())
        for fault in self._own:
            if fault.kind == "gradient":
                parameter = self._parameters[f"{fault.name}.weight"]
                parameter.register_post_accumulate_grad_hook(self._hook_gradient(fault))
            if fault.kind == "activation":
                modules[fault.name].register_forward_hook(self._hook_output(fault))
        state.model.register_forward_hook(draw_random_number)

    def around(self, engine):
        """The engine, with faults in the steps that they are due in."""

        def forward_backward(batch, valid, set_phase):
            position = self._state.position // self._batch_size
            self._active = [f for f in self._own if f.position == position and f not in self._done]
            self._done |= {fault for fault in self._active if fault.once}
            losses = engine.forward_backward(batch, valid, set_phase)
            for fault in self._active:
                if fault.kind == "loss":
                    losses[0] = fault.value
                if fault.kind == "gradient":  # sums of micro-batches become gradients at the end
                    self._write_gradient(fault)
            return losses

        return SimpleNamespace(forward_backward=forward_backward)

    def _hook_gradient(self, fault: Fault):
        def write(parameter) -> None:
            if fault in self._active and parameter.grad is not None:
                self._write_gradient(fault)

        return write

    def _write_gradient(self, fault: Fault) -> None:
        grad = self._parameters[f"{fault.name}.weight"].grad
        local_shard(grad).flatten()[0] = fault.value

    def _hook_output(self, fault: Fault):
        def write(_module, _inputs, output: Tensor) -> Tensor | None:
            if fault not in self._active:
                return None
            bad = output.clone()
            local_shard(bad.detach()).view(-1)[0] = fault.value
            return bad

        return write


def draw_random_number(*_: object) -> None:
    """Let a model draw random numbers, as dropout would."""
    torch.rand(())


def digest(state: TrainState, on_device: bool = False) -> str:
    """Hash of the bits of this rank's weights and moments, and of generators and loss scale."""
    content = hashlib.sha256()

    def add(tensor: Tensor) -> None:
        local = local_shard(tensor.detach()).contiguous()
        content.update(local.flatten().view(torch.uint8).numpy().tobytes())

    for parameter in state.model.parameters():
        add(parameter)
        for value in state.optimizer.state[parameter].values():
            add(value)
    if not on_device:
        add(torch.get_rng_state())
        content.update(str(state.loss_scale and state.loss_scale.state()).encode())
    return content.hexdigest()[:12]
