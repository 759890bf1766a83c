#!/usr/bin/env bash
# Generates the Python code of the gRPC protocol; a test compares what is shipped with what this makes. OUT: a folder.
set -euo pipefail
cd "$(dirname "$0")/.."
"${PYTHON:-python}" -m grpc_tools.protoc -I . --python_out="${1:-.}" --pyi_out="${1:-.}" --grpc_python_out="${1:-.}" \
  mafrt/environment/remote/environment.proto
