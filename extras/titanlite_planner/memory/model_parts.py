"""The parameters of a model by module, and a rank's shards of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from titanlite.parallelize.fsdp import sharded_dim_of_experts
from titanlite_planner.model_shape import ModelShape
from titanlite_planner.workload import Layout


@dataclass(frozen=True)
class ParameterShape:
    """One parameter: its shape, and how tensor parallelism shards it."""

    name: str  # within its module
    shape: tuple[int, ...]
    sharded_dim: int | None = None  # over the tensor ranks; None: replicated
    whole: int = 1  # rows that stay together, as those of a head; too few of them: replicated
    expert: bool = False  # sharded over the expert ranks as well
    state_bytes: float | None = None  # of the optimizer, per element; None: the workload's mean
    own_state_bytes: float | None = None
    # of a rank's shard, where they are not a multiple of its elements
    owner_flops: float = 0.0  # of its update, if one rank has all of its optimizer state

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def tensor_shard(self, tensor: int) -> tuple[int, ...]:
        """Shape of the first of `tensor` ranks' shards, which is the largest."""
        dim = self.sharded_dim
        if dim is None or tensor == 1:
            return self.shape
        if self.whole > 1 and (self.shape[dim] // self.whole) % tensor:
            return self.shape
        size = -(-self.shape[dim] // tensor)
        return (*self.shape[:dim], size, *self.shape[dim + 1 :])


def padded_shard(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of FSDP2's shard: ceil(rows / ranks) rows, also on ranks that have fewer."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


def own_shard(shape: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Shape of the first rank's rows."""
    return (-(-shape[0] // ranks), *shape[1:])


def own_expert_shard(shape: tuple[int, ...], experts: int, ranks: int) -> tuple[int, ...]:
    """Shape of the first rank's shard of experts [E, ...], after that over the tensor ranks.

    `experts`: expert-parallel ranks; `ranks`: those that FSDP shards over.
    """
    local = (shape[0] // experts, *shape[1:])
    dim = sharded_dim_of_experts(local, ranks)
    return (*local[:dim], -(-local[dim] // ranks), *local[dim + 1 :])


@dataclass(frozen=True)
class ModelParts:
    """The parameters of each kind of module; the blocks are equal."""

    embedding: tuple[ParameterShape, ...]
    block: tuple[ParameterShape, ...]
    norm: tuple[ParameterShape, ...]
    output: tuple[ParameterShape, ...]
    dense_block: tuple[ParameterShape, ...] = ()  # without experts, where some blocks have them
    tied: tuple[ParameterShape, ...] = ()  # of the embedding, if the output layer has it as well


@cache
def parts_of_shape(model: ModelShape) -> ModelParts:
    """The parameters of a decoder-only transformer of these sizes."""
    dim, width = model.dim, model.head_dim
    tables = [ParameterShape("weight", (model.vocab_size, dim), 0)]
    if model.positions:
        tables.append(ParameterShape("positions", (model.positions, dim)))
    output = (
        () if model.tied_embeddings else (ParameterShape("weight", (model.vocab_size, dim), 0),)
    )
    norm = [ParameterShape("weight", (dim,))]
    if model.biases is True:
        norm.append(ParameterShape("bias", (dim,)))
    norms = (f"norm{number}" for number in range(model.norms_per_block))
    attention = [
        *(ParameterShape(f"{name}.{p.name}", p.shape) for name in norms for p in norm),
        *_projection_shapes(model),
        ParameterShape("wo", (dim, model.n_heads * model.value_dim), 1),
    ]
    if model.biases:
        attention.append(ParameterShape("bq", (model.n_heads * width,), 0))
        keys = (model.n_kv_heads * width,)
        attention += [ParameterShape(name, keys, 0, whole=width) for name in ("bk", "bv")]
    if model.biases in (True, "linear"):
        attention.append(ParameterShape("bo", (dim,)))
    if model.sinks:
        attention.append(ParameterShape("sinks", (model.n_heads,), 0))
    if model.qk_norm == "projections":
        heads = {"q": (model.n_heads, 1), "k": (model.n_kv_heads, width)}
        for n, (count, whole) in heads.items():
            attention.append(ParameterShape(f"{n}_norm", (count * width,), 0, whole))
    elif model.qk_norm:
        attention += [ParameterShape(f"{n}_norm", (width,)) for n in "qk"]
    dense = (*attention, *_feed_forward_shapes(model, model.hidden_dim, 1))
    block = dense
    if experts := model.experts:
        router = [ParameterShape("router", (experts.count, dim))]
        if model.biases in (True, "linear"):
            router.append(ParameterShape("router bias", (experts.count,)))
        routed = _feed_forward_shapes(model, experts.hidden_dim, experts.count)
        shared = _feed_forward_shapes(model, experts.shared_hidden_dim, 1)
        block = (*attention, *router, *routed, *(shared if experts.shared_hidden_dim else ()))
    tied = tuple(tables[:1]) if model.tied_embeddings else ()
    return ModelParts(tuple(tables), block, tuple(norm), output, dense, tied)


def _projection_shapes(model: ModelShape) -> Iterator[ParameterShape]:
    """The matrices of queries, keys and values, and the norms between those of latent attention."""
    dim, width, queries = model.dim, model.head_dim, model.n_heads * model.head_dim
    latent = model.latent
    if latent is None:
        yield ParameterShape("wq", (queries, dim), 0)
        for name in ("wk", "wv"):
            yield ParameterShape(name, (model.n_kv_heads * width, dim), 0, whole=width)
        return
    rank = latent.query_rank
    if rank:
        yield ParameterShape("wq_a", (rank, dim))
        yield ParameterShape("q_norm", (rank,))
    yield ParameterShape("wq", (queries, rank or dim), 0)
    yield ParameterShape("wkv_a", (latent.key_value_rank + latent.rotary_dim, dim))
    yield ParameterShape("kv_norm", (latent.key_value_rank,))
    heads = model.n_heads * (width - latent.rotary_dim + latent.value_dim)
    yield ParameterShape("wkv_b", (heads, latent.key_value_rank), 0)


def _feed_forward_shapes(model: ModelShape, hidden: int, count: int) -> tuple[ParameterShape, ...]:
    """The matrices of `count` feed-forward layers."""
    dim, expert = model.dim, count > 1
    up = ("w1", "w3") if model.gated else ("w1",)
    if expert:  # one tensor for all experts
        outputs = {**dict.fromkeys(up, hidden), "w2": dim}
        biases = [
            ParameterShape(f"b{n}", (count, size, 1), 1, expert=True) for n, size in outputs.items()
        ]
        return (
            *(ParameterShape(n, (count, hidden, dim), 1, expert=True) for n in up),
            ParameterShape("w2", (count, dim, hidden), 2, expert=True),
            *(biases if model.biases in (True, "linear") else ()),
        )
    biases = [ParameterShape("b1", (hidden * len(up),), 0), ParameterShape("b2", (dim,))]
    return (
        *(ParameterShape(n, (hidden, dim), 0) for n in up),
        ParameterShape("w2", (dim, hidden), 1),
        *(biases if model.biases in (True, "linear") else ()),
    )


@dataclass(frozen=True)
class GroupBytes:
    """A rank's elements of one FSDP group."""

    sharded: int  # in this rank's storage, padded
    stored: int  # in this rank's tensors, for which the optimizer has state
    gathered: int  # after the all-gather, or if nothing is sharded
    state: float = 0.0  # bytes of sharded optimizer state

    def __add__(self, other: GroupBytes) -> GroupBytes:
        return GroupBytes(
            self.sharded + other.sharded,
            self.stored + other.stored,
            self.gathered + other.gathered,
            self.state + other.state,
        )

    def times(self, count: int) -> GroupBytes:
        return GroupBytes(
            self.sharded * count, self.stored * count, self.gathered * count, self.state * count
        )


EMPTY = GroupBytes(0, 0, 0)


@cache
def group_bytes(
    parameters: tuple[ParameterShape, ...], layout: Layout, state_bytes: float
) -> GroupBytes:
    """What the rank with the largest shards has of some parameters."""
    sharded = stored = gathered = 0
    state = 0.0
    for parameter in parameters:
        shape = parameter.tensor_shard(layout.tensor)
        if parameter.expert:  # experts are data-parallel over the ranks that are left
            shape = parameter.tensor_shard(layout.expert_tensor_ranks)
            gathered += math.prod(shape) // layout.expert
            own = padded = math.prod(own_expert_shard(shape, layout.expert, layout.expert_shard))
        else:
            ranks = layout.shard * layout.context
            gathered += math.prod(shape)
            own, padded = math.prod(own_shard(shape, ranks)), padded_shard(shape, ranks)
        sharded, stored = sharded + padded, stored + own
        if parameter.own_state_bytes is not None:
            state += parameter.own_state_bytes
        elif not parameter.owner_flops:
            each = state_bytes if parameter.state_bytes is None else parameter.state_bytes
            state += own * each
    return GroupBytes(sharded, stored, gathered, state)
