"""Validation loss: every token of the held-out text once, weighed alike, under every layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Protocol

import torch
from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.labels import IGNORE_INDEX
from titanlite.models import valid_tokens
from titanlite.settings import Positive, Range
from titanlite.training.engine import Engine, SetPhase, ignore_phase


@dataclass(frozen=True)
class ValidationConfig:
    """[validation] How often, and on how much of [data] validation."""

    enable: bool = False  # measure the loss on held-out text while training
    local_batch_size: Positive = 8  # sequences a rank runs at once
    seq_len: Positive = 2048  # tokens of a sequence
    freq: Positive = 10  # steps between two validations; the last step is always one
    steps: Annotated[int, Range(1, also=(-1,))] = -1
    # at most this many times training.global_batch_size sequences; -1: all there are


class ValidationData(Protocol):
    """Held-out text as a finite list of samples."""

    name: str
    samples: int

    def read(self, start: int, rows: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels [rows, T]; past the end, labels that are not learned from."""


def validate(
    engine: Engine,
    text: ValidationData,
    samples: int,
    rows: int,
    mesh: Mesh,
    device: torch.device,
    now: SetPhase = ignore_phase,
) -> float:
    """Mean loss in nats over the labels of the first `samples` samples, `rows` a rank at once.

    `now` is told with each batch that it goes on.
    """
    loss = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros_like(loss)
    for start in range(0, samples, rows * mesh.batch.size()):  # as many forwards on every rank
        now("validate")
        first = start + mesh.batch_rank * rows
        inputs, labels = text.read(first, rows)
        labels[max(0, samples - first) :] = IGNORE_INDEX  # past what was asked for
        inputs, labels = inputs.to(device), labels.to(device)
        loss += engine.evaluate(inputs, labels)
        count += valid_tokens(labels)
    # Ranks that share these rows each have a part of the loss, but all of the labels.
    summed, counted = all_reduce_sum(mesh.loss, loss), all_reduce_sum(mesh.batch, count)
    return (summed / counted.clamp(min=1)).item()


def samples_to_validate(config: ValidationConfig, text: ValidationData, global_batch: int) -> int:
    """How much of a text `config.steps` means, whatever the layout."""
    return text.samples if config.steps == -1 else min(text.samples, config.steps * global_batch)
