"""[weight_average]: an average of the weights over the steps of a run, beside the weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from titanlite.checkpoint import model_and_optimizer_state
from titanlite.distributed.collectives import local_shard
from titanlite.distributed.host_memory import pin_in_place
from titanlite.optim.shards import sharded_zeros
from titanlite.settings import NotNegative, Positive, Range
from titanlite.training.state import Counters, TrainState
from titanlite.training.step import StepHook, StepResult

PART = "weight_average"  # of a checkpoint's progress


@dataclass(frozen=True)
class WeightAverageConfig:
    """[weight_average] An average of the weights in fp32, which checkpoints keep as well."""

    decay: Annotated[float, Range(0, 1)] = 0.0
    # of an exponential moving average, per averaged step; 1: the mean of all of them; 0: no average
    start_step: NotNegative = 0  # average the weights after later steps
    freq: Positive = 1  # steps between two averaged ones
    validate: bool = False  # each validation measures the average, too
    offload: bool = False  # keep it in host memory; each update waits for the device

    def __str__(self) -> str:
        kind = "mean of the weights" if self.decay == 1 else f"of the weights, decay {self.decay:g}"
        start = f" after step {self.start_step}" if self.start_step else ""
        return f"{kind}{start}" + (f", every {self.freq} steps" if self.freq > 1 else "")


class WeightAverage(StepHook):
    """Averages every weight, and every saved buffer, of this rank's shards.

    The n-th averaged weights count 1/n, but at least 1 - decay: first a mean, so that the initial
    weights count no more than others, and then an exponential moving average. Steps that do not
    update the weights, because they are skipped, are left out.
    """

    def __init__(self, model: nn.Module, config: WeightAverageConfig, counters: Counters):
        self._model, self._config, self._counters = model, config, counters
        weights = model_and_optimizer_state(model)["model"]
        averages: dict[int | str, Tensor] = {}  # by address: tied weights have two names
        self.tensors: dict[str, Tensor] = {}
        self._names: list[str] = []  # of each average once
        for name, weight in weights.items():
            key = local_shard(weight).data_ptr() or name  # 0: this rank's shard is empty
            if key not in averages:
                averages[key] = self._allocate(weight)
                self._names.append(name)
            self.tensors[name] = averages[key]
        device = next(iter(weights.values())).device
        self._updates = torch.zeros((), dtype=torch.int64, device=device)

    def _allocate(self, weight: Tensor) -> Tensor:
        average = sharded_zeros(weight, torch.float32)
        if not self._config.offload:
            return average
        average = average.to("cpu")
        if local_shard(weight).is_cuda:
            pin_in_place(average, "weight_average.offload = false")
        return average

    @torch.no_grad()
    def after_update(self, result: StepResult) -> None:
        """See `StepHook`; on the device, without a wait, unless the average is offloaded."""
        step = self._counters.step + 1  # the counters advance later
        if step <= self._config.start_step or step % self._config.freq:
            return
        accept = result.accept
        self._updates += 1 if accept is None else accept.to(self._updates.device)
        share = (1 / self._updates).clamp(min=1 - self._config.decay)
        if accept is not None:
            share = torch.where(accept.to(share.device), share, 0.0)  # 0 changes no value
        for average, weight in self._pairs():
            average.lerp_(weight.to(average.device, torch.float32), share.to(average.device))

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's shards of each average and of its weight, once.

        The weights are asked for each time: FSDP moves wrapped ones (Float8) before its first step.
        """
        weights = model_and_optimizer_state(self._model)["model"]
        for name in self._names:
            yield local_shard(self.tensors[name]), local_shard(weights[name])

    @torch.no_grad()
    def current(self) -> Mapping[str, Tensor]:
        """The average, or, before the first one, the weights; waits for the device."""
        if not self._updates:
            for average, weight in self._pairs():
                average.copy_(weight)
        return self.tensors

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Use the average as the weights in the block, with a copy of the weights meanwhile."""
        self.current()
        with torch.no_grad():
            originals = [weight.clone() for _, weight in self._pairs()]
            for average, weight in self._pairs():
                weight.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for (_, weight), original in zip(self._pairs(), originals, strict=True):
                    weight.copy_(original)

    # --- `SavedPart`: the tensors are saved with those of the model -------------------------------

    @property
    def _kind(self) -> list[float]:
        """What decides which steps count how much."""
        return [self._config.decay, self._config.start_step, self._config.freq]

    def state(self) -> Any:
        """The number of averaged steps, and what they are; waits for the device."""
        return {"steps": int(self._updates), "kind": self._kind}

    def restore(self, state: Any) -> None:
        """Restore the number of averaged steps; None, or those of another average: none."""
        steps, kind = (0, None) if state is None else (state["steps"], state["kind"])
        if type(steps) is not int or steps < 0:
            raise ValueError(f"{PART} = {steps!r:.80}: must be a number of steps")
        self._updates.fill_(steps if kind == self._kind else 0)


def average_of(state: TrainState) -> WeightAverage | None:
    """The average of a run's weights; None: it has none."""
    part = state.parts.get(PART)
    assert part is None or isinstance(part, WeightAverage)
    return part
