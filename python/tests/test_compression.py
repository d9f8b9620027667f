"""Compression: the same bytes as the program, and lossless round trips."""

import os
import re

import candle_gpt2
import pytest

TEXT = b"ROMEO:\nBut soft, what light through yonder window breaks?\n" * 20 + b"<|endoftext|>\r\n\xff\xfe\0"


def test_round_trip_is_lossless_and_smaller():
    compressed = candle_gpt2.compress(TEXT)
    assert len(compressed) < 0.6 * len(TEXT)
    assert candle_gpt2.decompress(compressed) == TEXT
    for data in [b"", b"x", bytes(range(256)), os.urandom(500)]:
        assert candle_gpt2.decompress(candle_gpt2.compress(data)) == data


def test_files_match_the_cli(tmp_path, program):
    path = tmp_path / "text"
    path.write_bytes(TEXT)
    program("compress", "--keep", "--context", "64", str(path))
    assert (tmp_path / "text.gpt2z").read_bytes() == candle_gpt2.compress(TEXT, context=64)
    path.write_bytes(b"")
    program("decompress", "--force", str(tmp_path / "text.gpt2z"))
    assert path.read_bytes() == TEXT


def test_open_model_compresses_in_its_own_precision():
    model = candle_gpt2.Model.from_pretrained(dtype="f16", kv_dtype="q8")
    compressed = candle_gpt2.compress(TEXT, model)
    assert candle_gpt2.decompress(compressed, model) == TEXT
    # The data records the precision in which decompress opens the model.
    assert candle_gpt2.decompress(compressed) == TEXT
    other = candle_gpt2.Model.from_pretrained(dtype="f32")
    message = "compressed with weights in f16 and a KV cache in q8, but the model is loaded with weights in f32"
    with pytest.raises(candle_gpt2.Gpt2Error, match=message):
        candle_gpt2.decompress(compressed, other)


def test_invalid_options_and_data_are_rejected():
    with pytest.raises(ValueError, match=re.escape("`context`: expected 2 to 512 tokens (the model's limit), found 1")):
        candle_gpt2.compress(TEXT, context=1)
    with pytest.raises(ValueError, match="dtype: expected one of"):
        candle_gpt2.compress(TEXT, dtype="q7")
    with pytest.raises(candle_gpt2.Gpt2Error, match="not in gpt2z format"):
        candle_gpt2.decompress(TEXT)
    compressed = bytearray(candle_gpt2.compress(TEXT))
    with pytest.raises(candle_gpt2.Gpt2Error, match="truncated"):
        candle_gpt2.decompress(bytes(compressed[:-1]))
    compressed[-20] ^= 1
    with pytest.raises(candle_gpt2.Gpt2Error, match="damaged"):
        candle_gpt2.decompress(bytes(compressed))
