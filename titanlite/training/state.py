"""The mutable training state: exactly what a checkpoint contains."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from titanlite.optim import LossScale, NoiseScale, OptimizerSet


@dataclass
class Counters:
    """The progress of a run, summed over all ranks."""

    step: int = 0  # optimizer steps taken
    position: int = 0  # samples consumed
    tokens: int = 0  # tokens consumed

    def advance(self, samples: int, tokens: int) -> None:
        """Count one optimizer step."""
        self.step += 1
        self.position += samples
        self.tokens += tokens

    def restore(self, step: int, position: int, tokens: int) -> None:
        """Set the counters to those of a checkpoint."""
        self.step, self.position, self.tokens = step, position, tokens


@dataclass(frozen=True)
class TrainState:
    """Everything that changes during training."""

    model: nn.Module
    optimizer: OptimizerSet
    loss_scale: LossScale | None = None  # with float16 compute only
    counters: Counters = field(default_factory=Counters)
    noise_scale: NoiseScale | None = None  # with metrics.noise_scale_freq only

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        return self.counters.step

    @property
    def position(self) -> int:
        """Samples consumed, over all ranks."""
        return self.counters.position

    def progress(self) -> dict[str, Any]:
        """All state except the tensors of the model and the optimizer, as JSON values."""
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            generators["cuda"] = torch.cuda.get_rng_state()
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        noise = {} if self.noise_scale is None else {"noise_scale": self.noise_scale.state()}
        return {
            **scale,
            **noise,
            "step": self.counters.step,
            "position": self.counters.position,
            "tokens": self.counters.tokens,
            "generators": {name: bytes(s.tolist()).hex() for name, s in generators.items()},
        }

    def restore(self, progress: dict[str, Any]) -> None:
        """Restore the state that `progress` returned when the checkpoint was saved."""
        self.counters.restore(progress["step"], progress["position"], progress["tokens"])
        if self.loss_scale is not None and "loss_scale" in progress:
            self.loss_scale.restore(progress["loss_scale"])
        if self.noise_scale is not None and "noise_scale" in progress:
            self.noise_scale.restore(progress["noise_scale"])
        for name, state in progress["generators"].items():
            generator = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
            if name == "cpu":
                torch.set_rng_state(generator)
            elif torch.cuda.is_initialized():
                torch.cuda.set_rng_state(generator)
