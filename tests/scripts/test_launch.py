"""scripts/launch.sh without a scheduler: what it gives to torchrun, and its exit code."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from conftest import HANG_SECONDS, ROOT

LAUNCH = ROOT / "scripts" / "launch.sh"
HERE = "--rdzv-conf store_type=file --rdzv-endpoint FILE --local-addr 127.0.0.1"
SLURM = {"SLURM_STEP_NODELIST": "gpu[07-09,12],other", "SLURM_STEP_NUM_NODES": "5"}
SLURM |= {"SLURM_NODEID": "4", "SLURM_JOB_ID": "123456", "SLURM_GPUS_ON_NODE": "8"}
KUBEFLOW = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "auto", "PET_NODE_RANK": "0"}
KUBEFLOW |= {"PET_MASTER_ADDR": "job-node-0-0.job", "PET_MASTER_PORT": "29500"}
JOBSET = {"NNODES": "2", "MASTER_ADDR": "job-node-0-0.job", "JOB_COMPLETION_INDEX": "1"}
SKYPILOT = {"SKYPILOT_NODE_IPS": "10.0.0.4\n10.0.0.9", "SKYPILOT_NUM_NODES": "2"}
SKYPILOT |= {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NUM_GPUS_PER_NODE": "4"}
DSTACK = {"DSTACK_NODES_IPS": "10.0.0.4\n10.0.0.9", "DSTACK_NODES_NUM": "2"}
DSTACK |= {"DSTACK_NODE_RANK": "0", "DSTACK_GPUS_PER_NODE": "0"}
HOSTS = {"NNODES": "2:4", "MASTER_ADDR": "login", "MASTER_PORT": "1234", "NPROC_PER_NODE": "8"}
RUN = "--rdzv-id titanlite --rdzv-endpoint"
CASES = {  # environment, arguments, machines, processes of each, the other flags of torchrun
    "processes": (SLURM | KUBEFLOW, "3", "1", "3", HERE),
    "nothing": ({}, "", "1", "1", HERE),
    "one node": (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, "", "1", "8", HERE),
    "SLURM": (SLURM, "", "5", "8", "--rdzv-id 123456.0 --rdzv-endpoint gpu07:23456 [1]"),
    "Kubeflow": (KUBEFLOW, "", "2", "auto", f"{RUN} job-node-0-0.job:29500 [0]"),
    "JobSet": (JOBSET, "", "2", "1", f"{RUN} job-node-0-0.job:29400 [1]"),
    "SkyPilot": (SKYPILOT, "", "2", "4", f"{RUN} 10.0.0.4:29400 [1] --local-addr 10.0.0.9"),
    "dstack": (DSTACK, "", "2", "1", f"{RUN} 10.0.0.4:29400 [0] --local-addr 10.0.0.4"),
    "hosts": (HOSTS, "--role a", "2:4", "8", f"{RUN} login:1234 --role a"),
}


def dry_run(environment: dict[str, str], arguments: str) -> str:
    """The flags that launch.sh would give to torchrun."""
    done = subprocess.run(
        ["bash", str(LAUNCH), "--dry-run", *arguments.split(), "train.py", "--a", "b c"],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    head, tail = "launch.sh: torchrun ", " train.py --a b\\ c\n"
    assert done.stderr.startswith(head) and done.stderr.endswith(tail), done.stderr
    return done.stderr.removeprefix(head).removesuffix(tail)


@pytest.mark.parametrize("case", CASES)
def test_each_scheduler_gives_torchrun_its_machines(case, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")  # also on a machine with GPUs
    (tmp_path / "nvidia-smi").chmod(0o755)
    environment, arguments, machines, processes, others = CASES[case]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    words = dry_run(path | environment, arguments).split()
    if "store_type=file" in words:
        words[words.index("--rdzv-endpoint") + 1] = "FILE"
    others = others.replace("[0]", "--rdzv-conf is_host=1").replace("[1]", "--rdzv-conf is_host=0")
    expected = f"--nnodes {machines} --nproc-per-node {processes} --rdzv-backend c10d {others}"
    assert " ".join(words) == expected


def test_processes_are_bound_to_the_cores_near_their_gpus_where_torchrun_can(tmp_path):
    for name, output in (("nvidia-smi", "GPU 0\nGPU 1\n"), ("numactl", ""), ("nproc", "4\n")):
        (tmp_path / name).write_text(f"#!/bin/sh\nprintf '{output}'\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert dry_run(path, "").endswith(" --numa-binding node")
    assert "--nproc-per-node gpu " in dry_run(path, "")
    for unbound in ({"NUMA_BINDING": ""}, {"NPROC_PER_NODE": "3"}):
        assert "numa" not in dry_run(path | unbound, "")
    assert "numa" not in dry_run(path, "2")
    (tmp_path / "nproc").write_text('#!/bin/sh\necho "4$1"\n')  # --all: more than may be used
    assert "numa" not in dry_run(path, "")


RANK = """
import os, signal, sys, time
code = int(sys.argv[1])
if code < 0:
    os.kill(os.getpid(), -code)
print("ready", flush=True)
time.sleep(600 if code == 75 else 0)
sys.exit(code)
"""


@pytest.mark.parametrize("ends_with, code", [(0, 0), (3, 3), (-9, 137), (75, 75)])
def test_the_exit_code_is_that_of_the_rank(ends_with, code, tmp_path, python):
    (tmp_path / "rank.py").write_text(RANK)
    process = subprocess.Popen(
        ["bash", str(LAUNCH), "1", str(tmp_path / "rank.py"), str(ends_with)],
        env={**os.environ, "PATH": f"{Path(python).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if ends_with == 75:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
    process.communicate(timeout=HANG_SECONDS)
    assert process.returncode == code


def test_shellcheck_finds_nothing():
    if not shutil.which("shellcheck"):
        pytest.skip("shellcheck is not installed")
    scripts = [LAUNCH, ROOT / "scripts" / "slurm.sh"]
    done = subprocess.run(["shellcheck", "-S", "warning", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
