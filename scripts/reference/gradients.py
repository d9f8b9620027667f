"""Logits and gradients of GPT-2s with less common heads and with cross-attention.

Writes `gradients` (small models with distinct sizes, and the gradient of every parameter) and
`cross-attention` (a checkpoint folder, encoder hidden states, and transformers' scores and completions
with these states).
"""

import shutil

import torch
import transformers
from safetensors.torch import save_file

from reference import common
from reference.common import TINY, WITHOUT_DROPOUT, named_parameters, pattern, save, save_json, seeded

# All models have distinct sizes. Row lengths vary from one token to the whole context.
HEADS = {
    "sequence": (transformers.GPT2ForSequenceClassification, [7, 1, 19, 12], dict(
        vocab_size=61, n_positions=19, n_embd=24, n_layer=2, n_head=3, num_labels=5, scale_attn_by_inverse_layer_idx=True)),
    "sequence_padded": (transformers.GPT2ForSequenceClassification, [4, 17, 2, 9, 3], dict(
        vocab_size=67, n_positions=17, n_embd=20, n_layer=3, n_head=5, num_labels=1, pad_token_id=3, n_inner=52,
        activation_function="gelu", scale_attn_weights=False)),
    "token": (transformers.GPT2ForTokenClassification, [5, 23, 1], dict(
        vocab_size=53, n_positions=23, n_embd=18, n_layer=4, n_head=2, num_labels=7, classifier_dropout=0.0,
        tie_word_embeddings=False, layer_norm_epsilon=1e-3)),
    "double": (transformers.GPT2DoubleHeadsModel, [13, 6, 2], dict(
        vocab_size=59, n_positions=13, n_embd=30, n_layer=2, n_head=6, summary_first_dropout=0.0, summary_activation="tanh")),
    "double_mean": (transformers.GPT2DoubleHeadsModel, [3, 8], dict(
        vocab_size=47, n_positions=15, n_embd=22, n_layer=1, n_head=1, summary_first_dropout=0.0, summary_type="mean",
        tie_word_embeddings=False)),
    "double_first": (transformers.GPT2DoubleHeadsModel, [3, 4], dict(
        vocab_size=41, n_positions=10, n_embd=16, n_layer=1, n_head=4, summary_first_dropout=0.0, summary_type="first")),
    "double_last": (transformers.GPT2DoubleHeadsModel, [5, 4], dict(
        vocab_size=43, n_positions=11, n_embd=14, n_layer=1, n_head=2, summary_first_dropout=0.0, summary_type="last")),
}
# Batch, tokens, encoder states (a single set if shared by all rows).
CROSS = {
    "cross": ((2, 9, 5), False, dict(
        vocab_size=63, n_positions=21, n_embd=32, n_layer=3, n_head=4, scale_attn_by_inverse_layer_idx=True)),
    "cross_shared": ((3, 6, 11), True, dict(
        vocab_size=71, n_positions=14, n_embd=26, n_layer=2, n_head=1, scale_attn_weights=False, n_inner=33,
        tie_word_embeddings=False)),
    "cross_upcast": ((1, 8, 3), False, dict(
        vocab_size=73, n_positions=16, n_embd=28, n_layer=2, n_head=7, reorder_and_upcast_attn=True,
        activation_function="relu")),
}
CHECKPOINT = dict(vocab_size=300, n_positions=48, n_embd=28, n_layer=3, n_head=4, n_inner=50, bos_token_id=0, eos_token_id=0)


def loss_of(tensors, name, values):
    """Records values and returns the loss that the tests differentiate: a weighted sum of their squares."""
    tensors[f"expected.{name}"] = values
    return (values**2 * pattern(*values.shape, scale=2.0, offset=11)).sum()


def finish(name, model, tensors, loss, **leaves):
    loss.backward()
    tensors |= {"loss": loss} | {f"gradient_of.{leaf}": tensor.grad for leaf, tensor in leaves.items()}
    for own, parameter, turn in named_parameters(model):
        tensors[f"parameter.{own}"] = turn(parameter)
        tensors[f"gradient.{own}"] = turn(parameter.grad)
    save(f"gradients/{name}", tensors, config=model.config.to_dict() | {"architectures": [type(model).__name__]})


def config_of(sizes):
    config = transformers.GPT2Config(**{"tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0, **WITHOUT_DROPOUT, **sizes})
    config._attn_implementation = "eager"
    return config


def rows_of(name, lengths, sizes):
    rows = [torch.randint(4, sizes["vocab_size"], (length,)) for length in lengths]
    if name == "sequence_padded":
        # Rows with the padding token at the end, in every position, and in the middle.
        pad = sizes["pad_token_id"]
        rows[0][2:], rows[2][:], rows[3][4] = pad, pad, pad
    return rows


def export_heads():
    for seed, (name, (kind, lengths, sizes)) in enumerate(HEADS.items()):
        model = seeded(kind(config_of(sizes)), 500 + seed)
        rows = rows_of(name, lengths, sizes)
        tensors = {"ids": torch.cat(rows), "lengths": torch.tensor(lengths)}
        if kind is transformers.GPT2DoubleHeadsModel:
            places = [min(2 * place, length - 1) for place, length in enumerate(lengths)]
            tensors["places"] = torch.tensor(places)
            # Passed as (choices, tokens): with a batch axis, only `cls_index` selects a token; the other summary types
            # select a choice.
            outputs = [model(row[None], mc_token_ids=torch.tensor([place])) for row, place in zip(rows, places)]
            loss = loss_of(tensors, "logits", torch.cat([output.logits[0] for output in outputs]))
            loss = loss + loss_of(tensors, "choices", torch.cat([output.mc_logits for output in outputs]))
        elif name == "sequence_padded":
            # In one batch, as callers with a padding token send them.
            longest = max(lengths)
            padded = torch.stack([torch.nn.functional.pad(row, (0, longest - len(row)), value=3) for row in rows])
            mask = torch.stack([(torch.arange(longest) < length).long() for length in lengths])
            loss = loss_of(tensors, "logits", model(padded, attention_mask=mask).logits)
        else:
            loss = loss_of(tensors, "logits", torch.cat([model(row[None]).logits for row in rows], dim=-2)
                           if name == "token" else torch.cat([model(row[None]).logits for row in rows]))
        finish(name, model, tensors, loss)


def export_cross_attention():
    for seed, (name, ((batch, tokens, states), is_shared, sizes)) in enumerate(CROSS.items()):
        model = seeded(transformers.GPT2LMHeadModel(config_of(dict(sizes, add_cross_attention=True))), 520 + seed)
        ids = torch.randint(0, sizes["vocab_size"], (batch, tokens))
        given = torch.randn(1 if is_shared else batch, states, sizes["n_embd"], requires_grad=True)
        tensors = {"ids": ids, "states": given}
        with torch.no_grad():
            tensors["expected.without"] = model(ids).logits
        repeated = given.repeat(batch if is_shared else 1, 1, 1)
        loss = loss_of(tensors, "logits", model(ids, encoder_hidden_states=repeated).logits)
        finish(name, model, tensors, loss, states=given)


@torch.no_grad()
def export_checkpoint():
    """Writes a checkpoint with cross-attention, and transformers' results with encoder hidden states."""
    folder = common.place("cross-attention")
    shutil.rmtree(folder, ignore_errors=True)
    model = seeded(transformers.GPT2LMHeadModel(config_of(dict(CHECKPOINT, add_cross_attention=True))), 530)
    model.generation_config = transformers.GenerationConfig(bos_token_id=0, eos_token_id=0, pad_token_id=0)
    model.save_pretrained(folder)
    shutil.copy(TINY / "tokenizer.json", folder)
    states = torch.randn(1, 9, CHECKPOINT["n_embd"])
    save_file({"encoder_hidden_states": states}, folder / "states.safetensors")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))

    def generated(text, states, **options):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        given = {} if states is None else {"encoder_hidden_states": states}
        with_mask = dict(attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16, **given)
        return model.generate(ids, **with_mask, **options)[0, ids.shape[1]:].tolist()

    def log_probabilities(text, states):
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        logits = model(ids, encoder_hidden_states=states).logits[0, :-1].double()
        return torch.log_softmax(logits, -1).gather(1, ids[0, 1:, None])[:, 0].tolist()

    texts = ["The first citizen", "naïve café 🤗", "we are accounted poor citizens"]
    rows = [{
        "text": text, "ids": tokenizer(text)["input_ids"], "greedy": generated(text, states),
        "greedy_without": generated(text, None), "beams": generated(text, states, num_beams=3, early_stopping=True),
        "log_probabilities": log_probabilities(text, states), "log_probabilities_without": log_probabilities(text, None),
    } for text in texts]
    save_json("cross-attention/expected", {"rows": rows})
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def export(_):
    export_heads()
    export_cross_attention()
    export_checkpoint()
