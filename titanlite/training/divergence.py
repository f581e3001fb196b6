"""Detect inf or NaN in the loss, a gradient or a parameter, without waiting for the device."""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from titanlite.distributed.collectives import AsyncMax
from titanlite.errors import TrainingDiverged, UserError
from titanlite.optim import shard_norms
from titanlite.training.step import StepResult

MESSAGE_BYTES = 1024  # size of the finding that one rank sends to all
MAX_NAME_LENGTH = 400  # of the parameter name in this message
STEP, LOSS, GRAD_NORM, SHARDS = 0, 1, 2, 3  # indices in a record; SHARDS: the first shard norm


@dataclass(frozen=True)
class NonFinite:
    """The first inf or NaN of a run; the same on all ranks."""

    step: int
    loss: float
    grad_norm: float
    kind: str = "gradient"  # or "weight"
    rank: int | None = None  # lowest rank with such a value in a shard; None: no rank
    parameter: str = ""  # first parameter of that rank with such a value

    def error(self) -> UserError:
        """The error that ends the run on every rank."""
        where = f" Not finite: the {self.kind} of {self.parameter} on rank {self.rank}."
        return TrainingDiverged(
            f"training diverged at step {self.step}: loss {self.loss:g}, gradient norm"
            f" {self.grad_norm:g}.{where if self.parameter else ''}",
            fix="No state was saved since that step. The same command resumes from the newest"
            " checkpoint, or starts from step 0 if there is none. If it diverges again: use a lower"
            " optimizer.lr, more lr_scheduler.warmup_steps, or bfloat16 instead of float16 in"
            " training.mixed_precision_param; or look at the samples of that step.",
        ).mark_on_all_ranks()


class FiniteCheck:
    """Records on the device the first step whose loss or gradient is inf or NaN.

    Each step overwrites the record, unless the record already has an inf or NaN. The host reads a
    flag that is copied asynchronously, so it detects such a step one or a few steps later. Before a
    save, `wait` waits for the device. Ranks agree through an `AsyncMax`.
    """

    def __init__(self, model: nn.Module, device: torch.device):
        self.names = [name for name, _ in model.named_parameters()]
        self.parameters = list(model.parameters())
        self._record = torch.zeros(SHARDS + len(self.names), device=device)
        self._flag: Tensor | None = None  # 0-d bool in pinned memory: is the record finite?
        self._flag_copied: torch.cuda.Event | None = None  # while a copy of the flag is in flight
        self._found, self._kind = False, "gradient"

    def record(self, step: int, result: StepResult) -> None:
        """Record a step; does not wait for the device."""
        device = self._record.device
        shards = result.own_norms.to(device, non_blocking=True)  # on the host under CPU offload
        total = result.grad_norm.to(device, non_blocking=True)
        head = torch.stack((torch.full_like(total, step), result.loss.float(), total))
        latest = torch.cat((head, shards))
        self._record = torch.where(_is_record_finite(self._record), latest, self._record)
        finite = _is_record_finite(self._record)
        if device.type != "cuda":
            self._found = not finite
        elif self._flag_copied is None:
            if self._flag is None:
                self._flag = torch.empty((), dtype=torch.bool, pin_memory=True)
            self._flag.copy_(finite, non_blocking=True)
            self._flag_copied = torch.cuda.Event()
            self._flag_copied.record()

    def poll(self) -> bool:
        """Whether an inf or NaN is known so far; does not wait for the device."""
        if self._flag is not None and self._flag_copied is not None and self._flag_copied.query():
            self._found |= not self._flag
            self._flag_copied = None
        return self._found

    def wait(self, step: int, check_weights: bool) -> bool:
        """Whether a step so far had an inf or NaN, or (`check_weights`) a parameter has one now."""
        self._found = not _is_record_finite(self._record)
        if check_weights and not self._found:
            norms = torch.stack(shard_norms(self.parameters)).to(self._record.device)
            self._found = not norms.isfinite().all()
            if self._found:  # an update can overflow even if its gradient is finite
                self._kind = "weight"
                self._record[STEP], self._record[SHARDS:] = step, norms
        return self._found

    def broadcast_finding(self, max_over_ranks: AsyncMax) -> NonFinite:
        """Return the finding of the lowest rank that has one, on every rank.

        A collective: every rank calls it at the same point, after any rank has found an inf or NaN.
        """
        rank, world_size = dist.get_rank(), dist.get_world_size()
        own = self._own_finding(rank)
        max_over_ranks.start(-rank if own.parameter else -world_size)
        first = -max_over_ranks.wait()[0] % world_size  # rank 0 if no rank names a parameter
        message = json.dumps(dataclasses.asdict(own)) if rank == first else ""
        max_over_ranks.start(*message.encode().ljust(MESSAGE_BYTES, b"\0"))
        return NonFinite(**json.loads(bytes(max_over_ranks.wait()).rstrip(b"\0")))

    def _own_finding(self, rank: int) -> NonFinite:
        step, loss, grad_norm, *norms = self._record.tolist()
        is_bad = [not math.isfinite(norm) for norm in norms]
        finding = NonFinite(int(step), loss, grad_norm, self._kind)
        if not any(is_bad):
            return finding
        name = self.names[is_bad.index(True)][:MAX_NAME_LENGTH]
        return dataclasses.replace(finding, rank=rank, parameter=name)


def _is_record_finite(record: Tensor) -> Tensor:
    """Whether loss and gradient norm are finite; 0-d bool, on the device."""
    return record[LOSS:SHARDS].isfinite().all()
