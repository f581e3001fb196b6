"""Forward and backward over one batch. An engine is chosen once; nobody else asks which it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.distributed.mesh import Mesh
from titanlite.kernels.documents import document_positions
from titanlite.labels import IGNORE_INDEX
from titanlite.parallelize import ParallelLayout, ShardedModel
from titanlite.parallelize.context import build_sequence_shard
from titanlite.parallelize.context_tiles import SequenceShard
from titanlite.parallelize.fsdp import set_gradient_reduction
from titanlite.parallelize.pipeline import EvalStage, PipelinePlan, TrainStage, build_schedule

SetPhase = Callable[[str], None]


def ignore_phase(phase: str) -> None:
    """For who does not follow the phases."""


class Engine(Protocol):
    """What a step needs of whatever runs the model.

    Inputs and labels are whole sequences [rows, T], the same on all ranks that share them; an
    engine takes its part.
    """

    def forward_backward(
        self, inputs: Tensor, labels: Tensor, valid: Tensor, now: SetPhase = ignore_phase
    ) -> Tensor:
        """Add the gradients of (summed loss / valid).

        Returns this rank's part of that loss as [2]: cross-entropy and z-loss, whose sum it is.
        `now` is told each phase as it begins.
        """

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """This rank's part of the summed loss, without gradients."""


def build_engine(
    sharded: ShardedModel,
    layout: ParallelLayout,
    device: torch.device,
    *,
    local_batch: int,
    document_end_id: int | None = None,
) -> Engine:
    """The engine for a model as it is spread; `local_batch` sequences are run at once.

    `document_end_id` is the last id of every document, where positions count from the start of each.
    """
    mesh, section, plan = layout.mesh, layout.config, layout.plan
    every = section.fsdp_gradient_reduction == "every_microbatch"
    share = RankSlice(build_sequence_shard(mesh.cp, section), document_end_id)
    if mesh.pp.size() == 1:
        return SpmdEngine(sharded, share, local_batch, every)
    return PipelineEngine(sharded, share, plan, mesh, device, every)


@dataclass(frozen=True)
class RankSlice:
    """Which of the tokens of a batch are this rank's, and where they are."""

    sequence: SequenceShard
    end: int | None = None

    def of(self, batch: Tensor) -> Tensor:
        """The part of `batch` [rows, T] that this rank holds."""
        return self.sequence.select(batch)

    def positions(self, inputs: Tensor) -> Tensor:
        """The positions of this rank's part of whole sequences [rows, T]; [T] where rows agree."""
        if self.end is None:
            return self.sequence.positions(inputs.shape[1], inputs.device)
        return self.sequence.select(document_positions(inputs, self.end))


class SpmdEngine:
    """Every rank runs the whole model on its rows, one micro-batch after the other."""

    def __init__(
        self,
        sharded: ShardedModel,
        share: RankSlice,
        microbatch: int,
        reduce_every_microbatch: bool = True,
    ):
        self.model, self.output, self.share = sharded.model, sharded.output, share
        self.microbatch, self.reduce_every = microbatch, reduce_every_microbatch
        self.update_float8_scales = sharded.update_float8_scales

    def forward_backward(
        self, inputs: Tensor, labels: Tensor, valid: Tensor, now: SetPhase = ignore_phase
    ) -> Tensor:
        """`valid` 0-d: the valid labels of the whole global batch."""
        self.update_float8_scales()
        total = torch.zeros(2, device=inputs.device)
        parts = list(zip(inputs.split(self.microbatch), labels.split(self.microbatch), strict=True))
        for number, (x, y) in enumerate(parts):
            set_gradient_reduction(self.model, self.reduce_every or number == len(parts) - 1)
            now("forward")
            # Divided here, by the tokens of all ranks, and nowhere else: gradients only add up.
            positions = self.share.positions(x)
            loss = self.model(self.share.of(x), positions, labels=self.share.of(y)) / valid
            now("backward")
            loss.backward()
            total += _in_parts(loss, self.output.z_loss / valid)
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.update_float8_scales()
        labels = self.share.of(labels)
        loss = self.model(self.share.of(inputs), self.share.positions(inputs), labels=labels)
        _free_gathered([self.model])
        return loss


class PipelineEngine:
    """Every rank runs its stages, on micro-batches that travel through all of them."""

    def __init__(
        self,
        sharded: ShardedModel,
        share: RankSlice,
        plan: PipelinePlan,
        mesh: Mesh,
        device: torch.device,
        reduce_every_run: bool = True,
    ):
        self.sharded, self.share = sharded, share
        self.plan, self.mesh, self.device = plan, mesh, device
        self.reduce_every = reduce_every_run
        self.first, self.last = (
            0 in sharded.stage_modules,
            len(plan.stages) - 1 in sharded.stage_modules,
        )
        self._schedules: dict[
            tuple[type[TrainStage], int, int], tuple
        ] = {}  # by kind, rows, tokens
        self._valid: Tensor | float = 1.0
        self._losses: list[Tensor] = []  # of the micro-batches of a run, each in parts

    def forward_backward(
        self, inputs: Tensor, labels: Tensor, valid: Tensor, now: SetPhase = ignore_phase
    ) -> Tensor:
        """`valid` 0-d: the valid labels of the whole global batch."""
        self.sharded.update_float8_scales()
        self._valid = valid
        now("forward/backward")  # of different micro-batches, as the schedule has it
        total, rows = torch.zeros(2, device=self.device), self.plan.rows
        for start in range(0, len(inputs), rows):
            part = slice(start, start + rows)
            last = start + rows >= len(inputs)
            total += self._run(TrainStage, self.plan, inputs[part], labels[part], last)
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self.sharded.update_float8_scales()
        self._valid = 1.0
        plan = self.plan.fitting(len(inputs))
        missing = (0, 0, 0, -len(inputs) % plan.rows)  # a schedule runs what it was made for
        inputs, labels = F.pad(inputs, missing), F.pad(labels, missing, value=IGNORE_INDEX)
        total = torch.zeros((), device=self.device)
        for part in zip(inputs.split(plan.rows), labels.split(plan.rows), strict=True):
            total += self._run(EvalStage, plan, *part).sum()
        _free_gathered(self.sharded.stage_modules.values())
        return total

    def _run(
        self,
        kind: type[TrainStage],
        plan: PipelinePlan,
        inputs: Tensor,
        labels: Tensor,
        last_run: bool = False,
    ) -> Tensor:
        """One run of the schedule: the loss in parts where the last stage is, zeros elsewhere."""
        schedule, stages = self._schedule(kind, plan, inputs.shape[1])
        positions = self.share.positions(inputs)
        given = [self.share.of(inputs)] if self.first else []
        self._losses = []
        wanted = {}
        if self.last:
            labels = self.share.of(labels)
            wanted = {"labels": labels, "target": labels}
        if kind is TrainStage:
            for stage in stages:
                stage.reduces = self.reduce_every or last_run
        run = schedule.step if kind is TrainStage else schedule.eval
        run(
            *given,
            positions=positions.expand(len(inputs), -1),  # torch cuts it up with the rows
            return_outputs=False,
            **wanted,
        )
        return sum(self._losses, torch.zeros(2, device=self.device))

    def _loss(self, loss: Tensor, _: Tensor) -> Tensor:
        """Called by torch after each forward of the last stage, which had the labels already."""
        loss = loss / self._valid
        self._losses.append(_in_parts(loss, self.sharded.output.z_loss / self._valid))
        return loss

    def _schedule(self, kind: type[TrainStage], plan: PipelinePlan, length: int):
        """The schedule for `plan.rows` sequences of `length` tokens, made when they first come."""
        key = (kind, plan.rows, length)
        if key not in self._schedules:
            tokens = length // self.mesh.cp.size() // self.mesh.tp.size()
            self._schedules[key] = build_schedule(
                kind,
                self.sharded.stage_modules,
                plan,
                self.mesh.pp,
                self.device,
                (plan.microbatch, tokens, self.sharded.dim),
                self.sharded.compute_dtype,
                self._loss,
            )
        return self._schedules[key]


def _in_parts(loss: Tensor, z_loss: Tensor) -> Tensor:
    """[cross-entropy, z-loss] of their sum."""
    return torch.stack((loss.detach() - z_loss, z_loss))


def _free_gathered(models: Iterable[nn.Module]) -> None:
    """Free the whole weights that a backward would have freed; the next step changes them."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
