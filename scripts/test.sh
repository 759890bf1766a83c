#!/usr/bin/env bash
# Installs into .venv, then runs the tests: the fast ones first, then the slow ones.
# Side by side on all cores, with one torch thread each: two threads on a busy core wait for each other.
# Arguments go through to pytest, for example -k resume, -x, -n 0 or -m "not slow".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec .venv/bin/python -m pytest -n "${PYTEST_WORKERS:-auto}" --dist loadgroup --no-loadscope-reorder "$@"
