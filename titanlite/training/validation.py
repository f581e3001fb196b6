"""Validation: loss and bits per byte of a validation set, the same in every layout."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from titanlite.data import ValidationSet
from titanlite.distributed.collectives import all_reduce_sum, run_on_rank_0
from titanlite.distributed.mesh import Mesh
from titanlite.labels import IGNORE_INDEX
from titanlite.metrics import MetricSinks
from titanlite.models import valid_tokens
from titanlite.settings import Positive, Range
from titanlite.training.engine import Engine
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.spmd_engine import SetPhase, ignore_phase


@dataclass(frozen=True)
class ValidationConfig:
    """[validation] When to validate, and on how many samples of the sets in [data] validation."""

    enable: bool = False  # measure the validation loss while training
    local_batch_size: Positive = 8  # sequences of one forward pass of a rank
    seq_len: Positive = 2048  # tokens of a sequence
    freq: Positive = 10  # steps between two validations; also after the last step
    steps: Annotated[int, Range(1, also=(-1,))] = -1
    # maximum validation batches, each of training.global_batch_size sequences; -1: the whole set


@dataclass(frozen=True)
class ValidationResult:
    """What was measured on a validation set."""

    loss: float  # nats per token: the mean over the valid tokens
    bits_per_byte: float | None  # None: the tokenizer is not known, or the text is empty

    @property
    def perplexity(self) -> float:
        """exp(loss); may be inf."""
        return float(torch.tensor(self.loss, dtype=torch.float64).exp())


def validate(
    engine: Engine,
    data: ValidationSet,
    samples: int,
    local_batch_size: int,
    mesh: Mesh,
    device: torch.device,
    set_phase: SetPhase = ignore_phase,
) -> ValidationResult:
    """Measure the first `samples` samples of a set.

    `local_batch_size`: of a forward pass. Calls `set_phase` before each forward pass.
    """
    loss = torch.zeros((), dtype=torch.float64, device=device)
    counts = torch.zeros(2, dtype=torch.float64, device=device)  # valid tokens, bytes of their text
    global_batch = local_batch_size * mesh.batch.size()
    for start in range(0, samples, global_batch):  # the same number of forward passes on every rank
        set_phase("validate")
        first = start + mesh.batch_rank * local_batch_size
        inputs, labels = data.read(first, local_batch_size)
        labels[max(0, samples - first) :] = IGNORE_INDEX  # samples past the requested number
        loss += engine.evaluate(inputs, labels)
        text_bytes = _count_bytes(labels, data.token_bytes)
        counts += torch.stack((valid_tokens(labels), text_bytes)).to(device)
    # Context- and pipeline-parallel ranks have partial sums of the loss, but all labels.
    total = all_reduce_sum(mesh.loss, loss).item()
    tokens, text_bytes = all_reduce_sum(mesh.batch, counts).tolist()
    bits_per_byte = total / math.log(2) / text_bytes if text_bytes else None
    return ValidationResult(total / max(tokens, 1), bits_per_byte)


def _count_bytes(labels: Tensor, token_bytes: Tensor | None) -> Tensor:
    """Bytes of the text of the valid labels (>= 0, see labels.py), 0-d int64; 0: not known."""
    if token_bytes is None:
        return torch.zeros((), dtype=torch.int64)
    return token_bytes[labels[labels >= 0]].sum()


def validation_samples(config: ValidationConfig, data: ValidationSet, global_batch: int) -> int:
    """Number of samples to validate on; depends on the layout only if `global_batch` does."""
    return data.samples if config.steps == -1 else min(data.samples, config.steps * global_batch)


# (event, name of the validation set) -> result
ValidationResults = dict[tuple[str, str], ValidationResult]


def run_validation(
    validate_all: Callable[[int], ValidationResults], sinks: MetricSinks, freq: int, last_step: int
) -> PeriodicAction:
    """Validate every `freq` steps and after the last step.

    `validate_all(step)` returns the result of each validation set. A run that stops early does not
    validate: the next start does it, for the step that it starts from, if metrics.jsonl has no
    result of that step.
    """

    def measure(step: int) -> None:
        for (event, name), result in validate_all(step).items():
            sinks.event(
                step,
                event,
                name=name,
                loss=result.loss,
                perplexity=result.perplexity,
                bits_per_byte=result.bits_per_byte,
            )

    def is_due(info: StepInfo) -> bool:
        return info.is_last or (not info.stop_reason and info.step % freq == 0)

    def catch_up(step: int) -> None:
        needed = step == last_step or (step > 0 and step % freq == 0)
        if needed and not run_on_rank_0(lambda: sinks.has_event(step, "validation")):
            measure(step)

    return PeriodicAction(
        "validate", is_due, lambda info: measure(info.step), needs_finite=True, start=catch_up
    )
