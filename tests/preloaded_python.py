"""A `python` and a `torchrun` that start in a tenth of the time: processes forked from a server.

The server has imported torch and what else takes seconds to import. Programs that tests start run
in forks of it, with the arguments, environment, working directory and standard streams of the
command that was called. What Python does before it runs a program is not tested in this way, nor
are resource limits, which a fork has from the server. SIGKILL ends the command only.
"""

from __future__ import annotations

import atexit
import builtins
import gc
import importlib
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType, ModuleType

PRELOAD = (
    "numpy.random",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.launcher.api",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "torchdata.nodes",
    "titanlite.job",
    "titanlite.training.loop",
)
# Started once for each command: without site, and with built-in modules alone, in 20 ms. It sends
# (arguments, working directory, environment, parent) and its standard streams; it forwards signals.
CLIENT = """#!{python} -IS
import _signal, _socket, marshal, os, sys
arguments = {prefix!r} + sys.argv[1:]
if arguments[:1] == ["-u"]:
    del arguments[0]
if not arguments or arguments[0][0] == "-" and arguments[0] not in ("-", "-c", "-m"):
    os.execv({python!r}, [{python!r}] + sys.argv[1:])
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect({address!r})
request = marshal.dumps((arguments, os.getcwd(), dict(os.environ), os.getppid()))
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)]
server.sendmsg([len(request).to_bytes(8, "big")], rights)
server.sendall(request)
child = int.from_bytes(server.recv(8), "big")
for number in {forwarded}:
    _signal.signal(number, lambda number, frame: os.kill(child, number))
code = int.from_bytes(server.recv(8), "big", signed=True)
if code < 0:
    _signal.signal(-code, _signal.SIG_DFL) if code != -9 else None
    os.kill(os.getpid(), -code)
os._exit(code)
"""


@contextmanager
def preloaded_python(
    folder: Path, repository: Path, environment: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Path]:
    """A folder with the commands `python` and `torchrun`, which know the modules of `repository`.

    `environment`: of the server, for what is read when a process starts, such as LD_PRELOAD. At the
    end of the block, the programs that still run are killed.
    """
    programs, address = folder / "bin", str(folder / "socket")
    programs.mkdir(parents=True)
    forwarded = [int(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    for name, prefix in (("python", []), ("torchrun", ["-m", "torch.distributed.run"])):
        text = CLIENT.format(
            python=sys.executable, prefix=prefix, address=address, forwarded=forwarded
        )
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(address)
        listener.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listener.fileno()), str(programs / "python")],
            cwd=repository,
            env={**os.environ, "PYTHONPATH": f"{repository}:{repository}/extras", **environment},
            stdin=subprocess.PIPE,  # its end tells the server that the tests have ended
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )
    try:
        yield programs
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def serve(listener: socket.socket, python: str) -> None:
    """Fork a process for each command, which runs its program."""
    given = {"", os.getcwd(), *os.environ["PYTHONPATH"].split(":")}
    for name in PRELOAD:
        importlib.import_module(name)
    from tests.fast_matmul import compute_matmuls_in_fp32  # it imports torch
    from titanlite.metrics import throughput

    path = [folder for folder in sys.path if folder not in given]
    compute_matmuls_in_fp32()
    # for mfu, which no test of programs reads; it takes a quarter of the CPU time of a short run
    throughput.measure_matmul_flops = lambda dtype, device: 1e12
    gc.collect()
    gc.freeze()  # else gc would touch, and so copy, the pages that the forks share
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no zombies
    while True:
        readable, _, _ = select.select([listener, 0], [], [])
        if 0 in readable:
            os.killpg(0, signal.SIGKILL)
        connection, _ = listener.accept()
        if os.fork() == 0:
            break
        connection.close()
    listener.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, streams, _, _ = socket.recv_fds(connection, 8, 3)
    request = connection.recv(int.from_bytes(head, "big"), socket.MSG_WAITALL)
    arguments, folder, environment, parent = marshal.loads(request)
    if child := os.fork():
        connection.sendall(child.to_bytes(8, "big"))
        for stream in (0, 1, 2, *streams):
            os.close(stream)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(OSError):  # the command was killed
            connection.sendall(code.to_bytes(8, "big", signed=True))
        os._exit(0)
    connection.close()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(folder)
    os.getppid = lambda: parent  # of the command: the ranks of one torchrun have the same
    os.environ.clear()
    os.environ.update(environment)
    added = environment.get("PYTHONPATH", "")
    sys.path[:] = [*filter(None, added.split(":")), *path]
    sys.executable = python  # what the program starts is a fork too, such as ranks of torchrun
    code = 0
    try:
        run(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # waits for threads, as Python does
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(code)  # at once: to free all that is imported takes a second


def run(arguments: list[str]) -> None:
    """Run `-m MODULE`, `-c TEXT`, `-` or a file as the main program."""
    sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    what, *rest = arguments
    if what == "-m":
        sys.argv, sys.path[:0] = rest, [os.getcwd()]
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    if what in ("-c", "-"):
        text = rest[0] if what == "-c" else sys.stdin.read()
        sys.argv, sys.path[:0] = [what, *rest[what == "-c" :]], [""]
        code = compile(text, "<string>" if what == "-c" else "<stdin>", "exec")
    else:
        sys.argv, sys.path[:0] = arguments, [str(Path(what).resolve().parent)]
        main.__file__ = what
        code = compile(Path(what).read_bytes(), what, "exec")
    exec(code, main.__dict__)


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])), python=sys.argv[2])
