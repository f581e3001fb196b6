"""The oracle: what one plain process computes, and what a layout computes instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from titanlite.distributed.mesh import Degrees, Mesh, ParallelismConfig, build_mesh
from titanlite.models import FAMILIES, IGNORED, LlamaShape
from titanlite.optim import OptimizerConfig, build_optimizer
from titanlite.parallelize import build_spread_model
from titanlite.parallelize.activation import ActivationCheckpointConfig
from titanlite.parallelize.cut import balanced
from titanlite.parallelize.init import start_weights
from titanlite.parallelize.pipeline import plan_pipeline
from titanlite.training import Engine, TrainState, build_engine, take_step

FAMILY = FAMILIES["llama3"]
SEED, BATCH, SEQ_LEN, STEPS = 7, 36, 48, 4

# Odd where it may be: 509 tokens, and a feed-forward that 3 ranks cannot shard evenly.
SHAPE = LlamaShape(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=88, vocab_size=509, rope_theta=1e4
)
DEEP = replace(SHAPE, n_layers=8)  # enough for two stages on each of four ranks


@dataclass(frozen=True)
class Layout:
    """How a case is spread; everything here must leave the numbers as they are."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    accumulate: int = 1
    loss_parallel: bool = True
    reduction: str = "every_microbatch"
    reshard: str = "default"
    offload: bool = False
    recompute: str = "none"
    schedule: str = "1F1B"
    microbatch: int = 1  # of the pipeline
    stages: int = 0  # of the pipeline, cut by cost; 0: as the schedule likes
    rotate: str = "allgather"
    balancer: str = "headtail"

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.replicate, self.shard, self.context, self.tensor, self.pipeline)

    @property
    def local_batch(self) -> int:
        return BATCH // self.degrees.data // self.accumulate

    def section(self, shape: LlamaShape) -> ParallelismConfig:
        costs = FAMILY.costs(shape, SEQ_LEN)
        return ParallelismConfig(
            disable_loss_parallel=not self.loss_parallel,
            fsdp_reshard_after_forward=self.reshard,
            fsdp_gradient_reduction=self.reduction,
            context_parallel_degree=self.context,
            context_parallel_rotate_method=self.rotate,
            context_parallel_load_balancer=self.balancer,
            pipeline_parallel_degree=self.pipeline,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_microbatch_size=self.microbatch,
            module_fqns_per_model_part=balanced(costs, self.stages) if self.stages else None,
        )

    def __str__(self) -> str:
        plain = Layout()
        changed = (
            f"{name}={value}" for name, value in vars(self).items() if value != getattr(plain, name)
        )
        return ",".join(changed) or "one"


@dataclass(frozen=True)
class Recipe:
    """What is learned, and how; changing it changes the numbers."""

    optimizer: str = "SGD"
    max_norm: float = 0.0
    shape: LlamaShape = SHAPE
    steps: int = STEPS
    lr: float = field(default=0.5)

    @property
    def section(self) -> OptimizerConfig:
        return OptimizerConfig(name=self.optimizer, lr=self.lr)


def batch_of(step: int) -> int:
    """Samples of a step: the batch doubles for one step, and the ranks must follow."""
    return 2 * BATCH if step == 2 else BATCH


SGD = Recipe()
ADAMW = Recipe("AdamW", max_norm=0.1, lr=1e-3)


@dataclass
class Record:
    """What a run showed."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Any]]  # of each step: tensors, or one rank's parts of them
    weights: dict[str, Any]  # after the last step, likewise


def batch_at(step: int, vocab: int) -> tuple[Tensor, Tensor]:
    """A global batch [rows, SEQ_LEN] whose ignored labels are spread unevenly over its rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, vocab, (batch_of(step), SEQ_LEN + 1), generator=generator)
    inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
    for row in range(len(ids)):
        labels[row, : (row * 7 + step) % (SEQ_LEN + 1)] = IGNORED
    labels[BATCH // 2 : BATCH // 2 + 3] = IGNORED  # whole micro-batches of some layouts
    return inputs, labels


@cache
def one_process(recipe: Recipe) -> Record:
    """The reference: a plain module, a plain loss, a plain loop; no code of the house but those."""
    model = FAMILY.build(recipe.shape)
    start_weights(model, FAMILY.start, recipe.shape.n_layers, SEED)
    optimizer = build_optimizer(model, recipe.section)
    record = Record([], [], [], {})
    for step in range(recipe.steps):
        inputs, labels = batch_at(step, recipe.shape.vocab_size)
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)
        loss.backward()
        limit = recipe.max_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        record.losses.append(loss.item())
        record.norms.append(norm.item())
        record.gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    record.weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    return record


def spread(layout: Layout, shape: LlamaShape, dtype: torch.dtype = torch.float32):
    """(what this rank holds, mesh, engine) of a layout on the ranks that run this."""
    section, mesh, cpu = layout.section(shape), build_mesh(layout.degrees, "cpu"), torch.device("cpu")
    plan, problems = plan_pipeline(section, FAMILY, shape, SEQ_LEN, layout.local_batch)
    assert plan is not None, problems
    held = build_spread_model(
        FAMILY,
        shape,
        mesh,
        section,
        plan,
        ActivationCheckpointConfig(mode=layout.recompute),
        cpu,
        seed=SEED,
        compute=dtype,
        offload=layout.offload,
    )
    engine = build_engine(held, mesh, section, plan, cpu, local_batch=layout.local_batch)
    return held.model, mesh, engine


def spread_runs(cases: list[tuple[Layout, Recipe]]) -> list[Record]:
    """Several runs one after the other, in processes that are warm after the first."""
    return [spread_run(layout, recipe) for layout, recipe in cases]


def spread_run(layout: Layout, recipe: Recipe) -> Record:
    """The same run under a layout, by the house's own engine and step, as this rank sees it."""
    state, engine, mesh = start(layout, recipe)
    record = Record([], [], [], {})
    go_on(state, engine, mesh, recipe, record, recipe.steps)
    samples = sum(map(batch_of, range(recipe.steps)))
    assert (state.step, state.position) == (recipe.steps, samples)
    assert state.tokens == samples * SEQ_LEN
    return record


def start(layout: Layout, recipe: Recipe) -> tuple[TrainState, Engine, Mesh]:
    """A run under a layout, before its first step."""
    model, mesh, engine = spread(layout, recipe.shape)
    return TrainState(model, build_optimizer(model, recipe.section)), engine, mesh


def go_on(
    state: TrainState, engine: Engine, mesh: Mesh, recipe: Recipe, record: Record, until: int
) -> None:
    """Take the steps up to `until`, noting what they show; under SGD, every tensor too."""
    named = list(state.model.named_parameters()) if recipe.optimizer == "SGD" else []
    hook = state.optimizer.register_step_pre_hook(
        lambda *_: record.gradients.append({name: part_of(p.grad) for name, p in named})
    )
    while state.step < until:
        rows = batch_of(state.step) // mesh.degrees.data
        mine = slice(mesh.batch_rank * rows, (mesh.batch_rank + 1) * rows)
        inputs, labels = (part[mine] for part in batch_at(state.step, recipe.shape.vocab_size))
        result = take_step(
            state,
            engine,
            inputs,
            labels,
            mesh=mesh,
            global_batch=batch_of(state.step),
            lr=recipe.lr,
            max_norm=recipe.max_norm,
        )
        record.losses.append(result.loss.item())
        record.norms.append(result.grad_norm.item())
    hook.remove()
    record.weights = {name: part_of(p) for name, p in named}


def part_of(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """(shape of the whole, where this rank's part begins, that part); costs no collective."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach().clone()
    shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(shape), tuple(offset), tensor.to_local().detach().clone()


def joined(records: list[Record]) -> Record:
    """What all ranks saw, put together; what several ranks hold must be the same on each."""
    first = records[0]
    assert all((r.losses, r.norms) == (first.losses, first.norms) for r in records)
    gradients = [_join(step) for step in zip(*(r.gradients for r in records), strict=True)]
    return Record(first.losses, first.norms, gradients, _join([r.weights for r in records]))


def _join(parts: Sequence[dict[str, tuple]]) -> dict[str, Tensor]:
    tensors = {}
    shapes = {name: shape for rank in parts for name, (shape, _, _) in rank.items()}
    for name, shape in shapes.items():
        tensor = torch.full(shape, torch.nan)
        for _, offset, local in (rank[name] for rank in parts if name in rank):
            place = tensor[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))]
            assert place.isnan().all() or torch.equal(place, local), f"{name} differs between ranks"
            place.copy_(local)
        assert not tensor.isnan().any(), f"no rank holds a part of {name}"
        tensors[name] = tensor
    return tensors


def whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def relative_error(found: Tensor, right: Tensor) -> float:
    return ((found - right).abs().max() / right.abs().max().clamp(min=1e-12)).item()


def worst_error(found: Record, right: Record, tensors: bool) -> dict[str, float]:
    """The largest relative error of each kind."""
    errors = {
        "loss": _worst(zip(found.losses, right.losses, strict=True)),
        "norm": _worst(zip(found.norms, right.norms, strict=True)),
    }
    if tensors:
        for step, (a, b) in enumerate(zip(found.gradients, right.gradients, strict=True)):
            assert a.keys() == b.keys()
            errors[f"gradients of step {step}"] = max(relative_error(a[n], b[n]) for n in a)
        errors["weights"] = max(
            relative_error(found.weights[n], right.weights[n]) for n in right.weights
        )
    return errors


def _worst(pairs) -> float:
    return max(abs(a - b) / abs(b) for a, b in pairs)


def tied(recipe: Recipe) -> Recipe:
    return replace(recipe, shape=replace(recipe.shape, tied_embeddings=True, qk_norm=True))
