"""What ranks exchange beside the data of a model, against their number.

python -m benchmarks.control_plane [--ranks 16 64 128 256] [--values FILE.json] [--out FILE.md]

The processes are forked from one that has imported torch, and build no model. They share the cores
of this machine, so their CPU time is measured and not only the wall time. The last column
extrapolates; at that size only the creation of the groups of a mesh is measured.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch.distributed as dist

from benchmarks.control_plane_rank import PARTS, RankArguments, measure_mesh, run_rank
from benchmarks.machine import describe
from benchmarks.table_rows import grid, number, write_table
from titanlite.distributed.rank_tree import FANOUT

TARGET_RANKS = 16_384
# What it should grow with; "" where nothing follows for machines that do not share their cores.
GROWTHS: dict[str, Callable[[float], float]] = {
    "constant": lambda ranks: 0.0,
    "logarithm": math.log2,
    "linear": lambda ranks: ranks,
}
LIMIT_SECONDS = 300  # of one number of ranks


@dataclass(frozen=True)
class Quantity:
    """One row of the table: what is measured, and how it should grow with the number of ranks."""

    what: str
    unit: str
    growth: str
    value: Callable[[list[dict]], float]  # of the results of all ranks


@dataclass(frozen=True)
class GrowthRow:
    """A quantity with its values, the fitted exponent and the extrapolation."""

    what: str
    unit: str
    growth: str
    ranks: list[int]
    values: list[float]
    exponent: float = field(default=0.0)  # of a power law through the two largest numbers of ranks
    extrapolated: float = field(default=0.0)  # for TARGET_RANKS


def mean(phase: str, key: str, scale: float = 1.0) -> Callable[[list[dict]], float]:
    return lambda ranks: scale * statistics.mean(rank["phases"][phase][key] for rank in ranks)


def most(phase: str, key: str, scale: float = 1.0) -> Callable[[list[dict]], float]:
    return lambda ranks: scale * max(rank["phases"][phase][key] for rank in ranks)


def first(phase: str, key: str, scale: float = 1.0) -> Callable[[list[dict]], float]:
    return lambda ranks: scale * ranks[0]["phases"][phase][key]


MS, KB, MB = 1e3, 1e-3, 1e-6
STEP, RING = "agreement of a step", "the same by gloo's all-reduce"
QUANTITIES = (
    Quantity("sockets, most of any rank", "", "constant", lambda r: max(x["sockets"] for x in r)),
    Quantity("private memory, mean", "MB", "linear", lambda r: MB * _mean_of(r, "private")),
    Quantity("start: CPU of a rank", "ms", "linear", mean("start", "main", MS)),
    Quantity("start: CPU of rank 0", "ms", "linear", first("start", "main", MS)),
    Quantity("start: CPU of the store", "ms", "linear", first("start", "store_cpu", MS)),
    Quantity(f"{STEP}: messages, most of any rank", "", "constant", most(STEP, "messages")),
    Quantity(f"{STEP}: CPU of a rank, on shared cores", "ms", "", mean(STEP, "cpu", MS)),
    Quantity(f"{STEP}: hops in sequence", "", "logarithm", lambda r: tree_hops(len(r))),
    Quantity(f"{STEP}: wall, on shared cores", "ms", "", first(STEP, "wall", MS)),
    Quantity(f"{RING}: CPU of a rank, on shared cores", "ms", "", mean(RING, "cpu", MS)),
    Quantity(f"{RING}: hops in sequence", "", "linear", lambda r: 2 * (len(r) - 1)),
    Quantity(f"{RING}: wall, on shared cores", "ms", "", first(RING, "wall", MS)),
    Quantity("heartbeat: CPU of a rank", "ms", "constant", mean("heartbeat", "cpu", MS)),
    Quantity(
        "heartbeats of all: CPU of the store", "ms", "linear", first("heartbeat", "store_cpu", MS)
    ),
    Quantity(
        "first save: sent and received by rank 0", "kB", "linear", first("first save", "bytes", KB)
    ),
    Quantity("first save: CPU of rank 0", "ms", "linear", first("first save", "main", MS)),
    Quantity(
        "next save: sent and received by rank 0", "kB", "linear", first("next save", "bytes", KB)
    ),
    Quantity("next save: CPU of rank 0", "ms", "linear", first("next save", "main", MS)),
    Quantity("next save: CPU of a rank", "ms", "linear", mean("next save", "main", MS)),
    Quantity(
        "find and verify: CPU of rank 0", "ms", "linear", first("find and verify", "main", MS)
    ),
    Quantity("find and verify: CPU of a rank", "ms", "linear", mean("find and verify", "main", MS)),
    Quantity("load: CPU of a rank", "ms", "linear", mean("load", "main", MS)),
)


def tree_hops(ranks: int) -> int:
    """Messages that follow each other from the lowest rank to rank 0 and back."""
    hops, rank = 0, ranks - 1
    while rank:
        hops, rank = hops + 2, (rank - 1) // FANOUT
    return hops


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # ends the processes too
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 64, 128, 256])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--values", type=Path, help="file with values of earlier calls; those of this one are added"
    )
    parser.add_argument("--out", type=Path, help="also write the table to this .md file")
    args = parser.parse_args()
    values = json.loads(args.values.read_text()) if args.values and args.values.exists() else {}
    for ranks in args.ranks:
        started, results = time.monotonic(), measure(ranks, tuple(args.parts))
        measured = values.setdefault(str(ranks), {})
        for quantity in QUANTITIES:
            with suppress(KeyError):  # of a part that was not measured
                measured[quantity.what] = quantity.value(results)
        print(f"{ranks} ranks: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        if args.values:
            args.values.write_text(json.dumps(values))
    rows = [
        row_of(quantity, values)
        for quantity in QUANTITIES
        if all(quantity.what in measured for measured in values.values())
    ]
    sizes = [*rows[0].ranks, TARGET_RANKS]
    seconds = [1e3 * in_a_fork(lambda ranks=ranks: measure_mesh(ranks)) for ranks in sizes]
    rows.append(
        GrowthRow(
            "groups of a mesh: CPU of a rank",
            "ms",
            "linear",
            sizes[:-1],
            seconds[:-1],
            exponent_of(sizes, seconds),
            seconds[-1],
        )
    )  # measured at the full size, without connections
    markdown = growth_table(rows)
    entries = describe("-m benchmarks.control_plane", sys.argv[1:])
    if args.out:
        write_table(args.out, entries, markdown, rows)
    print(markdown)


def measure(ranks: int, parts: tuple[str, ...] = PARTS) -> list[dict]:
    """The results of all ranks, in order."""
    gc.freeze()  # else gc would touch, and so copy, the pages that the processes share
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = fork(lambda: host_store(folder))
        port = int(await_file(folder / "port"))
        arguments = [RankArguments(r, ranks, port, store, folder, parts) for r in range(ranks)]
        pids = [fork(partial(run_rank, rank_arguments)) for rank_arguments in arguments]
        try:
            await_all(pids)
        finally:
            for pid in [*pids, store]:
                end(pid)
        paths = [folder / f"rank_{rank}.json" for rank in range(ranks)]
        return [json.loads(path.read_text()) for path in paths]


def fork(function: Callable[[], object]) -> int:
    """Run a function in a forked process; returns its id."""
    if pid := os.fork():
        return pid
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        function()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def in_a_fork(function: Callable[[], float]) -> float:
    """The result of a function that a forked process calls."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result"
        pid = fork(lambda: path.write_text(str(function())))
        os.waitpid(pid, 0)
        return float(path.read_text())


def host_store(folder: Path) -> None:
    """Host the store of the ranks, as the launcher does, until this process is ended."""
    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )
    (folder / "port.new").write_text(str(store.port))
    (folder / "port.new").rename(folder / "port")
    signal.pause()


def await_file(path: Path) -> str:
    while not path.exists():
        time.sleep(0.01)
    return path.read_text()


def await_all(pids: list[int]) -> None:
    """Wait for the processes; raises RuntimeError at the first that fails, or at the limit."""
    deadline, running = time.monotonic() + LIMIT_SECONDS, set(pids)
    while running:
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.remove(pid)
                if status:
                    raise RuntimeError(f"rank {pids.index(pid)} failed")
        if time.monotonic() > deadline:
            raise RuntimeError(f"{len(running)} ranks did not finish in {LIMIT_SECONDS} s")
        time.sleep(0.05)


def end(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):  # it has ended
        pass


def row_of(quantity: Quantity, values_by_ranks: dict[str, dict[str, float]]) -> GrowthRow:
    """Fit and extrapolate one quantity."""
    sizes = sorted(map(int, values_by_ranks))
    values = [values_by_ranks[str(ranks)][quantity.what] for ranks in sizes]
    return GrowthRow(
        quantity.what,
        quantity.unit,
        quantity.growth,
        sizes,
        values,
        exponent_of(sizes, values),
        extrapolate(quantity.growth, sizes, values, TARGET_RANKS),
    )


def exponent_of(sizes: list[int], values: list[float]) -> float:
    """x in ranks^x between the two largest numbers of ranks; 0: constant, 1: linear."""
    if len(values) < 2 or min(values[-2:]) <= 0:
        return 0.0
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def extrapolate(growth: str, sizes: list[int], values: list[float], target: int) -> float:
    """The value at `target` ranks of offset + slope * growth(ranks), by least squares."""
    if not growth:
        return math.nan
    function = GROWTHS[growth]
    if growth == "constant" or len(sizes) < 2:
        return max(values)
    columns = np.array([[1.0, function(ranks)] for ranks in sizes])
    weights = 1 / np.array([max(value, 1e-9) for value in values])  # relative errors count alike
    solution, *_ = np.linalg.lstsq(columns * weights[:, None], np.array(values) * weights)
    return max(*values, float(solution[0] + solution[1] * function(target)))


def growth_table(rows: list[GrowthRow]) -> str:
    """The Markdown table: a column per number of ranks, the exponent, the extrapolation."""
    sizes = rows[0].ranks
    header = ("", "unit", *map(str, sizes), "exponent", "growth", f"{TARGET_RANKS:,}")
    lines = [
        (
            row.what,
            row.unit,
            *map(number, row.values),
            f"{row.exponent:.2f}",
            row.growth,
            "" if math.isnan(row.extrapolated) else number(row.extrapolated),
        )
        for row in rows
    ]
    return grid(header, lines, "ll" + "r" * len(sizes) + "rlr")


def _mean_of(results: list[dict], key: str) -> float:
    return statistics.mean(result[key] for result in results)


if __name__ == "__main__":
    main()
