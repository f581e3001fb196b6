"""What a run is at one moment; all of it is saved, and nothing else is needed to go on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from titanlite.optim import LossScale


@dataclass
class TrainState:
    """Everything that changes while training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_scale: LossScale | None = None  # of float16
    step: int = 0  # optimizer steps taken
    position: int = 0  # samples consumed, by all ranks together
    tokens: int = 0  # tokens consumed, by all ranks together

    def progress(self) -> dict[str, Any]:
        """What is not a tensor of the model or optimizer, as JSON."""
        generators = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_initialized():
            generators["cuda"] = torch.cuda.get_rng_state()
        scale = {} if self.loss_scale is None else {"loss_scale": self.loss_scale.state()}
        return {
            **scale,
            "step": self.step,
            "position": self.position,
            "tokens": self.tokens,
            "generators": {name: bytes(s.tolist()).hex() for name, s in generators.items()},
        }

    def restore(self, progress: dict[str, Any]) -> None:
        """Go back to where `progress` was taken."""
        self.step, self.position = progress["step"], progress["position"]
        self.tokens = progress["tokens"]
        if self.loss_scale is not None and "loss_scale" in progress:
            self.loss_scale.restore(progress["loss_scale"])
        for name, state in progress["generators"].items():
            generator = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
            if name == "cpu":
                torch.set_rng_state(generator)
            elif torch.cuda.is_initialized():
                torch.cuda.set_rng_state(generator)
