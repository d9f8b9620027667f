"""Expected outputs of generation in transformers; run this suite in two environments.

With scripts/requirements.txt it writes generation.json (logits processors, beam search). With transformers
4.49.0 instead it writes generation_4_49.json (beam search with groups, contrastive search), which later
versions no longer support.
"""

import warnings

import torch
import transformers
from transformers import GenerationConfig, GPT2LMHeadModel

from reference.common import TINY, save_json

VOCAB_SIZE = 300
PROMPTS = [[5, 71, 200], [299, 12, 12, 80, 14, 250, 3], [42]]


def config_of(options):
    return GenerationConfig(bos_token_id=0, pad_token_id=0, **{"num_beams": 1, **options})


# Options that only our configuration has; transformers has no counterpart.
OWN_OPTIONS = ("presence_penalty", "frequency_penalty")
SAMPLE = {"do_sample": True, "top_k": 0}
PROCESSOR_CASES = [
    {"sequence_bias": [[[7], 2.5], [[9, 11], -3.0], [[14, 3, 8], 4.0]]},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 0.8},
    {"frequency_penalty": 0.35},
    {"presence_penalty": -0.4, "frequency_penalty": 0.9, "repetition_penalty": 1.1},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"bad_words_ids": [[5], [9, 11], [3, 8], [2]], "eos_token_id": [2]},
    {"min_new_tokens": 9, "eos_token_id": [2, 30]},
    {"min_new_tokens": 8, "eos_token_id": [2, 30]},
    {"suppress_tokens": [1, 40, 60]},
    {**SAMPLE, "temperature": 0.6},
    {**SAMPLE, "temperature": 1.7},
    {**SAMPLE, "top_k": 1},
    {**SAMPLE, "top_k": 9},
    {**SAMPLE, "top_k": 1000},
    {**SAMPLE, "top_p": 0.1},
    {**SAMPLE, "top_p": 0.83},
    {**SAMPLE, "min_p": 0.05},
    {**SAMPLE, "min_p": 1.0},
    {**SAMPLE, "typical_p": 0.2},
    {**SAMPLE, "typical_p": 0.9},
    {**SAMPLE, "epsilon_cutoff": 0.01},
    {**SAMPLE, "epsilon_cutoff": 0.9},
    {**SAMPLE, "eta_cutoff": 0.02},
    {**SAMPLE, "eta_cutoff": 0.9},
    {"renormalize_logits": True, "repetition_penalty": 1.5},
    {
        "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95,
        "epsilon_cutoff": 0.001, "eta_cutoff": 0.001, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2,
        "bad_words_ids": [[5], [9, 11]], "min_new_tokens": 20, "eos_token_id": [2],
        "sequence_bias": [[[7], 2.5], [[9, 11], -3.0]], "suppress_tokens": [1],
    },
]
TOP_H_CASES = [
    {**SAMPLE, "top_h": 0.02},
    {**SAMPLE, "top_h": 0.4},
    {**SAMPLE, "top_h": 0.85, "temperature": 1.7},
    {"do_sample": True, "top_h": 0.9, "top_k": 4},
]
# Cases for the first new token after a one-token prompt, where transformers applies the forced token.
FIRST_TOKEN_CASES = [
    {"forced_bos_token_id": 17},
    {"begin_suppress_tokens": [4, 44]},
    {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
]


def own_penalties(options, generated, logits):
    """Applies the penalties from OpenAI's API to generated tokens."""
    counts = torch.bincount(torch.tensor(generated, dtype=torch.int64), minlength=logits.shape[-1])
    presence, frequency = (options.get(name, 0.0) for name in OWN_OPTIONS)
    return logits - presence * (counts > 0) - frequency * counts


def export_processors(model):
    torch.manual_seed(9)
    size = 61
    cases = []

    def run(options, ids, prompt_len, allowed=None):
        theirs = {name: value for name, value in options.items() if name not in OWN_OPTIONS}
        logits = torch.randn(1, size) * 3
        config = config_of(theirs)
        model._prepare_special_tokens(config, device="cpu")
        tensor = torch.tensor([ids])
        processed = logits
        if options.keys() & set(OWN_OPTIONS):
            # Our penalties follow the repetition penalty, the only other processor in these cases.
            processed = model._get_logits_processor(config, prompt_len)(tensor, logits.clone())
            processed = own_penalties(options, ids[prompt_len:], processed)
        else:
            functions = model._get_logits_processor(config, prompt_len, prefix_allowed_tokens_fn=allowed)
            processed = functions(tensor, logits.clone())
        numbers = [None if number == float("-inf") else number for number in processed[0].tolist()]
        cases.append({
            "options": options, "ids": ids, "prompt_len": prompt_len, "has_allowed": allowed is not None,
            "logits": logits[0].tolist(), "processed": numbers,
        })

    history = [9, 14, 3, 8, 30, 9, 9, 11, 14, 3, 14, 3, 9]
    for options in PROCESSOR_CASES:
        run(options, history, 5)
    run({"sequence_bias": [[[14, 3, 8], 4.0]]}, history[:11] + [14, 3], 5)
    for options in FIRST_TOKEN_CASES:
        run(options, [9], 1)
    run({}, history, 5, allowed=lambda _, ids: [id for id in range(size) if (id + len(ids)) % 3 == 0])
    run({"suppress_tokens": [6, 8]}, history, 5, allowed=lambda _, ids: [4, 5, 6])
    for options in TOP_H_CASES:
        run(options, history, 5)
    # Top-H sampling considers 100 tokens.
    size = 300
    run({**SAMPLE, "top_h": 0.9}, history, 5)
    return cases


def cut_at_end(ids, eos):
    for index, id in enumerate(ids):
        if id in eos:
            return ids[: index + 1]
    return ids


def search(model, prompt, options):
    """Returns the new tokens and, for beam search, the scores."""
    config = config_of(options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        output = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            generation_config=config, return_dict_in_generate=True, output_scores=True,
        )
    texts = [cut_at_end(ids[len(prompt):], options["eos_token_id"]) for ids in output.sequences.tolist()]
    scores = getattr(output, "sequences_scores", None)
    return {"prompt": prompt, "options": options, "ids": texts, "scores": None if scores is None else scores.tolist()}


def frequent_tokens(model, count):
    """Returns frequent output tokens; as end tokens they yield completions of different lengths."""
    config = config_of({"num_beams": 6, "num_return_sequences": 6, "max_new_tokens": 30, "eos_token_id": [299]})
    counts = torch.zeros(VOCAB_SIZE)
    for prompt in PROMPTS:
        output = model.generate(torch.tensor([prompt]), generation_config=config)
        counts += torch.bincount(output[:, len(prompt):].flatten(), minlength=VOCAB_SIZE)
    return counts.topk(count).indices.tolist()


def searches(model, cases):
    """Runs all cases; for beam search, returns every beam."""
    found = [case | ({"num_return_sequences": case["num_beams"]} if "num_beams" in case else {}) for case in cases]
    return [search(model, prompt, case) for case in found for prompt in PROMPTS]


def with_common(cases, common):
    return [{**common, **case} for case in cases]


def export_beams(model):
    eos = frequent_tokens(model, 12)
    cases = with_common([
        {"num_beams": 2, "eos_token_id": [0]},
        {"num_beams": 4, "eos_token_id": eos[5:6]},
        {"num_beams": 4, "eos_token_id": eos[2:4], "early_stopping": True},
        {"num_beams": 4, "eos_token_id": eos[2:4], "early_stopping": "never"},
        {"num_beams": 3, "eos_token_id": eos[6:8], "length_penalty": 2.0},
        {"num_beams": 3, "eos_token_id": eos[6:8], "length_penalty": 2.0, "early_stopping": "never"},
        {"num_beams": 3, "eos_token_id": eos[6:8], "length_penalty": -1.0, "early_stopping": "never"},
        {"num_beams": 3, "eos_token_id": eos[6:8], "length_penalty": 0.0},
        {"num_beams": 5, "eos_token_id": eos[8:9], "repetition_penalty": 1.3},
        {"num_beams": 5, "eos_token_id": eos[8:9], "no_repeat_ngram_size": 2, "min_new_tokens": 6},
        {"num_beams": 5, "eos_token_id": eos[8:10], "bad_words_ids": [[eos[0]], [eos[1], eos[2]]]},
        {"num_beams": 4, "eos_token_id": eos[5:6], "renormalize_logits": True, "suppress_tokens": eos[:2]},
    ], {"max_new_tokens": 18})
    return searches(model, cases)


def export_groups(model):
    eos = frequent_tokens(model, 12)
    cases = with_common([
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0, "eos_token_id": [0]},
        {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 5.5, "eos_token_id": eos[5:6]},
        {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 0.4, "eos_token_id": eos[2:4]},
        {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 0.4, "eos_token_id": eos[2:4], "early_stopping": True},
        {"num_beams": 6, "num_beam_groups": 2, "diversity_penalty": 0.4, "eos_token_id": eos[2:4],
         "early_stopping": "never", "length_penalty": 1.5},
        {"num_beams": 4, "num_beam_groups": 4, "diversity_penalty": 2.0, "eos_token_id": eos[6:7],
         "repetition_penalty": 1.2},
    ], {"max_new_tokens": 18})
    return searches(model, cases)


def export_contrastive(model):
    cases = with_common([
        {"penalty_alpha": 0.6, "top_k": 4, "eos_token_id": [0]},
        {"penalty_alpha": 0.3, "top_k": 8, "eos_token_id": frequent_tokens(model, 4)},
        {"penalty_alpha": 0.6, "top_k": 5, "eos_token_id": [0], "repetition_penalty": 1.2},
        {"penalty_alpha": 0.9, "top_k": 2, "eos_token_id": [0], "no_repeat_ngram_size": 2},
    ], {"max_new_tokens": 24})
    return searches(model, cases)


def export(_):
    model = GPT2LMHeadModel.from_pretrained(TINY).eval()
    name, values = "generation", {"processors": export_processors, "beams": export_beams}
    if transformers.__version__.startswith("4."):
        name, values = "generation_4_49", {"groups": export_groups, "contrastive": export_contrastive}
    save_json(name, {key: make(model) for key, make in values.items()}, indent=None, separators=(",", ":"))
