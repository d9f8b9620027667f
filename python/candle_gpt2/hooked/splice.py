"""Sparse autoencoders and transcoders at hook points of a model, with or without the error of their reconstruction."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np

from .._native import Dictionary, Model
from .arrays import Kind, added, array, has_tensor, is_live, live, tensor, torch_module
from .config import HookedTransformerConfig
from .hook_points import HookPoint, HookedRootModule, Module, own_name
from .warned import warn


class SAE(Module):
    """A sparse autoencoder or transcoder, with hook points inside it.

    >>> sae = SAE({"architecture": "standard", "d_in": 192, "d_sae": 768, "hook_name": "blocks.3.hook_resid_post"}, weights)
    >>> sae.save("my-sae")

    cfg: a dict with the keys of SAELens' cfg.json. weights: a dict of arrays or tensors: W_enc (C, F), W_dec (F, C), b_enc (F), b_dec (C),
    and what the architecture adds, such as threshold (F). With use_error_term the reconstruction error is added to the output: the
    model's predictions stay the same until a latent is edited.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any] | Dictionary,
        weights: Mapping[str, Any] | None = None,
        use_error_term: bool = False,
        kind: Kind | None = None,
    ) -> None:
        if isinstance(cfg, Dictionary):
            self.dictionary = cfg
        elif weights is None:
            raise TypeError("SAE(cfg, weights): expected a dict of weights; SAE.load(folder) reads files")
        else:
            text = json.dumps(dict(cfg), default=str)
            self.dictionary = Dictionary.of_arrays(text, {name: array(value) for name, value in weights.items()})
        if kind is None:
            kind = Kind(has_tensor(list(weights.values())) if weights else torch_module() is not None)
        self.use_error_term = use_error_term
        # The setting before a model changed it.
        self._own_error_term: bool | None = None
        self.kind = kind
        self.readers: list[Callable[[Any], None]] = []
        # Input of a transcoder in this run.
        self._read: Any = None
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
        """Reads a SAELens folder, an OpenAI .pt file, or "built-in", a transcoder of the built-in model.

        With a Model or a HookedTransformer, checks that it fits. site: the hook point that it was trained on, if its files do not say; of
        "built-in" the hook point that the transcoder reads."""
        if model is None:
            return cls(Dictionary.read(path, site), use_error_term=use_error_term)
        native = model if isinstance(model, Model) else model.native
        return cls(native.dictionary(path, site), use_error_term=use_error_term, kind=getattr(model, "kind", None))

    @classmethod
    def load_from_disk(cls, path: str | PathLike[str]) -> "SAE":
        """SAELens' name of `load` without a model."""
        return cls.load(path)

    @classmethod
    def from_pretrained(cls, release: str | PathLike[str], sae_id: str) -> "SAE":
        """Reads the folder `release/sae_id`, or of "built-in" the transcoder at the hook point sae_id. Nothing is downloaded."""
        if release == "built-in":
            return cls.load(release, site=sae_id)
        folder = Path(release, sae_id)
        if not folder.exists():
            raise FileNotFoundError(
                f"{folder}: no such folder, and SAEs are not downloaded here. Download cfg.json and sae_weights.safetensors of {sae_id} "
                f"from the release's repository on huggingface.co (jbloom/GPT2-Small-SAEs-Reformatted for gpt2-small-res-jb) to a folder, "
                f"and open it with SAE.load(folder, model)"
            )
        return cls.load(folder)

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes cfg.json and sae_weights.safetensors, SAELens' layout, into a folder, which is created if missing."""
        self.dictionary.save(folder)

    #: SAELens' name of `save`.
    save_model = save

    @property
    def hook_name(self) -> str:
        """The hook point that it reads."""
        return self.dictionary.hook_name

    @property
    def hook_name_out(self) -> str:
        """The hook point that it writes: of a transcoder another one than `hook_name`."""
        return self.dictionary.hook_name_out or self.hook_name

    @property
    def cfg(self) -> SimpleNamespace:
        """Every key of cfg.json; those about the model and the training also under `metadata`, as in SAELens 6."""
        of = dict(self.dictionary.cfg)
        metadata = of.pop("metadata", {})
        return SimpleNamespace(**{**metadata, **of}, metadata=SimpleNamespace(**metadata))

    def __repr__(self) -> str:
        of = self.dictionary
        places = self.hook_name if of.hook_name_out is None else f"{self.hook_name} -> {self.hook_name_out}"
        return f"SAE({places}, {of.architecture}, d_in={of.d_in}, d_sae={of.d_sae})"

    # Copies of the weights in use: norms of directions and gates are folded into the encoder and the threshold.

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
        """(F, C), the direction of each latent; of a transcoder (F, C_out)."""
        return self._weight("W_dec")

    @property
    def b_dec(self) -> Any:
        """(C)."""
        return self._weight("b_dec")

    @property
    def threshold(self) -> Any:
        """(F), the value above which each latent is active; an AttributeError unless the architecture is jumprelu or gated."""
        return self._weight("threshold")

    def _weight(self, name: str) -> Any:
        values = self.dictionary.weight(name)
        if values is None:
            raise AttributeError(f"{name}: an SAE of the architecture {self.dictionary.architecture} has none")
        return self.kind.out(values)

    def encode(self, x: Any) -> Any:
        """The latents (…, F) of values (…, C)."""
        with self.kind.of(x):
            return self.kind.out(_applied(self.dictionary, "activate", _applied(self.dictionary, "pre_activations", x)))

    def decode(self, latents: Any, x: Any = None) -> Any:
        """Reconstructs values (…, C) from latents (…, F).

        x: the encoded input, which SAEs that normalize it or have a skip connection need."""
        like_x = np.zeros((*np.shape(latents)[:-1], self.dictionary.d_in), np.float32) if x is None else x
        with self.kind.of(latents):
            return self.kind.out(_applied(self.dictionary, "decode", latents, like_x))

    def forward(self, value: Any) -> Any:
        """The reconstruction of a value, (…, C), or (…, H, D) with heads.

        In a model the value is the one at `hook_name_out`; a transcoder then reads what `hook_name` had in the same run."""
        of, shape = self.dictionary, value.shape
        is_spliced = self.name is not None
        target = value.reshape(*(shape[:2] if is_spliced else shape[: -1 if shape[-1] == of.d_in else -2]), -1)
        is_transcoder = of.hook_name_out is not None
        x = self.hook_sae_input(self._taken() if is_spliced and is_transcoder else target)
        latents = self.hook_sae_acts_post(_applied(of, "activate", self.hook_sae_acts_pre(_applied(of, "pre_activations", x))))
        output = self.hook_sae_recons(_applied(of, "decode", latents, x))
        if self.use_error_term and (is_spliced or not is_transcoder):
            # Of the unedited latents, so that edits take effect. It is a constant to autograd, as in SAELens.
            before = array(x)
            output = added(output, self.hook_sae_error(array(target) - of.decode(of.encode(before), before)))
        output = self.hook_sae_output(output)
        if not (is_transcoder and not is_spliced):
            output = output.reshape(shape)
        for read in self.readers:
            read(output)
        return output

    def read(self, value: Any) -> None:
        """Keeps the input of a transcoder, the value at `hook_name`, until the run reaches `hook_name_out`."""
        self._read = value.reshape(*value.shape[:2], self.dictionary.d_in)

    def _taken(self) -> Any:
        found, self._read = self._read, None
        if found is None:
            raise RuntimeError(
                f"{self.hook_name}: the transcoder of {self.hook_name_out} read no input; the run starts after this hook point, or it is off"
            )
        return found


def _applied(dictionary: Dictionary, function: Literal["pre_activations", "activate", "decode"], *inputs: Any) -> Any:
    """A function of a dictionary: of arrays an array, and of a live tensor a live one, whose gradients are the engine's."""
    compute = getattr(dictionary, function)
    if not any(map(is_live, inputs)):
        return compute(*map(array, inputs))
    autograd = torch_module().autograd

    def forward(ctx: Any, *tensors: Any) -> Any:
        ctx.save_for_backward(*tensors)
        return tensor(compute(*map(array, tensors)))

    def backward(ctx: Any, gradient: Any) -> Any:
        return tuple(map(tensor, dictionary.vjp(function, list(map(array, ctx.saved_tensors)), array(gradient))))

    methods = {"forward": staticmethod(forward), "backward": staticmethod(autograd.function.once_differentiable(backward))}
    node: Any = type(f"Dictionary{function.title().replace('_', '')}", (autograd.Function,), methods)
    return node.apply(*map(tensor, map(live, inputs)))


class WithSAEs(HookedRootModule):
    """Methods of SAELens' HookedSAETransformer."""

    cfg: HookedTransformerConfig
    kind: Kind
    _native: Model | None

    @property
    def acts_to_saes(self) -> dict[str, SAE]:
        """The SAEs and transcoders that are spliced in, by the hook point that they read, or that they write if others read there too."""
        found: dict[str, SAE] = {}
        spliced = [module for module in self.mod_dict.values() if isinstance(module, SAE)]
        for sae in sorted(spliced, key=lambda sae: sae.hook_name != sae.hook_name_out):
            found[sae.hook_name_out if sae.hook_name in found else sae.hook_name] = sae
        return found

    def add_sae(self, sae: SAE, use_error_term: bool | None = None) -> None:
        """Splices in an SAE, or a transcoder, which reads at `hook_name` and writes at `hook_name_out`, until reset_saes.

        Names of its hook points begin with the hook point that it writes: `blocks.8.hook_resid_pre.hook_sae_acts_post`."""
        if self._native is not None:
            sae.dictionary.check(self._native)
        if use_error_term is not None:
            if sae._own_error_term is None:
                sae._own_error_term = sae.use_error_term
            sae.use_error_term = use_error_term
        is_processed = self.cfg.normalization_type == "LNPre"
        if sae.dictionary.trained_on_processed not in (None, is_processed):
            wanted = "from_pretrained" if sae.dictionary.trained_on_processed else "from_pretrained_no_processing"
            warn(f"{sae.hook_name}: this SAE was trained on the activations of {wanted}")
        sae.kind = self.kind
        for _, point in sae.named_children():
            if isinstance(point, HookPoint):
                point.kind = self.kind
        there = self._placed(sae.hook_name_out)
        if isinstance(there, SAE):
            self._take_out(there)
        self._place(sae.hook_name_out, sae)
        if sae.hook_name_out != sae.hook_name:
            self._placed(sae.hook_name).readers.append(sae.read)

    def reset_saes(self, act_names: str | Sequence[str] | None = None) -> None:
        """Removes SAEs and transcoders: all, or those of these names in `acts_to_saes`. Restores the error term each had before."""
        names = list(self.acts_to_saes) if act_names is None else [act_names] if isinstance(act_names, str) else act_names
        there = self.acts_to_saes
        for name in names:
            if name not in there:
                warn(f"{name}: no SAE is spliced in there")
                continue
            sae = there[name]
            self._take_out(sae)
            if sae._own_error_term is not None:
                sae.use_error_term, sae._own_error_term = sae._own_error_term, None

    def _take_out(self, sae: SAE) -> None:
        self._place(sae.hook_name_out, HookPoint(self.kind))
        if sae.hook_name_out != sae.hook_name:
            self._placed(sae.hook_name).readers.remove(sae.read)
        sae.name, sae.readers = None, []

    def _placed(self, name: str) -> Any:
        """The hook point of this name, or the SAE in its place."""
        return self.mod_dict.get(own_name(name)) or self.hook_point(name)

    def _place(self, name: str, module: Any) -> None:
        before = self._placed(name)
        module.readers = before.readers
        *parents, last = str(before.name).split(".")
        target: Any = self
        for parent in parents:
            target = target[int(parent)] if parent.isdecimal() else getattr(target, parent)
        setattr(target, last, module)
        self.setup()

    @contextmanager
    def saes(
        self, saes: SAE | Sequence[SAE] = (), reset_saes_end: bool = True, use_error_term: bool | None = None
    ) -> Iterator[Any]:
        """Context manager that splices in SAEs and transcoders, and restores the previous ones at its end unless reset_saes_end=False."""
        given = [saes] if isinstance(saes, SAE) else list(saes)
        before = list(self.acts_to_saes.values())
        terms = {sae: sae.use_error_term for sae in given}
        try:
            for sae in given:
                self.add_sae(sae, use_error_term)
            yield self
        finally:
            if reset_saes_end:
                self.reset_saes([name for name, sae in self.acts_to_saes.items() if sae in terms])
                there = self.acts_to_saes.values()
                for sae in [sae for sae in before if sae not in there]:
                    self.add_sae(sae, terms.get(sae))

    def run_with_saes(
        self, *args: Any, saes: Any = (), reset_saes_end: bool = True, use_error_term: bool | None = None, **options: Any
    ) -> Any:
        """Returns the output of `forward` with these SAEs and transcoders spliced in."""
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.forward(*args, **options)

    def run_with_cache_with_saes(
        self, *args: Any, saes: Any = (), reset_saes_end: bool = True, use_error_term: bool | None = None, **options: Any
    ) -> Any:
        """Runs run_with_cache with SAEs and transcoders spliced in.

        The cache also has `{hook}.hook_sae_input`, `_acts_pre`, `_acts_post`, `_recons`, `_error` and `_output`, where hook is the hook
        point that is written."""
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.run_with_cache(*args, **options)

    def run_with_hooks_with_saes(
        self, *args: Any, saes: Any = (), reset_saes_end: bool = True, use_error_term: bool | None = None, **options: Any
    ) -> Any:
        """Runs run_with_hooks with SAEs and transcoders spliced in."""
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.run_with_hooks(*args, **options)
