"""Small dictionaries and a tuned lens in common file formats, as fixtures for our readers.

Files in `dictionaries`:

  saelens-NAME/          cfg.json and sae_weights.safetensors, with the keys of various SAELens versions
  openai-topk.pt         the state that openai/sparse_autoencoder version 5 saves: normalized input, TopK
  openai-relu.pt         the same from version 1, in PyTorch's older format
  tuned-lens/            params.pt and config.json, as tuned-lens saves them
  nested.pt, cycle.pt    nested Python dicts, and a dict that contains itself
  repeated.pt            one tensor under many names
  expected.safetensors   inputs, latents and outputs of all of them

The formulas are implemented here independently, in f64: latents = act((x - b_dec) W_enc + b_enc), x' =
latents W_dec + b_dec. For gated dictionaries, latents = 1[x W_enc + b_gate > 0] relu(x (W_enc exp(r_mag)) +
b_mag). Transcoders do not subtract b_dec, and some add x W_skip^T. A second run changes only the keys in
openai-relu.pt, which are memory addresses.
"""

import json

import torch
from safetensors.torch import save_file

from reference import common

WIDTH, LATENTS, KEPT, LAYERS = 6, 10, 3, 2
# Output size of the transcoders.
OUTPUT = 7
SHAPE = (2, 5, WIDTH)

# The configuration keys that matter in each folder.
#
# `plain` has the keys of the first files (gpt2-small-res-jb), `topk` the keys that preceded SAELens 6.
CONFIGS = {
    "plain": {"hook_point": "blocks.1.hook_resid_pre", "hook_point_layer": 1, "dtype": "torch.float32"},
    "topk": {
        "architecture": "standard",
        "hook_name": "blocks.0.hook_mlp_out",
        "activation_fn_str": "topk",
        "activation_fn_kwargs": {"k": KEPT},
        "apply_b_dec_to_input": False,
        "normalize_activations": "layer_norm",
        "finetuning_scaling_factor": False,
        "hook_head_index": None,
        "prepend_bos": False,
        "model_from_pretrained_kwargs": {},
        "dtype": "float32",
    },
    "jumprelu": {
        "architecture": "jumprelu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "dtype": "float32",
        "metadata": {
            "hook_name": "blocks.1.hook_resid_post",
            "prepend_bos": True,
            "model_from_pretrained_kwargs": {"center_writing_weights": True},
            "sae_lens_version": "6.12.1",
        },
    },
    "rescaled": {
        "architecture": "topk",
        "k": KEPT,
        "rescale_acts_by_decoder_norm": True,
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "hook_z",
        "dtype": "float32",
        "metadata": {"hook_name": "blocks.0.attn.hook_z", "sae_lens_version": "6.12.1"},
    },
}


# Later architectures: gated dictionaries and transcoders.
LATER = {
    "gated": {
        "architecture": "gated",
        "apply_b_dec_to_input": True,
        "metadata": {"hook_name": "blocks.1.hook_resid_pre", "sae_lens_version": "6.12.1"},
    },
    "transcoder": {
        "architecture": "transcoder",
        "apply_b_dec_to_input": False,
        "metadata": {
            "hook_name": "blocks.1.ln2.hook_normalized",
            "hook_name_out": "blocks.1.hook_mlp_out",
            "sae_lens_version": "6.12.1",
        },
    },
    "jumprelu-skip-transcoder": {
        "architecture": "jumprelu_skip_transcoder",
        "apply_b_dec_to_input": False,
        "metadata": {
            "hook_name": "blocks.0.hook_resid_mid",
            "hook_name_out": "blocks.0.hook_mlp_out",
            "sae_lens_version": "6.12.1",
        },
    },
}


def placed(name):
    return common.place(f"dictionaries/{name}")


def randoms(*shape):
    """Returns random numbers that are exact in f32."""
    return torch.randn(*shape).double().float().double()


def normalized(x):
    mean = x.mean(-1, keepdim=True)
    deviation = x.std(-1, keepdim=True)
    return (x - mean) / (deviation + 1e-5), mean, deviation


def largest(before):
    values, indices = before.topk(KEPT, dim=-1)
    return torch.zeros_like(before).scatter(-1, indices, values.relu())


def saelens(expected):
    for name, config in CONFIGS.items():
        folder = placed(f"saelens-{name}")
        folder.mkdir(parents=True, exist_ok=True)
        w_enc, b_enc = randoms(WIDTH, LATENTS), randoms(LATENTS)
        w_dec, b_dec = randoms(LATENTS, WIDTH), randoms(WIDTH)
        threshold = randoms(LATENTS).abs()
        tensors = {"W_enc": w_enc, "b_enc": b_enc, "W_dec": w_dec, "b_dec": b_dec}
        x = 3 * randoms(*SHAPE) + 1
        z, mean, deviation = normalized(x) if config.get("normalize_activations") == "layer_norm" else (x, 0, 1)
        before = (z - b_dec if config.get("apply_b_dec_to_input", True) else z) @ w_enc + b_enc
        if name == "plain":
            latents = before.relu()
        elif name == "topk":
            latents = largest(before)
        elif name == "jumprelu":
            tensors["threshold"] = threshold
            latents = before.relu() * (before > threshold)
        else:
            latents = largest(before * w_dec.norm(dim=-1))
        scaled = latents / w_dec.norm(dim=-1) if name == "rescaled" else latents
        output = (scaled @ w_dec + b_dec) * deviation + mean
        save_file({key: value.float().contiguous() for key, value in tensors.items()}, folder / "sae_weights.safetensors")
        text = json.dumps({"d_in": WIDTH, "d_sae": LATENTS, **config}, indent=1)
        (folder / "cfg.json").write_text(text + "\n")
        expected |= {f"{name}.input": x, f"{name}.latents": latents, f"{name}.output": output}


def later(expected):
    for name, config in LATER.items():
        folder = placed(f"saelens-{name}")
        folder.mkdir(parents=True, exist_ok=True)
        width = WIDTH if name == "gated" else OUTPUT
        tensors = {"W_enc": randoms(WIDTH, LATENTS), "W_dec": randoms(LATENTS, width), "b_dec": randoms(width)}
        x = 3 * randoms(*SHAPE) + 1
        if name == "gated":
            tensors |= {key: randoms(LATENTS) for key in ("b_gate", "b_mag", "r_mag")}
            gate = (x - tensors["b_dec"]) @ tensors["W_enc"] + tensors["b_gate"]
            magnitude = (x - tensors["b_dec"]) @ (tensors["W_enc"] * tensors["r_mag"].exp()) + tensors["b_mag"]
            latents = (gate > 0) * magnitude.relu()
        else:
            tensors["b_enc"] = randoms(LATENTS)
            before = x @ tensors["W_enc"] + tensors["b_enc"]
            latents = before.relu()
        if "jumprelu" in name:
            tensors["threshold"] = randoms(LATENTS).abs()
            latents = latents * (before > tensors["threshold"])
        output = latents @ tensors["W_dec"] + tensors["b_dec"]
        if "skip" in name:
            tensors["W_skip"] = randoms(width, WIDTH)
            output = output + x @ tensors["W_skip"].T
        save_file({key: value.float().contiguous() for key, value in tensors.items()}, folder / "sae_weights.safetensors")
        sizes = {"d_in": WIDTH, "d_sae": LATENTS} | ({} if name == "gated" else {"d_out": width})
        (folder / "cfg.json").write_text(json.dumps({**sizes, "dtype": "float32", **config}, indent=1) + "\n")
        expected |= {f"{name}.input": x, f"{name}.latents": latents, f"{name}.output": output}


def openai(expected):
    for name in ["topk", "relu"]:
        encoder, latent_bias = randoms(LATENTS, WIDTH), randoms(LATENTS)
        decoder, pre_bias = randoms(WIDTH, LATENTS), randoms(WIDTH)
        x = 3 * randoms(*SHAPE) + 1
        z, mean, deviation = normalized(x) if name == "topk" else (x, 0, 1)
        before = (z - pre_bias) @ encoder.T + latent_bias
        latents = largest(before) if name == "topk" else before.relu()
        output = (latents @ decoder.T + pre_bias) * deviation + mean
        state = {
            "pre_bias": pre_bias.float(),
            "latent_bias": latent_bias.float(),
            "stats_last_nonzero": torch.zeros(LATENTS, dtype=torch.long),
            "latents_activation_frequency": torch.ones(LATENTS),
            "latents_mean_square": torch.zeros(LATENTS),
            "encoder.weight": encoder.float(),
            "decoder.weight": decoder.float(),
        }
        if name == "topk":
            state |= {"activation": "TopK", "activation_state_dict": {"k": KEPT, "postact_fn": "ReLU"}}
        torch.save(state, placed(f"openai-{name}.pt"), _use_new_zipfile_serialization=name == "topk")
        expected |= {f"openai-{name}.input": x, f"openai-{name}.latents": latents, f"openai-{name}.output": output}


def tuned_lens(expected):
    folder = placed("tuned-lens")
    folder.mkdir(parents=True, exist_ok=True)
    translators = torch.nn.ModuleList([torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    h = randoms(*SHAPE)
    for layer, translator in enumerate(translators):
        weight, bias = (parameter.detach().double() for parameter in (translator.weight, translator.bias))
        expected[f"tuned-lens.{layer}"] = h + h @ weight.T + bias
    expected["tuned-lens.input"] = h
    torch.save(translators.state_dict(), folder / "params.pt")
    config = {
        "base_model_name_or_path": "small",
        "d_model": WIDTH,
        "num_hidden_layers": LAYERS,
        "bias": True,
        "base_model_revision": None,
        "unembed_hash": None,
        "lens_type": "linear_tuned_lens",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")


def hostile():
    cycle = {"tensor": torch.arange(3.0), "inner": {"tensor": torch.arange(2.0), "flag": True, "rate": 0.5}}
    torch.save(cycle, placed("nested.pt"))
    cycle["inner"]["outer"] = cycle
    torch.save(cycle, placed("cycle.pt"))
    one = torch.arange(1000.0)
    torch.save({f"copy{index}": one for index in range(20)}, placed("repeated.pt"))


def export(_):
    torch.manual_seed(0)
    expected = {}
    saelens(expected)
    openai(expected)
    tuned_lens(expected)
    hostile()
    later(expected)
    tensors = {name: value.float().contiguous() for name, value in sorted(expected.items())}
    save_file(tensors, placed("expected.safetensors"), {"torch": common.VERSIONS["torch"]})
