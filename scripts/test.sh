#!/usr/bin/env bash
# Installs into .venv, then runs the tests: the fast ones first, then the slow ones.
# Arguments go through to pytest, for example -k resume, -x, or -m "not slow".
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh
exec .venv/bin/python -m pytest "$@"
