#!/usr/bin/env bash
# Installs into .venv, then runs the tests: the fast ones first, then the slow ones.
#
#   bash scripts/test.sh               all that say something about the code at hand, of long tests some cases
#   bash scripts/test.sh --fast        without those of which a case takes more than a second
#   bash scripts/test.sh --all         also whole chains, further cases and other projects' engines, as CI does (mark `ci`)
#   bash scripts/test.sh --everything  every case of every test, as each night and before a release (mark `nightly`)
#   bash scripts/test.sh ...           other arguments go to pytest, in one process: -k resume, -x, a file
#
# They run side by side with one torch thread each, since two threads on a busy core wait for each other. There is one
# process more than there are cores: a third of the time one of them waits for a sandbox, a server or a timeout.
# Tests of a file share servers and trained runs: one process runs its fast ones, one its slow ones, the longest files
# first (tests/conftest.py).
#
# A test that fails is run once more, since a busy machine can take a server or a sandbox longer than a test waits; the
# last lines say which ones passed only then. After six of them nothing is run again: then it is not the machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
case "${1:-}" in
"") chosen="not ci and not nightly" cases=(--few-cases) ;;
--fast) chosen="not slow and not ci and not nightly" cases=(--few-cases) ;;
--all) chosen="not nightly" cases=(--few-cases) ;;
--everything) chosen="" cases=() ;;
*) exec .venv/bin/python -m pytest "$@" ;;
esac
cores=$(env -u OMP_NUM_THREADS nproc) # which else counts no more than that variable says
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# Compiled modules are kept, even where the environment asks for none: every process would compile all of them again.
unset PYTHONDONTWRITEBYTECODE
side_by_side=(.venv/bin/python -m pytest -n $((cores + 1)) --dist loadfile --no-loadscope-reorder)
side_by_side+=(--reruns 1 --max-suite-reruns 6 -rR)
if [ "${COVERAGE:-}" = 1 ]; then
  # Of the fast tests only: the slow ones run mostly in processes of their own.
  "${side_by_side[@]}" -m "not slow and not ci" --cov=mafrt --cov=envs --cov=runners --cov=scripts --cov-report=
  echo "coverage of the fast tests: $(.venv/bin/python -m coverage report --format=total) % of the lines"
  [ "${1:-}" != --fast ] || exit 0
  chosen="slow${chosen:+ and $chosen}"
fi
exec "${side_by_side[@]}" "${cases[@]}" -m "$chosen" "${@:2}"
