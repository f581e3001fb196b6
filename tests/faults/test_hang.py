"""A disk that no longer answers: the run warns, reports rank and place, ends, and can resume."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

from conftest import HANG_SECONDS, ROOT
from tests.faults.launch import LaunchedRun, open_store, steps_of
from tests.preloaded_python import preloaded_python
from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.storage import StorageFolder

LIMIT_SECONDS = 3  # a save of this model takes milliseconds

# Hangs as with a dead NFS server: in the kernel, with the GIL released.
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
    limit = ("--checkpoint.timeout_seconds", str(LIMIT_SECONDS), "--checkpoint.interval", "2")
    quick = ("--validation.enable", "false", "--job.dump_folder", str(out))
    return ["--job.config_file", str(toml), *quick, *limit, *argv]


@pytest.fixture(scope="module")
def python(shim, tmp_path_factory) -> Iterator[str]:
    """A Python with the shim, which hangs only where the environment of a program says so."""
    folder = tmp_path_factory.mktemp("python")
    with preloaded_python(folder, ROOT, {"LD_PRELOAD": str(shim)}) as programs:
        yield str(programs / "python")


def start(python: str, argv: list[str], **environment) -> subprocess.Popen:
    environment |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": ROOT}
    return subprocess.Popen(
        [python, str(ROOT / "train.py"), *argv],
        env={**os.environ, **{name: str(value) for name, value in environment.items()}},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_an_fsync_that_hangs_on_one_rank_is_reported_ends_all_and_the_run_resumes(
    python, run_toml, tmp_path
):
    out = tmp_path / "out"
    argv = argv_of(run_toml, out, "--checkpoint.async_mode", "async")
    store = open_store()

    common = {
        "WORLD_SIZE": 2,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": store.port,
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    hanging = {"HANG_IN_FSYNC": "/step-4/"}
    ranks = [
        start(python, argv, RANK=0, LOCAL_RANK=0, **common),
        start(python, argv, RANK=1, LOCAL_RANK=1, **common, **hanging),
    ]
    try:
        outputs = [process.communicate(timeout=HANG_SECONDS)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [1, 1], outputs
    report = "Rank 1: the save of step 4 has taken"
    assert f"warning: {report}" in outputs[1] and f"titanlite: {report}" in outputs[1], outputs
    assert "(storage.py, line " in outputs[1]
    assert f"checkpoint.timeout_seconds = {LIMIT_SECONDS}" in outputs[1]
    assert "the save of step 4" not in outputs[0], outputs[0]  # it waited for rank 1
    assert "os.fsync" in (out / "stacks" / "rank_1.txt").read_text()

    read_checkpoint_manifest(StorageFolder(out / "checkpoint" / "step-2"))
    long = ("--checkpoint.timeout_seconds", str(HANG_SECONDS))  # a busy machine is no hang
    with LaunchedRun(2, out, *argv, *long, store=store) as resumed:
        assert resumed.wait() == [0, 0], resumed.output
    assert steps_of(out)[-1] == 6


def test_a_read_that_hangs_in_a_load_ends_a_single_rank_run(python, run_toml, tmp_path):
    out = tmp_path / "out"
    with LaunchedRun(1, out, *argv_of(run_toml, out, "--training.steps", "2")) as run:
        assert run.wait() == [0], run.output
    argv = argv_of(run_toml, out, "--training.steps", "4")
    process = start(python, argv, HANG_IN_READ="/step-2/__0_0")
    try:
        output = process.communicate(timeout=HANG_SECONDS)[1]
    finally:
        process.kill()
    assert process.returncode == 1, output
    assert "titanlite: Rank 0: load of step 0 has taken" in output
    assert f"checkpoint.timeout_seconds = {LIMIT_SECONDS}" in output
