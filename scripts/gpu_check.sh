#!/usr/bin/env bash
# Checks and measures everything that runs on a GPU, in at most nine minutes; results in gpu_check.json.
# The machine needs python3 with torch and transformers. PEFT, TRL and a few small packages come from a folder of wheels that
# `bash scripts/gpu_check.sh --pack` makes on a machine with a network. Arguments go to `mafrt bench gpu`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
wheels=.gpu_wheels
site=.gpu_site

if [ "${1:-}" = --pack ]; then
  rm -rf "$wheels"
  # Without their dependencies, which come with torch and transformers.
  for name in peft accelerate math-verify latex2sympy2-extended antlr4-python3-runtime trl datasets dill multiprocess; do
    python3 -m pip download --quiet --no-deps --dest "$wheels" "$(grep -i "^$name==" constraints.txt)"
  done
  exit
fi

rm -rf "$site"
mkdir -p "$site/mafrt"
# The package as an installation lays it out.
for part in mafrt/* envs runners scripts profiles configs; do
  ln -s "$PWD/$part" "$site/mafrt/$(basename "$part")"
done
# Not by the checkout's own folder, in which there is a `mafrt` without its parts.
ln -s "$PWD/bench" "$site/bench"
if [ -d "$wheels" ]; then
  # An installed package is newer or older than the tested one, but fits the machine's torch.
  for wheel in "$wheels"/*.whl; do
    module=$(basename "$wheel" | cut -d- -f1)
    python3 -c "import importlib.metadata as m, sys; m.version(sys.argv[1])" "$module" 2>/dev/null ||
      python3 -m pip install --quiet --no-index --no-deps --upgrade --target "$site" "$wheel"
  done
fi
export PYTHONPATH="$PWD/$site${PYTHONPATH:+:$PYTHONPATH}"
exec python3 -P -m mafrt.scripts.main bench gpu --output "${OUT:-.}/gpu_check.json" "$@"
