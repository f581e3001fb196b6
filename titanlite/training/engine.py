"""Forward and backward of one batch. Here, only `build_engine` branches on pipeline parallelism."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from titanlite.kernels.documents import SupportsDocuments
from titanlite.parallelize import ParallelLayout, ShardedModel
from titanlite.parallelize.context import build_sequence_shard
from titanlite.training.batch import Batch, TokenSelector
from titanlite.training.spmd_engine import SetPhase, SpmdEngine, ignore_phase


class Engine(Protocol):
    """Run the model's forward and backward for one optimizer step.

    Inputs and labels are full sequences [B, T], the same on all ranks that split these sequences;
    an engine selects this rank's tokens.
    """

    def prepare(self, inputs: Tensor, labels: Tensor) -> Batch:
        """A batch for `forward_backward`, from tensors in host memory; may run in any thread."""

    def forward_backward(
        self, batch: Batch, divisor: Tensor, set_phase: SetPhase = ignore_phase
    ) -> Tensor:
        """Add the gradients of summed loss / `divisor`; return this rank's share of that loss.

        `divisor` []: the number of valid labels in the global batch, divided by the loss scale if
        there is one. The result is the cross-entropy, the z-loss, and with multi-token prediction
        `sums_of_depths`. `set_phase` is called with the name of each phase when it begins.
        """

    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """This rank's share of the summed loss, without gradients; from tensors in host memory."""

    def token_losses(self, batch: Batch) -> Tensor:
        """The cross-entropy of each label [B, T] in fp32, 0 where it is ignored; no gradients.

        `batch`: as for `forward_backward`. The same on all ranks that split its sequences.
        """


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
    stage = next(iter(sharded.stage_modules.values()))  # any: all have the same index_documents
    index_documents = stage.index_documents if isinstance(stage, SupportsDocuments) else None
    shard = build_sequence_shard(mesh.cp, config)
    tokens = TokenSelector(shard, document_end_id, index_documents, sharded.prediction_layers)
    if mesh.pp.size() == 1:
        return SpmdEngine(sharded, tokens, mesh.cp, local_batch, device, every_microbatch)
    from titanlite.training.pipeline_engine import PipelineEngine  # only pipelines need it

    return PipelineEngine(sharded, tokens, layout.plan, mesh, device, every_microbatch)
