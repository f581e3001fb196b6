"""Faults of processes, disks and files. All but `damage` start the run, inject a fault, and wait
until the run has ended."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.files import write_file_atomically
from titanlite.metrics import METRICS_FILE
from titanlite.runtime.lease import LEASE_FILE
from titanlite.storage import StorageFolder
from titanlite_lab.drill.run import Drill, find_rank_pids, is_running


def kill_a_rank(drill: Drill) -> str:
    run = _start_until_training(drill)
    rank = signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    return f"rank {rank} killed"


def kill_a_writer(drill: Drill) -> str:
    """Kill while a checkpoint is being written."""
    run = _start_until_saving(drill)
    rank = signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    names = ", ".join(name for name, _ in drill.unfinished()) or "none"
    return f"rank {rank} killed while saving; unfinished: {names}"


def interrupt_a_save(drill: Drill) -> str:
    """Ctrl-C at torchrun while a checkpoint is being written: the save must be completed."""
    run = _start_until_saving(drill)
    _signal_the_launcher(drill, run, signal.SIGINT)
    drill.wait(run)
    if unfinished := drill.unfinished():
        raise drill.failure(f"Ctrl-C left {sorted(unfinished)} unfinished")
    return "Ctrl-C while saving; the save was completed"


def lose_the_lease(drill: Drill) -> str:
    """Another job takes over the lease during a save: nothing more may be committed."""
    run = _start_until_saving(drill)
    lease = drill.out / LEASE_FILE
    before = {path.name for path in drill.complete_checkpoints()}
    try:
        holder = json.loads(lease.read_bytes())
    except (OSError, ValueError):
        raise drill.ended_early() from None
    number = holder["number"] + 1
    other = {**holder, "token": "another job", "number": number}
    write_file_atomically(lease, json.dumps(other).encode())
    drill.wait(run)
    later = {path.name for path in drill.complete_checkpoints()} - before
    manifests = (read_checkpoint_manifest(StorageFolder(drill.checkpoints / n)) for n in later)
    if any(manifest.lease >= number for manifest in manifests):
        raise drill.failure(f"{sorted(later)} was committed after the lease was lost")
    lease.unlink(missing_ok=True)  # as if the other job had ended
    return "lease lost while saving; the run ended"


def share_the_checkpoint_folder(drill: Drill) -> str:
    """A second job with the same checkpoint.folder must be refused; the first one continues."""
    run = _start_until_training(drill)
    folder = f"--checkpoint.folder={drill.checkpoints.absolute()}"
    # With the ranks and the layout of the first.
    second = replace(
        drill,
        out=drill.out.with_name("other job"),
        argv=[*drill.argv, folder],
        run=None,
        starts=drill.starts - 1,
    )
    try:
        code = second.wait(second.start())
    finally:
        second.kill()
    if run.poll() is not None:
        raise drill.ended_early()
    if not code or "another job is writing there" not in second.log_text():
        raise second.failure(f"a second job on {drill.checkpoints} was not refused")
    signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    return "a second job on the same checkpoints was refused; a rank killed"


def hang_an_fsync(drill: Drill) -> str:
    """The disk stops answering during a save: the run must end and report it."""
    hanging, shim = drill.out.with_name("hang"), drill.out.with_name("hang.so")
    if not shim.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            return kill_a_rank(drill)
        flags = ["-shared", "-fPIC", "-o", str(shim), "-x", "c", "-", "-ldl"]
        subprocess.run([compiler, *flags], input=HANGING_FSYNC, text=True, check=True)
    drill.argv.append("--checkpoint.timeout_seconds=5")
    try:
        run = _start_until_training(
            drill, LD_PRELOAD=str(shim), HANG_WHILE=str(hanging), HANG_IN="/step-"
        )
        hanging.touch()
        drill.wait(run)
    finally:
        hanging.unlink(missing_ok=True)
        drill.argv.pop()
    if run.returncode and "the save of step" not in drill.log_text():
        raise drill.failure("a save hung and was not reported")
    return "an fsync hung; the run reported it and ended"


# Hangs as with a dead file server: in the kernel, with the GIL released.
HANGING_FSYNC = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
int fsync(int descriptor) {
  char link[64], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  while (strstr(path, getenv("HANG_IN")) && !access(getenv("HANG_WHILE"), F_OK)) usleep(10000);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}
"""


def kill_the_launcher(drill: Drill) -> str:
    run = _start_until_training(drill)
    pids = find_rank_pids(run.pid)
    run.kill()
    run.wait()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids.values()):
        if time.monotonic() > deadline:
            raise drill.failure(f"ranks {pids} still run 60 s after torchrun was killed")
        time.sleep(0.1)
    return "torchrun killed; all ranks ended"


def freeze_a_rank(drill: Drill) -> str:
    run = _start_until_training(drill)
    rank = signal_a_rank(drill, run, signal.SIGSTOP)
    drill.wait(run)
    if run.returncode and f"Rank {rank} (" not in drill.log_text():
        raise drill.failure(f"rank {rank} was frozen and not reported")
    return f"rank {rank} frozen; the others reported it"


def ask_to_stop(drill: Drill) -> str:
    run = _start_until_training(drill)
    number = drill.random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
    rank = signal_a_rank(drill, run, number)
    drill.wait(run)
    return f"{number.name} to rank {rank}"


def fill_the_disk(drill: Drill) -> str:
    """A quota too small for a shard: training must continue, and the next start must succeed."""
    sizes = [path.stat().st_size for path in drill.checkpoints.glob("step-*/*.distcp")]
    metrics = drill.out / METRICS_FILE
    if not sizes or metrics.stat().st_size > max(sizes) // 4:
        return kill_a_rank(drill)
    run = _start_until_training(drill)
    for pid in find_rank_pids(run.pid).values():  # only now: a compiler could not write its files
        with suppress(ProcessLookupError):
            hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (max(sizes) // 2, hard))
    # A save whose shards were already written may still be completed.
    begun = {name for name, _ in drill.unfinished()}
    before = [path.name for path in drill.complete_checkpoints()]
    signal_a_rank(drill, run, signal.SIGTERM)
    drill.wait(run)
    after = {path.name for path in drill.complete_checkpoints()}
    if after - begun - set(before) or set(before[-1:]) - after:
        raise drill.failure("a full disk changed the set of complete checkpoints")
    return "disk full"


def resume_on_a_full_disk(drill: Drill) -> str:
    """A start that cannot write its files must be refused, and change no file of the run."""
    if not drill.complete_checkpoints():
        return kill_a_rank(drill)
    names = ("config.toml", METRICS_FILE)
    before = [(drill.out / name).read_bytes() for name in names]
    run = drill.start(file_limit=(len(before[0]) - 1) // 1024)  # config.toml is larger
    drill.wait(run)
    refused = run.returncode and "File too large" in drill.log_text()
    if not refused or [(drill.out / name).read_bytes() for name in names] != before:
        raise drill.failure(f"a resume on a full disk was not refused, or changed {names}")
    return "disk full at a resume; refused, nothing changed"


def damage(name: str, change: Callable[[Drill, Path], None], drill: Drill) -> str:
    """Damage the newest of several checkpoints: the next start must use the one before it."""
    checkpoints = drill.complete_checkpoints()
    if len(checkpoints) < 2:
        return kill_a_rank(drill)
    change(drill, checkpoints[-1])
    return f"{checkpoints[-1].name}: {name}"


def _choose_shard(drill: Drill, checkpoint: Path) -> Path:
    return drill.random.choice(sorted(checkpoint.glob("*.distcp")))


def _flip_bit(drill: Drill, checkpoint: Path) -> None:
    shard = _choose_shard(drill, checkpoint)
    with shard.open("r+b") as file:
        offset = drill.random.randrange(shard.stat().st_size)
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1 << drill.random.randrange(8)]))


def _truncate_shard(drill: Drill, checkpoint: Path) -> None:
    shard = _choose_shard(drill, checkpoint)
    os.truncate(shard, drill.random.randrange(shard.stat().st_size))


def _remove_manifest(drill: Drill, checkpoint: Path) -> None:
    (checkpoint / "manifest.json").unlink()


# The names are values of --kinds; each fault returns a line for the report.
PROCESS_FAULTS: dict[str, Callable[[Drill], str]] = {
    "kill_a_rank": kill_a_rank,
    "kill_a_writer": kill_a_writer,
    "kill_the_launcher": kill_the_launcher,
    "freeze_a_rank": freeze_a_rank,
    "ask_to_stop": ask_to_stop,
    "interrupt_a_save": interrupt_a_save,
    "lose_the_lease": lose_the_lease,
    "share_the_checkpoint_folder": share_the_checkpoint_folder,
    "hang_an_fsync": hang_an_fsync,
    "fill_the_disk": fill_the_disk,
    "resume_on_a_full_disk": resume_on_a_full_disk,
    "flip_a_bit": partial(damage, "flip_a_bit", _flip_bit),
    "truncate_a_shard": partial(damage, "truncate_a_shard", _truncate_shard),
    "remove_the_manifest": partial(damage, "remove_the_manifest", _remove_manifest),
}


def _start_until_training(drill: Drill, **environment: str) -> subprocess.Popen:
    """Start the run, and return at a random time after its first step."""
    run, deadline = drill.start(environment=environment), time.monotonic() + 600
    while run.poll() is None and time.monotonic() < deadline and not drill.has_trained():
        time.sleep(0.02)
    time.sleep(drill.random.uniform(0, drill.max_delay))
    return run


def _start_until_saving(drill: Drill) -> subprocess.Popen:
    """Start the run, and return while it writes a checkpoint, or when it has ended."""
    before, deadline = drill.unfinished(), time.monotonic() + 300
    run = drill.start()
    while time.monotonic() < deadline and run.poll() is None:
        if drill.unfinished() - before:
            time.sleep(drill.random.uniform(0, 0.05))
            break
        time.sleep(0.0005)
    return run


def _signal_the_launcher(drill: Drill, run: subprocess.Popen, number: int) -> None:
    if run.poll() is not None:
        raise drill.ended_early()
    run.send_signal(number)


def signal_a_rank(drill: Drill, run: subprocess.Popen, number: int) -> int:
    pids = find_rank_pids(run.pid)
    rank = drill.random.randrange(drill.ranks)
    try:
        os.kill(pids[rank], number)
    except (KeyError, ProcessLookupError):
        raise drill.ended_early() from None
    return rank
