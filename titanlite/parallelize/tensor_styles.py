"""ParallelStyles of our own, beside those of torch and torchao."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
)

from titanlite.distributed.collectives import (
    all_gather_tensor,
    all_reduce_max,
    all_reduce_sum,
    local_shard,
)
from titanlite.kernels.attention import ParametersOfHeads
from titanlite.models import OutputLayer, Vocabulary
from titanlite.models.decoder import PositionEmbedding, ZeroCentredNorm, look_up
from titanlite.models.loss import select_label_logit
from titanlite.parallelize.compile import replace_forward

SEQUENCE_DIM = 1  # of [B, T, ...]: sharded between the matmuls


class LinearStyles(NamedTuple):
    """The styles for a kind of linear layer (torch's or torchao's), and for gathering its input."""

    colwise: type[ColwiseParallel]
    rowwise: type[RowwiseParallel]
    gather: type[PrepareModuleInput]


DEFAULT_STYLES = LinearStyles(ColwiseParallel, RowwiseParallel, PrepareModuleInput)
NORM_FORWARDS = {nn.RMSNorm.forward, nn.LayerNorm.forward, ZeroCentredNorm.forward}


class LocalForward(ParallelStyle):
    """A module with replicated parameters, and `forward(module, mesh, *inputs)` as its forward.

    The function computes on plain tensors. The partial gradients of the parameters are summed in
    fp32, as by FSDP; torch's SequenceParallel sums them in the compute dtype.
    """

    def __init__(self, forward: Callable[..., Tensor]):
        super().__init__()
        self.forward = forward

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        is_norm = isinstance(module, nn.RMSNorm | nn.LayerNorm)
        if is_norm and type(module).forward not in NORM_FORWARDS:
            raise TypeError(
                f"{type(module).__name__} has a forward of its own, which tensor parallelism would"
                " not call. Put what it computes into the block, or add it to `normalize_locally`."
            )
        distribute_parameters(module, device_mesh, Replicate())
        replace_forward(module, self.forward, device_mesh)
        return module


def distribute_parameters(module: nn.Module, tp: DeviceMesh, placement: Placement) -> None:
    """Make DTensors of the parameters of a module itself."""
    for name, _ in list(module.named_parameters(recurse=False)):
        distribute_parameter(module, name, tp, [placement])


def distribute_parameter(
    module: nn.Module, name: str, mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Replace a parameter by a DTensor; no rank sends its values."""
    plain = module.get_parameter(name)
    dtensor = distribute_tensor(plain, mesh, placements, src_data_rank=None)
    module.register_parameter(name, nn.Parameter(dtensor, plain.requires_grad))


def normalize_locally(norm: nn.RMSNorm | nn.LayerNorm, tp: DeviceMesh, x: Tensor) -> Tensor:
    """RMSNorm or LayerNorm of sharded activations, [B, T/tp, D] or [B, T, H/tp, K]."""
    weight = replicated_local(norm.weight)
    if isinstance(norm, ZeroCentredNorm):
        return norm.normalize(x, weight)
    if isinstance(norm, nn.RMSNorm):
        return F.rms_norm(x, norm.normalized_shape, weight, norm.eps)
    bias = None if norm.bias is None else replicated_local(norm.bias)
    return F.layer_norm(x, norm.normalized_shape, weight, bias, norm.eps)


def project_locally(layer: nn.Linear, tp: DeviceMesh, x: Tensor) -> Tensor:
    """A linear layer without bias on this rank's part of the residual stream [B, T/tp, D]."""
    return F.linear(x, replicated_local(layer.weight))


def replicated_local(parameter: Tensor) -> Tensor:
    """The local tensor of a replicated parameter, of which each rank has a partial gradient."""
    assert isinstance(parameter, DTensor)
    # It is replicated already, so forward sends nothing: this sets the backward dtype.
    replicated = parameter.redistribute(placements=[Replicate()], backward_dtype=torch.float32)
    return replicated.to_local(grad_placements=[Partial()])


class VocabularyEmbedding(RowwiseParallel):
    """Embedding sharded by vocabulary; its output [B, T/tp, D] is sequence-parallel.

    The output is copied into a plain tensor. RowwiseParallel returns a view, about which FSDP2
    warns, and it may be an AsyncCollectiveTensor, for which compiled blocks return no gradient.
    """

    def __init__(self) -> None:
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(SEQUENCE_DIM))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, inputs, output: output.clone())
        return module


def add_own_positions(
    module: PositionEmbedding, tp: DeviceMesh, x: Tensor, positions: Tensor
) -> Tensor:
    """Add this rank's part of the learned positions to the residual stream [B, T/tp, D]."""
    own = positions.chunk(tp.size(), dim=-1)[tp.get_local_rank()]
    return x + look_up(own, replicated_local(module.weight))


class ProjectionNorm(ParallelStyle):
    """RMSNorm of the queries or keys of all heads together; a rank has some of them.

    The weight is sharded as the projection is. With fewer heads than ranks it is replicated, and
    several ranks have the same head; see `KeyValueColwise`.
    """

    def __init__(self, head_width: int):
        super().__init__()
        self.head_width = head_width

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        norm = module
        assert isinstance(norm, nn.RMSNorm)
        heads, ranks = norm.normalized_shape[0] // self.head_width, device_mesh.size()
        is_sharded = heads % ranks == 0
        distribute_parameters(norm, device_mesh, Shard(0) if is_sharded else Replicate())
        copies = 1 if is_sharded else ranks // heads
        replace_forward(norm, _sharded_norm_forward, device_mesh, copies)
        return module


def _sharded_norm_forward(norm: nn.RMSNorm, tp: DeviceMesh, copies: int, x: Tensor) -> Tensor:
    """Normalise this rank's heads by the mean square of those of all ranks."""
    assert isinstance(norm.weight, DTensor) and norm.eps is not None
    if copies == 1:
        weight = norm.weight.to_local()
    else:
        first = tp.get_local_rank() // copies * x.shape[-1]
        weight = replicated_local(norm.weight)[first : first + x.shape[-1]]
    squares = x.float().square().sum(-1, keepdim=True) / copies
    total = DTensor.from_local(squares, tp, [Partial()]).redistribute(placements=[Replicate()])
    # sends nothing in forward; backward sums the gradients of the ranks, each from its own heads
    total = total.redistribute(placements=[Replicate()])
    mean = total.to_local(grad_placements=[Partial()]) / norm.normalized_shape[0]
    return (x.float() * (mean + norm.eps).rsqrt() * weight).to(x.dtype)  # rounded once


@cache  # a class for each block would make torch.compile compile each block
def gather_sequence(input_style: type[PrepareModuleInput]) -> PrepareModuleInput:
    """All-gather the first input of a module over the sequence; pass other inputs unchanged."""

    class GatherSequence(input_style):  # type: ignore[valid-type, misc]  # the base is a parameter
        def _prepare_input_fn(self, inputs, device_mesh):
            first, *others = inputs
            return (*super()._prepare_input_fn((first,), device_mesh), *others)

    return GatherSequence(
        input_layouts=(Shard(SEQUENCE_DIM),), desired_input_layouts=(Replicate(),)
    )


class PerHead(ParallelStyle):
    """A module whose parameters have rows for each head; a rank has those of its heads."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, ParametersOfHeads)
        distribute_parameters(module, device_mesh, Shard(0))
        module.use_local(local_shard)
        return module


class KeyValueColwise(ParallelStyle):
    """Column-parallel projection to keys or values.

    With fewer heads than ranks, the weight is replicated; a rank takes the head its queries need.
    """

    def __init__(self, head_width: int, colwise: type[ColwiseParallel]):
        super().__init__()
        self.head_width, self.colwise = head_width, colwise

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        if module.out_features // self.head_width % device_mesh.size() == 0:
            return self.colwise()._apply(module, device_mesh)
        distribute_parameters(module, device_mesh, Replicate())
        module.register_forward_hook(
            lambda _, inputs, output: self._select_head(output, device_mesh.size())
        )
        return module

    def _select_head(self, output: DTensor, ranks: int) -> Tensor:
        heads = output.unflatten(-1, (-1, self.head_width)).unsqueeze(3)  # [B, T, Hkv, 1, K]
        copies = heads.expand(-1, -1, -1, ranks // heads.shape[2], -1).flatten(2, 4)
        # In backward, this gathers the gradients of all copies, and `expand` adds them up.
        return copies.redistribute(placements=[Shard(2)]).to_local()


class Replicated(ParallelStyle):
    """A layer that every rank computes for all tokens, with replicated weights and activations."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        distribute_parameters(module, device_mesh, Replicate())
        return module


class SharedByHeads(ParallelStyle):
    """A module without parameters, whose output is used by the heads of every rank.

    Its first input is replicated. Each rank's heads have a part of the gradient of it.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_pre_hook(
            lambda _, inputs: (inputs[0].to_local(grad_placements=[Partial()]), *inputs[1:])
        )
        return module


class OutputLayerColwise(ParallelStyle):
    """Column-parallel output layer with a sequence-parallel input.

    With loss parallel, the loss is computed from sharded logits; without, logits are gathered.
    """

    def __init__(self, loss_parallel: bool):
        super().__init__()
        self.vocabulary = ShardedVocabulary if loss_parallel else GatheredVocabulary

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, OutputLayer)
        module.vocabulary = self.vocabulary(device_mesh, module.out_features)
        distribute_parameters(module, device_mesh, Shard(0))
        module.register_forward_pre_hook(partial(_gather_input, device_mesh))
        module.register_forward_hook(  # logits, or a loss, as a plain tensor
            lambda _, inputs, out: out.full_tensor() if isinstance(out, DTensor) else out
        )
        return module


def _gather_input(tp: DeviceMesh, module: nn.Module, inputs: tuple) -> DTensor:
    x = DTensor.from_local(inputs[0], tp, [Shard(SEQUENCE_DIM)])
    return x.redistribute(placements=[Replicate()])


class ShardedVocabulary(Vocabulary):
    """The loss from sharded logits: each rank computes those of its shard of the token ids."""

    def __init__(self, tp: DeviceMesh, size: int):
        super().__init__()
        self.tp = tp
        self.shard_size = -(-size // tp.size())  # token ids of a rank; the last may have fewer
        self.first_id = tp.get_local_rank() * self.shard_size

    def local_tensors(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(x, DTensor) and isinstance(weight, DTensor)
        return x.to_local(grad_placements=[Partial()]), weight.to_local()

    def reduce_max(self, local: Tensor) -> Tensor:
        return all_reduce_max(self.tp, local)

    def reduce_sum(self, local: Tensor) -> Tensor:
        return all_reduce_sum(self.tp, local)


class GatheredVocabulary(ShardedVocabulary):
    """The loss from gathered logits: every rank computes the softmax over all token ids."""

    def log_sum_exp(self, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        padded = F.pad(logits, (0, self.shard_size - logits.shape[-1]), value=-torch.inf)
        all_logits = all_gather_tensor(self.tp.get_group(), padded).transpose(0, 1).flatten(1)
        label_logit = select_label_logit(all_logits, labels)  # not shifted: they begin at id 0
        max_logit, exp_sum = self.softmax_terms(all_logits)
        return self.softmax_terms(logits)[0], max_logit + exp_sum.log(), label_logit
