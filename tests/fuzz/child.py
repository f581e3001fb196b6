"""A process that reads changed files one after the other, and may do nothing else.

It is limited in memory and in CPU seconds for each file, and an audit hook reports whatever a file
makes it do outside: run code, open other files, write, or use the network.
"""

from __future__ import annotations

import os
import resource
import shutil
import signal
import site
import struct
import sys
import sysconfig
import time
import traceback
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutate
from tests.fuzz.readers import READERS
from titanlite.errors import UserError

MEMORY_BYTES = 1 << 30  # above what the process has when it starts
CPU_SECONDS = 20  # for one file; not wall time, so that a busy machine fails nothing
NUMBER = struct.Struct("<q")
PACKAGES = tuple(
    {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        os.path.realpath(sys.base_prefix),
        str(Path(__file__).parents[2]),
    }
)
FORBIDDEN = (
    *(
        "os.system",
        "os.exec",
        "os.posix_spawn",
        "os.fork",
        "os.forkpty",
        "subprocess.Popen",
        "pty.spawn",
    ),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"),
    *("pickle.find_class", "marshal.loads", "marshal.load", "code.__new__", "ctypes.dlopen"),
    *("os.chmod", "os.chown", "os.link", "os.symlink", "os.kill"),
)
WRITING = (
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.utime"),
    *("shutil.rmtree", "shutil.move"),
)


class Guard:
    """The audit hook: remembers what was done outside while it is armed."""

    def __init__(self, folder: Path):
        self.folder, self.armed, self.seen = os.path.realpath(folder), False, []
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple) -> None:
        if not self.armed:
            return
        self.armed = False  # looking up what it is about must not be audited itself
        try:
            if self.is_outside(event, args):
                self.seen.append(f"{event} {str(args)[:300]}")
        finally:
            self.armed = True

    def is_outside(self, event: str, args: tuple) -> bool:
        if event in FORBIDDEN:
            return not (event.startswith("marshal") and is_importing())
        if event == "exec":  # modules that are imported now are code of the installed packages
            return not is_importing() and not args[0].co_filename.startswith(
                ("<string>", *PACKAGES)
            )
        if event == "open" and isinstance(args[0], (str, bytes)):
            path, flags = os.path.realpath(os.fsdecode(args[0])), args[2] or 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            allowed = (self.folder,) if writes else (self.folder, "/proc/", "/sys/", *PACKAGES)
            return not path.startswith(allowed)
        if event in WRITING and isinstance(args[0], (str, bytes, os.PathLike)):
            return not os.path.realpath(os.fsdecode(args[0])).startswith(self.folder)
        return False


def is_importing() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def fuzz(connection, path, name, seeds, folder, first, last, until, progress) -> None:
    """Read cases `first` to `last` of reader `name`; send what went wrong: [(case, text)]."""
    sys.path[:] = path
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    import torch

    torch.set_num_threads(1)
    os.environ["RAYON_NUM_THREADS"] = "1"
    reader, work = READERS[name], Path(folder)
    guard = Guard(work)
    warm = work.with_name("warm")
    shutil.copytree(seeds, warm, dirs_exist_ok=True)
    reader.read(warm / reader.seed)  # imports what it needs
    shutil.rmtree(warm)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    marker, failures, case = os.open(progress, os.O_WRONLY), [], first
    while case < last and time.time() < until:
        os.pwrite(marker, NUMBER.pack(case), 0)
        target = prepare_case(reader, Path(seeds), work, case)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # the default action ends the process
        guard.armed = True
        try:
            reader.read(target)
        except UserError:
            pass
        except BaseException as error:  # a MemoryError too: it was not bounded
            guard.armed = False
            failures.append((case, "".join(traceback.format_exception(error))[-3000:]))
        finally:
            guard.armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        if guard.seen:
            failures.append((case, "did " + "; ".join(guard.seen)))
            guard.seen = []
        case += 1
    connection.send((case - first, failures))


def prepare_case(reader, seeds: Path, work: Path, case: int) -> Path:
    """A copy of the seed in `work` with one file changed; the same for the same case."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    source, target = seeds / reader.seed, work / reader.seed
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)
    random = Random(f"{reader.seed}/{reader.file}/{case}")
    files = sorted(target.glob(reader.file)) if reader.file else [target]
    file = random.choice(files)
    content = mutate(file.read_bytes(), random, file.suffix == ".json")
    file.write_bytes(content)
    if reader.seal and random.random() < 0.95:
        reader.seal(target, file.name, content)
    return target
