#!/usr/bin/env bash
#SBATCH --ntasks-per-node=1 --signal=B:USR1@300 --requeue --open-mode=append
# Train under SLURM: sbatch --nodes 2 --gpus-per-node 8 scripts/slurm.sh --job.config_file run.toml …
# 300 seconds before the time limit, all ranks save a checkpoint and exit, and the job is requeued.
# Environment variables: RANKS_PER_NODE (default: GPUs of the node), MAX_RESTARTS (default: 3), MIN_NODES (default: all;
# with sbatch --no-kill, the run goes on while at least these are left), and CONTAINER, the words between srun and its
# command: options of srun (--container-image=…) or a command (apptainer exec --nv …).
# In an array of jobs, %a in an argument is the index: sbatch --array 1-3 … --job.dump_folder outputs/%a
set -u

wait_for() {  # wait_for PID: return its exit code; a loop, because a trap interrupts `wait`
  local code=0
  while kill -0 "$1" 2>/dev/null; do wait "$1" && code=0 || code=$?; done
  return "$code"
}

run_node() {  # run torchrun on a node; it ignores SIGUSR1, which would end it
  local launcher signalled=
  (trap '' USR1; exec bash scripts/launch.sh "$@") &
  launcher=$!
  # Repeat the signal, because a rank that is still starting ignores it, and torchrun may not have started any.
  signal_ranks() { while kill -0 "$launcher" 2>/dev/null; do pkill -USR1 -P "$launcher"; sleep 5; done; }
  trap '[ "$signalled" ] || { signalled=1; signal_ranks & }' USR1
  trap : TERM  # SLURM sends it to torchrun, too; without a trap this shell would end before the ranks have saved
  wait_for "$launcher"
}
export -f wait_for run_node

export NNODES="${MIN_NODES:+$MIN_NODES:}$SLURM_NNODES" NPROC_PER_NODE="${RANKS_PER_NODE:-}"
srun --kill-on-bad-exit=0 --no-kill ${CONTAINER:-} bash -c 'run_node "$@"' run_node \
  --max-restarts "${MAX_RESTARTS:-3}" train.py "${@//%a/${SLURM_ARRAY_TASK_ID:-%a}}" &
step=$! signalled=
trap 'signalled=1; kill -USR1 "$step"' USR1  # srun forwards it to every node
wait_for "$step"
code=$?
case $code in
  0 | 2 | 3) ;;  # the run is complete, or the same command would fail again
  75) scontrol requeue "$SLURM_JOB_ID" ;;  # stopped and saved; scancel ends this shell before
  *) [ "$signalled" ] && scontrol requeue "$SLURM_JOB_ID" ;;
esac
exit "$code"
