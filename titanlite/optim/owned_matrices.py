"""Whole matrices of sharded parameters, each computed by one of the ranks that shard it.

An update that needs a whole matrix (a norm, a matmul) cannot be computed on shards. Here every
matrix has an owner. The owner receives the shards of all ranks, computes, and sends each rank its
shard of the result. So the work is divided over the ranks, and no rank has more than a few whole
matrices at a time. The owner computes what one process would: the same function of the same shape.
A stack of matrices, such as the experts of a block, has one owner.
"""

from __future__ import annotations

import heapq
import itertools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from titanlite.distributed.collectives import local_shard, shard_region, start_all_to_all
from titanlite.optim.conditional import ConditionalBase

# Elements of the whole matrices that a rank computes between two exchanges, unless one has more
ROUND_ELEMENTS = 1 << 24


def assign_owners(costs: Sequence[float], ranks: int) -> list[int]:
    """The rank that owns each matrix, so that the ranks have about the same cost.

    The most expensive matrix that is left goes to the rank with the lowest cost so far. The result
    depends on nothing but the arguments, so all ranks find the same.
    """
    owners = [0] * len(costs)
    loads = [(0.0, rank) for rank in range(ranks)]
    for index in _most_expensive_first(costs):
        load, owners[index] = loads[0]
        heapq.heapreplace(loads, (load + costs[index], owners[index]))
    return owners


def plan_rounds(
    costs: Sequence[float], sizes: Sequence[int], owners: Sequence[int]
) -> list[list[int]]:
    """The matrices of each round: the next ones of every owner, up to a number of elements each.

    The most expensive come first. So the owners also have about the same cost in each round, at the
    end of which they wait for each other. `sizes`: elements of each matrix.
    """
    limit = max(ROUND_ELEMENTS, *sizes)
    rounds: list[list[int]] = []
    filled: dict[int, tuple[int, int]] = {}  # owner -> (its current round, elements in it)
    for index in _most_expensive_first(costs):
        number, elements = filled.get(owners[index], (0, 0))
        if elements + sizes[index] > limit:
            number, elements = number + 1, 0
        filled[owners[index]] = (number, elements + sizes[index])
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(index)
    return rounds


def _most_expensive_first(costs: Sequence[float]) -> list[int]:
    return sorted(range(len(costs)), key=lambda index: -costs[index])


class WholeMatrixUpdate(NamedTuple):
    """What `OwnedMatrices` does with each matrix, by its index."""

    make_input_shard: Callable[[int], Tensor]
    # this rank's shard of the input; on every rank, once a step: it may update sharded state
    compute: Callable[[int, Tensor], Tensor]  # whole input -> whole result; on the owner
    write_shard: Callable[[int, Tensor], None]  # takes this rank's shard of the result
    dtype: torch.dtype  # of the input and of the result


class OwnedMatrices:
    """Matrices of one device mesh, distributed over the ranks that shard them.

    Mesh dimensions that shard no matrix have replicas; each group of them computes for itself.
    """

    def __init__(self, matrices: Sequence[Tensor], costs: Sequence[float]):
        self.shapes = [matrix.shape for matrix in matrices]
        self._device = matrices[0].device
        self._ranks = _ShardRanks(matrices)
        self.owners = assign_owners(costs, self._ranks.size)
        regions = [self._ranks.regions_of(matrix) for matrix in matrices]
        self._regions = [region.of_rank for region in regions]
        self._senders = [
            region.senders_to(owner) for region, owner in zip(regions, self.owners, strict=True)
        ]
        sizes = [shape.numel() for shape in self.shapes]
        self._rounds = plan_rounds(costs, sizes, self.owners)
        for matrix, of_rank in zip(matrices, self._regions, strict=True):
            own = of_rank[self._ranks.own]
            assert local_shard(matrix).shape == own.shape, "unknown placement"

    def is_owned(self, index: int) -> bool:
        """Whether this rank computes the matrix."""
        return self.owners[index] == self._ranks.own

    def begin(self, indices: Sequence[int], update: WholeMatrixUpdate) -> Callable[[], None]:
        """Start the update of some matrices; the returned function completes it.

        All ranks that shard the matrices must call both with the same indices. In between, the
        shards of the first round are sent. The shards of a round are sent while the round before it
        is computed, and its results while the round after it is.
        """
        wanted = set(indices)
        rounds = [[i for i in members if i in wanted] for members in self._rounds]
        rounds = [members for members in rounds if members]
        gathers = (self._start_gather(members, update) for members in rounds)  # lazily
        first = next(gathers, None)

        def complete() -> None:
            self._run_rounds(rounds, itertools.chain([first], gathers), update)

        return complete

    def _run_rounds(
        self,
        rounds: list[list[int]],
        gathers: Iterator[Callable[[], list[Tensor]] | None],
        update: WholeMatrixUpdate,
    ) -> None:
        gather, finish_scatter = next(gathers), None
        for members in rounds:
            assert gather is not None
            next_gather = next(gathers, None)
            owned = [i for i in members if self.is_owned(i)]
            results = [update.compute(*pair) for pair in zip(owned, gather(), strict=True)]
            gather = next_gather
            scatter = self._start_scatter(members, results, update)
            if finish_scatter is not None:
                finish_scatter()
            finish_scatter = scatter
        if finish_scatter is not None:
            finish_scatter()

    def _start_gather(
        self, members: list[int], update: WholeMatrixUpdate
    ) -> Callable[[], list[Tensor]]:
        """Start to send the shards of a round; returns a function for the owned whole matrices."""
        shards = {i: update.make_input_shard(i) for i in members}
        if self._ranks.group is None:
            return lambda: list(shards.values())
        own, ranks = self._ranks.own, range(self._ranks.size)
        sent: list[list[Tensor]] = [[] for _ in ranks]
        for i in members:
            if self._senders[i][own]:
                sent[self.owners[i]].append(shards[i].reshape(-1))
        owned = [i for i in members if self.is_owned(i)]
        received = [
            [self._regions[i][rank].elements for i in owned if self._senders[i][rank]]
            for rank in ranks
        ]
        wait = start_all_to_all(self._ranks.group, sent, received, self._empty(update))

        def join() -> list[Tensor]:
            pieces: dict[int, list[tuple[_Region, Tensor]]] = {i: [] for i in owned}
            for rank, values in enumerate(wait()):
                senders = [i for i in owned if self._senders[i][rank]]
                for i, piece in zip(senders, values, strict=True):
                    pieces[i].append((self._regions[i][rank], piece))
            return [_join_regions(self.shapes[i], pieces[i]) for i in owned]

        return join

    def _start_scatter(
        self, members: list[int], results: list[Tensor], update: WholeMatrixUpdate
    ) -> Callable[[], None]:
        """Start to send the results of a round back; returns a function that writes the shards."""
        if self._ranks.group is None:
            return lambda: _write_all(members, results, update)
        own, ranks = self._ranks.own, range(self._ranks.size)
        owned = [i for i in members if self.is_owned(i)]
        pieces_of = [
            [result[region.slices].reshape(-1) for region in self._regions[i]]
            for i, result in zip(owned, results, strict=True)
        ]
        sent = [[pieces[rank] for pieces in pieces_of] for rank in ranks]
        by_owner: list[list[int]] = [[] for _ in ranks]
        for i in members:
            by_owner[self.owners[i]].append(i)
        received = [[self._regions[i][own].elements for i in group] for group in by_owner]
        wait = start_all_to_all(self._ranks.group, sent, received, self._empty(update))

        def write() -> None:
            flat = list(itertools.chain(*wait()))
            order = list(itertools.chain(*by_owner))
            regions = [self._regions[i][own] for i in order]
            shards = [f.view(r.shape) for f, r in zip(flat, regions, strict=True)]
            _write_all(order, shards, update)

        return write

    def _empty(self, update: WholeMatrixUpdate) -> Tensor:
        return torch.empty(0, dtype=update.dtype, device=self._device)


def _write_all(indices: Sequence[int], shards: Sequence[Tensor], update: WholeMatrixUpdate) -> None:
    for index, shard in zip(indices, shards, strict=True):
        update.write_shard(index, shard)


class WholeMatrixOptimizer(ConditionalBase):
    """An optimizer whose update of a parameter needs the whole of it.

    Subclasses have the functions of `WholeMatrixUpdate`, of a parameter instead of an index, and:
    """

    @abstractmethod
    def flops(self, parameter: nn.Parameter) -> float:
        """FLOPs of one update."""

    def exchange_dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype of what is sent and computed."""
        return torch.float32

    @abstractmethod
    def make_input_shard(self, parameter: nn.Parameter, accept: Tensor | None) -> Tensor: ...
    @abstractmethod
    def compute(self, parameter: nn.Parameter, matrix: Tensor, accept: Tensor | None) -> Tensor: ...
    @abstractmethod
    def write_shard(
        self, parameter: nn.Parameter, result: Tensor, accept: Tensor | None
    ) -> None: ...

    def __init__(self, groups: Iterable[dict[str, Any]], defaults: dict[str, Any]):
        super().__init__(groups, defaults)
        # indices, as loading a state replaces the groups
        self._group_of = {p: i for i, g in enumerate(self.param_groups) for p in g["params"]}
        by_kind: dict[tuple, list[nn.Parameter]] = {}
        for parameter in self._group_of:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            kind = mesh, self.exchange_dtype(parameter)
            by_kind.setdefault(kind, []).append(parameter)
        self.owned = [
            (parameters, OwnedMatrices(parameters, [self.flops(p) for p in parameters]), dtype)
            for (_, dtype), parameters in by_kind.items()
        ]

    def group_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self.param_groups[self._group_of[parameter]]

    def update(self, accept: Tensor | None) -> None:
        self.begin_step(accept)()

    @torch.no_grad()
    def begin_step(self, accept: Tensor | None) -> Callable[[], None]:
        completions = [self._begin(*owned, accept) for owned in self.owned]

        @torch.no_grad()
        def complete() -> None:
            for completion in completions:
                completion()

        return complete

    def _begin(
        self,
        parameters: list[nn.Parameter],
        matrices: OwnedMatrices,
        dtype: torch.dtype,
        accept: Tensor | None,
    ) -> Callable[[], None]:
        update = WholeMatrixUpdate(
            make_input_shard=lambda i: self.make_input_shard(parameters[i], accept),
            compute=lambda i, matrix: self.compute(parameters[i], matrix, accept),
            write_shard=lambda i, result: self.write_shard(parameters[i], result, accept),
            dtype=dtype,
        )
        indices = [i for i, parameter in enumerate(parameters) if parameter.grad is not None]
        return matrices.begin(indices, update)


# --- regions -------------------------------------------------------------------------------------


class _Region(NamedTuple):
    """The part of a matrix, or of a stack of matrices, that one rank has."""

    shape: tuple[int, ...]
    offset: tuple[int, ...]  # of its first element

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its index into the whole."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))


class _MatrixRegions(NamedTuple):
    """The regions of one matrix."""

    of_rank: list[_Region]  # of each rank of the group
    copy_of_rank: list[tuple[int, ...]]  # coordinates along dimensions that do not shard the matrix

    def senders_to(self, owner: int) -> list[bool]:
        """Whether each rank sends its region to the owner: of several copies, one is sent."""
        return [copy == self.copy_of_rank[owner] for copy in self.copy_of_rank]


class _ShardRanks:
    """The ranks that together have all shards of some matrices of one device mesh."""

    def __init__(self, matrices: Sequence[Tensor]):
        self.size, self.own = 1, 0
        self.group: dist.ProcessGroup | None = None  # None: this rank has whole matrices
        self._coordinates: list[list[int]] = [[]]  # in the mesh, of each rank of the group
        self._dims: list[int] = []  # mesh dimensions that shard at least one matrix
        self._cache: dict[tuple, _MatrixRegions] = {}
        if not isinstance(matrices[0], DTensor):
            return
        mesh = matrices[0].device_mesh
        own = mesh.get_coordinate()
        assert own is not None, "this rank has shards"
        self._dims = [
            dim
            for dim in range(mesh.ndim)
            if mesh.size(dim) > 1 and any(_is_sharded(matrix, dim) for matrix in matrices)
        ]
        spans = [
            range(mesh.size(dim)) if dim in self._dims else [own[dim]] for dim in range(mesh.ndim)
        ]
        # Groups have their ranks in ascending order, whatever the mesh.
        self._coordinates = sorted(
            (list(c) for c in itertools.product(*spans)), key=lambda c: int(mesh.mesh[tuple(c)])
        )
        self.size, self.own = len(self._coordinates), self._coordinates.index(list(own))
        if self._dims:
            self.group = _group_of(mesh, self._dims, self._coordinates)

    def regions_of(self, matrix: Tensor) -> _MatrixRegions:
        """The region of each rank; the same object for matrices of one shape and placement."""
        if not isinstance(matrix, DTensor):
            return _MatrixRegions([_Region(tuple(matrix.shape), (0,) * matrix.dim())], [()])
        key = (matrix.shape, matrix.placements)
        if key not in self._cache:
            copies = [dim for dim in self._dims if not _is_sharded(matrix, dim)]
            self._cache[key] = _MatrixRegions(
                [_Region(*shard_region(matrix, coordinate)) for coordinate in self._coordinates],
                [tuple(coordinate[dim] for dim in copies) for coordinate in self._coordinates],
            )
        return self._cache[key]


def _is_sharded(matrix: Tensor, dim: int) -> bool:
    """Whether a matrix is sharded along a mesh dimension."""
    return isinstance(matrix, DTensor) and not matrix.placements[dim].is_replicate()


def _group_of(mesh: DeviceMesh, dims: list[int], coordinates: list[list[int]]) -> dist.ProcessGroup:
    """The process group of the ranks at these coordinates, which span the dimensions `dims`."""
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    ranks = [int(mesh.mesh[tuple(coordinate)]) for coordinate in coordinates]
    # Other ranks create groups of their own, or none: other pipeline stages may not need them.
    return dist.new_group(ranks, use_local_synchronization=True)


def _join_regions(shape: torch.Size, pieces: list[tuple[_Region, Tensor]]) -> Tensor:
    """A matrix from flat regions that tile it."""
    assert sum(r.elements for r, _ in pieces) == shape.numel(), "the shards do not tile the matrix"
    matrix = pieces[0][1].new_empty(shape)
    for region, values in pieces:
        matrix[region.slices] = values.view(region.shape)
    return matrix
