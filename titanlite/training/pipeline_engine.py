"""The engine under pipeline parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.errors import UserError
from titanlite.labels import IGNORE_INDEX
from titanlite.parallelize import ShardedModel
from titanlite.parallelize.fsdp import GradientSums
from titanlite.parallelize.pipeline import EvalStage, RankSchedule, TrainStage, build_rank_schedule
from titanlite.parallelize.pipeline_plan import PipelinePlan
from titanlite.training.batch import Batch, TokenSelector
from titanlite.training.spmd_engine import (
    SetPhase,
    ignore_phase,
    loss_terms,
    place_token_losses,
    reshard,
)


class PipelineEngine:
    """Engine with pipeline parallelism: every rank runs its stages under torch's schedule."""

    def __init__(
        self,
        sharded: ShardedModel,
        tokens: TokenSelector,
        plan: PipelinePlan,
        mesh: Mesh,
        device: torch.device,
        reduce_every_run: bool,
    ):
        self._sharded, self._tokens = sharded, tokens
        self._plan, self._mesh, self._device = plan, mesh, device
        self._reduce_every_run = reduce_every_run
        self._sums = GradientSums(sharded.stage_modules.values())
        self._has_first_stage = 0 in sharded.stage_modules
        self._has_last_stage = len(plan.stages) - 1 in sharded.stage_modules
        # (stage class, sequences, tokens of a sequence) -> schedule: torch fixes these at build
        self._schedules: dict[tuple[type[TrainStage], int, int], RankSchedule] = {}
        self._divisor: Tensor | float = 1.0  # divisor of the loss in the current run
        self._losses: list[Tensor] = []  # terms of each micro-batch of the current run
        self._token_losses: Tensor | None = None  # where those of the current run are written
        # NCCL creates the communicator of all pipeline ranks in their first collective. Without
        # this one, that would be the first batch of sends and receives, in the middle of 1F1B:
        # given shapes, torch 2.13 and 2.14 connect only pairs before (TODO in their `_warmup_p2p`).
        all_reduce_sum(mesh.pp, torch.zeros(1, device=device))

    def prepare(self, inputs: Tensor, labels: Tensor) -> Batch:
        return self._tokens.prepare(inputs, labels, self._plan.microbatch_size)

    def forward_backward(
        self, batch: Batch, divisor: Tensor, set_phase: SetPhase = ignore_phase
    ) -> Tensor:
        self._follow_weights()
        self._divisor = divisor
        runs = batch.split(self._plan.sequences)
        total = torch.zeros(2 + 2 * self._tokens.prediction_layers, device=self._device)
        for number, run in enumerate(runs):
            last = number == len(runs) - 1
            set_phase("forward/backward")  # interleaved by the schedule
            total += self._run(TrainStage, self._plan, run, self._reduce_every_run or last)
        self._sums.finish()
        for copy in self._sharded.tied_copies:
            copy.reduce_gradient()  # once a step: the sums of all micro-batches
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        self._follow_weights()
        self._divisor = 1.0
        plan = self._plan.for_sequences(len(inputs))
        padding = (0, 0, 0, -len(inputs) % plan.sequences)  # torch fixes the micro-batch count
        inputs, labels = F.pad(inputs, padding), F.pad(labels, padding, value=IGNORE_INDEX)
        total = torch.zeros((), device=self._device)
        batch = self._tokens.prepare(inputs, labels, plan.microbatch_size)
        for run in batch.to(self._device).split(plan.sequences):
            total += self._run(EvalStage, plan, run, reduce=False).sum()
        reshard(self._sharded.stage_modules.values())
        return total

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        self._follow_weights()
        self._divisor = 1.0
        losses = torch.zeros(batch.labels.shape, device=self._device)
        runs = batch.split(self._plan.sequences)
        for run, part in zip(runs, losses.split(self._plan.sequences), strict=True):
            self._token_losses = part
            self._run(EvalStage, self._plan, run, reduce=False)
        self._token_losses = None
        reshard(self._sharded.stage_modules.values())
        return all_reduce_sum(self._mesh.pp, all_reduce_sum(self._mesh.cp, losses))

    def _follow_weights(self) -> None:
        """Bring up to date what is derived from the weights, which may have changed."""
        self._sharded.update_float8_scales()
        for copy in self._sharded.tied_copies:
            copy.update()

    def _run(
        self, stage_class: type[TrainStage], plan: PipelinePlan, batch: Batch, reduce: bool
    ) -> Tensor:
        """Run the schedule once; return the loss terms on the last stage, zeros elsewhere."""
        inputs, labels = batch.inputs, batch.labels
        trains = stage_class is TrainStage
        ahead = self._tokens.look_ahead(batch) if trains else {}
        rank_schedule = self._schedule_for(stage_class, plan, inputs.shape[1])
        counted = [part.counted for part in batch.split(plan.microbatch_size)] if batch.own else []
        for stage in rank_schedule.stages:
            stage.count_only(counted)
            stage.prepare_run(self._sums, reduce, self._sharded.splits_backward, batch.documents)
        positions = self._tokens.positions(inputs, labels)
        self._losses = []
        arguments: list[Tensor] = []
        targets: dict[str, Any] = {}
        if self._has_first_stage:
            arguments = [self._tokens.select(inputs)]
        if self._has_last_stage:
            rows = torch.arange(len(labels), device=labels.device)
            targets = {**self._tokens.select_targets(batch), "target": rows, **ahead}
        schedule = rank_schedule.schedule
        run = schedule.step if trains else schedule.eval
        cause: BaseException | None = None
        try:
            run(
                *arguments,
                positions=positions.expand(len(inputs), -1),  # torch splits it with the batch
                return_outputs=False,
                **targets,
            )
        except RuntimeError as error:  # torch's, from that of a stage
            cause = error.__cause__
            if not isinstance(cause, UserError):
                raise
        if cause is not None:  # raised in the block, each of the two would be a cause of the other
            raise cause
        terms = 2 + 2 * self._tokens.prediction_layers if trains else 2
        return sum(self._losses, torch.zeros(terms, device=self._device))

    def _record_loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """Called by torch as loss function; the last stage already computed the loss in forward.

        `target`: the numbers of the micro-batch's sequences in the run.
        """
        if self._token_losses is not None:
            part = self._token_losses[target]  # a copy
            place_token_losses(self._sharded.output, part, self._tokens)
            self._token_losses[target] = part
        loss = loss / self._divisor
        self._losses.append(loss_terms(self._sharded.output, self._divisor))
        return loss

    def _schedule_for(
        self, stage_class: type[TrainStage], plan: PipelinePlan, length: int
    ) -> RankSchedule:
        """The schedule for `plan.sequences` sequences of `length` tokens; built on first use."""
        key = (stage_class, plan.sequences, length)
        if key not in self._schedules:
            tokens = length // self._mesh.cp.size() // self._mesh.tp.size()
            hidden = torch.empty(
                (plan.microbatch_size, tokens, self._sharded.dim),
                dtype=self._sharded.compute_dtype,
                device="meta",
                requires_grad=True,
            )
            self._schedules[key] = build_rank_schedule(
                stage_class,
                self._sharded.stage_modules,
                plan,
                self._mesh.pp,
                self._device,
                hidden,
                self._record_loss,
            )
        return self._schedules[key]
