#!/usr/bin/env bash
# Packs everything for checking and measuring this project on a GPU into one archive of at most 60 MiB, and
# prints its path. The archive contains the program with CUDA, the tests that run on any device, their
# fixtures, and gpu_run.sh, which runs all of it in at most 450 seconds.
# usage: scripts/gpu_bundle.sh [FILE]   (default: target/gpt2-gpu.tar.xz)
#
# The target machine needs only an NVIDIA driver from 580 on, PyTorch and transformers:
#   tar -xJf gpt2-gpu.tar.xz -C /tmp && /tmp/gpt2-gpu/gpu_run.sh --out report
# (or, without xz: python3 -c 'import tarfile; tarfile.open("gpt2-gpu.tar.xz").extractall("/tmp")'.)
#
# Without a toolkit on the PATH, scripts/cuda_toolchain.sh downloads one. CUDA's libraries are not included:
# the program uses PyTorch's, which must be of CUDA 13 (PyTorch 2.11 from the Python registry has 13.0). The
# first build takes about 20 minutes on two cores, almost all of it for candle's own kernels.
set -euo pipefail
cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-target/gpt2-gpu.tar.xz}")
most=$((60 << 20))

if ! command -v nvcc >/dev/null; then
  [ -e target/cuda-toolchain/env ] || scripts/cuda_toolchain.sh
  . target/cuda-toolchain/env
fi

# Tests look for their fixtures at the path where they were compiled, so compile at a path that every machine
# can provide.
compiled_at=/tmp/gpt2-gpu
if [ -e "$compiled_at" ] && [ ! -L "$compiled_at" ]; then
  echo "$compiled_at exists and is not a link; remove it" >&2
  exit 1
fi
ln -sfn "$PWD" "$compiled_at"
build=(--release --locked --manifest-path "$compiled_at/Cargo.toml")
cargo build "${build[@]}" --package candle-gpt2-cli --features cuda
# The program's package is named again: without it, dependencies would have other features, and candle's
# kernels would be recompiled.
tests=$(cargo test "${build[@]}" --no-run --message-format json-render-diagnostics \
  --package candle-gpt2-cli --package candle-gpt2 --package candle-gpt2-generation --package candle-gpt2-kernels --package candle-gpt2-training \
  --features candle-gpt2-cli/cuda,candle-gpt2/cuda,candle-gpt2-generation/cuda,candle-gpt2-kernels/cuda --test suite --bench step)

work=$(mktemp -d)
trap 'rm -rf "$work" "$out.part"' EXIT
bundle=$work/gpt2-gpu
mkdir -p "$bundle/bin" "$bundle/crates/testing" "$bundle/models"
strip -o "$bundle/bin/gpt2" target/release/gpt2
while read -r name executable; do
  strip -o "$bundle/bin/$name" "$executable"
done < <(python3 -c '
import json, sys
for line in sys.stdin:
    artifact = json.loads(line)
    kind, executable = artifact.get("target", {}).get("kind"), artifact.get("executable")
    if executable and kind == ["test"]:
        crate = artifact["target"]["src_path"].split("/crates/")[1].split("/")[0]
        if crate != "cli": # not a test of the device
            print("test-" + crate, executable)
    elif executable and kind == ["bench"]:
        print("bench-" + artifact["target"]["name"], executable)
' <<<"$tests")
cp -r crates/testing/fixtures "$bundle/crates/testing/"
rm -r "$bundle"/crates/testing/fixtures/formats # none of these tests reads them
cp -r models/stories "$bundle/models/"
# The folder has only model.gguf, and transformers expects safetensors.
"$bundle/bin/gpt2" convert built-in "$bundle/models/stories-f16" --dtype f16
cp scripts/gpu_run.sh scripts/gpu_run.py "$bundle/"
mkdir "$bundle/bench"
cp scripts/bench/{__init__,__main__,batches,cards,clients,common,cuda,serving,training}.py "$bundle/bench/"
echo "$compiled_at" >"$bundle/compiled_at"
{
  echo "gpt2 of commit $(git describe --always --dirty), $(rustc --version)"
  echo "$(nvcc --version | grep release), kernels of candle for ${CUDA_COMPUTE_CAP:-this machine}"
  echo "needs $(readelf -d "$bundle/bin/gpt2" | sed -n 's/.*NEEDED.*\[\(.*\)\]/\1/p' | grep -E 'cu|nv' | paste -sd' ')"
} >"$bundle/build.txt"

mkdir -p "$(dirname "$out")"
# The binaries are similar: a dictionary that spans several of them, with a single thread, halves the output
# of xz -9. Compression takes 4 GB of memory and some minutes; unpacking takes a tenth of the memory. The
# final rename makes the archive appear atomically.
tar -C "$work" --owner=0 --group=0 -cf - gpt2-gpu | xz --lzma2=preset=6,dict=384MiB --threads=1 >"$out.part"
mv "$out.part" "$out"
size=$(stat -c %s "$out")
printf '%s: %d.%d MiB\n' "$out" $((size >> 20)) $(((size * 10 >> 20) % 10))
if [ "$size" -gt "$most" ]; then
  echo "more than $((most >> 20)) MiB" >&2
  exit 1
fi
