"""Writes the reference values of training, computed by PyTorch: gradients of whole models, and ten steps of AdamW.

usage: python scripts/export_training.py

Run in an environment made from scripts/requirements.txt. Output goes to crates/testing/fixtures/training; it is
deterministic, and every file records the versions that made it.
"""

import math

import torch
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from export_reference import random_gpt2, save

CASES = {
    "tied": dict(vocab_size=61, n_positions=19, n_embd=24, n_layer=2, n_head=3),
    "untied": dict(vocab_size=53, n_positions=37, n_embd=20, n_layer=3, n_head=5, n_inner=52, tie_word_embeddings=False),
    "scaled": dict(
        vocab_size=47, n_positions=70, n_embd=32, n_layer=2, n_head=2, activation_function="gelu",
        scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-3,
    ),
}
# The optimizer's case: warm-up, cosine decay to a tenth, clipping that bites, decay of matrices only.
STEPS, WARMUP_STEPS, LEARNING_RATE, FINAL_SHARE, WEIGHT_DECAY, CLIP = 10, 3, 1e-2, 0.1, 0.1, 1.0


def named_parameters(model):
    """Every parameter under the name that the Rust model has for it, linear weights as (out, in)."""
    conv1d = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, Conv1D)}
    for name, parameter in model.named_parameters():
        turn = (lambda tensor: tensor.t()) if name in conv1d else (lambda tensor: tensor)
        yield name.removeprefix("transformer."), parameter, turn


def loss_of(model, ids):
    """Mean cross-entropy of predicting `ids[:, 1:]` from `ids[:, :-1]`."""
    logits = model(ids[:, :-1]).logits
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def model_and_ids(seed, sizes):
    model = random_gpt2(seed, **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    rows = 3
    ids = torch.randint(0, sizes["vocab_size"], (rows, sizes["n_positions"]))
    return model, ids


def export_gradients():
    for seed, (name, sizes) in enumerate(CASES.items()):
        model, ids = model_and_ids(300 + seed, sizes)
        loss = loss_of(model, ids)
        loss.backward()
        tensors = {"ids": ids, "loss": loss}
        for own, parameter, turn in named_parameters(model):
            tensors[f"parameter.{own}"] = turn(parameter)
            tensors[f"gradient.{own}"] = turn(parameter.grad)
        save(f"training/{name}", tensors, config=model.config.to_dict())


def export_optimizer():
    model, ids = model_and_ids(310, dict(vocab_size=59, n_positions=23, n_embd=28, n_layer=2, n_head=4))
    tensors = {"ids": ids}
    tensors |= {f"parameter.{own}": turn(parameter).clone() for own, parameter, turn in named_parameters(model)}
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [dict(params=matrices, weight_decay=WEIGHT_DECAY), dict(params=others, weight_decay=0.0)]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), eps=1e-8)

    def share(done):
        step = done + 1
        if step < WARMUP_STEPS:
            return step / WARMUP_STEPS
        progress = min((step - WARMUP_STEPS) / (STEPS - WARMUP_STEPS), 1.0)
        return FINAL_SHARE + (1 - FINAL_SHARE) * 0.5 * (1 + math.cos(math.pi * progress))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    losses, norms, rates = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, ids)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
        rates.append(torch.tensor(scheduler.get_last_lr()[0], dtype=torch.float64))
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    tensors |= {"losses": torch.stack(losses), "norms": torch.stack(norms), "rates": torch.stack(rates)}
    save("training/optimizer", tensors, config=model.config.to_dict())


if __name__ == "__main__":
    torch.set_num_threads(1)
    export_gradients()
    export_optimizer()
