"""Checkpoints in a real object store, which is slow and fails, between two real ranks."""

from __future__ import annotations

import json
import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from tests.checkpoint.object_store import Store, needs_s3, open_store
from tests.checkpoint.saving import bits, load, open_checkpointer, save, save_whole
from tests.checkpoint.test_checkpointer import spoil, trained
from tests.distributed.oracle import Layout
from tests.distributed.ranks import run_on_ranks
from tests.faults.launch import Launched, events_of
from titanlite.checkpoint import list_steps, read_checkpoint_manifest
from titanlite.distributed.process_group import set_collective_timeouts
from titanlite.errors import CheckpointError, ConfigError
from titanlite.runtime.remote_lease import acquire_remote_lease, lease_numbers
from titanlite.storage import StorageFolder

pytestmark = needs_s3
QUICK = {"heartbeat_seconds": 0.05, "stale_seconds": 0.5}


@pytest.fixture(scope="module")
def store():
    with open_store() as server:
        yield server


@pytest.fixture
def here(store, monkeypatch):
    """The store, for this process too."""
    for name, value in store.environ.items():
        monkeypatch.setenv(name, value)
    yield store
    store.forget()


def rule(store: Store, *rules: tuple) -> None:
    """Forget the rules before, and follow these; called by every rank."""
    dist.barrier()
    if dist.get_rank() == 0:
        store.forget()
        for one in rules:
            store.rule(*one)
    dist.barrier()


def asked(store: Store) -> list[str]:
    dist.barrier()
    return store.requests()


# --- a run ---------------------------------------------------------------------------------------


def first_save_fails(store, url) -> dict:
    """A first save whose commit fails, and whose shards cannot be removed; then a start."""
    state, checkpointer = trained(Layout(shard=2)), open_checkpointer(url, async_mode="async")
    rule(store, ("PUT", "manifest.json", "refuse"), ("DELETE", "__1_0", "refuse"))
    save(checkpointer, state)
    said = {"problem": checkpointer.wait().problem}
    said["left"] = sorted((StorageFolder(url) / "step-1").sizes())
    rule(store)
    said["found"] = open_checkpointer(url).find()
    said["names"] = StorageFolder(url).folders()
    return said


def live(store, url) -> dict:
    """Save, resume, keep two, fail to commit, go back: everything a run does there."""
    state, said = trained(Layout(shard=2)), {}
    checkpointer = open_checkpointer(url, async_mode="async", keep_latest_k=2)
    rule(store, ("PUT", "__0_0", "busy", 1), ("PUT", ".metadata", "lose", 1))  # these are repeated
    for state.step in (1, 2, 3):
        save_whole(checkpointer, state)
    said["kept"], said["names"] = checkpointer.steps(), StorageFolder(url).folders()

    before = bits(state)
    spoil(state)
    said["resumed"] = load(open_checkpointer(url), state), bits(state) == before

    rule(store, ("PUT", "step-4/manifest.json", "refuse"))
    state.step = 4
    save(checkpointer, state)
    said["problem"], said["after"] = checkpointer.wait().problem, StorageFolder(url).folders()

    rule(store, ("GET", "step-3/manifest.json", "refuse"))
    try:
        said["silent"] = f"went on from {open_checkpointer(url).find().folder}"
    except CheckpointError as error:
        said["silent"] = str(error)

    rule(store)
    said["back"] = load(open_checkpointer(url, load_step=2), state)
    listing = list_steps(StorageFolder(url))
    said["listed"] = listing.steps, listing.aside
    said["copied"] = [line for line in asked(store) if line.startswith("COPY") and "step" in line]
    state.step = 3
    save_whole(checkpointer, state)
    said["again"] = checkpointer.steps(), list_steps(StorageFolder(url)).aside

    rule(store, ("DELETE", "step-2/__1_0", "refuse"))
    state.step = 5
    save_whole(checkpointer, state)
    listing = list_steps(StorageFolder(url))
    said["cut short"] = listing.steps, listing.unfinished
    rule(store)
    said["cleaned"] = open_checkpointer(url).find().folder.name, StorageFolder(url).folders()
    return said


def look_slowly(store, url) -> str:
    """Look for a checkpoint where that takes longer than training has patience."""
    checkpointer = open_checkpointer(url)
    set_collective_timeouts(1, excluded=checkpointer.group)
    if dist.get_rank() == 0:
        store.rule("GET", "prefix=slow%2F", "delay", 1, 3.0)
    found = checkpointer.find()
    checkpointer.set_aside_later_steps(0)
    return str(found)


def everything(store) -> dict:
    store.enter()
    acts = {"first": first_save_fails, "live": live, "slow": look_slowly}
    return {name: act(store, f"s3://bucket/{name}") for name, act in acts.items()}


@pytest.fixture(scope="module")
def lived(store) -> list[dict]:
    """What two ranks saw, one after the other in the same processes, which are slow to start."""
    return run_on_ranks(everything, 2, store)


def test_a_first_save_that_failed_is_no_reason_to_refuse_every_start(lived):
    for said in (of_rank["first"] for of_rank in lived):
        assert "AccessDenied" in said["problem"]
        assert said["left"] == ["__1_0.distcp", "unfinished"], "the marker is deleted last"
        assert said["found"] is None and said["names"] == []


def test_a_run_lives_in_an_object_store_that_is_slow_and_fails(lived):
    for said in (of_rank["live"] for of_rank in lived):
        assert said["kept"] == [2, 3] and said["names"] == ["step-2", "step-3"]
        assert said["resumed"] == ("step-3", True)
        assert "AccessDenied" in said["problem"] and said["after"] == ["step-2", "step-3"]
        assert "the storage failed" in said["silent"], "no older one is used because it is silent"
        assert said["back"] == "step-2" and said["listed"] == ([2], ["step-3"])
        assert said["copied"] == [], "setting aside costs no copy"
        assert said["again"] == ([2, 3], [])
        assert said["cut short"] == ([3, 5], ["step-2"])
        assert said["cleaned"] == ("step-5", ["step-3", "step-5"])


def test_ranks_wait_for_a_store_longer_than_for_each_other(lived):
    assert [of_rank["slow"] for of_rank in lived] == ["None", "None"]


# --- a whole run ---------------------------------------------------------------------------------

STEPS = 8


def argv_of(run_toml, out, *argv) -> tuple[str, ...]:
    given = {
        "training.steps": STEPS,
        "validation.enable": "false",
        "job.dump_folder": out,
        "checkpoint.interval": 2,
        "checkpoint.async_mode": "async",
        "comm.train_timeout_seconds": 10,
    }
    words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
    return ("--job.config_file", str(run_toml), *words, *argv)


def test_a_run_killed_beside_its_store_ends_in_the_bits_of_the_undisturbed_one(
    here, run_toml, tmp_path
):
    with Launched(2, tmp_path / "right", *argv_of(run_toml, tmp_path / "right")) as run:
        assert run.wait() == [0, 0], run.said
    right = read_checkpoint_manifest(
        StorageFolder(tmp_path / "right" / "checkpoint" / f"step-{STEPS}")
    )

    out, url = tmp_path / "killed", "s3://bucket/killed"
    argv = argv_of(run_toml, out, "--checkpoint.folder", url)
    with Launched(2, out, *argv, prepare=here.enter) as run:
        run.wait_for(lambda: events_of(out, "checkpoint_saved"))
        run.signal(0, signal.SIGKILL)  # who holds the leases
        run.wait()
    with Launched(2, out, *argv, prepare=here.enter) as run:
        run.wait_for(lambda: "lease.json: taken over from process" in run.said)
        run.wait_for(lambda: f"{url}: taken over from process" in run.said)
        assert run.wait() == [0, 0], run.said
    assert events_of(out, "resumed")
    found = read_checkpoint_manifest(StorageFolder(f"{url}/step-{STEPS}"))
    assert (found.tensors, found.progress) == (right.tensors, right.progress)
    assert found.lease == 2 and right.lease == 1


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["s3://bucket", "memory://bucket", ""])
def test_characters_of_patterns_in_a_path_are_plain(where, here, tmp_path):
    where = where or str(tmp_path)
    places = {
        run: StorageFolder(f"{where}/{run}/step-4")
        for run in ("lr1", "lr2", "lr[12]", "lr*", "lr?")
    }
    for place in places.values():
        place.create_folder()
        for name in ("manifest.json", "__0_0.distcp"):
            place.write_atomically(name, b"{}")
    for run in ("lr[12]", "lr*", "lr?"):
        places[run].rename_file("__0_0.distcp", "__1_0.distcp")
        assert set(places[run].sizes()) == {"manifest.json", "__1_0.distcp"}
        places[run].remove(delete_first="manifest.json")
        assert not places[run].exists()
    for run in ("lr1", "lr2"):
        assert set(places[run].sizes()) == {"manifest.json", "__0_0.distcp"}, run


# --- the lease -----------------------------------------------------------------------------------


def race(store, url, rounds) -> list[int]:
    """Of each round, the number of the lease that this process got in the race, and after it; 0: none."""
    store.enter()
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


def test_of_two_jobs_that_start_at_once_in_a_store_one_gets_the_lease(store):
    first, second = run_on_ranks(race, 2, store, "s3://bucket/race", 5)
    for number, pair in enumerate(zip(first, second, strict=True)):
        assert sorted(pair) == [0, 1 + number % 2], "each taking gets the next number"


def content_of(folder: StorageFolder) -> dict:
    return json.loads(folder.read(f"lease-{lease_numbers(folder)[-1]:06}.json"))


def test_a_dead_jobs_lease_in_a_store_is_taken_over(here):
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
    state["holder"]["host"] = "elsewhere"  # of which only the heartbeat tells
    folder.write_atomically("lease-000001.json", json.dumps(state).encode())
    taken = acquire_remote_lease(folder, "checkpoint.folder", **QUICK)
    assert taken.number == 2 and lease_numbers(folder) == [2]
    taken.close()


def test_a_job_elsewhere_that_beats_keeps_its_lease_in_a_store(here):
    folder = StorageFolder("s3://bucket/beats")
    acquire_remote_lease(folder, "checkpoint.folder", **QUICK).close()
    state, stop = content_of(folder), threading.Event()
    state["holder"]["host"], state["released"] = "elsewhere", False

    def beat() -> None:
        while not stop.is_set():
            state["beats"] += 1
            folder.write_atomically("lease-000001.json", json.dumps(state).encode())

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(ConfigError, match="on elsewhere"):
            acquire_remote_lease(folder, "checkpoint.folder", stale_seconds=60)
    finally:
        stop.set()
        thread.join()


def test_a_lost_answer_does_not_make_a_job_refuse_itself(here):
    here.rule("PUT", "lease-000001.json", "lose", 1)
    lease = acquire_remote_lease(StorageFolder("s3://bucket/lost"), "checkpoint.folder", **QUICK)
    lease.check()
    lease.close()


@pytest.mark.parametrize("where", ["s3://bucket/check", "memory://check"])
def test_a_check_reads_the_store_itself_and_does_not_wait_for_a_heartbeat(where, here):
    folder = StorageFolder(where)
    lease = acquire_remote_lease(folder, "checkpoint.folder", heartbeat_seconds=1000)
    lease.check()
    here.rule("GET", "check", "refuse")
    if where.startswith("s3"):
        with pytest.raises(CheckpointError, match="the storage failed"):
            lease.check()
        assert not lease.lost, "a store that is silent says nothing of who holds it"
    here.forget()
    state = content_of(folder)
    state["holder"] |= {"host": "elsewhere", "number": 2}
    assert folder.create("lease-000002.json", json.dumps(state).encode())
    with pytest.raises(CheckpointError, match="on elsewhere .* has taken it from this job"):
        lease.check()
    lease.close()
    assert content_of(folder)["holder"]["host"] == "elsewhere", "and it is left to it"
