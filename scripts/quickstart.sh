#!/usr/bin/env bash
# From nothing to a model that writes Python: bash scripts/quickstart.sh [--section.key value …]
# What is already there is used again. Extra arguments go to train.py.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh

run=outputs/quickstart corpus=outputs/quickstart/corpus
take=""
for word in "$@"; do  # the one setting of train.py that this script has to know too
  case "$take$word" in
    --job.dump_folder) take=run= ;;
    --job.dump_folder=*) run=${word#*=} ;;
    run=*) run=$word take="" ;;
  esac
done
say() { printf '\n== %s\n' "$*"; }
have() { [ -e "$1" ] && say "$1 is there: used again"; }
mkdir -p "$corpus"

have "$corpus/python.jsonl" || {
  say "collecting the text of Python's standard library"
  python scripts/collect_python.py --out "$corpus/python.jsonl"
}
have "$corpus/tokenizer.model" || {
  say "training a tokenizer of 4,096 tokens"
  python scripts/train_tokenizer.py "$corpus/python.jsonl" --vocab-size 4096 --out "$corpus/tokenizer.model"
}
say "turning text into tokens (what is there is used again)"
python scripts/prepare_data.py "$corpus/python.jsonl" --tokenizer "$corpus/tokenizer.model" \
  --validation-share 0.05 --out "$corpus"

processes=2
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
if [ "$gpus" -gt 0 ]; then
  processes=1  # the largest power of two that there are GPUs for: it divides the 16 sequences
  while [ $((processes * 2)) -le "$gpus" ] && [ "$processes" -lt 16 ]; do processes=$((processes * 2)); done
fi
say "training on $processes processes"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
bash scripts/launch.sh "$processes" train.py \
  --job.config_file train_configs/quickstart.toml \
  --training.local_batch_size $((16 / processes)) "$@"

newest=$(python scripts/checkpoint.py newest "$run")
say "what $newest writes"
python scripts/generate.py --checkpoint "$newest" --max-new-tokens 160 --temperature 0.7 --seed 1 \
  --prompt $'def read_lines(path):\n    """'
python scripts/draw_loss.py "$run" --out "$run/loss.png"

say "done"
printf '%-12s %s\n' \
  'picture' "$run/loss.png" 'checkpoint' "$newest" 'metrics' "$run/metrics.jsonl" \
  'TensorBoard' "tensorboard --logdir $run/tb" \
  'write more' "python scripts/generate.py --checkpoint $run --prompt 'class Queue:'"
