"""Save the memory checkpoints of a run: copy the shards, send them to another host, commit."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from titanlite.checkpoint.config import CheckpointConfig
from titanlite.checkpoint.memory_sets import (
    MESSAGE_BYTES,
    MemoryFile,
    MemorySet,
    allocate_file,
    list_files,
    list_shards,
    open_host_folder,
    write_file,
)
from titanlite.checkpoint.model_state import HostStaging, State
from titanlite.checkpoint.save_in_progress import SaveInProgress
from titanlite.checkpoint.step_folders import StepFolders
from titanlite.distributed.collectives import (
    broadcast_from_rank_0,
    gather_from_all_ranks,
    gather_problems,
)
from titanlite.distributed.rank_tree import RankTree
from titanlite.errors import UserError
from titanlite.log import logger


def plan_copies(hosts: Sequence[str], layouts: Sequence[str]) -> dict[int, int | None]:
    """{rank that writes its shards: rank of another host that gets a copy, or None}.

    `hosts` and `layouts` (hashes of the lists of shards) are by rank. Ranks of one host with equal
    shards write them once. What two hosts have anyway is not sent; the rest goes to the rank with
    the same number on the next host. On a single host nothing is sent.
    """
    ranks_of: dict[str, list[int]] = {}
    writers: dict[tuple[str, str], int] = {}
    for rank, (host, layout) in enumerate(zip(hosts, layouts, strict=True)):
        ranks_of.setdefault(host, []).append(rank)
        writers.setdefault((host, layout), rank)
    names = list(ranks_of)
    next_host = dict(zip(names, names[1:] + names[:1], strict=True))
    hosts_with = Counter(layout for _, layout in writers)
    copies: dict[int, int | None] = {}
    for (host, layout), rank in writers.items():
        others = ranks_of[next_host[host]]
        is_sent = hosts_with[layout] == 1 and len(names) > 1
        copies[rank] = others[ranks_of[host].index(rank) % len(others)] if is_sent else None
    return copies


class MemoryCheckpoints:
    """The memory checkpoints of one run. Of at most two sets, one is complete at any time.

    Methods are collective unless noted. Saves run in a thread with a process group of its own.
    """

    def __init__(self, folders: StepFolders, config: CheckpointConfig):
        self.folders, self.config, self.rank = folders, config, dist.get_rank()
        # Its own: that of a save to the disk may be in use for many intervals.
        self.staging = HostStaging(config.async_mode == "async_with_pinned_mem")
        timeout = timedelta(seconds=config.timeout_seconds)
        self.group = dist.new_group(backend="gloo", timeout=timeout)
        place = folders.folder
        run = os.path.realpath(place.path) if place.local else str(place)
        run, self.folder, self.problem = broadcast_from_rank_0(run, self.group), Path(), ""
        try:
            self.folder, host = open_host_folder(run)
        except OSError as error:
            self.problem, host = f"{error.filename}: {error.strerror}.", f"rank {self.rank}"
        self.hosts: list[str] = gather_from_all_ranks(host, self.group)
        self.is_first = self.hosts.index(host) == self.rank and not self.problem  # of its host
        self.history = ""
        self.newest: tuple[str, int] | None = None  # the newest complete set: history, step
        self.bytes = self.sent_bytes = 0  # of all ranks' shards in a set; sent to another host
        self._layout, self._layouts = "", 0  # of this rank; number of different ones of all
        self._copies: dict[int, int | None] = {}
        self._save: SaveInProgress | None = None

    @property
    def writing(self) -> bool:
        """Whether this rank cannot save. Not collective.

        It stays so after an error of one rank, from which gloo's groups do not recover.
        """
        save = self._save
        return save is not None and (not save.done.is_set() or save.error is not None)

    @property
    def reason(self) -> str:
        """Why this rank is `writing`."""
        if self._save and self._save.error:
            return f"no more are saved in memory after an error: {self._save.error}"
        return "the one before is still being written"

    def find(self) -> list[MemorySet]:
        """The sets that may be loaded, newest first, not checked yet."""
        history = self.folders.read_history()
        files = list_files(self.folder, history) if self.is_first else []
        sets: dict[int, list[MemoryFile]] = {}
        for holder, listed in enumerate(gather_from_all_ranks(files or None, self.group)):
            ranks = [rank for rank, host in enumerate(self.hosts) if host == self.hosts[holder]]
            for number, file in enumerate(map(MemoryFile._make, listed or ())):
                server, here = ranks[number % len(ranks)], self.rank in ranks
                sets.setdefault(file.step, []).append(file._replace(server=server, here=here))
        return [MemorySet(sets[step], self.group) for step in sorted(sets)[::-1]]

    def begin(self, loaded: MemorySet | None = None) -> None:
        """Begin a new history, at a start or roll-back: of all sets, only `loaded` stays valid."""
        self.take_result(wait=True)
        self.newest = loaded.key if loaded else None
        self.history = self.folders.begin_history(self.newest)
        self._remove_files(self.newest)

    def remove(self) -> None:
        """Remove all sets, because the run ends and the disk has a newer checkpoint."""
        self.take_result(wait=True)
        self._remove_files(None)

    def take_result(self, wait: bool = False) -> SaveInProgress | None:
        """The save that ended since the last call. Not collective."""
        if wait and self._save:
            self._save.done.wait()  # each message has the timeout of the group
        if self.writing:
            return None
        save, self._save = self._save, None
        return save

    def save(
        self, step: int, state: State, common: dict[str, Any], before_commit: Callable[[], None]
    ) -> None:
        """Copy a state and start to write it, when no rank is `writing`.

        `common`: what a manifest has, of rank 0. `before_commit` is called there, in the thread.
        """
        started, problem, copies = time.monotonic(), self.problem, state
        try:
            copies = self.staging.copy(state)
        except (UserError, MemoryError) as error:
            problem = problem or str(error)
        wait_for_copy = self.staging.wait_function()

        def write() -> None:
            self._remove_files(self.newest)
            self._agree(problem)  # no rank writes before the older set is removed
            wait_for_copy()
            if self.rank == 0:
                before_commit()
            self._write(step, copies, broadcast_from_rank_0(common, self.group))

        seconds = self.config.timeout_seconds
        self._save = SaveInProgress(step, self.folders.folder, started, seconds)
        self._save.start(write, blocking=False)

    def _write(self, step: int, state: State, common: dict[str, Any]) -> None:
        """Write, send and commit the shards; raises UserError on all ranks if that fails on any."""
        shards, tensors, nbytes = list_shards(state)
        layout = xxhash.xxh3_64_hexdigest(json.dumps(shards).encode())
        (changed,) = RankTree(self.group).max([layout != self._layout])
        if changed:
            self._plan(layout, nbytes)
        header = {"history": self.history, "step": step, "layout": layout, "shards": shards}
        header |= {"layouts": self._layouts, "common": common}
        problem = ""
        if self.rank in self._copies:
            try:
                write_file(self._path(step, self.rank), tensors, header)
            except OSError as error:
                problem = f"{self.folder}: {error.strerror}, writing {nbytes:,} bytes."
        self._agree(problem)
        self._exchange(step)
        self.newest = (self.history, step)

    def _plan(self, layout: str, nbytes: int) -> None:
        """Gather which shards each rank has, and decide who copies them where."""
        gathered = gather_from_all_ranks([layout, nbytes], self.group)
        layouts, sizes = [entry[0] for entry in gathered], [entry[1] for entry in gathered]
        self._layout, self._layouts = layout, len(set(layouts))
        self._copies = plan_copies(self.hosts, layouts)
        self.bytes = sum(sizes[rank] for rank in self._copies)
        sent = [(rank, to) for rank, to in self._copies.items() if to is not None]
        self.sent_bytes = sum(sizes[rank] for rank, _ in sent)
        placed = [(rank, rank) for rank in self._copies] + sent
        here = sum(sizes[rank] for rank, at in placed if self.hosts[at] == self.hosts[self.rank])
        text = "each shard is on two hosts"
        if len(set(self.hosts)) == 1:
            text = "on one host: they survive killed processes, not the loss of the machine"
        size = f"{here / 2**30:.3g} GiB a host, two sets"
        logger.info(
            "memory checkpoints: %s, %d steps apart; %s", size, self.config.memory_interval, text
        )

    def _exchange(self, step: int) -> None:
        """Send this rank's file to another host, and receive those of others."""
        own, copies, problem = torch.empty(0, dtype=torch.uint8), dict[int, Tensor](), ""
        receiver = self._copies.get(self.rank)
        if receiver is not None:
            path = str(self._path(step, self.rank))
            own = torch.from_file(path, size=os.path.getsize(path), dtype=torch.uint8)

        def swap(sent: Tensor, received: dict[int, Tensor]) -> None:
            parts = [(part, r) for r, t in received.items() for part in t.split(MESSAGE_BYTES)]
            works = [dist.irecv(part, group=self.group, group_src=r) for part, r in parts]
            for part in sent.split(MESSAGE_BYTES) if receiver is not None else ():
                works.append(dist.isend(part, group=self.group, group_dst=receiver))
            for work in filter(None, works):
                work.wait()

        senders = [rank for rank, to in self._copies.items() if to == self.rank]
        sizes = {rank: torch.empty(1, dtype=torch.int64) for rank in senders}
        swap(torch.tensor([len(own)]), sizes)
        try:
            for rank, size in sizes.items():
                copies[rank] = allocate_file(self._path(step, rank, ".part"), int(size))
        except OSError as error:
            problem = f"{self.folder}: {error.strerror}, writing a copy for another host."
        self._agree(problem)
        swap(own, copies)
        for rank in senders:
            self._path(step, rank, ".part").rename(self._path(step, rank))
        self._agree("")  # the set is complete once all ranks are here

    def _path(self, step: int, rank: int, ending: str = ".bin") -> Path:
        return self.folder / f"{self.history}-{step}-{rank}{ending}"

    def _remove_files(self, kept: tuple[str, int] | None) -> None:
        """Remove the files of this run on this host, but those of the set `kept`."""
        prefix = f"{kept[0]}-{kept[1]}-" if kept else "/"
        for path in self.folder.glob("*") if self.is_first else ():
            if not path.name.startswith(prefix):
                path.unlink(missing_ok=True)

    def _agree(self, problem: str) -> None:
        """Raise UserError on all ranks if any has a problem."""
        if problems := gather_problems(problem, self.group):
            raise UserError(" ".join(problems)).mark_on_all_ranks()
