"""Who is whose neighbour, said without the others, is who it is among them."""

from __future__ import annotations

from tests.distributed.ranks import run_on_ranks
from titanlite.distributed.mesh import ORDER, Degrees, build_mesh, coordinates_of

DEGREES = Degrees(replicate=2, context=2, pipeline=2)


def coordinates() -> tuple[list[int], dict[str, list[int]]]:
    """(where this rank is in four views, its neighbours in every view)."""
    mesh = build_mesh(DEGREES, "cpu")
    views = {name: getattr(mesh, name) for name in ("batch", "loss", "cp", "tp", "pp")}
    here = [view.get_local_rank() for view in (mesh.pp, mesh.batch, mesh.cp, mesh.tp)]
    return here, {name: view.mesh.tolist() for name, view in views.items()}


def test_a_rank_is_where_the_picture_draws_it_and_its_views_are_its_neighbours():
    answers = run_on_ranks(coordinates, DEGREES.ranks)
    places = [coordinates_of(rank, DEGREES) for rank in range(DEGREES.ranks)]
    drawn = [[p["pipeline"], p["replicate"], p["context"], p["tensor"]] for p in places]
    assert [here for here, _ in answers] == drawn
    varying = {
        "batch": ("replicate", "shard"),
        "loss": ("pipeline", "replicate", "shard", "context"),
        "cp": ("context",),
        "tp": ("tensor",),
        "pp": ("pipeline",),
    }
    for mine, (_, views) in zip(places, answers, strict=True):
        for name, directions in varying.items():
            fixed = [d for d in ORDER if d not in directions]
            same = [r for r, p in enumerate(places) if all(p[d] == mine[d] for d in fixed)]
            assert views[name] == same, name
