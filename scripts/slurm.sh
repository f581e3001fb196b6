#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1 --signal=B:USR1@300 --requeue --open-mode=append
# Train under SLURM: sbatch --nodes 2 --gpus-per-node 8 scripts/slurm.sh --job.config_file run.toml …
# 300 seconds before the time limit, all ranks save a checkpoint and exit, and the job is requeued.
# Environment variables: RANKS_PER_NODE (default: GPUs of the node), MAX_RESTARTS (default: 3), and
# MIN_NODES (default: all): with sbatch --no-kill, the run goes on while at least these are left.
set -u
# After SIGTERM, torchrun kills the ranks after this time, 30 s by default, unless SLURM does so first.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1  # else all restarts use the store of the first start

wait_for() {  # wait_for PID: return its exit code; a loop, because a trap interrupts `wait`
  local code=0
  while kill -0 "$1" 2>/dev/null; do wait "$1" && code=0 || code=$?; done
  return "$code"
}

run_node() {  # run torchrun on a node; it ignores SIGUSR1, which would end it
  local launcher signalled=
  ulimit -n "$(ulimit -Hn)"  # the store of the ranks has two connections for each of them
  (trap '' USR1; exec torchrun "$@") &
  launcher=$!
  # Repeat the signal, because a rank that is still starting ignores it.
  signal_ranks() { while pkill -USR1 -P "$launcher"; do sleep 5; done; }
  trap '[ "$signalled" ] || { signalled=1; signal_ranks & }' USR1
  wait_for "$launcher"
}
export -f wait_for run_node

head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=0 --no-kill bash -c 'run_node "$@"' run_node \
  --nnodes "${MIN_NODES:-$SLURM_NNODES}:$SLURM_NNODES" --nproc_per_node "${RANKS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}" \
  --max-restarts "${MAX_RESTARTS:-3}" --rdzv_backend c10d \
  --rdzv_id "$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}" \
  --rdzv_endpoint "$head_node:$((20000 + SLURM_JOB_ID % 10000))" train.py "$@" &
step=$! signalled=
trap 'signalled=1; kill -USR1 "$step"' USR1  # srun forwards it to every node
wait_for "$step"
code=$?
[ "$signalled" ] && [ "$code" -ne 0 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$code"
