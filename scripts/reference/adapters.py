"""LoRA adapters for the tiny checkpoint, saved by PEFT, and the logits of the adapted models.

`adapters` has a folder for each adapter. `adapters/expected.safetensors` contains `ids` (T) and for each adapter its
logits (T, V). `plain+rslora` combines two adapters with weights. `pickled` is `plain` in the older file
format.
"""

import json
import shutil

import peft
import torch
import transformers
from safetensors.torch import load_file

from reference import common
from reference.common import TINY, save

IDS = [5, 299, 17, 130, 8, 201, 77, 1]
# One weight below 1 and one above.
WEIGHTS = {"plain": 0.5, "rslora": 1.25}
SETTINGS = {
    "plain": dict(target_modules=["c_attn"]),
    "patterns": dict(
        r=4, target_modules=["c_attn", "c_proj", "c_fc"], rank_pattern={"attn.c_proj": 2, "h.1.mlp.c_fc": 3},
        alpha_pattern={"c_attn": 7, r"h\.[01]\.mlp\.c_proj": 3},
    ),
    "rslora": dict(r=5, use_rslora=True, target_modules="all-linear"),
    "saved": dict(target_modules=["c_attn"], modules_to_save=["ln_f", "wpe", "mlp"]),
    "bias-all": dict(target_modules=["c_attn", "c_fc"], bias="all"),
    "bias-lora": dict(target_modules=["c_attn"], bias="lora_only", lora_bias=True),
    "regex": dict(target_modules=r".*h\.[02]\.(attn\.c_attn|mlp\.c_fc)|transformer\.h\.1\.mlp\.c_proj", fan_in_fan_out=True),
    "layers": dict(target_modules=["c_proj"], layers_to_transform=[1], exclude_modules=["attn.c_proj"]),
    "untied": dict(target_modules=["wte", "wpe", "c_attn"], modules_to_save=["lm_head"]),
}


def tiny():
    return transformers.GPT2LMHeadModel.from_pretrained(TINY).eval()


@torch.no_grad()
def logits(model):
    return model.eval()(torch.tensor([IDS])).logits[0]


def adapter(name, number, settings):
    """Saves an adapter and returns the logits of the model after PEFT reloads it."""
    torch.manual_seed(number)
    options = {"r": 3, "lora_alpha": 8, "task_type": "CAUSAL_LM", **settings}
    model = peft.get_peft_model(tiny(), peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.15)
    folder = common.place(f"adapters/{name}")
    shutil.rmtree(folder, ignore_errors=True)
    # Skips the embeddings that PEFT would add, which are the base model's.
    model.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink()
    config = folder / "adapter_config.json"
    settings = json.loads(config.read_text())
    settings["base_model_name_or_path"] = "tiny-checkpoint"
    # The order of a set varies between runs.
    settings |= {name: sorted(value) for name, value in settings.items() if isinstance(value, list)}
    config.write_text(json.dumps(settings, indent=2) + "\n")
    return logits(peft.PeftModel.from_pretrained(tiny(), folder))


def pickled(name, target):
    """Copies an adapter, converted to the file format of older PEFT versions."""
    folder, copy = common.place(f"adapters/{name}"), common.place(f"adapters/{target}")
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    (copy / "adapter_model.safetensors").unlink()
    torch.save(load_file(folder / "adapter_model.safetensors"), copy / "adapter_model.bin")


def export(arguments):
    expected = {"ids": torch.tensor(IDS)}
    for number, (name, settings) in enumerate(SETTINGS.items()):
        expected[name] = adapter(name, number, settings)
    pickled("plain", "pickled")
    names = list(WEIGHTS)
    model = peft.PeftModel.from_pretrained(tiny(), common.place(f"adapters/{names[0]}"), adapter_name=names[0])
    model.load_adapter(common.place(f"adapters/{names[1]}"), adapter_name=names[1])
    model.base_model.set_adapter(names)
    for module in model.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for name, weight in WEIGHTS.items():
                if name in module.scaling:
                    module.scaling[name] *= weight
    expected["+".join(names)] = logits(model)
    save("adapters/expected", expected, {**common.VERSIONS, "peft": peft.__version__})
