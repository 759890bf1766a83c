#!/usr/bin/env bash
# Generates the Python code of the protocols; tests compare what is shipped with what this makes. OUT: a folder.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${1:-.}"
"${PYTHON:-python}" -m grpc_tools.protoc -I . --python_out="$out" --pyi_out="$out" \
  mafrt/environment/remote/environment.proto
"${PYTHON:-python}" -m grpc_tools.protoc -I . --python_out="$out" --pyi_out="$out" scripts/tinker_server/wire.proto
