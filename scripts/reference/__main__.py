"""Writes the reference values and the checkpoints that the tests use.

usage: python -m reference SUITE [OUT] [OPTIONS]      (in scripts/, or with PYTHONPATH=scripts)

Run it in an environment with scripts/requirements.txt. OUT defaults to crates/testing/fixtures. Output is
deterministic: on the same machine a second run changes nothing except what PyTorch names by memory address.
Every file records the versions that produced it. Each suite's module documents its files.
"""

import argparse
import importlib
import pathlib

from reference import common

SUITES = ("layers", "heads", "adapters", "gradients", "training", "generation", "sampling", "formats", "inside", "circuits", "hooked", "dictionaries", "evaluation", "few_shot", "graphs", "vocabularies")


def main():
    parser = argparse.ArgumentParser("python -m reference", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("out", nargs="?", type=pathlib.Path, default=common.FIXTURES)
    parser.add_argument("--checkpoints", type=pathlib.Path,
                        help="for layers and evaluation: folder with third-party checkpoints, tarotble and gpt2-124m-attention, whose outputs "
                        "are written as well (numbers computed from them, never their weights)")
    parser.add_argument("--llama-cpp", type=pathlib.Path,
                        help="for formats: llama.cpp's source folder, with convert_hf_to_gguf.py, conversion/ and gguf-py/")
    parser.add_argument("--only", nargs="+", help="for inside: only these checkpoints")
    arguments = parser.parse_args()
    common.start(arguments.out)
    importlib.import_module(f"reference.{arguments.suite}").export(arguments)


if __name__ == "__main__":
    main()
