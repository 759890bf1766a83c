#!/usr/bin/env bash
# Trains on several nodes, and goes on from its last checkpoint when SLURM starts it again. From the checkout, in which
# scripts/install_scale.sh was run and which all nodes see under one path, as they do the run's folder:
#
#   sbatch examples/cluster/slurm.sh /shared/runs/one scripts/train_math.py --model_name_or_path Qwen/Qwen3-4B
#
#SBATCH --job-name=mafrt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=12:00:00
#SBATCH --requeue
set -euo pipefail
run=$1 script=$2
shift 2
if compgen -G "$run/checkpoints/step_*" >/dev/null; then
  set -- --load_path "$run"
else
  set -- --run_dir "$run" "$@"
fi
read -r head < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
srun --kill-on-bad-exit=1 .venv/bin/torchrun --nnodes "$SLURM_NNODES" --nproc_per_node "${SLURM_GPUS_ON_NODE:-1}" \
  --rdzv_backend c10d --rdzv_id "$SLURM_JOB_ID" --rdzv_endpoint "$head:29500" "$script" "$@"
