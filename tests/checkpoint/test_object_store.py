"""Checkpoints of two ranks in an S3 server that is slow and fails."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from tests.checkpoint.object_store import Store, needs_s3, open_store
from tests.checkpoint.saving import bits, load, open_checkpointer, save, save_and_wait
from tests.checkpoint.test_checkpointer import modify, trained
from tests.distributed.oracle import Layout
from tests.distributed.ranks import run_on_ranks
from tests.faults.launch import LaunchedRun, events_of
from titanlite.checkpoint import list_steps, read_checkpoint_manifest
from titanlite.data.urls import open_file_system
from titanlite.distributed.process_group import set_collective_timeouts
from titanlite.errors import CheckpointError, ConfigError, DataError
from titanlite.runtime.remote_lease import acquire_remote_lease, lease_numbers
from titanlite.storage import StorageFolder

pytestmark = needs_s3
QUICK = {"heartbeat_seconds": 0.05, "stale_seconds": 0.5}


@pytest.fixture(scope="module")
def store():
    with open_store() as server:
        yield server


@pytest.fixture
def local_store(store, monkeypatch):
    """The store, with the environment variables for this process."""
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)
    yield store
    store.reset()


def set_rules(store: Store, *rules: tuple) -> None:
    """Replace the rules of the store; called by every rank."""
    dist.barrier()
    if dist.get_rank() == 0:
        store.reset()
        for rule in rules:
            store.add_rule(*rule)
    dist.barrier()


def requests_of_all_ranks(store: Store) -> list[str]:
    dist.barrier()
    return store.requests()


# --- checkpointer --------------------------------------------------------------------------------


def fail_first_save(store, url) -> dict:
    """Save once; the commit fails, and a shard file cannot be removed. Then start again."""
    state, checkpointer = trained(Layout(shard=2)), open_checkpointer(url, async_mode="async")
    set_rules(store, ("PUT", "manifest.json", "refuse"), ("DELETE", "__1_0", "refuse"))
    save(checkpointer, state)
    seen = {"problem": checkpointer.wait().problem}
    seen["remaining"] = sorted((StorageFolder(url) / "step-1").sizes())
    set_rules(store)
    seen["found"] = open_checkpointer(url).find()
    seen["names"] = StorageFolder(url).folders()
    return seen


def save_and_resume(store, url) -> dict:
    """Save, resume, remove old checkpoints, fail to commit, and roll back."""
    state, seen = trained(Layout(shard=2)), {}
    checkpointer = open_checkpointer(url, async_mode="async", keep_latest_k=2)
    set_rules(
        store, ("PUT", "__0_0", "busy", 1), ("PUT", ".metadata", "lose", 1)
    )  # s3fs retries both
    for state.counters.step in (1, 2, 3):
        save_and_wait(checkpointer, state)
    seen["kept"], seen["names"] = checkpointer.steps(), StorageFolder(url).folders()

    before = bits(state)
    modify(state)
    seen["resumed"] = load(open_checkpointer(url), state), bits(state) == before

    set_rules(store, ("PUT", "step-4/manifest.json", "refuse"))
    state.counters.step = 4
    save(checkpointer, state)
    seen["problem"], seen["after"] = checkpointer.wait().problem, StorageFolder(url).folders()

    set_rules(store, ("GET", "step-3/manifest.json", "refuse"))
    try:
        seen["unreachable"] = f"resumed from {open_checkpointer(url).find().folder}"
    except CheckpointError as error:
        seen["unreachable"] = str(error)

    set_rules(store)
    seen["rolled_back"] = load(open_checkpointer(url, load_step=2), state)
    listing = list_steps(StorageFolder(url))
    seen["listed"] = listing.steps, listing.aside
    seen["copied"] = [
        line for line in requests_of_all_ranks(store) if line.startswith("COPY") and "step" in line
    ]
    state.counters.step = 3
    save_and_wait(checkpointer, state)
    seen["saved_again"] = checkpointer.steps(), list_steps(StorageFolder(url)).aside

    set_rules(store, ("DELETE", "step-2/__1_0", "refuse"))
    state.counters.step = 5
    save_and_wait(checkpointer, state)
    listing = list_steps(StorageFolder(url))
    seen["interrupted"] = listing.steps, listing.unfinished
    set_rules(store)
    seen["cleaned"] = open_checkpointer(url).find().folder.name, StorageFolder(url).folders()
    return seen


def find_slowly(store, url) -> str:
    """Find a checkpoint while listing takes longer than the timeout of training's collectives."""
    checkpointer = open_checkpointer(url)
    set_collective_timeouts(1, excluded=[checkpointer.group])
    if dist.get_rank() == 0:
        store.add_rule("GET", "prefix=slow%2F", "delay", 1, 3.0)
    found = checkpointer.find()
    checkpointer.set_aside_later_steps(0)
    return str(found)


def run_all_cases(store) -> dict:
    store.set_environment()
    cases = {"first": fail_first_save, "resume": save_and_resume, "slow": find_slowly}
    return {name: case(store, f"s3://bucket/{name}") for name, case in cases.items()}


@pytest.fixture(scope="module")
def results(store) -> list[dict]:
    """What two ranks saw in all cases. One pair of processes for all: they are slow to start."""
    return run_on_ranks(run_all_cases, 2, store)


def test_a_run_starts_after_its_first_save_has_failed(results):
    for seen in (of_rank["first"] for of_rank in results):
        assert "AccessDenied" in seen["problem"]
        remaining = set(seen["remaining"])  # one failed deletion cancels those not yet started
        assert {"__1_0.distcp", "unfinished"} <= remaining, "the marker is deleted last"
        assert "manifest.json" not in remaining
        assert seen["found"] is None and seen["names"] == []


def test_a_run_saves_and_resumes_in_an_object_store_that_is_slow_and_fails(results):
    for seen in (of_rank["resume"] for of_rank in results):
        assert seen["kept"] == [2, 3] and seen["names"] == ["step-2", "step-3"]
        assert seen["resumed"] == ("step-3", True)
        assert "AccessDenied" in seen["problem"] and seen["after"] == ["step-2", "step-3"]
        assert "the storage failed" in seen["unreachable"], (
            "an older checkpoint must not be used instead"
        )
        assert seen["rolled_back"] == "step-2" and seen["listed"] == ([2], ["step-3"])
        assert seen["copied"] == [], "setting aside must not copy files"
        assert seen["saved_again"] == ([2, 3], [])
        assert seen["interrupted"] == ([3, 5], ["step-2"])
        assert seen["cleaned"] == ("step-5", ["step-3", "step-5"])


def test_a_store_slower_than_the_training_timeout_does_not_end_the_run(results):
    assert [of_rank["slow"] for of_rank in results] == ["None", "None"]


# --- a whole run ---------------------------------------------------------------------------------

STEPS = 8


def argv_of(run_toml, out, *argv) -> tuple[str, ...]:
    settings = {
        "training.steps": STEPS,
        "validation.enable": "false",
        "job.dump_folder": out,
        "checkpoint.interval": 2,
        "checkpoint.async_mode": "async",
        "comm.train_timeout_seconds": 10,
    }
    options = [text for key, value in settings.items() for text in (f"--{key}", str(value))]
    return ("--job.config_file", str(run_toml), *options, *argv)


def test_a_run_killed_while_saving_to_a_store_ends_bit_equal_to_an_undisturbed_run(
    local_store, run_toml, tmp_path
):
    with LaunchedRun(2, tmp_path / "expected", *argv_of(run_toml, tmp_path / "expected")) as run:
        assert run.wait() == [0, 0], run.output
    expected = read_checkpoint_manifest(
        StorageFolder(tmp_path / "expected" / "checkpoint" / f"step-{STEPS}")
    )

    out, url = tmp_path / "killed", "s3://bucket/killed"
    argv = argv_of(run_toml, out, "--checkpoint.folder", url)
    with LaunchedRun(2, out, *argv, prepare=local_store.set_environment) as run:
        run.wait_for(lambda: events_of(out, "checkpoint_saved"))
        run.signal(0, signal.SIGKILL)  # rank 0 owns the leases
        run.wait()
    with LaunchedRun(2, out, *argv, prepare=local_store.set_environment) as run:
        run.wait_for(lambda: "lease.json: taken over from process" in run.output)
        run.wait_for(lambda: f"{url}: taken over from process" in run.output)
        assert run.wait() == [0, 0], run.output
    assert events_of(out, "resumed")
    resumed = read_checkpoint_manifest(StorageFolder(f"{url}/step-{STEPS}"))
    assert (resumed.tensors, resumed.progress) == (expected.tensors, expected.progress)
    assert resumed.lease == 2 and expected.lease == 1


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["s3://bucket", "memory://bucket", ""])
def test_glob_characters_in_a_path_are_literal(where, local_store, tmp_path):
    where = where or str(tmp_path)
    folders = {
        run: StorageFolder(f"{where}/{run}/step-4")
        for run in ("lr1", "lr2", "lr[12]", "lr*", "lr?")
    }
    for folder in folders.values():
        folder.create_folder()
        for name in ("manifest.json", "__0_0.distcp"):
            folder.write_atomically(name, b"{}")
    for run in ("lr[12]", "lr*", "lr?"):
        folders[run].rename_file("__0_0.distcp", "__1_0.distcp")
        assert set(folders[run].sizes()) == {"manifest.json", "__1_0.distcp"}
        folders[run].remove(delete_first="manifest.json")
        assert not folders[run].exists()
    for run in ("lr1", "lr2"):
        assert set(folders[run].sizes()) == {"manifest.json", "__0_0.distcp"}, run


# --- the lease -----------------------------------------------------------------------------------


def race_for_lease(store, url, rounds) -> list[int]:
    """Each round, the numbers of the leases acquired in the race and after it; 0: none."""
    store.set_environment()
    numbers = []
    for number in range(rounds):
        folder = StorageFolder(f"{url}/{number}")
        dist.barrier()
        try:
            lease = acquire_remote_lease(folder, "checkpoint.folder", **QUICK)
            numbers.append(lease.number)
        except ConfigError as error:
            assert "checkpoint.folder = s3://" in str(error) and "another job" in str(error)
            lease = None
            numbers.append(0)
        dist.barrier()
        if lease:
            lease.check()
            lease.close()
        dist.barrier()
        if lease:
            numbers.append(0)
        else:
            lease = acquire_remote_lease(folder, "checkpoint.folder", **QUICK)
            numbers.append(lease.number)
            lease.close()
    return numbers


def test_of_two_jobs_that_start_simultaneously_one_acquires_the_lease(store):
    first, second = run_on_ranks(race_for_lease, 2, store, "s3://bucket/race", 5)
    for number, pair in enumerate(zip(first, second, strict=True)):
        assert sorted(pair) == [0, 1 + number % 2], "each lease has the next number"


def content_of(folder: StorageFolder) -> dict:
    return json.loads(folder.read(f"lease-{lease_numbers(folder)[-1]:06}.json"))


def test_the_lease_of_a_dead_job_is_taken_over(local_store):
    folder = StorageFolder("s3://bucket/dead")
    ours = acquire_remote_lease(folder, "checkpoint.folder", **QUICK)
    with pytest.raises(ConfigError, match=f"process {os.getpid()} on"):
        acquire_remote_lease(folder, "checkpoint.folder", **QUICK)
    before = content_of(folder)["beats"]
    deadline = time.monotonic() + 30
    while content_of(folder)["beats"] == before:
        assert time.monotonic() < deadline, "no heartbeat"
    state = content_of(folder)
    ours.close()
    state["holder"]["host"] = "other-host"  # only the heartbeat shows whether it is alive
    folder.write_atomically("lease-000001.json", json.dumps(state).encode())
    taken = acquire_remote_lease(folder, "checkpoint.folder", **QUICK)
    assert taken.number == 2 and lease_numbers(folder) == [2]
    taken.close()


def test_the_lease_of_a_living_job_on_another_machine_is_not_taken_over(local_store):
    folder = StorageFolder("s3://bucket/beats")
    acquire_remote_lease(folder, "checkpoint.folder", **QUICK).close()
    state, stop = content_of(folder), threading.Event()
    state["holder"]["host"], state["released"] = "other-host", False

    def beat() -> None:
        while not stop.is_set():
            state["beats"] += 1
            folder.write_atomically("lease-000001.json", json.dumps(state).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="on other-host"):
            acquire_remote_lease(folder, "checkpoint.folder", stale_seconds=60)
    finally:
        stop.set()
        thread.join()


def test_a_lost_response_does_not_make_a_job_refuse_its_own_lease(local_store):
    local_store.add_rule("PUT", "lease-000001.json", "lose", 1)
    lease = acquire_remote_lease(StorageFolder("s3://bucket/lost"), "checkpoint.folder", **QUICK)
    lease.check()
    lease.close()


@pytest.mark.parametrize("where", ["s3://bucket/check", "memory://check"])
def test_check_reads_the_lease_from_the_store(where, local_store):
    folder = StorageFolder(where)
    lease = acquire_remote_lease(folder, "checkpoint.folder", heartbeat_seconds=1000)
    lease.check()
    local_store.add_rule("GET", "check", "refuse")
    if where.startswith("s3"):
        with pytest.raises(CheckpointError, match="the storage failed"):
            lease.check()
        assert not lease.lost, "an unreachable store does not mean that the lease is lost"
    local_store.reset()
    state = content_of(folder)
    state["holder"] |= {"host": "other-host", "number": 2}
    assert folder.create("lease-000002.json", json.dumps(state).encode())
    with pytest.raises(CheckpointError, match="on other-host .* has taken it from this job"):
        lease.check()
    lease.close()
    assert content_of(folder)["holder"]["host"] == "other-host", (
        "the other job's lease must not be changed"
    )


@pytest.mark.parametrize(
    "url", ["reference://::file:///x.json", "simplecache::memory://a", "memory://a::file:///b"]
)
def test_only_a_single_url_of_a_known_scheme_is_opened(url):
    if "://" in url.partition("::")[0]:
        with pytest.raises(CheckpointError, match="not one URL"):
            StorageFolder(url)
    with pytest.raises(DataError, match="not one URL"):
        open_file_system(url)
    # a path of this machine may have any name
    assert StorageFolder("/run/reference::x").path == "/run/reference::x"


def test_the_root_of_the_disk_is_not_the_working_directory(tmp_path, monkeypatch):
    (tmp_path / "step-1").mkdir()
    monkeypatch.chdir(tmp_path)
    assert "step-1" not in StorageFolder("/").folders()
    assert StorageFolder("/model").parent.path == "/"
