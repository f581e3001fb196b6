"""Validation loss: the mean over the tokens of a validation set, the same in every layout."""

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
    """[validation] When to validate, and on how many samples of the sets in [data] validation."""

    enable: bool = False  # measure the validation loss while training
    local_batch_size: Positive = 8  # sequences of one forward pass of a rank
    seq_len: Positive = 2048  # tokens of a sequence
    freq: Positive = 10  # steps between two validations; also after the last step
    steps: Annotated[int, Range(1, also=(-1,))] = -1
    # maximum validation batches, each of training.global_batch_size sequences; -1: the whole set


class ValidationData(Protocol):
    """A validation set: a finite list of samples."""

    name: str
    samples: int

    def read(self, start: int, sequences: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels [B, T]; past the end, labels are IGNORE_INDEX."""
        ...


def validate(
    engine: Engine,
    data: ValidationData,
    samples: int,
    sequences: int,
    mesh: Mesh,
    device: torch.device,
    set_phase: SetPhase = ignore_phase,
) -> float:
    """Mean loss, in nats, over the valid tokens of the first `samples` samples.

    `sequences`: per rank and forward pass. Calls `set_phase` before each forward pass.
    """
    loss = torch.zeros((), dtype=torch.float64, device=device)
    count = torch.zeros_like(loss)
    batch = sequences * mesh.batch.size()
    for start in range(0, samples, batch):  # the same number of forward passes on every rank
        set_phase("validate")
        first = start + mesh.batch_rank * sequences
        inputs, labels = data.read(first, sequences)
        labels[max(0, samples - first) :] = IGNORE_INDEX  # samples past the requested number
        loss += engine.evaluate(inputs, labels)
        count += valid_tokens(labels)
    # Context- and pipeline-parallel ranks have partial sums of the loss, but all labels.
    total_loss = all_reduce_sum(mesh.loss, loss)
    total_count = all_reduce_sum(mesh.batch, count)
    return (total_loss / total_count.clamp(min=1)).item()


def validation_samples(config: ValidationConfig, data: ValidationData, global_batch: int) -> int:
    """Number of samples of a set to validate on; does not depend on the layout."""
    return data.samples if config.steps == -1 else min(data.samples, config.steps * global_batch)
