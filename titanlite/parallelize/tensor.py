"""Tensor and sequence parallel: the only table from the words of a family to DTensor's styles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from titanlite.distributed.collectives import all_gather_tensor, all_reduce_max, all_reduce_sum
from titanlite.distributed.mesh import Degrees
from titanlite.errors import ConfigError
from titanlite.models import ModelSizes, Vocabulary

SEQUENCE = 1  # the dimension of [B, T, …] that is split between the matrices
_TAKE_GATHERED = ("colwise", "colwise_kv")  # words of what is fed by a "gather_sequence" above it


class ParallelStyles(NamedTuple):
    """A column of the table: what its matrices, and the inputs gathered for them, are made of."""

    colwise: type[ColwiseParallel]
    rowwise: type[RowwiseParallel]
    gather: type[PrepareModuleInput]


PLAIN = ParallelStyles(ColwiseParallel, RowwiseParallel, PrepareModuleInput)


def apply_tensor_parallel(
    model: nn.Module,
    split: Mapping[str, str],
    tp: DeviceMesh,
    head_width: int,
    loss_parallel: bool,
    kinds_of: Callable[[nn.Module], ParallelStyles] = lambda layer: PLAIN,
) -> None:
    """Split every module that `split` names, in the way of its word and its column.

    `kinds_of` says the column of a linear layer. Between modules the activations are plain local
    tensors: [B, T/tp, D] on the residual stream, whole sequences of a part of the heads or columns
    inside attention and feed-forward.
    """
    if tp.size() == 1:
        return
    words = {
        name: word
        for pattern, word in split.items()
        for name, module in model.named_modules()
        if fnmatchcase(name, pattern) and not isinstance(module, nn.Identity)
    }
    plan = {}
    for name, word in words.items():
        kinds = _kinds_at(name, model, words, kinds_of)
        plan[name] = _styles(tp, head_width, loss_parallel, kinds)[word]
    parallelize_module(model, tp, plan)


def _kinds_at(
    name: str,
    model: nn.Module,
    words: Mapping[str, str],
    kinds_of: Callable[[nn.Module], ParallelStyles],
) -> ParallelStyles:
    """The column of a module: a layer's own; what is gathered, that of all layers which take it."""
    takers = [name]
    if words[name] == "gather_sequence":
        takers = [n for n, w in words.items() if n.startswith(f"{name}.") and w in _TAKE_GATHERED]
    layers = [model.get_submodule(taker) for taker in takers]
    found = {kinds_of(layer) for layer in layers if isinstance(layer, nn.Linear)}
    return found.pop() if len(found) == 1 else PLAIN


def _styles(
    tp: DeviceMesh, head_width: int, loss_parallel: bool, kinds: ParallelStyles
) -> dict[str, ParallelStyle]:
    sequence, whole = Shard(SEQUENCE), Replicate()
    return {
        "vocab_in": RowwiseParallel(input_layouts=whole, output_layouts=sequence),
        "sequence": _ReplicatedNorm(),
        "gather_sequence": _gather_sequence(kinds.gather),
        "colwise": kinds.colwise(),
        "colwise_kv": _KeyValueColwise(head_width, tp.size(), kinds.colwise),
        "heads": _ReplicatedNorm(),
        "rowwise": kinds.rowwise(output_layouts=sequence),
        "vocab_out": _VocabularyOut(loss_parallel),
    }


class _ReplicatedNorm(ParallelStyle):
    """An RMSNorm of sharded activations: [B, T/tp, D], or [B, T, H/tp, K].

    The weight is replicated, and each rank computes a partial sum of its gradient. These are added
    in fp32, as FSDP adds gradients; torch's SequenceParallel adds them in the compute dtype.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.RMSNorm), "other norms may have a bias"
        weight = distribute_tensor(module.weight, device_mesh, [Replicate()], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))
        module.forward = partial(_normalize, module)
        return module


def _normalize(norm: nn.RMSNorm, x: Tensor) -> Tensor:
    """`norm` of a plain tensor, by the plain tensor behind its replicated weight."""
    # Nothing is sent here: the weight is replicated already. Backward is what this is for.
    weight = norm.weight.redistribute(placements=[Replicate()], backward_dtype=torch.float32)
    local = weight.to_local(grad_placements=[Partial()])
    return F.rms_norm(x, norm.normalized_shape, local, norm.eps)


def _gather_sequence(kind: type[PrepareModuleInput]) -> PrepareModuleInput:
    """The whole sequence of the first input; what else a module is given passes as it is."""

    class GatherSequence(kind):
        def _prepare_input_fn(self, inputs, device_mesh):
            first, *others = inputs
            return (*super()._prepare_input_fn((first,), device_mesh), *others)

    return GatherSequence(input_layouts=(Shard(SEQUENCE),), desired_input_layouts=(Replicate(),))


class _KeyValueColwise(ParallelStyle):
    """Column-parallel keys or values; with fewer heads than ranks, each rank takes a copied one."""

    def __init__(self, head_width: int, ranks: int, kind: type[ColwiseParallel]):
        super().__init__()
        self.head_width, self.ranks, self.kind = head_width, ranks, kind

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        heads = module.out_features // self.head_width
        if heads % self.ranks == 0:
            return self.kind()._apply(module, device_mesh)
        return distribute_module(
            module, device_mesh, self._replicate, self._to_dtensor, self._one_head
        )

    def _replicate(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        for leaf, parameter in module.named_parameters(recurse=False):
            whole = distribute_tensor(parameter, device_mesh, [Replicate()], src_data_rank=None)
            module.register_parameter(leaf, nn.Parameter(whole))

    def _to_dtensor(self, module: nn.Module, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        (x,) = inputs
        return (x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, [Replicate()]),)

    def _one_head(self, module: nn.Module, output: DTensor, device_mesh: DeviceMesh):
        heads = output.unflatten(-1, (-1, self.head_width)).unsqueeze(3)  # [B, T, Hkv, 1, K]
        copies = heads.expand(-1, -1, -1, self.ranks // heads.shape[2], -1).flatten(2, 4)
        return copies.redistribute(placements=[Shard(2)]).to_local()  # backward sums the copies


class _VocabularyOut(ParallelStyle):
    """The output layer by columns, from sequences in parts; its loss is shared too, or not."""

    def __init__(self, loss_parallel: bool):
        super().__init__()
        self.kind = _ShardedVocabulary if loss_parallel else _GatheredVocabulary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.vocabulary = self.kind(device_mesh, module.out_features)
        return distribute_module(module, device_mesh, self._shard, self._gather, self._plain)

    def _shard(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        weight = distribute_tensor(module.weight, device_mesh, [Shard(0)], src_data_rank=None)
        module.register_parameter("weight", nn.Parameter(weight))

    def _gather(self, module: nn.Module, inputs: tuple, device_mesh: DeviceMesh) -> tuple:
        (x,) = inputs
        x = x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, [Shard(SEQUENCE)])
        return (x.redistribute(placements=[Replicate()]),)

    def _plain(self, module: nn.Module, output: Tensor, device_mesh: DeviceMesh) -> Tensor:
        return output.full_tensor() if isinstance(output, DTensor) else output  # logits, or a loss


class _ShardedVocabulary(Vocabulary):
    """Each rank of a mesh has the logits of its part of the ids, and never the others'."""

    def __init__(self, tp: DeviceMesh, size: int):
        super().__init__()
        self.tp, self.most = tp, -(-size // tp.size())  # ids of a rank; the last may have fewer
        self.first_id = tp.get_local_rank() * self.most

    def local_tensors(self, x: DTensor, weight: DTensor) -> tuple[Tensor, Tensor]:
        return x.to_local(grad_placements=[Partial()]), weight.to_local()

    def reduce_max(self, local: Tensor) -> Tensor:
        return all_reduce_max(self.tp, local)

    def reduce_sum(self, local: Tensor) -> Tensor:
        return all_reduce_sum(self.tp, local)


class _GatheredVocabulary(_ShardedVocabulary):
    """The same logits, which every rank then sees whole."""

    def log_sum_exp(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        padded = F.pad(logits, (0, self.most - logits.shape[-1]), value=-torch.inf)
        whole = all_gather_tensor(self.tp.get_group(), padded).transpose(0, 1).flatten(1)
        largest = whole.amax(-1)
        total, at = self.softmax_terms(whole, largest, labels)
        logits.sub_(largest.unsqueeze(-1)).exp_()
        return largest, largest + total.log(), at


def part_of(
    word: str | None, rows: int, columns: int, ranks: int, head_width: int
) -> tuple[int, int]:
    """The rows and columns that a rank has of a linear layer's weight, by the layer's word."""
    if word == "colwise":
        return rows // ranks, columns
    if word == "colwise_kv":
        return (rows if rows // head_width % ranks else rows // ranks), columns
    return (rows, columns // ranks) if word == "rowwise" else (rows, columns)


def tensor_parallel_problems(
    degrees: Degrees, sizes: ModelSizes, seq_len: int, key: str
) -> Iterator[ConfigError]:
    """What of a model's sizes, and of the sequence set by `key`, tensor parallel cannot split."""
    tensor = degrees.tensor
    if tensor == 1:
        return
    degree, name = f"parallelism.tensor_parallel_degree = {tensor}", "tensor_parallel_degree"
    for size in ("n_heads", "hidden_dim"):
        count = getattr(sizes, size)
        if count % tensor:
            yield ConfigError(
                f"{degree}: cannot split model.{size} = {count} evenly.",
                fix=f"Use a divisor of {count}.",
                keys=(f"parallelism.{name}", f"model.{size}"),
            )
    kv = sizes.n_kv_heads
    if kv % tensor and tensor % kv:
        yield ConfigError(
            f"{degree}: neither divides model.n_kv_heads = {kv} nor is a multiple of it.",
            fix=f"Use a divisor of {kv}, or a multiple (each head is then copied).",
            keys=(f"parallelism.{name}", "model.n_kv_heads"),
        )
    if seq_len % tensor and degrees.context == 1:  # else the part of a rank is asked about
        yield ConfigError(
            f"{degree}: cannot split {key} = {seq_len} evenly; between the matrices each rank"
            " holds its part of the sequence.",
            fix=f"Use a multiple of {tensor}.",
            keys=(f"parallelism.{name}", key),
        )
