#!/usr/bin/env bash
#SBATCH --job-name=vlmdata-preprocess
#SBATCH --array=1-16
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=16
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch docs/launch/slurm-preprocess.sh chats.jsonl --tokenizer Qwen/Qwen3.5-9B --out data/chat
# Each task of the array makes one part. When all have ended: vlmdata finish data/chat
# A part that was killed or requeued goes on where it was. To make some again, with the same number of parts as before:
#   PARTS=16 sbatch --array=3,7 docs/launch/slurm-preprocess.sh …
set -euo pipefail
parts="${PARTS:-$SLURM_ARRAY_TASK_COUNT}"
exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" vlmdata preprocess "$@" \
  --part "$SLURM_ARRAY_TASK_ID/$parts" --workers "${SLURM_CPUS_PER_TASK:-1}"
