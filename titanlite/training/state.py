"""The training state: everything that changes in a run, and that a checkpoint restores."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from titanlite.data import PositionWindow, next_start, window_lr_factor
from titanlite.optim import LossScale, NoiseScale, OptimizerSet
from titanlite.training.expert_load import ExpertLoad
from titanlite.training.guard import NO_HISTORY, StepJudge
from titanlite.training.rollback import RollbackHistory


@dataclass
class Counters:
    """The progress of a run, the same on all ranks."""

    step: int = 0  # steps, also those without an update because they were skipped
    position: int = 0  # of the next sample in the order of samples
    tokens: int = 0  # tokens consumed
    gaps: tuple[tuple[int, int], ...] = ()
    # [first, end) of positions that a roll-back left out, in order; at most one for each roll-back
    rollbacks: RollbackHistory = field(default_factory=RollbackHistory)

    @property
    def skipped(self) -> int:
        """Number of positions that roll-backs left out."""
        return sum(end - first for first, end in self.gaps)

    @property
    def samples(self) -> int:
        """Samples consumed."""
        return self.position - self.skipped

    @property
    def consumed(self) -> list[tuple[int, int]]:
        """The positions that were consumed, as ranges [first, end)."""
        bounds = [0, *chain.from_iterable(self.gaps), self.position]
        return list(zip(bounds[::2], bounds[1::2], strict=True))

    @property
    def windows(self) -> tuple[PositionWindow, ...]:
        """Positions around causes of roll-backs: left out, or trained at a lower learning rate."""
        return self.rollbacks.windows

    def next_start(self, samples: int) -> int:
        """First position of the next step, which consumes `samples`."""
        return next_start(self.position, samples, self.windows)

    def lr_factor(self, samples: int) -> float:
        """Factor of the learning rate of the next step, which consumes `samples`."""
        return window_lr_factor(self.next_start(samples), samples, self.windows)

    def advance(self, samples: int, tokens: int) -> None:
        """Count one optimizer step."""
        start = self.next_start(samples)
        if start > self.position:
            self.gaps += ((self.position, start),)
        self.step += 1
        self.position = start + samples
        self.tokens += tokens

    def progress(self) -> dict[str, Any]:
        """The counters as JSON values."""
        values: dict[str, Any] = {"step": self.step, "position": self.position}
        values["tokens"] = self.tokens
        if self.rollbacks.tries:
            values |= {"skipped": self.skipped, "rollbacks": self.rollbacks.to_json()}
            values["gaps"] = [list(gap) for gap in self.gaps]
        return values

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore what `progress` returned."""
        self.step, self.position = progress["step"], progress["position"]
        self.tokens = progress["tokens"]
        self.gaps = _read_gaps(progress, self.position)
        self.rollbacks = RollbackHistory.from_json(progress.get("rollbacks", []))

    def record_rollback(self, rollbacks: RollbackHistory) -> None:
        """Replace the history of roll-backs by one with one more entry."""
        self.rollbacks = rollbacks


def _read_gaps(progress: dict[str, Any], position: int) -> tuple[tuple[int, int], ...]:
    """The gaps before `position` in `progress`; raises ValueError or TypeError."""
    skipped = progress.get("skipped", 0)
    gaps = tuple((first, end) for first, end in progress.get("gaps", ()))
    bounds = [0, *chain.from_iterable(gaps), position]
    is_valid = all(type(bound) is int for bound in bounds) and bounds == sorted(bounds)
    if not is_valid or sum(end - first for first, end in gaps) != skipped:
        raise ValueError(
            f"gaps = {gaps!r:.80}: must be ranges in order, before {position}, of"
            f" {skipped!r:.20} positions in all"
        )
    return gaps


@dataclass(frozen=True)
class HostState:
    """The state in host memory before a step; `TrainState.restore_host_state` restores it."""

    counters: Counters
    loss_scale: dict[str, Any]  # empty without one
    generators: dict[str, Tensor]


@dataclass(frozen=True)
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    optimizer: OptimizerSet
    loss_scale: LossScale | None = None  # with float16 compute only
    counters: Counters = field(default_factory=Counters)
    judge: StepJudge | None = None  # None: no guard
    noise_scale: NoiseScale | None = None  # with metrics.noise_scale_freq only
    expert_load: ExpertLoad | None = None  # of a model with experts

    @property
    def step(self) -> int:
        """Steps, also those without an update."""
        return self.counters.step

    @property
    def position(self) -> int:
        """Position of the next sample."""
        return self.counters.position

    def progress(self) -> dict[str, Any]:
        """All state except the tensors of the model and the optimizer, as JSON values.

        A collective if the model has experts.
        """
        generators = _generator_states()
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        guard = {} if self.judge is None else {"guard": self.judge.state()}
        noise = {} if self.noise_scale is None else {"noise_scale": self.noise_scale.state()}
        load = {} if self.expert_load is None else {"expert_load": self.expert_load.state()}
        return {
            **scale,
            **guard,
            **noise,
            **load,
            **self.counters.progress(),
            "generators": {name: bytes(s.tolist()).hex() for name, s in generators.items()},
        }

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore the state that `progress` returned when the checkpoint was saved.

        What the checkpoint lacks, such as a loss scale that was not used then, gets its initial
        value, also in a roll-back. Raises exceptions of any type if `progress` is not valid.
        """
        self.counters.restore(progress)
        if self.loss_scale is not None:
            self.loss_scale.restore(progress.get("loss_scale"))
        if self.judge is not None:
            self.judge.restore(progress.get("guard", NO_HISTORY))
        if self.noise_scale is not None:
            self.noise_scale.restore(progress.get("noise_scale"))
        if self.expert_load is not None:
            self.expert_load.restore(progress.get("expert_load"))
        _set_generator_states(
            {
                name: torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
                for name, state in progress["generators"].items()
            }
        )

    def host_state(self) -> HostState:
        """A copy of what the next step changes in host memory."""
        scale = {} if self.loss_scale is None else self.loss_scale.state()
        return HostState(dataclasses.replace(self.counters), scale, _generator_states())

    def restore_host_state(self, before: HostState) -> None:
        """Take back the steps since `before`, none of which updated a parameter."""
        self.counters.restore(before.counters.progress())
        if self.loss_scale is not None:
            self.loss_scale.restore(before.loss_scale)
        _set_generator_states(before.generators)


def _generator_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _set_generator_states(states: dict[str, Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(states["cuda"])
