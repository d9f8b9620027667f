"""Hook points, and the module tree that contains them."""

import difflib
import re
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from .arrays import Kind, array, is_live, is_tensor, like, tensor, torch_module
from .slices import Slice
from .warned import warn

Name = str | Callable[[str], bool]
NamesFilter = None | str | Sequence[str] | Callable[[str], bool]
Hook = Callable[..., Any]
#: Result of `load_state_dict`, as in torch.
Keys = namedtuple("Keys", ["missing_keys", "unexpected_keys"])

# Hook points with a head axis between the position axis and the last axis.
WITH_HEADS = tuple(f"hook_{name}" for name in ("q", "k", "v", "z", "result", "q_input", "k_input", "v_input", "attn_in"))

# Hook points that TransformerLens 4 names after the input or output of a module.
_VERSION_4_NAMES = {
    "embed.hook_out": "hook_embed",
    "pos_embed.hook_out": "hook_pos_embed",
    "hook_in": "hook_resid_pre",
    "hook_out": "hook_resid_post",
    "attn.q.hook_out": "attn.hook_q",
    "attn.k.hook_out": "attn.hook_k",
    "attn.v.hook_out": "attn.hook_v",
    "attn.o.hook_in": "attn.hook_z",
    "attn.hook_out": "hook_attn_out",
    "mlp.in.hook_out": "mlp.hook_pre",
    "mlp.out.hook_in": "mlp.hook_post",
    "mlp.hook_out": "hook_mlp_out",
}


def version_2_name(name: str) -> str:
    """Translates a hook point name from TransformerLens 4 to version 2.x, whose names this package uses.

    For example, `blocks.3.hook_in` is `blocks.3.hook_resid_pre`.
    """
    block, point = re.fullmatch(r"(blocks\.\d+\.)?(.*)", name, re.DOTALL).groups("")  # type: ignore[union-attr]
    return block + _VERSION_4_NAMES.get(point, point)


def unknown_hook_point(name: str, known: Iterable[str]) -> str:
    """Returns the error message for an unknown hook point, with a suggestion."""
    names = list(known)
    spliced = [point for point in names if point.startswith(f"{name}.hook_sae_")]
    if spliced:
        return f"unknown hook point {name!r}: an SAE is spliced in here; its hook points are {', '.join(spliced)}"
    short = name.removeprefix("hook_")
    in_norms = short in ("scale", "normalized")  # ambiguous without the norm
    in_sae = short.startswith("sae_")  # unsupported by get_act_name
    if "." not in name and not in_norms and not in_sae and any(point.endswith(f".hook_{short}") for point in names):
        return f"unknown hook point {name!r}: short names need a layer; use utils.get_act_name({short!r}, layer)"
    layer = re.match(r"blocks\.(-?\d+)\.", name)
    layers = 1 + max((int(point.split(".")[1]) for point in names if point.startswith("blocks.")), default=-1)
    valid = f": the model has layers 0 to {layers - 1}" if layer and layers and int(layer[1]) not in range(layers) else ""
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0)
    return f"unknown hook point {name!r}{valid}" + (f"; did you mean {nearest[0]!r}?" if nearest else "")


class Module:
    """Named part of a model, with child modules and a `forward`."""

    name: str | None = None
    #: Names of the weights.
    weights: tuple[str, ...] = ()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def named_children(self) -> Iterator[tuple[str, "Module"]]:
        """Yields the direct children in creation order."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value
            elif isinstance(value, list):
                yield from ((f"{name}.{i}", one) for i, one in enumerate(value) if isinstance(one, Module))

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, "Module"]]:
        """Yields all modules, parents before children."""
        yield prefix, self
        for name, child in self.named_children():
            yield from child.named_modules(f"{prefix}.{name}" if prefix else name)

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """Yields all weights with their names."""
        for prefix, module in self.named_modules():
            for name in module.weights:
                yield (f"{prefix}.{name}" if prefix else name), getattr(module, name)

    def parameters(self) -> Iterator[Any]:
        """Yields all weights."""
        return (value for _, value in self.named_parameters())

    def state_dict(self) -> dict[str, Any]:
        """Returns all weights by name."""
        return dict(self.named_parameters())

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Keys:
        """Copies weights from a dict by name. Returns missing_keys and unexpected_keys.

        strict: raise a RuntimeError if there are any. The attention masks in TransformerLens' state dicts are ignored.
        """
        owners = {
            f"{prefix}.{name}" if prefix else name: (module, name) for prefix, module in self.named_modules() for name in module.weights
        }
        given = {name: value for name, value in state_dict.items() if not name.endswith((".mask", ".IGNORE"))}
        keys = Keys([name for name in owners if name not in given], [name for name in given if name not in owners])
        if strict and (keys.missing_keys or keys.unexpected_keys):
            raise RuntimeError(f"load_state_dict: missing keys {keys.missing_keys}, unexpected keys {keys.unexpected_keys}")
        # Check all weights before copying any.
        for name in owners.keys() & given.keys():
            module, weight = owners[name]
            expected, found = np.shape(array(getattr(module, weight))), np.shape(array(given[name]))
            if expected != found:
                raise RuntimeError(f"load_state_dict: {name}: expected shape {expected}, found {found}")
        for name in owners.keys() & given.keys():
            module, weight = owners[name]
            setattr(module, weight, given[name])
        return keys

    def eval(self) -> Any:
        """Returns the module itself, because there is no dropout."""
        return self

    def train(self, mode: bool = True) -> Any:
        """Returns the module itself, because there is no dropout."""
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """Makes all weights require gradients and returns the module itself.

        Autograd then tracks every run, as in TransformerLens.
        """
        for name, weight in self.named_parameters():
            if is_tensor(weight):
                weight.requires_grad_(requires_grad)
            elif requires_grad:
                raise TypeError(f"{name}: arrays have no gradients; import torch before the model is opened, or pass tensors='torch'")
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all weights. Also calls `requires_grad_`."""
        for weight in self.requires_grad_().parameters():
            if set_to_none or weight.grad is None:
                weight.grad = None
            else:
                weight.grad.zero_()


@dataclass
class LensHandle:
    """Handle for an added hook."""

    hook: Hook
    is_permanent: bool = False
    context_level: int | None = None


class HookPoint(Module):
    """Point at which hooks observe or replace an activation.

    A hook is called as ``f(value, hook=hook_point)``. Its result replaces the value unless it is None.
    """

    def __init__(self, kind: Kind | None = None) -> None:
        self.kind = kind or Kind(False)
        self.fwd_hooks: list[LensHandle] = []
        self.bwd_hooks: list[LensHandle] = []
        #: State that hooks keep between calls, until the hooks are reset.
        self.ctx: dict[Any, Any] = {}
        # Callbacks, such as a transcoder's, that read the value after all hooks.
        self.readers: list[Callable[[Any], None]] = []

    def forward(self, value: Any) -> Any:
        """Runs all hooks in the order they were added, and returns the final value."""
        for handle in self.fwd_hooks:
            # Pass a copy, because the backward pass may need the value before in-place edits.
            shown = value.clone() if is_live(value) else self.kind.out(value)
            found = handle.hook(shown, hook=self)
            if found is None:
                found = shown
            if found is not shown or is_live(shown):
                found = self._returned(handle.hook, found, value)
                value = found if is_live(value) or is_live(found) else like(value, found)
        if self.bwd_hooks and self.kind.is_torch and torch_module().is_grad_enabled():
            # A separate tensor, so that its gradient belongs only to this hook point.
            value = value.clone() if is_live(value) else tensor(value).requires_grad_()
            value.register_hook(self.backward)
        for read in self.readers:
            read(value)
        return value

    def backward(self, gradient: Any) -> Any:
        """Runs all backward hooks and returns the final gradient."""
        for handle in self.bwd_hooks:
            found = handle.hook(self.kind.out(gradient), hook=self)
            if isinstance(found, tuple) and len(found) == 1:  # TransformerLens 2 requires a tuple
                (found,) = found
            gradient = gradient if found is None else self._returned(handle.hook, found, gradient)
        return gradient

    def _returned(self, hook: Hook, found: Any, value: Any) -> Any:
        """Converts a hook's result to a live tensor, or to an array with the dtype of `value`.

        Raises a ValueError if the shape does not match. The batch may grow from size 1 or shrink to size 1.
        """
        before = array(value)
        try:
            given = array(found)
            is_array = given.dtype.kind in "biuf"
        except (TypeError, ValueError):
            is_array = False
        if is_array:
            batches = {given.shape[:1], before.shape[:1]} - {(1,)}
            if given.ndim == before.ndim and given.shape[1:] == before.shape[1:] and len(batches) < 2:
                if is_live(found):
                    return found.to("cpu", torch_module().float32)
                given = given.astype(before.dtype, copy=False)
                return given if is_live(value) else like(value, given)
        function = getattr(hook, "func", hook)  # unwraps functools.partial
        name = getattr(function, "__name__", type(function).__name__)
        what = f"an array of shape {given.shape}" if is_array else f"a value of type {type(found).__name__}"
        raise ValueError(f"hook {name} at {self.name}: expected an array of shape {before.shape} or None, returned {what}")

    def add_hook(
        self,
        hook: Hook,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Adds a hook after the existing hooks, or before them with `prepend`."""
        if dir not in ("fwd", "bwd"):
            raise ValueError(f"dir: expected 'fwd' or 'bwd', found {dir!r}")
        hooks = self.fwd_hooks if dir == "fwd" else self.bwd_hooks
        hooks.insert(0 if prepend else len(hooks), LensHandle(hook, is_permanent, level))

    def add_perma_hook(self, hook: Hook, dir: str = "fwd") -> None:
        """Adds a permanent hook, which resets do not remove."""
        self.add_hook(hook, dir, is_permanent=True)

    def remove_hooks(
        self, dir: str = "fwd", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Removes all hooks except permanent ones, or only those that were added in one context."""

        def stays(handle: LensHandle) -> bool:
            if including_permanent:
                return False
            return handle.is_permanent or (level is not None and handle.context_level != level)

        if dir in ("fwd", "both"):
            self.fwd_hooks = [handle for handle in self.fwd_hooks if stays(handle)]
        if dir in ("bwd", "both"):
            self.bwd_hooks = [handle for handle in self.bwd_hooks if stays(handle)]

    def clear_context(self) -> None:
        """Empties `ctx`."""
        self.ctx = {}

    def layer(self) -> int:
        """Returns the layer of the hook point."""
        parts = (self.name or "").split(".")
        if len(parts) < 2 or not parts[1].isdecimal():
            raise ValueError(f"{self.name} is not inside a block")
        return int(parts[1])

    def __repr__(self) -> str:
        return f"HookPoint({self.name!r})"


class HookedRootModule(Module):
    """Root of a module tree. Finds hook points by name, and adds and removes hooks."""

    def __init__(self) -> None:
        self.is_caching = False
        self.context_level = 0
        self.mod_dict: dict[str, Module] = {}
        self.hook_dict: dict[str, HookPoint] = {}

    def setup(self) -> None:
        """Sets the name of every module. Must be called once the tree is complete."""
        self.mod_dict, self.hook_dict = {}, {}
        for name, module in self.named_modules():
            if name:
                module.name = name
                self.mod_dict[name] = module
                if isinstance(module, HookPoint):
                    self.hook_dict[name] = module

    def hook_points(self) -> Iterable[HookPoint]:
        """Returns all hook points."""
        return self.hook_dict.values()

    def hook_point(self, name: str) -> HookPoint:
        """Returns a hook point by name. A KeyError suggests the nearest name."""
        found = self.hook_dict.get(name) or self.hook_dict.get(version_2_name(name))
        if found is None:
            raise KeyError(unknown_hook_point(name, self.hook_dict))
        return found

    def switch(self, name: str) -> str | None:
        """Returns the name of the method that enables a hook point, or None if it is enabled."""
        return None

    def check_hooks_to_add(self, hook_point: HookPoint, hook_point_name: str, hook: Hook, **options: Any) -> None:
        """Rejects a hook that would never be called."""
        switch = self.switch(hook_point_name)
        assert switch is None, f"{hook_point_name} is computed only after model.{switch}(True)"

    def add_hook(
        self,
        name: Name,
        hook: Hook,
        dir: str = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Adds a hook to the named hook point, or to all hook points whose names a function accepts.

        The hook remains until reset_hooks.
        """
        for point in self._points_for(name, hook):
            point.add_hook(hook, dir, is_permanent, level, prepend)

    def add_perma_hook(self, name: Name, hook: Hook, dir: str = "fwd") -> None:
        """Adds a permanent hook, which resets do not remove."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def _points_for(self, name: Name, hook: Hook) -> list[HookPoint]:
        """Returns the hook points that a hook is added to.

        Raises an error for a named hook point that is disabled, and warns if a function selects only disabled ones.
        """
        if isinstance(name, str):
            point = self.hook_point(name)
            self.check_hooks_to_add(point, point.name or "", hook)
            return [point]
        points = self._points(name)
        self._warn_if_off([point.name or "" for point in points])
        return points

    def _points(self, name: Name) -> list[HookPoint]:
        if isinstance(name, str):
            return [self.hook_point(name)]
        return [point for known, point in self.hook_dict.items() if name(known)]

    def _warn_if_off(self, names: Sequence[str]) -> None:
        """Warns if a function selected only disabled hook points."""
        switches = [switch for name in names if (switch := self.switch(name)) is not None]
        if names and len(switches) == len(names):
            turned_on = " and ".join(f"model.{switch}(True)" for switch in dict.fromkeys(switches))
            warn(f"the name filter selects only disabled hook points, such as {names[0]}; enable them with {turned_on}")

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Removes hooks at all hook points."""
        for point in self.hook_points():
            point.remove_hooks(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empties the `ctx` of every hook point."""
        for point in self.hook_points():
            point.clear_context()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Removes hooks and empties contexts. including_permanent: also remove permanent hooks."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)
        self.is_caching = False

    def as_hooks(self, entry: Any) -> list[tuple[Name, Hook]]:
        """Converts an entry in fwd_hooks or bwd_hooks to (name, hook) pairs."""
        name, hook = entry
        return [(name, hook)]

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Sequence[tuple[Name, Hook]] = (),
        bwd_hooks: Sequence[tuple[Name, Hook]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Context manager that adds hooks and removes them on exit.

        Backward hooks run in `backward`, which must be called before the exit.
        """
        self.context_level += 1
        try:
            for dir, hooks in (("fwd", fwd_hooks), ("bwd", bwd_hooks)):
                for name, hook in (pair for entry in hooks for pair in self.as_hooks(entry)):
                    for point in self._points_for(name, hook):
                        point.add_hook(hook, dir, level=self.context_level)
            yield self
        finally:
            if reset_hooks_end:
                self.reset_hooks(clear_contexts, level=self.context_level)
            self.context_level -= 1

    def run_with_hooks(
        self,
        *model_args: Any,
        fwd_hooks: Sequence[tuple[Name, Hook]] = (),
        bwd_hooks: Sequence[tuple[Name, Hook]] = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """Returns the output of `forward` with these hooks, which are removed afterwards.

        fwd_hooks, bwd_hooks: pairs of a hook point's name, or a function of names, and a hook; fwd_hooks also accepts `Steering`
        and `ControlVector`. bwd_hooks need reset_hooks_end=False, so that `backward` can run them.
        """
        if bwd_hooks and reset_hooks_end:
            raise ValueError("bwd_hooks: removed before they can run; pass reset_hooks_end=False, or use `with model.hooks(bwd_hooks=…)`")
        with self.hooks(fwd_hooks, bwd_hooks, reset_hooks_end, clear_contexts):
            return self.forward(*model_args, **model_kwargs)

    def get_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Any], list[tuple[Name, Hook]], list[tuple[Name, Hook]]]:
        """Returns a dict, and the forward and backward hooks that fill it.

        Gradients have the suffix `_grad`. Disabled hook points are skipped.
        """
        kept, *hooks = self._caching_hooks(names_filter, incl_bwd, remove_batch_dim, cache, pos_slice)
        fwd, bwd = ([(name, hook) for name, hook in pairs if self.switch(str(name)) is None] for pairs in hooks)
        return kept, fwd, bwd

    def _caching_hooks(
        self,
        names_filter: NamesFilter,
        incl_bwd: bool,
        remove_batch_dim: bool,
        cache: dict[str, Any] | None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Any], list[tuple[Name, Hook]], list[tuple[Name, Hook]]]:
        """Like `get_caching_hooks`, but includes disabled hook points, which may be enabled later."""
        kept: dict[str, Any] = {} if cache is None else cache
        positions = Slice.unwrap(pos_slice)

        def keep(value: Any, hook: HookPoint, end: str = "") -> None:
            name = hook.name or ""
            value = value.detach() if is_live(value) else value
            if remove_batch_dim:
                value = value[0]
            axis = -3 if name.endswith(WITH_HEADS) else -2
            if pos_slice is not None and value.ndim >= -axis:
                value = positions.apply(value, dim=axis)
            kept[name + end] = value

        names = self._selected_names(names_filter)
        return kept, [(name, keep) for name in names], [(name, partial(keep, end="_grad")) for name in names] if incl_bwd else []

    def add_caching_hooks(
        self,
        names_filter: NamesFilter = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Returns a dict that later runs fill until the hooks are reset."""
        kept, fwd, bwd = self._caching_hooks(names_filter, incl_bwd, remove_batch_dim, cache)
        self.is_caching = True
        for dir, hooks in (("fwd", fwd), ("bwd", bwd)):
            for name, hook in hooks:
                for point in self._points(name):
                    point.add_hook(hook, dir)
        return kept

    def _selected_names(self, names_filter: NamesFilter) -> list[str]:
        """Returns the selected names. Hook points selected by name must exist and be enabled."""
        if names_filter is None:
            return list(self.hook_dict)
        if callable(names_filter):
            names = [name for name in self.hook_dict if names_filter(name)]
            self._warn_if_off(names)
            return names
        wanted = [names_filter] if isinstance(names_filter, str) else names_filter
        names = [self.hook_point(name).name or "" for name in wanted]
        for name in names:
            switch = self.switch(name)
            if switch is not None:
                raise KeyError(f"{name!r} is computed only after model.{switch}(True)")
        return [name for name in self.hook_dict if name in set(names)]

    def run_with_cache(
        self,
        *model_args: Any,
        names_filter: NamesFilter = None,
        device: Any = None,
        remove_batch_dim: bool = False,
        incl_bwd: bool = False,
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
        pos_slice: Any = None,
        **model_kwargs: Any,
    ) -> tuple[Any, Any]:
        """Returns the output of `forward` and a dict of the activations at the hook points.

        names_filter: a name, a list of names or a function of names; by default all hook points. incl_bwd: also record the gradients
        of the output, which must be a loss, with the suffix `_grad`.
        """
        kept, fwd, bwd = self.get_caching_hooks(
            names_filter, incl_bwd, device, remove_batch_dim=remove_batch_dim, pos_slice=pos_slice
        )
        with self.hooks(fwd, bwd, reset_hooks_end, clear_contexts):
            found = self.forward(*model_args, **model_kwargs)
            if incl_bwd:
                self.backward()
        return found, kept

    def backward(self, gradient: Any = None) -> None:
        """Runs the backward hooks for the last run."""
        raise NotImplementedError

