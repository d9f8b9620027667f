"""Benchmarks against other programs: interleaved runs in separate processes, medians over the rounds.

usage: python -m bench TABLE [OPTIONS]      (in scripts/, or with PYTHONPATH=scripts)

  cpu         inference compared with llama.cpp, CTranslate2 and PyTorch; `page` writes it into docs/dev/speed.md and the book
  cuda        the same on a GPU, compared with PyTorch
  serving     load on `gpt2 serve` compared with llama-server
  batches     `gpt2 serve` with many clients on a GPU compared with batched PyTorch
  training    a training step compared with PyTorch
  busy        training, prefill and decode next to busy loops, compared with PyTorch under the same load
  attention   attention layers compared with PyTorch
  inside      interpretability compared with TransformerLens
  hooked      `HookedTransformer` in Python compared with TransformerLens
  circuits    edge attribution, attribution graphs and dictionaries compared with their authors' code
  evaluation  `gpt2 eval` compared with lm-evaluation-harness
  compression `gpt2 compress` compared with xz, zstd, brotli, bzip3 and zpaq
  tokenize    `gpt2 tokenize` compared with Python's tokenizers
  python      the Python package compared with the program and other packages
  ray         a bulk job on Ray compared with the program
  web         the engine in a browser compared with transformers.js and wllama

scripts/bench/peers.sh installs the other engines. Each table describes itself with --help. `--isa avx2`
restricts all engines to AVX2 on processors with AVX-512.
"""

import importlib
import os
import sys

from bench import common

TABLES = ("cpu", "page", "cuda", "serving", "batches", "training", "busy", "attention", "inside", "hooked", "circuits", "evaluation", "compression", "tokenize", "python", "ray", "web")


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in TABLES:
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    # The worker processes inherit these variables.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(common.SCRIPTS), os.environ.get("PYTHONPATH")]))
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    table = sys.argv.pop(1)
    sys.argv[0] = f"python -m bench {table}"
    sys.exit(importlib.import_module(f"bench.{table}").main())


if __name__ == "__main__":
    main()
