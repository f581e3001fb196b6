"""Save from all ranks through DCP's planner and writer, with messages along a tree of ranks.

`dcp.save` gathers the plans of all ranks on rank 0 at every save, connects rank 0 to every rank for
this, and then sends the metadata of all chunks to every rank. Here the plans are exchanged only if
one of them has changed, and the metadata stays on rank 0. (DCP's own `enable_plan_caching` still
sends the metadata, and after a save that failed, the next one fails with a KeyError; torch 2.11 to
2.15.) Plans are objects of DCP: like `dcp.save`, ranks exchange them as pickles.
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter

from titanlite.checkpoint.dcp import as_checkpoint_error, call_on_all_ranks
from titanlite.checkpoint.model_state import State
from titanlite.distributed.collectives import run_on_rank_0
from titanlite.distributed.rank_tree import RankTree
from titanlite.storage import StorageFolder


class CollectiveSave:
    """Saves of the ranks of one group; keeps the plans for the next save."""

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.exchanges = 0  # how often the plans of all ranks were exchanged
        self._local: SavePlan | None = None  # lists all chunks of this rank
        self._final: SavePlan | None = None  # lists only those that this rank writes
        self._metadata: Metadata | None = None  # of all plans, on rank 0

    def run(
        self,
        folder: StorageFolder,
        state: State,
        planner: SavePlanner,
        writer: StorageWriter,
        prepare: Callable[[Metadata], None],
    ) -> None:
        """Write the state into `folder`. Collective.

        `prepare` is called on rank 0 before any rank writes, with the metadata of all ranks'
        tensors. Raises CheckpointError on every rank if anything fails on any.
        """
        tree = RankTree(self.group)

        def plan_locally() -> SavePlan:
            planner.set_up_planner(state, writer.storage_meta(), tree.is_root)
            writer.set_up_storage_writer(tree.is_root, rank=tree.rank, use_collectives=True)
            return writer.prepare_local_plan(planner.create_local_plan())

        local = call_on_all_ranks(plan_locally, folder, "written", self.group)
        (changed,) = tree.max([local != self._local])
        if changed:
            self._exchange_plans(tree, folder, local, planner, writer)
        final, metadata = self._final, self._metadata
        assert final is not None
        self._on_rank_0(folder, lambda: prepare(_copy(metadata)))
        results = call_on_all_ranks(
            lambda: writer.write_data(planner.finish_plan(final), planner).wait(),
            folder,
            "written",
            self.group,
        )
        gathered = tree.gather(pickle.dumps(results))
        self._on_rank_0(
            folder, lambda: writer.finish(_copy(metadata), [pickle.loads(r) for r in gathered])
        )

    def _exchange_plans(
        self,
        tree: RankTree,
        folder: StorageFolder,
        local: SavePlan,
        planner: SavePlanner,
        writer: StorageWriter,
    ) -> None:
        """Let rank 0 decide which rank writes each chunk that several ranks have."""
        self._local = self._final = self._metadata = None  # if this fails, the next save repeats it
        gathered = [pickle.loads(plan) for plan in tree.gather(pickle.dumps(local))]
        finals: list[bytes] = []

        def merge() -> None:
            plans, self._metadata = planner.create_global_plan(gathered)
            finals.extend(map(pickle.dumps, writer.prepare_global_plan(plans)))

        self._on_rank_0(folder, merge)
        self._local, self._final = local, pickle.loads(tree.scatter(finals))
        self.exchanges += 1

    def _on_rank_0(self, folder: StorageFolder, function: Callable[[], None]) -> None:
        def call() -> None:
            with as_checkpoint_error(folder, "written"):
                function()

        run_on_rank_0(call, self.group)


def _copy(metadata: Metadata | None) -> Metadata:
    """A copy, because DCP's writer sets fields of the metadata that it finishes."""
    assert metadata is not None  # on rank 0
    return dataclasses.replace(metadata)
