"""GPT-2: generate, score and look inside, on a CPU or a GPU.

    >>> import candle_gpt2
    >>> model = candle_gpt2.Model.from_pretrained()  # or "gpt2", or a folder
    >>> text = model.generate("ROMEO:", max_new_tokens=20, temperature=0.8, seed=1)

Options of ``generate``, ``stream`` and ``stream_batch`` have the names of transformers' ``GenerationConfig``:

- length: ``max_new_tokens``, ``max_length``, ``min_new_tokens``, ``max_time``, ``eos_token_id``, ``stop`` (or
  ``stop_strings``)
- drawing at random: ``do_sample``, ``temperature`` (0 is greedy), ``top_k``, ``top_p``, ``min_p``, ``typical_p``,
  ``epsilon_cutoff``, ``eta_cutoff``, ``seed`` (a number, or one for each prompt), ``num_return_sequences``;
  ``do_sample=False`` takes the most probable token
- changing the logits: ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``no_repeat_ngram_size``,
  ``bad_words`` (texts), ``bad_words_ids``, ``logit_bias`` (a dict of token ids), ``sequence_bias``,
  ``suppress_tokens``, ``begin_suppress_tokens``, ``forced_bos_token_id``, ``logits_processor`` (a function of the token
  ids so far and of the logits, which gives other logits or None; or a list of such functions)
- searching: ``num_beams``, ``num_beam_groups``, ``diversity_penalty``, ``length_penalty``, ``early_stopping``,
  ``penalty_alpha``
- texts that always parse: ``json_schema`` (a dict or JSON), ``json_object``, ``regex``, ``grammar`` (Lark)
- long texts: ``keep_last``, ``keep_head``, ``slide``
- drafting: ``prompt_lookup_num_tokens``, and ``num_assistant_tokens`` with a model opened with ``assistant_model``

What is not said is taken from the checkpoint's ``generation_config.json``; where that says nothing either, the next
token is drawn at random from the 50 most probable ones. Without a ``seed`` it is 0, so that, unlike with transformers, the
same call gives the same text each time; other seeds give other texts. The same options and seed give the same text as the
program ``gpt2 generate``, alone and in any batch.

Looks inside are methods with the names and the options of ``gpt2 look``: ``attention``, ``logit_lens``, ``tuned_lens``,
``attribute``, ``heads``, ``ablate``, ``patch``, ``path``, ``estimate``, ``saliency``, ``neurons``, ``features``. Each gives
a :class:`Picture`, which a notebook shows by itself. Words that Python keeps for itself end in an underscore: ``as_``,
``from_``, ``with_``.

Models with a head over labels or choices open as :class:`Classifier`, whose ``classify`` says what ``gpt2 classify --json``
prints.

Threads: as many compute as the process may use; ``OMP_NUM_THREADS`` and :func:`set_threads` say otherwise. Processes:
start them with ``spawn`` or ``forkserver`` once a model is open, or open models in the children alone. A model pickles
as its name and options. Errors are ``FileNotFoundError``, ``ValueError``, ``TypeError`` for an option that there is
not, and :class:`Gpt2Error` for everything else. Ctrl-C ends a text after its next token; what ``generate`` has made until
then is the ``partial`` of the ``KeyboardInterrupt``.
"""

import os as _os


def _set_pools(threads: int) -> None:
    """Tells candle's own pools how many threads to take; they read it when they start."""
    for variable in ("CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"):
        _os.environ[variable] = str(threads)


def _threads_of_environment() -> int | None:
    """What OMP_NUM_THREADS says, of which the first number counts."""
    first = _os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return min(int(first), 1024) if first.isdecimal() and int(first) > 0 else None


# Before the native module is there, since candle's pools read the environment. Otherwise they would spin so long after
# each operation that they kept the kernels' threads from their processors.
_os.environ.setdefault("CANDLE_BARRIER_POOL_SPIN_LIMIT", "100")

from ._native import (  # noqa: E402
    BatchStream,
    Cache,
    Classifier,
    Gpt2Error,
    Model,
    Picture,
    Steering,
    TextStream,
    Trainer,
    __version__,
    convert,
    inspect,
    protocols,
    set_thread_count as _set_thread_count,
    thread_count,
    tokenize,
    train,
    verify,
)

from .rows import Rows  # noqa: E402

_threads = _threads_of_environment()
if _threads is not None:
    _set_thread_count(_threads)
    _set_pools(_threads)
else:
    # candle would count the cores of the machine, of which a container may use only some.
    _os.environ.setdefault("CANDLE_NUM_THREADS", str(thread_count()))


def set_threads(threads: int) -> None:
    """Sets how many threads compute, of all models of this process.

    To be called before the first model is opened; later it raises :class:`Gpt2Error`, since the threads run by then.
    """
    _set_thread_count(threads)
    _set_pools(threads)


__all__ = [
    "BatchStream",
    "Cache",
    "Classifier",
    "Gpt2Error",
    "Model",
    "Picture",
    "Rows",
    "Steering",
    "TextStream",
    "Trainer",
    "__version__",
    "convert",
    "inspect",
    "protocols",
    "set_threads",
    "thread_count",
    "tokenize",
    "train",
    "verify",
]
