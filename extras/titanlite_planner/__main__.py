"""The planner's commands for one job: python -m titanlite_planner COMMAND [settings]

  dry-run  run one step of every kind of rank on fake tensors, which have no values; print its
           memory, FLOPs and collectives
  memory   estimate the peak of the largest rank, and what other settings would save

Settings are those of train.py: --job.config_file RUN.toml [--section.key value ...]. They need no
GPU and no data; --job.check_ranks N is the number of ranks to assume (default: 1).
"""

from __future__ import annotations

import sys

from titanlite.errors import EXIT_DONE, EXIT_USER_ERROR, UserError, format_error
from titanlite.job import read_job
from titanlite.log import configure_log
from titanlite_planner.dry_run.report import report_dry_run
from titanlite_planner.memory.advice import describe_memory

COMMANDS = {"dry-run": report_dry_run, "memory": describe_memory}


def main(argv: list[str]) -> int:
    """Run a command; returns the exit code."""
    if {"-h", "--help"}.intersection(argv):
        print(__doc__)
        return EXIT_DONE
    command, *settings = argv or [""]
    if command not in COMMANDS:
        print(f'command "{command}": must be {" or ".join(COMMANDS)}.', file=sys.stderr)
        return EXIT_USER_ERROR
    try:
        job = read_job(settings, 1, check_environment=False)
        configure_log(0)
        job.log_start(0)
        for line in COMMANDS[command](job):
            print(line, flush=True)
    except UserError as error:
        print(format_error(error), file=sys.stderr)
        return EXIT_USER_ERROR
    return EXIT_DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
