"""Exports a GPT-2 checkpoint for transformers.js: ONNX in f32 and with 8-bit weights.

usage: python scripts/bench/browser/export_onnx.py CHECKPOINT FOLDER     (in the environment that peers_web.sh creates)

Exports with optimum, with the KV cache as an input. Quantizes with onnxruntime's `quantize_dynamic` and the
settings of transformers.js's own conversion.
"""

import pathlib
import shutil
import sys

from onnxruntime.quantization import QuantType, quantize_dynamic
from optimum.exporters.onnx import main_export


def main():
    checkpoint, folder = map(pathlib.Path, sys.argv[1:])
    main_export(str(checkpoint), output=folder, task="text-generation-with-past", do_validation=False)
    weights = folder / "onnx"
    weights.mkdir()
    exported = shutil.move(folder / "model.onnx", weights / "model.onnx")
    options = {"EnableSubgraph": True, "MatMulConstBOnly": True}
    quantize_dynamic(exported, weights / "model_quantized.onnx", weight_type=QuantType.QInt8, extra_options=options)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(checkpoint / name, folder / name)


if __name__ == "__main__":
    main()
