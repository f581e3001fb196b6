"""Inject faults into a run and check that it ends as a run without faults does.

python scripts/fault_drill.py --faults 20 --ranks 2 --out drill -- --job.config_file run.toml

Trains once without faults in OUT/undisturbed, and once in OUT/disturbed with random faults; after
each fault the same torchrun command is started again. Both runs must end at the same step with
bit-equal weights, optimizer state, data position and losses. With several --layout, each start uses
the next layout, given as overrides of the job; then only the data position must be equal, and the
losses must agree to 1e-5. Exit code 0 if the runs agree, 2 if not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, CheckpointError, UserError, format_error
from titanlite.files import write_file_atomically
from titanlite.metrics import METRICS_FILE
from titanlite.runtime.lease import LEASE_FILE
from titanlite.storage import StorageFolder

TRAIN = Path(__file__).parents[1] / "train.py"
TOLERANCE = 1e-5  # relative, between losses of different layouts
MAX_SHOWN_DIFFERENCES = 20
MAX_RUN_SECONDS = 24 * 3600


@dataclass
class Drill:
    """A run that is started repeatedly by the same command."""

    out: Path
    argv: list[str]
    ranks: int
    layouts: list[list[str]]
    random: random.Random
    max_delay: float  # seconds of training before a fault
    starts: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoint"

    def start(self, file_limit: int | None = None, **environment: str) -> subprocess.Popen:
        """Start torchrun; writing more than `file_limit` bytes to a file fails in it.

        `environment` is added to the environment of this process.
        """
        layout = self.layouts[self.starts % len(self.layouts)]
        self.starts += 1
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={self.ranks}", str(TRAIN), *self.argv]
        command += [f"--job.dump_folder={self.out}", "--job.max_crashes=0", *layout]

        def limit_file_size() -> None:
            if file_limit is not None:
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, hard))

        self.log = self.out.with_name(f"{self.out.name}.{self.starts}.log").open("wb")
        # In its own session, as under a scheduler: Ctrl-C here ends the drill, not this run.
        return subprocess.Popen(
            command,
            stdout=self.log,
            stderr=self.log,
            preexec_fn=limit_file_size,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def wait(self, run: subprocess.Popen, seconds: float = 600) -> int:
        """Wait for torchrun and its ranks to end; returns the exit code of torchrun."""
        pids = find_rank_pids(run.pid).values()
        code = run.wait(seconds)
        for _ in range(100):
            running = [pid for pid in pids if is_running(pid)]
            if not running:
                return code
            time.sleep(0.5)
        raise self.failure(f"ranks with pids {running} still run after their launcher ended")

    def failure(self, problem: str, fix: str = "") -> CheckpointError:
        """An error that names the log of the last start."""
        return CheckpointError(f"{problem}; see {self.log.name}.", fix=fix)

    def ended_early(self) -> CheckpointError:
        return self.failure(
            "the run ended before a fault could be injected",
            fix="If it was complete, use more steps, fewer --faults, or a smaller --longest.",
        )

    def complete_checkpoints(self) -> list[Path]:
        """The checkpoints with a manifest, oldest first."""
        paths = [path for path in self.checkpoints.glob("step-*") if "." not in path.name]
        complete = [path for path in paths if (path / "manifest.json").exists()]
        return sorted(complete, key=lambda path: int(path.name.removeprefix("step-")))

    def unfinished(self) -> set[tuple[str, int]]:
        """Checkpoints that are being written, or whose writer ended: (name, time in ns)."""
        unfinished = set()
        for marker in self.checkpoints.glob("step-*/unfinished"):
            with suppress(OSError):  # finished in the meantime
                unfinished.add((marker.parent.name, marker.stat().st_mtime_ns))
        return unfinished

    def log_text(self) -> str:
        """The output of the last start."""
        return Path(self.log.name).read_text(errors="replace")

    def has_trained(self) -> bool:
        """Whether the last start has logged a step."""
        return "  loss " in self.log_text()


# --- faults: all but `damage` start the run, inject a fault, and wait until the run has ended -----


def kill_a_rank(drill: Drill) -> str:
    run = _start_until_training(drill)
    rank = _signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    return f"rank {rank} killed"


def kill_a_writer(drill: Drill) -> str:
    """Kill while a checkpoint is being written."""
    run = _start_until_saving(drill)
    rank = _signal_a_rank(drill, run, signal.SIGKILL)
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
    other = drill.out.with_name("other job")
    command = [sys.executable, str(TRAIN), *drill.argv, f"--job.dump_folder={other}"]
    second = subprocess.run(
        [*command, f"--checkpoint.folder={drill.checkpoints.absolute()}"],
        capture_output=True,
        text=True,
    )
    if second.returncode != EXIT_USER_ERROR or "another job is writing there" not in second.stderr:
        raise CheckpointError(
            f"a second job on {drill.checkpoints} was not refused: {second.stderr}"
        )
    _signal_a_rank(drill, run, signal.SIGKILL)
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
    rank = _signal_a_rank(drill, run, signal.SIGSTOP)
    drill.wait(run)
    if run.returncode and f"Rank {rank} (" not in drill.log_text():
        raise drill.failure(f"rank {rank} was frozen and not reported")
    return f"rank {rank} frozen; the others reported it"


def ask_to_stop(drill: Drill) -> str:
    run = _start_until_training(drill)
    number = drill.random.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
    rank = _signal_a_rank(drill, run, number)
    drill.wait(run)
    return f"{number.name} to rank {rank}"


def fill_the_disk(drill: Drill) -> str:
    """A quota too small for a shard: training must continue, and the next start must succeed."""
    sizes = [path.stat().st_size for path in drill.checkpoints.glob("step-*/*.distcp")]
    metrics = drill.out / METRICS_FILE
    if not sizes or metrics.stat().st_size > max(sizes) // 4:
        return kill_a_rank(drill)
    before = drill.complete_checkpoints()
    run = _start_until_training(drill, file_limit=max(sizes) // 2)
    _signal_a_rank(drill, run, signal.SIGTERM)
    drill.wait(run)
    if drill.complete_checkpoints() != before:
        raise drill.failure("a full disk changed the set of complete checkpoints")
    return "disk full"


def resume_on_a_full_disk(drill: Drill) -> str:
    """A start that cannot write its files must be refused, and change no file of the run."""
    if not drill.complete_checkpoints():
        return kill_a_rank(drill)
    names = ("config.toml", METRICS_FILE)
    before = [(drill.out / name).read_bytes() for name in names]
    run = drill.start(file_limit=64)
    drill.wait(run)
    if not run.returncode or [(drill.out / name).read_bytes() for name in names] != before:
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
FAULTS: dict[str, Callable[[Drill], str]] = {
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


def _start_until_training(
    drill: Drill, file_limit: int | None = None, **environment: str
) -> subprocess.Popen:
    """Start the run, and return at a random time after its first step."""
    run, deadline = drill.start(file_limit, **environment), time.monotonic() + 600
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


def _signal_a_rank(drill: Drill, run: subprocess.Popen, number: int) -> int:
    pids = find_rank_pids(run.pid)
    rank = drill.random.randrange(drill.ranks)
    try:
        os.kill(pids[rank], number)
    except (KeyError, ProcessLookupError):
        raise drill.ended_early() from None
    return rank


# --- processes -----------------------------------------------------------------------------------


def find_rank_pids(launcher: int) -> dict[int, int]:
    """The pid of each rank that a torchrun has started."""
    pids = {}
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != launcher:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            pids[int(environment[b"RANK"])] = int(folder.name)
        except (OSError, KeyError, ValueError, IndexError):
            continue
    return pids


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- comparison ----------------------------------------------------------------------------------


def read_losses(out: Path) -> dict[int, float]:
    """The loss of each step in a metrics.jsonl."""
    lines = [json.loads(line) for line in (out / METRICS_FILE).read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "event" not in line}


def find_differences(undisturbed: Drill, disturbed: Drill, bit_equal: bool) -> list[str]:
    """What differs between the last checkpoints and the losses of two runs."""
    last = undisturbed.complete_checkpoints()[-1].name
    if not (disturbed.checkpoints / last).exists():
        return [f"the disturbed run has no {last}"]
    expected, actual = (
        read_checkpoint_manifest(StorageFolder(drill.checkpoints / last))
        for drill in (undisturbed, disturbed)
    )
    differences = []
    if bit_equal:
        tensors, progress = actual.tensors, actual.progress
        differences += [
            name for name, tensor in expected.tensors.items() if tensors.get(name) != tensor
        ]
        differences += [key for key, value in expected.progress.items() if progress[key] != value]
    elif actual.progress["position"] != expected.progress["position"]:
        differences.append("position")
    losses = read_losses(disturbed.out)
    for step, loss in read_losses(undisturbed.out).items():
        other = losses.get(step)
        if other is None or abs(other - loss) > (0 if bit_equal else TOLERANCE * abs(loss)):
            differences.append(f"loss of step {step}: {other}, expected {loss}")
    return differences


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="number of faults")
    parser.add_argument("--seed", type=int, default=0, help="seed of the kinds, times and ranks")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=FAULTS,
        default=list(FAULTS),
        metavar="KIND",
        help=f"kinds of faults to choose from; default: all ({', '.join(FAULTS)})",
    )
    parser.add_argument(
        "--longest", type=float, default=3.0, help="maximum seconds of training before a fault"
    )
    parser.add_argument(
        "--layout",
        action="append",
        default=[],
        help='overrides for one start, as "--parallelism.tensor_parallel_degree 2"; repeatable',
    )
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument(
        "job", nargs="+", help="after --: arguments of train.py; the job must be deterministic"
    )
    return parser.parse_args()


def run_drill(args: argparse.Namespace) -> int:
    """Train without and with faults, and compare; raises CheckpointError if a run fails."""
    layouts = [shlex.split(text) for text in args.layout] or [[]]
    argv = [*args.job, "--checkpoint.enable=true"]

    def build_drill(name: str, layouts: list[list[str]]) -> Drill:
        generator = random.Random(args.seed)
        return Drill(args.out / name, argv, args.ranks, layouts, generator, args.longest)

    undisturbed, disturbed = (
        build_drill("undisturbed", layouts[:1]),
        build_drill("disturbed", layouts),
    )
    if undisturbed.wait(undisturbed.start(), MAX_RUN_SECONDS):
        raise undisturbed.failure("the run without faults failed")
    print("run without faults: done", flush=True)
    for number in range(1, args.faults + 1):
        kind = disturbed.random.choice(args.kinds)
        report = FAULTS[kind](disturbed)
        names = [path.name for path in disturbed.complete_checkpoints()[-2:]]
        print(f"{number:3}. {report}; newest checkpoints: {', '.join(names) or 'none'}", flush=True)
    if disturbed.wait(disturbed.start(), MAX_RUN_SECONDS):
        raise disturbed.failure("the last start failed")
    differences = find_differences(undisturbed, disturbed, bit_equal=len(layouts) == 1)
    for difference in differences[:MAX_SHOWN_DIFFERENCES]:
        print(f"differs: {difference}")
    equal = "bit-equal" if len(layouts) == 1 else f"equal to {TOLERANCE:g}"
    verdict = "DIFFERENT" if differences else equal
    print(f"{disturbed.starts} starts, {args.faults} faults: {verdict}")
    return EXIT_USER_ERROR if differences else EXIT_DONE


def main() -> int:
    args = parse_arguments()
    if args.out.exists():
        print(f"titanlite: --out {args.out}: exists; name a new folder.", file=sys.stderr)
        return EXIT_USER_ERROR
    args.out.mkdir(parents=True)
    try:
        return run_drill(args)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the script without a traceback
    sys.exit(main())
