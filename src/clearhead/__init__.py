"""clearhead: exact attention whose weights stay visible at any length, and which shows how every output came to be.

The public names load when they are first used, so that `import clearhead` stays quick.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from clearhead.diagnosis import diagnose as diagnose
    from clearhead.diagnosis import diagnose_layer as diagnose_layer
    from clearhead.explaining import explain as explain
    from clearhead.flow import rollout as rollout
    from clearhead.functional import attention as attention
    from clearhead.functional import plan as plan
    from clearhead.layer import trace_layer as trace_layer
    from clearhead.matrix import AttentionMatrix as AttentionMatrix
    from clearhead.observations import Observation as Observation
    from clearhead.steps import shapes as shapes
    from clearhead.threads import get_num_threads as get_num_threads
    from clearhead.threads import set_num_threads as set_num_threads
    from clearhead.tracing import trace as trace
    from clearhead.watching.looking import watch as watch
    from clearhead.watching.seen import load as load

# A module must not be called like a public name: importing it would put the module in the name's place.
_HOMES = {
    "AttentionMatrix": "matrix",
    "Observation": "observations",
    "attention": "functional",
    "diagnose": "diagnosis",
    "diagnose_layer": "diagnosis",
    "explain": "explaining",
    "get_num_threads": "threads",
    "load": "watching.seen",
    "plan": "functional",
    "rollout": "flow",
    "set_num_threads": "threads",
    "shapes": "steps",
    "trace": "tracing",
    "trace_layer": "layer",
    "watch": "watching.looking",
}

_PARTS = ("distributed", "nn", "torch")  # for PyTorch; loaded when first named

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        return import_module(f"clearhead.{name}")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'clearhead' has no attribute '{name}'")
    value = getattr(import_module(f"clearhead.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES, *_PARTS})
