"""Prepare the synthetic corpus with 1, 2 and 4 workers, and with kills; compare every byte.

python -m benchmarks.corpus_drill --gb 2 --workers 1 2 4 --dask 4 --kills 10 --kill-share 0.3

The run with kills makes a share of the tasks of each stage, and takes the others from a run that
has finished. Its kills are distributed over all that it does.

States time, peak memory of a process and hash of the shards of each run, in `FOLDER/NAME.json`.
Fails unless the hashes of all runs in the folder are equal and the peaks below the stated limit.
So the runs can be started separately, also at the same time; one that ended after --limit-seconds
goes on when it is started again. The corpus is written if the folder has none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import xxhash

from benchmarks.corpus_engine import ROOT, Cluster, environment
from benchmarks.synthetic_corpus import write_corpus
from titanlite_corpus.recipe import WORK
from titanlite_corpus.task import RECORD

# of one process, with --table-mib 64 and the tokenizer "bytes": docs/how-to/prepare-a-corpus.md
PEAK_BYTES = 1_200_000_000
RECIPE = """
out = "{out}"
tokenizer = "{tokenizer}"
validation_share = 0.01
shard_mib = 64
[[sources]]
name = "web"
inputs = ["{inputs}"]
[filter]
rules = ["language", "gopher_quality", "gopher_repetition", "personal_data"]
[deduplicate]
[shuffle]
"""


PREPARE = """
import runpy, sys
import titanlite_corpus.read
titanlite_corpus.read.TABLE_BYTES = int(sys.argv.pop(1)) << 20
runpy.run_path("scripts/prepare_data.py", run_name="__main__")
"""


def main() -> None:
    args = parse_arguments()
    inputs = args.out / "text"
    if not inputs.exists():
        write_parts(inputs, int(args.gb * 1e9), args.parts)
    for workers in args.workers:
        Drill(args, f"workers{workers}", ["--workers", str(workers)]).run()
    if args.dask:
        with tempfile.TemporaryDirectory() as folder, Cluster(Path(folder), 1, args.dask) as dask:
            engine = ["--engine", "dask", "--engine-address", str(dask.file)]
            sessions = [process.pid for process in dask.nodes]
            Drill(args, f"dask{args.dask}", engine, sessions).run()
    if args.kills:
        Drill(args, "killed", ["--workers", str(args.kill_workers)]).run_with_kills()
    results = [json.loads(path.read_text()) for path in sorted(args.out.glob("*.json"))]
    different = {result["hash"] for result in results}
    peak = max((result["peak_bytes"] for result in results), default=0)
    if len(different) > 1:
        sys.exit(f"DIFFERENT: {different}")
    if peak > PEAK_BYTES:
        sys.exit(f"a process needed {peak / 1e6:.0f} MB, the limit is {PEAK_BYTES / 1e6:.0f}")
    print(f"the shards of {len(results)} runs are equal; peak {peak / 1e6:.0f} MB a process")


def parse_arguments() -> argparse.Namespace:
    """The arguments of the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=Path("outputs/corpus_drill"), metavar="FOLDER")
    add("--gb", type=float, default=2.0, help="of text (default: 2)")
    add("--parts", type=int, default=4, help="of the text, written in parallel (default: 4)")
    add("--workers", type=int, nargs="*", default=[1, 2, 4], help="of each run (default: 1 2 4)")
    add("--dask", type=int, default=0, metavar="N", help="also on a Dask cluster of N workers")
    add("--kills", type=int, default=10, help="of one more run (default: 10)")
    add("--kill-workers", type=int, default=2, help="workers of that run (default: 2)")
    add("--kill-share", type=float, default=1.0, help="of the tasks, run again (default: all)")
    add("--tokenizer", default="bytes")
    add("--table-mib", type=int, default=64, help="smaller: more tasks")
    add("--limit-seconds", type=float, default=1e6, help="of a run, which can go on later")
    add("--remove", action="store_true", help="each corpus once its shards are hashed")
    return parser.parse_args()


def write_parts(folder: Path, size: int, parts: int) -> None:
    """Write a corpus of each seed, in parallel."""
    unfinished = folder.with_suffix(".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    started = time.monotonic()
    with ProcessPoolExecutor(min(parts, os.cpu_count() or 1)) as pool:
        folders = [unfinished / f"seed{seed}" for seed in range(parts)]
        list(pool.map(write_corpus, folders, [size // parts] * parts, range(parts)))
    unfinished.rename(folder)
    print(f"{size / 1e6:.0f} MB of text in {time.monotonic() - started:.0f} s", flush=True)


class Drill:
    """The command that makes one corpus, started once or, after kills, several times."""

    def __init__(
        self,
        args: argparse.Namespace,
        name: str,
        engine: list[str],
        sessions: Sequence[int] = (),  # of other processes whose memory counts
    ):
        self._name, self._args, self._sessions = name, args, sessions
        self._out, recipe = args.out / name, args.out / f"{name}.toml"
        values = {"out": self._out, "tokenizer": args.tokenizer, "inputs": args.out / "text"}
        recipe.write_text(RECIPE.format(**values))
        command = [sys.executable, "-c", PREPARE, str(args.table_mib)]
        self._command = [*command, "--recipe", str(recipe.resolve()), *engine]
        self._seconds, self._peak, self._kills = 0.0, 0, 0

    def run_with_kills(self) -> None:
        """`run`, but kill the command at random moments, which are distributed over all stages."""
        if self._out.exists():
            sys.exit(f"{self._out}: exists; remove it and its .json to repeat the kills.")
        name = f"workers{self._args.kill_workers}"
        work, draw = self._args.out / name / WORK, random.Random(0)
        total = len(list_tasks(work))
        if not total:
            sys.exit(f"--kills: needs the tasks of {name}, which has not run.")
        made = self._reuse_tasks(work) if self._args.kill_share < 1 else 0
        for tasks in sorted(draw.uniform(made, total - 1) for _ in range(self._args.kills)):
            self._kills += not self._start(1e6, tasks, draw.random())
        self.run()
        if self._args.remove:
            shutil.rmtree(self._args.out / name, ignore_errors=True)

    def _reuse_tasks(self, work: Path) -> int:
        """Link the finished tasks of another run but a share of them; returns their number."""
        reused = [
            folder
            for folder in list_tasks(work)
            if random.Random(folder.name).random() >= self._args.kill_share
        ]
        for folder in reused:
            target = self._out / WORK / folder.relative_to(work)
            shutil.copytree(folder, target, copy_function=os.link)
        return len(reused)

    def run(self) -> None:
        """Start the command; writes and prints the result if it finishes within the limit."""
        file = self._args.out / f"{self._name}.json"
        if file.exists():  # its time would be that of a command with nothing to do
            print(f"{self._name}: has run before", flush=True)
            return
        if not self._start(self._args.limit_seconds):
            print(f"{self._name}: NOT FINISHED after {self._seconds:.0f} s", flush=True)
            return
        result = {"name": self._name, "seconds": self._seconds, "peak_bytes": self._peak}
        result |= {"kills": self._kills, "hash": hash_shards(self._out)}
        file.write_text(json.dumps(result) + "\n")
        print(
            f"{self._name}: {self._seconds:.0f} s, {self._kills} kills, peak"
            f" {self._peak / 1e6:.0f} MB a process, hash {result['hash']}",
            flush=True,
        )
        is_reused = self._args.kills and self._name == f"workers{self._args.kill_workers}"
        if self._args.remove and not is_reused:
            shutil.rmtree(self._out)

    def _start(self, limit: float, tasks: float = float("inf"), delay: float = 0) -> bool:
        """Whether the command finished within `limit` seconds; if not, it was killed.

        It is also killed after `tasks` tasks are finished: later by `delay` times the seconds that
        this start has needed for one. (Those of another run may have been on a busier machine.)
        """
        started = time.monotonic()
        before = len(list_tasks(self._out / WORK))
        due = started + limit
        with open(self._args.out / f"{self._name}.log", "ab") as log:
            child = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment(),
            )
        while child.poll() is None:
            processes = processes_of({child.pid, *self._sessions})
            self._peak = max([self._peak, *map(peak_memory, processes)])
            now, finished = time.monotonic(), len(list_tasks(self._out / WORK))
            if finished >= tasks:
                each = (now - started) / max(1, finished - before)
                due, tasks = min(due, now + delay * each), float("inf")
            if now > due:
                child.send_signal(signal.SIGKILL)
                child.wait()
                time.sleep(1)  # until its workers have noticed
                break
            time.sleep(0.2)
        self._seconds += time.monotonic() - started
        if child.returncode > 0:
            raise SystemExit(f"{self._name}: failed with {child.returncode}, see its .log")
        return child.returncode == 0


def list_tasks(work: Path) -> list[Path]:
    """The folders of the finished tasks of a recipe."""
    return sorted(path.parent for path in work.glob(f"*/*/{RECORD}"))


def processes_of(sessions: set[int]) -> list[int]:
    """The processes of some sessions."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(path.read_text().rpartition(")")[2].split()[3]) in sessions:
                found.append(int(path.parent.name))
        except OSError:  # the process has ended
            continue
    return found


def peak_memory(process: int) -> int:
    """The peak of the resident memory of a process in bytes; what it is now if that is unknown."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    values = {line.split(":")[0]: line.split() for line in lines}
    value = values.get("VmHWM") or values.get("VmRSS")
    return int(value[1]) * 1024 if value else 0


def hash_shards(out: Path) -> str:
    """Hash of the names and contents of all files but the work, and the report, which has times."""
    digest = xxhash.xxh3_128()
    for path in sorted(out.rglob("*")):
        if path.is_file() and ".work" not in path.parts and path.name != "report.html":
            digest.update(str(path.relative_to(out)).encode())
            with open(path, "rb") as file:
                while content := file.read(1 << 24):
                    digest.update(content)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
