"""Machines on one computer: network namespaces, each with its own host name, processes and memory.

A bridge connects them, in a namespace of its own, where the store of torchrun's rendezvous runs, as
on a host that does not train. Killing a machine ends all its processes at once and removes its
/dev/shm; no connection to it is closed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

STORE = """
import signal
from torch.distributed import TCPStore
store = TCPStore("10.77.0.1", 29400, is_master=True, wait_for_workers=False)
print("ready", flush=True)
signal.pause()
"""
MACHINE = """
hostname "$1" && mount --bind "$2" /etc/hosts && mount -t tmpfs -o size=256m tmpfs /dev/shm &&
ip link set lo up && echo ready
read address && shift 2 && exec "$@"
"""
NAMESPACES = ["unshare", "--net", "--uts", "--mount", "--mount-proc"]
NAMESPACES += ["--pid", "--fork", "--kill-child"]


def why_no_machines() -> str:
    """Why this computer cannot have such machines; empty if it can."""
    if not (shutil.which("unshare") and shutil.which("ip") and shutil.which("nsenter")):
        return "needs unshare, nsenter and ip"
    test = "mount -t tmpfs tmpfs /dev/shm && ip link add name left type veth peer name right"
    done = subprocess.run([*NAMESPACES, "sh", "-c", test], capture_output=True, text=True)
    return f"needs root: {done.stderr.strip()}" if done.returncode else ""


class Network:
    """The bridge, the store and the machines; a context that ends all of them.

    `name`: of machine N is `name.format(N)`; the host name is the part before the first dot.
    """

    def __init__(self, folder: Path, name: str = "machine{}"):
        self.folder, self.name, self.machines = folder, name, dict[int, subprocess.Popen]()

    def __enter__(self) -> Network:
        names = [(number, self.name.format(number)) for number in range(8)]
        lines = [f"10.77.0.{10 + n} {name} {name.split('.')[0]}\n" for n, name in names]
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{''.join(lines)}")
        # an address of its own: otherwise it has that of a machine, and changes with its loss
        script = "ip link set lo up && ip link set br0 up"
        script = f"ip link add br0 address 02:00:00:00:00:01 type bridge && {script}"
        script += ' && ip addr add 10.77.0.1/24 dev br0 && exec "$0" -c "$1"'
        self.store = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", script, sys.executable, STORE],
            stdout=subprocess.PIPE,
        )
        assert self.store.stdout is not None and self.store.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *raised: object) -> None:
        for number in list(self.machines):
            self.kill(number)
        self.store.kill()
        self.store.wait()

    def log(self, number: int) -> str:
        return (self.folder / f"machine{number}.log").read_text(errors="replace")

    def start(self, number: int, nodes: str, *argv: str) -> None:
        """Start a machine whose torchrun runs `argv` on one rank, in a job of `nodes` machines."""
        launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", nodes]
        launcher += ["--nproc-per-node", "1", "--max-restarts", "1000"]
        launcher += ["--local-addr", f"10.77.0.{10 + number}"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.77.0.1:29400"]
        launcher += ["--rdzv-conf", "is_host=0,last_call_timeout=5,keep_alive_interval=3"]
        self.run(number, [*launcher, *argv], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"})

    def run(self, number: int, command: list[str], environment: dict[str, str]) -> None:
        """Start a machine whose first process is `command`."""
        environment = (
            os.environ | {"GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"} | environment
        )
        host, hosts = self.name.format(number).partition(".")[0], str(self.folder / "hosts")
        with (self.folder / f"machine{number}.log").open("ab") as log:
            machine = subprocess.Popen(
                [*NAMESPACES, "sh", "-c", MACHINE, "sh", host, hosts, *command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=environment,
            )
        self.machines[number] = machine
        self._connect(number, machine)

    def terminate(self, number: int) -> None:
        """Send SIGTERM to the first process of a machine, as Kubernetes does to a container."""
        pid = self.machines[number].pid
        os.kill(int(Path(f"/proc/{pid}/task/{pid}/children").read_text()), signal.SIGTERM)

    def kill(self, number: int) -> None:
        machine = self.machines.pop(number)
        machine.kill()  # its child is the first process of the machine, and dies with it
        machine.wait()

    def _connect(self, number: int, machine: subprocess.Popen) -> None:
        """Connect a machine to the bridge; it has its namespaces when the shell has printed."""
        log, began = self.folder / f"machine{number}.log", time.monotonic()
        while not log.read_bytes().endswith(b"ready\n") and time.monotonic() < began + 60:
            time.sleep(0.02)
        cable, pid = f"machine{number}", str(machine.pid)
        bridge, inside = str(self.store.pid), ["nsenter", "-t", pid, "-n", "ip"]
        here = ["nsenter", "-t", bridge, "-n", "ip"]
        _run(*here, "link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", pid)
        _run(*here, "link", "set", cable, "master", "br0", "up")
        _run(*inside, "addr", "add", f"10.77.0.{10 + number}/24", "dev", "eth0")
        _run(*inside, "link", "set", "eth0", "up")
        assert machine.stdin is not None
        machine.stdin.write(b"go\n")
        machine.stdin.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
