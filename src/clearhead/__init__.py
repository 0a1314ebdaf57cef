"""Exact attention whose weights can be read at any length, and tools that show how a model came to its output.

The public names load when they are first used, so that `import clearhead` stays quick.
"""

from typing import TYPE_CHECKING, Any

from clearhead.loading import load as _load
from clearhead.version import __version__ as __version__

if TYPE_CHECKING:
    from clearhead.changing.edits import boost as boost
    from clearhead.changing.edits import change as change
    from clearhead.changing.edits import cut as cut
    from clearhead.changing.edits import like as like
    from clearhead.changing.edits import off as off
    from clearhead.diagnosing.diagnose import diagnose as diagnose
    from clearhead.diagnosing.diagnose import diagnose_layer as diagnose_layer
    from clearhead.engines.threads import get_num_threads as get_num_threads
    from clearhead.engines.threads import set_num_threads as set_num_threads
    from clearhead.explaining.explain import explain as explain
    from clearhead.explaining.explanation import Explanation as Explanation
    from clearhead.models.finding import load_model as load_model
    from clearhead.ops.attention import attention as attention
    from clearhead.ops.attention import plan as plan
    from clearhead.ops.causes import EffectMatrix as EffectMatrix
    from clearhead.ops.matrix import AttentionMatrix as AttentionMatrix
    from clearhead.ops.observation import Observation as Observation
    from clearhead.ops.rollout import rollout as rollout
    from clearhead.textbook.shapes import shapes as shapes
    from clearhead.textbook.trace import trace as trace
    from clearhead.textbook.trace import trace_layer as trace_layer
    from clearhead.watching.seen import Seen as Seen
    from clearhead.watching.watch import watch as watch

# No module in this folder may have a public function's name: importing the module would replace the function.
_HOMES = {
    "AttentionMatrix": "ops.matrix",
    "EffectMatrix": "ops.causes",
    "Explanation": "explaining.explanation",
    "Observation": "ops.observation",
    "Seen": "watching.seen",
    "attention": "ops.attention",
    "boost": "changing.edits",
    "change": "changing.edits",
    "cut": "changing.edits",
    "diagnose": "diagnosing.diagnose",
    "diagnose_layer": "diagnosing.diagnose",
    "explain": "explaining.explain",
    "get_num_threads": "engines.threads",
    "like": "changing.edits",
    "load_model": "models.finding",
    "off": "changing.edits",
    "plan": "ops.attention",
    "rollout": "ops.rollout",
    "set_num_threads": "engines.threads",
    "shapes": "textbook.shapes",
    "trace": "textbook.trace",
    "trace_layer": "textbook.trace",
    "watch": "watching.watch",
}

_PARTS = ("nn", "testing", "torch")  # loaded when first named

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _PARTS:
        try:
            return _load(name)
        except ImportError as error:  # hasattr is False then, and the message says how to get what is missing
            raise AttributeError(str(error)) from error
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'clearhead' has no attribute '{name}'")
    value = getattr(_load(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *_PARTS, "__version__"})
