"""The child process of the fuzz tests: reads mutated files one after the other.

Its memory, and its CPU time for each file, are limited. An audit hook records everything else that
a file makes it do: run code, open other files, write, or use the network.
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
from dataclasses import dataclass
from pathlib import Path
from random import Random

from tests.fuzz.mutations import mutate
from tests.fuzz.readers import READERS, Reader
from titanlite.errors import UserError
from titanlite_corpus.chat.jinja import RENDERER

MEMORY_BYTES = 1 << 30  # above the memory of the process at its start
CPU_SECONDS = 20  # for one file; not wall time, which depends on other processes
CASE_NUMBER = struct.Struct("<q")  # the content of the progress file
CODE_FOLDERS = tuple(  # of Python, installed packages and titanlite
    {
        *sysconfig.get_paths().values(),
        *site.getsitepackages(),
        os.path.realpath(sys.base_prefix),
        str(Path(__file__).parents[2]),
    }
)
FORBIDDEN_EVENTS = (
    *("os.system", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty"),
    *("subprocess.Popen", "pty.spawn"),
    *("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.sendto"),
    *("pickle.find_class", "marshal.loads", "marshal.load", "code.__new__", "ctypes.dlopen"),
    *("os.chmod", "os.chown", "os.link", "os.symlink", "os.kill"),
)
WRITE_EVENTS = (  # allowed in the working folder only
    *("os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.truncate", "os.utime"),
    *("shutil.rmtree", "shutil.move"),
)


@dataclass(frozen=True)
class CaseRange:
    """The cases of one reader that a child reads, until they or the time are used up."""

    reader: str  # a key of READERS
    seeds: Path  # valid files, which are mutated
    work: Path  # the child's working folder
    progress: Path  # file with the number of the case that is being read
    first: int
    last: int  # exclusive
    until: float  # time.time()


class AuditHook:
    """Records forbidden events while it is armed."""

    def __init__(self, folder: Path):
        self.folder, self.armed = os.path.realpath(folder), False
        self.forbidden: list[str] = []
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple) -> None:
        if not self.armed:
            return
        self.armed = False  # the check itself causes events
        try:
            if self.is_forbidden(event, args):
                self.forbidden.append(f"{event} {str(args)[:300]}")
        finally:
            self.armed = True

    def is_forbidden(self, event: str, args: tuple) -> bool:
        if event == "subprocess.Popen":  # the children for chat templates and for web pages
            return list(args[1])[:-1] not in (RENDERER, [sys.executable, "-m"])
        if event in FORBIDDEN_EVENTS:
            return not (event.startswith("marshal") and is_importing())
        if event == "exec":  # modules of installed packages may be imported now
            allowed = ("<string>", *CODE_FOLDERS)
            return not is_importing() and not args[0].co_filename.startswith(allowed)
        if event == "open" and isinstance(args[0], (str, bytes)):
            path, flags = os.path.realpath(os.fsdecode(args[0])), args[2] or 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            readable = (self.folder, "/proc/", "/sys/", *CODE_FOLDERS)
            return not path.startswith((self.folder,) if writes else readable)
        if event in WRITE_EVENTS and isinstance(args[0], (str, bytes, os.PathLike)):
            return not os.path.realpath(os.fsdecode(args[0])).startswith(self.folder)
        return False

    def take_forbidden(self) -> list[str]:
        """The forbidden events since the last call."""
        events, self.forbidden = self.forbidden, []
        return events

    def arm(self, armed: bool) -> None:
        self.armed = armed


def is_importing() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def read_cases(connection, path: list[str], cases: CaseRange) -> None:
    """Read the cases with `path` as sys.path; send their number and failures: [(case, text)]."""
    sys.path[:] = path
    silence_output()
    reader, hook = READERS[cases.reader], AuditHook(cases.work)
    read_once_to_import(reader, cases)
    limit_memory()
    marker, failures, case = os.open(cases.progress, os.O_WRONLY), [], cases.first
    while case < cases.last and time.time() < cases.until:
        os.pwrite(marker, CASE_NUMBER.pack(case), 0)
        target = prepare_case(reader, cases.seeds, cases.work, case)
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # SIGPROF then ends the process
        hook.arm(True)
        try:
            reader.read(target)
        except UserError:
            pass
        except BaseException as error:  # a MemoryError too: the reader did not limit its memory
            hook.arm(False)
            failures.append((case, "".join(traceback.format_exception(error))[-3000:]))
        finally:
            hook.arm(False)
            signal.setitimer(signal.ITIMER_PROF, 0)
        if events := hook.take_forbidden():
            failures.append((case, "forbidden: " + "; ".join(events)))
        case += 1
    connection.send((case - cases.first, failures))


def silence_output() -> None:
    import torch

    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    os.environ["RAYON_NUM_THREADS"] = "1"


def read_once_to_import(reader: Reader, cases: CaseRange) -> None:
    """Read a valid file, so that the modules of the reader are imported before limits apply."""
    warm = cases.work.with_name("warm")
    shutil.copytree(cases.seeds, warm, dirs_exist_ok=True)
    reader.read(warm / reader.seed)
    shutil.rmtree(warm)


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def prepare_case(reader: Reader, seeds: Path, work: Path, case: int) -> Path:
    """Copy the seed into `work` and mutate one file of it; a case always gives the same copy."""
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
    content = mutate(file.read_bytes(), random, file.suffix)
    file.write_bytes(content)
    if reader.fix_hashes and random.random() < 0.95:
        reader.fix_hashes(target, file.name, content)
    return target
