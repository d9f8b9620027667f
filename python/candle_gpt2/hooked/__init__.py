"""TransformerLens' names for GPT-2, on numpy: ``import candle_gpt2.hooked as transformer_lens``.

:class:`HookedTransformer` runs a model with every hook point of TransformerLens 2.x and gives the numbers of 4.3.0 in its
compatibility mode. torch is not needed; where it is imported, values are tensors.
"""

from . import components, head_detector, hook_points, patching, utils
from .bridge import TransformerBridge
from .cache import ActivationCache
from .config import HookedTransformerConfig
from .factored_matrix import FactoredMatrix
from .hook_points import HookPoint
from .splice import SAE
from .svd_interpreter import SVDInterpreter
from .transformer import HookedTransformer

#: TransformerLens 4's name of the module.
utilities = utils
#: SAELens' name: every model takes autoencoders.
HookedSAETransformer = HookedTransformer

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
