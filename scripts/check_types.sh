#!/usr/bin/env bash
# Checks types with mypy as the package is installed: envs, runners and scripts are subpackages of mafrt then.
# In the checkout they stand beside it, where mypy would take every import of mafrt.envs for one of unknown type.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir "$stage/mafrt"
ln -s "$here"/mafrt/* "$here"/{envs,runners,scripts} "$stage/mafrt/"
ln -s "$here/bench" "$stage/bench"
cd "$stage"
"$here/.venv/bin/mypy" --config-file "$here/setup.cfg" --cache-dir "$here/.mypy_cache" mafrt bench
