#!/usr/bin/env bash
# Run torchrun on one machine, without a port that other machines can reach:
#   bash scripts/launch.sh PROCESSES train.py --job.config_file run.toml …
# By default torchrun's stores listen on every network interface, and their clients unpickle what is
# written into them. Here the rendezvous uses a private file, and the store of the ranks listens on
# the loopback interface only.
set -euo pipefail
if [[ ! "${1:-}" =~ ^[0-9]+$ || $# -lt 2 ]]; then
  echo "usage: bash scripts/launch.sh PROCESSES train.py --job.config_file run.toml …" >&2
  exit 2
fi
ulimit -n "$(ulimit -Hn)" || true  # the store of the ranks has two connections for each of them
# After Ctrl-C or SIGTERM, torchrun kills the ranks after this time, 30 s by default: it must cover a
# step and a save. A torch without this variable ignores it.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# Without a value torchrun sets 1 for several processes, too, and prints a block of text about it.
if (( $1 > 1 )); then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"; fi
# The endpoint is the private file; without it torchrun warns about an address that it does not use.
exec torchrun --nproc_per_node "$1" --rdzv-backend c10d --rdzv-conf store_type=file \
  --rdzv-endpoint "$(mktemp)" --local-addr 127.0.0.1 "${@:2}"
