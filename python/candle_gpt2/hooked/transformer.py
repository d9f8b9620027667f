"""`HookedTransformer`: GPT-2 under the names and with the numbers of TransformerLens, on numpy."""

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
from .arrays import Kind, added, array, is_live, matching, no_gradients, read_only, tensor, torch_module
from .cache import ActivationCache
from .components import Embed, KeyValues, LayerNorm, PosEmbed, TransformerBlock, Unembed
from .config import HookedTransformerConfig
from .factored_matrix import FactoredMatrix
from .gradients import Tape, loss_gradient
from .hook_points import Hook, HookedRootModule, HookPoint, Keys, Name
from .in_memory import ForeignTokenizer, NoTokenizer, is_transformers, model_of
from .progress import progress
from .splice import WithSAEs
from .tokens import Tokenizer, attention_mask, checked_side, padded
from .warned import warn
from .weights import Weights

#: What ``return_type="both"`` gives.
Output = namedtuple("Output", ["logits", "loss"])

# Names of TransformerLens for models that are called otherwise on the Hub.
ALIASES = {"gpt2-small": "gpt2", "distillgpt2": "distilgpt2", "distill-gpt2": "distilgpt2", "distil-gpt2": "distilgpt2"}
# Hook points that take time or memory, and what turns them on.
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
    """A GPT-2 with TransformerLens' names: prepends BOS to texts by default, and `generate` returns prompt and continuation.

    `native` is the engine's `Model`, which does neither; `prepend_bos` is a keyword of both.

    >>> from candle_gpt2 import HookedTransformer
    >>> model = HookedTransformer.from_pretrained("gpt2")
    >>> logits, cache = model.run_with_cache("When Mary and John went to the store")
    >>> cache["pattern", 3].shape
    (1, 12, 9, 9)

    Values are numpy arrays, or torch tensors if torch was imported before the model was opened; `tensors=` chooses. A method that gets a
    tensor returns tensors, whenever torch was imported.

    `HookedTransformer(cfg)` makes an untrained model of a GPT-2 configuration: a HookedTransformerConfig, TransformerLens' own, or a
    dict. tokenizer: one of transformers, or a `Model` whose tokenizer is used; without it the model takes token ids only.
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
        self._is_native_stale = False
        self.kind = Kind.chosen(tensors)
        source = native if tokenizer is None else tokenizer
        if source is None:
            source = NoTokenizer(cfg.d_vocab)
        elif not isinstance(source, Model):
            source = ForeignTokenizer(source)
        self.tokenizer = Tokenizer(source, default_padding_side)
        self._weights = weights
        # Of the present run: tokens before it in the KV cache, and where each text begins.
        self._past, self._starts = 0, np.zeros(1, np.int64)
        # Of the last run with backward hooks: the shape of its output, and the backward pass from the gradient there.
        self._way_back: tuple[tuple[int, ...], Callable[[np.ndarray], None]] | None = None
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

        model_name: a name on the Hugging Face Hub, a path, a `Model`, a GPT-2 of transformers in memory, or None for the built-in model.
        fold_ln, center_writing_weights, center_unembed, fold_value_biases: processing steps, which change activations but no prediction.
        refactor_factored_attn_matrices: also balance W_Q and W_K of each head and orthonormalize the rows of W_O. default_prepend_bos:
        prepend <|endoftext|> to texts, True if None. tensors: "numpy" or "torch", the type of outputs; torch by default if it is
        imported. hf_model: a GPT-2 of transformers, whose weights are used. tokenizer: one of transformers, or a path; by default that
        of model_name. Everything is computed in float32 on the CPU. Other options are those of `Model.from_pretrained`.
        """
        if str(device or "cpu") not in ("cpu", "auto"):
            raise ValueError(f"device: this model runs on the CPU, found {device!r}; Model runs on GPUs")
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
                raise ValueError("hf_model: give a name or a path beside it, not a Model, which has weights of its own")
            native, name = model_name, model_name.name
        elif hf_model is not None:
            name = str(model_name or hf_model.config.name_or_path or "")
            native, folder = model_of(hf_model, name, tokenizer, options)
        else:
            given = {} if tokenizer is None or hasattr(tokenizer, "encode") else {"tokenizer": tokenizer}
            native = cls._opened(model_name, {**options, **given})
            name = native.name
        cfg = HookedTransformerConfig.of_model(native.config, name)
        cfg.default_prepend_bos = default_prepend_bos is not False
        weights = Weights.of_checkpoint(native.parameters(), cfg)
        foreign = tokenizer if hasattr(tokenizer, "encode") else None
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
    def _opened(cls, name: str | PathLike[str] | None, options: dict[str, Any]) -> Model:
        """The model of this name; an error lists the names that there are."""
        known = {**inspect.signature(cls.from_pretrained).parameters, **inspect.signature(Model.from_pretrained).parameters}
        del known["options"]
        for option in options.keys() - known.keys():
            nearest = difflib.get_close_matches(option, known, n=1, cutoff=0)[0]
            raise TypeError(f"{cls.__name__}.from_pretrained has no option {option!r}; the nearest name is {nearest!r}")
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
        """Processes the weights in place, see `from_pretrained`; a step that was done before changes nothing."""
        weights = self._weights
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

    @property
    def native(self) -> Model:
        """The engine's Model: no BOS token by default, and its `generate` returns the continuation only. Warns if its weights are older."""
        if self._native is None:
            raise RuntimeError("native: a model that was made from a configuration has no Model of the engine")
        if self._is_native_stale:
            warn("native: the engine's Model has the weights from before load_state_dict")
        return self._native

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Keys:
        """Copies weights from a dict by TransformerLens' names. Returns missing_keys and unexpected_keys, a RuntimeError if strict.

        The weights are copied as they are: those of an unprocessed model belong into an unprocessed one, or into
        `load_and_process_state_dict`."""
        if self.cfg.normalization_type == "LNPre":
            norms = {name: value for name, value in state_dict.items() if re.search(r"(^|\.)ln(1|2|_final)\.[wb]$", name)}
            for name, value in norms.items():
                if (array(value) != (1 if name.endswith("w") else 0)).any():
                    raise ValueError(
                        f"{name}: the norms of this model are folded into its weights; load this state with load_and_process_state_dict into a "
                        "model of from_pretrained_no_processing"
                    )
            # TransformerLens has none in such a model.
            own = {name: value for name, value in self.state_dict().items() if re.search(r"(^|\.)ln(1|2|_final)\.[wb]$", name)}
            state_dict = {**own, **state_dict}
        keys = super().load_state_dict(state_dict, strict)
        self._is_native_stale = self._native is not None
        return keys

    def load_and_process_state_dict(
        self,
        state_dict: Mapping[str, Any],
        fold_ln: bool = True,
        center_writing_weights: bool = True,
        center_unembed: bool = True,
        fold_value_biases: bool = True,
        refactor_factored_attn_matrices: bool = False,
    ) -> None:
        """Copies the weights of an unprocessed model and processes them, see `from_pretrained`."""
        self.load_state_dict(state_dict)
        self.process_weights_(
            fold_ln, center_writing_weights, center_unembed, refactor_factored_attn_matrices, fold_value_biases=fold_value_biases
        )

    def as_hooks(self, entry: Any) -> list[tuple[Name, Hook]]:
        """The pairs of a name and a hook that an entry of fwd_hooks stands for; a Steering and a ControlVector of `native` are entries."""
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
            there = added[row, start : start + len(vectors)]
            there += vectors[: len(there)]
        return value + matching(value, added)

    def __repr__(self) -> str:
        of = self.cfg
        return f"{type(self).__name__}({of.model_name!r}, n_layers={of.n_layers}, n_heads={of.n_heads}, d_model={of.d_model})"

    # Text.

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = True,
    ) -> Any:
        """Token ids (b, p) of one text or several, padded to the longest and cut at n_ctx."""
        return self.kind.out(self._tokens(input, prepend_bos, padding_side, truncate))

    def _tokens(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None, truncate: bool = True
    ) -> np.ndarray:
        """Ids (b, p) of texts, or of ids."""
        if not self._is_text(input):
            ids = array(input)
            ids = ids[None] if ids.ndim == 1 else ids
            if ids.ndim != 2 or ids.dtype.kind not in "iu":
                raise ValueError(f"expected a text, texts, or token ids (p) or (b, p), found shape {ids.shape} of {ids.dtype}")
            if ids.size and not (0 <= ids.min() and ids.max() < self.cfg.d_vocab):
                raise ValueError(f"token ids: expected 0 to {self.cfg.d_vocab - 1}, found {ids.min()} to {ids.max()}")
            return ids
        texts = [input] if isinstance(input, str) else list(input)
        begin = [self.tokenizer.bos_token_id] if self._prepends(prepend_bos) else []
        rows = [begin + self.tokenizer.encode(text) for text in texts]
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
        """The text of ids; a list of them for (b, p)."""
        ids = array(tokens)
        if ids.ndim > 2:
            raise ValueError(f"expected token ids of one or two dimensions, found shape {ids.shape}")
        return self.tokenizer.batch_decode(ids) if ids.ndim == 2 else self.tokenizer.decode(ids)

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None) -> Any:
        """The text of each token of a text or of ids (p) or (1, p), where prepend_bos counts for texts alone; of a list, a list of
        lists."""
        if isinstance(input, list):
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in input]
        if isinstance(input, str):
            ids = self._tokens(input, prepend_bos, padding_side)[0]
        else:
            ids = np.atleast_1d(array(input).squeeze())
            if ids.ndim != 1:
                raise AssertionError(f"expected token ids (p) or (1, p), found shape {ids.shape}")
        return self.tokenizer.str_tokens(ids)

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token; an AssertionError if it is none or more."""
        ids = self.tokenizer.encode(string)
        assert len(ids) == 1, f"{string!r} is {len(ids)} tokens, not one"
        return int(ids[0])

    def to_single_str_token(self, int_token: int) -> str:
        """The text of an id."""
        return self.tokenizer.str_tokens([int(int_token)])[0]

    def get_token_position(
        self,
        single_token: str | int,
        input: Any,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token is in a text or in ids, the first or the last time; the beginning-of-text token counts."""
        ids = self._tokens(input, prepend_bos, padding_side)
        assert len(ids) == 1, f"expected one text, found {len(ids)}"
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        places = np.flatnonzero(ids[0] == token)
        assert len(places) > 0, f"{single_token!r} is not in the text"
        if mode not in ("first", "last"):
            raise ValueError(f"mode: expected 'first' or 'last', found {mode!r}")
        return int(places[0 if mode == "first" else -1])

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
        return_type: "logits" (b, p, V), "loss", the mean cross-entropy of the next tokens, "both", or None. loss_per_token: the loss of
        each token, (b, p − 1). stop_at_layer: return the residual stream before that block; negative counts from the end. Backward hooks
        run in the output's `backward()`, or without torch in `model.backward()`. Autograd follows the run from the first value or weight
        that requires a gradient, see `requires_grad_`.
        """
        is_whole = start_at_layer is None and stop_at_layer is None and past_kv_cache is None and return_type is not None
        if return_type not in ("logits", "loss", "both", None):
            raise ValueError(f"return_type: expected 'logits', 'loss', 'both' or None, found {return_type!r}")
        with self.kind.of(input), self._recording(is_whole) as tape:
            ids: np.ndarray | None
            if start_at_layer is None:
                ids = self._tokens(input, prepend_bos, padding_side)
                residual, mask = self._embedded(ids, prepend_bos, padding_side, attention_mask, past_kv_cache)
            else:
                ids = None if tokens is None else array(tokens)
                residual = self._residual(input, start_at_layer, ids)
                mask = self._mask(ids, prepend_bos, padding_side, attention_mask)
                self._begin(0, mask)
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
            of_logits = self._given(tape, logits, lambda gradient: gradient)
            if return_type == "logits":
                return of_logits
            if ids is None:
                raise ValueError("tokens: the loss needs the ids (b, p) that the residual stream belongs to")
            found = utils.lm_cross_entropy_loss(logits, ids, mask, loss_per_token)
            loss = self._given(tape, found, lambda gradient: loss_gradient(logits, ids, mask, gradient))
            return loss if return_type == "loss" else Output(of_logits, loss)

    @contextmanager
    def _recording(self, is_whole: bool) -> Iterator[Tape | None]:
        """What backward hooks need during a run: torch's autograd, or without torch a tape."""
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
                "backward hooks need a whole run without torch: no start_at_layer, stop_at_layer, past_kv_cache or return_type=None"
            )

    def _residual(self, input: Any, layer: int, ids: np.ndarray | None) -> Any:
        """The residual stream (b, p, C) that a run begins with at a block."""
        residual = array(input)
        if residual.ndim != 3 or residual.shape[2] != self.cfg.d_model or residual.dtype.kind != "f":
            raise ValueError(
                f"start_at_layer={layer}: expected the residual stream before that block, floats (batch, positions, {self.cfg.d_model}), "
                f"found shape {residual.shape} of {residual.dtype}"
            )
        if ids is not None and ids.shape != residual.shape[:2]:
            expected = residual.shape[:2]
            raise ValueError(f"tokens: expected ids of the positions of the residual stream, shape {expected}, found {ids.shape}")
        return input.to("cpu", torch_module().float32) if is_live(input) else residual

    def _given(self, tape: Tape | None, value: Any, at_logits: Callable[[np.ndarray], np.ndarray]) -> Any:
        """What a run gives, from which backward hooks are reached; at_logits: the gradient at the logits from that at the value."""
        if tape is not None:
            self._way_back = np.shape(value), lambda gradient: tape.back(at_logits(gradient))
        elif is_live(value) and any(point.bwd_hooks for point in self.hook_points()):
            self._way_back = tuple(value.shape), lambda gradient: value.backward(tensor(gradient.astype(np.float32)))
        return self.kind.out(value)

    def backward(self, gradient: Any = None) -> None:
        """Runs the backward hooks of the last run: what `backward()` of a tensor does, without torch. gradient: of one's metric, in the
        shape of what the run gave; 1 for a loss if None."""
        if self._way_back is None:
            raise RuntimeError("backward: expected a run with backward hooks before it, found none")
        (shape, back), self._way_back = self._way_back, None
        given = array(1.0 if gradient is None and not shape else gradient)
        if given.shape != shape or given.dtype.kind not in "iuf":
            found = "none; a loss, return_type=\"loss\", needs none" if gradient is None else np.shape(gradient)
            raise ValueError(f"gradient: expected shape {shape}, that of what the run gave, found {found}")
        with self.kind.of(gradient):
            back(given)

    def _embedded(
        self,
        ids: np.ndarray,
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        mask: Any = None,
        past: list[KeyValues] | None = None,
    ) -> tuple[Any, np.ndarray | None]:
        """The residual stream before the first block, and the padding mask if it matters."""
        before = past[0].past_keys if past else None
        offset = 0 if before is None else before.shape[1]
        mask = self._mask(ids, prepend_bos, padding_side, mask, offset)
        self._begin(offset, mask)
        if offset + ids.shape[1] > self.cfg.n_ctx:
            raise ValueError(f"{offset + ids.shape[1]} tokens; the context holds {self.cfg.n_ctx}")
        if ids.shape[1] == 0:
            raise ValueError("no tokens: the text is empty and prepend_bos is False")
        embed = self.hook_embed(self.embed.compute(ids))
        return added(embed, self.hook_pos_embed(self.pos_embed.compute(ids, offset, mask))), mask

    def _begin(self, past: int, mask: np.ndarray | None) -> None:
        """Notes which positions a run has."""
        self._past, self._starts = past, np.zeros(1, np.int64) if mask is None else mask.argmax(1)

    def _mask(
        self, ids: np.ndarray | None, prepend_bos: bool | None, padding_side: str | None, mask: Any, offset: int = 0
    ) -> np.ndarray | None:
        """The given mask, which is also that of `offset` tokens before; else that of the padding at the left, which later tokens would
        see."""
        if mask is not None:
            mask = array(mask)
            if ids is not None and mask.shape != (len(ids), offset + ids.shape[1]):
                expected = (len(ids), offset + ids.shape[1])
                raise ValueError(f"attention_mask: expected the shape of the tokens {expected}, found {mask.shape}")
            return mask
        side = checked_side(padding_side or self.tokenizer.padding_side)
        if side == "left" and ids is not None:
            return attention_mask(self.tokenizer, ids, self._prepends(prepend_bos), side)
        return None

    def input_to_embed(
        self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None, attention_mask: Any = None
    ) -> tuple[Any, Any, None, Any]:
        """The residual stream before the first block, the ids, None, and the mask of the padding if there is one."""
        with self.kind.of(input):
            ids = self._tokens(input, prepend_bos, padding_side)
            residual, mask = self._embedded(ids, prepend_bos, padding_side, attention_mask)
            return self.kind.out(residual), self.kind.out(ids), None, self.kind.out(mask)

    def loss_fn(self, logits: Any, tokens: Any, attention_mask: Any = None, per_token: bool = False) -> Any:
        """The loss of logits (b, p, V), see utils.lm_cross_entropy_loss."""
        return utils.lm_cross_entropy_loss(logits, tokens, attention_mask, per_token)

    def run_with_cache(
        self, *model_args: Any, return_cache_object: bool = True, remove_batch_dim: bool = False, **options: Any
    ) -> tuple[Any, Any]:
        """Returns the output of `forward` and an ActivationCache of the activations at the hook points.

        For names_filter, pos_slice and incl_bwd see HookedRootModule.run_with_cache, for the rest `forward`."""
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
        """Continues texts or ids (b, p) and returns prompt and continuation; BOS is prepended to texts by default.

        Hooks run at every step. return_type: "str", "tokens", or "input" for the type of the input. Samples with numpy's generator
        (`numpy.random.seed`). verbose: show progress on a terminal."""
        _check_return_type(return_type)
        sampling = (do_sample, top_k, top_p, temperature, freq_penalty)
        stops = self._stops(stop_at_eos, eos_token_id)
        ids, mask = self._prompts(input, prepend_bos, padding_side)
        steps = self._continued(input, ids, mask, max_new_tokens, stops, use_past_kv_cache, sampling, verbose)
        ids = np.concatenate([ids, *steps], 1)
        with self.kind.of(input):
            if return_type == "tokens" or not (self._is_text(input) or return_type == "str"):
                return self.kind.out(ids)
        return self._decoded(ids)

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
        """Continues a text or ids (b, p) and yields token ids (b, n) while it generates, the prompt's first.

        Yields whenever max_tokens_per_yield tokens have come together, and the rest at the end. return_type: "str" yields text. Other
        options are those of `generate`."""
        _check_return_type(return_type)

        def given(pieces: list[np.ndarray]) -> Any:
            ids = np.concatenate(pieces, 1)
            if return_type == "str":
                return self._decoded(ids)
            with self.kind.of(input):
                return self.kind.out(ids)

        sampling = (do_sample, top_k, top_p, temperature, freq_penalty)
        stops = self._stops(stop_at_eos, eos_token_id)
        ids, mask = self._prompts(input, prepend_bos, padding_side)
        pieces = [ids]
        for new in self._continued(input, ids, mask, max_new_tokens, stops, use_past_kv_cache, sampling, verbose):
            pieces.append(new)
            if sum(piece.shape[1] for piece in pieces) >= max_tokens_per_yield:
                yield given(pieces)
                pieces = []
        if pieces:
            yield given(pieces)

    def _prompts(self, input: Any, prepend_bos: bool | None, padding_side: str | None) -> tuple[np.ndarray, np.ndarray]:
        """The ids of prompts (b, p), and their padding mask. Several texts are padded on the left: the next tokens are in the last column."""
        is_text = self._is_text(input)
        side = padding_side or ("left" if is_text and not isinstance(input, str) else None)
        ids = self._tokens(input, prepend_bos, side)
        if side == "right" and is_text and (attention_mask(self.tokenizer, ids, self._prepends(prepend_bos), side) == 0).any():
            warnings.warn("padding_side='right' continues shorter texts after their padding; use 'left'", stacklevel=3)
        if side == "left":
            return ids, attention_mask(self.tokenizer, ids, self._prepends(prepend_bos), side)
        return ids, np.ones_like(ids)

    def _decoded(self, ids: np.ndarray) -> str | list[str]:
        """The texts of rows of ids; of one row the text alone."""
        texts = self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return texts[0] if len(texts) == 1 else texts

    def _stops(self, stop_at_eos: bool, eos_token_id: int | Sequence[int] | None) -> np.ndarray:
        """The ids of tokens that end a text."""
        if stop_at_eos and eos_token_id is None and self.tokenizer.eos_token_id is None:
            raise ValueError("eos_token_id: this model has no tokenizer; give the id of the token that ends texts, or stop_at_eos=False")
        given = self.tokenizer.eos_token_id if eos_token_id is None else eos_token_id
        return np.atleast_1d(given) if stop_at_eos else np.zeros(0, np.int64)

    def _continued(
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
        """The next tokens of each text, (b, 1), until all texts have ended."""
        do_sample, top_k, top_p, temperature, freq_penalty = sampling
        past = [KeyValues() for _ in self.blocks] if use_past_kv_cache else None
        is_finished = np.zeros(len(ids), bool)
        new = ids
        for _ in progress(range(max_new_tokens), max_new_tokens, "generating", verbose):
            with self.kind.of(input), no_gradients():
                logits = array(self.forward(new if past else ids, attention_mask=mask, past_kv_cache=past))[:, -1]
            if do_sample:
                drawn = utils.sample_logits(logits, top_k, top_p, temperature, freq_penalty, ids)
            else:
                drawn = logits.argmax(-1)
            if len(stops):
                drawn = np.where(is_finished, stops[0], drawn)
                is_finished |= np.isin(drawn, stops)
            new = drawn[:, None].astype(np.int64)
            yield new
            ids = np.concatenate([ids, new], 1)
            mask = np.concatenate([mask, np.ones_like(new)], 1)
            if is_finished.all():
                return

    # Switches.

    def switch(self, name: str) -> str | None:
        """The method that turns a hook point on, if it is off."""
        for end, option in SWITCHES.items():
            if name.endswith(end) and not getattr(self.cfg, option):
                return f"set_{option}"
        return None

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether `attn.hook_result`, what each head writes, is computed."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether queries, keys and values of each head have inputs of their own, at `hook_q_input`, `hook_k_input`, `hook_v_input`."""
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether each head has an input of its own, at `hook_attn_in`."""
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether MLPs read what is at `hook_mlp_in`."""
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    # Weights. Read-only views as arrays and copies as tensors: writing to them never changes the model. `blocks[l].attn.W_Q` can be
    # written to.

    def _shown(self, weight: np.ndarray) -> Any:
        return self.kind.out(read_only(weight))

    @property
    def W_E(self) -> Any:
        """(V, C)."""
        return self._shown(self._weights.W_E)

    @property
    def W_pos(self) -> Any:
        """(n_ctx, C)."""
        return self._shown(self._weights.W_pos)

    @property
    def W_E_pos(self) -> Any:
        """Both, (V + n_ctx, C)."""
        return self.kind.out(np.concatenate([self._weights.W_E, self._weights.W_pos]))

    @property
    def W_U(self) -> Any:
        """(C, V)."""
        return self._shown(self._weights.W_U)

    @property
    def b_U(self) -> Any:
        """(V)."""
        return self._shown(self._weights.b_U)

    @property
    def W_Q(self) -> Any:
        """(L, H, C, D)."""
        return self._shown(np.moveaxis(self._weights.W_QKV[:, :, 0], 1, 2))

    @property
    def W_K(self) -> Any:
        """(L, H, C, D)."""
        return self._shown(np.moveaxis(self._weights.W_QKV[:, :, 1], 1, 2))

    @property
    def W_V(self) -> Any:
        """(L, H, C, D)."""
        return self._shown(np.moveaxis(self._weights.W_QKV[:, :, 2], 1, 2))

    @property
    def W_O(self) -> Any:
        """(L, H, D, C)."""
        return self._shown(self._weights.W_O)

    @property
    def W_in(self) -> Any:
        """(L, C, M)."""
        return self._shown(self._weights.W_in)

    @property
    def W_out(self) -> Any:
        """(L, M, C)."""
        return self._shown(self._weights.W_out)

    @property
    def b_Q(self) -> Any:
        """(L, H, D)."""
        return self._shown(self._weights.b_QKV[:, 0])

    @property
    def b_K(self) -> Any:
        """(L, H, D)."""
        return self._shown(self._weights.b_QKV[:, 1])

    @property
    def b_V(self) -> Any:
        """(L, H, D)."""
        return self._shown(self._weights.b_QKV[:, 2])

    @property
    def b_O(self) -> Any:
        """(L, C)."""
        return self._shown(self._weights.b_O)

    @property
    def b_in(self) -> Any:
        """(L, M)."""
        return self._shown(self._weights.b_in)

    @property
    def b_out(self) -> Any:
        """(L, C)."""
        return self._shown(self._weights.b_out)

    @property
    def QK(self) -> FactoredMatrix:
        """QK circuit of each head, W_Q W_Kᵀ, leading axes (L, H)."""
        return FactoredMatrix(self.W_Q, self.W_K.swapaxes(-1, -2))

    @property
    def OV(self) -> FactoredMatrix:
        """OV circuit of each head, W_V W_O, leading axes (L, H)."""
        return FactoredMatrix(self.W_V, self.W_O)

    def all_composition_scores(self, mode: str) -> Any:
        """Composition scores (L, H, L, H) of each head (l1, h1) with the query, key or value input of each later head (l2, h2).

        mode: "Q", "K" or "V". 0 unless l1 < l2. Source: "A Mathematical Framework for Transformer Circuits"."""
        if mode not in ("Q", "K", "V"):
            raise ValueError(f"mode: expected 'Q', 'K' or 'V', found {mode!r}")
        right = {"Q": self.QK, "K": self.QK.T, "V": self.OV}[mode]
        scores = utils.composition_scores(self.OV, right)
        layers = np.arange(self.cfg.n_layers)
        is_later = layers[:, None, None, None] < layers[None, None, :, None]
        return self.kind.out(np.where(is_later, array(scores), np.float32(0)))

    def all_head_labels(self) -> list[str]:
        """L0H0, L0H1, …"""
        return [f"L{layer}H{head}" for layer in range(self.cfg.n_layers) for head in range(self.cfg.n_heads)]

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Any:
        """The sum of the biases that blocks before `layer` write, (C); with mlp_input the attention's of that block too."""
        if mlp_input and layer >= self.cfg.n_layers:
            raise AssertionError(f"mlp_input: there is no block {layer}")
        total = self._weights.b_O[: layer + mlp_input].sum(0)
        return self.kind.out(total + self._weights.b_out[:layer].sum(0) if include_mlp_biases else total)

    def tokens_to_residual_directions(self, tokens: Any) -> Any:
        """The columns of W_U for a token, a text that is one, or ids of any shape: (…, C). One id in an array gives (C)."""
        ids = np.asarray(self.to_single_token(tokens)) if isinstance(tokens, str) else array(tokens)
        ids = ids.reshape(()) if ids.size == 1 else ids
        with self.kind.of(tokens):
            return self.kind.out(np.moveaxis(self._weights.W_U[:, ids], 0, -1))

    # Devices: there is one.

    def to(self, device_or_dtype: Any, print_details: bool = True) -> "HookedTransformer":
        """Itself; a device other than the CPU is refused."""
        if str(device_or_dtype) not in ("cpu", "torch.float32", "float32"):
            raise ValueError(f"this model computes in float32 on the CPU, found {device_or_dtype!r}")
        return self

    def cpu(self) -> "HookedTransformer":
        """Itself."""
        return self
