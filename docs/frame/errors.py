"""The page of every error: its docstring, which of Python's own it is, and an example that raises it, run here."""

import inspect
import sys
from unittest.mock import patch

from clearhead import errors
from frame.docstrings import inline

SETUP = "import numpy as np, clearhead as ch\nq, k, v = np.random.default_rng(0).standard_normal((3, 2, 5, 4))"
EXAMPLES = {
    errors.ShapeError: "ch.attention(q, k[:, :, :3], v)",
    errors.DtypeError: "ch.attention(q, k, v, mask=np.zeros((5, 5)))",
    errors.RuleError: "ch.attention(q, k[:, :3], v[:, :3], causal=True)",
    errors.UnknownNameError: "ch.attention(q, k, v, casual=True)",
    errors.SelectionError: "ch.AttentionMatrix(q, k)[0, 7]",
    errors.SizeError: "long = np.broadcast_to(np.float32(0), (10_000_000, 4))\nch.AttentionMatrix(long, long)[...]",
    errors.EngineError: 'wide = np.zeros((5, 1000))\nch.attention(wide, wide, wide, engine="triton")',
    errors.DerivativeError: """import torch
q, k, v = (torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
number = ch.attention(q, k, v).square().sum()
for order in range(3):  # there is no third derivative
    (slope,) = torch.autograd.grad(number, q, create_graph=True)
    number = slope.square().sum()""",
    errors.DistributedError: "import torch\nch.distributed.attention(*(torch.randn(2, 5, 4) for _ in range(3)))",
    errors.FileError: 'ch.load("nowhere.safetensors")',
    errors.MissingExtraError: "ch.AttentionMatrix(q, k).plot()  # without matplotlib",
}
TOP = f"""# Errors

Every error of clearhead is a `ClearheadError` and also one of Python's own, so that `except ValueError` catches a
`ShapeError`. It is raised before any work begins. `what` says what is wrong, `hint` what to type instead; on the
command line both stand on one line, and the exit code is 2.

```{{py:module}} clearhead.errors
```

The examples begin with

```python
{SETUP}
```

"""


def pages() -> dict[str, str]:
    """The page. ValueError for an error that has no example, or whose example does not raise it."""
    text = TOP
    for kind in kinds():
        local = [base.__name__ for base in kind.__bases__ if not issubclass(base, errors.ClearheadError)]
        text += f"## {kind.__name__}\n\n::::{{py:exception}} {kind.__name__}\n:module: clearhead.errors\n\n"
        text += inline(inspect.getdoc(kind) or "")
        text += (
            f" Also {'an' if local[0][0] in 'AEIO' else 'a'} `{local[0]}`.\n\n"
            if local and local[0] != "Exception"
            else "\n\n"
        )
        if kind is not errors.ClearheadError:
            text += f"```python\n{EXAMPLES.get(kind, '')}\n```\n\n"
            text += f"```{{code-block}} text\n:class: wrapped\n\n{raised(kind)}\n```\n"
        text += "::::\n\n"
    return {"reference/errors": text}


def kinds() -> list[type[errors.ClearheadError]]:
    """Every error, in the order in which they are written."""
    results = [value for value in vars(errors).values() if inspect.isclass(value)]
    return [kind for kind in results if issubclass(kind, errors.ClearheadError)]


def raised(kind: type[errors.ClearheadError]) -> str:
    """What the error's example says. ValueError where it raises nothing or another error."""
    if kind not in EXAMPLES:
        raise ValueError(f"{kind.__name__} has no example: add one in docs/frame/errors.py")
    here: dict[str, object] = {}
    try:
        with patch.dict(sys.modules, {"matplotlib": None} if kind is errors.MissingExtraError else {}):
            exec(f"{SETUP}\n{EXAMPLES[kind]}", here)
    except kind as error:
        return f"{kind.__name__}: {error}"
    raise ValueError(f"the example of {kind.__name__} does not raise it")
