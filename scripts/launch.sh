#!/usr/bin/env bash
# Run torchrun with the machines and addresses that a scheduler gives:
#   bash scripts/launch.sh [--dry-run] [PROCESSES] [flags of torchrun] train.py --job.config_file run.toml …
# With PROCESSES: on this machine. Else on the machines of a step of SLURM (one task each), Kubeflow Trainer, SkyPilot
# or dstack, or of these variables, which win: NNODES, MASTER_ADDR, MASTER_PORT, NPROC_PER_NODE, and NODE_RANK (in
# Kubernetes the index of the pod in its Job). Without any: on this machine, one process for each GPU.
# Also read: OMP_NUM_THREADS; TORCH_ELASTIC_SHUTDOWN_TIMEOUT; NUMA_BINDING (default node, empty for none); LOG_DIR, a
# folder that gets a copy of the output of each rank.
# The exit code is that of the rank that ended first (128 + N after signal N), or 75 if torchrun was told to stop.
set -euo pipefail
dry_run='' here='' processes='' nodes=1 rank='' address='' port=29400 run=titanlite hosts='' gpus=0 tries=0
if [[ "${1:-}" == --dry-run ]]; then dry_run=1 && shift; fi
if [[ "${1:-}" =~ ^[0-9]+$ ]]; then here=$1 && shift; fi
if (( $# == 0 )); then
  sed -n '3s/#  /usage:/p' "$0" >&2
  exit 2
fi
trap 'exit 75' TERM  # as the first process of a container, bash would ignore it
if [[ "$here" ]]; then
  processes=$here
else
  if [[ "${SLURM_STEP_NODELIST:-}" ]]; then
    nodes=$SLURM_STEP_NUM_NODES rank=$SLURM_NODEID processes=${SLURM_GPUS_ON_NODE:-}
    # The first of gpu[07-09,12],other. Containers have no scontrol.
    address=$(sed -E 's/\[([0-9]+)[^]]*\]/\1/g; s/,.*//' <<< "$SLURM_STEP_NODELIST")
    port=$((20000 + SLURM_JOB_ID % 10000)) run=$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}
  elif [[ "${PET_MASTER_ADDR:-}" ]]; then  # Kubeflow Trainer
    nodes=$PET_NNODES rank=$PET_NODE_RANK processes=$PET_NPROC_PER_NODE address=$PET_MASTER_ADDR port=$PET_MASTER_PORT
    unset PET_NODE_RANK  # torchrun would read it, and warn that it does not use it
  elif [[ "${SKYPILOT_NODE_IPS:-}" ]]; then
    nodes=$SKYPILOT_NUM_NODES rank=$SKYPILOT_NODE_RANK processes=$SKYPILOT_NUM_GPUS_PER_NODE hosts=$SKYPILOT_NODE_IPS
  elif [[ "${DSTACK_NODES_IPS:-}" ]]; then
    nodes=$DSTACK_NODES_NUM rank=$DSTACK_NODE_RANK processes=$DSTACK_GPUS_PER_NODE hosts=$DSTACK_NODES_IPS
  fi
  nodes=${NNODES:-$nodes} address=${MASTER_ADDR:-${address:-${hosts%%$'\n'*}}} port=${MASTER_PORT:-$port}
  rank=${NODE_RANK:-${rank:-${JOB_COMPLETION_INDEX:-}}} processes=${NPROC_PER_NODE:-$processes}
  gpus=$(nvidia-smi -L 2> /dev/null | grep -c ^GPU) || true
  if [[ -z "$processes" || "$processes" == 0 ]]; then processes=$( (( gpus )) && echo gpu || echo 1); fi
fi
flags=(--nnodes "$nodes" --nproc-per-node "$processes" --rdzv-backend c10d)
if [[ "$nodes" == 1 ]]; then
  # By default torchrun's stores listen on every network interface, and their clients unpickle what is written into
  # them. Here the rendezvous uses a private file, and the store of the ranks listens on the loopback interface only.
  flags+=(--rdzv-conf store_type=file --rdzv-endpoint "$(mktemp ${dry_run:+-u})" --local-addr 127.0.0.1)
elif [[ -z "$address" ]]; then
  echo "launch.sh: NNODES = $nodes, but MASTER_ADDR is not set. Set it to the host name of the first machine." >&2
  exit 2
else
  flags+=(--rdzv-id "$run" --rdzv-endpoint "$address:$port")
  if [[ "$rank" ]]; then flags+=(--rdzv-conf "is_host=$((rank == 0))"); fi
  # The others may not be able to resolve the host name of a VM or a container.
  if [[ "$hosts" ]]; then flags+=(--local-addr "$(sed -n "$((rank + 1))p" <<< "$hosts")"); fi
fi
# torch calls numactl, and fails on a node whose cores this job may not use.
if [[ "$processes" =~ ^(gpu|auto)$ || "$processes" =~ ^[0-9]+$ && "$processes" -le "$gpus" ]] && (( gpus )) &&
  [[ "${NUMA_BINDING=node}" && "$(env -u OMP_NUM_THREADS nproc)" == "$(nproc --all)" ]] && command -v numactl >/dev/null
then flags+=(--numa-binding "$NUMA_BINDING"); fi
if [[ "${LOG_DIR:-}" ]]; then flags+=(--log-dir "$LOG_DIR/$(hostname)" --tee 3); fi
ulimit -n "$(ulimit -Hn)" || true  # the store of the ranks has two connections for each of them
# After Ctrl-C or SIGTERM, torchrun kills the ranks after this time, 30 s by default: it must cover a step and a save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else all restarts use the store of the first start
# Without a value torchrun sets 1 for several processes, too, and prints a block of text about it.
if [[ "$processes" != 1 ]]; then export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"; fi
if [[ "$dry_run" || "${rank:-0}" == 0 ]]; then echo "launch.sh: torchrun$(printf ' %q' "${flags[@]}" "$@")" >&2; fi
if [[ "$dry_run" ]]; then exit; fi
until [[ "$nodes" == 1 || "${rank:-0}" == 0 ]] || (( ++tries > 300 )) ||  # the first may still load its image
  timeout 5 bash -c ": > '/dev/tcp/$address/$port'" 2> /dev/null; do sleep 2; done
exec python -c '
import sys
from torch.distributed import run
from torch.distributed.elastic.multiprocessing import SignalException, errors
try:
    run.main()
except errors.ChildFailedError as failed:  # for which the command torchrun ends with 1
    code = failed.get_first_failure()[1].exitcode
    sys.exit(code if code > 0 else 128 - code)
except SignalException:
    sys.exit(75)' "${flags[@]}" "$@"
