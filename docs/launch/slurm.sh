#!/usr/bin/env bash
#SBATCH --job-name=vlmdata
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --signal=B:TERM@120
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch docs/launch/slurm.sh --data data/cord --hf models/Qwen3.5-9B --weights weights/qwen3.5-9b --tp 2 --sp --out runs/cord
# Before the time limit every rank is told to save (torchrun gives it 30 s: mind --save-every); the requeued job goes on.
set -euo pipefail
out=runs/default
for ((i = 1; i < $#; i++)); do [[ ${!i} == --out ]] && next=$((i + 1)) && out=${!next}; done
resume=()
compgen -G "$out/checkpoints/step-*" >/dev/null && resume=(--resume)
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.cache/triton}"
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun --nnodes "$SLURM_NNODES" --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
  --rdzv-backend c10d --rdzv-endpoint "$head:29511" --rdzv-id "$SLURM_JOB_ID" train.py "$@" "${resume[@]}" &
job=$!
trap 'kill -TERM $job; wait $job; scontrol requeue "$SLURM_JOB_ID"' TERM
wait $job
