"""The cost of the guard, and how often it judges a healthy step to be a spike.

python -m benchmarks.guard speed [--steps 500]     throughput by policy, against a guard that is off
python -m benchmarks.guard alarms [--runs 20]      alarms in healthy runs

One process on a CPU trains a small Llama on this repository's own text. The policies take a step in
turn, and the medians of the CPU time of their steps are compared. The guard's own time does not
depend on the size of the model. `scripts/benchmark.py --case guard` compares whole runs.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

from titanlite.distributed.mesh import Degrees, Mesh, ParallelismConfig, build_mesh
from titanlite.models import FAMILIES, Llama3Sizes
from titanlite.optim import OptimizerConfig, build_optimizer
from titanlite.parallelize import ModelTransforms, ParallelLayout, build_sharded_model
from titanlite.parallelize.pipeline_plan import plan_pipeline
from titanlite.training import (
    Engine,
    GuardConfig,
    StepJudge,
    StepSettings,
    TrainState,
    build_engine,
    take_step,
)
from titanlite.training.guard.pending import PendingSteps

ROOT = Path(__file__).parents[1]
CPU, FAMILY = torch.device("cpu"), FAMILIES["llama3"]
SIZES = Llama3Sizes(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=176, vocab_size=256)
SPEED_SIZES = dataclasses.replace(SIZES, dim=256, n_layers=4, hidden_dim=704)
BATCH, LENGTH = 8, 64
POLICIES = {  # name -> the section, None without a judge
    "off": None,
    "non-finite": GuardConfig(),
    "non-finite and spikes": GuardConfig(spike="skip"),
}
LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2)


class SmallRun:
    """A run of a small model on this repository's text."""

    def __init__(self, seed: int, guard: GuardConfig | None, sizes: Llama3Sizes = SIZES):
        self.mesh, self.engine, self.state = _build(seed, guard, sizes)
        self._pending, self._guarded = PendingSteps(), guard is not None
        text = b"".join(path.read_bytes() for path in sorted((ROOT / "titanlite").rglob("*.py")))
        self._ids = torch.tensor(list(text))
        self._generator = torch.Generator().manual_seed(seed)

    def step(self, lr: float) -> tuple[float, float]:
        """Take a step as the loop does; returns loss and gradient norm."""
        starts = torch.randint(len(self._ids) - LENGTH - 1, (BATCH,), generator=self._generator)
        ids = torch.stack([self._ids[start : start + LENGTH + 1] for start in starts.tolist()])
        batch = self.engine.prepare(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        before = self.state.host_state()
        settings = StepSettings(self.mesh, max_norm=1.0)
        result = take_step(self.state, self.engine, batch, lr=lr, settings=settings)
        self._pending.add(self.state.step, before, result)
        self._pending.poll()
        return float(result.loss), float(result.grad_norm)


def _build(
    seed: int, guard: GuardConfig | None, sizes: Llama3Sizes
) -> tuple[Mesh, Engine, TrainState]:
    section, mesh = ParallelismConfig(data_parallel_shard_degree=1), build_mesh(Degrees(), "cpu")
    plan, _ = plan_pipeline(section, FAMILY, sizes, LENGTH, BATCH)
    assert plan is not None
    layout = ParallelLayout(mesh, section, plan)
    transforms = ModelTransforms(compute_dtype=torch.float32)
    sharded = build_sharded_model(FAMILY, sizes, layout, transforms, CPU, seed=seed)
    optimizer = build_optimizer(sharded.model, OptimizerConfig())
    judge = StepJudge(guard, CPU) if guard else None
    engine = build_engine(sharded, layout, CPU, local_batch=BATCH)
    return mesh, engine, TrainState(sharded.model, optimizer, judge=judge)


def measure_speed(steps: int, warmup: int = 20) -> dict[str, float]:
    """CPU seconds of the median step of each policy."""
    runs = {name: SmallRun(0, guard, SPEED_SIZES) for name, guard in POLICIES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for number in range(steps + warmup):
        order = order[1:] + order[:1]  # each goes first sometimes
        for name in order:
            started = time.process_time()
            runs[name].step(1e-3)
            if number >= warmup:
                seconds[name].append(time.process_time() - started)
    return {name: statistics.median(times) for name, times in seconds.items()}


def record_runs(runs: int, steps: int) -> list[list[tuple[float, float]]]:
    """(loss, gradient norm) of each step of healthy runs; no two have the same seed."""
    recorded = []
    for seed, lr in zip(range(runs), itertools.cycle(LEARNING_RATES)):
        run = SmallRun(seed, None)
        rates = [lr * min((s + 1) / 20, 1 - s / steps) for s in range(steps)]  # warmup, decay
        recorded.append([run.step(rate) for rate in rates])
        print(f"seed {seed}, learning rate {lr:g}: loss {recorded[-1][-1][0]:.3f}", flush=True)
    return recorded


def count_alarms(recorded: list[list[tuple[float, float]]], guard: GuardConfig) -> list[int]:
    """Steps of each run that are judged to be a spike."""
    alarms = []
    for values in recorded:
        judge = StepJudge(guard, CPU)
        accepted = [judge_one(judge, torch.tensor(x), torch.tensor(y)) for x, y in values]
        alarms.append(accepted.count(False))
    return alarms


def judge_one(judge: StepJudge, loss: torch.Tensor, grad_norm: torch.Tensor) -> bool:
    """Judge a step; if it is rejected, the next one is judged by itself."""
    accepted = bool(judge.judge(loss, grad_norm))
    judge.resume()
    return accepted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("speed", "alarms"))
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument(
        "--values", type=Path, help="JSON file for the losses and norms of all runs"
    )
    arguments = parser.parse_args()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if arguments.what == "speed":
        seconds = measure_speed(arguments.steps)
        for name, median in seconds.items():
            print(f"{name:<24}{seconds['off'] / median:.3f}  {median * 1e3:.3f} ms a step")
        return
    recorded = record_runs(arguments.runs, arguments.steps)
    if arguments.values:
        arguments.values.write_text(json.dumps(recorded))
    for threshold in (4.0, 5.0, 6.0, 8.0, 10.0):
        alarms = count_alarms(recorded, GuardConfig(spike="skip", threshold=threshold))
        steps = sum(map(len, recorded))
        print(f"threshold {threshold:g}: {sum(alarms)} alarms in {steps} steps; by run: {alarms}")


if __name__ == "__main__":
    main()
