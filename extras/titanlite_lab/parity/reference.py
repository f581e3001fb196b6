"""The reference of a bundle: a few steps of the plain model in fp32 with SGD, on one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.errors import ConfigError
from titanlite.job import Job
from titanlite.job.data import open_job_stream, open_job_tokenizer
from titanlite.kernels.backend import set_attention_kernel
from titanlite.kernels.documents import document_positions
from titanlite.labels import IGNORE_INDEX
from titanlite.parallelize.weight_init import init_weights

DATA_SEED = 1234  # of the random tokens of a job without data
ONE_ULP = 2.0**-23  # of an fp32 number, relative


@dataclass(frozen=True)
class ParitySettings:
    """How much of a job a bundle has."""

    steps: int = 3
    sequences: int = 4  # of a batch
    learning_rate: float = 0.1  # of SGD without momentum and weight decay


@dataclass(frozen=True)
class TokenBatch:
    """What one step reads: [B, T] each, int64."""

    tokens: Tensor
    labels: Tensor  # labels[t] follows tokens[t]; IGNORE_INDEX: not trained on
    positions: Tensor  # from the start of the sequence, or with a document mask of the document

    def rows(self, index: Tensor) -> TokenBatch:
        return TokenBatch(self.tokens[index], self.labels[index], self.positions[index])


@dataclass(frozen=True)
class StepTrace:
    """What one step computes; tensors by titanlite's names."""

    step: int
    loss: float
    grad_norm: float
    gradients: dict[str, Tensor]
    updates: dict[str, Tensor]  # what is added to each parameter
    order: list[str]  # the names, as backward completes their gradients


@dataclass(frozen=True)
class Repetition:
    """Another order of the same sums, or the same computation of weights that differ by rounding.

    In exact arithmetic, the first two would change nothing.
    """

    name: str
    rows: Callable[[int], Tensor] = (
        torch.arange
    )  # sequences -> the order in which they are computed
    microbatch: int = 0  # sequences whose gradients are computed together; 0: all
    perturb: bool = False  # multiply each initial weight by 1 + ULP or 1 - ULP


REFERENCE = Repetition("reference")
REPETITIONS = (
    Repetition("micro-batches of one sequence", microbatch=1),
    Repetition("sequences in reverse order", lambda count: torch.arange(count).flip(0)),
    Repetition("weights that differ by a rounding unit", perturb=True),
)


def read_batches(job: Job, settings: ParitySettings) -> tuple[list[TokenBatch], str]:
    """The batches of all steps, and a sentence about where they are from; raises UserError."""
    seq_len, count = job.config.training.seq_len, settings.sequences
    masked = job.transforms.document_mask
    if not job.config.data.sources:
        if masked:
            raise ConfigError(
                'attention.mask = "document": needs the documents of data.sources, which is empty.',
                fix="Set data.sources, or attention.mask.",
            )
        generator = torch.Generator().manual_seed(DATA_SEED)
        shape = (settings.steps, count, seq_len + 1)
        ids = torch.randint(job.sizes.vocab_size, shape, generator=generator)
        batches = [_batch_of(step[:, :-1], step[:, 1:], None) for step in ids]
        return batches, f"random tokens, torch.Generator().manual_seed({DATA_SEED})"
    tokenizer = open_job_tokenizer(job.config)
    stream = open_job_stream(job.config, job.sizes.vocab_size, tokenizer)
    end = stream.document_end_id if masked else None
    starts = range(0, settings.steps * count, count)
    batches = [_batch_of(*stream.read(start, count), end) for start in starts]
    return batches, f"the job's data, positions 0 to {settings.steps * count - 1}"


def _batch_of(tokens: Tensor, labels: Tensor, document_end: int | None) -> TokenBatch:
    if document_end is None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    else:
        positions = document_positions(tokens, document_end, labels)
    labels = labels.where(labels >= 0, IGNORE_INDEX)  # other negative labels mark documents
    return TokenBatch(*(t.contiguous() for t in (tokens, labels, positions)))


def build_initial_model(job: Job, perturb: bool = False) -> nn.Module:
    """The plain model in fp32 with the initial weights of the job's seed."""
    model = job.spec.build(job.sizes)
    seed, transforms = job.config.debug.seed, job.transforms
    init_weights(model, job.spec, job.sizes, seed, job.widths, transforms.like_torchtitan)
    if transforms.document_mask:
        set_attention_kernel(model, job.spec.attention_pattern, None, True)
    if perturb:
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in model.parameters():
                signs = torch.randint(0, 2, parameter.shape, generator=generator)
                parameter.mul_(1 + ONE_ULP * (2 * signs - 1).to(parameter.dtype))
    return model


def run_steps(
    model: nn.Module, batches: Sequence[TokenBatch], learning_rate: float, how: Repetition
) -> Iterator[StepTrace]:
    """Train `model` with SGD, and yield each step after its update."""
    named = dict(model.named_parameters())  # of tied parameters, the first name
    name_of: dict[Tensor, str] = {parameter: name for name, parameter in named.items()}
    order: dict[str, None] = {}

    def record_order(parameter: Tensor) -> None:
        order[name_of[parameter]] = None  # a second micro-batch changes no position

    for parameter in named.values():
        parameter.register_post_accumulate_grad_hook(record_order)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
    for step, batch in enumerate(batches, 1):
        order.clear()
        loss = _forward_backward(model, batch.rows(how.rows(len(batch.tokens))), how.microbatch)
        gradients = {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in named.items()
        }
        norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients.values()]
        before = {name: parameter.detach().clone() for name, parameter in named.items()}
        optimizer.step()
        optimizer.zero_grad()
        updates = {name: named[name].detach() - old for name, old in before.items()}
        rest = [name for name in named if name not in order]
        yield StepTrace(
            step,
            loss,
            torch.stack(norms).norm().item(),
            gradients,
            updates,
            [*order, *rest],
        )


def _forward_backward(model: nn.Module, batch: TokenBatch, microbatch: int) -> float:
    """Add the gradients of the mean loss over the valid labels; returns that loss."""
    valid, total = int((batch.labels >= 0).sum()), 0.0
    for rows in torch.arange(len(batch.tokens)).split(microbatch or len(batch.tokens)):
        part = batch.rows(rows)
        loss = model(part.tokens, part.positions, labels=part.labels) / max(1, valid)
        loss.backward()
        total += loss.item()
    return total
