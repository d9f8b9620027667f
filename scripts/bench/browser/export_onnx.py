"""Writes a GPT-2 checkpoint as transformers.js reads it: ONNX in f32, and with weights of 8 bits.

usage: python scripts/bench/browser/export_onnx.py CHECKPOINT FOLDER     (in the environment that peers_web.sh makes)

The exporter is optimum's, with keys and values as inputs; the 8 bits are onnxruntime's `quantize_dynamic` with the settings of
transformers.js's own conversion.
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
