#!/usr/bin/env bash
# When to use it: to find the fastest preset for your model on your 8 GPUs, measured instead of guessed.
#   bash examples/compare_8gpu.sh
# Options go to `toolkit compare`: `--dry-run` shows every trial and starts nothing, `--resume` continues a stopped
# comparison. To try it without GPUs:
#   MODEL="$(python -m toolkit.demo --model)" NUM_PROCESSES=2 bash examples/compare_8gpu.sh --repeats 1
set -euo pipefail
cd "$(dirname "$0")/.."

toolkit compare --preset zero2 --preset zero3 --preset fsdp2 --num-processes "${NUM_PROCESSES:-8}" \
    --output-dir "${OUTPUT_DIR:-runs/compare_8gpu}" "$@" -- \
    --model_name_or_path "${MODEL:-Qwen/Qwen3-8B}" --dataset "${DATASET:-examples/data.jsonl}" \
    --max_seq_length 2048 --per_device_train_batch_size 4 --activation_checkpointing true \
    --learning_rate 1e-5 --max_steps 30
