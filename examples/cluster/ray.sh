#!/usr/bin/env bash
# Trains on a Ray cluster, and goes on from its last checkpoint when it is started again. Run it on every machine, the
# head first, from the checkout in which scripts/install_scale.sh was run and which all see under one path:
#
#   HEAD=10.0.0.1 bash examples/cluster/ray.sh node                                        # on all machines but the head
#   bash examples/cluster/ray.sh /shared/runs/one train_math --model_name_or_path Qwen/Qwen3-4B     # on the head
#
# Whoever reaches a Ray cluster runs code on it: keep its ports (6379, 10001 and the workers') inside a private network.
set -euo pipefail
export RAY_USAGE_STATS_ENABLED=0
if [ "$1" = node ]; then
  exec .venv/bin/ray start --address "$HEAD:6379" --block
fi
run=$1 command=$2
shift 2
.venv/bin/ray status >/dev/null 2>&1 || .venv/bin/ray start --head --port 6379 --include-dashboard false
if compgen -G "$run/checkpoints/step_*" >/dev/null; then
  set -- --load_path "$run"
else
  set -- --run_dir "$run" "$@"
fi
exec .venv/bin/mafrt "$command" "$@" --ray auto
