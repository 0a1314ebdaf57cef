"""Switches PyTorch's attention on the CPU to clearhead and back, for the whole process."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock, active_count
from typing import Any

import torch
from torch.library import Library

from clearhead.torch.operators import NEED_KERNELS, OPERATORS, counts

_KERNELS = hasattr(torch.library, "get_kernel")  # what PyTorch had in an operator's place; of 2.13, not of 2.4
_lock = Lock()
_kept, _blocks = False, 0  # by `activate`, and how many blocks of `active` last
_on = False
_library: Library | None = None


def activate() -> None:
    """Make `torch.nn.functional.scaled_dot_product_attention` clearhead's on the CPU, whoever calls it.

    It stays so until `deactivate()`, in every thread of the process; activating twice is the same as once. Calls from
    Python, from TorchScript and from C++ are covered, with autograd, autocast, torch.func and torch.compile; so is the
    fast path of torch.nn.MultiheadAttention and torch.nn.TransformerEncoder. What clearhead does not take is PyTorch's
    as before, and `explain()` says what and why: other devices, nested tensors, calls inside
    of `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    PyTorch's conventions hold: is_causal counts from the top left corner, a bool mask is True where a query may attend,
    a query that sees no key gives 0. Dropout draws other weights than PyTorch from the same seed.

    >>> import torch, clearhead.torch
    >>> x = torch.eye(2)[None, None]
    >>> clearhead.torch.activate()
    >>> torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0, 0]
    tensor([1., 0.])
    >>> clearhead.torch.deactivate()
    """
    _turn(kept=True)


def deactivate() -> None:
    """Undo `activate()`: PyTorch's attention is its own again, except inside of a `with active():` that has not ended.

    Where clearhead is not active, nothing happens. Graphs recorded before have their gradients all the same.

    >>> import clearhead.torch
    >>> clearhead.torch.deactivate()
    """
    _turn(kept=False)


@contextmanager
def active() -> Iterator[None]:
    """`activate()` for a block: when the last such block ends, also by an exception, all is as it was before.

    Blocks may be nested, and may overlap in several threads; while one of them lasts, clearhead is active in all.

    >>> import torch, clearhead.torch
    >>> x = torch.eye(2)[None, None]
    >>> with clearhead.torch.active():
    ...     output = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> clearhead.torch.explain()
    {'clearhead: scaled_dot_product_attention itself': 1}
    """
    _turn(blocks=1)
    try:
        yield
    finally:
        _turn(blocks=-1)


def explain() -> dict[str, int]:
    """How many attention calls clearhead computed and PyTorch computed, by reason, since clearhead was last activated.

    Keys are sentences: "clearhead: " and through which of PyTorch's operators the calls came, or "PyTorch: " and why
    they were left to it. Calls that never reach the CPU's operators, as on other devices, are not counted.

    >>> import clearhead.torch
    >>> with clearhead.torch.active():
    ...     pass
    >>> clearhead.torch.explain()
    {}
    """
    return dict(counts)


def _turn(*, kept: bool | None = None, blocks: int = 0) -> None:
    """Turn clearhead on or off, as `kept` and the number of blocks, `blocks` more now, say.

    PyTorch's dispatcher must not change while another thread calls it. So the operators stay installed where there are
    other threads, and while clearhead is not active they call what PyTorch had there before.
    """
    global _kept, _blocks, _on, _library
    with _lock:
        _kept, _blocks = _kept if kept is None else kept, _blocks + blocks
        wanted = _kept or _blocks > 0
        if wanted and not _on:
            counts.clear()
            _library = _library or _installed()
        elif not wanted and (active_count() == 1 or not _KERNELS):
            _library = None  # PyTorch takes the operators out when their library is gone
        _on = wanted


def _installed() -> Library:
    """Put clearhead's operators in the place of PyTorch's."""
    chosen = OPERATORS if _KERNELS else [one for one in OPERATORS if one[1] not in NEED_KERNELS]
    kernels = [(name, key, _switched(name, function, key)) for name, function, key in chosen]
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*other operators may also be overridden", UserWarning)
        for name, key, kernel in kernels:
            library.impl(name, kernel, key, **({"with_keyset": True} if _KERNELS else {}))  # type: ignore[no-untyped-call]
    return library


def _switched(name: str, function: Callable[..., Any], key: str) -> Callable[..., Any]:
    """A kernel that calls the function while clearhead is active, and otherwise what PyTorch has in its place.

    Of NEED_KERNELS a function answers NotImplemented where PyTorch's is to be called.
    """
    if not _KERNELS:
        return function
    operator = getattr(torch.ops.aten, name).default
    composite = operator.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)
    if composite and function not in NEED_KERNELS:
        return lambda _, *args, **named: (function if _on else operator.decompose)(*args, **named)
    theirs = torch.library.get_kernel(operator, key).call_boxed

    def kernel(keys: Any, *args: Any, **named: Any) -> Any:
        result = function(*args, **named) if _on else NotImplemented
        return theirs(keys, *args, **named) if result is NotImplemented else result

    return kernel
