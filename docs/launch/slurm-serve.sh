#!/usr/bin/env bash
#SBATCH --job-name=vlmdata-serve
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=64
#SBATCH --signal=TERM@60
# sbatch docs/launch/slurm-serve.sh data/cord data/chat
# One server a node. It prints the address for the trainer's job:
#   sbatch docs/launch/slurm.sh --data "$(cat vlmdata-serve-JOB.address)" …
# The nodes' network is taken to be trusted (--insecure); give certificates where it is not (docs/service.md).
set -euo pipefail
port="${PORT:-8815}"
scontrol show hostnames "$SLURM_JOB_NODELIST" | sed "s/\$/:$port/" | paste -sd, | sed 's|^|grpc://|' \
  >"vlmdata-serve-$SLURM_JOB_ID.address"
exec srun --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" vlmdata serve "$@" --host 0.0.0.0 --port "$port" --insecure \
  --workers "${SLURM_CPUS_PER_TASK:-1}" --memory "${MEMORY:-16G}" --json
