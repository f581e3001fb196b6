"""Run functions in forked processes, each in one of its own; results in the order given."""

from __future__ import annotations

import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

import torch

from titanlite.errors import UserError

T = TypeVar("T")
PROGRESS_SECONDS = 10.0  # after which a line is printed if nothing has finished


def run_in_processes(functions: Sequence[Callable[[], T]], processes: int) -> Iterator[T]:
    """Yield the result of each function. `processes` of them run at the same time.

    A process of its own for each, because DTensor caches the process groups that it has seen.
    Forked, so that a function need not be pickled and torch need not be imported again.
    """
    waiting = list(enumerate(functions))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    results: dict[int, T] = {}
    began = time.monotonic()
    try:
        for number in range(len(functions)):
            while number not in results:
                while waiting and len(running) < processes:
                    started, function = waiting.pop(0)
                    receiver, process = _start(function)
                    running[receiver] = started, process
                ready = wait(list(running), PROGRESS_SECONDS)
                if not ready:
                    done = len(functions) - len(waiting) - len(running)
                    seconds = time.monotonic() - began
                    print(
                        f"{done} of {len(functions)} parts done, {seconds:.0f} s", file=sys.stderr
                    )
                for receiver in [each for each in running if each in ready]:
                    finished, process = running[receiver]
                    results[finished] = _result_of(receiver, process)
                    del running[receiver]
            yield results.pop(number)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()


def _start(function: Callable[[], T]) -> tuple[Connection, BaseProcess]:
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_call, args=(function, sender), daemon=True)
    process.start()
    sender.close()
    return receiver, process


def _call(function: Callable[[], T], sender: Connection) -> None:
    torch.set_num_threads(1)
    try:
        sender.send((function(), None))
    except UserError as error:
        sender.send((None, error))
    except Exception:
        sender.send((None, RuntimeError(traceback.format_exc())))


def _result_of(receiver: Connection, process: BaseProcess) -> T:  # type: ignore[type-var]
    try:
        result, error = receiver.recv()
    except EOFError:
        process.join()
        error = RuntimeError(f"the process of a rank ended with exit code {process.exitcode}")
    process.join()
    if error is not None:
        raise error
    return result
