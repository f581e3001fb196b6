#!/usr/bin/env bash
# Runs the tests in an environment of their own: scripts/test.sh [what pytest takes]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/environment.sh
# one thread a process: the tests run several ranks, and threads fighting for cores are slower
OMP_NUM_THREADS=1 exec python -m pytest "$@"
