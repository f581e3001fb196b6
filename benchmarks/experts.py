"""Speed of a mixture of experts on a CPU, and a run whose experts become balanced.

python -m benchmarks.experts speed [--rounds 9]                training steps, in turn
python -m benchmarks.experts balance [--out FILE.png]          300 steps under three policies

`speed` compares the step of a model with experts with that of a dense model of the same active
parameters.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.expert_model import EXPERT_LLAMA, ExpertLlamaSizes
from titanlite.distributed.mesh import Degrees, ParallelismConfig, build_mesh
from titanlite.meters.expert_load import ExpertLoad, LoadStatistics
from titanlite.models import LLAMA3, ExpertSizes, Llama3Sizes, LoadBalancing, ModelSpec
from titanlite.optim import OptimizerConfig, build_optimizer
from titanlite.parallelize import ModelTransforms, ParallelLayout, build_parallel_modules
from titanlite.parallelize.pipeline_plan import plan_pipeline
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.engine import build_engine
from titanlite.training.state import TrainState
from titanlite.training.step import StepSettings, take_step

ROOT, CPU = Path(__file__).parents[1], torch.device("cpu")
SEQUENCES, LENGTH = 4, 256
EXPERTS = ExpertSizes(count=32, active=4, hidden_dim=256)
DENSE = Llama3Sizes(512, 4, 8, 4, 4 * 256, vocab_size=2048, norm_eps=1e-6, qk_norm=True)
SIZES = ExpertLlamaSizes(**dataclasses.asdict(DENSE), experts=EXPERTS)

BALANCE_SIZES = ExpertLlamaSizes(64, 2, 4, 2, 128, vocab_size=256)
BALANCE_BATCH, BALANCE_LENGTH, BALANCE_STEPS = 16, 128, 300
NOT_BALANCED = "not balanced"
POLICIES = {  # name -> (settings, whether the router has a selection bias)
    NOT_BALANCED: (LoadBalancing(), False),
    "auxiliary loss, coefficient 0.1": (LoadBalancing(aux_loss_coef=0.1), False),
    "bias update, rate 0.01": (LoadBalancing(bias_update_rate=0.01), True),
}
CV_BOUND = 0.4  # coefficient of variation of the worst block, over the last 50 steps of a run


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=("speed", "balance"))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="PNG or SVG file of the picture")
    arguments = parser.parse_args()
    if arguments.what == "speed":
        for dtype in (torch.float32, torch.bfloat16):
            print_ratios(f"step, {dtype}", measure_steps(dtype, arguments.rounds))
    else:
        run_policies(arguments.out)


# --- speed ---------------------------------------------------------------------------------------


def measure_steps(dtype: torch.dtype, rounds: int) -> dict[str, float]:
    """Seconds of the median step; the first entry is that of this repository's experts."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, SIZES.vocab_size, (SEQUENCES, LENGTH + 1), generator=generator)
    models = {
        "experts": build_model(EXPERT_LLAMA, SIZES),
        "dense, same active parameters": build_model(LLAMA3, DENSE),
    }
    return alternate({name: _step(model, tokens, dtype) for name, model in models.items()}, rounds)


def build_model(spec: ModelSpec[Any], sizes: Any) -> nn.Module:
    """A plain model with initial weights."""
    model = spec.build(sizes)
    init_weights(model, spec, sizes, seed=0)
    return model


def _step(model: nn.Module, tokens: Tensor, dtype: torch.dtype) -> Callable[[], None]:
    """Forward, backward and update."""
    model.to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def step() -> None:
        (model(inputs, labels=labels) / labels.numel()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def alternate(steps: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """Median seconds of functions that are called in turn, two warmup rounds excluded."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            started = time.process_time()
            step()
            if number >= 2:
                seconds[name].append(time.process_time() - started)
    return {name: median(values) for name, values in seconds.items()}


def print_ratios(title: str, seconds: dict[str, float]) -> None:
    """Print each time, and its ratio to the first."""
    first = next(iter(seconds.values()))
    for name, value in seconds.items():
        print(f"{title:50} {name:32} {value * 1e3:8.1f} ms {value / first:6.2f}")


# --- balance -------------------------------------------------------------------------------------


def run_policies(out: Path | None) -> None:
    """Train with each policy; print what the loads are at the end, and draw them over the steps."""
    recorded, worst = {name: _record_run(*policy) for name, policy in POLICIES.items()}, 0.0
    for name, (losses, statistics) in recorded.items():
        cv = median(row.load_cv for row in statistics[-50:])
        largest = median(row.load_max for row in statistics[-50:])
        print(f"{name:36} loss {median(losses[-50:]):.3f}  cv {cv:.3f}  max/mean {largest:.2f}")
        worst = max(worst, cv if name != NOT_BALANCED else 0.0)
    if out is not None:
        _draw({name: statistics for name, (_, statistics) in recorded.items()}, out)
    assert worst < CV_BOUND, f"a balanced run has a coefficient of variation of {worst:.2f}"


def _record_run(
    balancing: LoadBalancing, has_bias: bool
) -> tuple[list[float], list[LoadStatistics]]:
    """Loss and statistics of each step of a run on this repository's own text."""
    experts = dataclasses.replace(BALANCE_SIZES.experts, selection_bias=has_bias)
    sizes = dataclasses.replace(BALANCE_SIZES, experts=experts)
    section, mesh = ParallelismConfig(data_parallel_shard_degree=1), build_mesh(Degrees(), "cpu")
    plan, _ = plan_pipeline(section, EXPERT_LLAMA, sizes, BALANCE_LENGTH, BALANCE_BATCH)
    assert plan is not None
    layout = ParallelLayout(mesh, section, plan)
    transforms = ModelTransforms(load_balancing=balancing)
    modules = build_parallel_modules(EXPERT_LLAMA, sizes, layout, transforms)
    sharded = modules.materialize(CPU, seed=0)
    load = ExpertLoad(sharded.model, EXPERT_LLAMA, sizes, balancing, mesh)
    state = TrainState(sharded.model, build_optimizer(sharded.model, OptimizerConfig.of(lr=3e-3)))
    settings = StepSettings(mesh, 1.0, hooks=(load,))
    engine = build_engine(sharded, layout, CPU, local_batch=BALANCE_BATCH)
    text = b"".join(path.read_bytes() for path in sorted((ROOT / "titanlite").rglob("*.py")))
    ids, generator = torch.tensor(list(text)), torch.Generator().manual_seed(0)
    losses, statistics = [], []
    for _ in range(BALANCE_STEPS):
        starts = torch.randint(
            len(ids) - BALANCE_LENGTH - 1, (BALANCE_BATCH,), generator=generator
        ).tolist()
        rows = torch.stack([ids[start : start + BALANCE_LENGTH + 1] for start in starts])
        batch = engine.prepare(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())
        result = take_step(state, engine, batch, settings=settings)
        losses.append(result.loss.item())
        statistics.append(load.statistics(result.tokens))
    return losses, statistics


def _draw(runs: dict[str, list[LoadStatistics]], out: Path) -> None:
    from titanlite_lab.figure import new_figure, save_figure

    figure = new_figure(10.0, 3.6, layout="constrained")
    labels = {"load_cv": "coefficient of variation", "load_max": "busiest expert / mean load"}
    for number, (field, label) in enumerate(labels.items(), start=1):
        axes = figure.add_subplot(1, 2, number)
        for name, statistics in runs.items():
            axes.plot([getattr(row, field) for row in statistics], label=name, linewidth=1.2)
        axes.set(xlabel="step", ylabel=f"{label}, worst block", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    save_figure(figure, out)


if __name__ == "__main__":
    # one process; a mesh needs a process group
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    main()
    dist.destroy_process_group()
