"""TransformerLens' API for GPT-2 on numpy: ``import candle_gpt2.hooked as transformer_lens``.

:class:`HookedTransformer` has every hook point of TransformerLens 2.x and produces the values of TransformerLens 4.3.0 in
compatibility mode. torch is optional; if it is imported, values are tensors.
"""

import sys as _sys

from . import bridge, cache, components, config, factored_matrix, head_detector, hook_points, patching, svd_interpreter, transformer, utils
from .bridge import TransformerBridge
from .cache import ActivationCache
from .config import HookedTransformerConfig
from .factored_matrix import FactoredMatrix
from .hook_points import HookPoint
from .splice import SAE
from .svd_interpreter import SVDInterpreter
from .transformer import HookedTransformer

#: Name of the module in TransformerLens 4.
utilities = utils
#: Name of the class in SAELens. Every model accepts autoencoders.
HookedSAETransformer = HookedTransformer

# TransformerLens' modules. Both packages export them, so that old imports need only a different package name.
_MODULES = {
    "ActivationCache": cache,
    "FactoredMatrix": factored_matrix,
    "HookedTransformer": transformer,
    "HookedTransformerConfig": config,
    "SVDInterpreter": svd_interpreter,
    "components": components,
    "head_detector": head_detector,
    "hook_points": hook_points,
    "model_bridge": bridge,
    "patching": patching,
    "utilities": utils,
    "utils": utils,
}
for _name, _module in _MODULES.items():
    for _package in (__name__, __name__.rpartition(".")[0]):
        _sys.modules[f"{_package}.{_name}"] = _module

__all__ = [
    "ActivationCache",
    "FactoredMatrix",
    "HookPoint",
    "HookedSAETransformer",
    "HookedTransformer",
    "HookedTransformerConfig",
    "SAE",
    "SVDInterpreter",
    "TransformerBridge",
    "components",
    "head_detector",
    "hook_points",
    "patching",
    "utilities",
    "utils",
]
