"""What is alive while operations allocate and free tensors, and the most of it."""

from __future__ import annotations


class AllocationTape:
    """Bytes of activations and of weight gradients, relative to the start, and their peak."""

    def __init__(self) -> None:
        self.activations = self.gradients = 0.0
        self.peak = (0.0, 0.0)  # (activations, gradients) when their sum was the largest

    def add(self, *sizes: float) -> None:
        """Allocate activations."""
        self.activations += sum(sizes)
        self._mark()

    def add_gradient(self, size: float) -> None:
        """Allocate the gradient of a weight."""
        self.gradients += size
        self._mark()

    def free_gradient(self, size: float) -> None:
        """Free the gradient of a weight."""
        self.gradients -= size

    def free(self, *sizes: float) -> None:
        """Free activations."""
        self.activations -= sum(sizes)

    def use(self, *sizes: float) -> None:
        """Allocate temporaries of one operation, and free them."""
        self.add(*sizes)
        self.free(*sizes)

    def _mark(self) -> None:
        if self.activations + self.gradients > sum(self.peak):
            self.peak = (self.activations, self.gradients)
