"""Run one step of every kind of rank of a job on fake tensors, which have no values.

  python -m titanlite_planner dry-run --job.config_file RUN.toml [--job.check_ranks N]

It prints memory, FLOPs and collectives. Settings are those of train.py; the data need not exist.
N: the number of ranks to assume (default: 1).
"""

from __future__ import annotations

from titanlite.errors import EXIT_DONE
from titanlite.job import log_start, read_job
from titanlite.log import configure_log
from titanlite_planner.dry_run.report import report_dry_run


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"}.intersection(argv):
        print(__doc__)
        return EXIT_DONE
    job = read_job(argv, 1, here=False)
    configure_log(0)
    log_start(job, 0)
    for line in report_dry_run(job):
        print(line, flush=True)
    return EXIT_DONE
