"""Forward and backward over one batch. An engine is chosen once; nobody else asks which it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlite.models import cross_entropy_sum
from titanlite.parallelize.shard import reduce_gradients


class Engine(Protocol):
    """What a step needs of whatever runs the model."""

    def forward_backward(self, inputs: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """Add the gradients of (summed loss / valid); return this rank's part of that loss."""

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """This rank's summed loss, without gradients."""


class Spmd:
    """Every rank runs the whole model on its rows, one micro-batch after the other."""

    def __init__(
        self,
        model: nn.Module,
        loss_context: Callable[[], AbstractContextManager],
        *,
        microbatch: int,
        reduce_every_microbatch: bool = True,
    ):
        self.model, self.loss_context = model, loss_context
        self.microbatch, self.reduce_every = microbatch, reduce_every_microbatch

    def forward_backward(self, inputs: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
        """`inputs`, `labels` [rows, T]; `valid` 0-d, the valid labels of the whole global batch."""
        total = torch.zeros((), device=inputs.device)
        parts = list(zip(inputs.split(self.microbatch), labels.split(self.microbatch), strict=True))
        for number, (x, y) in enumerate(parts):
            reduce_gradients(self.model, self.reduce_every or number == len(parts) - 1)
            with self.loss_context():
                # Divided here, by the tokens of all ranks, and nowhere else: gradients only add up.
                loss = cross_entropy_sum(self.model(x), y) / valid
                loss.backward()
            total += _local(loss)
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """`inputs`, `labels` [rows, T]."""
        with self.loss_context():
            loss = _local(cross_entropy_sum(self.model(inputs), labels))
        for module in self.model.modules():  # no backward follows that would free them
            if isinstance(module, FSDPModule):
                module.reshard()
        return loss


def _local(loss: Tensor) -> Tensor:
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
