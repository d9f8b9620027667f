"""Limits of known cards, and the percentage of a limit that a measured speed reaches.

The limits are those of the data sheets. Unknown cards have none, so no percentage is reported for them.
"""

import json
import pathlib
import shutil
import statistics
import subprocess

# Keyed by the name that nvidia-smi reports: memory bandwidth in bytes per second, and dense f16 and bf16 arithmetic in
# operations per second, where a multiply-add counts as two.
CARDS = {"NVIDIA H200": {"bytes_per_s": 4.8e12, "operations_per_s": 990e12}}
BYTES = {"f32": 4, "f16": 2, "bf16": 2}
MEMORY, ARITHMETIC = "of the memory bandwidth", "of the 16-bit arithmetic"


class Shape:
    """Sizes of a GPT-2 that determine its memory traffic and its arithmetic."""

    def __init__(self, width, blocks, vocab_size):
        self.width, self.blocks, self.vocab_size = width, blocks, vocab_size

    @classmethod
    def of(cls, folder):
        """Reads the sizes of a checkpoint."""
        config = json.loads(pathlib.Path(folder, "config.json").read_text())
        return cls(config["n_embd"], config["n_layer"], config["vocab_size"])

    @property
    def block_weights(self):
        return 12 * self.width**2 * self.blocks

    @property
    def head_weights(self):
        return self.vocab_size * self.width

    def decode_bytes(self, dtype, past):
        """Bytes read for a new token after `past` tokens: all weights, keys and values."""
        return BYTES[dtype] * (self.block_weights + self.head_weights + 2 * self.width * self.blocks * past)

    def forward_operations(self, tokens, heads):
        """Operations per token for a pass over `tokens` tokens, `heads` of which pass through the head.

        Attention counts only the visible keys.
        """
        attention = 2 * self.width * self.blocks * (tokens + 1)
        return 2 * self.block_weights + attention + 2 * self.head_weights * heads / tokens

    def training_operations(self, context):
        """Operations per token for a training step, whose backward pass costs as much as two forward passes."""
        return 3 * self.forward_operations(context, context)


def card_name(index=0):
    """Returns the name of an NVIDIA GPU, or an empty string without nvidia-smi."""
    if not shutil.which("nvidia-smi"):
        return ""
    query = ["nvidia-smi", f"--id={index}", "--query-gpu=name", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def index_of(device):
    """Returns the index of a device such as `cuda:1`."""
    return int(device.partition(":")[2] or 0)


def decode_percent(card, shape, dtype, past, tokens_per_s):
    """Returns the percentage of the memory bandwidth, or `None` for an unknown card."""
    if card not in CARDS:
        return None
    return 100 * tokens_per_s * shape.decode_bytes(dtype, past) / CARDS[card]["bytes_per_s"]


def arithmetic_percent(card, dtype, operations, tokens_per_s):
    """Returns the percentage of the 16-bit arithmetic, or `None` for an unknown card or f32."""
    if card not in CARDS or BYTES[dtype] != 2:
        return None
    return 100 * tokens_per_s * operations / CARDS[card]["operations_per_s"]


def spread(values):
    """Returns the median, minimum and maximum over the rounds."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "rounds": len(values)}
