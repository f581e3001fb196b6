"""Compare a Dask cluster with the local engine: shards, CPU time a task, and lost workers.

python -m benchmarks.corpus_engine overhead
python -m benchmarks.corpus_engine scaling [DOCUMENTS of each file]
python -m benchmarks.corpus_engine faults

`faults` kills, in each stage, one worker, then a nanny with all its workers (as a machine that
loses power), and compares every shard with those that the local engine makes. The cluster is made
of processes on this machine.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil  # comes with distributed
from distributed import Client

from benchmarks.synthetic_corpus import COMMON
from titanlite_corpus.dask_engine import DaskEngine
from titanlite_corpus.engine import EngineCall, LocalEngine
from titanlite_corpus.pipeline import make_corpus
from titanlite_corpus.recipe import RecipeFile, load_recipe
from titanlite_corpus.task import StageProgress

ROOT = Path(__file__).parents[1]
TASKS, WARM_UP = 2000, 200  # empty tasks; of these the first are not counted
FILES, DOCUMENTS, WORDS = 8, 600, 300  # of the text
# Of the text that shows scaling: the command's constant 3 s (imports, processes, report) must be
# small beside the stages.
SCALING_FILES, SCALING_DOCUMENTS = 32, 12000
SCALING_WORKERS = (1, 2, 4)
STAGES = """
[filter]
rules = ["gopher_quality", "gopher_repetition", "c4", "personal_data"]
[deduplicate]
[shuffle]
"""


def environment() -> dict[str, str]:
    """The environment of a child that imports from this repository."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


class Cluster:
    """A scheduler and nodes: a node is a nanny with its workers. A context manager."""

    def __init__(self, folder: Path, nodes: int, workers: int):
        self.file = folder / "scheduler.json"
        self._folder, self._workers = folder, workers
        self._scheduler = self._start("scheduler", "--host", "127.0.0.1", "--port", "0")
        while not self.file.exists():
            time.sleep(0.05)
        self.nodes = [self.start_node() for _ in range(nodes)]

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *_: object) -> None:
        for process in (*self.nodes, self._scheduler):
            self.kill(process)

    def wait_for_workers(self, count: int) -> None:
        """Return when this number of workers is ready."""
        with Client(scheduler_file=str(self.file)) as client:
            client.wait_for_workers(count)

    def start_node(self) -> subprocess.Popen:
        """Start a nanny and its workers."""
        count = ["--nworkers", str(self._workers), "--nthreads", "1"]
        return self._start("worker", "--host", "127.0.0.1", *count)

    def _start(self, kind: str, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, "-m", "dask", kind, "--no-dashboard", *arguments]
        with open(self._folder / "cluster.log", "ab") as log:
            return subprocess.Popen(
                [*command, "--scheduler-file", str(self.file)],
                env={**environment(), "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                stderr=log,
            )

    def kill(self, process: subprocess.Popen) -> None:
        """Kill a process and its children at once."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_node(self) -> None:
        """Kill the oldest node, and start another one."""
        self.kill(self.nodes.pop(0))
        self.nodes.append(self.start_node())

    def kill_worker(self) -> None:
        """Kill one worker; its nanny starts another one."""
        while not (workers := [child for node in self.nodes for child in _workers_of(node)]):
            time.sleep(0.05)
        random.choice(workers).kill()

    def cpu_seconds(self) -> float:
        """CPU time of the scheduler, the nannies and the workers."""
        return sum(cpu_seconds(process.pid) for process in (self._scheduler, *self.nodes))


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that are alive."""
    parent = psutil.Process(pid)
    times = [process.cpu_times() for process in (parent, *parent.children(recursive=True))]
    return sum(time.user + time.system for time in times)


def _workers_of(node: subprocess.Popen) -> list[psutil.Process]:
    workers = []
    for child in psutil.Process(node.pid).children(recursive=True):
        with suppress(psutil.Error):  # it died meanwhile
            if "spawn_main" in " ".join(child.cmdline()):
                workers.append(child)
    return workers


def nothing() -> None:
    """An empty task."""


def measure_overhead(folder: Path) -> None:
    """CPU and wall time of empty tasks, without the start of the processes."""
    calls = [EngineCall(nothing, (), "empty") for _ in range(TASKS)]
    for _ in range(3):
        results = LocalEngine(2).run(calls)
        for _ in range(WARM_UP):
            next(results)
        cpu, start = cpu_seconds(os.getpid()), time.perf_counter()
        for _ in range(TASKS - WARM_UP):
            next(results)
        cpu, wall = cpu_seconds(os.getpid()) - cpu, time.perf_counter() - start
        results.close()
        print_overhead("local", cpu, wall, TASKS - WARM_UP)
    with Cluster(folder, 1, 2) as cluster, DaskEngine(str(cluster.file), folder) as engine:
        list(engine.run(calls[:WARM_UP]))
        for _ in range(3):
            cpu, start = cluster.cpu_seconds() + time.process_time(), time.perf_counter()
            assert sum(1 for _ in engine.run(calls)) == TASKS
            cpu = cluster.cpu_seconds() + time.process_time() - cpu
            print_overhead("dask", cpu, time.perf_counter() - start, TASKS)


def print_overhead(engine: str, cpu: float, wall: float, tasks: int) -> None:
    """Print CPU and wall time a task, of all processes."""
    print(f"{engine:6} {1e3 * cpu / tasks:.2f} ms CPU, {1e3 * wall / tasks:.2f} ms wall a task")


def write_texts(folder: Path, files: int, documents: int) -> Callable[[str], RecipeFile]:
    """Write the text; returns a function that gives the recipe of an output folder."""
    choose = random.Random(0)
    words = ["".join(choose.choices("etaoinshrdlu", k=choose.randint(2, 9))) for _ in range(5000)]
    words += COMMON["english"].split() * 100  # so that filters keep most documents

    def sentence() -> str:
        return " ".join(choose.choices(words, k=WORDS // 20)).capitalize() + "."

    for number in range(files):
        lines = ["\n".join(sentence() for _ in range(20)) for _ in range(documents)]
        copies = lines[: documents // 10]
        text = "".join(json.dumps({"text": line}) + "\n" for line in [*lines, *copies])
        (folder / f"{number}.jsonl").write_text(text)

    def recipe(out: str) -> RecipeFile:
        path = folder / f"{out}.toml"
        path.write_text(
            f'out = "{folder / out}"\ntokenizer = "bytes"\nvalidation_share = 0.1\n{STAGES}'
            + "".join(
                f'[[sources]]\nname = "s{n}"\ninputs = ["{folder / f"{n}.jsonl"}"]\n'
                for n in range(files)
            )
        )
        return load_recipe(path)

    return recipe


def shards_in(out: Path) -> dict[str, bytes]:
    """Every published file but the report, which has times."""
    paths = (path for path in out.rglob("*") if path.is_file() and ".work" not in path.parts)
    return {
        str(path.relative_to(out)): path.read_bytes()
        for path in paths
        if path.name != "report.html"
    }


def measure_scaling(folder: Path, documents: int = SCALING_DOCUMENTS) -> None:
    """Wall time of the whole command on some workers, on a cluster and without one."""
    recipe = write_texts(folder, SCALING_FILES, documents)
    size = sum(path.stat().st_size for path in folder.glob("*.jsonl")) / 1e6
    print(
        f"{size:.0f} MB in {SCALING_FILES} tasks a stage; {os.cpu_count()} cores,"
        f" load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    first: tuple[float, float] | None = None
    for workers in SCALING_WORKERS:
        recipe(f"local{workers}")
        local = timed_command(folder / f"local{workers}.toml", "--workers", str(workers))
        dask_folder = folder / f"cluster{workers}"
        dask_folder.mkdir()
        recipe(f"dask{workers}")
        with Cluster(dask_folder, 1, workers) as cluster:
            cluster.wait_for_workers(workers)
            engine = ("--engine", "dask", "--engine-address", str(cluster.file))
            dask = timed_command(folder / f"dask{workers}.toml", *engine)
        same = shards_in(folder / f"dask{workers}") == shards_in(folder / f"local{workers}")
        first = first or (local, dask)
        print(
            f"{workers} workers: local {local:.1f} s ({first[0] / local:.2f} x),"
            f" dask {dask:.1f} s ({first[1] / dask:.2f} x), same shards: {same}",
            flush=True,
        )


def timed_command(recipe: Path, *arguments: str) -> float:
    """Wall time of scripts/prepare_data.py."""
    command = [sys.executable, "scripts/prepare_data.py", "--recipe", str(recipe), *arguments]
    start = time.perf_counter()
    subprocess.run(
        command,
        cwd=ROOT,
        env=environment(),
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


class _Killer:
    """Kills something when a stage begins and, after its first task, once more; a TaskProgress."""

    def __init__(self, stage: str, kill: Callable[[], None]):
        self._stage, self._kill = stage, kill
        self.kills = 0

    def __call__(self, update: StageProgress, /) -> None:
        first = update.counts is None or update.done == update.reused + 1
        if update.stage == self._stage and first and self.kills < 2:
            self.kills += 1
            self._kill()


def inject_faults(folder: Path) -> None:
    """Kill a worker and a node in each stage."""
    recipe = write_texts(folder, FILES, DOCUMENTS)
    local = make_corpus(recipe("local"), LocalEngine(2))
    expected, failed = shards_in(folder / "local"), 0
    with Cluster(folder, 2, 1) as cluster:
        for stage in local.stages:
            for name, kill in (("worker", cluster.kill_worker), ("node", cluster.kill_node)):
                file, killer = recipe(f"{stage}-{name}"), _Killer(stage, kill)
                with DaskEngine(str(cluster.file), file.work, 120) as engine:
                    make_corpus(file, engine, killer)
                same = shards_in(Path(file.recipe.out)) == expected
                failed += not same
                print(f"{stage:14} {name:7} {killer.kills} kills, same shards: {same}", flush=True)
    sys.exit(f"{failed} differ" if failed else 0)


if __name__ == "__main__":
    kinds = {"overhead": measure_overhead, "scaling": measure_scaling, "faults": inject_faults}
    if len(sys.argv) < 2 or sys.argv[1] not in kinds:
        sys.exit(__doc__)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the cluster ends too
    with tempfile.TemporaryDirectory() as temporary:
        kinds[sys.argv[1]](Path(temporary), *map(int, sys.argv[2:]))
