"""The mutable training state: exactly what a checkpoint contains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from titanlite.data import next_start
from titanlite.optim import LossScale, OptimizerSet
from titanlite.training.rollback import RollbackHistory


@dataclass
class Counters:
    """The progress of a run, summed over all ranks."""

    step: int = 0  # optimizer steps taken
    position: int = 0  # in the order of samples: the first position that was not consumed
    tokens: int = 0  # tokens consumed
    skipped: int = 0  # positions that were skipped
    rollbacks: RollbackHistory = field(default_factory=RollbackHistory)

    @property
    def samples(self) -> int:
        """Samples consumed."""
        return self.position - self.skipped

    def next_start(self, samples: int) -> int:
        """First position of the next step, which consumes `samples`."""
        return next_start(self.position, samples, self.rollbacks.windows)

    def advance(self, samples: int, tokens: int) -> None:
        """Count one optimizer step."""
        start = self.next_start(samples)
        self.skipped += start - self.position
        self.step += 1
        self.position = start + samples
        self.tokens += tokens

    def restore(self, progress: dict[str, Any]) -> None:
        """Set the counters to those of a checkpoint."""
        self.step, self.position = progress["step"], progress["position"]
        self.tokens = progress["tokens"]
        self.skipped = progress.get("skipped", 0)
        self.rollbacks = RollbackHistory.from_json(progress.get("rollbacks", []))

    def record_rollback(self, rollbacks: RollbackHistory) -> None:
        """Continue with the windows of `rollbacks`, the history with one more try."""
        self.rollbacks = rollbacks


@dataclass(frozen=True)
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    optimizer: OptimizerSet
    loss_scale: LossScale | None = None  # with float16 compute only
    counters: Counters = field(default_factory=Counters)

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.counters.step

    @property
    def position(self) -> int:
        """First position of the order of samples that was not consumed."""
        return self.counters.position

    def progress(self) -> dict[str, Any]:
        """All state except the tensors of the model and the optimizer, as JSON values."""
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            generators["cuda"] = torch.cuda.get_rng_state()
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        counters, rollbacks = self.counters, {}
        if counters.rollbacks.tries:
            rollbacks = {"skipped": counters.skipped, "rollbacks": counters.rollbacks.to_json()}
        return {
            **scale,
            **rollbacks,
            "step": counters.step,
            "position": counters.position,
            "tokens": counters.tokens,
            "generators": {name: bytes(s.tolist()).hex() for name, s in generators.items()},
        }

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore the state that `progress` returned when the checkpoint was saved."""
        self.counters.restore(progress)
        if self.loss_scale is not None and "loss_scale" in progress:
            self.loss_scale.restore(progress["loss_scale"])
        for name, state in progress["generators"].items():
            generator = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
            if name == "cpu":
                torch.set_rng_state(generator)
            elif torch.cuda.is_initialized():
                torch.cuda.set_rng_state(generator)
