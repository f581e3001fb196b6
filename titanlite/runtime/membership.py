"""Which hosts left and joined a run since its previous start, and how long it was away."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from titanlite.distributed.collectives import gather_from_all_ranks, run_on_rank_0
from titanlite.distributed.process_group import RankContext
from titanlite.elastic.layouts import ElasticConfig
from titanlite.errors import ConfigError, RendezvousError
from titanlite.metrics.jsonl import METRICS_FILE, read_last_step
from titanlite.runtime.lease import process_age
from titanlite.runtime.start_log import FLAPPING_SECONDS, StartLog, StartRecord, count_losses
from titanlite.runtime.watchdog import end_launcher


@dataclass(frozen=True)
class Members:
    """The hosts of this start, and what is known of the previous one; made before it is recorded.

    `before` and `last_step` (with its time) are None on other ranks than 0, and in a new run.
    """

    hosts: Sequence[str]
    began: float = 0.0  # time.monotonic() when this process had imported its modules
    before: StartRecord | None = None
    last_step: tuple[int, float] | None = None
    joined: float = field(default_factory=time.monotonic)

    def describe_return(self, resumed_at: int, opened: float) -> dict[str, Any]:
        """The fields of the event `returned`, or none; call it after the first step.

        The run continues after step `resumed_at`; `opened`: when the model was built and loaded.
        away_seconds: from the last logged step until torchrun had started the processes again.
        """
        if self.before is None or self.last_step is None:
            return {}
        (last_step, last_time), now = self.last_step, time.monotonic()
        import_seconds = max(0.0, process_age() - (now - self.began))
        return {
            "left": " ".join(sorted(set(self.before.hosts) - set(self.hosts))),
            "joined": " ".join(sorted(set(self.hosts) - set(self.before.hosts))),
            "ranks_before": self.before.ranks,
            "lost_steps": max(0, last_step - resumed_at),
            "away_seconds": time.time() - (now - self.began) - import_seconds - last_time,
            "import_seconds": import_seconds,
            "join_seconds": self.joined - self.began,
            "open_seconds": opened - self.joined,
            "first_step_seconds": now - opened,
        }


def find_members(folder: Path, rank: RankContext, began: float, max_losses: int) -> Members:
    """The hosts of this start, with those of spare ranks. Collective.

    Hosts that were lost `max_losses` times in a day are refused (0: none): their torchrun is ended,
    and every rank raises RendezvousError, so that the others start without them.
    """
    hosts = gather_from_all_ranks(socket.gethostname())
    starts: list[StartRecord] = []

    def read() -> tuple[list[str], list[str]]:
        starts.extend(StartLog(folder).read())
        losses = count_losses(starts, hosts, time.time())
        flapping = [host for host in {*hosts} if max_losses and losses[host] >= max_losses]
        return sorted(flapping), rank.spare_hosts()

    flapping, spares = run_on_rank_0(read)
    if not flapping or {*flapping} == {*hosts}:
        last_step = read_last_step(folder / METRICS_FILE) if rank.rank == 0 else None
        before = starts[-1] if starts else None
        return Members(list(dict.fromkeys([*hosts, *spares])), began, before, last_step)
    if socket.gethostname() in flapping:
        end_launcher()
    raise RendezvousError(
        f"{', '.join(flapping)}: lost {max_losses} times in {FLAPPING_SECONDS / 3600:g} hours, so"
        " the run goes on without it.",
        fix="Repair or replace it; job.max_crashes is the number of losses that a host may have.",
    ).mark_on_all_ranks()


def check_launcher(config: ElasticConfig) -> Iterator[ConfigError]:
    """Reject a torchrun that keeps the address of the store of its first start (torch 2.13)."""
    several = os.environ.get("GROUP_WORLD_SIZE", "1") != "1"
    if config.enable and several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        yield ConfigError(
            "elastic.enable = true: torchrun keeps the store of the ranks on one machine for all"
            " its restarts, so the run could not go on without that machine.",
            fix="Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 where torchrun starts, on each machine.",
        )
