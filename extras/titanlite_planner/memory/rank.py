"""Bytes of a pipeline rank at the peak of a step, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class RankMemory(NamedTuple):
    """Bytes of one pipeline rank's device at the peak of a step."""

    rank: int
    parameters: float  # this rank's shards
    gradients: float  # likewise, as far as they exist at the peak
    optimizer_state: float
    gathered: float  # unsharded parameters, and communication buffers of FSDP
    unsharded_gradients: float  # that are not reduced yet
    activations: float  # of all micro-batches in flight, and temporaries of backward
    logits: float  # and the other tensors of the loss
    received: float  # buffers that pipeline stages receive into
    step_temporaries: float  # of the optimizer's step
    rest_gradients: float  # gradients after backward, which belong to `resting`
    at: str  # the point of the step

    @property
    def resting(self) -> float:
        """Parameters, gradients and optimizer state after backward."""
        return self.parameters + self.rest_gradients + self.optimizer_state

    @property
    def total(self) -> float:
        return (
            self.parameters
            + self.gradients
            + self.optimizer_state
            + self.gathered
            + self.unsharded_gradients
            + self.activations
            + self.logits
            + self.received
            + self.step_temporaries
        )


@dataclass(frozen=True)
class MemoryEstimate:
    """The ranks of a pipeline, and the one that needs most memory."""

    ranks: tuple[RankMemory, ...]

    @property
    def worst(self) -> RankMemory:
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def total(self) -> float:
        """Bytes of the tensors of the worst rank at its peak."""
        return self.worst.total

    @property
    def reason(self) -> str:
        """Why the worst rank needs most."""
        worst = self.worst
        parts = {
            "parameters, gradients and optimizer state": worst.parameters
            + worst.gradients
            + worst.optimizer_state,
            "activations": worst.activations,
            "logits and loss": worst.logits,
            "parameters gathered by FSDP": worst.gathered,
            "gradients that are not reduced yet": worst.unsharded_gradients,
            "pipeline receive buffers": worst.received,
            "temporaries of the optimizer": worst.step_temporaries,
        }
        largest = max(parts, key=lambda name: parts[name])
        return f"pipeline rank {worst.rank}, {worst.at}: most are {largest}"


class StepPoint(NamedTuple):
    """A point of a step that can be its peak, and what is alive then beside what always is."""

    at: str
    gradients: float = 0.0
    gathered: float = 0.0
    unsharded_gradients: float = 0.0
    activations: float = 0.0
    logits: float = 0.0
    received: float = 0.0
    step_temporaries: float = 0.0
