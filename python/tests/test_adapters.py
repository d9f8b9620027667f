"""LoRA adapters that PEFT saved are applied as PEFT applies them, and merged by `convert`."""

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


def opened(adapter, name=TINY):
    return candle_gpt2.Model.from_pretrained(name, adapter=adapter)


def close(logits, name):
    np.testing.assert_allclose(np.asarray(logits), EXPECTED[name], atol=1e-4)


@pytest.mark.parametrize("name", ["plain", "patterns", "rslora", "saved", "bias-all", "bias-lora", "regex", "layers", "untied"])
def test_logits_are_those_of_peft(name):
    close(opened(ADAPTERS / name).logits(IDS, last_only=False), name)


def test_several_adapters_have_weights():
    both = [(ADAPTERS / "plain", 0.5), f"{ADAPTERS / 'rslora'}=1.25"]
    close(opened(both).logits(IDS, last_only=False), "plain+rslora")


def test_the_base_model_is_that_of_the_adapter(tmp_path):
    shutil.copytree(ADAPTERS / "plain", tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": str(TINY)}))
    model = opened(tmp_path / "adapter", name=None)
    close(model.logits(IDS, last_only=False), "plain")
    again = pickle.loads(pickle.dumps(model))
    assert again.name == model.name
    close(again.logits(IDS, last_only=False), "plain")
    candle_gpt2.convert(None, tmp_path / "merged", adapter=tmp_path / "adapter")
    close(candle_gpt2.Model.from_pretrained(tmp_path / "merged").logits(IDS, last_only=False), "plain")


def test_hooked_models_take_adapters():
    hooked = HookedTransformer.from_pretrained_no_processing(TINY, adapter=ADAPTERS / "patterns", tensors="numpy")
    close(hooked(np.array([IDS]), prepend_bos=False)[0], "patterns")


def test_what_is_wrong_is_told():
    with pytest.raises(candle_gpt2.Gpt2Error, match="use `--adapter"):
        candle_gpt2.Model.from_pretrained(ADAPTERS / "plain")
    with pytest.raises(candle_gpt2.Gpt2Error, match="lora_A.weight`: expected"):
        opened(ADAPTERS / "plain", name="built-in")
    with pytest.raises(candle_gpt2.Gpt2Error, match="leave the weight out"):
        opened((ADAPTERS / "saved", 0.5))
