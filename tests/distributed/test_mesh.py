"""Each rank's coordinates, computed without processes, are those of the real DeviceMesh."""

from __future__ import annotations

import torch

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.mesh import (
    DIMENSIONS,
    Degrees,
    build_mesh,
    connect_mesh,
    coordinates_of,
)

DEGREES = Degrees(replicate=2, context=2, pipeline=2)


def local_coordinates() -> tuple[list[int], dict[str, list[int]]]:
    """(this rank's coordinate in four sub-meshes, the ranks of every sub-mesh it is in)."""
    mesh = build_mesh(DEGREES, "cpu")
    submeshes = {name: getattr(mesh, name) for name in ("batch", "loss", "cp", "tp", "pp")}
    own = [submesh.get_local_rank() for submesh in (mesh.pp, mesh.batch, mesh.cp, mesh.tp)]
    return own, {name: submesh.mesh.tolist() for name, submesh in submeshes.items()}


def test_computed_coordinates_match_the_device_mesh():
    results = run_on_ranks(local_coordinates, DEGREES.ranks)
    computed = [coordinates_of(rank, DEGREES) for rank in range(DEGREES.ranks)]
    expected = [[c["pipeline"], c["replicate"], c["context"], c["tensor"]] for c in computed]
    assert [own for own, _ in results] == expected
    dimensions_of = {
        "batch": ("replicate", "shard"),
        "loss": ("pipeline", "replicate", "shard", "context"),
        "cp": ("context",),
        "tp": ("tensor",),
        "pp": ("pipeline",),
    }
    for own, (_, ranks_of) in zip(computed, results, strict=True):
        for submesh, dimensions in dimensions_of.items():
            fixed = [d.name for d in DIMENSIONS if d.name not in dimensions]
            neighbours = [r for r, c in enumerate(computed) if all(c[d] == own[d] for d in fixed)]
            assert ranks_of[submesh] == neighbours, submesh


def connected_groups() -> tuple[list[str], int]:
    """(the phases of connecting, the number of groups that the sub-meshes use)."""
    mesh, phases = build_mesh(Degrees(shard=2, tensor=2), "cpu"), []
    connect_mesh(mesh, torch.device("cpu"), phases.append)
    submeshes = (mesh.batch, mesh.loss, mesh.fsdp, mesh.tp)
    return phases, len({submesh.get_group().group_name for submesh in submeshes})


def test_equal_ranks_share_one_communicator():
    phases = ["connect FSDP ranks", "connect TP ranks"]
    assert run_on_ranks(connected_groups, 4) == [(phases, 2)] * 4


def test_degrees_are_shown_in_mesh_order():
    assert str(Degrees(shard=4, tensor=2, pipeline=2)) == "PP 2 x FSDP 4 x TP 2"
    assert str(Degrees()) == "one process"
