"""LoRA adapters saved by PEFT: equal results, and merging with `convert`."""

import json
import pickle
import shutil

import candle_gpt2
import numpy as np
import pytest
from candle_gpt2.hooked import HookedTransformer

from support import FIXTURES, read_safetensors

TINY = FIXTURES / "tiny-checkpoint"
ADAPTERS = FIXTURES / "adapters"
_, EXPECTED = read_safetensors(ADAPTERS / "expected.safetensors")
IDS = EXPECTED["ids"].tolist()


def load(adapter, name=TINY):
    return candle_gpt2.Model.from_pretrained(name, adapter=adapter)


def assert_logits(logits, name):
    np.testing.assert_allclose(np.asarray(logits), EXPECTED[name], atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "patterns", "rslora", "saved", "bias-all", "bias-lora", "regex", "layers", "untied"])
def test_logits_match_peft(name):
    assert_logits(load(ADAPTERS / name).logits(IDS, last_only=False), name)


def test_adapters_are_combined_with_weights():
    both = [(ADAPTERS / "plain", 0.5), f"{ADAPTERS / 'rslora'}=1.25"]
    assert_logits(load(both).logits(IDS, last_only=False), "plain+rslora")


def test_base_model_is_read_from_the_adapter_config(tmp_path):
    shutil.copytree(ADAPTERS / "plain", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(TINY)}))
    model = load(tmp_path / "adapter", name=None)
    assert_logits(model.logits(IDS, last_only=False), "plain")
    again = pickle.loads(pickle.dumps(model))
    assert again.name == model.name
    assert_logits(again.logits(IDS, last_only=False), "plain")
    candle_gpt2.convert(None, tmp_path / "merged", adapter=tmp_path / "adapter")
    assert_logits(candle_gpt2.Model.from_pretrained(tmp_path / "merged").logits(IDS, last_only=False), "plain")


def test_hooked_models_load_adapters():
    hooked = HookedTransformer.from_pretrained_no_processing(TINY, adapter=ADAPTERS / "patterns", tensors="numpy")
    assert_logits(hooked(np.array([IDS]), prepend_bos=False)[0], "patterns")


def test_invalid_adapters_are_rejected():
    with pytest.raises(candle_gpt2.Gpt2Error, match="use `--adapter"):
        candle_gpt2.Model.from_pretrained(ADAPTERS / "plain")
    with pytest.raises(candle_gpt2.Gpt2Error, match="lora_A.weight`: expected"):
        load(ADAPTERS / "plain", name="built-in")
    with pytest.raises(candle_gpt2.Gpt2Error, match="omit the weight"):
        load((ADAPTERS / "saved", 0.5))
