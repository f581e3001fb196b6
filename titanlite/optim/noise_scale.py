"""The gradient noise scale, and the critical batch size that it implies.

B_simple = tr(Sigma) / |G|^2 (https://arxiv.org/abs/1812.06162): Sigma is the covariance of the
gradients of single sequences, G their mean. Training with batches much smaller than B_simple wastes
little data, with batches much larger little time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

DECAY = 0.95  # of the averages, for each measurement


class NoiseEstimate(NamedTuple):
    """Unbiased estimates from one step; noise can make either negative."""

    gradient: float  # |G|^2: square norm of the mean gradient
    noise: float  # tr(Sigma): variance of the gradient of one sequence


def estimate_noise(
    small_square: float, small_batch: float, large_square: float, large_batch: float
) -> NoiseEstimate:
    """Estimates from the square norms of the mean gradients of two batches (appendix A.1).

    The small batch may be a part of the large one; both sizes are in sequences. The variance of a
    mean gradient is proportional to 1 / labels, so a sequence counts by its share of the labels.
    """
    difference = large_batch * large_square - small_batch * small_square
    return NoiseEstimate(
        gradient=difference / (large_batch - small_batch),
        noise=(small_square - large_square) / (1 / small_batch - 1 / large_batch),
    )


@dataclass
class NoiseScale:
    """Separate moving averages of both estimates: an average of their ratios would be biased."""

    decay: float = DECAY
    gradient: float = 0.0
    noise: float = 0.0
    weight: float = 0.0  # of all measurements in the averages, which start at 0

    def update(self, estimate: NoiseEstimate) -> None:
        """Add the estimates of one step."""
        self.gradient = self._average(self.gradient, estimate.gradient)
        self.noise = self._average(self.noise, estimate.noise)
        self.weight = self._average(self.weight, 1.0)

    def _average(self, average: float, value: float) -> float:
        return self.decay * average + (1 - self.decay) * value

    @property
    def mean(self) -> NoiseEstimate:
        """The averages without the bias of their start; after one `update` or more."""
        return NoiseEstimate(self.gradient / self.weight, self.noise / self.weight)

    @property
    def critical_batch(self) -> float | None:
        """B_simple in sequences; None while noise makes an average negative or 0."""
        if self.gradient <= 0 or self.noise <= 0:
            return None
        return self.noise / self.gradient

    def state(self) -> dict[str, Any]:
        """The averages as JSON values."""
        return {"gradient": self.gradient, "noise": self.noise, "weight": self.weight}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Restore the averages that `state` returned; None: those at the start."""
        state = NoiseScale().state() if state is None else state
        self.gradient, self.noise, self.weight = state["gradient"], state["noise"], state["weight"]
