"""Diagnosis of a run whose ranks wait: which one is dead, has left, or is the straggler."""

from __future__ import annotations

import math
from collections import Counter

from titanlite.distributed.rendezvous import store_address
from titanlite.log import pluralize
from titanlite.runtime.heartbeat import SILENT_FRACTION, HeartbeatExchange, RankProgress

# Fractions of the timeout.
STUCK_FRACTION = 0.85  # a rank that is in one phase for longer looks for the straggler
LAST_FRACTION = 0.95  # the same, for ranks other than the `FIRST_READERS`
FIRST_READERS = 16  # ranks that look for the straggler first
DISK_PHASES = ("load", "save")  # as slow as the disk; they have a limit of their own
LOST_ANOTHER = "lost another"  # the reason of ranks that leave because another one was lost
MAX_NAMED_RANKS = 8


class PeerDiagnosis:
    """The findings of one rank about the others; each is a sentence, or "" while all is well."""

    def __init__(self, exchange: HeartbeatExchange, progress: RankProgress):
        self.store_silent_seconds = 0.0  # since the store last answered
        self._exchange, self._progress = exchange, progress
        self._rounds = 0

    def update_store_silence(self, passed: float) -> None:
        """Count the seconds in which the store did not answer."""
        rounds = self._exchange.rounds
        answered = rounds != self._rounds
        self.store_silent_seconds = 0.0 if answered else self.store_silent_seconds + passed
        self._rounds = rounds

    def find_problem(self) -> str:
        """The next rank if it is silent or dead; else, once this rank is stuck, the straggler."""
        exchange, progress = self._exchange, self._progress
        peer, timeout = exchange.next_rank, progress.timeout_seconds
        silent_seconds = exchange.silent_seconds.get(peer, 0.0)
        if silent_seconds > progress.silent_limit:
            return (
                f"{self._name(peer)} has sent no heartbeat for {silent_seconds:.0f} s."
                f" {self._positions(peer)}"
            )
        heartbeat = exchange.heartbeats.get(peer)
        if silent_seconds > 3 * progress.heartbeat_seconds and heartbeat and heartbeat.has_ended:
            return f"{self._name(peer)} has died. {self._positions(peer)}"
        # If all ranks read all heartbeats, the load of the store grows with the square of the
        # number of ranks. So a few ranks, on different hosts, look first.
        looks_first = progress.rank % math.ceil(progress.world_size / FIRST_READERS) == 0
        patience = (STUCK_FRACTION if looks_first else LAST_FRACTION) * timeout
        waits = progress.position.phase not in DISK_PHASES
        stuck = progress.stuck_seconds > patience and waits
        exchange.read_all_ranks(stuck)
        if waits and min(progress.stuck_seconds, self.store_silent_seconds) > progress.silent_limit:
            return self.describe_silent_store()
        return self._find_straggler() if stuck and exchange.complete else ""

    def find_lost_rank(self) -> str:
        """Dead ranks, else silent ranks, else ranks that left.

        Needs some rounds of reading all heartbeats.
        """
        beats, limit = self._exchange.heartbeats, 2 * self._progress.heartbeat_seconds
        silent = [
            rank
            for rank, seconds in self._exchange.silent_seconds.items()
            if seconds > limit and not (rank in beats and beats[rank].left)
        ]
        if dead := [rank for rank in silent if rank in beats and beats[rank].has_ended]:
            return f"{self._name(*dead)} has died. {self._positions(dead[0])}"
        if silent:
            return f"{self._name(*silent)} no longer sends heartbeats. {self._positions(silent[0])}"
        return self._find_rank_that_left()

    def describe_silent_store(self) -> str:
        return f"The store at {store_address()} does not answer: the launcher, or rank 0, is gone."

    def _find_straggler(self) -> str:
        """The rank that all others wait for: it has left, or is stuck in the earliest phase."""
        if left := self._find_rank_that_left():
            progress = self._progress
            return f"{left} Rank {progress.rank} has waited for {progress.stuck_seconds:.0f} s."
        running = {rank: beat for rank, beat in self._exchange.heartbeats.items() if not beat.left}
        earliest = min((beat.step, beat.phases_begun) for beat in running.values())
        behind = {
            rank: beat
            for rank, beat in running.items()
            if (beat.step, beat.phases_begun) == earliest
        }
        seconds = min(beat.seconds for beat in behind.values())
        in_disk_phase = any(beat.phase in DISK_PHASES for beat in behind.values())
        if seconds < SILENT_FRACTION * self._progress.timeout_seconds or in_disk_phase:
            return ""
        stuck = f"been in {next(iter(behind.values())).position} for {seconds:.0f} s"
        waiting = Counter(
            str(beat.position) for rank, beat in running.items() if rank not in behind
        )
        if not waiting:
            return (
                f"All {len(running)} ranks have {stuck}: they wait for each other, or are only"
                f" slow. If they are slow, raise {self._progress.timeout_key}."
            )
        positions = "; ".join(
            f"{pluralize(count, 'rank')} in {where}" for where, count in waiting.most_common(5)
        )
        return f"{self._name(*behind)} has {stuck}. Waiting for it: {positions}."

    def _find_rank_that_left(self) -> str:
        """Ranks that left with an error, else ranks that were done."""
        heartbeats = self._exchange.heartbeats
        left = {
            rank: beat for rank, beat in heartbeats.items() if beat.left not in ("", LOST_ANOTHER)
        }
        ranks = [rank for rank, beat in left.items() if beat.left != "done"] or list(left)
        if not ranks:
            return ""
        first = left[ranks[0]]
        return f"{self._name(*ranks)} has left at {first.position} ({first.left})."

    def _name(self, *ranks: int) -> str:
        """Rank 2 (its host and process); of several ranks, the first few numbers."""
        if len(ranks) > 1:
            more = len(ranks) - MAX_NAMED_RANKS
            listed = ", ".join(map(str, ranks[:MAX_NAMED_RANKS]))
            return f"Each of ranks {listed}{f' and {more} more' if more > 0 else ''}"
        heartbeat = self._exchange.heartbeats.get(ranks[0])
        process = f" ({heartbeat.host}, process {heartbeat.pid})" if heartbeat else ""
        return f"Rank {ranks[0]}{process}"

    def _positions(self, rank: int) -> str:
        """The last known position of a rank, which may have moved since, and that of this rank."""
        heartbeat, own = self._exchange.heartbeats.get(rank), self._progress
        last = heartbeat.position if heartbeat else "none"
        return f"Last heartbeat of rank {rank}: {last}; rank {own.rank} is in {own.position}."
