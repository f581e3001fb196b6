"""Forward and backward of one batch. Only `build_engine` branches on pipeline parallelism."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from titanlite.distributed.mesh import Mesh
from titanlite.kernels.documents import SupportsDocuments
from titanlite.labels import IGNORE_INDEX
from titanlite.models import OutputLayer
from titanlite.parallelize import ParallelLayout, ShardedModel
from titanlite.parallelize.context import build_sequence_shard
from titanlite.parallelize.fsdp import set_gradient_reduction
from titanlite.parallelize.pipeline import (
    EvalStage,
    RankSchedule,
    TrainStage,
    build_rank_schedule,
    connect_pipeline_ranks,
)
from titanlite.parallelize.pipeline_plan import PipelinePlan
from titanlite.training.batch import Batch, RankTokens

SetPhase = Callable[[str], None]


def ignore_phase(phase: str) -> None:
    """Default phase callback; does nothing."""


class Engine(Protocol):
    """Run the model's forward and backward for one optimizer step.

    Inputs and labels are full sequences [B, T], the same on all ranks that split these sequences;
    an engine selects this rank's tokens.
    """

    def prepare(self, inputs: Tensor, labels: Tensor) -> Batch:
        """A batch for `forward_backward`, from tensors in host memory; may run in any thread."""

    def forward_backward(
        self, batch: Batch, valid: Tensor, set_phase: SetPhase = ignore_phase
    ) -> Tensor:
        """Add the gradients of summed loss / `valid`; return this rank's share of that loss.

        `valid` [] is the number of valid labels in the global batch, divided by the loss scale if
        there is one. The result [2] is the cross-entropy and the z-loss, whose sum is the training
        loss. `set_phase` is called with the name of each phase when it begins.
        """

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the summed loss, without gradients; from tensors in host memory."""


def build_engine(
    sharded: ShardedModel,
    layout: ParallelLayout,
    device: torch.device,
    *,
    local_batch: int,
    document_end_id: int | None = None,
) -> Engine:
    """Build the engine for a parallelized model.

    `local_batch`: sequences of a micro-batch without pipeline parallelism. `document_end_id` is
    the last token of every document: positions restart after it. None: positions count from the
    start of the sequence.
    """
    mesh, config = layout.mesh, layout.config
    every_microbatch = config.fsdp_gradient_reduction == "every_microbatch"
    model = next(iter(sharded.stage_modules.values()))
    index_documents = model.index_documents if isinstance(model, SupportsDocuments) else None
    shard = build_sequence_shard(mesh.cp, config)
    tokens = RankTokens(shard, document_end_id, index_documents)
    if mesh.pp.size() == 1:
        return SpmdEngine(sharded, tokens, local_batch, device, every_microbatch)
    return PipelineEngine(sharded, tokens, layout.plan, mesh, device, every_microbatch)


class SpmdEngine:
    """Engine without pipeline parallelism: a rank runs all layers, one micro-batch at a time."""

    def __init__(
        self,
        sharded: ShardedModel,
        tokens: RankTokens,
        microbatch_size: int,
        device: torch.device,
        reduce_every_microbatch: bool = True,
    ):
        assert isinstance(sharded.model, FSDPModule)  # FSDP2 in every layout, one rank included
        self._model, self._tokens, self._device = sharded.model, tokens, device
        self._microbatch_size, self._reduce_every = microbatch_size, reduce_every_microbatch
        self._output, self._update_float8_scales = sharded.output, sharded.update_float8_scales

    def prepare(self, inputs: Tensor, labels: Tensor) -> Batch:
        """See `Engine.prepare`."""
        return self._tokens.prepare(inputs, labels, self._microbatch_size)

    def forward_backward(
        self, batch: Batch, valid: Tensor, set_phase: SetPhase = ignore_phase
    ) -> Tensor:
        """See `Engine.forward_backward`."""
        self._update_float8_scales()
        total = torch.zeros(2, device=self._device)
        microbatches = batch.split(self._microbatch_size)
        for number, microbatch in enumerate(microbatches):
            last = number == len(microbatches) - 1
            set_gradient_reduction(self._model, self._reduce_every or last)
            set_phase("forward")
            # The only division, by the valid labels of the global batch: gradients just add up.
            loss = self._loss_of(microbatch) / valid
            set_phase("backward")
            loss.backward()
            total += _loss_terms(loss, self._output, valid)
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """See `Engine.evaluate`."""
        self._update_float8_scales()
        batch = self._tokens.prepare(inputs, labels, len(inputs))
        loss = self._loss_of(batch.to(self._device))
        reshard([self._model])
        return loss

    def _loss_of(self, microbatch: Batch) -> Tensor:
        """The summed loss of this rank's tokens."""
        select = self._tokens.select
        positions = self._tokens.positions(microbatch.inputs, microbatch.labels)
        options = {"documents": microbatch.documents[0]} if microbatch.documents else {}
        return self._model(
            select(microbatch.inputs), positions, labels=select(microbatch.labels), **options
        )


class PipelineEngine:
    """Engine with pipeline parallelism: every rank runs its stages under torch's schedule."""

    def __init__(
        self,
        sharded: ShardedModel,
        tokens: RankTokens,
        plan: PipelinePlan,
        mesh: Mesh,
        device: torch.device,
        reduce_every_run: bool = True,
    ):
        self._sharded, self._tokens = sharded, tokens
        self._plan, self._mesh, self._device = plan, mesh, device
        self._reduce_every_run = reduce_every_run
        self._has_first_stage = 0 in sharded.stage_modules
        self._has_last_stage = len(plan.stages) - 1 in sharded.stage_modules
        # (stage class, sequences, tokens of a sequence) -> schedule: torch fixes these at build
        self._schedules: dict[tuple[type[TrainStage], int, int], RankSchedule] = {}
        self._valid: Tensor | float = 1.0  # divisor of the loss in the current run
        self._losses: list[Tensor] = []  # [2] of each micro-batch of the current run
        connect_pipeline_ranks(mesh.pp, device)

    def prepare(self, inputs: Tensor, labels: Tensor) -> Batch:
        """See `Engine.prepare`."""
        return self._tokens.prepare(inputs, labels, self._plan.microbatch_size)

    def forward_backward(
        self, batch: Batch, valid: Tensor, set_phase: SetPhase = ignore_phase
    ) -> Tensor:
        """See `Engine.forward_backward`."""
        self._follow_weights()
        self._valid = valid
        runs = batch.split(self._plan.sequences)
        total = torch.zeros(2, device=self._device)
        for number, run in enumerate(runs):
            last = number == len(runs) - 1
            set_phase("forward/backward")  # interleaved by the schedule
            total += self._run(TrainStage, self._plan, run, self._reduce_every_run or last)
        for copy in self._sharded.tied_copies:
            copy.reduce_gradient()  # once a step: the sums of all micro-batches
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """See `Engine.evaluate`."""
        self._follow_weights()
        self._valid = 1.0
        plan = self._plan.for_sequences(len(inputs))
        padding = (0, 0, 0, -len(inputs) % plan.sequences)  # torch fixes the micro-batch count
        inputs, labels = F.pad(inputs, padding), F.pad(labels, padding, value=IGNORE_INDEX)
        total = torch.zeros((), device=self._device)
        batch = self._tokens.prepare(inputs, labels, plan.microbatch_size)
        for run in batch.to(self._device).split(plan.sequences):
            total += self._run(EvalStage, plan, run, reduce=False).sum()
        reshard(self._sharded.stage_modules.values())
        return total

    def _follow_weights(self) -> None:
        """Bring up to date what is derived from the weights, which may have changed."""
        self._sharded.update_float8_scales()
        for copy in self._sharded.tied_copies:
            copy.update()

    def _run(
        self,
        stage_class: type[TrainStage],
        plan: PipelinePlan,
        batch: Batch,
        reduce: bool,
    ) -> Tensor:
        """Run the schedule once; return the loss terms on the last stage, zeros elsewhere."""
        inputs, labels = batch.inputs, batch.labels
        rank_schedule = self._schedule_for(stage_class, plan, inputs.shape[1])
        rank_schedule.enable_gradient_reduction(reduce)
        rank_schedule.use_documents(batch.documents)
        positions = self._tokens.positions(inputs, labels)
        self._losses = []
        arguments: list[Tensor] = []
        targets: dict[str, Any] = {}
        if self._has_first_stage:
            arguments = [self._tokens.select(inputs)]
        if self._has_last_stage:
            labels = self._tokens.select(labels)
            targets = {"labels": labels, "target": labels}
        schedule = rank_schedule.schedule
        run = schedule.step if stage_class is TrainStage else schedule.eval
        run(
            *arguments,
            positions=positions.expand(len(inputs), -1),  # torch splits it with the batch
            return_outputs=False,
            **targets,
        )
        return sum(self._losses, torch.zeros(2, device=self._device))

    def _record_loss(self, loss: Tensor, target: Tensor) -> Tensor:
        """Called by torch as loss function; the last stage already computed the loss in forward."""
        loss = loss / self._valid
        self._losses.append(_loss_terms(loss, self._sharded.output, self._valid))
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
            schedule = self._schedules[key] = build_rank_schedule(
                stage_class,
                self._sharded.stage_modules,
                plan,
                self._mesh.pp,
                self._device,
                hidden,
                self._record_loss,
            )
            schedule.enable_split_backward(self._sharded.splits_backward)
        return self._schedules[key]


def _loss_terms(loss: Tensor, output: OutputLayer | None, valid: Tensor | float) -> Tensor:
    """[cross-entropy, z-loss] of their sum `loss`; z-loss: of the last forward of `output`."""
    assert output is not None and output.z_loss is not None
    z_loss = output.z_loss / valid
    return torch.stack((loss.detach() - z_loss, z_loss))


def reshard(models: Iterable[nn.Module]) -> None:
    """Free the weights that FSDP gathered in forward; without a backward, nothing else does."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
