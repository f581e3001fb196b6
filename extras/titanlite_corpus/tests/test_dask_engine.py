"""A Dask cluster makes the same corpus, survives lost workers, and its errors are readable."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from titanlite.errors import ConfigError, DataError, UserErrors, format_error
from titanlite_corpus.dask_engine import DaskEngine, describe_environment
from titanlite_corpus.engine import EngineCall
from titanlite_corpus.pipeline import make_corpus
from titanlite_corpus.recipe import load_recipe
from titanlite_corpus.task import Task, run_tasks
from titanlite_corpus.tests.dask_tasks import (
    kill_worker,
    refuse,
    run_until_cancelled,
    word_of_a_dead_worker,
)
from titanlite_corpus.tests.test_prepare import group_exists, wait_until
from titanlite_corpus.tests.test_recipe import (  # noqa: F401  # fixtures
    ONE,
    no_fsync,
    shards_in,
    write_recipe,
)

pytestmark = [
    pytest.mark.slow,  # importorskip would import it in each worker of the suite
    pytest.mark.skipif(find_spec("distributed") is None, reason="distributed is not installed"),
]
ROOT = Path(__file__).parents[3]
SETTINGS = {"DASK_DISTRIBUTED__SCHEDULER__ALLOWED_FAILURES": "1", "OMP_NUM_THREADS": "1"}


class Cluster:
    """A scheduler and two workers with one nanny, all processes of their own."""

    def __init__(self, folder: Path):
        self.file = folder / "scheduler.json"
        self._environment = {**os.environ, **SETTINGS, "PYTHONPATH": str(ROOT)}
        self._folder = folder
        local = ["--host", "127.0.0.1", "--no-dashboard"]
        self.scheduler = self._start("scheduler", *local, "--port", "0", "--scheduler-file")
        self.nanny = self.start_node()

    def start_node(self) -> subprocess.Popen:
        more = ["--nworkers", "2", "--nthreads", "1", "--no-dashboard", "--scheduler-file"]
        return self._start("worker", "--host", "127.0.0.1", *more)

    def _start(self, kind: str, *arguments: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "dask", kind, *arguments, str(self.file)],
            cwd=self._folder,  # not that of the command
            env=self._environment,
            start_new_session=True,
            stderr=open(self._folder / f"{kind}.log", "ab"),
        )

    def stop(self) -> None:
        for process in (self.nanny, self.scheduler):
            kill_group(process)


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process and its children at once, as a machine that loses power."""
    if group_exists(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    wait_until(cluster.file.exists)
    yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def keep_log_levels():
    loggers = [logging.getLogger(n) for n in logging.root.manager.loggerDict if "distributed" in n]
    levels = [log.level for log in loggers]
    yield
    for log, level in zip(loggers, levels, strict=True):
        log.setLevel(level)


@pytest.fixture
def engine(cluster, tmp_path):
    with DaskEngine(str(cluster.file), tmp_path, stall_seconds=60) as engine:
        yield engine


def test_a_cluster_makes_the_same_shards(cluster, write_recipe, tmp_path):  # noqa: F811
    make_corpus(load_recipe(write_recipe("local")), ONE)
    recipe = load_recipe(write_recipe("cluster"))
    with DaskEngine(str(cluster.file), recipe.work) as engine:
        result = make_corpus(recipe, engine)
    assert result.tasks >= 8
    assert shards_in(tmp_path / "cluster") == shards_in(tmp_path / "local")
    assert not list(recipe.work.glob(".dask-*"))


def test_a_task_whose_worker_is_killed_runs_again(engine, tmp_path):
    arguments = {"word": "a", "first": str(tmp_path / "first")}
    task = Task("word", word_of_a_dead_worker, arguments)
    assert run_tasks([task], tmp_path, engine)[0]["words"] == 1
    assert (tmp_path / "first").exists() and (tmp_path / task.key / "word").read_text() == "a"


def test_a_task_that_kills_its_workers_is_named(engine):
    with pytest.raises(DataError, match="read/abc: 2 workers died while they ran it") as error:
        list(engine.run([EngineCall(kill_worker, (), "read/abc")]))
    assert "--memory-limit" in error.value.fix


def test_errors_of_tasks_arrive_whole(engine):
    with pytest.raises(UserErrors) as error:
        list(engine.run([EngineCall(refuse, (), "read/abc")]))
    assert format_error(error.value).splitlines()[1:] == [
        "  1. a.jsonl:3: is not JSON. Fix it.",
        "  2. second",
    ]


def test_a_command_that_ends_leaves_no_task_running(engine, tmp_path):
    files = str(tmp_path / "started"), str(tmp_path / "ended")
    results = engine.run([EngineCall(run_until_cancelled, files, "a"), EngineCall(int, (), "b")])
    assert next(results) == (1, 0)
    wait_until((tmp_path / "started").exists)
    results.close()  # as an exception such as KeyboardInterrupt does
    wait_until((tmp_path / "ended").exists)


def test_a_stalled_cluster_is_reported(cluster, tmp_path):
    def stopped(signal_number):
        os.killpg(cluster.nanny.pid, signal_number)

    with DaskEngine(str(cluster.file), tmp_path, stall_seconds=0.5) as engine:
        stopped(signal.SIGSTOP)
        try:
            with pytest.raises(DataError, match="no task has made progress for 0.5 s on 2 workers"):
                list(engine.run([EngineCall(int, (), "a")]))
        finally:
            stopped(signal.SIGCONT)


def test_machines_without_a_common_folder_are_refused(cluster, tmp_path, monkeypatch):
    with DaskEngine(str(cluster.file), tmp_path) as engine:
        monkeypatch.setattr("os.getcwd", lambda: "/no/such/folder")
        with pytest.raises(DataError, match="/no/such/folder cannot be used") as error:
            list(engine.run([EngineCall(int, (), "a")]))
    assert "file system that all machines mount" in error.value.fix


def test_workers_with_other_code_are_refused(cluster, tmp_path, monkeypatch):
    other = {**describe_environment(), "titanlite": "0123"}
    monkeypatch.setattr("titanlite_corpus.dask_engine.describe_environment", lambda: other)
    with (
        DaskEngine(str(cluster.file), tmp_path) as engine,
        pytest.raises(ConfigError, match="has titanlite .*, the command 0123"),
    ):
        list(engine.run([EngineCall(int, (), "a")]))


def test_other_versions_of_dask_are_refused(cluster, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "distributed.client.version_module.get_versions",
        lambda **_: {"packages": {"python": "3.9.1", "dask": "1", "distributed": "1"}},
    )
    with pytest.raises(ConfigError, match="the scheduler has python .*, this process 3.9") as error:
        DaskEngine(str(cluster.file), tmp_path).__enter__()
    assert "the scheduler has distributed" in error.value.message


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nonsense", "no.json"])
def test_a_scheduler_that_is_not_there_is_refused(address, tmp_path, monkeypatch):
    monkeypatch.setattr("titanlite_corpus.dask_engine.CONNECT_SECONDS", 0.2)
    with pytest.raises(ConfigError, match=f"--engine-address {address}"):
        DaskEngine(address, tmp_path).__enter__()


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(ConfigError) as error:
        DaskEngine("tcp://127.0.0.1:9", tmp_path).__enter__()
    assert error.value.fix == "pip install 'titanlite[dask]'"


def test_a_killed_scheduler_is_named(cluster, tmp_path):  # the last test: it ends the cluster
    files = str(tmp_path / "started"), str(tmp_path / "ended")
    with DaskEngine(str(cluster.file), tmp_path) as engine:
        results = engine.run(
            [EngineCall(run_until_cancelled, files, "a"), EngineCall(int, (), "b")]
        )
        assert next(results) == (1, 0)
        kill_group(cluster.scheduler)
        with pytest.raises(DataError, match="the connection to the scheduler was lost"):
            next(results)
