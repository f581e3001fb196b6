"""Estimate the peak of the largest rank of a job, and what other settings would save.

  python -m titanlite_planner memory --job.config_file RUN.toml [--job.check_ranks N]

Settings are those of train.py; the data need not exist. N: the number of ranks to assume
(default: 1).
"""

from __future__ import annotations

from titanlite.errors import EXIT_DONE
from titanlite.job import read_job
from titanlite_planner.memory.advice import describe_memory


def main(argv: list[str]) -> int:
    if not argv or {"-h", "--help"}.intersection(argv):
        print(__doc__)
        return EXIT_DONE
    print("\n".join(describe_memory(read_job(argv, 1, here=False))))
    return EXIT_DONE
