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
from titanlite.parallelize import build_spread_model, loss_context
from titanlite.parallelize.activation import ActivationCheckpointConfig
from titanlite.parallelize.init import start_weights
from titanlite.training import Spmd, TrainState, take_step

FAMILY = FAMILIES["llama3"]
SEED, BATCH, SEQ_LEN, STEPS = 7, 36, 36, 4

# Odd where it may be: 509 tokens, and a feed-forward that 3 ranks cannot shard evenly.
SHAPE = LlamaShape(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=88, vocab_size=509, rope_theta=1e4
)


@dataclass(frozen=True)
class Layout:
    """How a case is spread; everything here must leave the numbers as they are."""

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    accumulate: int = 1
    loss_parallel: bool = True
    reduction: str = "every_microbatch"
    reshard: str = "default"
    offload: bool = False
    recompute: str = "none"

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.replicate, self.shard, self.tensor)

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
    """A global batch [BATCH, SEQ_LEN] whose ignored labels are spread unevenly over its rows."""
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, vocab, (BATCH, SEQ_LEN + 1), generator=generator)
    inputs, labels = ids[:, :-1].clone(), ids[:, 1:].clone()
    for row in range(BATCH):
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
    """(model, mesh, section) of a layout on the ranks that run this."""
    section = ParallelismConfig(
        disable_loss_parallel=not layout.loss_parallel,
        fsdp_reshard_after_forward=layout.reshard,
    )
    mesh = build_mesh(layout.degrees, "cpu")
    model = build_spread_model(
        FAMILY,
        shape,
        mesh,
        section,
        ActivationCheckpointConfig(mode=layout.recompute),
        torch.device("cpu"),
        seed=SEED,
        compute=dtype,
        offload=layout.offload,
    )
    return model, mesh, section


def spread_runs(cases: list[tuple[Layout, Recipe]]) -> list[Record]:
    """Several runs one after the other, in processes that are warm after the first."""
    return [spread_run(layout, recipe) for layout, recipe in cases]


def spread_run(layout: Layout, recipe: Recipe) -> Record:
    """The same run under a layout, by the house's own engine and step, as this rank sees it."""
    state, engine, mesh = start(layout, recipe)
    record = Record([], [], [], {})
    go_on(state, engine, mesh, recipe, record, recipe.steps)
    assert (state.step, state.position) == (recipe.steps, recipe.steps * BATCH)
    assert state.tokens == recipe.steps * BATCH * SEQ_LEN
    return record


def start(layout: Layout, recipe: Recipe) -> tuple[TrainState, Spmd, Mesh]:
    """A run under a layout, before its first step."""
    model, mesh, section = spread(layout, recipe.shape)
    engine = Spmd(
        model,
        loss_context(mesh, section),
        microbatch=BATCH // layout.degrees.data // layout.accumulate,
        reduce_every_microbatch=layout.reduction == "every_microbatch",
    )
    return TrainState(model, build_optimizer(model, recipe.section)), engine, mesh


def go_on(
    state: TrainState, engine: Spmd, mesh: Mesh, recipe: Recipe, record: Record, until: int
) -> None:
    """Take the steps up to `until`, noting what they show; under SGD, every tensor too."""
    named = list(state.model.named_parameters()) if recipe.optimizer == "SGD" else []
    hook = state.optimizer.register_step_pre_hook(
        lambda *_: record.gradients.append({name: part_of(p.grad) for name, p in named})
    )
    rows = BATCH // mesh.degrees.data
    mine = slice(mesh.batch_rank * rows, (mesh.batch_rank + 1) * rows)
    while state.step < until:
        inputs, labels = (part[mine] for part in batch_at(state.step, recipe.shape.vocab_size))
        result = take_step(
            state,
            engine,
            inputs,
            labels,
            loss_mesh=mesh.loss,
            global_batch=BATCH,
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
    for name, (shape, _, _) in parts[0].items():
        tensor = torch.full(shape, torch.nan)
        for _, offset, local in (rank[name] for rank in parts):
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
