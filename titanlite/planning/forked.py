"""Run functions in forked processes, each in one of its own, in the order given."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import TypeVar

import torch

from titanlite.errors import UserError

T = TypeVar("T")


def run_in_processes(functions: Sequence[Callable[[], T]], processes: int) -> Iterator[T]:
    """Yield the result of each function. `processes` of them run at the same time.

    A process of its own for each, because DTensor caches the process groups that it has seen.
    Forked, so that a function need not be pickled and torch need not be imported again.
    """
    fork = multiprocessing.get_context("fork")
    process: multiprocessing.process.BaseProcess
    running: list[tuple[Connection, multiprocessing.process.BaseProcess]] = []
    waiting = list(functions)
    try:
        while waiting or running:
            while waiting and len(running) < processes:
                receiver, sender = fork.Pipe(duplex=False)
                process = fork.Process(target=_call, args=(waiting.pop(0), sender), daemon=True)
                process.start()
                sender.close()
                running.append((receiver, process))
            yield _result_of(*running.pop(0))
    finally:
        for _, process in running:
            process.terminate()
            process.join()


def _call(function: Callable[[], T], sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((function(), None))
    except UserError as error:
        sender.send((None, error))
    except Exception:
        sender.send((None, RuntimeError(traceback.format_exc())))


def _result_of(receiver: Connection, process: multiprocessing.process.BaseProcess) -> T:  # type: ignore[type-var]
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        error = RuntimeError(f"the process of a rank ended with exit code {process.exitcode}")
    process.join()
    if error is not None:
        raise error
    return result
