"""Training in PyTorch: gradients of whole models, optimizer steps and fine-tuning, in `training`.

Runs ten steps of AdamW and of Muon, and ten steps of each kind of fine-tuning on labels and on answers
(adapters with PEFT).
"""

import math
from unittest import mock

import peft
import torch
import transformers
from torch import nn
from torch.nn import functional

from reference.common import WITHOUT_DROPOUT, named_parameters, random_gpt2, save, seeded

CASES = {
    "tied": dict(vocab_size=61, n_positions=19, n_embd=24, n_layer=2, n_head=3),
    "untied": dict(vocab_size=53, n_positions=37, n_embd=20, n_layer=3, n_head=5, n_inner=52, tie_word_embeddings=False),
    "scaled": dict(
        vocab_size=47, n_positions=70, n_embd=32, n_layer=2, n_head=2, activation_function="gelu",
        scale_attn_by_inverse_layer_idx=True, layer_norm_epsilon=1e-3,
    ),
}
# Optimizer case: warm-up, cosine decay to a tenth, clipping that takes effect, weight decay for matrices only.
STEPS, WARMUP_STEPS, LEARNING_RATE, FINAL_SHARE, WEIGHT_DECAY, CLIP = 10, 3, 1e-2, 0.1, 0.1, 1.0
# Fine-tuning: task; trained weights (all, the last N blocks, or adapters of these layers); label weights;
# sizes.
TASKS = {
    "classify_all": ("classify", None, None, dict(vocab_size=51, n_positions=17, n_embd=24, n_layer=2, n_head=3, num_labels=4)),
    "classify_weighted": (
        "classify", None, [0.5, 2.0, 1.25],
        dict(vocab_size=43, n_positions=13, n_embd=20, n_layer=3, n_head=5, num_labels=3, n_inner=36)),
    "classify_blocks": ("classify", 1, None, dict(vocab_size=57, n_positions=15, n_embd=28, n_layer=3, n_head=2, num_labels=5)),
    "classify_adapters": (
        "classify", ["c_attn", "c_proj"], None,
        dict(vocab_size=37, n_positions=18, n_embd=16, n_layer=2, n_head=4, num_labels=2)),
    "answer_all": ("answer", None, None, dict(vocab_size=49, n_positions=22, n_embd=18, n_layer=2, n_head=3)),
    "answer_blocks": (
        "answer", 2, None,
        dict(vocab_size=41, n_positions=14, n_embd=30, n_layer=4, n_head=6, tie_word_embeddings=False)),
    "answer_adapters": ("answer", ["c_fc", "c_attn"], None, dict(vocab_size=39, n_positions=26, n_embd=12, n_layer=3, n_head=1)),
}
ROWS, BATCH_SIZE, ACCUMULATE, LORA_RANK, LORA_ALPHA = 11, 3, 2, 2, 5


def loss_of(model, ids):
    """Returns the mean cross-entropy of predicting `ids[:, 1:]` from `ids[:, :-1]`."""
    logits = model(ids[:, :-1]).logits
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), ids[:, 1:].reshape(-1))


def model_and_ids(seed, sizes):
    model = random_gpt2(seed, **sizes, **WITHOUT_DROPOUT)
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


def ten_steps(model, loss_of_step, by_muon=()):
    """Returns the losses, gradient norms before clipping and learning rates of ten steps.

    Muon updates `by_muon`, AdamW the other parameters that require gradients.
    """
    everything = [parameter for parameter in model.parameters() if parameter.requires_grad]
    muon = torch.optim.Muon(by_muon, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw") if by_muon else None
    trained = [parameter for parameter in everything if not any(parameter is other for other in by_muon)]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
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
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of_step(step)
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(everything, CLIP))
        rates.append(torch.tensor(scheduler.get_last_lr()[0], dtype=torch.float64))
        if muon:
            muon.param_groups[0]["lr"] = scheduler.get_last_lr()[0]
            # PyTorch iterates in bfloat16, which no other implementation reproduces to four digits.
            with mock.patch.object(torch, "bfloat16", torch.float32):
                muon.step()
            muon.zero_grad()
        optimizer.step()
        scheduler.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), "norms": torch.stack(norms), "rates": torch.stack(rates)}


def export_optimizers():
    for name, is_muon in [("optimizer", False), ("muon", True)]:
        model, ids = model_and_ids(310, dict(vocab_size=59, n_positions=23, n_embd=28, n_layer=2, n_head=4))
        tensors = {"ids": ids}
        tensors |= {f"parameter.{own}": turn(parameter).clone() for own, parameter, turn in named_parameters(model)}
        by_muon = [parameter for own, parameter, _ in named_parameters(model) if is_muon and own.startswith("h.") and parameter.dim() == 2]
        tensors |= ten_steps(model, lambda _: loss_of(model, ids), by_muon)
        save(f"training/{name}", tensors, config=model.config.to_dict())


def of_labels(model, rows, weights):
    """Returns the weighted sum of label losses, each row computed alone, and the sum of the weights."""
    logits = torch.cat([model(ids[None]).logits for ids, _ in rows])
    labels = torch.tensor([label for _, label in rows])
    losses = functional.cross_entropy(logits, labels, weight=weights, reduction="sum")
    return losses, (torch.ones(()) * len(rows) if weights is None else weights[labels].sum())


def of_answers(model, rows, _):
    """Returns the summed loss of the completions, each row computed alone, and their number of tokens."""
    losses = [functional.cross_entropy(model(ids[None, :-1]).logits[0, prompt - 1:], ids[prompt:], reduction="sum")
              for ids, prompt in rows]
    return torch.stack(losses).sum(), torch.tensor(float(sum(len(ids) - prompt for ids, prompt in rows)))


def with_adapters(model, task, targets):
    config = peft.LoraConfig(task_type=task, r=LORA_RANK, lora_alpha=LORA_ALPHA, target_modules=targets, fan_in_fan_out=True)
    model = peft.get_peft_model(model, config)
    # With B at zero, the first gradient of every A would be zero.
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


def export_tasks():
    """Writes fine-tuning cases with rows of one token up to the whole context, label weights and batches."""
    for seed, (name, (task, trained, weights, sizes)) in enumerate(TASKS.items()):
        is_classifier = task == "classify"
        kind = transformers.GPT2ForSequenceClassification if is_classifier else transformers.GPT2LMHeadModel
        config = transformers.GPT2Config(**{"tie_word_embeddings": True, **sizes}, **WITHOUT_DROPOUT, bos_token_id=0, eos_token_id=0)
        model = seeded(kind(config), 330 + seed)
        context = sizes["n_positions"]
        lengths = torch.randint(1 if is_classifier else 2, context + (1 if is_classifier else 2), (ROWS,)).tolist()
        lengths[0], lengths[1] = (1, context) if is_classifier else (2, context + 1)
        ids = [torch.randint(0, sizes["vocab_size"], (length,)) for length in lengths]
        # A label, or the length of the prompt.
        targets = [int(torch.randint(0, sizes["num_labels"] if is_classifier else length - 1, ())) for length in lengths]
        rows = [(row, target if is_classifier else target + 1) for row, target in zip(ids, targets)]
        tensors = {"ids": torch.cat(ids), "lengths": torch.tensor(lengths), "targets": torch.tensor([row[1] for row in rows])}
        tensors |= {f"parameter.{own}": turn(parameter).clone() for own, parameter, turn in named_parameters(model)}
        if isinstance(trained, int):
            first = sizes["n_layer"] - trained
            for own, parameter, _ in named_parameters(model):
                block = int(own.split(".")[1]) if own.startswith("h.") else None
                parameter.requires_grad = own.split(".")[0] not in ("wte", "wpe") and (block is None or block >= first)
        elif trained:
            model = with_adapters(model, "SEQ_CLS" if is_classifier else "CAUSAL_LM", trained)
            tensors |= {
                f"adapter.{own.removeprefix('base_model.model.').removeprefix('transformer.').replace('.default', '')}": parameter.clone()
                for own, parameter in model.named_parameters() if parameter.requires_grad and "lora_" in own
            }
        given = None if weights is None else torch.tensor(weights)
        if weights:
            tensors["class_weights"] = given

        def loss_of_step(step):
            """Returns the mean over all predictions in a step; steps cycle through the rows."""
            taken = [rows[(step * BATCH_SIZE * ACCUMULATE + index) % ROWS] for index in range(BATCH_SIZE * ACCUMULATE)]
            losses, weight = (of_labels if is_classifier else of_answers)(model, taken, given)
            return losses / weight

        tensors |= ten_steps(model, loss_of_step)
        recorded = {"trained": trained if isinstance(trained, int) else None, "targets": trained if isinstance(trained, list) else None}
        config = model.config.to_dict() | {"architectures": [kind.__name__]}
        save(f"training/{name}", tensors, config=config, rank=LORA_RANK, alpha=LORA_ALPHA, batch_size=BATCH_SIZE,
             accumulate=ACCUMULATE, **recorded)


def export(_):
    export_gradients()
    export_optimizers()
    export_tasks()
