#!/usr/bin/env bash
# Installs into .venv, then runs the tests: the fast ones first, then the slow ones.
# They run side by side with one torch thread each, since two threads on a busy core wait for each other. There is one
# process more than there are cores: a third of the time one of them waits for a sandbox, a server or a timeout.
# Tests of a file share servers and trained runs: one process runs its fast ones, one its slow ones, the longest files
# first (tests/conftest.py).
# Arguments go through to pytest, for example -k resume, -x or -m "not slow".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
if [ $# -gt 0 ]; then
  exec .venv/bin/python -m pytest "$@"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Compiled modules are kept, even where the environment asks for none: every process would compile all of them again.
unset PYTHONDONTWRITEBYTECODE
side_by_side=(.venv/bin/python -m pytest -n "$(($(nproc) + 1))" --dist loadfile --no-loadscope-reorder)
if [ "${COVERAGE:-}" = 1 ]; then
  # Of the fast tests only: the slow ones run mostly in processes of their own.
  "${side_by_side[@]}" -m "not slow" --cov=mafrt --cov=envs --cov=runners --cov=scripts --cov-report=
  echo "coverage of the fast tests: $(.venv/bin/python -m coverage report --format=total) % of the lines"
  exec "${side_by_side[@]}" -m slow
fi
exec "${side_by_side[@]}"
