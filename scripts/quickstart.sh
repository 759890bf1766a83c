#!/usr/bin/env bash
# From nothing but Python to a team that got better: installs into .venv, trains the two agents of 4x4 sudoku from the
# games base, which has seen legal random play and nothing better, and lets the team play held-out grids.
# Arguments go through to the training, for example --seed 2 or --freeze all.
# The run lies in runs/quickstart; an earlier one is renamed to runs/quickstart.1, .2, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case " $* " in *" --run_dir"*)
  echo "quickstart.sh writes into runs/quickstart; for another folder: mafrt train --config configs/game_sudoku.yaml" >&2
  exit 2
  ;;
esac
bash scripts/install.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the passes are too small for a second thread
.venv/bin/mafrt train --config configs/game_sudoku.yaml --run_dir runs/quickstart "$@"
echo "Held-out grids, which training never shows:"
exec .venv/bin/mafrt evaluate --load_path runs/quickstart/best --k 4 --tasks 100
