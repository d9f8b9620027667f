"""GPT-2 generation, scoring and interpretability on a CPU or a GPU.

    >>> import candle_gpt2
    >>> model = candle_gpt2.Model.from_pretrained()  # or "gpt2", or a folder
    >>> text = model.generate("One day", max_new_tokens=20, temperature=0.8, seed=1)

The options of ``generate``, ``stream`` and ``stream_batch`` are named as in transformers' ``GenerationConfig``:

- when to stop: ``max_new_tokens``, ``max_length``, ``min_new_tokens``, ``max_time``, ``eos_token_id``,
  ``stop_strings``
- sampling: ``do_sample``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``, ``top_h``,
  ``epsilon_cutoff``, ``eta_cutoff``, ``seed``, ``num_return_sequences``
- logits processors: ``encoder_repetition_penalty``, ``repetition_penalty``, ``presence_penalty``,
  ``frequency_penalty``, ``no_repeat_ngram_size``, ``encoder_no_repeat_ngram_size``, ``bad_words_ids``,
  ``sequence_bias``, ``suppress_tokens``, ``begin_suppress_tokens``, ``forced_bos_token_id``,
  ``renormalize_logits``
- search: ``num_beams``, ``num_beam_groups``, ``diversity_penalty``, ``pad_token_id``, ``length_penalty``,
  ``early_stopping``, ``penalty_alpha``
- speculative decoding: ``num_assistant_tokens``, ``prompt_lookup_num_tokens``
- of this package: ``stop`` (an alias of ``stop_strings``), ``bad_words`` (texts), ``logit_bias`` (a dict by token id),
  ``seed`` as a list with one seed per prompt, ``logits_processor`` (a function of the token ids so far and the logits
  that returns new logits or None, or a list of such functions); ``temperature=0`` and ``do_sample=False`` are greedy
- structured output: ``json_schema`` (a dict or JSON), ``json_object``, ``regex``, ``grammar`` (Lark)
- long prompts: ``keep_last``, ``keep_head``, ``slide``

Defaults come from the checkpoint's ``generation_config.json``. Without it, the next token is sampled from the 50 most
probable tokens. Unlike in transformers, the default ``seed`` is 0, so the same call returns the same completion every
time. The same options and seed return the same completion as the program ``gpt2 generate``, alone or in any batch.

Analyses are methods with the names and options of ``gpt2 look``: ``attention``, ``logit_lens``, ``tuned_lens``,
``attribute``, ``heads``, ``ablate``, ``patch``, ``path``, ``estimate``, ``circuit`` (on pairs from ``task_data``),
``attribution_graph``, ``saliency``, ``neurons``, ``features``. Each returns a :class:`Picture`, which notebooks display.
Options that are Python keywords end in an underscore: ``as_``, ``from_``, ``with_``.

:class:`HookedTransformer` has TransformerLens' API and produces its values: hook points, ``run_with_cache``,
``run_with_hooks``, ``ActivationCache``, ``patching``, ``head_detector``, ``utils``, sparse autoencoders. It runs on numpy and
does not need torch.

:class:`Classifier` opens models with a classification or multiple-choice head. Its ``classify`` returns what
``gpt2 classify --json`` prints.

Threads: by default, all that are available to the process; ``OMP_NUM_THREADS`` and :func:`set_threads` change that.
Processes: after a model is open, start processes with ``spawn`` or ``forkserver``, or open models only in the children. A
pickled model stores its name and options. Errors: ``FileNotFoundError``, ``ValueError``, ``TypeError`` for an unknown
option, and :class:`Gpt2Error` for everything else. Ctrl-C stops generation after the next token; the completions of
``generate`` so far are the ``partial`` of the ``KeyboardInterrupt``.
"""

import os as _os


def _threads_from_environment() -> int | None:
    """Returns the first number in OMP_NUM_THREADS, at most 1024, or None."""
    first = _os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(first), 1024) if first.isdecimal() and int(first) > 0 else None


from ._native import (
    BatchStream,
    Cache,
    Classifier,
    ControlVector,
    Dictionary,
    Gpt2Error,
    Model,
    Picture,
    Steering,
    TextStream,
    Trainer,
    __version__,
    compress,
    convert,
    decompress,
    inspect,
    protocols,
    set_threads,
    thread_count,
    tokenize,
    train,
    verify,
)

from .hooked import (
    SAE,
    ActivationCache,
    FactoredMatrix,
    HookedSAETransformer,
    HookedTransformer,
    HookedTransformerConfig,
    HookPoint,
    SVDInterpreter,
    TransformerBridge,
    components,
    head_detector,
    hook_points,
    patching,
    utilities,
    utils,
)
from .rows import Rows

_threads = _threads_from_environment()
if _threads is not None:
    set_threads(_threads)


__all__ = [
    "ActivationCache",
    "BatchStream",
    "Cache",
    "Classifier",
    "ControlVector",
    "Dictionary",
    "FactoredMatrix",
    "Gpt2Error",
    "HookPoint",
    "HookedSAETransformer",
    "HookedTransformer",
    "HookedTransformerConfig",
    "Model",
    "Picture",
    "Rows",
    "SAE",
    "SVDInterpreter",
    "Steering",
    "TextStream",
    "Trainer",
    "TransformerBridge",
    "__version__",
    "components",
    "compress",
    "convert",
    "decompress",
    "head_detector",
    "hook_points",
    "inspect",
    "patching",
    "protocols",
    "set_threads",
    "thread_count",
    "tokenize",
    "train",
    "utilities",
    "utils",
    "verify",
]
