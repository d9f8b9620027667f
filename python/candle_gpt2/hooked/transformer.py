"""`HookedTransformer`: GPT-2 on numpy with TransformerLens' API and values."""

import difflib
import inspect
import re
import shutil
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self

import numpy as np

from .._native import ControlVector, Model, Steering
from . import utils
from .arrays import Kind, added, array, is_live, library, matching, no_gradients, read_only, tensor, together, torch_module
from .cache import ActivationCache
from .components import Embed, KeyValues, LayerNorm, PosEmbed, TransformerBlock, Unembed, Weighted
from .config import HookedTransformerConfig
from .factored_matrix import FactoredMatrix
from .gradients import Tape, loss_gradient
from .hook_points import Hook, HookedRootModule, HookPoint, Keys, Name
from .in_memory import ForeignTokenizer, NoTokenizer, is_transformers, model_of, model_with
from .progress import progress
from .splice import SAE, WithSAEs
from .tokens import Tokenizer, attention_mask, checked_side, padded
from .weights import Weights

#: Result of ``return_type="both"``.
Output = namedtuple("Output", ["logits", "loss"])

# TransformerLens names of models that have other names on the Hub.
ALIASES = {"gpt2-small": "gpt2", "distillgpt2": "distilgpt2", "distill-gpt2": "distilgpt2", "distil-gpt2": "distilgpt2"}
# Expensive hook points, and the options that enable them.
SWITCHES = {
    "attn.hook_result": "use_attn_result",
    "hook_q_input": "use_split_qkv_input",
    "hook_k_input": "use_split_qkv_input",
    "hook_v_input": "use_split_qkv_input",
    "hook_mlp_in": "use_hook_mlp_in",
    "hook_attn_in": "use_attn_in",
}


def _check_return_type(return_type: str | None) -> None:
    if return_type not in ("input", "str", "tokens"):
        raise ValueError(f"return_type: expected 'input', 'str' or 'tokens', found {return_type!r}")


class HookedTransformer(WithSAEs, HookedRootModule):
    """GPT-2 with TransformerLens' API.

    It prepends BOS to texts by default, and `generate` returns prompt and completion. `native` is the engine's `Model`, which does
    neither; both accept `prepend_bos`.

    >>> from candle_gpt2 import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("gpt2")
    >>> logits, cache = model.run_with_cache("When Mary and John went to the store")
    >>> cache["pattern", 3].shape
    (1, 12, 9, 9)

    Values are numpy arrays, or torch tensors if torch was imported before the model was opened; `tensors=` overrides this. A method
    that receives a tensor always returns tensors.

    `HookedTransformer(cfg)` creates an untrained model from a GPT-2 configuration: a HookedTransformerConfig, TransformerLens'
    configuration, or a dict. tokenizer: a transformers tokenizer, or a `Model` whose tokenizer is used; without one, the model
    accepts only token ids.
    """

    def __init__(
        self,
        cfg: HookedTransformerConfig | dict[str, Any] | Any,
        tokenizer: Any = None,
        move_to_device: bool = True,
        default_padding_side: str = "right",
        *,
        native: Model | None = None,
        weights: Weights | None = None,
        tensors: str | None = None,
    ) -> None:
        super().__init__()
        self.cfg = cfg = HookedTransformerConfig.unwrap(cfg)
        cfg.check()
        weights = Weights.untrained(cfg) if weights is None else weights
        self._native = native
        # Function that removes the temporary folder of `_native`, if `_native` is a copy with other weights.
        self._remove_copy: Callable[[], Any] | None = None
        self.kind = Kind.chosen(tensors)
        source = native if tokenizer is None else tokenizer
        if source is None:
            source = NoTokenizer(cfg.d_vocab)
        elif not isinstance(source, Model):
            source = ForeignTokenizer(source)
        self.tokenizer = Tokenizer(source, default_padding_side)
        self._weights = weights
        # State of the current run: the number of tokens cached before it, and the position at which each text starts.
        self._past, self._starts = 0, np.zeros(1, np.int64)
        # Last run with backward hooks: the shape of its output, and a function that runs its backward pass.
        self._backward_pass: tuple[tuple[int, ...], Callable[[np.ndarray], None]] | None = None
        self.embed = Embed(self.kind, W_E=weights.W_E)
        self.hook_embed = HookPoint(self.kind)
        self.pos_embed = PosEmbed(self.kind, W_pos=weights.W_pos)
        self.hook_pos_embed = HookPoint(self.kind)
        self.blocks = [TransformerBlock(cfg, self.kind, layer, weights) for layer in range(cfg.n_layers)]
        self.ln_final = LayerNorm(cfg, self.kind, weights.ln_w, weights.ln_b)
        self.unembed = Unembed(self.kind, W_U=weights.W_U, b_U=weights.b_U)
        self.setup()

    @classmethod
    def from_pretrained(
        cls,
        model_name: str | PathLike[str] | Model | None = None,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        *,
        fold_value_biases: bool = True,
        device: Any = None,
        default_prepend_bos: bool | None = None,
        default_padding_side: str = "right",
        dtype: Any = "float32",
        tensors: str | None = None,
        hf_model: Any = None,
        tokenizer: Any = None,
        **options: Any,
    ) -> Self:
        """Opens a model and processes its weights as TransformerLens does.

        model_name: a name on the Hugging Face Hub, a path, a `Model`, an in-memory GPT-2 from transformers, or None for the built-in
        model. fold_ln, center_writing_weights, center_unembed, fold_value_biases: processing steps, which change activations but not
        predictions. refactor_factored_attn_matrices: also balance W_Q and W_K of each head and orthonormalize the rows of W_O.
        default_prepend_bos: prepend <|endoftext|> to texts, True if None. tensors: output type, "numpy" or "torch"; by default torch
        if it is imported. hf_model: a GPT-2 from transformers that supplies the weights. tokenizer: a transformers tokenizer, or a path;
        by default the tokenizer of model_name. All computation is in float32 on the CPU. Other options are those of
        `Model.from_pretrained`.
        """
        if str(device or "cpu") not in ("cpu", "auto"):
            raise ValueError(f"device: this model runs only on the CPU, found {device!r}; use Model to run on a GPU")
        if str(dtype).removeprefix("torch.") not in ("float32", "f32"):
            raise ValueError(f"dtype: this model computes in float32, found {dtype!r}")
        Kind.chosen(tensors)
        if is_transformers(model_name):
            model_name, hf_model = None, model_name
        if isinstance(model_name, str) and not Path(model_name).exists():
            model_name = ALIASES.get(model_name, model_name)
        folder = None
        if isinstance(model_name, Model):
            if hf_model is not None:
                raise ValueError("hf_model: cannot be combined with a Model, which has its own weights; pass a name or a path")
            native, name = model_name, model_name.name
        elif hf_model is not None:
            name = str(model_name or hf_model.config.name_or_path or "")
            native, folder = model_of(hf_model, name, tokenizer, options)
        else:
            files = {"tokenizer": tokenizer} if isinstance(tokenizer, (str, PathLike)) else {}
            # The engine's model then computes as precisely as this one, even if the file is quantized.
            native = cls._open(model_name, {"dtype": "f32", **options, **files})
            name = native.name
        cfg = HookedTransformerConfig.of_model(native.config, name)
        cfg.default_prepend_bos = default_prepend_bos is not False
        weights = Weights.of_checkpoint(native.parameters(), cfg)
        foreign = None if isinstance(tokenizer, (str, PathLike)) else tokenizer
        model = cls(cfg, foreign, default_padding_side=default_padding_side, native=native, weights=weights, tensors=tensors)
        if folder is not None:
            weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
        model.process_weights_(
            fold_ln,
            center_writing_weights,
            center_unembed,
            refactor_factored_attn_matrices,
            fold_value_biases=fold_value_biases,
        )
        return model

    @classmethod
    def _open(cls, name: str | PathLike[str] | None, options: dict[str, Any]) -> Model:
        """Opens a model by name. If there is no such model, the error lists the supported names."""
        known = {**inspect.signature(cls.from_pretrained).parameters, **inspect.signature(Model.from_pretrained).parameters}
        del known["options"]
        for option in options.keys() - known.keys():
            nearest = difflib.get_close_matches(option, known, n=1, cutoff=0)[0]
            raise TypeError(f"{cls.__name__}.from_pretrained: unknown option {option!r}; did you mean {nearest!r}?")
        try:
            return Model.from_pretrained(name, **options)
        except FileNotFoundError as error:
            if name is None or Path(name).exists():
                raise
            raise FileNotFoundError(
                f"{error}. {cls.__name__} supports only GPT-2 models: gpt2, gpt2-medium, gpt2-large, gpt2-xl, distilgpt2, owner/name on the Hub, a "
                "folder, or no name for the built-in model"
            ) from None

    @classmethod
    def from_pretrained_no_processing(
        cls, model_name: str | PathLike[str] | Model | None = None, **options: Any
    ) -> Self:
        """Opens a model without processing its weights; see `from_pretrained`."""
        raw = dict.fromkeys(("fold_ln", "center_writing_weights", "center_unembed", "fold_value_biases"), False)
        return cls.from_pretrained(model_name, **{**raw, **options})

    def process_weights_(
        self,
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        refactor_factored_attn_matrices: bool = False,
        *,
        fold_value_biases: bool = True,
    ) -> None:
        """Processes the weights in place; see `from_pretrained`. Repeating a step has no effect."""
        weights, is_changed = self._weights, self._is_changed()
        if fold_ln:
            weights.fold_ln()
            self.cfg.normalization_type = "LNPre"
        if center_writing_weights:
            weights.center_writing_weights()
        if center_unembed:
            weights.center_unembed()
        if fold_value_biases:
            weights.fold_value_biases()
        if refactor_factored_attn_matrices:
            weights.refactor_factored_attn_matrices()
        if not is_changed:
            self._accept_changes()

    @property
    def native(self) -> Model:
        """The engine's Model. It prepends no BOS token, and its `generate` returns only the completion.

        It has the weights that the model was opened with, before processing. If they have changed since, for example by training
        or load_state_dict, it is a new Model with the current weights.
        """
        if self._native is None:
            raise RuntimeError("native: a model created from a configuration has no engine Model")
        if self._is_changed():
            self._native, folder = model_with(self._native, self._weights)
            if self._remove_copy is not None:
                self._remove_copy()
            self._remove_copy = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._accept_changes()
        return self._native

    def _weighted(self) -> Iterator[Weighted]:
        """Yields the modules with the model's own weights."""
        return (module for _, module in self.named_modules() if isinstance(module, Weighted) and not isinstance(module, SAE))

    def _is_changed(self) -> bool:
        """Whether the weights have changed since `_native` was opened, apart from their processing."""
        return any(module.is_changed for module in self._weighted())

    def _accept_changes(self) -> None:
        for module in self._weighted():
            module.accept_changes()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Keys:
        """Copies weights from a dict by TransformerLens' names. Returns missing_keys and unexpected_keys.

        strict: raise a RuntimeError if there are any. The weights are not processed: load those of an unprocessed model into an
        unprocessed model, or use `load_and_process_state_dict`.
        """
        if self.cfg.normalization_type == "LNPre":
            norms = {name: value for name, value in state_dict.items() if re.search(r"(^|\.)ln(1|2|_final)\.[wb]$", name)}
            for name, value in norms.items():
                if (array(value) != (1 if name.endswith("w") else 0)).any():
                    raise ValueError(
                        f"{name}: the norms of this model are folded into its weights; load this state with load_and_process_state_dict into a "
                        "model from from_pretrained_no_processing"
                    )
            # In TransformerLens, a folded model has no norm weights.
            own = {name: value for name, value in self.state_dict().items() if re.search(r"(^|\.)ln(1|2|_final)\.[wb]$", name)}
            state_dict = {**own, **state_dict}
        return super().load_state_dict(state_dict, strict)

    def load_and_process_state_dict(
        self,
        state_dict: Mapping[str, Any],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Copies the weights of an unprocessed model and processes them; see `from_pretrained`."""
        self.load_state_dict(state_dict)
        self.process_weights_(
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases=fold_value_biases
        )

    def as_hooks(self, entry: Any) -> list[tuple[Name, Hook]]:
        """Converts an entry in fwd_hooks to (name, hook) pairs.

        An entry may be a Steering or a ControlVector that `native` created.
        """
        if isinstance(entry, ControlVector):
            directions = entry.directions.items()
            return [(f"blocks.{layer}.hook_resid_post", partial(self._steer, vectors=one[None], everywhere=True)) for layer, one in directions]
        if isinstance(entry, Steering):
            hook = partial(self._steer, vectors=entry.vectors, everywhere=entry.everywhere)
            return [(f"blocks.{entry.layer}.hook_resid_pre", hook)]
        return super().as_hooks(entry)

    def _steer(self, value: Any, hook: HookPoint, vectors: np.ndarray, everywhere: bool) -> Any:
        """Adds vectors (n, C) at the first positions of each text, or one (1, C) at every position."""
        if everywhere:
            return value + matching(value, vectors)
        if self._past > 0:
            return None
        added = np.zeros(value.shape, np.float32)
        for row, start in enumerate(np.broadcast_to(self._starts, len(added))):
            target = added[row, start : start + len(vectors)]
            target += vectors[: len(target)]
        return value + matching(value, added)

    def __repr__(self) -> str:
        cfg = self.cfg
        return f"{type(self).__name__}({cfg.model_name!r}, n_layers={cfg.n_layers}, n_heads={cfg.n_heads}, d_model={cfg.d_model})"

    # Tokenization.

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Any:
        """Tokenizes one or more texts into ids (b, p), padded to the longest and truncated at n_ctx."""
        return self.kind.out(self._tokens(input, prepend_bos, padding_side, truncate))

    def _tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None, truncate: bool = True
    ) -> np.ndarray:
        """Returns the ids (b, p) of texts, or validates ids."""
        if not self._is_text(input):
            ids = array(input)
            ids = ids[None] if ids.ndim == 1 else ids
            if ids.ndim != 2 or ids.dtype.kind not in "iu":
                raise ValueError(f"expected a string, a list of strings, or token ids of shape (p) or (b, p), found shape {ids.shape} of {ids.dtype}")
            if ids.size and not (0 <= ids.min() and ids.max() < self.cfg.d_vocab):
                raise ValueError(f"token ids: expected 0 to {self.cfg.d_vocab - 1}, found {ids.min()} to {ids.max()}")
            return ids
        texts = [input] if isinstance(input, str) else list(input)
        bos = [self.tokenizer.bos_token_id] if self._prepends(prepend_bos) else []
        rows = [bos + self.tokenizer.encode(text) for text in texts]
        rows = [row[: self.cfg.n_ctx] for row in rows] if truncate else rows
        return padded(rows, self.tokenizer.pad_token_id, padding_side or self.tokenizer.padding_side)

    def _prepends(self, prepend_bos: bool | None) -> bool:
        return self.cfg.default_prepend_bos if prepend_bos is None else bool(prepend_bos)

    @staticmethod
    def _is_text(input: Any) -> bool:
        return isinstance(input, str) or (
            isinstance(input, (list, tuple)) and len(input) > 0 and all(isinstance(one, str) for one in input)
        )

    def to_string(self, tokens: Any) -> str | list[str]:
        """Decodes ids (p) to a text, or ids (b, p) to a list of texts."""
        ids = array(tokens)
        if ids.ndim > 2:
            raise ValueError(f"expected token ids of one or two dimensions, found shape {ids.shape}")
        return self.tokenizer.batch_decode(ids) if ids.ndim == 2 else self.tokenizer.decode(ids)

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None) -> Any:
        """Returns the text of each token in a text, or of each id in ids (p) or (1, p).

        For a list of texts, returns a list of lists. prepend_bos applies only to texts.
        """
        if isinstance(input, list):
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in input]
        if isinstance(input, str):
            ids = self._tokens(input, prepend_bos, padding_side)[0]
        else:
            ids = np.atleast_1d(array(input).squeeze())
            if ids.ndim != 1:
                raise AssertionError(f"expected token ids of shape (p) or (1, p), found shape {ids.shape}")
        return self.tokenizer.str_tokens(ids)

    def to_single_token(self, string: str) -> int:
        """Returns the id of a single-token text. Raises an AssertionError if it is not a single token."""
        ids = self.tokenizer.encode(string)
        assert len(ids) == 1, f"{string!r} is {len(ids)} tokens, not one"
        return int(ids[0])

    def to_single_str_token(self, int_token: int) -> str:
        """Returns the text of a token id."""
        return self.tokenizer.str_tokens([int(int_token)])[0]

    def get_token_position(
        self,
        single_token: str | int,
        input: Any,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Finds the first or last position of a token in a text or in ids, counting the BOS token."""
        ids = self._tokens(input, prepend_bos, padding_side)
        assert len(ids) == 1, f"expected one text, found {len(ids)}"
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        positions = np.flatnonzero(ids[0] == token)
        assert len(positions) > 0, f"{single_token!r} is not in the text"
        if mode not in ("first", "last"):
            raise ValueError(f"mode: expected 'first' or 'last', found {mode!r}")
        return int(positions[0 if mode == "first" else -1])

    # Running.

    def forward(
        self,
        input: Any,
        return_type: str | None = "logits",
        loss_per_token: bool = False,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        start_at_layer: int | None = None,
        tokens: Any = None,
        attention_mask: Any = None,
        stop_at_layer: int | None = None,
        past_kv_cache: list[KeyValues] | None = None,
    ) -> Any:
        """Runs the model and returns its output; BOS is prepended to texts by default.

        input: a text, a list of texts, or token ids (p) or (b, p); with start_at_layer the residual stream (b, p, C) before that block.
        return_type: "logits" (b, p, V), "loss" (the mean cross-entropy of the next tokens), "both", or None. loss_per_token: return
        the loss of each token, (b, p − 1). stop_at_layer: return the residual stream before that block; negative values count from
        the end. Backward hooks run in the output's `backward()`, or without torch in `model.backward()`. Autograd tracks the run from
        the first value or weight that requires a gradient; see `requires_grad_`.
        """
        is_whole = start_at_layer is None and stop_at_layer is None and past_kv_cache is None and return_type is not None
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type: expected 'logits', 'loss', 'both' or None, found {return_type!r}")
        with self.kind.of(input), self._recording(is_whole) as tape:
            ids: np.ndarray | None
            if start_at_layer is None:
                ids = self._tokens(input, prepend_bos, padding_side)
                residual, mask = self._embed(ids, prepend_bos, padding_side, attention_mask, past_kv_cache)
            else:
                ids = None if tokens is None else array(tokens)
                residual = self._residual(input, start_at_layer, ids)
                mask = self._mask(ids, prepend_bos, padding_side, attention_mask)
                self._set_positions(0, mask)
            layers = range(self.cfg.n_layers)[start_at_layer or 0 : stop_at_layer]
            for layer in layers:
                entry = None if past_kv_cache is None else past_kv_cache[layer]
                residual = self.blocks[layer].compute(residual, past_kv_cache_entry=entry, attention_mask=mask)
            if stop_at_layer is not None:
                return self.kind.out(residual)
            residual = self.ln_final.compute(residual)
            if return_type is None:
                return None
            logits = self.unembed.compute(residual)
            output = self._output(tape, logits, lambda gradient: gradient)
            if return_type == "logits":
                return output
            if ids is None:
                raise ValueError("tokens: the loss needs the ids (b, p) of the tokens in the residual stream")
            found = utils.lm_cross_entropy_loss(logits, ids, mask, loss_per_token)
            loss = self._output(tape, found, lambda gradient: loss_gradient(logits, ids, mask, gradient))
            return loss if return_type == "loss" else Output(output, loss)

    @contextmanager
    def _recording(self, is_whole: bool) -> Iterator[Tape | None]:
        """Records the run for backward hooks: with torch's autograd, or on a tape without torch."""
        if not any(point.bwd_hooks for point in self.hook_points()):
            yield None
        elif self.kind.is_torch:
            with torch_module().enable_grad():
                yield None
        elif is_whole:
            tape = Tape(self)
            with tape.recording():
                yield tape
        else:
            raise ValueError(
                "without torch, backward hooks need a complete run: no start_at_layer, stop_at_layer, past_kv_cache or return_type=None"
            )

    def _residual(self, input: Any, layer: int, ids: np.ndarray | None) -> Any:
        """Validates the residual stream (b, p, C) for a run that begins at a block."""
        residual = array(input)
        if residual.ndim != 3 or residual.shape[2] != self.cfg.d_model or residual.dtype.kind != "f":
            raise ValueError(
                f"start_at_layer={layer}: expected the residual stream before that block, floats (batch, positions, {self.cfg.d_model}), "
                f"found shape {residual.shape} of {residual.dtype}"
            )
        if ids is not None and ids.shape != residual.shape[:2]:
            expected = residual.shape[:2]
            raise ValueError(f"tokens: expected one id for each position of the residual stream, shape {expected}, found shape {ids.shape}")
        return input.to("cpu", torch_module().float32) if is_live(input) else residual

    def _output(self, tape: Tape | None, value: Any, at_logits: Callable[[np.ndarray], np.ndarray]) -> Any:
        """Returns the output of a run, and stores the backward pass for its backward hooks.

        at_logits: function from the gradient at the value to the gradient at the logits.
        """
        if tape is not None:
            self._backward_pass = np.shape(value), lambda gradient: tape.back(at_logits(gradient))
        elif is_live(value) and any(point.bwd_hooks for point in self.hook_points()):
            self._backward_pass = tuple(value.shape), lambda gradient: value.backward(tensor(gradient.astype(np.float32)))
        return self.kind.out(value)

    def backward(self, gradient: Any = None) -> None:
        """Runs the backward hooks for the last run, like a tensor's `backward()` but without torch.

        gradient: the gradient of a metric with respect to the output, with the same shape; for a loss, None means 1.
        """
        if self._backward_pass is None:
            raise RuntimeError("backward: expected a previous run with backward hooks")
        (shape, back), self._backward_pass = self._backward_pass, None
        start = array(1.0 if gradient is None and not shape else gradient)
        if start.shape != shape or start.dtype.kind not in "iuf":
            found = "None, which is only for a loss (return_type=\"loss\")" if gradient is None else np.shape(gradient)
            raise ValueError(f"gradient: expected the shape of the output, {shape}, found {found}")
        with self.kind.of(gradient):
            back(start)

    def _embed(
        self,
        ids: np.ndarray,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        mask: Any = None,
        past: list[KeyValues] | None = None,
    ) -> tuple[Any, np.ndarray | None]:
        """Computes the residual stream before the first block, and the padding mask if one is needed."""
        before = past[0].past_keys if past else None
        offset = 0 if before is None else before.shape[1]
        mask = self._mask(ids, prepend_bos, padding_side, mask, offset)
        self._set_positions(offset, mask)
        if offset + ids.shape[1] > self.cfg.n_ctx:
            raise ValueError(f"{offset + ids.shape[1]} tokens exceed the context of {self.cfg.n_ctx} tokens")
        if ids.shape[1] == 0:
            raise ValueError("no tokens: the text is empty and prepend_bos is False")
        embed = self.hook_embed(self.embed.compute(ids))
        return added(embed, self.hook_pos_embed(self.pos_embed.compute(ids, offset, mask))), mask

    def _set_positions(self, past: int, mask: np.ndarray | None) -> None:
        """Stores the positions for the current run."""
        self._past, self._starts = past, np.zeros(1, np.int64) if mask is None else mask.argmax(1)

    def _mask(
        self, ids: np.ndarray | None, prepend_bos: bool | None, padding_side: str | None, mask: Any, offset: int = 0
    ) -> np.ndarray | None:
        """Validates a mask, which includes `offset` earlier tokens, or computes the mask for left padding.

        Only left padding needs a mask, because later tokens could attend to it.
        """
        if mask is not None:
            mask = array(mask)
            if ids is not None and mask.shape != (len(ids), offset + ids.shape[1]):
                expected = (len(ids), offset + ids.shape[1])
                raise ValueError(f"attention_mask: expected the shape of the tokens, {expected}, found shape {mask.shape}")
            return mask
        side = checked_side(padding_side or self.tokenizer.padding_side)
        if side == "left" and ids is not None:
            return attention_mask(self.tokenizer, ids, self._prepends(prepend_bos), side)
        return None

    def input_to_embed(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None, attention_mask: Any = None
    ) -> tuple[Any, Any, None, Any]:
        """Returns the residual stream before the first block, the ids, None, and the padding mask, if any."""
        with self.kind.of(input):
            ids = self._tokens(input, prepend_bos, padding_side)
            residual, mask = self._embed(ids, prepend_bos, padding_side, attention_mask)
            return self.kind.out(residual), self.kind.out(ids), None, self.kind.out(mask)

    def loss_fn(self, logits: Any, tokens: Any, attention_mask: Any = None, per_token: bool = False) -> Any:
        """Computes the loss for logits (b, p, V); see utils.lm_cross_entropy_loss."""
        return utils.lm_cross_entropy_loss(logits, tokens, attention_mask, per_token)

    def run_with_cache(
        self, *model_args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **options: Any
    ) -> tuple[Any, Any]:
        """Returns the output of `forward` and an ActivationCache of the activations at the hook points.

        For names_filter, pos_slice and incl_bwd see HookedRootModule.run_with_cache, and for other options `forward`.
        """
        found, kept = super().run_with_cache(*model_args, remove_batch_dim=remove_batch_dim, **options)
        if return_cache_object:
            return found, ActivationCache(kept, self, has_batch_dim=not remove_batch_dim)
        return found, kept

    def generate(
        self,
        input: Any = "",
        max_new_tokens: int = 10,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        return_type: str | None = "input",
        verbose: bool = True,
    ) -> Any:
        """Continues texts or ids (b, p) and returns each prompt with its completion.

        BOS is prepended to texts by default. Hooks run at every step. return_type: "str", "tokens", or "input" for the type of the
        input. Sampling uses numpy's generator (`numpy.random.seed`). verbose: show progress on a terminal.
        """
        _check_return_type(return_type)
        sampling = (do_sample, top_k, top_p, temperature, freq_penalty)
        stops = self._stops(stop_at_eos, eos_token_id)
        ids, mask = self._prompts(input, prepend_bos, padding_side)
        steps = self._next_tokens(input, ids, mask, max_new_tokens, stops, use_past_kv_cache, sampling, verbose)
        ids = np.concatenate([ids, *steps], 1)
        with self.kind.of(input):
            if return_type == "tokens" or not (self._is_text(input) or return_type == "str"):
                return self.kind.out(ids)
        return self._decode(ids)

    def generate_stream(
        self,
        input: Any = "",
        max_new_tokens: int = 10,
        max_tokens_per_yield: int = 25,
        stop_at_eos: bool = True,
        eos_token_id: int | Sequence[int] | None = None,
        do_sample: bool = True,
        top_k: int | None = None,
        top_p: float | None = None,
        temperature: float = 1.0,
        freq_penalty: float = 0.0,
        use_past_kv_cache: bool = True,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        return_type: str | None = "input",
        verbose: bool = True,
    ) -> Iterator[Any]:
        """Continues a text or ids (b, p) and yields token ids (b, n), beginning with the prompt.

        Yields after every max_tokens_per_yield tokens, and the rest at the end. return_type: "str" yields text. Other options are
        those of `generate`.
        """
        _check_return_type(return_type)

        def output(pieces: list[np.ndarray]) -> Any:
            ids = np.concatenate(pieces, 1)
            if return_type == "str":
                return self._decode(ids)
            with self.kind.of(input):
                return self.kind.out(ids)

        sampling = (do_sample, top_k, top_p, temperature, freq_penalty)
        stops = self._stops(stop_at_eos, eos_token_id)
        ids, mask = self._prompts(input, prepend_bos, padding_side)
        pieces = [ids]
        for new in self._next_tokens(input, ids, mask, max_new_tokens, stops, use_past_kv_cache, sampling, verbose):
            pieces.append(new)
            if sum(piece.shape[1] for piece in pieces) >= max_tokens_per_yield:
                yield output(pieces)
                pieces = []
        if pieces:
            yield output(pieces)

    def _prompts(self, input: Any, prepend_bos: bool | None, padding_side: str | None) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ids of prompts (b, p) and their padding mask.

        Several texts are padded on the left, so that their next tokens are in the same column.
        """
        is_text = self._is_text(input)
        side = padding_side or ("left" if is_text and not isinstance(input, str) else None)
        ids = self._tokens(input, prepend_bos, side)
        if side == "right" and is_text and (attention_mask(self.tokenizer, ids, self._prepends(prepend_bos), side) == 0).any():
            warnings.warn("padding_side='right' continues shorter texts after their padding; use 'left'", stacklevel=3)
        if side == "left":
            return ids, attention_mask(self.tokenizer, ids, self._prepends(prepend_bos), side)
        return ids, np.ones_like(ids)

    def _decode(self, ids: np.ndarray) -> str | list[str]:
        """Decodes rows of ids to a list of texts, or a single row to a text."""
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts[0] if len(texts) == 1 else texts

    def _stops(self, stop_at_eos: bool, eos_token_id: int | Sequence[int] | None) -> np.ndarray:
        """Returns the ids of the end tokens."""
        if stop_at_eos and eos_token_id is None and self.tokenizer.eos_token_id is None:
            raise ValueError("eos_token_id: this model has no tokenizer; pass the id of the end token, or stop_at_eos=False")
        ends = self.tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        return np.atleast_1d(ends) if stop_at_eos else np.zeros(0, np.int64)

    def _next_tokens(
        self,
        input: Any,
        ids: np.ndarray,
        mask: np.ndarray,
        max_new_tokens: int,
        stops: np.ndarray,
        use_past_kv_cache: bool,
        sampling: tuple[bool, int | None, float | None, float, float],
        verbose: bool,
    ) -> Iterator[np.ndarray]:
        """Yields the next token of each text, (b, 1), until all texts have ended."""
        do_sample, top_k, top_p, temperature, freq_penalty = sampling
        past = [KeyValues() for _ in self.blocks] if use_past_kv_cache else None
        is_finished = np.zeros(len(ids), bool)
        new = ids
        for _ in progress(range(max_new_tokens), max_new_tokens, "generating", verbose):
            with self.kind.of(input), no_gradients():
                logits = array(self.forward(new if past else ids, attention_mask=mask, past_kv_cache=past))[:, -1]
            if do_sample:
                chosen = utils.sample_logits(logits, top_k, top_p, temperature, freq_penalty, ids)
            else:
                chosen = logits.argmax(-1)
            if len(stops):
                chosen = np.where(is_finished, stops[0], chosen)
                is_finished |= np.isin(chosen, stops)
            new = chosen[:, None].astype(np.int64)
            yield new
            ids = np.concatenate([ids, new], 1)
            mask = np.concatenate([mask, np.ones_like(new)], 1)
            if is_finished.all():
                return

    # Switches.

    def switch(self, name: str) -> str | None:
        """Returns the name of the method that enables a hook point, or None if it is enabled."""
        for end, option in SWITCHES.items():
            if name.endswith(end) and not getattr(self.cfg, option):
                return f"set_{option}"
        return None

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Enables or disables `attn.hook_result`, the output of each head."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Enables or disables separate inputs for the queries, keys and values of each head.

        They are at `hook_q_input`, `hook_k_input` and `hook_v_input`.
        """
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Enables or disables a separate input for each head, at `hook_attn_in`."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Enables or disables `hook_mlp_in`, the input of MLPs."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    # Weights. As tensors, those outside the blocks are the parameters, and stacks are copies, as in TransformerLens. If a weight
    # requires gradients, the copy is part of the graph. Arrays are read-only views; `blocks[l].attn.W_Q` is writable.

    def _own(self, module: Weighted, name: str) -> Any:
        """Returns a weight outside the blocks."""
        return getattr(module, name) if self.kind.is_torch else read_only(module._weight(name))

    def _stacked(self, path: str, name: str, values: np.ndarray) -> Any:
        """Returns a weight of every block. `values` contains the weights as one array."""
        weights = [getattr(block, path)._weight(name) for block in self.blocks]
        return torch_module().stack([tensor(one) for one in weights]) if any(map(is_live, weights)) else self.kind.out(read_only(values))

    @property
    def W_E(self) -> Any:
        """Token embeddings, (V, C)."""
        return self._own(self.embed, "W_E")

    @property
    def W_pos(self) -> Any:
        """Position embeddings, (n_ctx, C)."""
        return self._own(self.pos_embed, "W_pos")

    @property
    def W_E_pos(self) -> Any:
        """Token and position embeddings, (V + n_ctx, C)."""
        parts = together(self.embed._weight("W_E"), self.pos_embed._weight("W_pos"))
        return self.kind.out(library(parts[0]).concatenate(parts))

    @property
    def W_U(self) -> Any:
        """Unembedding weights, (C, V)."""
        return self._own(self.unembed, "W_U")

    @property
    def b_U(self) -> Any:
        """Unembedding biases, (V)."""
        return self._own(self.unembed, "b_U")

    @property
    def W_Q(self) -> Any:
        """Query weights, (L, H, C, D)."""
        return self._stacked("attn", "W_Q", np.moveaxis(self._weights.W_QKV[:, :, 0], 1, 2))

    @property
    def W_K(self) -> Any:
        """Key weights, (L, H, C, D)."""
        return self._stacked("attn", "W_K", np.moveaxis(self._weights.W_QKV[:, :, 1], 1, 2))

    @property
    def W_V(self) -> Any:
        """Value weights, (L, H, C, D)."""
        return self._stacked("attn", "W_V", np.moveaxis(self._weights.W_QKV[:, :, 2], 1, 2))

    @property
    def W_O(self) -> Any:
        """Attention output weights, (L, H, D, C)."""
        return self._stacked("attn", "W_O", self._weights.W_O)

    @property
    def W_in(self) -> Any:
        """MLP input weights, (L, C, M)."""
        return self._stacked("mlp", "W_in", self._weights.W_in)

    @property
    def W_out(self) -> Any:
        """MLP output weights, (L, M, C)."""
        return self._stacked("mlp", "W_out", self._weights.W_out)

    @property
    def b_Q(self) -> Any:
        """Query biases, (L, H, D)."""
        return self._stacked("attn", "b_Q", self._weights.b_QKV[:, 0])

    @property
    def b_K(self) -> Any:
        """Key biases, (L, H, D)."""
        return self._stacked("attn", "b_K", self._weights.b_QKV[:, 1])

    @property
    def b_V(self) -> Any:
        """Value biases, (L, H, D)."""
        return self._stacked("attn", "b_V", self._weights.b_QKV[:, 2])

    @property
    def b_O(self) -> Any:
        """Attention output biases, (L, C)."""
        return self._stacked("attn", "b_O", self._weights.b_O)

    @property
    def b_in(self) -> Any:
        """MLP input biases, (L, M)."""
        return self._stacked("mlp", "b_in", self._weights.b_in)

    @property
    def b_out(self) -> Any:
        """MLP output biases, (L, C)."""
        return self._stacked("mlp", "b_out", self._weights.b_out)

    @property
    def QK(self) -> FactoredMatrix:
        """QK circuit of each head, W_Q W_Kᵀ, leading axes (L, H)."""
        return FactoredMatrix(self.W_Q, self.W_K.swapaxes(-1, -2))

    @property
    def OV(self) -> FactoredMatrix:
        """OV circuit of each head, W_V W_O, leading axes (L, H)."""
        return FactoredMatrix(self.W_V, self.W_O)

    def all_composition_scores(self, mode: str) -> Any:
        """Computes composition scores (L, H, L, H) of each head with the inputs of each later head.

        mode: "Q", "K" or "V" for the query, key or value input. Scores are 0 unless the second head is in a later layer. Source: "A
        Mathematical Framework for Transformer Circuits".
        """
        if mode not in ("Q", "K", "V"):
            raise ValueError(f"mode: expected 'Q', 'K' or 'V', found {mode!r}")
        right = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        scores = utils.composition_scores(self.OV, right)
        layers = np.arange(self.cfg.n_layers)
        is_later = layers[:, None, None, None] < layers[None, None, :, None]
        return self.kind.out(np.where(is_later, array(scores), np.float32(0)))

    def all_head_labels(self) -> list[str]:
        """Returns the labels of all heads: L0H0, L0H1, …"""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Any:
        """Sums the output biases of all blocks before `layer`, (C).

        mlp_input: also include the attention output bias of that block.
        """
        if mlp_input and layer >= self.cfg.n_layers:
            raise AssertionError(f"mlp_input: layer {layer} is out of range")
        total = self._weights.b_O[: layer + mlp_input].sum(0)
        return self.kind.out(total + self._weights.b_out[:layer].sum(0) if include_mlp_biases else total)

    def tokens_to_residual_directions(self, tokens: Any) -> Any:
        """Returns the columns of W_U for a token id, a single-token text, or ids of any shape: (…, C).

        For an array with one id, returns (C).
        """
        ids = np.asarray(self.to_single_token(tokens)) if isinstance(tokens, str) else array(tokens)
        ids = ids.reshape(()) if ids.size == 1 else ids
        with self.kind.of(tokens):
            columns = self.unembed._weight("W_U")[:, ids]
            return self.kind.out(library(columns).moveaxis(columns, 0, -1))

    # Devices.

    def to(self, device_or_dtype: Any, print_details: bool = True) -> "HookedTransformer":
        """Returns the model itself. Rejects devices other than the CPU."""
        if str(device_or_dtype) not in ("cpu", "torch.float32", "float32"):
            raise ValueError(f"this model computes only in float32 on the CPU, found {device_or_dtype!r}")
        return self

    def cpu(self) -> "HookedTransformer":
        """Returns the model itself."""
        return self
