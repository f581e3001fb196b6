"""Break a run on purpose and see that it ends as if nothing had happened.

python scripts/fault_drill.py --faults 20 --seed 1 --ranks 2 --out drill -- --job.config_file run.toml

Trains once undisturbed, in OUT/undisturbed, and once in OUT/disturbed, where faults drawn by the
seed befall it: each time it is started again by the same torchrun command. Both must end at the
same step with the same bits: every weight, every moment, the position, the learning curve. With
--layout (several times) each start uses the next of them, as overrides of the job, and the curves
must agree to 1e-5 instead. Exit code 0 if so, 2 if not.
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
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from titanlite.checkpoint import read_checkpoint_manifest
from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, CheckpointError, UserError, format_error
from titanlite.files import write_file_atomically
from titanlite.metrics import METRICS_FILE
from titanlite.runtime.lease import LEASE_FILE
from titanlite.storage import StorageFolder

TRAIN = Path(__file__).parents[1] / "train.py"
TOLERANCE = 1e-5  # between curves of different layouts, relative


@dataclass
class Drill:
    """One run, and what befalls it."""

    out: Path
    argv: list[str]
    ranks: int
    layouts: list[list[str]]
    chance: random.Random
    longest: float  # seconds until a fault strikes
    starts: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoint"

    def start(self, file_limit: int | None = None, **environment: str) -> subprocess.Popen:
        """The command, always the same one; files of at most `file_limit` bytes can be written.

        `environment` is added to that of this process.
        """
        layout = self.layouts[self.starts % len(self.layouts)]
        self.starts += 1
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={self.ranks}", str(TRAIN), *self.argv]
        command += [f"--job.dump_folder={self.out}", "--job.max_crashes=0", *layout]

        def limit() -> None:
            if file_limit is not None:
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, hard))

        self.log = self.out.with_name(f"{self.out.name}.{self.starts}.log").open("wb")
        # In a session of its own, as under a scheduler: Ctrl-C here ends the drill, not this run.
        return subprocess.Popen(
            command,
            stdout=self.log,
            stderr=self.log,
            preexec_fn=limit,
            env={**os.environ, **environment},
            start_new_session=True,
        )

    def wait(self, run: subprocess.Popen, seconds: float = 600) -> int:
        """The exit code of torchrun; raises if it, or a rank, is still there afterwards."""
        ranks = ranks_of(run.pid)
        code = run.wait(seconds)
        for _ in range(100):
            left = [pid for pid in ranks.values() if alive(pid)]
            if not left:
                return code
            time.sleep(0.5)
        raise CheckpointError(f"ranks {left} outlived their launcher; see {self.log.name}.")

    def whole(self) -> list[Path]:
        """The checkpoints that are there, oldest first."""
        found = [
            path for path in self.checkpoints.glob("step-*") if (path / "manifest.json").exists()
        ]
        return sorted((p for p in found if "." not in p.name), key=lambda p: int(p.name[5:]))

    def unfinished(self) -> set[tuple[str, int]]:
        """Which steps are being written, or were when something ended it, and since when."""
        found = set()
        for marker in self.checkpoints.glob("step-*/unfinished"):
            with suppress(OSError):  # finished just now
                found.add((marker.parent.name, marker.stat().st_mtime_ns))
        return found

    def learns(self) -> bool:
        """Whether the run that was started last has told of a step."""
        return b"  loss " in Path(self.log.name).read_bytes()


# --- faults: each gets a run under way, and leaves it ended ----------------------------------------


def kill_a_rank(drill: Drill) -> str:
    run = _under_way(drill)
    rank = _signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    return f"rank {rank} killed"


def kill_a_writer(drill: Drill) -> str:
    """Kill while a checkpoint is being written."""
    run = _saving(drill)
    rank = _signal_a_rank(drill, run, signal.SIGKILL)
    drill.wait(run)
    left = [name for name, _ in drill.unfinished()]
    return f"rank {rank} killed while saving; unfinished: {', '.join(left) or 'none'}"


def interrupt_a_save(drill: Drill) -> str:
    """Ctrl-C at torchrun while a checkpoint is being written: it is finished, the run ends."""
    run = _saving(drill)
    _signal_the_launcher(drill, run, signal.SIGINT)
    drill.wait(run)
    if left := drill.unfinished():
        raise CheckpointError(f"Ctrl-C left {sorted(left)} unfinished; see {drill.log.name}.")
    return "Ctrl-C while saving; the save was finished"


def lose_the_lease(drill: Drill) -> str:
    """Another job takes the folder while a checkpoint is being written: nothing more is committed."""
    run = _saving(drill)
    lease, before = drill.out / LEASE_FILE, {path.name for path in drill.whole()}
    try:
        holder = json.loads(lease.read_bytes())
    except (OSError, ValueError):
        raise _ended_before(drill) from None
    number = holder["number"] + 1
    write_file_atomically(
        lease, json.dumps({**holder, "token": "another job", "number": number}).encode()
    )
    drill.wait(run)
    later = {path.name for path in drill.whole()} - before
    if any(
        read_checkpoint_manifest(StorageFolder(drill.checkpoints / name)).lease >= number
        for name in later
    ):
        raise CheckpointError(f"{later} was committed by a lost lease; see {drill.log.name}.")
    lease.unlink(missing_ok=True)  # the other job is done
    return "lease lost while saving; the run ended"


def share_the_checkpoint_folder(drill: Drill) -> str:
    """A second job with the same checkpoint.folder: it is refused, and the first goes on."""
    run = _under_way(drill)
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
    """The disk stops answering while a checkpoint is being written: the run ends by itself."""
    hanging, shim = drill.out.with_name("hang"), drill.out.with_name("hang.so")
    if not shim.exists():
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            return kill_a_rank(drill)
        flags = ["-shared", "-fPIC", "-o", str(shim), "-x", "c", "-", "-ldl"]
        subprocess.run([compiler, *flags], input=HANGING_FSYNC, text=True, check=True)
    drill.argv.append("--checkpoint.timeout_seconds=5")
    try:
        run = _under_way(drill, LD_PRELOAD=str(shim), HANG_WHILE=str(hanging), HANG_IN="/step-")
        hanging.touch()
        drill.wait(run)
    finally:
        hanging.unlink(missing_ok=True)
        drill.argv.pop()
    said = Path(drill.log.name).read_text(errors="replace")
    if run.returncode and "the save of step" not in said:
        raise CheckpointError(f"a save hung, and nobody said so; see {drill.log.name}.")
    return "an fsync hung; the run ended, and named it"


# Hangs as a dead file server does: in the kernel, with Python's lock released.
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
    run = _under_way(drill)
    ranks = ranks_of(run.pid)
    run.kill()
    run.wait()
    end = time.monotonic() + 60
    while any(alive(pid) for pid in ranks.values()):
        if time.monotonic() > end:
            raise CheckpointError(f"ranks {ranks} outlived torchrun by 60 s; see {drill.log.name}.")
        time.sleep(0.1)
    return "torchrun killed; no rank outlived it"


def freeze_a_rank(drill: Drill) -> str:
    run = _under_way(drill)
    rank = _signal_a_rank(drill, run, signal.SIGSTOP)
    drill.wait(run)
    said = Path(drill.log.name).read_text(errors="replace")
    if run.returncode and f"Rank {rank} (" not in said:
        raise CheckpointError(f"rank {rank} was frozen, and nobody said so; see {drill.log.name}.")
    return f"rank {rank} frozen; the others named it"


def ask_to_stop(drill: Drill) -> str:
    run = _under_way(drill)
    number = drill.chance.choice([signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
    rank = _signal_a_rank(drill, run, number)
    drill.wait(run)
    return f"{number.name} to rank {rank}"


def fill_the_disk(drill: Drill) -> str:
    """A quota that no shard fits into; training must go on, and the next start be unharmed."""
    shards = [p.stat().st_size for p in drill.checkpoints.glob("step-*/*.distcp")]
    metrics = drill.out / METRICS_FILE
    if not shards or metrics.stat().st_size > max(shards) // 4:
        return kill_a_rank(drill)
    before = [path.name for path in drill.whole()]
    run = _under_way(drill, file_limit=max(shards) // 2)
    _signal_a_rank(drill, run, signal.SIGTERM)
    drill.wait(run)
    if [path.name for path in drill.whole()] != before:
        raise CheckpointError(f"a disk that is full changed what is kept; see {drill.log.name}.")
    return "disk full"


def resume_on_a_full_disk(drill: Drill) -> str:
    """A start for whose files there is no room: it is refused, and no file of the run changes."""
    if not drill.whole():
        return kill_a_rank(drill)
    names = ("config.toml", METRICS_FILE)
    before = [(drill.out / name).read_bytes() for name in names]
    run = drill.start(file_limit=64)
    drill.wait(run)
    if not run.returncode or [(drill.out / name).read_bytes() for name in names] != before:
        raise CheckpointError(f"a resume on a full disk changed {names}; see {drill.log.name}.")
    return "no room at a resume; refused, nothing changed"


def _damage(name: str, act) -> object:
    def fault(drill: Drill) -> str:
        steps = drill.whole()
        if len(steps) < 2:
            return kill_a_rank(drill)
        act(drill, steps[-1])
        return f"{steps[-1].name}: {name}"

    fault.__name__ = name
    return fault


def _some_shard(drill: Drill, step: Path) -> Path:
    return drill.chance.choice(sorted(step.glob("*.distcp")))


def _flip(drill: Drill, step: Path) -> None:
    shard = _some_shard(drill, step)
    with shard.open("r+b") as file:
        place = drill.chance.randrange(shard.stat().st_size)
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 1 << drill.chance.randrange(8)]))


def _truncate(drill: Drill, step: Path) -> None:
    shard = _some_shard(drill, step)
    os.truncate(shard, drill.chance.randrange(shard.stat().st_size))


FAULTS = {
    fault.__name__: fault
    for fault in (
        kill_a_rank,
        kill_a_writer,
        kill_the_launcher,
        freeze_a_rank,
        ask_to_stop,
        interrupt_a_save,
        lose_the_lease,
        share_the_checkpoint_folder,
        hang_an_fsync,
        fill_the_disk,
        resume_on_a_full_disk,
        _damage("flip_a_bit", _flip),
        _damage("truncate_a_shard", _truncate),
        _damage("remove_the_manifest", lambda drill, step: (step / "manifest.json").unlink()),
    )
}


def _under_way(drill: Drill, file_limit: int | None = None, **environment: str) -> subprocess.Popen:
    """A run that has told of a step, and some random moment later."""
    run, end = drill.start(file_limit, **environment), time.monotonic() + 600
    while run.poll() is None and time.monotonic() < end and not drill.learns():
        time.sleep(0.02)
    time.sleep(drill.chance.uniform(0, drill.longest))
    return run


def _saving(drill: Drill) -> subprocess.Popen:
    """A run that is writing a checkpoint, unless it has ended before."""
    before, end = drill.unfinished(), time.monotonic() + 300
    run = drill.start()
    while time.monotonic() < end and run.poll() is None:
        if drill.unfinished() - before:
            time.sleep(drill.chance.uniform(0, 0.05))
            break
        time.sleep(0.0005)
    return run


def _signal_the_launcher(drill: Drill, run: subprocess.Popen, number: int) -> None:
    if run.poll() is not None:
        raise _ended_before(drill)
    run.send_signal(number)


def _signal_a_rank(drill: Drill, run: subprocess.Popen, number: int) -> int:
    ranks = ranks_of(run.pid)
    rank = drill.chance.randrange(drill.ranks)
    try:
        os.kill(ranks[rank], number)
    except (KeyError, ProcessLookupError):
        raise _ended_before(drill) from None
    return rank


def _ended_before(drill: Drill) -> CheckpointError:
    return CheckpointError(
        f"the run had ended before a fault could strike; see {drill.log.name}.",
        fix="If it was done, give it more steps, or fewer --faults, or a shorter --longest.",
    )


# --- processes -----------------------------------------------------------------------------------


def ranks_of(launcher: int) -> dict[int, int]:
    """Rank -> process of the workers that a torchrun has started."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) != launcher:
                continue
            entries = (folder / "environ").read_bytes().split(b"\0")
            environment = dict(entry.split(b"=", 1) for entry in entries if b"=" in entry)
            found[int(environment[b"RANK"])] = int(folder.name)
        except (OSError, KeyError, ValueError, IndexError):
            continue
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


# --- the verdict ---------------------------------------------------------------------------------


def curve(out: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (out / METRICS_FILE).read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "event" not in line}


def differences(right: Drill, found: Drill, same_bits: bool) -> list[str]:
    """What the disturbed run did not do as the undisturbed one did."""
    wrong = []
    last = right.whole()[-1].name
    if not (found.checkpoints / last).exists():
        return [f"the disturbed run has no {last}"]
    ours, theirs = (
        read_checkpoint_manifest(StorageFolder(drill.checkpoints / last))
        for drill in (found, right)
    )
    if same_bits:
        wrong += [n for n, tensor in theirs.tensors.items() if ours.tensors.get(n) != tensor]
        wrong += [key for key in theirs.progress if ours.progress[key] != theirs.progress[key]]
    elif ours.progress["position"] != theirs.progress["position"]:
        wrong.append("position")
    for step, loss in curve(right.out).items():
        other = curve(found.out).get(step)
        if other is None or abs(other - loss) > (0 if same_bits else TOLERANCE * abs(loss)):
            wrong.append(f"loss of step {step}: {other} instead of {loss}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--faults", type=int, default=10, help="how many befall the run")
    parser.add_argument("--seed", type=int, default=0, help="what, when and whom")
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--kinds", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--longest", type=float, default=3.0, help="seconds until one strikes")
    parser.add_argument("--layout", action="append", default=[], help="overrides of one start")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("job", nargs="+", help="after --: what train.py takes, deterministic")
    args = parser.parse_args()
    if args.out.exists():
        print(f"titanlite: {args.out} is there already; name a new folder.", file=sys.stderr)
        return EXIT_USER_ERROR
    args.out.mkdir(parents=True)
    layouts = [shlex.split(text) for text in args.layout] or [[]]
    argv = [*args.job, "--checkpoint.enable=true"]

    def drill(name: str, layouts: list[list[str]]) -> Drill:
        chance = random.Random(args.seed)
        return Drill(args.out / name, argv, args.ranks, layouts, chance, args.longest)

    try:
        right, found = drill("undisturbed", layouts[:1]), drill("disturbed", layouts)
        if right.wait(right.start(), 24 * 3600):
            raise CheckpointError(f"the undisturbed run failed; see {right.log.name}.")
        print("undisturbed run: done", flush=True)
        for number in range(1, args.faults + 1):
            kind = found.chance.choice(args.kinds)
            words = FAULTS[kind](found)
            steps = [path.name for path in found.whole()]
            print(f"{number:3}. {words}; kept: {', '.join(steps[-2:]) or 'nothing'}", flush=True)
        if found.wait(found.start(), 24 * 3600):
            raise CheckpointError(f"the last start did not end well; see {found.log.name}.")
        wrong = differences(right, found, same_bits=len(layouts) == 1)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    for text in wrong[:20]:
        print(f"differs: {text}")
    like = "to the bit" if len(layouts) == 1 else f"to {TOLERANCE:g}"
    print(
        f"{found.starts} starts, {args.faults} faults: " + ("DIFFERS" if wrong else f"equal {like}")
    )
    return EXIT_USER_ERROR if wrong else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
