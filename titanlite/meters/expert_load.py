"""The load of the experts: measured once a step over the global batch, and balanced by it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from titanlite.distributed.collectives import all_reduce_sum
from titanlite.distributed.mesh import Mesh
from titanlite.meters.metered_run import Meter, MeteredRun
from titanlite.models import LoadBalancing, ModelSizes, ModelSpec, Router
from titanlite.models.router import SUMS
from titanlite.models.sizes import prediction_layers
from titanlite.training.periodic import PeriodicAction, StepInfo
from titanlite.training.spmd_engine import SetPhase
from titanlite.training.step import StepHook, StepInputs, StepResult


class LoadStatistics(NamedTuple):
    """The load of the experts in one step, over the global batch; of the worst block, or a mean."""

    load_max: float  # largest over blocks: load of the busiest expert / mean load
    load_cv: float  # largest over blocks: standard deviation of the load / mean load
    entropy: float  # of the router's probabilities, in nats; mean over tokens and blocks
    aux_loss: float  # with its coefficient, summed over blocks
    z_loss: float  # likewise
    dropped_tokens: int  # selections that no expert computed


class ExpertLoad(StepHook):
    """The routers of this rank's blocks."""

    def __init__(
        self,
        model: nn.Module,
        spec: ModelSpec[Any],
        sizes: ModelSizes,
        balancing: LoadBalancing,
        mesh: Mesh,
    ):
        experts = spec.experts(sizes)
        assert experts is not None, "the model has no experts"
        self._balancing = balancing
        self.sizes, self._mesh = experts, mesh
        self._n_blocks = sizes.n_layers + prediction_layers(sizes)
        self.measured: Tensor | None = None
        # of the latest step: [blocks, E + 3] in float64, which counts exactly: selections of each
        # expert, and `router.SUMS`; None on a rank without experts
        prefix = f"{spec.blocks_path}."
        self._routers = {
            int(name.removeprefix(prefix).partition(".")[0]): module
            for name, module in model.named_modules()
            if isinstance(module, Router)
        }

    def before_forward(self, inputs: StepInputs, set_phase: SetPhase) -> None:
        for router in self._routers.values():
            router.begin_step(inputs.tokens / inputs.loss_scale)

    def after_backward(self) -> None:
        """Sum over the global batch what this rank's routers counted, with one all-reduce."""
        if not self._routers:
            return
        routers = list(self._routers.values())
        total = torch.stack([torch.cat((r.counts.double(), r.sums.double())) for r in routers])
        if routers[0].replicas == 1:
            all_reduce_sum(self._mesh.tp, total)
        self.measured = all_reduce_sum(self._mesh.fsdp, total)

    def after_update(self, result: StepResult) -> None:
        """Update biases and previous loads, unless the step was rejected."""
        if self.measured is not None:
            for router, row in zip(self._routers.values(), self.measured, strict=True):
                router.finish_step(row[: self.sizes.count], result.accept)

    def forget(self) -> None:
        """Forget a forward that is not part of the step."""
        for router in self._routers.values():
            router.reset_counts()

    def statistics(self, tokens: int) -> LoadStatistics:
        """Statistics of the latest step, which had `tokens` tokens; a collective."""
        rows = self._of_all_blocks(self.measured, self.sizes.count + len(SUMS)).cpu()
        rows = rows[rows.any(1)]  # not every block has experts
        counts, sums = rows[:, : self.sizes.count], rows[:, self.sizes.count :] / tokens
        aux_loss, z_loss, entropy = sums.sum(0).tolist()
        mean = counts.mean(1)
        return LoadStatistics(
            load_max=(counts.amax(1) / mean).max().item(),
            load_cv=(counts.std(1, correction=0) / mean).max().item(),
            entropy=entropy / len(rows),
            aux_loss=self._balancing.aux_loss_coef * aux_loss,
            z_loss=self._balancing.z_loss_coef * z_loss,
            dropped_tokens=round(len(rows) * tokens * self.sizes.active - counts.sum().item()),
        )

    def state(self) -> dict[str, list[float]]:
        """The previous load of each block with experts, as JSON values; a collective."""
        loads = [router.previous_load.double() for router in self._routers.values()]
        rows = self._of_all_blocks(torch.stack(loads) if loads else None, self.sizes.count)
        return {str(block): row for block, row in enumerate(rows.tolist()) if any(row)}

    def restore(self, state: dict[str, list[float]] | None) -> None:
        """Restore what `state` returned (None: the start); raises ValueError for other experts."""
        for block, router in self._routers.items():
            load = None if state is None else torch.tensor(state.get(str(block), []))
            if load is not None and load.shape != (self.sizes.count,):
                raise ValueError(
                    f"expert_load of block {block}: {load.numel()} loads for"
                    f" {self.sizes.count} experts"
                )
            router.set_previous_load(load)

    def _of_all_blocks(self, own: Tensor | None, width: int) -> Tensor:
        """[all blocks, width] from a row for each block of this rank with experts; else zeros."""
        device = self._mesh.fsdp.device_type
        rows = torch.zeros(self._n_blocks, width, dtype=torch.float64, device=device)
        if own is not None:
            rows[list(self._routers)] = own
        return all_reduce_sum(self._mesh.pp, rows)


def build_expert_load(metered: MeteredRun) -> Meter | None:
    """Write the event `expert_load` for every step that has a step line."""
    load, freq = metered.run.state.parts.get("expert_load"), metered.metrics.log_freq
    if not isinstance(load, ExpertLoad):
        return None

    def write(info: StepInfo) -> None:
        statistics = load.statistics(info.result.tokens)
        if not info.result.skipped:
            metered.run.sinks.event(info.step, "expert_load", **statistics._asdict())

    def is_due(info: StepInfo) -> bool:
        return info.step == 1 or info.step % freq == 0 or info.ends_run

    return Meter(PeriodicAction("log", is_due, write, needs_accepted=True), load)
