"""Simulated training under failures: what memory checkpoints, fewer ranks and spares are worth.

python -m benchmarks.goodput [--between-failures 6480] [--repair 14400] …

Hosts fail at random (exponential times) and come back after a repair. A simulation of a cluster
that nobody here has: every duration is an assumption that the command line can change.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import random
import statistics
import sys
from dataclasses import dataclass

HOUR = 3600.0


@dataclass(frozen=True)
class Cluster:
    """A job on `hosts` hosts, and what its failures cost, in seconds."""

    hosts: int = 2048  # of 8 GPUs
    hosts_per_replica: int = 16  # that one data-parallel replica of the model occupies
    batch: int = 2048  # sequences of a step; a replica computes one at a time
    between_failures: float = 1.8 * HOUR  # of all hosts together
    repair: float = 4 * HOUR  # until a failed host is back
    disk_interval: float = 900.0
    disk_blocked: float = 5.0  # training stands still for a save that is written meanwhile
    disk_written: float = 120.0  # until the checkpoint counts
    disk_return: float = 240.0  # from a failure to the next step, with a checkpoint from the disk
    memory_interval: float = 60.0
    memory_blocked: float = 0.5
    memory_written: float = 10.0
    memory_return: float = 60.0
    both_copies: float = 0.01  # of the failures, those that take both hosts of a pair


@dataclass(frozen=True)
class Strategy:
    """What a job does about failures."""

    name: str
    fewer: bool = False  # trains on the hosts that are left
    memory: bool = False
    spares: int = 0  # hosts beyond those that the job needs


STRATEGIES = (
    Strategy("waits for the repair"),
    Strategy("16 spare hosts", spares=16),
    Strategy("goes on with fewer", fewer=True),
    Strategy("goes on with fewer, memory checkpoints", fewer=True, memory=True),
    Strategy("the same with 16 spare hosts", fewer=True, memory=True, spares=16),
)


def speed(cluster: Cluster, present: int, fewer: bool) -> float:
    """Steps per time on `present` hosts, relative to all: whole replicas, and whole rounds."""
    wanted = cluster.hosts // cluster.hosts_per_replica
    replicas = min(wanted, present // cluster.hosts_per_replica)
    if replicas == 0 or (replicas < wanted and not fewer):
        return 0.0
    return -(-cluster.batch // wanted) / -(-cluster.batch // replicas)


def expected_goodput(cluster: Cluster, memory: bool) -> float:
    """Of a job whose lost hosts are replaced at once, to the first order in the failures.

    1 - blocked / interval - (half an interval + time until a save counts + return) / time between
    failures; with memory checkpoints, disk saves block as well, and `both_copies` fall back to them
    """

    def lost(interval: float, written: float, back: float) -> float:
        return (interval / 2 + written + back) / cluster.between_failures

    disk = lost(cluster.disk_interval, cluster.disk_written, cluster.disk_return)
    saves = cluster.disk_blocked / cluster.disk_interval
    if not memory:
        return 1 - saves - disk
    near = lost(cluster.memory_interval, cluster.memory_written, cluster.memory_return)
    saves += cluster.memory_blocked / cluster.memory_interval
    return 1 - saves - (1 - cluster.both_copies) * near - cluster.both_copies * disk


def simulate(cluster: Cluster, strategy: Strategy, seconds: float, seed: int) -> float:
    """Goodput: the training that remains, divided by what all hosts do in `seconds` undisturbed."""
    draw, now, trained = random.Random(seed), 0.0, 0.0
    present, repairs = cluster.hosts + strategy.spares, list[float]()
    since = 0.0  # training time since the checkpoint that was loaded
    overhead = cluster.disk_blocked / cluster.disk_interval
    if strategy.memory:
        overhead += cluster.memory_blocked / cluster.memory_interval
    while now < seconds:
        rate = speed(cluster, present, strategy.fewer)
        failure = now + draw.expovariate(1 / cluster.between_failures)
        back = repairs[0] if repairs else float("inf")
        until = min(failure, back, seconds)
        trained += (until - now) * rate * (1 - overhead)
        since += (until - now) * (rate > 0)
        now = until
        if until == failure:
            on_disk = not strategy.memory or draw.random() < cluster.both_copies
            trained -= min(since, lost_training(cluster, on_disk, since)) * rate * (1 - overhead)
            present -= 1
            heapq.heappush(repairs, now + cluster.repair)
            now += cluster.disk_return if on_disk else cluster.memory_return
            since = 0.0
        elif until == back:  # it joins after a save, so that nothing is lost
            heapq.heappop(repairs)
            present += 1
            if speed(cluster, present, strategy.fewer) != rate:
                now += cluster.memory_return if strategy.memory else cluster.disk_return
                since = 0.0
    return trained / now


def lost_training(cluster: Cluster, on_disk: bool, since: float) -> float:
    """Training since the last save that counts, `since` seconds after a start."""
    interval, written = cluster.memory_interval, cluster.memory_written
    if on_disk:
        interval, written = cluster.disk_interval, cluster.disk_written
    return since - max(0.0, (since - written) // interval * interval)


def table(cluster: Cluster, days: float, runs: int) -> list[str]:
    """Rows of Markdown: the goodput of each strategy."""
    rows = ["| a job that | goodput | lost |", "| --- | ---: | ---: |"]
    for strategy in STRATEGIES:
        found = [simulate(cluster, strategy, days * 24 * HOUR, seed) for seed in range(runs)]
        mean = statistics.mean(found)
        rows.append(f"| {strategy.name} | {mean:.1%} | {1 - mean:.1%} |")
    return rows


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for option in dataclasses.fields(Cluster):
        kind = type(option.default)
        parser.add_argument(f"--{option.name.replace('_', '-')}", type=kind, default=option.default)
    parser.add_argument("--days", type=float, default=30.0)
    parser.add_argument("--runs", type=int, default=50)
    values = vars(parser.parse_args(argv))
    days, runs = values.pop("days"), values.pop("runs")
    print("\n".join(table(Cluster(**values), days, runs)))


if __name__ == "__main__":
    main(sys.argv[1:])
