"""Noticing inf or NaN in the loss, a gradient or a weight without waiting for the device."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.distributed.collectives import AsyncMax
from titanlite.errors import TrainingDiverged
from titanlite.optim import shard_norms
from titanlite.training.step import StepResult

TEXT_BYTES, NAME_LETTERS = 1024, 400  # of what one rank tells all, and of a name in it
STEP, LOSS, GRAD_NORM, SHARDS = 0, 1, 2, 3  # the numbers of a record; shards: up to its end


@dataclass(frozen=True)
class NonFinite:
    """The first inf or NaN of a run, as all ranks know it."""

    step: int
    loss: float
    grad_norm: float
    kind: str = "gradient"  # or weight
    rank: int | None = None  # the first that holds such a value; None: only loss or norm are such
    parameter: str = ""  # the first of that rank that is not finite

    def error(self) -> TrainingDiverged:
        """What ends the run, the same on every rank."""
        where = f" Not finite: the {self.kind} of {self.parameter} on rank {self.rank}."
        return TrainingDiverged(
            f"training diverged at step {self.step}: loss {self.loss:g}, gradient norm"
            f" {self.grad_norm:g}.{where if self.parameter else ''}",
            fix="No state was saved since that step. The same command resumes from the newest"
            " checkpoint, or starts from step 0 if there is none. If it diverges again: use a lower"
            " optimizer.lr, more lr_scheduler.warmup_steps, bfloat16 instead of float16, or look at"
            " the samples of that step.",
        ).mark_on_all_ranks()


class FiniteCheck:
    """Keeps, on the device, what the first step with an inf or NaN showed.

    The record of a step replaces that of the step before, unless that one was not finite: then it
    stays. The host reads a copy that arrives whenever the device gets there, so that a step does
    not wait, and learns of a bad step one or a few steps later. Before anything is saved, `wait`
    waits for the device. Ranks decide together, by a `AsyncMax`.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        self._record = torch.zeros(SHARDS + len(self.names), device=device)
        self._copy: Tensor | None = None  # of whether it is finite, in pinned host memory
        self._arrival: torch.cuda.Event | None = None  # of a copy on its way
        self._found, self._kind = False, "gradient"

    def note(self, step: int, result: StepResult) -> None:
        """Take in a step that was taken; does not wait for the device."""
        device = self._record.device
        own = result.own_norms.to(device, non_blocking=True)  # in host memory under CPU offload
        total = result.grad_norm.to(device, non_blocking=True)
        head = torch.stack((torch.full_like(total, step), result.loss.float(), total))
        self._record = torch.where(_finite(self._record), torch.cat((head, own)), self._record)
        finite = _finite(self._record)
        if device.type != "cuda":
            self._found = not finite
        elif self._arrival is None:
            if self._copy is None:
                self._copy = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._copy.copy_(finite, non_blocking=True)
            self._arrival = torch.cuda.Event()
            self._arrival.record()

    def poll(self) -> bool:
        """Whether anything is known to be inf or NaN by now; does not wait for the device."""
        if self._arrival is not None and self._arrival.query():
            self._found |= not self._copy
            self._arrival = None
        return self._found

    def wait(self, step: int, weights: bool) -> bool:
        """Whether anything is inf or NaN, in any step so far or, if asked, in the weights now."""
        self._found = not _finite(self._record)
        if weights and not self._found:
            norms = torch.stack(shard_norms(self.parameters)).to(self._record.device)
            self._found = not norms.isfinite().all()
            if self._found:  # an update can do that though its gradient is finite
                self._kind = "weight"
                self._record[STEP], self._record[SHARDS:] = step, norms
        return self._found

    def tell_all(self, council: AsyncMax) -> NonFinite:
        """What was found, by all ranks; each calls it at the same point, once any has found it."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        own = self._own_finding(rank)
        council.start(-own.rank if own.parameter else -ranks)
        first = -council.wait()[0] % ranks  # rank 0 where nobody has such a parameter
        text = json.dumps(dataclasses.asdict(own)) if rank == first else ""
        council.start(*text.encode().ljust(TEXT_BYTES, b"\0"))
        return NonFinite(**json.loads(bytes(council.wait()).rstrip(b"\0")))

    def _own_finding(self, rank: int) -> NonFinite:
        record = self._record.tolist()
        step, loss, grad_norm, *norms = record
        bad = [not math.isfinite(norm) for norm in norms]
        found = NonFinite(int(step), loss, grad_norm, self._kind)
        if not any(bad):
            return found
        name = self.names[bad.index(True)][:NAME_LETTERS]
        return dataclasses.replace(found, rank=rank, parameter=name)


def _finite(record: Tensor) -> Tensor:
    """Whether loss and gradient norm are finite, 0-d, still on the device."""
    return record[LOSS:SHARDS].isfinite().all()
