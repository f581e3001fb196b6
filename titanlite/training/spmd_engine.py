"""The engine without pipeline parallelism, and what both engines share."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.models import OutputLayer
from titanlite.models.router import find_routers
from titanlite.parallelize import ShardedModel
from titanlite.parallelize.fsdp import GradientSums
from titanlite.training.batch import Batch, TokenSelector

SetPhase = Callable[[str], None]


def ignore_phase(phase: str) -> None:
    """Default phase callback; does nothing."""


class SpmdEngine:
    """Engine without pipeline parallelism: a rank runs all layers, one micro-batch at a time."""

    def __init__(
        self,
        sharded: ShardedModel,
        tokens: TokenSelector,
        cp: DeviceMesh,
        microbatch_size: int,
        device: torch.device,
        reduce_every_microbatch: bool,
    ):
        self._model, self._tokens, self._device = sharded.model, tokens, device
        self._cp = cp
        self._microbatch_size = microbatch_size
        self._reduce_every_microbatch = reduce_every_microbatch
        self._sums, self._routers = GradientSums([sharded.model]), find_routers(sharded.model)
        self._output, self._update_float8_scales = sharded.output, sharded.update_float8_scales

    def prepare(self, inputs: Tensor, labels: Tensor) -> Batch:
        """See `Engine.prepare`."""
        return self._tokens.prepare(inputs, labels, self._microbatch_size)

    def forward_backward(
        self, batch: Batch, divisor: Tensor, set_phase: SetPhase = ignore_phase
    ) -> Tensor:
        """See `Engine.forward_backward`."""
        self._update_float8_scales()
        total = torch.zeros(2 + 2 * self._tokens.prediction_layers, device=self._device)
        microbatches = batch.split(self._microbatch_size)
        for number, microbatch in enumerate(microbatches):
            last = number == len(microbatches) - 1
            self._sums.begin_microbatch(self._model, self._reduce_every_microbatch or last)
            for router in self._routers:
                router.count_only(microbatch.counted)
            set_phase("forward")
            # The only division: gradients just add up.
            loss = self._loss_of(microbatch, self._tokens.look_ahead(microbatch)) / divisor
            set_phase("backward")
            loss.backward()
            total += loss_terms(self._output, divisor)
        self._sums.finish()  # those without a gradient in the last micro-batch
        reshard([self._model])  # the update makes the weights that one rank keeps out of date
        return total

    @torch.no_grad()
    def evaluate(self, inputs: Tensor, labels: Tensor) -> Tensor:
        """See `Engine.evaluate`."""
        self._update_float8_scales()
        batch = self._tokens.prepare(inputs, labels, len(inputs))
        loss = self._loss_of(batch.to(self._device), {})
        reshard([self._model])
        return loss

    @torch.no_grad()
    def token_losses(self, batch: Batch) -> Tensor:
        """See `Engine.token_losses`."""
        self._update_float8_scales()
        losses = torch.zeros(batch.labels.shape, device=self._device)
        parts = losses.split(self._microbatch_size)
        for microbatch, part in zip(batch.split(self._microbatch_size), parts, strict=True):
            self._loss_of(microbatch, {})
            place_token_losses(self._output, part, self._tokens)
        reshard([self._model])
        return all_reduce_sum(self._cp, losses)

    def _loss_of(self, microbatch: Batch, ahead: dict[str, Tensor]) -> Tensor:
        """The summed loss of this rank's tokens; `ahead` as `TokenSelector.look_ahead`."""
        select = self._tokens.select
        positions = self._tokens.positions(microbatch.inputs, microbatch.labels)
        options = {"documents": microbatch.documents[0]} if microbatch.documents else {}
        return self._model(
            select(microbatch.inputs),
            positions,
            **self._tokens.select_targets(microbatch),
            **options,
            **ahead,
        )


def loss_terms(output: OutputLayer | None, divisor: Tensor | float) -> Tensor:
    """What `Engine.forward_backward` returns, of the last forward."""
    assert output is not None and output.last_terms is not None
    depths = [] if output.last_depths is None else [output.last_depths.flatten()]
    return torch.cat([output.last_terms, *depths]) / divisor


def place_token_losses(output: OutputLayer | None, out: Tensor, tokens: TokenSelector) -> None:
    """Write the cross-entropies of this rank's labels in the last forward to `out` [B, T]."""
    assert output is not None and output.last_token_losses is not None
    positions = tokens.sequence.positions(out.shape[1], out.device)
    out[:, positions] = output.last_token_losses


def reshard(models: Iterable[nn.Module]) -> None:
    """Free the weights that FSDP still holds gathered, such as after a forward without backward."""
    for model in models:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
