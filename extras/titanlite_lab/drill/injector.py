"""Run train.py with numerical faults, for the drill and the tests.

python -m titanlite_lab.drill.injector '[{"kind": "gradient", "value": "nan", "step": 7}]' ARGS…

ARGS are those of train.py, which has no code for this: the builders in titanlite/job/build.py are
wrapped from outside.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor, nn

from titanlite.data import SampleStream
from titanlite.distributed.collectives import local_shard
from titanlite.distributed.rendezvous import launched_rank_and_world_size
from titanlite.distributed.time_limit import exit_process
from titanlite.job import build as builders
from titanlite.log import logger
from titanlite.train import main as train
from titanlite.training.state import TrainState

VALUES = {"nan": math.nan, "inf": math.inf, "1e30": 1e30}  # and "flip", a bit


@dataclass(frozen=True)
class NumericalFault:
    """A wrong value or a delay in the computation of a run."""

    kind: str  # gradient, activation, weight, loss, data or slow
    rank: int = 0  # which has the fault; not for data
    step: int = 0  # of the run, counted from 1; slow: from this step on; data: not used
    after: int = 0  # instead of `step`: steps of this process before the fault
    value: str = "flip"  # flip (the highest exponent bit of one element), nan, inf or 1e30
    parameter: str = ""  # gradient, weight: part of the name of the parameter; activation: of the
    # name of the module. The first one of the rank that matches
    times: int = 1  # computations of the step that have the fault; a replay is another one
    start: int = 0  # data: first and last + 1 position of the random tokens
    end: int = 0
    slowdown: float = 0.3  # slow: fraction of the computing time that is added


def corrupt(tensor: Tensor, value: str) -> None:
    """Change an element in the middle of this rank's shard, without autograd noticing.

    The bit is flipped of an element below 2, which becomes huge. Of a larger one it would become
    tiny, and 0 would become 2, which nothing would notice.
    """
    flat = local_shard(tensor).data.view(-1)
    index = flat.numel() // 2
    if value != "flip":
        flat[index] = VALUES[value]
        return
    becomes_huge = (flat[index:].abs() < 2) & (flat[index:] != 0)
    index += int(becomes_huge.int().argmax())
    width = flat.element_size() * 8
    as_int = flat.view({16: torch.int16, 32: torch.int32}[width])
    as_int[index] ^= 1 << (width - 2)


class Injector:
    """Injects a fault into the computation of this process, if it is on the rank of the fault."""

    def __init__(self, fault: NumericalFault, rank: int):
        self.fault, self.rank, self.left = fault, rank, fault.times
        self.state: TrainState | None = None  # once it is built
        self._started_at: int | None = None  # steps at the first computation of this process

    def watch(self, state: TrainState) -> None:
        """Inject into the steps of this state."""
        self.state = state

    def is_due(self, kind: str) -> bool:
        """Whether the step that is computed now has a fault of this kind on this rank."""
        fault, state = self.fault, self.state
        if fault.kind != kind or fault.rank != self.rank or state is None or not self.left:
            return False
        if self._started_at is None:
            self._started_at = state.step
        step = self._started_at + fault.after + 1 if fault.after else fault.step
        return state.step + 1 == step or (kind == "slow" and state.step + 1 >= step)

    def inject(self, name: str, tensor: Tensor) -> None:
        """Change a value of a tensor, and log it."""
        assert self.state is not None
        self.left -= 1
        corrupt(tensor, self.fault.value)
        text = "drill: rank %d, step %d: %s in the %s of %s"
        fault = self.fault
        values = (self.rank, self.state.step + 1, fault.value, fault.kind, name)
        logger.warning(text, *values)
        print(text % values, file=sys.stderr, flush=True)  # ranks other than 0 do not log

    def parameter(self) -> tuple[str, nn.Parameter]:
        """Name and value of the parameter with the fault."""
        assert self.state is not None
        matching = (
            (name, parameter)
            for name, parameter in self.state.model.named_parameters()
            if self.fault.parameter in name and local_shard(parameter).numel()
        )
        return next(matching)

    def hook_activations(self, model: nn.Module) -> None:
        """Add a forward hook to the module with the fault."""

        def change_output(module: nn.Module, inputs, output: Tensor) -> None:
            if self.is_due("activation"):
                self.inject(name, output)

        matching = ((n, m) for n, m in model.named_modules() if n.endswith(self.fault.parameter))
        name, module = next(matching, ("", None))
        if module is not None:  # another pipeline stage may have it
            module.register_forward_hook(change_output)


class FaultyEngine:
    """An engine whose forward and backward have the fault."""

    def __init__(self, engine, injector: Injector):
        self._engine, self._injector = engine, injector

    def __getattr__(self, name: str):
        return getattr(self._engine, name)

    def forward_backward(self, *args, **options) -> Tensor:
        injector = self._injector
        if injector.is_due("weight"):
            injector.inject(*injector.parameter())
        began = time.thread_time()
        losses = self._engine.forward_backward(*args, **options)
        if injector.is_due("slow"):
            now = time.thread_time()
            while time.thread_time() < now + injector.fault.slowdown * (now - began):
                pass  # a slow core computes for longer; a rank that sleeps does not
        if injector.is_due("gradient"):
            name, parameter = injector.parameter()
            assert parameter.grad is not None
            injector.inject(name, parameter.grad)
        if injector.is_due("loss"):
            injector.inject("the batch", losses[:1])  # the cross-entropy, without the z-loss
        return losses


class PoisonedStream(SampleStream):
    """A stream whose samples at some positions are random tokens."""

    def __init__(self, stream: SampleStream, fault: NumericalFault, vocab_size: int):
        vars(self).update(vars(stream))
        self._poison, self._vocab_size = range(fault.start, fault.end), vocab_size

    def read(self, position: int, sequences: int) -> tuple[Tensor, Tensor]:
        inputs, labels = super().read(position, sequences)
        for row, at in enumerate(range(position, position + sequences)):
            if at in self._poison:
                generator = torch.Generator().manual_seed(at)
                ids = torch.randint(self._vocab_size, (self.seq_len + 1,), generator=generator)
                inputs[row], labels[row] = ids[:-1], ids[1:]
        return inputs, labels


@contextmanager
def injected(fault: NumericalFault, rank: int):
    """Wrap the builders of a run, so that runs that are built in the block have the fault."""
    injector = Injector(fault, rank)

    def wrap(name: str, change: Callable) -> None:
        build = getattr(builders, name)
        stack.enter_context(
            patch.object(builders, name, lambda *a, **o: change(build(*a, **o), *a))
        )

    def keep_state(built, *args):
        injector.watch(built[0])
        return built

    def hook_model(sharded, *args):
        if fault.kind == "activation" and fault.rank == rank:
            injector.hook_activations(sharded.model)
        return sharded

    def poison(built, job, *args):
        stream, validation = built
        return PoisonedStream(stream, fault, job.sizes.vocab_size), validation

    with ExitStack() as stack:
        wrap("build_state", keep_state)
        wrap("build_model", hook_model)
        wrap("build_engine", lambda engine, *args: FaultyEngine(engine, injector))
        if fault.kind == "data":
            wrap("build_data", poison)
        yield injector


def main(argv: list[str]) -> int:
    rank, _ = launched_rank_and_world_size()
    with ExitStack() as stack:
        for fault in json.loads(argv[0]):
            stack.enter_context(injected(NumericalFault(**fault), rank))
        return train(argv[1:])


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
