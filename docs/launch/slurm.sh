#!/usr/bin/env bash
#SBATCH --job-name=vlmdata
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --signal=TERM@180
#SBATCH --requeue
#SBATCH --open-mode=append
# sbatch docs/launch/slurm.sh --data data/cord --hf models/Qwen3.5-9B --tp 2 --sp --out runs/cord
# One task a GPU: Slurm tells every rank itself, 180 s before the time limit, to finish the step and save. That is the
# time a step and a save may take; ask for more with --signal=TERM@SECONDS. The requeued job goes on from there.
set -euo pipefail
out=runs/default
for ((i = 1; i < $#; i++)); do [[ ${!i} == --out ]] && next=$((i + 1)) && out=${!next}; done
resume=()
compgen -G "$out/checkpoints/step-*" >/dev/null && resume=(--resume)
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$HOME/.cache/triton}" # compiled kernels outlive the job
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR MASTER_PORT="${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 20000))}"
code=0
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" vlmdata train "$@" "${resume[@]}" || code=$?
# 143: stopped by TERM, with a checkpoint saved.
[[ $code == 143 ]] && exec scontrol requeue "$SLURM_JOB_ID"
exit "$code"
