#!/usr/bin/env bash
# Makes .venv in the checkout and installs into it what requirements.txt and constraints.txt pin, and mafrt, editable.
# Does nothing when that is already so. quickstart.sh, test.sh and .ci/run begin with it.
#
#   PYTHON=python3.12 bash scripts/install.sh      choose the interpreter
#   MAFRT_BUILD=cuda bash scripts/install.sh       torch for GPUs where none is seen, as when a container is built
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "error: $*" >&2
  exit 2
}

case "$(uname -sm)" in
MINGW* | MSYS* | CYGWIN*) fail "mafrt does not run on Windows itself; install WSL (wsl --install), and run this in there." ;;
"Darwin x86_64") fail "torch has no builds for Macs with Intel processors any more; run this in a Linux container." ;;
Darwin*) sandboxed=no ;;
*) sandboxed=yes ;;
esac

supported() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' >/dev/null 2>&1; }

no_pip="on Debian and Ubuntu, 'apt-get install python3-venv' mends that."
venv=.venv/bin/python
if "$venv" -c '' 2>/dev/null; then
  supported "$venv" || fail ".venv holds $("$venv" --version 2>&1), but mafrt runs on Python 3.11 to 3.13; move .venv away and run this again."
  # Without pip it is another tool's, or what an interrupted first run has left.
  "$venv" -m pip --version >/dev/null 2>&1 || "$venv" -m ensurepip >/dev/null 2>&1 || fail ".venv has no pip; $no_pip"
else
  found=""
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if supported "$candidate"; then
      found=$candidate
      break
    fi
  done
  [ -n "$found" ] || fail "no Python 3.11, 3.12 or 3.13 was found${PYTHON:+ as $PYTHON}; install one, or name it with PYTHON=/path/to/python3.11."
  echo "Making .venv with $("$found" --version) ..."
  "$found" -m venv .venv || fail "$found cannot make a virtual environment; $no_pip"
fi

# What agents write runs in bubblewrap; everything else works without it.
if [ "$sandboxed" = no ]; then
  echo "note: workflows that run programs of agents need a SandboxFusion server on a Mac (docs/sandbox.md)." >&2
elif ! command -v bwrap >/dev/null; then
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing bubblewrap, in which programs of agents run ..."
    { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y bubblewrap; } >/dev/null ||
      echo "note: bubblewrap could not be installed; for workflows that run programs, 'apt-get install -y bubblewrap' is needed." >&2
  else
    echo "note: found no bubblewrap; for workflows that run programs, have 'apt-get install -y bubblewrap' run as root." >&2
  fi
fi

torch=$(grep -E '^torch==' requirements.txt)
if [ -n "$(nvidia-smi -L 2>/dev/null || true)" ]; then build=cuda; else build=cpu; fi
build=${MAFRT_BUILD:-$build}
case "$build" in cuda | cpu) ;; *) fail "MAFRT_BUILD is '$build'; choose cuda or cpu." ;; esac

# What the installation depends on; a moved checkout counts, since both .venv and the editable install hold its path.
stamp=$({ pwd && echo "$build" && cat scripts/install.sh requirements.txt constraints.txt setup.cfg pyproject.toml; } |
  "$venv" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
if [ "$(cat .venv/mafrt.stamp 2>/dev/null || true)" = "$stamp" ]; then
  exit 0
fi

pip() { "$venv" -m pip install -qq --disable-pip-version-check "$@"; }

# Whether the torch in .venv can use a GPU: some builds of either kind have no "+" in their version.
for_gpus() { [ "$("$venv" -c 'import torch; print(torch.version.cuda or torch.version.hip)' 2>/dev/null || echo None)" != None ]; }

echo "Installing $torch ($build build, once; some minutes with a slow connection) ..."
there=$("$venv" -m pip list --format=freeze --disable-pip-version-check 2>/dev/null | grep -E '^torch==' || true)
case "$there" in "$torch" | "$torch+"*) there=yes ;; *) there=no ;; esac
if [ "$build" = cpu ]; then
  # One that is there stays, whatever its build: a CUDA build computes on a CPU too. An index that knows CPU builds offers
  # one by this name; the others have one build only, which is then taken.
  [ "$there" = yes ] || pip "$torch+cpu" 2>/dev/null || pip "$torch"
elif [ "$there" = no ] || ! for_gpus; then
  # '===' matches the version as text, so that a CPU build lying around is not preferred or kept.
  pip "${torch/==/===}" 2>/dev/null || pip --upgrade "$torch"
  for_gpus || fail "this machine has a GPU, and pip has given a CPU build of $torch; install the CUDA build by '$venv -m pip install --force-reinstall $torch --index-url https://download.pytorch.org/whl/cu130' and run this again, or hide nvidia-smi to stay on the CPU."
fi
echo "Installing transformers, peft, accelerate and the rest ..."
pip -c constraints.txt -r requirements.txt
echo "Installing mafrt itself ..."
pip --no-deps --editable .
echo "$stamp" >.venv/mafrt.stamp
echo "Installed into .venv."
