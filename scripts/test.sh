#!/usr/bin/env bash
# Run the tests: scripts/test.sh [--quick] [arguments of pytest]
#   --quick  the fast unit tests and a few distributed tests: about 2:30 minutes on 2 cores
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh dev
# The tests start many processes; without its bytecode, each would compile titanlite again.
unset PYTHONDONTWRITEBYTECODE

ORACLE=tests/distributed/test_oracle.py::test_every_layout_matches_one_process
QUICK=(
  -m "not slow"
  tests/test_architecture.py tests/test_settings.py tests/test_job.py tests/docs/test_pages.py
  tests/models tests/kernels tests/optim tests/metrics tests/training tests/data tests/parallelize
  tests/runtime/test_start_log.py tests/checkpoint/test_retention.py
  tests/checkpoint/test_untrusted.py tests/distributed/test_mesh.py
  tests/distributed/test_collectives.py
  "$ORACLE[SGD: shard=2,accumulate=3 and 5 more]"
  "$ORACLE[SGD: shard=2,tensor=2,accumulate=3 and 2 more]"
  extras
)
for argument in "$@"; do
  shift
  if [ "$argument" = --quick ]; then set -- "$@" "${QUICK[@]}"; else set -- "$@" "$argument"; fi
done
# Three workers, because many tests wait for other processes. The tests of a file share
# fixtures, so one worker runs them all. Files start in the order of collection: the last ones are
# small. One thread per process: the tests start several ranks, and more threads than cores are slower.
OMP_NUM_THREADS=1 exec python -m pytest -n 3 --dist loadscope --no-loadscope-reorder "$@"
