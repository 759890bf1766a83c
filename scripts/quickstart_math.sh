#!/usr/bin/env bash
# A Reasoner and an Actor on word problems: installs into .venv, then trains the shipped teaching base on the shipped
# problems. Arguments go through to scripts/train_math.py, for example --seed 2 or --freeze all.
# The run lies in runs/quickstart_math; an earlier one is renamed to runs/quickstart_math.1, .2, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
exec .venv/bin/python scripts/train_math.py --config configs/quickstart_math.yaml "$@"
