"""The oracle: train in one plain process and under a layout, and compare the results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from tests.distributed.balanced import ReferenceBalancing
from tests.distributed.moe_family import MOE_FAMILY
from titanlite.data import SourceConfig, open_sample_stream, rank_slices
from titanlite.distributed import disk_memory
from titanlite.distributed.collectives import local_shard
from titanlite.distributed.mesh import Degrees, Mesh, ParallelismConfig, build_mesh
from titanlite.elastic.rows import RankSlice, rank_rows, read_with_idle
from titanlite.labels import DOCUMENT_END as PACKED_END
from titanlite.labels import IGNORE_INDEX
from titanlite.meters.expert_load import ExpertLoad
from titanlite.models import FAMILIES, Llama3Sizes, LossConfig, ModelSizes, ModelSpec
from titanlite.models.label_sampling import add_noise, sampling_keys
from titanlite.models.mup import BaseWidths, MupConfig, WidthScale, width_scales
from titanlite.models.rope import rope_cos_sin
from titanlite.models.router import NO_BALANCING, LoadBalancing
from titanlite.optim import (
    LossScale,
    MatrixFacts,
    OptimizerConfig,
    OptimizerInBackward,
    OptimizerSet,
    adaptive_clip,
    build_optimizer,
)
from titanlite.optim.sophia import Sophia
from titanlite.parallelize import (
    ModelTransforms,
    ParallelLayout,
    activation_offload,
    build_parallel_modules,
)
from titanlite.parallelize.activation_checkpoint import ActivationCheckpointConfig
from titanlite.parallelize.compile import CompileConfig
from titanlite.parallelize.lora import ROW_BYTES, LoraConfig, pack, unpack, unpacked
from titanlite.parallelize.pipeline_plan import plan_pipeline
from titanlite.parallelize.schedule import SCHEDULES
from titanlite.parallelize.stage_partition import balance_stages
from titanlite.parallelize.weight_init import init_weights
from titanlite.training.batch import Batch
from titanlite.training.engine import Engine, build_engine
from titanlite.training.hessian import hessian_hooks
from titanlite.training.spmd_engine import SpmdEngine
from titanlite.training.state import TrainState
from titanlite.training.step import StepHook, StepSettings, take_step
from titanlite.training.validation import validate
from titanlite_planner.dry_run.ranks import resting_bytes

FAMILY = FAMILIES["llama3"]


def family_of(sizes: ModelSizes) -> ModelSpec:
    """The model family with these sizes."""
    families = (*FAMILIES.values(), MOE_FAMILY)
    return next(f for f in families if type(next(iter(f.flavors.values()))) is type(sizes))


SEED, STEPS = 7, 3
CPU = torch.device("cpu")
DOCUMENT_END = 0  # token id

# Uneven sizes where possible: 509 token ids, and a feed-forward that 3 ranks cannot shard evenly.
SIZES = Llama3Sizes(
    dim=32, n_layers=2, n_heads=4, n_kv_heads=2, hidden_dim=88, vocab_size=509, rope_theta=1e4
)


@dataclass(frozen=True)
class Layout:
    """How a model is parallelized; nothing here may change the results."""

    replicate: int = 1
    shard: int = 1
    context: int = 1
    tensor: int = 1
    pipeline: int = 1
    accumulate: int = 1
    loss_parallel: bool = True
    reduction: str = "every_microbatch"
    reshard: str = "default"
    offload: bool = False  # CPU offload
    recompute: str = "none"  # activation checkpointing: a mode, or "op"
    offload_activations: bool = False
    offload_folder: str = ""  # of the activations
    compile: str = ""  # backend; empty: not compiled
    overlap: bool = False  # asynchronous tensor parallelism
    chunk: int = 0  # tokens per logits chunk; 0: all in one
    schedule: str = "1F1B"
    csv: str = ""  # schedule file
    microbatch: int = 1  # sequences per pipeline micro-batch
    stages: int = 0  # pipeline stages, balanced by cost; 0: the schedule's default
    layers_per_stage: int = 0  # 0: follows from the number of stages
    less: tuple[int, int] | None = None  # fewer blocks in the first and last stage
    rotate: str = "allgather"
    balancer: str = "headtail"
    early: bool = False  # optimizer step in backward
    expert: int = 1
    expert_tensor: int = 1

    @property
    def degrees(self) -> Degrees:
        return Degrees(**{field.name: getattr(self, field.name) for field in fields(Degrees)})

    def local_batch(self, recipe: Recipe) -> int:
        return max(1, recipe.batch // self.degrees.batch // self.accumulate)

    def section(self, recipe: Recipe) -> ParallelismConfig:
        costs = recipe.spec.module_flops(recipe.sizes, recipe.seq_len)
        first, last = self.less or (None, None)
        return ParallelismConfig(
            enable_async_tensor_parallel=self.overlap,
            disable_loss_parallel=not self.loss_parallel,
            fsdp_reshard_after_forward=self.reshard,
            fsdp_gradient_reduction=self.reduction,
            data_parallel_replicate_degree=self.replicate,
            data_parallel_shard_degree=self.shard,
            tensor_parallel_degree=self.tensor,
            expert_parallel_degree=self.expert,
            expert_tensor_parallel_degree=self.expert_tensor,
            context_parallel_degree=self.context,
            context_parallel_rotate_method=self.rotate,
            context_parallel_load_balancer=self.balancer,
            pipeline_parallel_degree=self.pipeline,
            pipeline_parallel_schedule=self.schedule,
            pipeline_parallel_schedule_csv=self.csv,
            pipeline_parallel_microbatch_size=self.microbatch,
            pipeline_parallel_layers_per_stage=self.layers_per_stage or None,
            pipeline_parallel_first_stage_less_layers=first,
            pipeline_parallel_last_stage_less_layers=last,
            module_fqns_per_model_part=balance_stages(costs, self.stages) if self.stages else None,
        )

    def transforms(self, recipe: Recipe, dtype: torch.dtype) -> ModelTransforms:
        return ModelTransforms(
            activation_checkpoint=ActivationCheckpointConfig(
                mode="selective" if self.recompute == "op" else self.recompute,
                selective_ac_option="op" if self.recompute == "op" else "2",
                offload=self.offload_activations,
                offload_folder=self.offload_folder,
            ),
            compile=CompileConfig(self.compile != "", backend=self.compile or "eager"),
            loss=LossConfig(chunk_tokens=self.chunk, z_loss=recipe.z_loss),
            load_balancing=recipe.balancing,
            lora=recipe.lora,
            compute_dtype=dtype,
            cpu_offload=self.offload,
            document_mask=recipe.documents,
        )

    def __str__(self) -> str:
        default = vars(Layout())
        changed = (f"{k}={value}" for k, value in vars(self).items() if value != default[k])
        return ",".join(changed) or "one"


def parse_layouts(text: str) -> list[Layout]:
    """The layouts that `str` writes so, separated by ";"; "*" is every schedule.

    With `stages`, every schedule that leaves the number of stages to the user.
    """
    layouts = []
    for part in map(str.strip, text.split(";")):
        layout = _parse_layout(part)
        free = [n for n, s in SCHEDULES.items() if s.stages_per_rank is None or not layout.stages]
        layouts += (
            [replace(layout, schedule=n) for n in free] if layout.schedule == "*" else [layout]
        )
    return layouts


def _parse_layout(text: str) -> Layout:
    pairs = [pair.split("=") for pair in text.split(",")] if text != "one" else []
    kinds = {bool: lambda value: value == "True", int: int, str: str}
    return Layout(**{key: kinds[type(getattr(Layout, key))](value) for key, value in pairs})


@dataclass(frozen=True)
class Recipe:
    """Model, data and optimizer of a run; changing them changes the results."""

    optimizer: str = "SGD"
    max_norm: float = 0.0
    adaptive: float = 0.0  # factor of adaptive clipping; 0: off
    sizes: Any = SIZES  # of the family
    steps: int = STEPS
    lr: float = 0.5
    batch: int = 36  # sequences per step; twice as many in step 2
    seq_len: int = 48
    z_loss: float = 0.0
    documents: bool = False  # several per sequence, with a document mask
    packed: str = ""  # folder of packed shards to read; empty: random tokens
    state_dtype: str = "float32"  # of the optimizer
    options: tuple[tuple[str, Any], ...] = ()  # of [optimizer], which win over those above
    mup_base: BaseWidths | None = None
    balancing: LoadBalancing = NO_BALANCING  # of experts
    adapters: str = ""  # name pattern of the layers that have them; empty: train all weights
    base_dtype: Any = None  # of the frozen weights
    compare_tensors: bool | None = None  # gradients and weights; None: under SGD

    @property
    def compares_tensors(self) -> bool:
        return self.optimizer == "SGD" if self.compare_tensors is None else self.compare_tensors

    @property
    def spec(self) -> ModelSpec[Any]:
        return family_of(self.sizes)

    @property
    def widths(self) -> dict[str, WidthScale]:
        return width_scales(MupConfig(self.mup_base), self.spec, self.sizes)

    @property
    def section(self) -> OptimizerConfig:
        options = {"name": self.optimizer, "lr": self.lr}
        if self.state_dtype != "float32":
            options |= {"state_dtype": self.state_dtype, "implementation": "for-loop"}
        return OptimizerConfig.of(**{**options, **dict(self.options)})

    @property
    def lora(self) -> LoraConfig:
        return LoraConfig(3 if self.adapters else 0, 6.0, [self.adapters], self.base_dtype)

    def batch_of(self, step: int) -> int:
        return 2 * self.batch if step == 2 else self.batch


SGD = Recipe()
ADAMW = Recipe("AdamW", max_norm=0.1, lr=1e-3)


@dataclass
class Record:
    """Measurements of a run."""

    losses: list[float] = field(default_factory=list)
    z_losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    validations: list[float] = field(default_factory=list)
    depths: list[list[float]] = field(default_factory=list)  # of multi-token prediction
    loads: list[list[float]] = field(default_factory=list)  # of experts, as `LoadStatistics`
    # Gradients of each step and weights after the last one: tensors, or their `shard_and_offset`.
    gradients: list[dict[str, Any]] = field(default_factory=list)
    weights: dict[str, Any] = field(default_factory=dict)
    rest: tuple[int, int, int] = (0, 0, 0)
    # this rank's bytes of parameters, gradients and optimizer state after the last backward


def batch_at(step: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """A global batch [B, T] with different numbers of ignored labels per sequence."""
    if recipe.packed:
        return read_packed(2 * recipe.batch * step, recipe.batch_of(step), recipe)
    inputs, labels = tokens(1000 + step, recipe.batch_of(step), recipe.seq_len, recipe)
    for row in range(len(labels)):
        labels[row, : (row * 7 + step) % (recipe.seq_len + 1)] = IGNORE_INDEX
    # Some layouts get micro-batches without any valid label.
    labels[recipe.batch // 2 : recipe.batch // 2 + 3] = IGNORE_INDEX
    return inputs, labels


def own_rows(mesh: Mesh, *tensors: Tensor) -> list[Tensor]:
    """This rank's rows of tensors of a global batch."""
    rows = len(tensors[0]) // mesh.degrees.batch
    return [each[mesh.batch_rank * rows : (mesh.batch_rank + 1) * rows] for each in tensors]


def own_batch(engine, mesh: Mesh, position: int, inputs: Tensor, labels: Tensor) -> Batch:
    """This rank's part of a global batch at a position, with idle sequences if it is ragged."""
    local = engine._microbatch_size if isinstance(engine, SpmdEngine) else engine._plan.sequences
    size, ranks = len(inputs), mesh.degrees.batch
    first, count = next(rank_slices(0, [size], mesh.batch_rank, ranks))
    batch = engine.prepare(
        *read_with_idle(
            lambda at, rows: (inputs[at : at + rows], labels[at : at + rows]),
            *(first, count, rank_rows(size, ranks, local)),
        )
    )
    is_ragged = size % (ranks * local) > 0
    return replace(batch, own=RankSlice(position + first, count, size) if is_ragged else None)


def read_packed(position: int, sequences: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Inputs and labels of windows, as a run reads them."""
    sources = [SourceConfig("packed", recipe.packed, format="packed")]
    sizes = {"seq_len": recipe.seq_len, "vocab_size": recipe.sizes.vocab_size}
    return open_sample_stream(sources, seed=SEED, **sizes).read(position, sequences)


def tokens(seed: int, sequences: int, length: int, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Random inputs and labels [sequences, length]."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, recipe.sizes.vocab_size, (sequences, length + 1), generator=generator)
    if recipe.documents:  # of 8 tokens on average: some cross every shard boundary
        ids[torch.rand(ids.shape, generator=generator) < 1 / 8] = DOCUMENT_END
    return ids[:, :-1].clone(), ids[:, 1:].clone()


class ValidationData:
    """A validation set: longer sequences than in training, a prime number, the last one partial."""

    name, samples, token_bytes = "validation", 7, None

    def __init__(self, recipe: Recipe):
        if recipe.packed:
            self.inputs, self.labels = read_packed(1000, self.samples, recipe)
            return
        self.inputs, self.labels = tokens(5, self.samples, 2 * recipe.seq_len, recipe)
        self.labels[-1, recipe.seq_len // 3 :] = IGNORE_INDEX

    def read(self, start: int, sequences: int) -> tuple[Tensor, Tensor]:
        selected = slice(start, start + sequences)
        padding = (0, 0, 0, sequences - len(self.inputs[selected]))
        labels = F.pad(self.labels[selected], padding, value=IGNORE_INDEX)
        return F.pad(self.inputs[selected], padding), labels


VALIDATION_STEPS = (2, STEPS)  # also before the last step, to see effects on later steps


def build_recipe_optimizer(model, recipe: Recipe) -> OptimizerSet:
    facts = MatrixFacts(recipe.spec, recipe.sizes)
    return build_optimizer(model, recipe.section, facts, widths=recipe.widths)


class CloseScoresError(Exception):
    """Scores of a router are so close that layouts may select different experts."""


@cache
def one_process(recipe: Recipe) -> Record:
    """The reference run: no titanlite code but the model, its initialization and the optimizer."""
    model = recipe.spec.build(recipe.sizes)
    if recipe.lora.rank:
        add_reference_adapters(model, recipe.lora)
    init_weights(model, recipe.spec, recipe.sizes, SEED, recipe.widths)
    if recipe.base_dtype:
        round_base(model, recipe.base_dtype)
    optimizer = build_recipe_optimizer(model, recipe)
    optimizer.set_lr(recipe.lr)
    balancing = ReferenceBalancing(model, recipe.balancing)
    record, position = Record(), 0
    for step in range(recipe.steps):
        inputs, labels = batch_at(step, recipe)
        logits, further, further_z, means = reference_outputs(model, inputs, recipe, labels)
        if means:
            record.depths.append(means)
        labels = labels.where(labels >= 0, IGNORE_INDEX)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX)
        z_loss = recipe.z_loss * logits.logsumexp(-1)[labels != IGNORE_INDEX].square().mean()
        z_loss = z_loss + further_z
        (loss + z_loss + balancing.loss() + further).backward()
        limit = recipe.max_norm or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        record.losses.append(loss.item())
        record.z_losses.append(z_loss.item())
        record.norms.append(norm.item())
        if recipe.adaptive:
            _clip_rows(model, recipe.adaptive)
        named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
        record.gradients.append({n: p.grad.clone() for n, p in named})
        optimizer.step()
        optimizer.zero_grad()
        balancing.finish_step()
        for sophia in (o for o in optimizer if isinstance(o, Sophia)):
            if step % sophia.frequency == 0:
                loss, valid = reference_sampled_loss(model, recipe, inputs, labels, position)
                (loss + balancing.loss_of_extra_forward()).backward()
                sophia.update_hessian(valid, None)
                sophia.zero_grad()
        position += len(inputs)
        if step + 1 in VALIDATION_STEPS:
            record.validations.append(_reference_validation(model, ValidationData(recipe), recipe))
    if balancing.closest <= 2e-7:
        raise CloseScoresError(f"{balancing.closest}: rounding could select other experts")
    record.loads = balancing.loads
    tensors = [*model.named_parameters(), *expert_biases(model)]
    kept = [(n, t) for n, t in tensors if t.requires_grad or not recipe.base_dtype]
    record.weights = {name: tensor.detach().clone() for name, tensor in kept}
    states = {name: optimizer.state[p] for name, p in model.named_parameters()}
    record.weights |= {f"{n}.hessian": s["hessian"] for n, s in states.items() if "hessian" in s}
    return record


def add_reference_adapters(model, config: LoraConfig) -> None:
    """Freeze a model, and add to the output of each linear layer that of its adapter."""
    layers = [model.get_submodule(name) for name in config.select(model)]
    model.requires_grad_(False)
    for layer in layers:
        layer.lora_a = torch.nn.Parameter(torch.empty(config.rank, layer.in_features))
        layer.lora_b = torch.nn.Parameter(torch.empty(layer.out_features, config.rank))
        layer.register_forward_hook(
            lambda layer, x, out: (
                out + config.alpha / config.rank * (x[0] @ layer.lora_a.T @ layer.lora_b.T)
            )
        )


@torch.no_grad()
def round_base(model, base_dtype: str) -> None:
    """Round the frozen weights as they are stored."""
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            weight.copy_(weight.bfloat16())
            is_target = hasattr(model.get_submodule(name.rpartition(".")[0]), "lora_a")
            if base_dtype in ROW_BYTES and is_target and weight.dim() == 2:
                weight.copy_(unpack(pack(weight, base_dtype), base_dtype, weight.dtype))


@torch.no_grad()
def load_packed(model, recipe: Recipe) -> None:
    """Give quantised weights the values that they have in one process."""
    weights = {n: p for n, p in model.named_parameters() if p.dtype == torch.uint8}
    if not weights:
        return
    plain = recipe.spec.build(recipe.sizes)
    init_weights(plain, recipe.spec, recipe.sizes, SEED)
    with unpacked(weights, recipe.base_dtype):
        for name, weight in weights.items():
            _, offset, local = shard_and_offset(weight)
            region = tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
            local_shard(weight).copy_(plain.get_parameter(name)[region])


ADAPTIVE_EPS, UNCLIPPED = 0.08, "output.weight"  # eps: more than the norms of some rows only


def _clip_rows(model, factor: float) -> None:
    """Adaptive clipping as written in the paper, row by row."""
    for name, parameter in model.named_parameters():
        width = parameter.shape[-1]  # of a row, also of one of several stacked matrices
        for row, grad in zip(
            parameter.view(-1, width), parameter.grad.view(-1, width), strict=True
        ):
            limit = factor * max(row.norm().item(), ADAPTIVE_EPS)
            if name != UNCLIPPED and grad.norm() > limit:
                grad.mul_(limit / grad.norm())


def reference_logits(model, inputs: Tensor, recipe: Recipe, labels: Tensor | None = None) -> Tensor:
    """Logits [B, T, V]; each document is a separate sequence of a model without document mask."""
    batches, order = document_batches(inputs, recipe, labels)
    logits = torch.cat([model(inputs.flatten()[batch]).flatten(0, 1) for batch in batches])
    return logits[order].unflatten(0, inputs.shape)


def document_batches(
    inputs: Tensor, recipe: Recipe, labels: Tensor | None
) -> tuple[list[Tensor], Tensor]:
    """(places in the flat inputs of the documents of each length, order that sorts all places).

    Those of equal length [N, length] are a batch, whose rows the model computes independently.
    """
    places = torch.arange(inputs.numel()).view_as(inputs)
    if not recipe.documents:
        return [places], places.flatten()
    is_end = labels == PACKED_END if recipe.packed else inputs == DOCUMENT_END
    by_length: dict[int, list[Tensor]] = {}
    for row, row_ends in zip(places, is_end, strict=True):
        for document in row.tensor_split(row_ends.nonzero().flatten() + 1):
            by_length.setdefault(len(document), []).append(document)
    by_length.pop(0, None)
    batches = [torch.stack(documents) for documents in by_length.values()]
    return batches, torch.cat([batch.flatten() for batch in batches]).argsort()


def reference_outputs(
    model, inputs: Tensor, recipe: Recipe, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor, list[float]]:
    """`reference_logits`, and what `reference_depths` returns."""
    states: list[Tensor] = []
    hook = model.norm.register_forward_hook(lambda _, __, output: states.append(output))
    logits = reference_logits(model, inputs, recipe, labels)
    hook.remove()
    order = document_batches(inputs, recipe, labels)[1]
    hidden = torch.cat([state.flatten(0, 1) for state in states])[order].view(*inputs.shape, -1)
    return logits, *reference_depths(model, hidden, inputs, labels, recipe)


MTP_WEIGHT = LossConfig().mtp_weight


def reference_depths(
    model, hidden: Tensor, inputs: Tensor, labels: Tensor, recipe: Recipe
) -> tuple[Tensor, Tensor, list[float]]:
    """(weighted loss of multi-token prediction, z-loss of it, mean loss of each depth).

    Of the output [B, T, D] of the last norm; one document after the other.
    """
    sizes, tokens = recipe.sizes, inputs.shape[1]
    depths = getattr(sizes, "mtp_layers", 0)
    totals, counts, squares = [0.0] * depths, [0] * depths, torch.zeros(())
    for row in range(len(inputs) * (depths > 0)):
        ends = inputs[row] == DOCUMENT_END if recipe.documents else torch.zeros(tokens).bool()
        edges = sorted({0, *(ends.nonzero().flatten() + 1).tolist(), tokens})
        for first, last in itertools.pairwise(edges):
            x = hidden[row, first:last]
            places = torch.arange(first, last)
            for depth in range(1, depths + 1):
                at = places + depth
                inside = at + 1 < last if ends[last - 1] else at < last
                ids = torch.where(at < tokens, inputs[row, at.clamp(max=tokens - 1)], 0)
                wanted = torch.where(inside, labels[row, at.clamp(max=tokens - 1)], IGNORE_INDEX)
                wanted = wanted.where(wanted >= 0, IGNORE_INDEX)
                number = sizes.n_layers + depth - 1
                block, rotary = model.layers[str(number)], model.rotary[str(number)]
                embedded = block.embedding_norm(model.tok_embeddings.weight[ids])
                joined = torch.cat([embedded, block.hidden_norm(x)], -1) @ block.proj.weight.T
                x = block.block(joined[None], rope_cos_sin(places - first, *rotary))[0]
                logits = block.norm(x) @ model.output.weight.T
                losses = F.cross_entropy(logits, wanted, ignore_index=IGNORE_INDEX, reduction="sum")
                totals[depth - 1] = totals[depth - 1] + losses
                counts[depth - 1] += (wanted >= 0).sum().item()
                squares = squares + logits.logsumexp(-1)[wanted >= 0].square().sum()
    means = [(total / count).item() for total, count in zip(totals, counts, strict=True)]
    factor = MTP_WEIGHT / max(depths, 1) / (labels >= 0).sum()
    return factor * sum(totals), factor * recipe.z_loss * squares, means


@torch.no_grad()
def _reference_validation(model, text: ValidationData, recipe: Recipe) -> float:
    logits = reference_logits(model, text.inputs, recipe, text.labels).flatten(0, 1)
    labels = text.labels.where(text.labels >= 0, IGNORE_INDEX).flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORE_INDEX).item()


def reference_sampled_loss(
    model, recipe: Recipe, inputs: Tensor, labels: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """(mean loss of labels that are sampled from the logits of the whole batch, their number)."""
    logits, *_ = reference_outputs(model, inputs, recipe, labels)
    keys = sampling_keys(SEED, position, labels).flatten()
    _, sampled = add_noise(logits.detach().flatten(0, 1), keys, 0)
    valid = keys >= 0
    return F.cross_entropy(logits.flatten(0, 1)[valid], sampled[valid]), valid.sum()


def build_parallel(
    layout: Layout, recipe: Recipe, dtype: torch.dtype = torch.float32, **transforms
):
    """(sharded model, parallel layout) of this rank under a layout."""
    section, mesh = layout.section(recipe), build_mesh(layout.degrees, "cpu")
    activation_offload.MIN_BYTES = 1  # all tensors of these models are small
    disk_memory.PIECE_BYTES, disk_memory.MIN_GB_PER_S = 1 << 15, 0  # several pieces, on any disk
    sizes, local_batch = recipe.sizes, layout.local_batch(recipe)
    base = layout.transforms(recipe, dtype)
    plan, problems = plan_pipeline(
        section, recipe.spec, sizes, recipe.seq_len, local_batch, base.splits_backward
    )
    assert plan is not None, problems
    parallel_layout = ParallelLayout(mesh, section, plan)
    modules = build_parallel_modules(
        recipe.spec, sizes, parallel_layout, replace(base, **transforms)
    )
    sharded = modules.materialize(CPU, SEED, recipe.widths)
    load_packed(sharded.model, recipe)
    return sharded, parallel_layout


def build_sharded(layout: Layout, recipe: Recipe, dtype: torch.dtype = torch.float32, **transforms):
    """(model shard of this rank, mesh, engine) under a layout."""
    sharded, parallel_layout = build_parallel(layout, recipe, dtype, **transforms)
    document_end_id = DOCUMENT_END if recipe.documents else None
    local_batch = layout.local_batch(recipe)
    engine = build_engine(
        sharded, parallel_layout, CPU, local_batch=local_batch, document_end_id=document_end_id
    )
    return sharded.model, parallel_layout.mesh, engine


def run_layouts(cases: list[tuple[Layout, Recipe]]) -> list[Record]:
    """Several runs one after the other in the same processes."""
    return [run_layout(layout, recipe) for layout, recipe in cases]


def run_layout(layout: Layout, recipe: Recipe) -> Record:
    """This rank's record of the run of `one_process`, with the engine and step of titanlite."""
    state, engine, mesh = start_run(layout, recipe)
    record = Record()
    early = OptimizerInBackward(state.model, state.optimizer) if layout.early else None
    run_until(state, engine, mesh, recipe, record, recipe.steps, early)
    samples = sum(map(recipe.batch_of, range(recipe.steps)))
    assert (state.step, state.position) == (recipe.steps, samples)
    assert state.counters.tokens == samples * recipe.seq_len
    return record


def start_run(
    layout: Layout, recipe: Recipe, scale: LossScale | None = None, **options
) -> tuple[TrainState, Engine, Mesh]:
    """Build a run under a layout; no step is taken."""
    model, mesh, engine = build_sharded(layout, recipe, **options)
    family, load = recipe.spec, None
    if family.experts(recipe.sizes) is not None:
        load = ExpertLoad(model, family, recipe.sizes, recipe.balancing, mesh)
    optimizer = build_recipe_optimizer(model, recipe)
    parts = {} if load is None else {"expert_load": load}
    return TrainState(model, optimizer, scale, parts=parts), engine, mesh


def hooks_of(state: TrainState, engine: Engine) -> tuple[StepHook, ...]:
    """What takes part in the steps of a state of `start_run`."""
    parts = tuple(part for part in state.parts.values() if isinstance(part, StepHook))
    return (*parts, *hessian_hooks(engine, state, SEED))


def run_until(
    state: TrainState,
    engine: Engine,
    mesh: Mesh,
    recipe: Recipe,
    record: Record,
    until: int,
    early: OptimizerInBackward | None = None,
) -> None:
    """Take steps up to `until` and record them, with gradients and weights that are compared."""
    named = list(state.model.named_parameters()) if recipe.compares_tensors else []
    gradients: dict[str, Any] = {}  # of this step; in backward, added one by one

    def record_gradients(*_) -> None:
        gradients.update({n: shard_and_offset(p.grad) for n, p in named if p.grad is not None})
        if early is None:
            rest = resting_bytes(state.model, state.optimizer)
            record.rest = rest.parameters, rest.gradients, rest.optimizer_state

    # after the step, because a fused kernel divides the gradients by the loss scale and clips them
    hooks = [o.register_step_post_hook(record_gradients) for o in state.optimizer]
    step_hooks = hooks_of(state, engine)
    clip = replace(adaptive_clip(state.model.named_parameters(), recipe.adaptive), eps=ADAPTIVE_EPS)
    while state.step < until:
        batch = own_batch(engine, mesh, state.position, *batch_at(state.step, recipe))
        for group in state.optimizer.param_groups:
            group["lr"] = 0.0  # a step before the learning rate is set would have no effect
        result = take_step(
            state,
            engine,
            batch,
            settings=StepSettings(
                mesh,
                recipe.max_norm,
                early,
                clip if recipe.adaptive else None,
                hooks=step_hooks,
            ),
        )
        if named:
            record.gradients.append(dict(gradients))
            gradients.clear()
        record.losses.append(result.loss.item())
        record.z_losses.append(result.z_loss.item())
        record.norms.append(result.grad_norm.item())
        if result.mtp_losses is not None:
            record.depths.append(result.mtp_losses.tolist())
        if load := state.parts.get("expert_load"):
            record.loads.append(list(load.statistics(result.tokens)))
        if state.step in VALIDATION_STEPS:
            text = ValidationData(recipe)
            record.validations.append(validate(engine, text, text.samples, 4, mesh, CPU).loss)
    for hook in hooks:
        hook.remove()
    kept = [(n, p) for n, p in named if p.requires_grad or not recipe.base_dtype]
    record.weights = {name: shard_and_offset(p) for name, p in kept}
    record.weights |= {
        f"{name}.hessian": shard_and_offset(state.optimizer.state[p]["hessian"])
        for name, p in named
        if "hessian" in state.optimizer.state[p]
    }
    if named:
        biases = expert_biases(state.model)
        record.weights |= {name: shard_and_offset(bias) for name, bias in biases}


def expert_biases(model: torch.nn.Module) -> list[tuple[str, Tensor]]:
    """The biases that balance the experts, which are no parameters."""
    return [(n, buffer) for n, buffer in model.named_buffers() if n.endswith("expert_bias")]


def shard_and_offset(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """(global shape, offset, local shard) of a tensor; without communication."""
    if not isinstance(tensor, DTensor):
        return tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach().clone()
    shape, mesh, placements = tensor.shape, tensor.device_mesh, tensor.placements
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return tuple(shape), tuple(offset), tensor.to_local().detach().clone()


def merge_ranks(records: list[Record]) -> Record:
    """Merge the records of all ranks; what several ranks have must be equal on all of them."""
    first = records[0]
    for r in records:
        names = ("losses", "z_losses", "norms", "validations", "depths", "loads")
        same, own = ([getattr(each, name) for name in names] for each in (r, first))
        assert same == own, f"losses, norms or loads differ between ranks: {own}, {same}"
    gradients = [merge_parts(step) for step in zip(*(r.gradients for r in records), strict=True)]
    weights = merge_parts([r.weights for r in records])
    return replace(first, gradients=gradients, weights=weights)


def merge_parts(parts: Sequence[dict[str, tuple]]) -> dict[str, Tensor]:
    """Global tensors from the `shard_and_offset`s of all ranks."""
    tensors = {}
    kinds = {
        name: (shape, torch.promote_types(local.dtype, torch.float32))  # with a NaN
        for rank in parts
        for name, (shape, _, local) in rank.items()
    }
    for name, (shape, dtype) in kinds.items():
        tensor = torch.full(shape, torch.nan, dtype=dtype)
        for _, offset, local in (rank[name] for rank in parts if name in rank):
            region = tensor[
                tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))
            ]
            assert region.isnan().all() or torch.equal(region, local), (
                f"{name} differs between ranks"
            )
            region.copy_(local)
        assert not tensor.isnan().any(), f"no rank has a part of {name}"
        tensors[name] = tensor
    return tensors


def full_value(tensor: Tensor) -> Tensor:
    """A copy of the unsharded tensor; a collective for DTensors."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-12)).item()


def worst_error(actual: Record, expected: Record, tensors: bool) -> dict[str, float]:
    """The largest relative error of each measurement; of tensors too if `tensors`."""
    errors = {
        "loss": _worst(zip(actual.losses, expected.losses, strict=True)),
        "z-loss": _worst(zip(actual.z_losses, expected.z_losses, strict=True)),
        "norm": _worst(zip(actual.norms, expected.norms, strict=True)),
        "validation": _worst(zip(actual.validations, expected.validations, strict=True)),
    }
    for name in ("depths", "loads"):
        rows = zip(getattr(actual, name), getattr(expected, name), strict=True)
        errors[name] = _worst(pair for row in rows for pair in zip(*row, strict=True))
    if tensors:
        for step, (a, b) in enumerate(zip(actual.gradients, expected.gradients, strict=True)):
            assert a.keys() == b.keys()
            errors[f"gradients of step {step}"] = _worst_tensor(a, b)
        errors["weights"] = _worst_tensor(actual.weights, expected.weights)
    return errors


def _worst_tensor(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor.

    Without RoPE, a bias of the keys adds the same to all scores of a query, so its gradient is zero
    but for rounding: it is compared with the largest tensor instead of itself. With RoPE it is not.
    """
    learned_positions = "pos_embeddings.weight" in expected
    largest = max(tensor.abs().max() for tensor in expected.values())
    return max(
        (actual[name] - tensor).abs().max().div(largest).item()
        if learned_positions and name.endswith("wk.bias")
        else relative_error(actual[name], tensor)
        for name, tensor in expected.items()
    )


def _worst(pairs) -> float:
    return max((abs(a - b) / abs(b) if b else abs(a) for a, b in pairs), default=0.0)


def fit_recipe(recipe: Recipe, layout: Layout) -> Recipe:
    """The recipe, with more blocks where the layout has a pipeline."""
    return with_enough_blocks(recipe, layout) if layout.pipeline > 1 else recipe


def with_enough_blocks(recipe: Recipe, layout: Layout) -> Recipe:
    """The recipe with as many blocks as the pipeline stages of a layout need."""
    blocks = max(4, 2 * layout.pipeline, layout.stages - 2)
    return replace(recipe, sizes=replace(recipe.sizes, n_layers=blocks))


def with_tied_embeddings(recipe: Recipe) -> Recipe:
    """The recipe with tied embeddings and QK norm."""
    return replace(recipe, sizes=replace(recipe.sizes, tied_embeddings=True, qk_norm=True))
