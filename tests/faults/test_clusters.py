"""Runs under schedulers: the manifests of deploy/ as pods, and scripts/slurm.sh under SLURM.

No cluster is there. Pods are machines of tests/faults/machines.py, with the commands, arguments and
variables of a manifest, what the operator adds, and its restart policy. SLURM is real, with two
nodes on this computer that share its host name.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from conftest import HANG_SECONDS, ROOT
from tests.faults.launch import events_of, lines_of, steps_of
from tests.faults.machines import NAMESPACES, Network, why_no_machines
from tests.faults.test_machines import check_curve
from titanlite.config_reference import list_sections
from titanlite.job.config import JobConfig

MANIFESTS = sorted((ROOT / "deploy").glob("*.yaml"))
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
TRAIN = [
    "--checkpoint.interval",
    "10",
    "--lr_scheduler.total_steps",
    "100000",
    "--checkpoint.keep_latest_k",
    "2",
]
TRAIN += ["--validation.enable", "false", "--comm.train_timeout_seconds", "15"]


def documents_of(manifest: str) -> list[dict]:
    return list(yaml.safe_load_all((ROOT / "deploy" / manifest).read_text()))


def texts_in(value: object) -> list[str]:
    """Every text of a manifest."""
    parts = value.values() if isinstance(value, dict) else value
    if isinstance(parts, str | int):
        return [str(parts)]
    return [text for part in parts for text in texts_in(part)]


def entry_point() -> list[str]:
    """What the image runs before the arguments of a container."""
    lines = (ROOT / "deploy" / "Dockerfile").read_text().splitlines()
    line = next(line for line in lines if line.startswith("ENTRYPOINT "))
    return json.loads(line.removeprefix("ENTRYPOINT "))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda path: path.name)
def test_a_manifest_is_small_and_names_real_files_and_keys(manifest):
    assert len(manifest.read_text().splitlines()) < 60
    words = [word for text in texts_in(documents_of(manifest.name)) for word in text.split()]
    assert words.count("train.py") == 1 and (ROOT / entry_point()[-1]).exists()
    keys = {key.name for section in list_sections(JobConfig) for key in section.keys}
    assert {word[2:] for word in words if word.startswith("--")} <= keys
    scripts = [word.rstrip("'") for word in words if word.startswith("scripts/")]
    assert all((ROOT / script).exists() for script in scripts), scripts


class Pods:
    """The operator of a manifest: it starts the pods, and all again as its policy says."""

    def __init__(self, network: Network, manifest: str, data: Path, *argv: str):
        documents = documents_of(manifest)
        trainer = documents[-1]["spec"].get("trainer", {})  # of a TrainJob
        job_set = documents[0]["spec"] if not trainer else documents[0]["spec"]["template"]["spec"]
        job = job_set["replicatedJobs"][0]["template"]["spec"]
        [container] = job["template"]["spec"]["containers"]
        self.network, self.starts = network, 0
        self.count = trainer.get("numNodes") or job["parallelism"]
        entry = entry_point()[0 if shutil.which("tini") else 2 :]
        arguments = [*(trainer.get("args") or container["args"]), *argv]
        self.command = [word.replace("/data", str(data)) for word in [*entry, *arguments]]
        name = documents[-1]["metadata"]["name"]
        first = f"{name}-node-0-0.{name}"
        self.environment = {
            variable["name"]: variable.get("value", first) for variable in container["env"]
        }
        if trainer:  # as Kubeflow Trainer does for one process in each pod
            self.environment |= {"PET_NNODES": str(self.count), "PET_NPROC_PER_NODE": "1"}
            self.environment |= {"PET_MASTER_ADDR": first, "PET_MASTER_PORT": "29500"}
        [rule] = job["podFailurePolicy"]["rules"]
        [action] = job_set["failurePolicy"]["rules"]
        assert rule["action"] == "FailJob" and action["action"] == "FailJobSet"
        self.final = rule["onExitCodes"]["values"]
        self.most = job_set["failurePolicy"]["maxRestarts"]

    def run(self, *faults: Callable[[], None]) -> int:
        """Run to the end, with one of `faults` in each start; returns the last exit code."""
        while True:
            for number in range(self.count):
                index = {"JOB_COMPLETION_INDEX": str(number), "PET_NODE_RANK": str(number)}
                environment = {"PATH": PATH} | self.environment | index
                self.network.run(number, self.command, environment)
            self.starts += 1
            code = self.wait(faults[self.starts - 1] if self.starts <= len(faults) else None)
            if code == 0 or code in self.final or self.starts > self.most:
                return code

    def wait(self, fault: Callable[[], None] | None) -> int:
        """Wait until a pod fails or all are done, and delete the others; returns the exit code."""
        if fault:
            fault()
        machines, deadline = self.network.machines, time.monotonic() + HANG_SECONDS
        code = 137 if len(machines) < self.count else 0  # one was killed
        while not code and any(machine.poll() is None for machine in machines.values()):
            assert time.monotonic() < deadline, [self.network.log(number) for number in machines]
            code = next((m.poll() for m in machines.values() if m.poll()), 0)
            time.sleep(0.05)
        code = code or next((m.poll() for m in machines.values() if m.poll()), 0)
        for number, machine in list(machines.items()):
            if machine.poll() is None:
                self.network.terminate(number)
            machine.wait(HANG_SECONDS)
            self.network.kill(number)
        return code


def wait_for_step(out: Path, step: int) -> None:
    deadline = time.monotonic() + HANG_SECONDS
    while max(steps_of(out), default=0) < step:
        assert time.monotonic() < deadline, f"no step {step} in {out}"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ["jobset.yaml", "trainjob.yaml"])
def test_pods_that_end_do_not_show_in_the_losses(manifest, run_toml, tmp_path):
    if reason := why_no_machines():
        pytest.skip(reason)
    out, options = tmp_path / "out", [*TRAIN, "--training.steps", "100"]
    with Network(tmp_path, "titanlite-node-0-{}.titanlite") as network:
        pods = Pods(network, manifest, tmp_path, *options)

        def kill_a_pod() -> None:
            wait_for_step(out, 12)
            network.kill(1)

        def stop_a_pod() -> None:
            wait_for_step(out, 30)
            network.terminate(0)

        assert pods.run(kill_a_pod, stop_a_pod) == 0, network.log(0)
        assert pods.starts == 3
        wrong = Pods(network, manifest, tmp_path, "--training.step", "400")
        assert wrong.run() == 2 and wrong.starts == 1
    assert [event["reason"] for event in events_of(out, "stopped")] == ["SIGTERM"]
    assert len(events_of(out, "resumed")) == 2
    check_curve(run_toml, tmp_path, options)


SLURM_CONF = """
ClusterName=test
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthInfo=socket={folder}/munge/socket,cred_expire=20
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
SlurmdTimeout=10
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
NodeName=node[0-1] NodeHostname=head NodeAddr=head Port=[21001-21002] CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""
HEAD = """
hostname head && mount --bind hosts /etc/hosts && ip link set lo up &&
ip link add br0 type bridge && ip addr add 10.78.0.1/24 dev br0 && ip link set br0 up &&
mkdir -m 700 munge &&
head -c 64 /dev/urandom > munge/key && chmod 600 munge/key &&
munged --force --key-file munge/key --socket "$PWD/munge/socket" --pid-file "$PWD/munge/pid" \
  --log-file "$PWD/munge/log" --seed-file "$PWD/munge/seed" && exec slurmctld -D
"""


class Slurm:
    """slurmctld and two nodes, in a network of their own; a context that ends all of them."""

    def __init__(self, folder: Path):
        self.folder, self.processes = folder / "slurm", list[subprocess.Popen]()
        self.folder.mkdir()
        (self.folder / "hosts").write_text("127.0.0.1 localhost\n10.78.0.1 head node0 node1\n")
        (self.folder / "slurm.conf").write_text(SLURM_CONF.format(folder=self.folder))
        self.environment = os.environ | {"SLURM_CONF": str(self.folder / "slurm.conf")}
        self.environment |= {"PATH": PATH, "GLOO_SOCKET_IFNAME": "br0", "MAX_RESTARTS": "1"}

    def __enter__(self) -> Slurm:
        self._start([*NAMESPACES, "sh", "-ec", HEAD])
        deadline = time.monotonic() + HANG_SECONDS
        while "UP" not in self("scontrol", "ping"):
            assert time.monotonic() < deadline, (self.folder / "log").read_text()
            assert self.processes[0].poll() is None, (self.folder / "log").read_text()
            time.sleep(0.1)
        self.nodes = [self.start_node(number) for number in range(2)]
        return self

    def __exit__(self, *raised: object) -> None:
        for process in reversed(self.processes):
            process.kill()
            process.wait()

    def _start(self, command: list[str]) -> subprocess.Popen:
        with (self.folder / "log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    command, cwd=self.folder, env=self.environment, stdout=log, stderr=log
                )
            )
        return self.processes[-1]

    def _inside(self, *command: str) -> list[str]:
        pid = self.processes[0].pid
        child = Path(f"/proc/{pid}/task/{pid}/children").read_text().strip() or str(pid)
        namespaces = ["nsenter", "-t", child, "--net", "--uts", "--mount"]
        return [*namespaces, "env", "-C", str(ROOT), *command]  # nsenter changes the folder

    def __call__(self, *command: str) -> str:
        """Run a command of SLURM; returns what it prints."""
        done = subprocess.run(
            self._inside(*command), env=self.environment, capture_output=True, text=True
        )
        return done.stdout + done.stderr

    def start_node(self, number: int) -> subprocess.Popen:
        alone = ["unshare", "--pid", "--mount-proc", "--fork", "--kill-child"]
        return self._start(self._inside(*alone, "slurmd", "-D", "-N", f"node{number}"))

    def submit(self, *options: str) -> str:
        """Submit a job of scripts/slurm.sh; returns its number."""
        common = ["--parsable", f"--output={self.folder}/job-%j.log"]
        job = self("sbatch", *common, *options).strip()
        assert job.isdecimal(), job
        return job

    def wait_for(self, job: str, *words: str) -> None:
        """Wait until SLURM says each of `words` of a job, such as `Restarts=1`."""
        deadline = time.monotonic() + HANG_SECONDS
        while not set(words) <= set((said := self("scontrol", "show", "job", job)).split()):
            logs = [log.read_text() for log in self.folder.glob("*log")]
            assert time.monotonic() < deadline, "\n".join([said, *logs])
            time.sleep(0.2)


def why_no_slurm() -> str:
    missing = [name for name in ("slurmctld", "slurmd", "munged") if not shutil.which(name)]
    return f"needs {', '.join(missing)}" if missing else why_no_machines()


@pytest.mark.slow
def test_a_slurm_job_goes_on_after_its_time_limit_a_lost_node_and_sigterm(run_toml, tmp_path):
    if reason := why_no_slurm():
        pytest.skip(reason)
    out, argv = tmp_path / "out", ["scripts/slurm.sh", "--job.config_file", str(run_toml), *TRAIN]
    with Slurm(tmp_path) as slurm:
        limit, began = ["--nodes=2", "--time=60", "--signal=B:USR1@115"], time.monotonic()
        job = slurm.submit(*limit, *argv, "--training.steps", "100000")
        wait_for_step(out, 12)
        minutes = 2 + int((time.monotonic() - began) / 60)
        slurm("scontrol", "update", f"jobid={job}", f"timelimit={minutes}")
        slurm.wait_for(job, "Restarts=1", "JobState=PENDING")
        slurm("scontrol", "update", f"jobid={job}", "timelimit=60")
        stopped = max(steps_of(out))
        wait_for_step(out, stopped + 5)
        slurm.nodes[1].kill()
        slurm.wait_for(job, "Restarts=2", "JobState=PENDING")
        lost = max(steps_of(out))
        slurm.start_node(1)
        wait_for_step(out, lost + 5)
        slurm("scancel", "--signal=TERM", job)  # to the steps, as pre-emption does
        slurm.wait_for(job, "Restarts=3", "JobState=PENDING")
        slurm("scancel", job)
        slurm.wait_for(job, "JobState=CANCELLED", "Restarts=3")
    reasons = [event["reason"] for event in events_of(out, "stopped")]
    assert reasons[0] == "SIGUSR1" and "SIGTERM" in reasons[1:], reasons
    resumed = [event["step"] for event in events_of(out, "resumed")]
    assert resumed[0] == stopped and len(resumed) == 2
    check_curve(run_toml, tmp_path, TRAIN)


@pytest.mark.slow
def test_each_job_of_a_slurm_array_has_its_folder_and_a_user_error_is_final(run_toml, tmp_path):
    if reason := why_no_slurm():
        pytest.skip(reason)
    argv = ["--nodes=1", "scripts/slurm.sh", "--job.config_file", str(run_toml), *TRAIN]
    with Slurm(tmp_path) as slurm:
        array = slurm.submit("--array=0-1", *argv, "--job.dump_folder", f"{tmp_path}/out-%a")
        wrong = slurm.submit(*argv, "--training.step", "400")
        for number in range(2):
            slurm.wait_for(f"{array}_{number}", "JobState=COMPLETED")
        slurm.wait_for(wrong, "JobState=FAILED", "ExitCode=2:0", "Restarts=0")
    lines = [[d for d in lines_of(tmp_path / f"out-{n}") if "event" not in d] for n in range(2)]
    assert [len(of_job) for of_job in lines] == [6, 6]
    assert [d["loss"] for d in lines[0]] == [d["loss"] for d in lines[1]]
