"""Activations and analyses of small GPT-2s from TransformerLens, as references for our tests.

Files in `inside`, for each checkpoint:

  config.json, model.safetensors   the checkpoint, as transformers saves it
  raw.safetensors                  every hook of the checkpoint's own weights, for the clean prompt
  compat.safetensors               the same in TransformerLens's compatibility mode (folded, centered weights)
  analyses.safetensors, .json      prompts, attributions, lenses, patching, ablation, head scores, paths

All values are computed in f64 and stored in f32, so they are correct to the last digit. The
script stops if TransformerLens, transformers and the hand-written rules disagree.
"""

import importlib.metadata
import json
import math
from unittest import mock

import tokenizers
import torch
import transformers
from transformer_lens import head_detector, patching
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.tools.analysis.attribution_patching import attribution_patch

from reference import common

VERSIONS = common.VERSIONS | {"transformer_lens": importlib.metadata.version("transformer_lens")}

# All cases have distinct sizes, so that swapped axes fail in some of them. `tokens` is the length of the
# prompts. `bos` selects whether they start with id 0. `repeat` is the length of the random sequence that the
# head scores repeat, and `attention_std` is the scale of the query-key-value weights.
CASES = {
    "plain": dict(
        sizes=dict(vocab_size=61, n_positions=19, n_embd=21, n_layer=2, n_head=3),
        tokens=8, bos=True, repeat=6, attention_std=0.3,
    ),
    "inverse_layer": dict(
        sizes=dict(vocab_size=47, n_positions=24, n_embd=20, n_layer=4, n_head=4, n_inner=48, scale_attn_by_inverse_layer_idx=True),
        tokens=9, bos=False, repeat=7, attention_std=0.45,
    ),
    "untied": dict(
        sizes=dict(vocab_size=73, n_positions=17, n_embd=18, n_layer=3, n_head=2, tie_word_embeddings=False),
        tokens=7, bos=True, repeat=7, attention_std=0.35,
    ),
    "gelu": dict(
        sizes=dict(vocab_size=53, n_positions=28, n_embd=33, n_layer=2, n_head=3, activation_function="gelu", n_inner=70),
        tokens=11, bos=False, repeat=9, attention_std=0.25,
    ),
    "relu_inner": dict(
        sizes=dict(vocab_size=97, n_positions=40, n_embd=25, n_layer=3, n_head=5, activation_function="relu", n_inner=37),
        tokens=12, bos=True, repeat=8, attention_std=0.3,
    ),
    "unscaled": dict(
        sizes=dict(vocab_size=83, n_positions=22, n_embd=28, n_layer=2, n_head=4, scale_attn_weights=False, n_inner=45),
        tokens=10, bos=False, repeat=5, attention_std=0.2,
    ),
    "epsilon": dict(
        sizes=dict(vocab_size=113, n_positions=16, n_embd=26, n_layer=3, n_head=2, layer_norm_epsilon=0.05, n_inner=31),
        tokens=9, bos=True, repeat=6, attention_std=0.3,
    ),
}
ACTIVATIONS = ("hook_resid_pre", "hook_resid_mid", "hook_resid_post", "hook_attn_out", "hook_mlp_out")
NORMS = ("hook_scale", "hook_normalized")
ATTENTION = ("hook_q", "hook_k", "hook_v", "hook_attn_scores", "hook_pattern", "hook_z", "hook_result")
DETECTED = ("previous_token_head", "duplicate_token_head", "induction_head")
# Exclusions, in the order of the first axis of every `detect_head.*` tensor.
EXCLUSIONS = {
    "none": {},
    "exclude_bos": dict(exclude_bos=True),
    "exclude_current_token": dict(exclude_current_token=True),
    "both": dict(exclude_bos=True, exclude_current_token=True),
}
NOTES = {
    "computed": "in float64 (the folding of the weights too, which 4.3.0 by itself does in float32), stored in float32",
    "transformer_lens": "all but the entries below come from functions of TransformerLens; hooks come from run_with_cache",
    "by hand": "ablate.*, path.*, attribution.resid_pre, attribution.z*, gradient.*, head_scores.*, lens.kl, lens.entropy, "
    "detect_head.*.abs_unrounded; with hooks on the bridge (4.3.0 has no function for ablation and for path patching with frozen "
    "heads; its attribution patching gives no resid_pre, and agrees on z)",
    "scores": "4.3.0 masks with the lowest finite float in the raw bridge, with -inf in compatibility mode; both are -inf here",
    "unscaled": "4.3.0 ignores scale_attn_weights=false; that checkpoint is run with query weights times sqrt(D), and every "
    "hook_q is divided by sqrt(D) again: the numbers are those of the checkpoint (logits checked against transformers)",
    "accumulated_resid.ln": "4.3.0 recomputes the statistics of ln_final for each row; .cached uses the final scale of the run",
}


def save(case, name, tensors, **metadata):
    common.save(f"inside/{case.name}/{name}", tensors, VERSIONS, torch.float32, notes=NOTES, **metadata)


def save_json(path, values):
    """Writes one entry per line."""
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value, sort_keys=True)}" for key, value in values.items())
    path.write_text("{\n" + lines + "\n}\n")


def difference(actual, expected):
    """Returns the largest difference relative to the largest value; -inf must be at the same positions."""
    infinite = torch.isinf(expected)
    assert torch.equal(torch.isinf(actual), infinite)
    actual, expected = actual.masked_fill(infinite, 0), expected.masked_fill(infinite, 0)
    return ((actual - expected).abs().max() / expected.abs().max().clamp_min(1e-30)).item()


def check(what, value, limit=1e-10):
    assert value <= limit, f"{what}: {value} > {limit}"
    return value


def random_checkpoint(seed, sizes, attention_std):
    """Returns a GPT-2 with all parameters random and large enough to affect the results."""
    generator = torch.Generator().manual_seed(seed)
    # transformers 5 no longer defaults `tie_word_embeddings` to True in the constructor, so always set it.
    sizes = {"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, **sizes}
    config = transformers.GPT2Config(**sizes)
    config._attn_implementation = "eager"
    model = transformers.GPT2LMHeadModel(config).eval().float()
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if ".ln_" in name:
                parameter.copy_(0.25 * noise + (1 if name.endswith("weight") else 0))
            elif "c_attn" in name:
                parameter.copy_(attention_std * noise)
            else:
                parameter.copy_(0.3 * noise)
    return model


def own_tokenizer(vocab_size):
    """Returns a tokenizer with words t0, t1, …; TransformerLens needs one and detect_head needs text."""
    words = tokenizers.models.WordLevel({f"t{index}": index for index in range(vocab_size)}, unk_token="t0")
    backend = tokenizers.Tokenizer(words)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    # With a bos_token, the bridge would try to reload the tokenizer by name.
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="t0", pad_token="t0")


class Case:
    """One checkpoint: its prompts, the raw bridge and the one in compatibility mode."""

    def __init__(self, seed, name, sizes, tokens, bos, repeat, attention_std):
        self.name, self.bos, self.folder = name, bos, common.place(f"inside/{name}")
        self.folder.mkdir(parents=True, exist_ok=True)
        self.model = random_checkpoint(seed, sizes, attention_std)
        self.model.save_pretrained(self.folder)
        (self.folder / "generation_config.json").unlink(missing_ok=True)
        self.model = self.model.double().requires_grad_(False)
        config = self.config = self.model.config
        self.layers, self.heads, self.width = config.n_layer, config.n_head, config.n_embd // config.n_head
        # The bridge always divides by sqrt(D), so queries are scaled up for checkpoints that do not divide.
        self.query_factor = 1.0 if config.scale_attn_weights else math.sqrt(self.width)
        self.raw, self.compat = self.boot(), self.boot()
        # Folding in 4.3.0 first converts every weight to f32, even f64 weights; the patch prevents this.
        with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
            self.compat.enable_compatibility_mode()
        for bridge in (self.raw, self.compat):
            bridge.cfg.default_prepend_bos = False
            bridge.set_use_attn_result(True)

        generator = torch.Generator().manual_seed(seed + 1000)

        def draw(*shape):
            return torch.randint(1, config.vocab_size, shape, generator=generator)

        self.clean = draw(1, tokens)
        if bos:
            self.clean[0, 0] = 0
        self.corrupted = self.clean.clone()
        for position in (2, tokens // 2 + 1):
            self.corrupted[0, position] = 1 + (self.clean[0, position] + 11) % (config.vocab_size - 1)
        assert (self.clean != self.corrupted).sum() == 2
        # The two tokens with the largest difference between the prompts.
        change = (self.reference(self.clean) - self.reference(self.corrupted))[0, -1]
        self.answer, self.wrong = change.argmax().item(), change.argmin().item()
        self.ablation_reference = draw(4, tokens)
        half = draw(2, repeat)
        self.repeated, self.repeat = torch.cat([half, half], dim=1), repeat
        # For detect_head: id 0 first, few distinct ids, and shorter than n_positions, as detect_head requires.
        half = torch.randint(1, 6, (1, min(repeat, (config.n_positions - 2) // 2)), generator=generator)
        self.detected = torch.cat([torch.zeros(1, 1, dtype=torch.int64), half, half], dim=1)

    def boot(self):
        model = random_twin(self.model)
        for block in model.transformer.h:
            block.attn.c_attn.weight[:, : self.config.n_embd] *= self.query_factor
            block.attn.c_attn.bias[: self.config.n_embd] *= self.query_factor
        return TransformerBridge.boot_transformers(
            str(self.folder), hf_model=model, tokenizer=own_tokenizer(self.config.vocab_size), device="cpu", dtype=torch.float64
        )

    def reference(self, ids):
        return self.model(ids).logits

    def metric(self, logits):
        """Returns the logit difference at the last position, one number."""
        return logits[0, -1, self.answer] - logits[0, -1, self.wrong]

    def names(self):
        """Yields TransformerLens's hook names in execution order."""
        yield from ("hook_embed", "hook_pos_embed")
        for layer in range(self.layers):
            block = f"blocks.{layer}."
            yield from (block + name for name in ACTIVATIONS)
            yield from (f"{block}{norm}.{name}" for norm in ("ln1", "ln2") for name in NORMS)
            yield from (f"{block}attn.{name}" for name in ATTENTION)
            yield from (f"{block}mlp.{name}" for name in ("hook_pre", "hook_post"))
        yield from (f"ln_final.{name}" for name in NORMS)

    def hooks(self, bridge):
        """Returns the hook values and the logits from a run on the clean prompt, in this checkpoint's scale."""
        logits, cache = bridge.run_with_cache(self.clean)
        values = {name: cache[name].clone() for name in self.names()}
        # The input to the unembedding: after ln_f's weight and bias in the raw run.
        values |= {"unembed.hook_in": cache["unembed.hook_in"].clone(), "logits": logits}
        for layer in range(self.layers):
            scores = values[f"blocks.{layer}.attn.hook_attn_scores"]
            scores.masked_fill_(scores < -1e30, -math.inf)
            values[f"blocks.{layer}.attn.hook_q"] /= self.query_factor
        return values

    def grid(self, run, *axes):
        """Returns the logit difference of `run(*index)` for every index."""
        indices = torch.cartesian_prod(*(torch.arange(size) for size in axes)).tolist()
        return torch.stack([self.metric(run(*index)) for index in indices]).reshape(axes)


def random_twin(model):
    """Copies the model, because compatibility mode modifies the weights it receives."""
    twin = transformers.GPT2LMHeadModel(model.config).eval().double().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    return twin


def value_constants(case, layer):
    """Returns the constant that the value and ln_1 biases add to every z of a head, because pattern rows sum to 1."""
    weights, block, channels = case.model.state_dict(), f"transformer.h.{layer}.", case.config.n_embd
    from_norm = weights[block + "ln_1.bias"] @ weights[block + "attn.c_attn.weight"][:, 2 * channels :]
    return (weights[block + "attn.c_attn.bias"][2 * channels :] + from_norm).reshape(case.heads, case.width)


def raw_to_compat(case, raw):
    """Computes the values in compatibility mode from a raw run and the raw weights alone."""
    weights = case.model.state_dict()

    def centred(value):
        return value - value.mean(-1, keepdim=True)

    values = dict(raw)
    for name in raw:
        if name.endswith(("embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")) or name == "logits":
            values[name] = centred(raw[name])
    for layer in range(case.layers):
        block = f"blocks.{layer}.attn."
        for name in ("hook_v", "hook_z"):
            values[block + name] = raw[block + name] - value_constants(case, layer)
        output = weights[f"transformer.h.{layer}.attn.c_proj.weight"].reshape(case.heads, case.width, -1)
        values[block + "hook_result"] = centred(torch.einsum("bphd,hdc->bphc", values[block + "hook_z"], output))
    values["unembed.hook_in"] = raw["ln_final.hook_normalized"]
    unembed = weights["lm_head.weight"]
    folded = weights["transformer.ln_f.weight"][:, None] * unembed.T
    folded = folded - folded.mean(0, keepdim=True)
    values["W_U"] = centred(folded)
    values["b_U"] = centred(unembed @ weights["transformer.ln_f.bias"])
    return values


@torch.no_grad()
def export_hooks(case):
    raw, compat = case.hooks(case.raw), case.hooks(case.compat)
    reference = case.reference(case.clean)
    check("raw logits against transformers", difference(raw["logits"], reference))
    check("compat log-probabilities", difference(compat["logits"].log_softmax(-1), reference.log_softmax(-1)))
    expected = {**compat, "W_U": case.compat.W_U, "b_U": case.compat.b_U}
    rules = raw_to_compat(case, raw)
    assert rules.keys() == expected.keys()
    worst = max((difference(rules[name], expected[name]), name) for name in expected)
    check("rules from raw to compat", worst[0])
    patterns = torch.stack([raw[f"blocks.{layer}.attn.hook_pattern"][0] for layer in range(case.layers)])
    print(f"  raw to compat by the rules: largest relative difference {worst[0]:.1e} ({worst[1]}) of {len(expected)} values")
    print(f"  mean of the largest weight of a pattern row: {patterns[:, :, 2:].amax(-1).mean():.2f}")
    ids = case.clean[0].tolist()
    save(case, "raw", raw, processing="raw", ids=ids)
    save(case, "compat", compat, processing="transformer_lens", ids=ids)


def export_attribution(case, cache, tensors, values):
    """Records the decompositions of the last residual, and each row's contribution to the logits."""
    bridge, last = case.compat, dict(pos_slice=-1)
    stacks = {}
    stacks["accumulated_resid"], labels = cache.accumulated_resid(incl_mid=True, return_labels=True)
    values["labels.accumulated_resid"] = labels
    tensors["accumulated_resid.ln"] = cache.accumulated_resid(incl_mid=True, apply_ln=True)
    tensors["accumulated_resid.cached"] = cache.apply_ln_to_stack(stacks["accumulated_resid"], layer=-1)
    tensors["accumulated_resid.layer1.ln"], labels = cache.accumulated_resid(1, incl_mid=True, apply_ln=True, return_labels=True)
    values["labels.accumulated_resid.layer1"] = labels
    stacks["decompose_resid"], values["labels.decompose_resid"] = cache.decompose_resid(return_labels=True)
    tensors["decompose_resid.ln"] = cache.decompose_resid(apply_ln=True)
    tensors["decompose_resid.layer1_mlp_input.ln"], labels = cache.decompose_resid(1, mlp_input=True, apply_ln=True, return_labels=True)
    values["labels.decompose_resid.layer1_mlp_input"] = labels
    stacks["stack_head_results"], labels = cache.stack_head_results(incl_remainder=True, return_labels=True)
    values["labels.stack_head_results"] = labels
    stacks["stack_neuron_results.last"], labels = cache.stack_neuron_results(-1, incl_remainder=True, return_labels=True, **last)
    values["labels.stack_neuron_results"] = labels
    stacks["full_resid_decomposition.last"], labels = cache.get_full_resid_decomposition(return_labels=True, **last)
    values["labels.full_resid_decomposition"] = labels
    tensors |= stacks

    answer, wrong = torch.tensor(case.answer), torch.tensor(case.wrong)
    for name, stack in stacks.items():
        position = last if name.endswith(".last") else {}
        tensors[f"logit_attrs.{name}.answer"] = cache.logit_attrs(stack, answer, **position)
        tensors[f"logit_attrs.{name}.difference"] = cache.logit_attrs(stack, answer, wrong, **position)
    tensors |= {"W_U": bridge.W_U, "b_U": bridge.b_U, "ln_final.hook_scale": cache["ln_final.hook_scale"]}
    bias = bridge.b_U[case.answer] - bridge.b_U[case.wrong]
    for name in ("decompose_resid", "stack_head_results", "stack_neuron_results.last", "full_resid_decomposition.last"):
        rows = tensors[f"logit_attrs.{name}.difference"]
        total = (rows if name.endswith(".last") else rows[..., -1]).sum() + bias
        check(f"sum of {name}", difference(total, torch.tensor(values["logit_difference"]["clean"])))


def export_lens(case, cache, tensors, values):
    lens = cache.logit_lens(positions=None)
    logits = tensors["lens.logits"] = lens.readout.values
    values["labels.lens"] = lens.labels
    watched = cache.logit_lens(positions=None, targets=[case.answer, case.wrong])
    ranks = watched.readout.target_ranks[:, 0]
    values["lens.ranks"] = {"answer": ranks[..., 0].tolist(), "wrong": ranks[..., 1].tolist()}
    own = (logits > logits[..., [case.answer]]).sum(-1)[:, 0]
    assert torch.equal(ranks[..., 0], own)
    # The readout computes its entropy from f32 logits, so record the entropy of the f64 logits and compare the two.
    log_probs = logits.log_softmax(-1)
    tensors["lens.entropy"] = -(log_probs.exp() * log_probs).sum(-1)
    check("entropy", difference(tensors["lens.entropy"], lens.readout.entropy.double()), 1e-5)
    tensors["lens.kl"] = (log_probs[-1].exp() * (log_probs[-1] - log_probs)).sum(-1)
    middle = cache.logit_lens(positions=-1, incl_mid=True)
    tensors["lens.logits.incl_mid.last"], values["labels.lens.incl_mid"] = middle.readout.values, middle.labels
    check("last row of the lens", difference(logits[-1].log_softmax(-1), case.reference(case.clean).log_softmax(-1)))


def export_patching(case, clean_cache, corrupted_cache, tensors, values):
    """Records clean values patched into the corrupted run; score 0 is the corrupted run, 1 the clean one."""
    low, high = values["logit_difference"]["corrupted"], values["logit_difference"]["clean"]

    def score(logits):
        return (case.metric(logits) - low) / (high - low)

    arguments = (case.compat, case.corrupted, clean_cache, score)
    for site in (
        "resid_pre", "resid_mid", "attn_out", "mlp_out", "attn_head_out_by_pos", "attn_head_pattern_by_pos",
        *(f"attn_head_{part}_all_pos" for part in ("out", "q", "k", "v", "pattern")),
    ):
        tensors[f"patch.{site}"] = getattr(patching, f"get_act_patch_{site}")(*arguments)
    for number, (sender, _) in enumerate(path_pairs(case)):
        for part in ("q", "k", "v"):
            tensors[f"direct_path.{number}.{part}"] = patching.get_act_patch_direct_path(
                case.compat, case.corrupted, clean_cache, corrupted_cache, score, *sender, component=part, verbose=False
            )


def export_ablation(case, tensors, values):
    """Records the logit difference of the clean prompt with one head's z replaced."""

    def replaced(bridge, replacement, positions):
        def run(layer, head):
            def edit(z, hook):
                z = z.clone()
                z[:, positions, head] = replacement(layer)[:, positions, head]
                return z

            return bridge.run_with_hooks(case.clean, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", edit)])

        return case.grid(run, case.layers, case.heads)

    everywhere, last = slice(None), slice(-1, None)
    zero = torch.zeros(1, case.clean.shape[1], case.heads, case.width)
    for name, bridge in (("tl_zero", case.compat), ("raw_zero", case.raw)):
        tensors[f"ablate.{name}"] = replaced(bridge, lambda layer: zero, everywhere)
        tensors[f"ablate.{name}.last"] = replaced(bridge, lambda layer: zero, last)
    # Zero ablation in TransformerLens corresponds to the head's constant in the raw run.
    constant = replaced(case.raw, lambda layer: value_constants(case, layer).expand_as(zero), everywhere)
    check("zero of compat by a constant in raw", difference(constant, tensors["ablate.tl_zero"]))
    means = []
    for bridge in (case.compat, case.raw):
        _, cache = bridge.run_with_cache(case.ablation_reference)
        mean = [cache[f"blocks.{layer}.attn.hook_z"].mean(0, keepdim=True) for layer in range(case.layers)]
        means.append(replaced(bridge, lambda layer: mean[layer], everywhere))
    check("mean ablation, raw against compat", difference(*means))
    tensors["ablate.mean"] = means[0]
    values["ablate.reference_ids"] = case.ablation_reference.tolist()


def export_heads(case, tensors, values):
    text = " ".join(f"t{index}" for index in case.detected[0].tolist())
    assert torch.equal(case.compat.to_tokens(text), case.detected)
    values["detect_head"] = {"ids": case.detected[0].tolist(), "exclusions": list(EXCLUSIONS), "abs": "rounded to 3 places"}
    for kind in DETECTED:
        for measure in ("mul", "abs"):
            rows = [
                head_detector.detect_head(case.compat, text, kind, error_measure=measure, **exclusion)
                for exclusion in EXCLUSIONS.values()
            ]
            tensors[f"detect_head.{kind}.{measure}"] = torch.stack(rows)
        # "abs" without TransformerLens's rounding to 3 digits, which may differ between implementations.
        _, cache = case.compat.run_with_cache(case.detected)
        expected = getattr(head_detector, f"get_{kind}_detection_pattern")(case.detected)
        apart = torch.stack([(cache[f"blocks.{layer}.attn.hook_pattern"][0] - expected).abs() for layer in range(case.layers)])
        rows = []
        for exclusion in EXCLUSIONS.values():
            kept = apart.clone()
            if "exclude_bos" in exclusion:
                kept[..., 0] = 0
            if "exclude_current_token" in exclusion:
                kept.diagonal(0, -2, -1).zero_()
            rows.append(1 - kept.sum((-2, -1)) / case.detected.shape[1])
        tensors[f"detect_head.{kind}.abs_unrounded"] = torch.stack(rows)
        rounding = (tensors[f"detect_head.{kind}.abs"] - tensors[f"detect_head.{kind}.abs_unrounded"]).abs().max().item()
        check("rounding of abs", rounding, 5.000001e-4)
    _, cache = case.compat.run_with_cache(case.repeated)
    patterns = torch.stack([cache[f"blocks.{layer}.attn.hook_pattern"] for layer in range(case.layers)])
    for name, offset in (("previous", -1), ("duplicate", -case.repeat), ("induction", 1 - case.repeat)):
        # The axes are layer, batch, head and diagonal; take the mean over the diagonal and the batch.
        tensors[f"head_scores.{name}"] = patterns.diagonal(offset, -2, -1).mean(-1).mean(1)
    values["head_scores"] = {"ids": case.repeated.tolist(), "length": case.repeat}


def gradients(case, ids, names):
    """Returns the gradient of the logit difference at each hook, with respect to an added zero."""
    added = {}

    def add_zero(value, hook, name):
        added[name] = torch.zeros_like(value, requires_grad=True)
        return value + added[name]

    with torch.enable_grad():
        hooks = [(name, lambda value, hook, name=name: add_zero(value, hook, name)) for name in names]
        case.metric(case.compat.run_with_hooks(ids, fwd_hooks=hooks)).backward()
    return {name: added[name].grad for name in names}


def export_attribution_patching(case, clean_cache, corrupted_cache, tensors, values):
    """Records attribution patching's linear estimate of denoising, from one gradient of the corrupted run."""
    span = values["logit_difference"]["clean"] - values["logit_difference"]["corrupted"]
    residuals = [f"blocks.{layer}.hook_resid_pre" for layer in range(case.layers)]
    contexts = [f"blocks.{layer}.attn.hook_z" for layer in range(case.layers)]
    found = gradients(case, case.corrupted, residuals + contexts)
    change = {name: clean_cache[name] - corrupted_cache[name] for name in found}

    # Checks against central differences along the change itself.
    worst, step = 0.0, 1e-5
    for name, gradient in found.items():
        ends = []
        for sign in (1, -1):
            hooks = [(name, lambda value, hook: value + sign * step * change[name])]
            ends.append(case.metric(case.compat.run_with_hooks(case.corrupted, fwd_hooks=hooks)))
        slope = (gradient * change[name]).sum()
        worst = max(worst, ((ends[0] - ends[1]) / (2 * step) - slope).abs().item() / max(slope.abs().item(), 1e-3))
    print(f"  gradients against finite differences: {check('gradients', worst, 1e-5):.1e}")

    tensors |= {f"gradient.{name}": gradient for name, gradient in found.items()}
    effect = {name: found[name] * change[name] / span for name in found}
    tensors["attribution.resid_pre"] = torch.stack([effect[name][0].sum(-1) for name in residuals])
    by_position = torch.stack([effect[name][0].sum(-1) for name in contexts])
    tensors["attribution.z_by_pos"], tensors["attribution.z"] = by_position, by_position.sum(1)

    # TransformerLens's own scores: heads (compared), MLP outputs and the token embedding.
    case.compat.original_model.requires_grad_(True)
    with torch.enable_grad():
        scores = attribution_patch(case.compat, case.clean, case.corrupted, case.metric).node_scores
    case.compat.original_model.requires_grad_(False)
    tokens = case.clean.shape[1]
    theirs, mlp, embed = torch.zeros_like(by_position), torch.zeros(case.layers, tokens), torch.zeros(tokens)
    for node, value in scores.items():
        if node.kind == "attn_head_out":
            theirs[node.layer, node.position, node.head] = value / span
        elif node.kind == "mlp_out":
            mlp[node.layer, node.position] = value / span
        else:
            embed[node.position] = value / span
    check("attribution patching of heads", difference(by_position, theirs))
    check("attribution patching of the embedding", difference(embed, tensors["attribution.resid_pre"][0]))
    tensors["attribution.mlp_out"] = mlp


def path_pairs(case):
    """Returns pairs of sender and receiver, each (layer, head); the receiver is in the last block."""
    end = case.layers - 1
    return [((0, 1), (end, 0)), ((end - 1, case.heads - 1), (end, case.heads - 1))]


def export_paths(case, clean_cache, corrupted_cache, tensors, values):
    """Records the corrupted sender's effect on the clean run, through one receiver only."""

    def frozen(layer, head):
        """Runs the clean prompt with all heads frozen, the sender's z at its corrupted value.

        MLPs and norms are recomputed.
        """
        hooks = []
        for at in range(case.layers):
            name = f"blocks.{at}.attn.hook_z"
            held = clean_cache[name].clone()
            if at == layer:
                held[:, :, head] = corrupted_cache[name][:, :, head]
            hooks.append((name, lambda z, hook, held=held: held))
        with case.compat.hooks(fwd_hooks=hooks):
            return case.compat.run_with_cache(case.clean)

    def received(edits, head=None):
        """Runs the clean prompt with the receiver's inputs (of one head) replaced."""

        def edit(value, hook, new):
            value = value.clone()
            if head is None:
                return new.clone()
            value[:, :, head] = new
            return value

        hooks = [(name, lambda value, hook, new=new: edit(value, hook, new)) for name, new in edits.items()]
        return case.metric(case.compat.run_with_hooks(case.clean, fwd_hooks=hooks)).item()

    final, paths = f"blocks.{case.layers - 1}.hook_resid_post", []
    for number, (sender, (layer, head)) in enumerate(path_pairs(case)):
        logits, cache = frozen(*sender)
        inputs = {part: (f"blocks.{layer}.attn.hook_{part}", cache[f"blocks.{layer}.attn.hook_{part}"][:, :, head]) for part in "qkv"}
        scores = {part: received(dict([entry]), head) for part, entry in inputs.items()}
        scores["qkv"] = received(dict(inputs.values()), head)
        scores["final"] = received({final: cache[final]})
        check("path to the final residual", difference(torch.tensor(scores["final"]), case.metric(logits)))
        paths.append({"sender": list(sender), "receiver": [layer, head], "logit_difference": scores})
        for part, (_, value) in inputs.items():
            tensors[f"path.{number}.{part}"] = value / (case.query_factor if part == "q" else 1.0)
        tensors[f"path.{number}.final"] = cache[final]
    values["paths"] = paths
    tensors["path.to_final"] = case.grid(lambda *sender: frozen(*sender)[0], case.layers, case.heads)


@torch.no_grad()
def export_analyses(case):
    bridge = case.compat
    clean_logits, clean_cache = bridge.run_with_cache(case.clean)
    corrupted_logits, corrupted_cache = bridge.run_with_cache(case.corrupted)
    clean, corrupted = case.metric(clean_logits).item(), case.metric(corrupted_logits).item()
    print(f"  logit difference of {case.answer} and {case.wrong}: clean {clean:.3f}, corrupted {corrupted:.3f}")
    assert clean - corrupted > 0.5
    values = {
        "versions": VERSIONS,
        "notes": NOTES,
        "bos": case.bos,
        "clean_ids": case.clean[0].tolist(),
        "corrupted_ids": case.corrupted[0].tolist(),
        "answer": case.answer,
        "wrong": case.wrong,
        "position": -1,
        "logit_difference": {"clean": clean, "corrupted": corrupted},
    }
    for name, ids in (("clean", case.clean), ("corrupted", case.corrupted)):
        loss = bridge(ids, return_type="loss").item()
        per_token = bridge(ids, return_type="loss", loss_per_token=True)[0]
        own = torch.nn.functional.cross_entropy(case.reference(ids)[0, :-1], ids[0, 1:], reduction="none")
        check("loss per token", difference(per_token, own))
        check("loss", difference(torch.tensor(loss), own.mean()))
        values[f"loss.{name}"] = {"mean": loss, "per_token": per_token.tolist()}
    tensors = {}
    export_attribution(case, clean_cache, tensors, values)
    export_lens(case, clean_cache, tensors, values)
    export_patching(case, clean_cache, corrupted_cache, tensors, values)
    export_ablation(case, tensors, values)
    export_heads(case, tensors, values)
    export_attribution_patching(case, clean_cache, corrupted_cache, tensors, values)
    export_paths(case, clean_cache, corrupted_cache, tensors, values)
    values["shapes"] = {name: list(value.shape) for name, value in tensors.items()}
    save(case, "analyses", tensors, processing="transformer_lens")
    save_json(case.folder / "analyses.json", values)


def export(arguments):
    # The tables of the patching functions use the default dtype.
    torch.set_default_dtype(torch.float64)
    for seed, (name, settings) in enumerate(CASES.items()):
        if name in (arguments.only or CASES):
            print(name)
            case = Case(300 + seed, name, **settings)
            export_hooks(case)
            export_analyses(case)
