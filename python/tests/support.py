"""Reader and writer for the safetensors files in the Rust tests' fixtures."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

FIXTURES = Path(__file__).resolve().parents[2] / "crates" / "testing" / "fixtures"
TYPES = {"F32": np.float32, "I64": np.int64}

Arrays = dict[str, np.ndarray]


def read_safetensors(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Reads the metadata and the arrays of a file."""
    content = path.read_bytes()
    length = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = content[8 + length :]

    def array(entry: dict[str, Any]) -> np.ndarray:
        start, end = entry["data_offsets"]
        return np.frombuffer(body[start:end], TYPES[entry["dtype"]]).reshape(entry["shape"])

    return metadata, {name: array(entry) for name, entry in header.items()}


def write_safetensors(path: Path, arrays: Arrays) -> None:
    """Writes a file of float32 arrays."""
    header, body = {}, b""
    for name, array in arrays.items():
        start = len(body)
        body += np.ascontiguousarray(array, np.float32).tobytes()
        header[name] = {"dtype": "F32", "shape": array.shape, "data_offsets": [start, len(body)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
