"""`ActivationCache`: the activations from a run, and analyses of these activations."""

from collections.abc import ItemsView, Iterator, KeysView, ValuesView
from typing import Any, Literal, Protocol

import numpy as np

from . import utils
from .arrays import array, like
from .components import LayerNorm, TransformerBlock
from .config import HookedTransformerConfig
from .hook_points import HookPoint, version_2_name, unknown_hook_point
from .slices import Slice


class CachedModel(Protocol):
    """Model methods and attributes that a cache uses."""

    cfg: HookedTransformerConfig
    blocks: list[TransformerBlock]
    ln_final: LayerNorm
    hook_dict: dict[str, HookPoint]

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Any: ...
    def to_single_token(self, string: str) -> int: ...
    def tokens_to_residual_directions(self, tokens: Any) -> Any: ...
    def to(self, device_or_dtype: Any, print_details: bool = True) -> Any: ...


class ActivationCache:
    """Activations keyed by hook point.

    Examples: ``cache["blocks.3.attn.hook_z"]``, ``cache["z", 3]``, ``cache["z", -1]``, ``cache["scale", 0, "ln1"]``.

    The first axis of a stack is the component, followed by batch, position and residual width C. The batch axis is absent in a
    cache without one, and the position axis after a pos_slice with a single position. `apply_ln` divides by the norm's scale from
    this run.
    """

    def __init__(self, cache_dict: dict[str, Any], model: CachedModel, has_batch_dim: bool = True) -> None:
        self.cache_dict = cache_dict
        self.model = model
        self.has_batch_dim = has_batch_dim
        self.has_embed = "hook_embed" in cache_dict
        self.has_pos_embed = "hook_pos_embed" in cache_dict

    def __getitem__(self, key: str | tuple[Any, ...]) -> Any:
        if isinstance(key, str):
            name = key if key in self.cache_dict else utils.get_act_name(key)
        else:
            name, *rest = key
            if rest and rest[0] is not None and rest[0] < 0:
                rest[0] += self.model.cfg.n_layers
            name = utils.get_act_name(name, *rest)
        name = name if name in self.cache_dict else version_2_name(name)
        if name not in self.cache_dict:
            known = name in self.model.hook_dict
            excluded = f"{name!r} is not in this cache; names_filter excluded it, or the hook point is disabled"
            raise KeyError(excluded if known else unknown_hook_point(name, self.model.hook_dict))
        return self.cache_dict[name]

    def _array(self, *key: Any) -> np.ndarray:
        return array(self[key])

    def _out(self, value: np.ndarray) -> Any:
        return like(next(iter(self.cache_dict.values()), None), value)

    def __len__(self) -> int:
        return len(self.cache_dict)

    def __iter__(self) -> Iterator[str]:
        return iter(self.cache_dict)

    def __contains__(self, key: object) -> bool:
        return key in self.cache_dict

    def keys(self) -> KeysView[str]:
        """Names of hook points."""
        return self.cache_dict.keys()

    def values(self) -> ValuesView[Any]:
        """Values, in the order of the names."""
        return self.cache_dict.values()

    def items(self) -> ItemsView[str, Any]:
        """Pairs of names and values."""
        return self.cache_dict.items()

    def __repr__(self) -> str:
        return f"ActivationCache with keys {list(self.cache_dict)}"

    def to(self, device: Any, move_model: bool = False) -> "ActivationCache":
        """Returns the cache itself, which is always on the CPU."""
        self.model.to(device)
        return self

    def remove_batch_dim(self) -> "ActivationCache":
        """Removes the batch axis, whose length must be 1, and returns the cache itself."""
        if self.has_batch_dim:
            for name, value in self.cache_dict.items():
                assert value.shape[0] == 1, f"{name} has a batch of {value.shape[0]}; only a batch axis of length 1 can be removed"
            self.cache_dict = {name: value[0] for name, value in self.cache_dict.items()}
            self.has_batch_dim = False
        return self

    def apply_slice_to_batch_dim(self, batch_slice: Any) -> "ActivationCache":
        """Returns a cache with the selected rows of the batch.

        An int selects one row and removes the batch axis.
        """
        part = Slice.of(batch_slice)
        assert self.has_batch_dim or part.mode == "identity", "this cache has no batch axis"
        sliced = {name: part.apply(value) for name, value in self.cache_dict.items()}
        return ActivationCache(sliced, self.model, self.has_batch_dim and part.mode != "int")

    def _layer(self, layer: int | None) -> int:
        """Resolves a layer, where None and −1 mean the end of the residual stream."""
        return self.model.cfg.n_layers if layer is None or layer == -1 else layer

    def _stacked(
        self, rows: list[np.ndarray], labels: list[str], return_labels: bool, layer: int | None = None, **ln: Any
    ) -> Any:
        """Stacks components, and applies the norm before `layer` if `ln` contains arguments for the norm."""
        stack = np.stack(rows) if rows else np.zeros((0, *self._array("hook_embed").shape), np.float32)
        if ln:
            stack = self._normalized(stack, layer, **ln)
        return (self._out(stack), labels) if return_labels else self._out(stack)

    def stack_activation(self, activation_name: str, layer: int = -1, sublayer_type: str | None = None) -> Any:
        """Stacks the activations at one hook point in every block before `layer`, (L, …)."""
        return self._out(np.stack([self._array(activation_name, i, sublayer_type) for i in range(self._layer(layer))]))

    def accumulated_resid(
        self,
        layer: int | None = None,
        incl_mid: bool = False,
        apply_ln: bool = False,
        pos_slice: Any = None,
        mlp_input: bool = False,
        return_labels: bool = False,
    ) -> Any:
        """Stacks the residual stream before every block up to `layer`, for a logit lens.

        The default includes the output of the last block. At the end of the stream, apply_ln uses each row's own statistics, as in
        TransformerLens 4; before a block it uses the scale from the run.
        """
        layer, part = self._layer(layer), Slice.of(pos_slice)
        names: list[tuple[str, str, int]] = []
        for i in range(layer + 1):
            if i == self.model.cfg.n_layers:
                names.append(("final_post", "resid_post", i - 1))
                continue
            names.append((f"{i}_pre", "resid_pre", i))
            if (incl_mid and i < layer) or (mlp_input and i == layer):
                names.append((f"{i}_mid", "resid_mid", i))
        rows = [part.apply(self._array(name, i), -2) for _, name, i in names]
        labels = [label for label, _, _ in names]
        if apply_ln and layer == self.model.cfg.n_layers:
            return self._stacked([array(self.model.ln_final.compute(row)) for row in rows], labels, return_labels)
        ln = dict(pos_slice=part, mlp_input=mlp_input) if apply_ln else {}
        return self._stacked(rows, labels, return_labels, layer, **ln)

    def decompose_resid(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        mode: Literal["all", "mlp", "attn"] = "all",
        apply_ln: bool = False,
        pos_slice: Any = None,
        incl_embeds: bool = True,
        return_labels: bool = False,
    ) -> Any:
        """Decomposes the residual stream before `layer`: embeddings, then each block's attention and MLP outputs."""
        layer, part = self._layer(layer), Slice.of(pos_slice)
        names: list[tuple[str, tuple[Any, ...]]] = []
        if incl_embeds:
            names += [("embed", ("embed",))] * self.has_embed + [("pos_embed", ("pos_embed",))] * self.has_pos_embed
        for i in range(layer):
            names += [(f"{i}_attn_out", ("attn_out", i))] * (mode != "mlp") + [(f"{i}_mlp_out", ("mlp_out", i))] * (mode != "attn")
        if mlp_input and mode != "mlp":
            names.append((f"{layer}_attn_out", ("attn_out", layer)))
        rows = [part.apply(self._array(*key), -2) for _, key in names]
        ln = dict(pos_slice=part, mlp_input=mlp_input) if apply_ln else {}
        return self._stacked(rows, [label for label, _ in names], return_labels, layer, **ln)

    def compute_head_results(self) -> None:
        """Adds `hook_result`, the output of each head, computed from `hook_z` unless the run recorded it."""
        for i, block in enumerate(self.model.blocks):
            name = f"blocks.{i}.attn.hook_result"
            if name not in self.cache_dict:
                self.cache_dict[name] = self._out(block.attn.results(self._array("z", i)))

    def stack_head_results(
        self,
        layer: int = -1,
        return_labels: bool = False,
        incl_remainder: bool = False,
        pos_slice: Any = None,
        apply_ln: bool = False,
    ) -> Any:
        """Stacks the outputs of all heads before `layer`, (L·H, …).

        incl_remainder: append the rest of the residual stream, including biases.
        """
        layer, part = self._layer(layer), Slice.of(pos_slice)
        rows, labels = self._head_results(layer, part)
        if incl_remainder:
            end = part.apply(self._array("resid_post", layer - 1), -2)
            rows, labels = [*rows, end - sum(rows)], [*labels, "remainder"]
        return self._stacked(rows, labels, return_labels, layer, **(dict(pos_slice=part) if apply_ln else {}))

    def _head_results(self, layer: int, part: Slice) -> tuple[list[np.ndarray], list[str]]:
        self.compute_head_results()
        results = [part.apply(self._array("result", i), -3) for i in range(layer)]
        heads = range(self.model.cfg.n_heads)
        rows = [result[..., head, :] for result in results for head in heads]
        return rows, [f"L{i}H{head}" for i in range(layer) for head in heads]

    def get_neuron_results(
        self, layer: int, neuron_slice: Any = None, pos_slice: Any = None, project_output_onto: Any = None
    ) -> Any:
        """Computes the contribution of each neuron in a block, (…, M, C).

        project_output_onto: directions (C) or (C, n) to project the contributions onto; the result is (…, M) or (…, M, n).
        """
        found = self._neurons(layer, Slice.of(neuron_slice), Slice.of(pos_slice), project_output_onto)
        return self._out(found)

    def _neurons(self, layer: int, neurons: Slice, part: Slice, onto: Any) -> np.ndarray:
        acts = neurons.apply(part.apply(self._array("post", layer), -2), -1)
        written = neurons.apply(array(self.model.blocks[layer].mlp.W_out), 0)
        if onto is None:
            return acts[..., None] * written
        written = written @ array(onto)
        return acts * written if written.ndim == 1 else acts[..., None] * written

    def stack_neuron_results(
        self,
        layer: int,
        pos_slice: Any = None,
        neuron_slice: Any = None,
        return_labels: bool = False,
        incl_remainder: bool = False,
        apply_ln: bool = False,
        project_output_onto: Any = None,
        mlp_input: bool = False,
    ) -> Any:
        """Stacks the contributions of all neurons before `layer`, (L·M, …).

        The result has L·M·p·C values, or 1/C as many with project_output_onto.
        """
        layer, part, neurons = self._layer(layer), Slice.of(pos_slice), Slice.unwrap(neuron_slice)
        onto = None if project_output_onto is None else array(project_output_onto)
        # For a projection after the norm, project each neuron's centered vector and divide by the scale.
        centered = onto if onto is None or not apply_ln else onto - onto.mean(0)
        axis = -1 if onto is not None and onto.ndim == 1 else -2
        stack = [np.moveaxis(self._neurons(i, neurons, part, centered), axis, 0) for i in range(layer)]
        labels = [f"L{i}N{n}" for i in range(layer) for n in neurons.apply(np.arange(self.model.cfg.d_mlp or 0))]
        divides = apply_ln and onto is not None
        if divides:
            scale = self._scale(layer, mlp_input, part)
            stack = [rows / (scale[..., 0] if axis == -1 else scale) for rows in stack]
        if incl_remainder:
            end = part.apply(self._array(*(("resid_mid", layer) if mlp_input else ("resid_post", layer - 1))), -2)
            if divides:
                end = self._normalized(end[None], layer, pos_slice=part, mlp_input=mlp_input)[0]
            end = end if onto is None else end @ onto
            stack, labels = [*stack, (end - sum(rows.sum(0) for rows in stack))[None]], [*labels, "remainder"]
        found = np.concatenate(stack) if stack else np.zeros((0, *part.apply(self._array("hook_embed"), -2).shape), np.float32)
        if apply_ln and onto is None:
            found = self._normalized(found, layer, pos_slice=part, mlp_input=mlp_input)
        return (self._out(found), labels) if return_labels else self._out(found)

    def get_full_resid_decomposition(
        self,
        layer: int | None = None,
        mlp_input: bool = False,
        expand_neurons: bool = True,
        apply_ln: bool = False,
        pos_slice: Any = None,
        return_labels: bool = False,
        project_output_onto: Any = None,
    ) -> Any:
        """Decomposes the residual stream before `layer` into all components.

        These are heads, neurons (or MLPs), embeddings, and the sum of all biases.
        """
        layer, part = self._layer(layer), Slice.of(pos_slice)
        onto = None if project_output_onto is None else array(project_output_onto)
        ln: dict[str, Any] = dict(pos_slice=part, mlp_input=mlp_input)

        def finished(rows: list[np.ndarray]) -> np.ndarray:
            stack = self._normalized(np.stack(rows), layer, **ln) if apply_ln else np.stack(rows)
            return stack if onto is None else stack @ onto

        rows, labels = self._head_results(layer + mlp_input, part)
        parts = [finished(rows)] if rows else []
        if expand_neurons and layer > 0:
            neurons, names = self.stack_neuron_results(
                layer, part, apply_ln=apply_ln, project_output_onto=onto, mlp_input=mlp_input, return_labels=True
            )
            parts, labels = [*parts, array(neurons)], labels + names
        rest = [] if expand_neurons else [(f"{i}_mlp_out", self._array("mlp_out", i)) for i in range(layer)]
        rest += [("embed", self._array("embed"))] * self.has_embed + [("pos_embed", self._array("pos_embed"))] * self.has_pos_embed
        rows = [part.apply(value, -2) for _, value in rest]
        bias = array(self.model.accumulated_bias(layer, mlp_input, include_mlp_biases=expand_neurons))
        rows.append(np.broadcast_to(bias, part.apply(self._array("embed"), -2).shape))
        found = np.concatenate([*parts, finished(rows)])
        labels = [*labels, *(label for label, _ in rest), "bias"]
        return (self._out(found), labels) if return_labels else self._out(found)

    def apply_ln_to_stack(
        self,
        residual_stack: Any,
        layer: int | None = None,
        mlp_input: bool = False,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
        recompute_ln: bool = False,
    ) -> Any:
        """Applies the norm before `layer` to components, with the scale from this run.

        layer: None and −1 mean the norm before the logits. pos_slice: positions of the scale; the stack must contain only these.
        recompute_ln: at the end of the stream, use each row's own statistics.
        """
        if recompute_ln and self._layer(layer) == self.model.cfg.n_layers:
            return like(residual_stack, np.stack([array(self.model.ln_final.compute(row)) for row in array(residual_stack)]))
        found = self._normalized(array(residual_stack), layer, pos_slice, mlp_input, batch_slice, has_batch_dim)
        return like(residual_stack, found)

    def _normalized(
        self,
        stack: np.ndarray,
        layer: int | None,
        pos_slice: Any = None,
        mlp_input: bool = False,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> np.ndarray:
        rows = Slice.of(batch_slice)
        if has_batch_dim:
            stack = rows.apply(stack, 1)
        scale = self._scale(self._layer(layer), mlp_input, Slice.of(pos_slice), rows)
        return (stack - stack.mean(-1, keepdims=True)) / scale

    def _scale(self, layer: int, mlp_input: bool, part: Slice, rows: Slice | None = None) -> np.ndarray:
        is_final = layer == self.model.cfg.n_layers
        scale = self._array("ln_final.hook_scale" if is_final else f"blocks.{layer}.ln{2 if mlp_input else 1}.hook_scale")
        scale = part.apply(scale, -2)
        return rows.apply(scale) if rows is not None and self.has_batch_dim else scale

    def logit_attrs(
        self,
        residual_stack: Any,
        tokens: Any,
        incorrect_tokens: Any = None,
        pos_slice: Any = None,
        batch_slice: Any = None,
        has_batch_dim: bool = True,
    ) -> Any:
        """Direct logit attribution: contributions of components to a token's logit, or to a logit difference.

        Uses the norm's scale from this run. The result has no C axis. tokens: a single-token text, an id, or ids per row of the batch
        (b) or per position (b, p). No component includes b_U.
        """

        def ids(one: Any) -> np.ndarray:
            return np.asarray(self.model.to_single_token(one)) if isinstance(one, str) else array(one)

        directions = array(self.model.tokens_to_residual_directions(ids(tokens)))
        if incorrect_tokens is not None:
            if ids(tokens).shape != ids(incorrect_tokens).shape:
                shapes = f"{ids(tokens).shape} and {ids(incorrect_tokens).shape}"
                raise ValueError(f"tokens and incorrect_tokens must have the same shape, found {shapes}")
            directions = directions - array(self.model.tokens_to_residual_directions(ids(incorrect_tokens)))
        rows = Slice.of(batch_slice)
        stack = self._normalized(array(residual_stack), -1, pos_slice, batch_slice=rows, has_batch_dim=has_batch_dim)
        has_rows = has_batch_dim and rows.mode != "int" and stack.ndim == 4
        if has_rows and directions.ndim == 2 and len(directions) == stack.shape[1]:
            directions = directions[:, None]
        return like(residual_stack, (stack * directions).sum(-1))
