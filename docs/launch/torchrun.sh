#!/usr/bin/env bash
# One node: docs/launch/torchrun.sh 8 --data data/cord --hf models/Qwen3.5-9B --tp 2 --sp --out runs/cord
# Ctrl-C or SIGTERM to torchrun reach every rank, but 30 s later torchrun kills them: a step and a save must take less.
# Where they take longer, send SIGTERM to one of the ranks instead (they agree), or rely on --save-every.
set -euo pipefail
processes=$1
shift
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.cache/triton}" # compiled kernels outlive the job
exec torchrun --nproc-per-node "$processes" --master-addr 127.0.0.1 --master-port "${MASTER_PORT:-29511}" -m vlmdata.train "$@"
