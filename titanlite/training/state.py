"""The training state: everything that changes in a run, and that a checkpoint restores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from titanlite.data import PositionWindow, next_start, window_lr_factor
from titanlite.optim import LossScale, OptimizerSet


@dataclass
class Counters:
    """The progress of a run, the same on all ranks."""

    step: int = 0  # steps, also those without an update because they were skipped
    position: int = 0  # of the next sample in the order of samples
    tokens: int = 0  # tokens consumed
    gaps: tuple[tuple[int, int], ...] = ()
    # [first, end) of positions that a roll-back left out, in order; at most one for each roll-back
    windows: tuple[PositionWindow, ...] = ()
    # positions around causes of roll-backs: left out, or trained at a lower learning rate

    @property
    def samples(self) -> int:
        """Samples consumed."""
        return self.position - sum(end - first for first, end in self.gaps)

    @property
    def consumed(self) -> list[tuple[int, int]]:
        """The positions that were consumed, as ranges [first, end)."""
        bounds = [0, *chain.from_iterable(self.gaps), self.position]
        return list(zip(bounds[::2], bounds[1::2], strict=True))

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
        """The counters as JSON values, without the windows: `SavedRollbacks` restores those."""
        gaps = {"gaps": [list(gap) for gap in self.gaps]} if self.gaps else {}
        return {"step": self.step, "position": self.position, "tokens": self.tokens, **gaps}

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore what `progress` returned; raises ValueError, TypeError or KeyError."""
        self.step, self.position = progress["step"], progress["position"]
        self.tokens = progress["tokens"]
        self.gaps = tuple((first, end) for first, end in progress.get("gaps", ()))
        bounds = [0, *chain.from_iterable(self.gaps), self.position]
        if not all(type(bound) is int for bound in bounds) or bounds != sorted(bounds):
            raise ValueError(
                f"gaps = {self.gaps!r:.80}: must be ranges in order, before {self.position}"
            )

    def set_windows(self, windows: tuple[PositionWindow, ...]) -> None:
        """Replace the windows, after a roll-back or from a checkpoint."""
        self.windows = windows


@dataclass(frozen=True)
class HostState:
    """The state in host memory before a step; `TrainState.restore_host_state` restores it."""

    counters: Counters
    loss_scale: dict[str, Any]  # empty without one
    generators: dict[str, Tensor]


class SavedPart(Protocol):
    """State that a checkpoint keeps beside the tensors of the model and the optimizer."""

    def state(self) -> Any:
        """The state as JSON values; None: nothing to save. May be a collective."""

    def restore(self, state: Any) -> None:
        """Restore what `state` returned, or the start (None); raises an exception if not valid."""


@dataclass(frozen=True)
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    optimizer: OptimizerSet
    loss_scale: LossScale | None = None  # with float16 compute only
    counters: Counters = field(default_factory=Counters)
    parts: Mapping[str, SavedPart] = field(default_factory=dict)  # name in a checkpoint -> part

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

        A collective if a part's `state` is one.
        """
        generators = _generator_states()
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        states = {name: part.state() for name, part in self.parts.items()}
        return {
            **scale,
            **{name: state for name, state in states.items() if state is not None},
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
        for name, part in self.parts.items():
            part.restore(progress.get(name))
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
        """Restore the state in host memory to `before`; the parameters are not restored."""
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
