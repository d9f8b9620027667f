"""Speed beside other programs: each engine in turn on one machine, in processes of their own, and medians over the rounds.

usage: python -m bench TABLE [OPTIONS]      (in scripts/, or with PYTHONPATH=scripts)

  cpu         inference beside llama.cpp, CTranslate2 and PyTorch; `page` writes it into the book's page on speed
  cuda        the same on a GPU beside PyTorch
  serving     load on `gpt2 serve` beside llama-server
  training    a training step beside PyTorch
  busy        training, prefill and decode beside busy loops, and PyTorch's under the same
  attention   attention layers beside PyTorch
  inside      looking inside beside TransformerLens
  hooked      `HookedTransformer` in Python beside TransformerLens
  circuits    edge attribution, attribution graphs and dictionaries beside their authors' code
  evaluation  `gpt2 eval` beside lm-evaluation-harness
  compression `gpt2 compress` beside xz, zstd, brotli, bzip3 and zpaq
  tokenize    `gpt2 tokenize` beside Python's tokenizers
  python      the Python package beside the program and other packages
  ray         a bulk job on Ray beside the program
  web         the engine in a browser beside transformers.js and wllama

scripts/bench/peers.sh installs the other engines; each table's --help says more. `--isa avx2` holds all engines to AVX2 where the
processor has AVX-512.
"""

import importlib
import os
import sys

from bench import common

TABLES = ("cpu", "page", "cuda", "serving", "training", "busy", "attention", "inside", "hooked", "circuits", "evaluation", "compression", "tokenize", "python", "ray", "web")


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in TABLES:
        print(__doc__)
        sys.exit(0 if "--help" in sys.argv or "-h" in sys.argv else 2)
    # For the processes that measure.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(common.SCRIPTS), os.environ.get("PYTHONPATH")]))
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    table = sys.argv.pop(1)
    sys.argv[0] = f"python -m bench {table}"
    sys.exit(importlib.import_module(f"bench.{table}").main())


if __name__ == "__main__":
    main()
