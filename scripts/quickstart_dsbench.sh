#!/usr/bin/env bash
# A team that learns to solve tabular tasks by programs, on two cores and without a download: installs into .venv,
# writes good and careless short programs, lets the shipped teaching base imitate both, and trains it on what comes of
# them. Programs run in bubblewrap (apt-get install bubblewrap). Arguments go through to scripts/train_dsbench.py, for
# example --seed 2 or --coach none.
# That took forty minutes on two cores that were busy with much other work. The runs lie in runs/dsbench_start and
# runs/dsbench; earlier ones are renamed to runs/dsbench.1, .2, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
python=.venv/bin/python
"$python" scripts/train_dsbench.py --config configs/dsbench.yaml --demonstrations runs/dsbench_demonstrations.jsonl
"$python" scripts/train_sft.py --config configs/dsbench_start.yaml
exec "$python" scripts/train_dsbench.py --config configs/dsbench.yaml --load_path runs/dsbench_start/adapters "$@"
