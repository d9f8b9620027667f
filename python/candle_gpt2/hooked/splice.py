"""Sparse autoencoders at hook points of a model, with what they leave unexplained added back."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .._native import Dictionary, Model
from .arrays import Kind, array, torch_module
from .config import HookedTransformerConfig
from .hook_points import HookPoint, HookedRootModule, Module
from .warned import warn


class SAE(Module):
    """A sparse autoencoder, with hook points in it.

    With use_error_term what it leaves unexplained is added to its output: a run is then the model's own until a latent is edited.
    """

    def __init__(self, dictionary: Dictionary, use_error_term: bool = False, kind: Kind | None = None) -> None:
        kind = kind or Kind(False)
        self.dictionary = dictionary
        self.use_error_term = use_error_term
        # What it was before a model said otherwise.
        self._own_error_term: bool | None = None
        self.kind = kind
        self.hook_sae_input = HookPoint(kind)
        self.hook_sae_acts_pre = HookPoint(kind)
        self.hook_sae_acts_post = HookPoint(kind)
        self.hook_sae_recons = HookPoint(kind)
        self.hook_sae_error = HookPoint(kind)
        self.hook_sae_output = HookPoint(kind)

    @classmethod
    def load(
        cls, path: str | PathLike[str], model: Any = None, site: str | None = None, use_error_term: bool = False
    ) -> "SAE":
        """Reads a folder of SAELens, or a .pt file of OpenAI's; with a Model or a HookedTransformer, checks that it fits. site: the hook
        point that it was trained on, if its files do not tell."""
        if model is None:
            return cls(Dictionary.read(path, site), use_error_term, Kind(torch_module() is not None))
        native = model if isinstance(model, Model) else model.native
        return cls(native.dictionary(path, site), use_error_term, getattr(model, "kind", None))

    @classmethod
    def load_from_disk(cls, path: str | PathLike[str]) -> "SAE":
        """SAELens' name of `load` without a model."""
        return cls.load(path)

    @classmethod
    def from_pretrained(cls, release: str | PathLike[str], sae_id: str) -> "SAE":
        """Reads the folder `release/sae_id`. Nothing is downloaded."""
        folder = Path(release, sae_id)
        if not folder.exists():
            raise FileNotFoundError(
                f"{folder}: no such folder, and SAEs are not downloaded here. Download cfg.json and sae_weights.safetensors of {sae_id} "
                f"from the release's repository on huggingface.co (jbloom/GPT2-Small-SAEs-Reformatted for gpt2-small-res-jb) to a folder, "
                f"and open it with SAE.load(folder, model)"
            )
        return cls.load(folder)

    @property
    def hook_name(self) -> str:
        """The hook point that it was trained on."""
        return self.dictionary.hook_name

    @property
    def cfg(self) -> SimpleNamespace:
        """`hook_name`, `d_in`, `d_sae` and `architecture`; `hook_name` also as `metadata.hook_name`, where SAELens 6 has it."""
        of = self.dictionary
        metadata = SimpleNamespace(hook_name=of.hook_name)
        return SimpleNamespace(
            hook_name=of.hook_name, d_in=of.d_in, d_sae=of.d_sae, architecture=of.architecture, metadata=metadata
        )

    # Copies of what is computed with: norms of directions, and gates, are folded into the encoder and the threshold.

    @property
    def W_enc(self) -> Any:
        """(C, F)."""
        return self._weight("W_enc")

    @property
    def b_enc(self) -> Any:
        """(F)."""
        return self._weight("b_enc")

    @property
    def W_dec(self) -> Any:
        """What one unit of each latent adds, (F, C)."""
        return self._weight("W_dec")

    @property
    def b_dec(self) -> Any:
        """(C)."""
        return self._weight("b_dec")

    @property
    def threshold(self) -> Any:
        """(F), above which a latent is active; an AttributeError unless the architecture is jumprelu or gated."""
        return self._weight("threshold")

    def _weight(self, name: str) -> Any:
        values = self.dictionary.weight(name)
        if values is None:
            raise AttributeError(f"{name}: an SAE of the architecture {self.dictionary.architecture} has none")
        return self.kind.out(values)

    def encode(self, x: Any) -> Any:
        """The latents (…, F) of values (…, C)."""
        with self.kind.of(x):
            return self.kind.out(self.dictionary.encode(array(x)))

    def decode(self, latents: Any, x: Any = None) -> Any:
        """The values (…, C) that latents (…, F) stand for. x: what was encoded, for dictionaries that normalize their input."""
        numbers = array(latents)
        like_x = np.zeros((*numbers.shape[:-1], self.dictionary.d_in), np.float32) if x is None else array(x)
        with self.kind.of(latents):
            return self.kind.out(self.dictionary.decode(numbers, like_x))

    def forward(self, value: Any) -> Any:
        """What replaces a value: values of heads side by side, (…, H, D), are one vector."""
        of = self.dictionary
        shape = value.shape
        x = self.hook_sae_input(value.reshape(*shape[:2], of.d_in))
        latents = self.hook_sae_acts_post(of.activate(self.hook_sae_acts_pre(of.pre_activations(x))))
        output = self.hook_sae_recons(of.decode(latents, x))
        if self.use_error_term:
            # Of the latents as they were: edits stay edits.
            output = output + self.hook_sae_error(x - of.decode(of.encode(x), x))
        return self.hook_sae_output(output).reshape(shape)


class WithSAEs(HookedRootModule):
    """What SAELens' HookedSAETransformer adds to a model."""

    cfg: HookedTransformerConfig
    kind: Kind
    native: Model

    @property
    def acts_to_saes(self) -> dict[str, SAE]:
        """Those that are spliced in, by hook point."""
        return {name: module for name, module in self.mod_dict.items() if isinstance(module, SAE)}

    def add_sae(self, sae: SAE, use_error_term: bool | None = None) -> None:
        """Puts an autoencoder in the place of its hook point, until reset_saes. Names of its hook points begin with that of the place:
        `blocks.8.hook_resid_pre.hook_sae_acts_post`."""
        sae.dictionary.check(self.native)
        if use_error_term is not None:
            if sae._own_error_term is None:
                sae._own_error_term = sae.use_error_term
            sae.use_error_term = use_error_term
        is_processed = self.cfg.normalization_type == "LNPre"
        if sae.dictionary.trained_on_processed != is_processed:
            wanted = "from_pretrained" if sae.dictionary.trained_on_processed else "from_pretrained_no_processing"
            warn(f"{sae.hook_name}: this SAE was trained on the activations of {wanted}")
        sae.kind = self.kind
        for _, point in sae.named_children():
            if isinstance(point, HookPoint):
                point.kind = self.kind
        self._place(sae.hook_name, sae)

    def reset_saes(self, act_names: str | Sequence[str] | None = None) -> None:
        """Takes autoencoders out again: all, or those at these hook points. Each is as it was before it was added."""
        names = list(self.acts_to_saes) if act_names is None else [act_names] if isinstance(act_names, str) else act_names
        there = self.acts_to_saes
        for name in names:
            if name not in there:
                warn(f"{name}: no SAE is spliced in there")
                continue
            self._place(name, HookPoint(self.kind))
            sae = there[name]
            if sae._own_error_term is not None:
                sae.use_error_term, sae._own_error_term = sae._own_error_term, None

    def _place(self, name: str, module: Module) -> None:
        if name not in self.mod_dict:
            self.hook_point(name)
        *parents, last = name.split(".")
        target: Any = self
        for parent in parents:
            target = target[int(parent)] if parent.isdecimal() else getattr(target, parent)
        setattr(target, last, module)
        self.setup()

    @contextmanager
    def saes(
        self, saes: SAE | Sequence[SAE] = (), reset_saes_end: bool = True, use_error_term: bool | None = None
    ) -> Iterator[Any]:
        """Autoencoders for as long as this lasts; those that were there return. With reset_saes_end=False they stay."""
        given = [saes] if isinstance(saes, SAE) else list(saes)
        before = self.acts_to_saes
        terms = [(sae, sae.use_error_term) for sae in given]
        try:
            for sae in given:
                self.add_sae(sae, use_error_term)
            yield self
        finally:
            if reset_saes_end:
                for sae, term in terms:
                    if self.acts_to_saes.get(sae.hook_name) is sae:
                        self.reset_saes(sae.hook_name)
                    if previous := before.get(sae.hook_name):
                        self.add_sae(previous, term if previous is sae else None)

    def run_with_saes(
        self, *args: Any, saes: Any = (), reset_saes_end: bool = True, use_error_term: bool | None = None, **options: Any
    ) -> Any:
        """What `forward` gives with these autoencoders."""
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.forward(*args, **options)

    def run_with_cache_with_saes(
        self, *args: Any, saes: Any = (), reset_saes_end: bool = True, use_error_term: bool | None = None, **options: Any
    ) -> Any:
        """As run_with_cache; keys of the autoencoders are `{hook}.hook_sae_input`, `_acts_pre`, `_acts_post`, `_recons`, `_error` and
        `_output`."""
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.run_with_cache(*args, **options)

    def run_with_hooks_with_saes(
        self, *args: Any, saes: Any = (), reset_saes_end: bool = True, use_error_term: bool | None = None, **options: Any
    ) -> Any:
        """As run_with_hooks."""
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.run_with_hooks(*args, **options)
