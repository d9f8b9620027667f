#!/usr/bin/env bash
# Checks and measures this build of gpt2 on a GPU, and prints one report: parity with the CPU and with
# PyTorch's values in three dtypes, completions equal to those of transformers, speed compared with PyTorch.
# Part of the archive made by scripts/gpu_bundle.sh. Needs an NVIDIA driver and a python3 with PyTorch and
# transformers, whose CUDA libraries the program uses. gpu_run.py has the details.
# usage: ./gpu_run.sh [--device cuda:0|cpu] [--out DIR] [--limit SECONDS] [--only STEP,…] [--python PROGRAM]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd -P)

python=python3
[ "${1:-}" = --python ] && python=$2 && shift 2
# PyTorch's CUDA libraries: nvidia/cu13/lib, or nvidia/NAME/lib in older versions. Found without importing
# PyTorch.
libraries=$("$python" - <<'PYTHON'
import importlib.util, pathlib
found = importlib.util.find_spec("torch")
site = pathlib.Path(found.origin).parent.parent if found else pathlib.Path("/nonexistent")
print(":".join(map(str, sorted(site.glob("nvidia/*/lib")))))
PYTHON
)
export LD_LIBRARY_PATH="${libraries}${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"
# Tests look for their fixtures at the path where they were compiled.
compiled_at=$(cat "$here/compiled_at")
if [ "$compiled_at" != "$here" ]; then
  if [ -L "$compiled_at" ] || [ ! -e "$compiled_at" ]; then ln -sfn "$here" "$compiled_at"; fi
fi
exec "$python" "$here/gpu_run.py" "$@"
