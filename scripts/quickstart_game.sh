#!/usr/bin/env bash
# Scout and guesser of `referential` find a code that no prompt can know: installs into .venv, makes the start (legal
# random play, imitated), trains, and compares the team with its baselines on held-out instances.
# Arguments go through to the training, for example --seed 2. Everything lies in runs/quickstart_game; the start is made
# once, and an earlier run is renamed to trained.1, .2, ...
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # the passes are too small for a second thread
out=runs/quickstart_game
.venv/bin/python -m bench.reproduce.games --games referential --only_start --output "$out"
.venv/bin/mafrt train --config configs/game_referential.yaml --load_path "$out/referential_start/adapters" \
  --run_dir "$out/trained" --set_aside "$@"
exec .venv/bin/mafrt evaluate --load_path "$out/trained" --k 4 --tasks 60 --baselines
