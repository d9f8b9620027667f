"""Cross-attention to encoder hidden states: generation and scores equal to transformers."""

import json
import pickle

import candle_gpt2
import numpy as np
import pytest

from support import FIXTURES, read_safetensors, write_safetensors

FOLDER = FIXTURES / "cross-attention"
FILE = FOLDER / "states.safetensors"
ROWS = json.loads((FOLDER / "expected.json").read_text())["rows"]
STATES = read_safetensors(FILE)[1]["encoder_hidden_states"]


@pytest.fixture(scope="module")
def plain():
    """Model without encoder states."""
    return candle_gpt2.Model.from_pretrained(FOLDER)


def greedy(model):
    completions = model.generate([row["ids"] for row in ROWS], max_new_tokens=16, do_sample=False, details=True)
    return [completion["ids"] for completion in completions]


def models_by_source(plain):
    """Yields a model with encoder states for each kind of source, by name."""
    yield "file", candle_gpt2.Model.from_pretrained(FOLDER, encoder_states=FILE)
    yield "array", candle_gpt2.Model.from_pretrained(FOLDER, encoder_states=STATES)
    yield "list", plain.with_encoder_states(STATES.tolist())
    attending = plain.with_encoder_states(str(FILE))
    yield "path", attending
    yield "pickled path", pickle.loads(pickle.dumps(attending))
    yield "pickled array", pickle.loads(pickle.dumps(plain.with_encoder_states(STATES)))


def test_completions_match_transformers_for_every_states_source(plain):
    for source, model in models_by_source(plain):
        assert greedy(model) == [row["greedy"] for row in ROWS], source
    # The original model does not change.
    assert greedy(plain) == [row["greedy_without"] for row in ROWS]


def test_logits_and_caches_attend_to_encoder_states(plain):
    model = plain.with_encoder_states(STATES)
    ids = ROWS[2]["ids"]
    whole = model.logits(ids, last_only=False)
    assert abs(whole - plain.logits(ids, last_only=False)).max() > 0.1
    cache = model.cache()
    parts = [model.logits(ids[start : start + 4], last_only=False, cache=cache) for start in range(0, len(ids), 4)]
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=0, atol=1e-4)


def test_torch_tensors_are_accepted_as_states(plain):
    torch = pytest.importorskip("torch")
    assert greedy(plain.with_encoder_states(torch.tensor(STATES))) == [row["greedy"] for row in ROWS]


def test_invalid_states_are_rejected(plain, tiny, tmp_path):
    expected = r"expected floating-point numbers of shape \(1, S, 28\), found \(\[9, 28\], F32\)"
    for attach in (plain.with_encoder_states, lambda states: candle_gpt2.Model.from_pretrained(FOLDER, encoder_states=states)):
        with pytest.raises(ValueError, match=expected):
            attach(STATES[0])
    with pytest.raises(ValueError, match="the model has no cross-attention"):
        tiny.with_encoder_states(STATES)
    with pytest.raises(FileNotFoundError):
        plain.with_encoder_states(tmp_path / "none.safetensors")
    other = tmp_path / "other.safetensors"
    write_safetensors(other, {"states": STATES})
    with pytest.raises(candle_gpt2.Gpt2Error, match="expected a tensor `encoder_hidden_states`"):
        plain.with_encoder_states(other)
