"""Token files: equal to the program's, and readable by nanoGPT's and llm.c's code."""

import json

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES

TINY = FIXTURES / "tiny-checkpoint"


@pytest.fixture
def text(tmp_path):
    """File to encode."""
    path = tmp_path / "text.txt"
    path.write_text("".join(f"FIRST CITIZEN {line % 7}:\nWhat say you, neighbour {line * 37 % 101}?\n\n" for line in range(300)))
    return path


def test_files_match_the_cli(text, tmp_path, program):
    report = candle_gpt2.tokenize(text, tmp_path / "package", model=TINY, format="llm.c", shard_tokens=700)
    arguments = ["--model", str(TINY), "--format", "llm.c", "--shard-tokens", "700", "--json"]
    expected = json.loads(program("tokenize", str(text), "--out", str(tmp_path / "program"), *arguments))
    assert list(report) == list(expected)
    for name in ["training_tokens", "held_out_tokens", "documents", "shards", "bytes"]:
        assert report[name] == expected[name]
    for name in [*report["shards"], "tokens.json", "tokenizer.json"]:
        assert (tmp_path / "package" / name).read_bytes() == (tmp_path / "program" / name).read_bytes(), name


def test_numpy_reads_the_token_files(text, tmp_path):
    tokenizer = candle_gpt2.Model.from_pretrained(TINY)
    report = candle_gpt2.tokenize(text, tmp_path / "nanogpt", model=TINY, held_out=0)
    # Reads the tokens as nanoGPT's train.py does.
    found = np.memmap(tmp_path / "nanogpt" / "train.bin", dtype=np.uint16, mode="r")
    assert found[:-1].tolist() == tokenizer.encode(text.read_text())
    assert len(found) == report["training_tokens"]
    candle_gpt2.tokenize(text, tmp_path / "llm.c", model=TINY, held_out=0, format="llm.c", dtype="u32")
    # Reads the tokens like llm.c's dataloader.h does for Llama 3.
    header = np.fromfile(tmp_path / "llm.c" / "train_000000.bin", dtype=np.int32, count=256)
    assert header[:3].tolist() == [20240801, 7, len(found)] and not header[3:].any()
    tokens = np.fromfile(tmp_path / "llm.c" / "train_000000.bin", dtype=np.uint32, offset=1024)
    assert np.array_equal(tokens, found)


def test_invalid_options_are_rejected(text, tmp_path):
    with pytest.raises(ValueError, match="format: .*nanogpt.* or .*llm.c"):
        candle_gpt2.tokenize(text, tmp_path / "out", model=TINY, format="npy")
    with pytest.raises(ValueError, match="specify `model` or `tokenizer`"):
        candle_gpt2.tokenize(text, tmp_path / "out")
    with pytest.raises(ValueError, match="`held_out`: expected a fraction"):
        candle_gpt2.tokenize(text, tmp_path / "out", model=TINY, held_out=2)
    assert not (tmp_path / "out").exists()
