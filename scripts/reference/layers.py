"""Layers from PyTorch and the book, small GPT-2s with intermediate values, tiny and third-party checkpoints."""

import math

import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from reference import common
from reference.common import TEXT, checkpoint_tensors, pattern, random_gpt2, save, save_json, train_tokenizer


def fill_pattern(module, scale):
    """Fills parameters from `pattern` in name order, each with its own offset; norm weights stay near 1 and norm biases near 0."""
    for offset, (name, parameter) in enumerate(sorted(module.named_parameters())):
        values = pattern(*parameter.shape, scale=scale, offset=offset * 1000)
        if "norm" in name and name.endswith("weight"):
            values = values + 1.0
        parameter.data.copy_(values)


def export_steps():
    """Writes the initial weights of chapter 3 of "Build a Large Language Model (From Scratch)".

    The tests contain the matrices that the chapter prints.
    """
    tensors = {}

    def linear_heads(prefix, seed, d_in, d_out, heads=1, out_proj=False):
        torch.manual_seed(seed)
        for head in range(heads):
            name = f"{prefix}.heads.{head}" if heads > 1 else prefix
            for projection in ("W_query", "W_key", "W_value"):
                tensors[f"{name}.{projection}.weight"] = nn.Linear(d_in, d_out, bias=False).weight
        if out_proj:
            layer = nn.Linear(d_out, d_out)
            tensors[f"{prefix}.out_proj.weight"], tensors[f"{prefix}.out_proj.bias"] = layer.weight, layer.bias

    torch.manual_seed(123)
    for projection in ("W_query", "W_key", "W_value"):
        tensors[f"self_attention_v1.{projection}"] = torch.rand(3, 2)
    linear_heads("self_attention_v2", 789, 3, 2)
    linear_heads("exercise_3_1", 123, 3, 2)
    linear_heads("causal_attention", 123, 3, 2)
    linear_heads("wrapper", 123, 3, 2, heads=2)
    linear_heads("exercise_3_2", 123, 3, 1, heads=2)
    linear_heads("multi_head_attention", 123, 3, 2, out_proj=True)
    save("steps", tensors)


def export_operations():
    """Records activations, layer norm and their gradients on values that include the tails."""
    x = torch.cat([torch.linspace(-12, 12, 193), torch.tensor([0.0, -0.0, 1e-6, -1e-6, 30.0, -30.0])])
    tensors = {"activation.x": x}
    for name in ("gelu_new", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "silu", "swish", "tanh", "quick_gelu"):
        leaf = x.clone().requires_grad_()
        y = transformers.activations.ACT2FN[name](leaf)
        y.sum().backward()
        tensors[f"activation.{name}"], tensors[f"activation.{name}.grad"] = y, leaf.grad
    torch.manual_seed(7)
    # A large common offset makes one-pass variance lose precision, but not two-pass variance.
    leaf = (torch.randn(2, 5, 24) * 3 + 100).requires_grad_()
    norm = nn.LayerNorm(24, eps=1e-5)
    norm.weight.data, norm.bias.data = torch.randn(24), torch.randn(24)
    y = norm(leaf)
    (y * pattern(2, 5, 24)).sum().backward()
    tensors |= {"layer_norm.x": leaf, "layer_norm.weight": norm.weight, "layer_norm.bias": norm.bias}
    tensors |= {"layer_norm.y": y, "layer_norm.x.grad": leaf.grad}
    tensors |= {"layer_norm.weight.grad": norm.weight.grad, "layer_norm.bias.grad": norm.bias.grad}
    save("operations", tensors)


def export_multi_head_attention():
    """Records nn.MultiheadAttention: self-attention and cross-attention, every mask, each head's weights."""
    torch.manual_seed(11)
    batch, query_len, key_len, d_model, heads = 2, 5, 7, 24, 3
    layer = nn.MultiheadAttention(d_model, heads, batch_first=True)
    nn.init.normal_(layer.in_proj_bias, std=0.3)
    nn.init.normal_(layer.out_proj.bias, std=0.3)
    x, memory = torch.randn(batch, query_len, d_model), torch.randn(batch, key_len, d_model)
    causal = torch.full((query_len, query_len), -torch.inf).triu(1)
    window = torch.where((torch.arange(query_len)[:, None] - torch.arange(query_len)).abs() <= 1, 0.0, -torch.inf)
    additive = torch.randn(query_len, key_len)
    tensors = {"x": x, "memory": memory, "additive": additive}
    tensors |= dict(layer.named_parameters())
    for name, source, mask in (
        ("bidirectional", x, None),
        ("causal", x, causal),
        ("window", x, window),
        ("cross", memory, None),
        ("additive", memory, additive),
    ):
        output, weights = layer(x, source, source, attn_mask=mask, average_attn_weights=False)
        tensors[f"{name}.output"], tensors[f"{name}.weights"] = output, weights
    save("multi_head_attention", tensors)

    # Article 004: separate w_q, w_k, w_v, w_o with biases, no mask.
    torch.manual_seed(12)
    layers = {name: nn.Linear(20, 20) for name in ("W_query", "W_key", "W_value", "out_proj")}
    x = torch.randn(3, 6, 20)
    q, k, v = (layers[name](x).view(3, 6, 4, 5).transpose(1, 2) for name in ("W_query", "W_key", "W_value"))
    weights = torch.softmax(q @ k.transpose(2, 3) / math.sqrt(5), dim=-1)
    output = layers["out_proj"]((weights @ v).transpose(1, 2).reshape(3, 6, 20))
    tensors = {"x": x, "output": output, "weights": weights}
    tensors |= {f"{name}.{part}": getattr(layer, part) for name, layer in layers.items() for part in ("weight", "bias")}
    save("multi_head_attention_004", tensors)


def export_transformer():
    """Records PyTorch's own encoder and decoder layers, and layers of the base model's sizes with `pattern` weights."""
    for activation in ("relu", "gelu"):
        torch.manual_seed(21)
        sizes = dict(d_model=24, nhead=3, dim_feedforward=40, dropout=0.0, activation=activation, batch_first=True)
        encoder, decoder = nn.TransformerEncoderLayer(**sizes), nn.TransformerDecoderLayer(**sizes)
        for module in (encoder, decoder):
            for name, parameter in module.named_parameters():
                if name.endswith("bias") or "norm" in name:
                    nn.init.normal_(parameter, mean=1.0 if "norm" in name and "weight" in name else 0.0, std=0.2)
        source, target = torch.randn(2, 7, 24), torch.randn(2, 5, 24)
        causal = nn.Transformer.generate_square_subsequent_mask(5)
        memory = encoder(source)
        tensors = {"source": source, "target": target, "memory": memory}
        tensors["output"] = decoder(target, memory, tgt_mask=causal)
        tensors |= {f"encoder.{name}": value for name, value in encoder.named_parameters()}
        tensors |= {f"decoder.{name}": value for name, value in decoder.named_parameters()}
        save(f"transformer_{activation}", tensors)

    sizes = dict(d_model=512, nhead=8, dim_feedforward=2048, dropout=0.0, batch_first=True)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(**sizes), 3, enable_nested_tensor=False)
    decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(**sizes), 3)
    fill_pattern(encoder, 0.1)
    fill_pattern(decoder, 0.1)
    source, target = pattern(1, 3, 512, scale=2.0), pattern(1, 4, 512, scale=2.0, offset=77)
    memory = encoder(source)
    output = decoder(target, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(4))
    save("transformer_003", {"memory": memory, "output": output})


# All cases have distinct sizes, so that swapped axes fail in some of them.
GPT2_CASES = {
    "gelu_new": dict(vocab_size=61, n_positions=19, n_embd=24, n_layer=2, n_head=3),
    "gelu": dict(vocab_size=67, n_positions=17, n_embd=20, n_layer=3, n_head=5, activation_function="gelu", n_inner=52),
    "gelu_pytorch_tanh": dict(vocab_size=53, n_positions=23, n_embd=18, n_layer=2, n_head=2, activation_function="gelu_pytorch_tanh"),
    "relu": dict(vocab_size=59, n_positions=13, n_embd=30, n_layer=2, n_head=6, activation_function="relu"),
    "silu": dict(vocab_size=71, n_positions=29, n_embd=16, n_layer=4, n_head=4, activation_function="silu"),
    "tanh": dict(vocab_size=47, n_positions=15, n_embd=22, n_layer=2, n_head=2, activation_function="tanh"),
    "quick_gelu": dict(vocab_size=73, n_positions=21, n_embd=32, n_layer=2, n_head=4, activation_function="quick_gelu"),
    "inverse_layer_scale": dict(vocab_size=43, n_positions=14, n_embd=28, n_layer=4, n_head=7, scale_attn_by_inverse_layer_idx=True),
    "unscaled": dict(vocab_size=41, n_positions=18, n_embd=27, n_layer=2, n_head=3, scale_attn_weights=False),
    "upcast": dict(vocab_size=79, n_positions=16, n_embd=40, n_layer=3, n_head=5, reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True),
    "odd_head": dict(vocab_size=83, n_positions=20, n_embd=35, n_layer=2, n_head=5, n_inner=33),
    "untied": dict(vocab_size=57, n_positions=25, n_embd=36, n_layer=2, n_head=4, tie_word_embeddings=False, n_inner=9),
    "one_layer": dict(vocab_size=89, n_positions=11, n_embd=42, n_layer=1, n_head=3, layer_norm_epsilon=1e-3),
    "one_head": dict(vocab_size=37, n_positions=12, n_embd=26, n_layer=2, n_head=1),
    "relu2": dict(vocab_size=31, n_positions=10, n_embd=20, n_layer=2, n_head=2, activation_function="relu2"),
}


@torch.no_grad()
def export_gpt2():
    """Records seeded small GPT-2s: weights, config, and every intermediate that transformers exposes."""
    for seed, (name, sizes) in enumerate(GPT2_CASES.items()):
        model = random_gpt2(100 + seed, **sizes)
        query_len = min(9, sizes["n_positions"] - 2)
        ids = torch.randint(0, sizes["vocab_size"], (2, query_len))
        output = model(ids, output_hidden_states=True, output_attentions=True)
        tensors = dict(checkpoint_tensors(model))
        tensors |= {"input_ids": ids, "expected.logits": output.logits}
        tensors |= {f"expected.hidden_states.{i}": value for i, value in enumerate(output.hidden_states)}
        tensors |= {f"expected.attentions.{i}": value for i, value in enumerate(output.attentions)}
        save(f"gpt2/{name}", tensors, config=model.config.to_dict())


@torch.no_grad()
def export_checkpoint():
    """Writes a complete Hugging Face folder with its own byte-level tokenizer, and transformers' results."""
    folder = common.place("tiny-checkpoint")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = transformers.GPT2TokenizerFast.from_pretrained(train_tokenizer(folder, 300))
    model = random_gpt2(5, vocab_size=300, n_positions=48, n_embd=28, n_layer=3, n_head=4, n_inner=50)
    model.config.n_ctx = 48
    # Saves no generation defaults, because the expectations below use plain greedy search.
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "tokenizer_config.json").unlink(missing_ok=True)
    (folder / "special_tokens_map.json").unlink(missing_ok=True)
    texts = ["The first citizen", "naïve café 🤗", "日本"]
    long_text = (TEXT * 2).strip()
    save_json("tiny_checkpoint_expected", {
        "greedy": [greedy(model, tokenizer(text)["input_ids"], 20, text=text, tokenizer=tokenizer) for text in texts],
        "score": [score(model, tokenizer(text)["input_ids"], 48, 48, text=text) for text in texts[:2]],
        "score_strided": [
            score(model, tokenizer(long_text)["input_ids"], 48, stride, text=long_text) for stride in (48, 24, 7)
        ],
    })


def greedy(model, ids, new_tokens, text=None, tokenizer=None):
    """Runs transformers' greedy search; `ids` are the new tokens, including a final eos."""
    output = model.generate(
        torch.tensor([ids]), max_new_tokens=new_tokens, do_sample=False, attention_mask=torch.ones(1, len(ids)).long(),
        pad_token_id=0,
    )
    new = output[0, len(ids):].tolist()
    row = {"prompt": text, "prompt_ids": ids, "ids": new}
    if tokenizer is not None:
        row["text"] = tokenizer.decode(new, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return row


def score(model, ids, context, stride, text=None):
    """Returns all tokens' log-probabilities, with the windows from transformers' documentation on perplexity."""
    logprobs, previous_end = [None] * len(ids), 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        logits = model(torch.tensor([ids[begin:end]])).logits[0].double().log_softmax(-1)
        for position in range(max(previous_end, begin + 1), end):
            logprobs[position] = logits[position - begin - 1, ids[position]].item()
        previous_end = end
        if end == len(ids):
            break
    known = [value for value in logprobs if value is not None]
    loss = -sum(known) / len(known)
    return {"text": text, "ids": ids, "stride": stride, "logprobs": logprobs, "loss": loss, "perplexity": math.exp(loss)}


@torch.no_grad()
def export_real(checkpoints):
    """Writes expected outputs of the third-party checkpoints, without their weights."""
    folder = checkpoints / "tarotble"
    model = transformers.GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "aitextgen.tokenizer.json"))
    texts = ["The Fool", "You will", "In love"]
    scored = "The Tower is a card about sudden change, and about the truth that it brings with it."
    save_json("tarotble_expected", {
        "greedy": [greedy(model, tokenizer(text)["input_ids"], 60, text=text, tokenizer=tokenizer) for text in texts],
        "score": score(model, tokenizer(scored)["input_ids"], 64, 64, text=scored),
    })

    weights = load_file(checkpoints / "gpt2-124m-attention" / "model.safetensors")
    config = transformers.GPT2Config()
    config._attn_implementation = "eager"
    x = pattern(2, 9, 768, scale=4.0)
    tensors = {}
    for block in (0, 11):
        own = {key.removeprefix(f"h.{block}."): value for key, value in weights.items() if key.startswith(f"h.{block}.")}
        layer = transformers.models.gpt2.modeling_gpt2.GPT2Attention(config, layer_idx=block).eval()
        layer.load_state_dict({key.removeprefix("attn."): value for key, value in own.items() if key.startswith("attn.")}, strict=False)
        norm = nn.LayerNorm(768, eps=1e-5)
        norm.load_state_dict({key.removeprefix("ln_1."): value for key, value in own.items() if key.startswith("ln_1.")})
        causal = torch.full((9, 9), torch.finfo(torch.float32).min).triu(1)[None, None]
        output, attentions = layer(norm(x), attention_mask=causal)[:2]
        tensors[f"h.{block}.output"], tensors[f"h.{block}.weights"] = output, attentions
    save("gpt2_124m_attention_expected", tensors)


def export(arguments):
    export_steps()
    export_operations()
    export_multi_head_attention()
    export_transformer()
    export_gpt2()
    export_checkpoint()
    if arguments.checkpoints:
        export_real(arguments.checkpoints)
