"""Writes the reference values that the tests compare with, and the checkpoints that they read.

usage: python -m reference SUITE [OUT] [OPTIONS]      (in scripts/, or with PYTHONPATH=scripts)

Run in an environment made from scripts/requirements.txt. OUT is crates/testing/fixtures by default. It is deterministic: on the
same machine a second run changes nothing, but what PyTorch names by addresses in memory; every file records the versions that made it. The module of each
suite says at its top what it writes.
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
                        help="of layers and evaluation: folder with third-party checkpoints, tarotble and gpt2-124m-attention, whose outputs "
                        "are written as well (numbers computed from them, never their weights)")
    parser.add_argument("--llama-cpp", type=pathlib.Path,
                        help="of formats: llama.cpp's source folder, with convert_hf_to_gguf.py, conversion/ and gguf-py/")
    parser.add_argument("--only", nargs="+", help="of inside: these checkpoints")
    arguments = parser.parse_args()
    common.start(arguments.out)
    importlib.import_module(f"reference.{arguments.suite}").export(arguments)


if __name__ == "__main__":
    main()
