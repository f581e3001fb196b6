"""Train a model on one process."""

from __future__ import annotations

import signal
from typing import NoReturn

from titanlite.distributed.time_limit import exit_process
from titanlite.train import main as train


def main(argv: list[str]) -> NoReturn:
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # libraries rely on it
    exit_process(train(argv))
