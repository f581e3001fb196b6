"""A disk that no longer answers: the run warns, names the rank and the place, ends, and goes on."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.faults.launch import Launched, open_store, steps_of
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.storage import StorageFolder

LIMIT = 3  # seconds; a save of this model takes milliseconds

# Hangs as a dead NFS server does: in the kernel, with Python's lock released.
SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static void hang(const char *variable, int descriptor) {
  char link[64], path[4096], *part = getenv(variable);
  snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
  ssize_t length = readlink(link, path, sizeof path - 1);
  path[length < 0 ? 0 : length] = 0;
  while (part && strstr(path, part)) pause();
}
int fsync(int descriptor) {
  hang("HANG_IN_FSYNC", descriptor);
  return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(descriptor);
}
ssize_t read(int descriptor, void *to, size_t bytes) {
  hang("HANG_IN_READ", descriptor);
  return ((ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read"))(descriptor, to, bytes);
}
"""
COMPILER = shutil.which("cc") or shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    not COMPILER or sys.platform != "linux", reason="needs a C compiler on Linux"
)


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    out = tmp_path_factory.mktemp("shim") / "shim.so"
    command = [COMPILER, "-shared", "-fPIC", "-o", str(out), "-x", "c", "-", "-ldl"]
    subprocess.run(command, input=SHIM, text=True, check=True)
    return out


def argv_of(toml, out, *argv) -> list[str]:
    limits = ("--checkpoint.timeout_seconds", str(LIMIT), "--checkpoint.interval", "2")
    quick = ("--validation.enable", "false", "--job.dump_folder", str(out))
    return ["--job.config_file", str(toml), *quick, *limits, *argv]


def start(argv: list[str], **environment) -> subprocess.Popen:
    environment |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *argv],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_fsync_that_hangs_on_one_rank_ends_all_by_name_and_the_run_goes_on(
    run_toml, tmp_path, shim
):
    out = tmp_path / "out"
    argv = argv_of(run_toml, out, "--checkpoint.async_mode", "async")
    store = open_store()

    shared = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    dead = {"LD_PRELOAD": shim, "HANG_IN_FSYNC": "/step-4/"}
    ranks = [
        start(argv, RANK=0, LOCAL_RANK=0, **shared),
        start(argv, RANK=1, LOCAL_RANK=1, **shared, **dead),
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 1], said
    hangs = "Rank 1: the save of step 4 has taken"
    assert f"warning: {hangs}" in said[1] and f"titanlite: {hangs}" in said[1], said[1]
    assert "(titanlite/storage.py, line " in said[1]
    assert f"checkpoint.timeout_seconds = {LIMIT}" in said[1]
    assert "the save of step 4" not in said[0], said[0]  # it waited for the other
    assert "os.fsync" in (out / "stacks" / "rank_1.txt").read_text()

    read_checkpoint_manifest(StorageFolder(out / "checkpoint" / "step-2"))
    with Launched(2, out, *argv, store=store) as again:
        assert again.wait() == [0, 0], again.said
    assert steps_of(out)[-1] == 6


def test_a_read_that_hangs_in_a_load_ends_a_run_of_one_rank(run_toml, tmp_path, shim):
    out = tmp_path / "out"
    with Launched(1, out, *argv_of(run_toml, out, "--training.steps", "2")) as run:
        assert run.wait() == [0], run.said
    argv = argv_of(run_toml, out, "--training.steps", "4")
    process = start(argv, LD_PRELOAD=shim, HANG_IN_READ="/step-2/__0_0")
    try:
        said = process.communicate(timeout=120)[1]
    finally:
        process.kill()
    assert process.returncode == 1, said
    assert "titanlite: Rank 0: load of step 0 has taken" in said
    assert f"checkpoint.timeout_seconds = {LIMIT}" in said
