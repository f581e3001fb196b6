#!/usr/bin/env bash
# torchrun for one machine, with no port that other machines can reach:
#   bash scripts/launch.sh PROCESSES train.py --job.config_file run.toml …
# torchrun's own stores listen on every interface and execute what is written into them; here it
# meets itself in a private file, and rank 0 keeps the store of the ranks on the loopback interface.
set -euo pipefail
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nproc_per_node "$1" --rdzv-backend c10d --rdzv-conf store_type=file \
  --local-addr 127.0.0.1 "${@:2}"
