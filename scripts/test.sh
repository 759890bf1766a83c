#!/usr/bin/env bash
# Installs into .venv, then runs the tests: the fast ones first, then the slow ones.
# They run side by side with one torch thread each, since two threads on a busy core wait for each other. There is one
# process more than there are cores: a third of the time one of them waits for a sandbox, a server or a timeout.
# Tests of a file share servers and trained runs: one process runs them, the longest files first (tests/conftest.py).
# That is --dist loadfile, since marks of groups (--dist loadgroup) have no effect with pytest 9.2 and pytest-xdist 3.8.
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
# Coverage of the fast tests only: the slow ones run mostly in processes of their own.
coverage=()
if [ "${COVERAGE:-}" = 1 ]; then
  coverage=(--cov=mafrt --cov=envs --cov=runners --cov=scripts --cov-report=)
fi
"${side_by_side[@]}" -m "not slow" "${coverage[@]}"
if [ "${COVERAGE:-}" = 1 ]; then
  echo "coverage of the fast tests: $(.venv/bin/python -m coverage report --format=total) % of the lines"
fi
exec "${side_by_side[@]}" -m slow
