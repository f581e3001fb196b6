"""Forward and backward over one batch. An engine is chosen once; nobody else asks which it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from titanlite.distributed.mesh import Mesh, ParallelismConfig
from titanlite.models import IGNORED, cross_entropy_sum
from titanlite.parallelize import SpreadModel, loss_context
from titanlite.parallelize.context import SequenceShare, share_of
from titanlite.parallelize.pipeline import ForwardStage, PipelinePlan, Stage, build_schedule
from titanlite.parallelize.shard import reduce_gradients


Now = Callable[[str], None]


def silent(phase: str) -> None:
    """For who does not follow the phases."""


class Engine(Protocol):
    """What a step needs of whatever runs the model.

    Inputs and labels are whole sequences [rows, T], the same on all ranks that share them; an
    engine takes its part.
    """

    def forward_backward(
        self, inputs: Tensor, labels: Tensor, valid: Tensor, now: Now = silent
    ) -> Tensor:
        """Add the gradients of (summed loss / valid); return this rank's part of that loss.

        `now` is told each phase as it begins.
        """

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """This rank's part of the summed loss, without gradients."""


def build_engine(
    spread: SpreadModel,
    mesh: Mesh,
    section: ParallelismConfig,
    plan: PipelinePlan,
    device: torch.device,
    *,
    local_batch: int,
) -> Engine:
    """The engine for a model as it is spread; `local_batch` sequences are run at once."""
    every = section.fsdp_gradient_reduction == "every_microbatch"
    share, context = share_of(mesh.cp, section), loss_context(mesh, section)
    if mesh.pp.size() == 1:
        return Spmd(spread.model, share, context, local_batch, every, spread.rescale)
    return Pipelined(spread, share, context, plan, mesh, device, every)


class Spmd:
    """Every rank runs the whole model on its rows, one micro-batch after the other."""

    def __init__(
        self,
        model: nn.Module,
        share: SequenceShare,
        loss_context: Callable[[], AbstractContextManager],
        microbatch: int,
        reduce_every_microbatch: bool = True,
        rescale: Callable[[], None] = lambda: None,
    ):
        self.model, self.share, self.loss_context = model, share, loss_context
        self.microbatch, self.reduce_every = microbatch, reduce_every_microbatch
        self.rescale = rescale

    def forward_backward(
        self, inputs: Tensor, labels: Tensor, valid: Tensor, now: Now = silent
    ) -> Tensor:
        """`valid` 0-d: the valid labels of the whole global batch."""
        self.rescale()
        positions = self.share.positions(inputs.shape[1], inputs.device)
        inputs, labels = self.share.of(inputs), self.share.of(labels)
        total = torch.zeros((), device=inputs.device)
        parts = list(zip(inputs.split(self.microbatch), labels.split(self.microbatch), strict=True))
        for number, (x, y) in enumerate(parts):
            reduce_gradients(self.model, self.reduce_every or number == len(parts) - 1)
            now("forward")
            with self.loss_context():
                # Divided here, by the tokens of all ranks, and nowhere else: gradients only add up.
                loss = cross_entropy_sum(self.model(x, positions), y) / valid
                now("backward")
                loss.backward()
            total += _local(loss)
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.rescale()
        positions = self.share.positions(inputs.shape[1], inputs.device)
        with self.loss_context():
            logits = self.model(self.share.of(inputs), positions)
            loss = _local(cross_entropy_sum(logits, self.share.of(labels)))
        _free_gathered([self.model])
        return loss


class Pipelined:
    """Every rank runs its stages, on micro-batches that travel through all of them."""

    def __init__(
        self,
        spread: SpreadModel,
        share: SequenceShare,
        loss_context: Callable[[], AbstractContextManager],
        plan: PipelinePlan,
        mesh: Mesh,
        device: torch.device,
        reduce_every_run: bool = True,
    ):
        self.spread, self.share, self.loss_context = spread, share, loss_context
        self.plan, self.mesh, self.device = plan, mesh, device
        self.reduce_every = reduce_every_run
        self.first, self.last = 0 in spread.parts, len(plan.stages) - 1 in spread.parts
        self._schedules: dict[tuple[type[Stage], int, int], tuple] = {}  # by kind, rows, tokens
        self._valid: Tensor | float = 1.0

    def forward_backward(
        self, inputs: Tensor, labels: Tensor, valid: Tensor, now: Now = silent
    ) -> Tensor:
        """`valid` 0-d: the valid labels of the whole global batch."""
        self.spread.rescale()
        self._valid = valid
        now("forward/backward")  # of different micro-batches, as the schedule has it
        total, rows = torch.zeros((), device=self.device), self.plan.rows
        for start in range(0, len(inputs), rows):
            part = slice(start, start + rows)
            last = start + rows >= len(inputs)
            total += self._run(Stage, self.plan, inputs[part], labels[part], last)
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.spread.rescale()
        self._valid = 1.0
        plan = self.plan.fitting(len(inputs))
        missing = (0, 0, 0, -len(inputs) % plan.rows)  # a schedule runs what it was made for
        inputs, labels = F.pad(inputs, missing), F.pad(labels, missing, value=IGNORED)
        total = torch.zeros((), device=self.device)
        for part in zip(inputs.split(plan.rows), labels.split(plan.rows), strict=True):
            total += self._run(ForwardStage, plan, *part)
        _free_gathered(self.spread.parts.values())
        return total

    def _run(
        self,
        kind: type[Stage],
        plan: PipelinePlan,
        inputs: Tensor,
        labels: Tensor,
        last_run: bool = False,
    ) -> Tensor:
        """One run of the schedule: the loss where the last stage is, and nothing elsewhere."""
        schedule, stages = self._schedule(kind, plan, inputs.shape[1])
        positions = self.share.positions(inputs.shape[1], inputs.device)
        given = [self.share.of(inputs)] if self.first else []
        losses: list[Tensor] = []
        wanted = {"target": self.share.of(labels), "losses": losses} if self.last else {}
        if kind is Stage:
            for stage in stages:
                stage.reduces = self.reduce_every or last_run
        run = schedule.step if kind is Stage else schedule.eval
        with self.loss_context():
            run(
                *given,
                positions=positions.expand(len(inputs), -1),  # torch cuts it up with the rows
                return_outputs=False,
                **wanted,
            )
        return sum(map(_local, losses), torch.zeros((), device=self.device))

    def _schedule(self, kind: type[Stage], plan: PipelinePlan, length: int):
        """The schedule for `plan.rows` sequences of `length` tokens, made when they first come."""
        key = (kind, plan.rows, length)
        if key not in self._schedules:
            tokens = length // self.mesh.cp.size() // self.mesh.tp.size()
            self._schedules[key] = build_schedule(
                kind,
                self.spread.parts,
                plan,
                self.mesh.pp,
                self.device,
                (plan.microbatch, tokens, self.spread.width),
                self.spread.dtype,
                lambda logits, labels: cross_entropy_sum(logits, labels) / self._valid,
            )
        return self._schedules[key]


def _free_gathered(models: Iterable[nn.Module]) -> None:
    """Free the whole weights that a backward would have freed; the next step changes them."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()


def _local(loss: Tensor) -> Tensor:
    loss = loss.detach()
    return loss.full_tensor() if isinstance(loss, DTensor) else loss
