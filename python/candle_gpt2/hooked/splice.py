"""Sparse autoencoders and transcoders at a model's hook points, with or without an error term."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .._native import Dictionary, Model
from .arrays import Kind, added, array, has_tensor, is_live, library, like, live, no_gradients, together, torch_module
from .components import ACTIVATIONS, LIVE_ACTIVATIONS, Weighted
from .config import HookedTransformerConfig
from .hook_points import HookPoint, HookedRootModule, version_2_name
from .warned import warn

# SAELens' names for the weights, across all architectures.
_WEIGHTS = ("W_enc", "b_enc", "b_gate", "r_mag", "b_mag", "threshold", "W_dec", "b_dec", "W_skip")
# Added to the standard deviation of a normalized input, as in SAELens.
_DEVIATION_EPSILON = np.float32(1e-5)
# Lower bound for the direction lengths by which latents are divided.
_LEAST_LENGTH = 1e-8


class SAE(Weighted):
    """Sparse autoencoder or transcoder with its own hook points.

    >>> sae = SAE({"architecture": "standard", "d_in": 256, "d_sae": 768, "hook_name": "blocks.3.hook_resid_post"}, weights)
    >>> sae.save("my-sae")

    cfg: a dict with the keys of SAELens' cfg.json. weights: a dict of arrays or tensors: W_enc (C, F), W_dec (F, C), b_enc (F),
    b_dec (C), and weights specific to the architecture, such as threshold (F). use_error_term: add the reconstruction error to the output,
    so that the model's predictions do not change until a latent is edited.

    The weights are attributes. As tensors they can be trained: `sae.requires_grad_()`, then `sae.W_dec.grad` after `backward`.
    """

    def __init__(
        self,
        cfg: Mapping[str, Any] | Dictionary,
        weights: Mapping[str, Any] | None = None,
        use_error_term: bool = False,
        kind: Kind | None = None,
    ) -> None:
        if isinstance(cfg, Dictionary):
            dictionary = cfg
        elif weights is None:
            raise TypeError("SAE(cfg, weights): missing weights; pass a dict of weights, or use SAE.load(folder) to read files")
        else:
            text = json.dumps(dict(cfg), default=str)
            dictionary = Dictionary.of_arrays(text, {name: array(value) for name, value in weights.items()})
        if kind is None:
            kind = Kind(has_tensor(list(weights.values())) if weights else torch_module() is not None)
        stored = dictionary.arrays()
        if "log_threshold" in stored:
            stored["threshold"] = np.exp(stored["log_threshold"])
        if "threshold" in stored:
            stored["threshold"] = stored["threshold"].reshape(-1)  # some files store a row
        self.weights = tuple(name for name in _WEIGHTS if name in stored)
        super().__init__(kind, **{name: stored[name] for name in self.weights})
        self._dictionary = dictionary
        self._settings = dictionary.settings
        self.use_error_term = use_error_term
        # Value of use_error_term before a model changed it.
        self._previous_error_term: bool | None = None
        self.readers: list[Callable[[Any], None]] = []
        # Input to a transcoder in the current run.
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
        """Reads a SAELens folder, an OpenAI .pt file, or for "built-in" a transcoder of the built-in model.

        model: a Model or HookedTransformer to check compatibility with. site: the hook point that the SAE was trained on, if its
        files do not record it; for "built-in", the hook point that the transcoder reads.
        """
        if model is None:
            return cls(Dictionary.read(path, site), use_error_term=use_error_term)
        native = model if isinstance(model, Model) else model.native
        return cls(native.dictionary(path, site), use_error_term=use_error_term, kind=getattr(model, "kind", None))

    @classmethod
    def load_from_disk(cls, path: str | PathLike[str]) -> "SAE":
        """SAELens' name for `load`, without a model."""
        return cls.load(path)

    @classmethod
    def from_pretrained(cls, release: str | PathLike[str], sae_id: str) -> "SAE":
        """Reads the folder `release/sae_id`, without downloading.

        For the release "built-in", reads the transcoder at the hook point sae_id.
        """
        if release == "built-in":
            return cls.load(release, site=sae_id)
        folder = Path(release, sae_id)
        if not folder.exists():
            raise FileNotFoundError(
                f"{folder}: the folder is missing, and SAEs are not downloaded automatically. Download cfg.json and sae_weights.safetensors for {sae_id} "
                f"from the release's repository on huggingface.co (jbloom/GPT2-Small-SAEs-Reformatted for gpt2-small-res-jb) to a folder, "
                f"and open it with SAE.load(folder, model)"
            )
        return cls.load(folder)

    def save(self, folder: str | PathLike[str]) -> None:
        """Writes cfg.json and sae_weights.safetensors in SAELens' layout.

        The folder is created if it is missing.
        """
        self.dictionary.save(folder)

    #: SAELens' name for `save`.
    save_model = save

    @property
    def dictionary(self) -> Dictionary:
        """The engine's Dictionary with the current weights."""
        if self.is_changed:
            self._dictionary = self._dictionary.with_arrays(self._weights)
            self.accept_changes()
        return self._dictionary

    @property
    def hook_name(self) -> str:
        """Hook point that the SAE reads."""
        return self._dictionary.hook_name

    @property
    def hook_name_out(self) -> str:
        """Hook point that the SAE writes. A transcoder reads and writes different hook points."""
        return self._dictionary.hook_name_out or self.hook_name

    @property
    def cfg(self) -> SimpleNamespace:
        """Contents of cfg.json. Keys about the model and training are also under `metadata`, as in SAELens 6."""
        cfg = dict(self._dictionary.cfg)
        metadata = cfg.pop("metadata", {})
        return SimpleNamespace(**{**metadata, **cfg}, metadata=SimpleNamespace(**metadata))

    def __repr__(self) -> str:
        dictionary = self._dictionary
        points = self.hook_name if dictionary.hook_name_out is None else f"{self.hook_name} -> {self.hook_name_out}"
        return f"SAE({points}, {dictionary.architecture}, d_in={dictionary.d_in}, d_sae={dictionary.d_sae})"

    def encode(self, x: Any) -> Any:
        """Encodes values (…, C) into latents (…, F)."""
        with self.kind.of(x):
            return self.kind.out(self._encode(live(x)))

    def decode(self, latents: Any, x: Any = None) -> Any:
        """Reconstructs values (…, C) from latents (…, F).

        x: the encoded input, which is needed by SAEs that normalize it or have a skip connection.
        """
        like_x = np.zeros((*np.shape(latents)[:-1], self._dictionary.d_in), np.float32) if x is None else x
        with self.kind.of(latents):
            return self.kind.out(self._decode(live(latents), live(like_x)))

    def forward(self, value: Any) -> Any:
        """Reconstructs a value (…, C), or (…, H, D) with heads.

        In a model, the value is the activation at `hook_name_out`. A transcoder then encodes the activation that `hook_name` had in
        the same run.
        """
        given, value, shape = value, live(value), value.shape
        is_spliced, is_transcoder = self.name is not None, self._dictionary.hook_name_out is not None
        target = value.reshape(*(shape[:2] if is_spliced else shape[: -1 if shape[-1] == self._dictionary.d_in else -2]), -1)
        x = self.hook_sae_input(self._take_input() if is_spliced and is_transcoder else target)
        latents = self.hook_sae_acts_post(self._encode(x, self.hook_sae_acts_pre))
        output = self._decode(latents, x, self.hook_sae_recons)
        if self.use_error_term and (is_spliced or not is_transcoder):
            # Compute the error from unedited latents, so that edits take effect. Autograd treats it as a constant, as in SAELens.
            with no_gradients():
                before = array(x)
                error = array(target) - self._decode(self._encode(before), before)
            output = added(output, self.hook_sae_error(error))
        output = self.hook_sae_output(output)
        if not (is_transcoder and not is_spliced):
            output = output.reshape(shape)
        for read in self.readers:
            read(output)
        return output if is_spliced else like(given, output)

    def _encode(self, x: Any, hook: Callable[[Any], Any] | None = None) -> Any:
        """Computes latents (…, F). The hook receives the pre-activations, as in SAELens."""
        settings, weight = self._settings, self._weight
        if settings["normalize_activations"] == "layer_norm":
            mean, deviation = _statistics(x)
            x = (x - mean) / (deviation + _DEVIATION_EPSILON)
        if settings["apply_b_dec_to_input"]:
            x, bias = together(x, weight("b_dec"))
            x = x - bias
        is_gated = "b_gate" in self.weights
        if is_gated:
            is_active = self._product(x, "W_enc", "b_gate") > 0
            x, matrix, factor, bias = together(x, weight("W_enc"), weight("r_mag"), weight("b_mag"))
            before = _rows_product(x, matrix * library(factor).exp(factor)) + bias
        else:
            before = self._product(x, "W_enc", "b_enc")
        if hook is not None:
            before = hook(before)
        if "threshold" in self.weights:
            before, threshold = together(before, weight("threshold"))
            is_active = before > threshold
        if settings.get("rescale_acts_by_decoder_norm"):
            before, lengths = together(before, self._lengths())
            before = before * lengths
        if "k" in settings:
            is_active = _is_largest(array(before), settings["k"])
        elif not is_gated and "threshold" not in self.weights:
            return _relu(before)
        latents, is_active = together(_relu(before), is_active)
        return latents * is_active

    def _decode(self, latents: Any, x: Any, hook: Callable[[Any], Any] | None = None) -> Any:
        """Reconstructs values (…, C) from latents and the encoded values. The hook runs before normalization is undone."""
        if self._settings.get("rescale_acts_by_decoder_norm"):
            latents, lengths = together(latents, self._lengths())
            latents = latents / lengths
        output = self._product(latents, "W_dec", "b_dec")
        if hook is not None:
            output = hook(output)
        if self._settings["normalize_activations"] == "layer_norm" and self._dictionary.hook_name_out is None:
            output, mean, deviation = together(output, *_statistics(x))
            output = output * deviation + mean
        if "W_skip" in self.weights:
            x, matrix = together(x, self._weight("W_skip"))
            output = added(output, _rows_product(x, matrix.swapaxes(0, 1)))
        return output

    def _lengths(self) -> Any:
        """Computes the lengths of the directions, (F)."""
        directions = self._weight("W_dec")
        return library(directions).linalg.norm(directions, axis=-1).clip(_LEAST_LENGTH)

    def read(self, value: Any) -> None:
        """Stores the transcoder's input, the value at `hook_name`, until the run reaches `hook_name_out`."""
        self._read = value.reshape(*value.shape[:2], self._dictionary.d_in)

    def _take_input(self) -> Any:
        found, self._read = self._read, None
        if found is None:
            raise RuntimeError(
                f"{self.hook_name}: the transcoder for {self.hook_name_out} has no input; the run starts after this hook point, or the hook point is disabled"
            )
        return found


def _statistics(x: Any) -> tuple[Any, Any]:
    """Returns the mean and the unbiased standard deviation along the last axis, which is kept."""
    mean = x.mean(-1, keepdims=True)
    centered = x - mean
    return mean, ((centered * centered).sum(-1, keepdims=True) / (x.shape[-1] - 1)) ** 0.5


def _rows_product(x: Any, matrix: Any) -> Any:
    """Multiplies (…, a) by a matrix (a, b)."""
    return (x.reshape(-1, x.shape[-1]) @ matrix).reshape(*x.shape[:-1], -1)


def _relu(x: Any) -> Any:
    return LIVE_ACTIVATIONS["relu"](x) if is_live(x) else ACTIVATIONS["relu"][0](x)


def _is_largest(x: np.ndarray, k: int) -> np.ndarray:
    """Returns a mask of the k largest values along the last axis."""
    found = np.zeros(x.shape, bool)
    np.put_along_axis(found, np.argpartition(x, -k)[..., -k:], True, -1)
    return found


class WithSAEs(HookedRootModule):
    """Mixin with the methods of SAELens' HookedSAETransformer."""

    cfg: HookedTransformerConfig
    kind: Kind
    _native: Model | None

    @property
    def acts_to_saes(self) -> dict[str, SAE]:
        """Spliced-in SAEs and transcoders, keyed by the hook point that they read.

        If several read the same hook point, the later ones are listed by the hook point that they write.
        """
        found: dict[str, SAE] = {}
        spliced = [module for module in self.mod_dict.values() if isinstance(module, SAE)]
        for sae in sorted(spliced, key=lambda sae: sae.hook_name != sae.hook_name_out):
            found[sae.hook_name_out if sae.hook_name in found else sae.hook_name] = sae
        return found

    def add_sae(self, sae: SAE, use_error_term: bool | None = None) -> None:
        """Splices in an SAE or transcoder until reset_saes.

        A transcoder reads `hook_name` and writes `hook_name_out`. The names of its hook points begin with the hook point that it
        writes: `blocks.8.hook_resid_pre.hook_sae_acts_post`.
        """
        if self._native is not None:
            sae._dictionary.check(self._native)
        if use_error_term is not None:
            if sae._previous_error_term is None:
                sae._previous_error_term = sae.use_error_term
            sae.use_error_term = use_error_term
        is_processed = self.cfg.normalization_type == "LNPre"
        if sae._dictionary.trained_on_processed not in (None, is_processed):
            expected = "from_pretrained" if sae._dictionary.trained_on_processed else "from_pretrained_no_processing"
            warn(f"{sae.hook_name}: this SAE was trained on activations of a model opened with {expected}")
        sae.kind = self.kind
        for _, point in sae.named_children():
            if isinstance(point, HookPoint):
                point.kind = self.kind
        current = self._module_at(sae.hook_name_out)
        if isinstance(current, SAE):
            self._remove(current)
        self._insert(sae.hook_name_out, sae)
        if sae.hook_name_out != sae.hook_name:
            self._module_at(sae.hook_name).readers.append(sae.read)

    def reset_saes(self, act_names: str | Sequence[str] | None = None) -> None:
        """Removes all SAEs and transcoders, or only those with these names in `acts_to_saes`.

        Restores each one's previous use_error_term.
        """
        names = list(self.acts_to_saes) if act_names is None else [act_names] if isinstance(act_names, str) else act_names
        spliced = self.acts_to_saes
        for name in names:
            if name not in spliced:
                warn(f"{name}: no SAE is spliced in at this hook point")
                continue
            sae = spliced[name]
            self._remove(sae)
            if sae._previous_error_term is not None:
                sae.use_error_term, sae._previous_error_term = sae._previous_error_term, None

    def _remove(self, sae: SAE) -> None:
        self._insert(sae.hook_name_out, HookPoint(self.kind))
        if sae.hook_name_out != sae.hook_name:
            self._module_at(sae.hook_name).readers.remove(sae.read)
        sae.name, sae.readers = None, []

    def _module_at(self, name: str) -> Any:
        """Returns the named hook point, or the SAE that replaces it."""
        return self.mod_dict.get(version_2_name(name)) or self.hook_point(name)

    def _insert(self, name: str, module: Any) -> None:
        before = self._module_at(name)
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
        """Context manager that splices in SAEs and transcoders.

        On exit, restores those that were spliced in before, unless reset_saes_end is False.
        """
        new = [saes] if isinstance(saes, SAE) else list(saes)
        before = list(self.acts_to_saes.values())
        terms = {sae: sae.use_error_term for sae in new}
        try:
            for sae in new:
                self.add_sae(sae, use_error_term)
            yield self
        finally:
            if reset_saes_end:
                self.reset_saes([name for name, sae in self.acts_to_saes.items() if sae in terms])
                remaining = self.acts_to_saes.values()
                for sae in [sae for sae in before if sae not in remaining]:
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

        The cache also has `{hook}.hook_sae_input`, `_acts_pre`, `_acts_post`, `_recons`, `_error` and `_output`, where {hook} is the
        hook point that the SAE writes.
        """
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.run_with_cache(*args, **options)

    def run_with_hooks_with_saes(
        self, *args: Any, saes: Any = (), reset_saes_end: bool = True, use_error_term: bool | None = None, **options: Any
    ) -> Any:
        """Runs run_with_hooks with SAEs and transcoders spliced in."""
        with self.saes(saes, reset_saes_end, use_error_term):
            return self.run_with_hooks(*args, **options)
