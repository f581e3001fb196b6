"""Whole matrices reach their owner, their results reach every shard, and the work is balanced."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.collectives import local_shard
from titanlite.models import LLAMA3
from titanlite.optim import owned_matrices
from titanlite.optim.muon import orthogonalization_flops
from titanlite.optim.owned_matrices import (
    OwnedMatrices,
    WholeMatrixUpdate,
    assign_owners,
    plan_rounds,
)

SHAPES = [(5, 3), (1, 7), (8, 8), (3, 2), (8, 8), (6, 1)]  # fewer rows than ranks, and uneven ones


def values(index: int) -> Tensor:
    rows, columns = SHAPES[index]
    return torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + 100 * index


def transform(index: int, matrix: Tensor) -> Tensor:
    """Each element depends on the whole matrix."""
    assert torch.equal(matrix, values(index)), f"matrix {index} is not whole"
    return matrix.flip(0, 1) * 2 + matrix.sum()


def sharded_parameters(layout: str) -> list[Tensor]:
    """The matrices of `SHAPES` as parameters, sharded by FSDP and by tensor parallelism."""
    names = ("replicate", "shard", "tensor")
    world = init_device_mesh("cpu", tuple(int(size) for size in layout), mesh_dim_names=names)
    replicate, _, tensor = world.shape
    module = torch.nn.Module()
    for index in range(len(SHAPES)):
        parameter: Tensor = values(index)
        if tensor > 1:
            # as FSDP expects it, tensor parallelism divides evenly
            even = [dim for dim in (0, 1) if SHAPES[index][dim] % tensor == 0]
            placement = Shard(even[-1] if index % 3 else even[0]) if even else Replicate()
            parameter = distribute_tensor(parameter, world["tensor"], [placement])
        module.register_parameter(str(index), torch.nn.Parameter(parameter))
    fully_shard(module, mesh=world["replicate", "shard"] if replicate > 1 else world["shard"])
    return list(module.parameters())


def update_all(layouts: list[str]) -> list[list[int]]:
    owned_matrices.ROUND_ELEMENTS = 1  # several rounds
    owned_of_layouts = []
    for layout in layouts:
        parameters = sharded_parameters(layout)
        matrices = OwnedMatrices(parameters, [float(p.numel()) for p in parameters])
        written: dict[int, Tensor] = {}
        computed: list[int] = []

        def compute(index: int, matrix: Tensor, computed=computed) -> Tensor:
            computed.append(index)
            return transform(index, matrix)

        def make_input_shard(index: int, parameters=parameters) -> Tensor:
            return local_shard(parameters[index].detach())

        update = WholeMatrixUpdate(make_input_shard, compute, written.__setitem__, torch.float32)
        wanted = [0, 1, 2, 4, 5]
        complete = matrices.begin(wanted, update)
        assert not written and not computed
        complete()
        assert sorted(written) == wanted
        for index, shard in written.items():
            parameter = parameters[index]
            assert isinstance(parameter, DTensor)
            mesh, placements = parameter.device_mesh, parameter.placements
            whole = DTensor.from_local(
                shard.contiguous(),
                mesh,
                placements,
                shape=parameter.shape,
                stride=(parameter.stride()),
            ).full_tensor()
            assert torch.equal(whole, transform(index, values(index))), (layout, index)
        assert computed == [i for i in computed if matrices.is_owned(i)]
        owned_of_layouts.append(sorted(computed))
    return owned_of_layouts


@pytest.mark.slow
def test_every_shard_gets_the_result_of_its_whole_matrix():
    layouts = ["141", "122", "114", "212", "221"]  # replicas, FSDP ranks, tensor-parallel ranks
    owned = run_on_ranks(update_all, 4, layouts)
    for number, layout in enumerate(layouts):
        computed = sorted(index for rank in owned for index in rank[number])
        replicas = int(layout[0])
        assert computed == sorted([0, 1, 2, 4, 5] * replicas), f"{layout}: each is computed once"
        assert max(len(rank[number]) for rank in owned) < 5, "the work is divided"


def big_model_matrices() -> list[tuple[int, int]]:
    with torch.device("meta"):
        model = LLAMA3.build(LLAMA3.flavors["8B"])
    return [tuple(p.shape) for p in model.layers.parameters() if p.dim() == 2]


@pytest.mark.parametrize("ranks, most", [(8, 1.01), (64, 1.1)])
def test_the_cost_of_an_8b_model_is_balanced(ranks, most):
    shapes = big_model_matrices()
    costs = [orthogonalization_flops(*shape) for shape in shapes]
    owners = assign_owners(costs, ranks)
    loads = [
        sum(c for c, o in zip(costs, owners, strict=True) if o == rank) for rank in range(ranks)
    ]
    mean = sum(costs) / ranks
    assert max(loads) / mean < most
    rounds = plan_rounds(costs, [rows * columns for rows, columns in shapes], owners)
    assert sorted(i for members in rounds for i in members) == list(range(len(shapes)))
    # The ranks wait for each other after a round, so the slowest of each round counts.
    slowest = 0.0
    for members in rounds:
        slowest += max(sum(costs[i] for i in members if owners[i] == rank) for rank in range(ranks))
    assert slowest / mean < most + 0.05
