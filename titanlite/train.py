"""Train a language model: torchrun --nproc_per_node N -m titanlite.train --job.config_file run.toml

`--help` lists every setting, `--help model loss` two sections; `--job.import A,B` imports modules.
"""

from __future__ import annotations

import signal
import sys
import time

from titanlite.distributed.error_report import ErrorReport
from titanlite.distributed.process_group import enable_expandable_segments
from titanlite.distributed.rendezvous import launched_rank_and_world_size
from titanlite.distributed.time_limit import exit_process
from titanlite.elastic.spares import wait_if_spare
from titanlite.errors import EXIT_DONE, EXIT_STOPPED
from titanlite.extensions import load_extensions
from titanlite.job import (
    Extend,
    Job,
    JobConfig,
    keep_run,
    log_start,
    open_run,
    open_services,
    read_job,
)
from titanlite.log import configure_log, logger
from titanlite.runtime import end_launcher, exit_when_launcher_dies
from titanlite.training.loop import train


def main(argv: list[str], config: type[JobConfig] = JobConfig, extend: Extend = keep_run) -> int:
    """Train with the arguments `argv`; returns the exit code.

    A command with sections of its own has its own `config`, whose `HELP` is the title of --help;
    `extend` changes the run before it trains.
    """
    began = time.monotonic()
    rank, world_size = launched_rank_and_world_size()
    exit_when_launcher_dies()
    enable_expandable_segments()
    report = ErrorReport()
    try:
        argv = load_extensions(argv)
        if help_at := next((at for at, text in enumerate(argv, 1) if text in ("--help", "-h")), 0):
            from titanlite.config_reference import print_help  # only runs of --help need it

            signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # so that `--help | head` ends quietly
            return print_help(getattr(config, "HELP", __doc__), config, argv[help_at:])
        job = read_job(argv, world_size, config_type=config)
        configure_log(rank, colour=False if job.config.metrics.disable_color_printing else None)
        log_start(job, rank)
        if job.config.job.check:
            return EXIT_DONE
        code = wait_if_spare(job.degrees.ranks, job.config.comm.init_timeout_seconds)
        return run_job(job, began, report, extend) if code is None else code
    except (Exception, KeyboardInterrupt) as error:
        return report.finish(error)


def run_job(job: Job, began: float, report: ErrorReport, extend: Extend = keep_run) -> int:
    """Train; returns the exit code. `began` is the time.monotonic() of the start of the process."""
    with open_services(job, began, report) as services:
        if has_stopped := services.folder_lock.stopped_in_this_launch(services.members.hosts):
            logger.info("already stopped in this launch; start the same command again to resume")
            code = EXIT_STOPPED
        else:
            with open_run(job, services, extend) as run:
                code = EXIT_STOPPED if train(run) else EXIT_DONE
        services.folder_lock.release(code)
        services.rank.release_spares(code)
    if has_stopped:  # the folder is released
        end_launcher()
    return code


if __name__ == "__main__":
    exit_process(main(sys.argv[1:]))
