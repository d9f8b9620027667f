"""GPT-2 checkpoints in TransformerLens 2, which the other circuit programs use."""

import os

os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import torch  # noqa: E402
import transformers  # noqa: E402
import transformer_lens  # noqa: E402
from transformer_lens.pretrained.weight_conversions import convert_gpt2_weights  # noqa: E402


def seeded(folder, tokenizer, seed=5, **sizes):
    """Writes a checkpoint with random weights and the tokenizer from another folder."""
    from reference import common

    words = transformers.AutoTokenizer.from_pretrained(tokenizer)
    sizes = dict(vocab_size=len(words), n_positions=64, n_embd=48, n_layer=3, n_head=4) | sizes
    common.random_gpt2(seed, **sizes).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def hooked(folder, kind=transformer_lens.HookedTransformer, **arguments):
    """Loads a checkpoint without folding or centering any weights."""
    model = transformers.GPT2LMHeadModel.from_pretrained(folder).float().eval()
    sizes = model.config
    config = transformer_lens.HookedTransformerConfig(
        n_layers=sizes.n_layer, d_model=sizes.n_embd, n_ctx=sizes.n_positions, d_head=sizes.n_embd // sizes.n_head, n_heads=sizes.n_head,
        d_mlp=sizes.n_inner or 4 * sizes.n_embd, d_vocab=sizes.vocab_size, act_fn=sizes.activation_function, normalization_type="LN",
        eps=sizes.layer_norm_epsilon, device="cpu", original_architecture="GPT2LMHeadModel", **arguments,
    )
    lens = kind(config, tokenizer=transformers.AutoTokenizer.from_pretrained(folder))
    missing, _ = lens.load_state_dict(convert_gpt2_weights(model, config), strict=False)
    # Only masks and the zero unembedding bias may be missing.
    assert not [name for name in missing if not name.endswith(("mask", "IGNORE", "b_U"))], missing
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        difference = (lens(ids) - model(ids).logits).abs().max().item()
    assert difference < 1e-3, f"TransformerLens' logits differ by {difference}"
    return lens
