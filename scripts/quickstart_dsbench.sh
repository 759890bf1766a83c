#!/usr/bin/env bash
# A team that learns to solve tabular tasks by programs, on two cores and without a download: installs into .venv,
# writes good and careless short programs, lets the shipped teaching base imitate both, and trains it on what comes of
# them. Arguments go through to scripts/train_dsbench.py, for example --seed 2 or --coach none.
# The runs lie in runs/dsbench_start and runs/dsbench; earlier ones are renamed to runs/dsbench.1, .2, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
if [ -z "${PYTHON:-}" ]; then
    bash scripts/install.sh
    .venv/bin/python -c 'import pandas, sklearn, scipy' 2>/dev/null || .venv/bin/python -m pip install -q -e '.[dsbench]'
fi
"$python" scripts/train_dsbench.py --config configs/dsbench.yaml --demonstrations runs/dsbench_demonstrations.jsonl
"$python" scripts/train_sft.py --config configs/dsbench_start.yaml
exec "$python" scripts/train_dsbench.py --config configs/dsbench.yaml --load_path runs/dsbench_start/adapters "$@"
