#!/usr/bin/env bash
#SBATCH --job-name=agentrl
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output=%x-%j.log
#
# One process a node, for all its GPUs: `sbatch --nodes=N launch/slurm.sh --config=config:gsm8k --workdir=DIR ...`
# from a repository and with a DIR that all nodes see. A requeued job runs the same command and goes on from the
# last complete checkpoint.
set -euo pipefail
cd -- "${SLURM_SUBMIT_DIR:?run this with sbatch from the repository root}"
bash launch/environment.sh --extra=cuda13
bash third_party/sglang/install.sh
arguments=("$@")
[ "${SLURM_JOB_NUM_NODES:-1}" = 1 ] || arguments+=(--coordinator=auto)
srun --kill-on-bad-exit=1 .venv/bin/python -m launch.train "${arguments[@]}" &
trainer=$!
trap 'kill -TERM "$trainer" 2>/dev/null || true' TERM # SLURM's warning before the time limit
wait "$trainer" || wait "$trainer"
