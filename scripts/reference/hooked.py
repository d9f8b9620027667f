"""Reference values from TransformerLens for `HookedTransformer` beyond runs and hooks. In `hooked`:

  NAME.safetensors             weights, each processing step, composition scores, split inputs, ragged batches, stack methods, generation
  gradients/NAME.safetensors   edits with parameters, and the gradients of a weighted sum of the logits w.r.t. the parameters

The checkpoints are those of `inside`, read from the fixtures. TransformerLens runs in compatibility mode in
f64; values are stored in f32.
"""

from unittest import mock

import torch
import transformers
from transformer_lens import patching
from transformer_lens.model_bridge import TransformerBridge

from reference import common, inside

NAMES = ("plain", "inverse_layer")
STEPS = ("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases")
WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O", "W_in", "b_in", "W_out", "b_out", "W_E", "W_pos", "b_U")


def boot(name, **steps):
    """Returns a bridge over a checkpoint in `inside`, in compatibility mode with these steps."""
    folder = common.FIXTURES / "inside" / name
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, attn_implementation="eager").double().eval().requires_grad_(False)
    bridge = TransformerBridge.boot_transformers(
        str(folder), hf_model=model, tokenizer=inside.own_tokenizer(model.config.vocab_size), device="cpu", dtype=torch.float64
    )
    # Folding in 4.3.0 first converts every weight to f32, even f64 weights; the patch prevents this.
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        bridge.enable_compatibility_mode(**steps)
    bridge.cfg.default_prepend_bos = False
    return bridge


def reference_ids(name, bridge):
    """Returns three rows of ids, (3, 7), without the padding id."""
    generator = torch.Generator().manual_seed(len(name))
    return torch.randint(1, bridge.cfg.d_vocab, (3, 7), generator=generator)


def export_steps(name, ids, tensors):
    """Records each processing step alone: the last residual stream, the heads' outputs, the logits."""
    for step in STEPS:
        bridge = boot(name, **{other: other == step for other in STEPS})
        logits, cache = bridge.run_with_cache(ids[:1])
        last = bridge.cfg.n_layers - 1
        tensors[f"step.{step}.logits"] = logits
        tensors[f"step.{step}.resid_post"] = cache[f"blocks.{last}.hook_resid_post"]
        tensors[f"step.{step}.z"] = cache[f"blocks.{last}.attn.hook_z"]
        tensors[f"step.{step}.q"] = cache[f"blocks.{last}.attn.hook_q"]


def export_weights(bridge, tensors):
    tensors |= {name: getattr(bridge, name) for name in WEIGHTS}
    for mode in "QKV":
        scores = bridge.all_composition_scores(mode)
        tensors[f"composition.{mode}"] = getattr(scores, "scores", scores)
    tensors["accumulated_bias"] = bridge.accumulated_bias(1, mlp_input=True)
    tensors["accumulated_bias.attn"] = bridge.accumulated_bias(bridge.cfg.n_layers, include_mlp_biases=False)


def export_switches(bridge, ids, tensors):
    """Records edits at the hook points that are off by default."""
    for name, switch, index in (
        ("blocks.1.hook_q_input", bridge.set_use_split_qkv_input, 1),
        ("blocks.1.hook_k_input", bridge.set_use_split_qkv_input, 0),
        ("blocks.0.hook_v_input", bridge.set_use_split_qkv_input, 2),
        ("blocks.1.hook_attn_in", bridge.set_use_attn_in, 1),
        ("blocks.1.attn.hook_result", bridge.set_use_attn_result, 2),
        ("blocks.0.hook_mlp_in", bridge.set_use_hook_mlp_in, None),
    ):
        switch(True)

        # Shifts one channel, because a norm would cancel a shift of all channels.
        def edit(value, hook, index=index):
            value = value.clone()
            (value if index is None else value[:, :, index])[..., 0] += 1
            return value

        tensors[f"edit.{name}"] = bridge.run_with_hooks(ids, fwd_hooks=[(name, edit)])
        switch(False)


def export_batches(bridge, ids, tensors):
    """Records ragged rows with a mask for left padding and none for right padding, partial runs and losses."""
    lengths = (7, 4, 2)
    left, mask = torch.zeros_like(ids), torch.zeros_like(ids)
    right = ids.clone()
    for row, length in enumerate(lengths):
        left[row, 7 - length :], mask[row, 7 - length :] = ids[row, :length], 1
        right[row, length:] = 0
    logits, cache = bridge.run_with_cache(left, attention_mask=mask)
    tensors["left.logits"], tensors["left.z"] = logits, cache["blocks.1.attn.hook_z"]
    tensors["left.pos_embed"] = cache["hook_pos_embed"]
    tensors["left.loss_per_token"] = bridge(left, attention_mask=mask, return_type="loss", loss_per_token=True)
    tensors["left.loss"] = bridge(left, attention_mask=mask, return_type="loss")
    tensors["right.logits"] = bridge(right)
    tensors["right.loss"] = bridge(right, return_type="loss")
    tensors["stop_at_layer"] = bridge(ids, stop_at_layer=1)
    tensors["stop_at_layer.-1"] = bridge(ids, stop_at_layer=-1)
    tensors["start_at_layer"] = bridge(tensors["stop_at_layer"], start_at_layer=1)
    tensors["generated"] = bridge.generate(ids[:1], max_new_tokens=8, do_sample=False, stop_at_eos=False, verbose=False)


def export_stacks(bridge, ids, tensors):
    """Records stack methods on a batch, with options that `inside` does not cover."""
    _, cache = bridge.run_with_cache(ids)
    direction = bridge.W_U[:, 3] - bridge.W_U[:, 5]
    tensors["full.mlp_input"] = cache.get_full_resid_decomposition(1, mlp_input=True, expand_neurons=False, apply_ln=True, pos_slice=-1)
    tensors["full.onto"] = cache.get_full_resid_decomposition(apply_ln=True, pos_slice=-1, project_output_onto=direction)
    tensors["neurons.onto"] = cache.stack_neuron_results(
        1, neuron_slice=(0, 5), incl_remainder=True, apply_ln=True, project_output_onto=direction
    )
    tensors["neurons.onto_plain"] = cache.stack_neuron_results(-1, pos_slice=2, neuron_slice=[1, 4], project_output_onto=direction)
    tensors["heads.remainder.ln"] = cache.stack_head_results(1, incl_remainder=True, apply_ln=True, pos_slice=(2, 5))
    tensors["decompose.attn"] = cache.decompose_resid(mode="attn", incl_embeds=False, pos_slice=[0, 3])
    stack = cache.decompose_resid()
    tensors["attrs.batch"] = cache.logit_attrs(stack, torch.tensor([1, 2, 4]), torch.tensor([2, 1, 0]))
    tensors["attrs.positions"] = cache.logit_attrs(stack, ids, ids.roll(1, 0))
    last = cache.decompose_resid(pos_slice=-1)
    tensors["attrs.last"] = cache.logit_attrs(last, 3, 4, pos_slice=-1)
    tensors["attrs.row"] = cache.logit_attrs(stack, 3, batch_slice=1)
    tensors["directions"] = bridge.tokens_to_residual_directions(ids)
    head = cache.stack_activation("z")
    tensors["stack_activation"] = head[:, 1]


def export_patches(bridge, ids, tensors):
    """Records small patching results that `inside` does not cover."""
    clean, corrupted = ids[:1, :4], ids[1:2, :4]
    _, cache = bridge.run_with_cache(clean)

    def metric(logits):
        return logits[0, -1, 3] - logits[0, -1, 5]

    for part in ("attn_head_all_pos_every", "attn_head_by_pos_every", "block_every", "attn_head_pattern_dest_src_pos"):
        tensors[f"patch.{part}"] = getattr(patching, f"get_act_patch_{part}")(bridge, corrupted, cache, metric)


# Hook point, edit, and the shape of the edit's parameter as names of configuration sizes.
GRADIENTS = {
    "vector": ("blocks.1.hook_resid_pre", lambda value, a: value + a, ["d_model"]),
    "heads": ("blocks.1.attn.hook_z", lambda value, a: value * a[:, None], ["n_heads"]),
    "keys": ("blocks.0.attn.hook_k", lambda value, a: value * a, ["d_head"]),
    "pattern": ("blocks.1.attn.hook_pattern", lambda value, a: value * a[:, None, None], ["n_heads"]),
    "neurons": ("blocks.0.mlp.hook_pre", lambda value, a: value + a, ["d_mlp"]),
    "mlp": ("blocks.0.hook_mlp_out", lambda value, a: value * (value @ a)[..., None], ["d_model"]),
}


@torch.enable_grad()
def export_gradients(name):
    bridge = boot(name)
    ids, generator = reference_ids(name, bridge)[:2], torch.Generator().manual_seed(3)
    weights = torch.randn(2, 7, bridge.cfg.d_vocab, generator=generator)
    tensors = {"ids": ids.double(), "weights": weights}
    for edit, (point, change, sizes) in GRADIENTS.items():
        parameter = torch.randn(*(getattr(bridge.cfg, size) for size in sizes), generator=generator).requires_grad_()
        hook = (point, lambda value, hook, change=change, parameter=parameter: change(value, parameter))
        (weights * bridge.run_with_hooks(ids, fwd_hooks=[hook])).sum().backward()
        tensors |= {f"{edit}.parameter": parameter.detach(), f"{edit}.gradient": parameter.grad}
    residual = bridge(ids, stop_at_layer=1).detach().requires_grad_()
    (weights * bridge(residual, start_at_layer=1)).sum().backward()
    tensors |= {"start.residual": residual.detach(), "start.gradient": residual.grad}
    common.save(f"hooked/gradients/{name}", tensors, inside.VERSIONS, torch.float32)


@torch.no_grad()
def export(arguments):
    # The tables of the patching functions use the default dtype.
    torch.set_default_dtype(torch.float64)
    for name in NAMES:
        bridge = boot(name)
        ids = reference_ids(name, bridge)
        tensors = {"ids": ids.double()}
        export_steps(name, ids, tensors)
        export_weights(bridge, tensors)
        export_switches(bridge, ids[:1], tensors)
        export_batches(bridge, ids, tensors)
        export_stacks(bridge, ids, tensors)
        export_patches(bridge, ids, tensors)
        common.save(f"hooked/{name}", tensors, inside.VERSIONS, torch.float32)
        export_gradients(name)
