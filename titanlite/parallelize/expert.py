"""Expert parallel: experts partitioned over ranks, and tensor parallel inside of experts.

Two layouts of a mixture of experts on tensor-parallel ranks, whose input is [B, T/tp, D]:

- Experts that are sharded over the tensor ranks: the ranks gather the sequence, route the same
  tokens, compute their shard of every expert, and reduce-scatter the sums to the sequence.
- Experts that are not: each rank routes its own tokens. Only the shared experts, which are sharded
  over the tensor ranks, gather tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from titanlite.distributed.collectives import local_shard, shard_region
from titanlite.distributed.mesh import Degrees, ExpertMesh, Mesh
from titanlite.errors import ConfigError
from titanlite.models import ExpertSizes, ModelSizes, ModelSpec, first_match
from titanlite.models.moe import GroupedExperts, MixtureOfExperts
from titanlite.parallelize.activation_checkpoint import outside_saved_operations
from titanlite.parallelize.compile import replace_forward
from titanlite.parallelize.tensor import weight_shard_size
from titanlite.parallelize.tensor_styles import (
    SEQUENCE_DIM,
    distribute_parameter,
    distribute_parameters,
    replicated_local,
)
from titanlite.parallelize.token_exchange import start_exchange

# The hidden dimension of each weight, which is sharded over the tensor ranks
EXPERT_HIDDEN_DIMS = {"w1": 1, "w2": 2, "w3": 1}  # of [E, F, D] and [E, D, F]
# The channels of a bias are sharded, too. The output of a rank is a summand; its shard of b2
# [E, D, 1] is in that of these channels only, so that the sum has the bias once.
EXPERT_HIDDEN_DIMS |= {"b1": 1, "b2": 1, "b3": 1}
SHARED_HIDDEN_DIMS = {"w1": 0, "w2": 1, "w3": 0}  # of [F, D] and [D, F]


def hidden_dims_of_experts(model: nn.Module) -> dict[str, int]:
    """Parameter name -> hidden dimension, for every routed and shared expert of a model."""
    dims = {}
    for path, module in model.named_modules():
        if isinstance(module, GroupedExperts):
            names = dict(module.named_parameters())
            dims.update({f"{path}.{name}": EXPERT_HIDDEN_DIMS[name] for name in names})
        if isinstance(module, MixtureOfExperts) and module.shared_experts is not None:
            shared = f"{path}.shared_experts"
            dims |= {f"{shared}.{name}.weight": dim for name, dim in SHARED_HIDDEN_DIMS.items()}
    return dims


def weight_shards(
    model: nn.Module, spec: ModelSpec, sizes: ModelSizes, degrees: Degrees
) -> dict[str, list[int]]:
    """Parameter name -> shape of a rank's part of it before FSDP shards it; the largest, if uneven.

    Of matrices and stacked experts [E, ...]; other parameters are left out.
    """
    shards, hidden_dims = {}, hidden_dims_of_experts(model)
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        hidden_dim, stacked = hidden_dims.get(name), len(shape) == 3
        if hidden_dim is not None:
            shape[0] //= degrees.expert if stacked else 1
            ranks = degrees.expert_tensor_ranks if stacked else degrees.tensor
            shape[hidden_dim] = -(-shape[hidden_dim] // ranks)
            shards[name] = shape
        elif len(shape) == 2:
            role, (rows, columns) = first_match(spec.tp_plan, name.rpartition(".")[0]), shape
            size = weight_shard_size(role, rows, columns, degrees.tensor, sizes.head_width)
            shards[name] = list(size)
    return shards


def apply_expert_parallel(model: nn.Module, mesh: Mesh) -> None:
    """Parallelize every mixture of experts of a model, in place."""
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            _parallelize_experts(module.experts, mesh.experts)
            if mesh.tp.size() > 1:
                _parallelize_over_tensor_ranks(module, mesh.tp, mesh.degrees)
            if mesh.experts.exchange is not None:
                group = mesh.experts.exchange.get_group()
                module.use_dispatch(partial(_dispatch, group))


def experts_on_own_mesh(blocks: nn.ModuleDict, mesh: ExpertMesh) -> dict[nn.Module, nn.Module]:
    """Block -> its experts, which FSDP shards over other ranks than the rest of the block."""
    return {
        block: module.experts
        for block in blocks.values()
        for module in block.modules()
        if isinstance(module, MixtureOfExperts) and mesh.exchange is not None
    }


def _dispatch(
    group: dist.ProcessGroup, experts: GroupedExperts, rows: Tensor, counts: Tensor
) -> Callable[[], Tensor]:
    """The `TokenDispatch` of expert parallel."""

    def compute(received: Tensor, local_counts: Tensor) -> Tensor:
        with outside_saved_operations():  # FSDP's all-gather of the experts
            return experts(received, local_counts)

    return start_exchange(group, compute, rows, counts)


def _parallelize_experts(experts: GroupedExperts, mesh: ExpertMesh) -> None:
    """Shard the weights: experts over expert ranks, their hidden width over the tensor ranks."""
    if mesh.ep_tp.size() == 1:
        return
    for name in dict(experts.named_parameters()):
        dim = EXPERT_HIDDEN_DIMS[name]
        placements: list[Placement] = [Shard(0)] if mesh.exchange is not None else [Shard(dim)]
        if mesh.ep_tp.ndim == 2:
            placements.append(Shard(dim))
        distribute_parameter(experts, name, mesh.ep_tp, placements)
    replace_forward(experts, _compute_shard, type(experts).forward)


def _compute_shard(experts: nn.Module, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return forward(experts, *inputs, local=partial(_local_weight, experts))


def _local_weight(experts: nn.Module, weight: Tensor) -> Tensor:
    """This rank's shard of a weight; of the bias b2 all channels, those of other ranks zero."""
    local = local_shard(weight)
    if weight is not getattr(experts, "b2", None):
        return local
    assert isinstance(weight, DTensor)
    own = weight.device_mesh.get_coordinate()
    assert own is not None, "this rank is not in the mesh of the parameter"
    first = shard_region(weight, own)[1][1]
    return F.pad(local, (0, 0, first, weight.shape[1] - first - local.shape[1]))


def _parallelize_over_tensor_ranks(
    module: MixtureOfExperts, tp: DeviceMesh, degrees: Degrees
) -> None:
    """Parallelize the gates and the shared experts, and gather the sequence for sharded experts."""
    shared = module.shared_experts
    for gate in (module.router.gate, module.shared_gate):
        if gate is not None:
            distribute_parameters(gate, tp, Replicate())
            replace_forward(gate, _replicated_gate_forward)
    if shared is not None:
        _shard_shared_experts(shared, tp)
    if degrees.expert_tensor_ranks > 1:
        module.router.share_tokens(tp.size())
        replace_forward(module, _gathered_forward, type(module).forward, tp, SEQUENCE_DIM)
    elif shared is not None:
        replace_forward(shared, _gathered_forward, type(shared).forward, tp, 0)


def _replicated_gate_forward(gate: nn.Linear, x: Tensor) -> Tensor:
    """The logits in fp32, as `RouterGate`; the ranks' gradients of the weight are summed."""
    bias = None if gate.bias is None else replicated_local(gate.bias).float()
    return F.linear(x.float(), replicated_local(gate.weight).float(), bias)


def _shard_shared_experts(shared: nn.Module, tp: DeviceMesh) -> None:
    """Shard the hidden width; the output of each rank is one summand of the whole output."""
    for name, dim in SHARED_HIDDEN_DIMS.items():
        layer = shared.get_submodule(name)
        assert isinstance(layer, nn.Linear)
        distribute_parameters(layer, tp, Shard(dim))
        if type(layer) is nn.Linear:
            replace_forward(layer, _local_linear_forward)
        else:  # Float8, whose scales are those of the whole operands: DTensor reduces them
            of_dtensors = _colwise_forward if dim == 0 else _rowwise_forward
            replace_forward(layer, of_dtensors, type(layer).forward, tp)


def _local_linear_forward(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, local_shard(layer.weight))


def _colwise_forward(layer: nn.Module, forward: Callable, tp: DeviceMesh, x: Tensor) -> Tensor:
    """This rank's hidden features of tokens x that all ranks have."""
    return forward(layer, _AsReplicated.apply(x, tp)).to_local()


def _rowwise_forward(layer: nn.Module, forward: Callable, tp: DeviceMesh, x: Tensor) -> Tensor:
    """This rank's summand of the output, from its hidden features x."""
    out = forward(layer, DTensor.from_local(x, tp, [Shard(x.dim() - 1)]))
    return out.to_local(grad_placements=[Replicate()])


class _AsReplicated(torch.autograd.Function):
    """A tensor that all ranks have as a DTensor; its gradient stays this rank's summand.

    That of DTensor.from_local would be summed over the ranks, and then once more by the caller.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: DeviceMesh) -> Tensor:
        return DTensor.from_local(x, tp, [Replicate()])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert isinstance(grad, DTensor) and grad.placements == (Partial(),)
        return grad.to_local(), None


def _gathered_forward(
    module: nn.Module, forward: Callable[..., Tensor], tp: DeviceMesh, dim: int, x: Tensor
) -> Tensor:
    """Sum `forward`, which computes one summand, over the tensor ranks, for the tokens of all."""
    whole = DTensor.from_local(x, tp, [Shard(dim)]).redistribute(placements=[Replicate()])
    summand = forward(module, whole.to_local(grad_placements=[Partial()]))
    return (
        DTensor.from_local(summand, tp, [Partial()])
        .redistribute(placements=[Shard(dim)])
        .to_local()
    )


def check_expert_parallel(degrees: Degrees, experts: ExpertSizes | None) -> Iterator[ConfigError]:
    """Reject degrees that do not fit the experts of the model; None: it has none."""
    key = "parallelism.expert_parallel_degree"
    if experts is None:
        if degrees.expert > 1:
            yield ConfigError(
                f"{key} = {degrees.expert}: the model has no experts.",
                fix=f"Set {key} = 1, or choose a model with experts.",
            )
        return
    if experts.count % degrees.expert:
        yield ConfigError(
            f"{key} = {degrees.expert}: does not divide the {experts.count} experts of the model.",
            fix=f"Use a divisor of {experts.count}.",
        )
    tensor_key = "parallelism.tensor_parallel_degree"
    if experts.hidden_dim % degrees.expert_tensor_ranks:
        yield ConfigError(
            f"{tensor_key} = {degrees.tensor}: does not divide the hidden width of an expert,"
            f" {experts.hidden_dim}.",
            fix=f"Use a divisor of {experts.hidden_dim}, or set {key} above 1 and"
            " parallelism.expert_tensor_parallel_degree = 1.",
        )
    if experts.shared_dim % degrees.tensor:
        yield ConfigError(
            f"{tensor_key} = {degrees.tensor}: does not divide the hidden width of the shared"
            f" experts, {experts.shared_dim}.",
            fix=f"Use a divisor of {experts.shared_dim}.",
        )
