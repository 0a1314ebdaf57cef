"""Switches PyTorch's attention on the CPU to clearhead and back, for the whole process.

PyTorch's `scaled_dot_product_attention` chooses among kernels; clearhead's replaces that choice for calls that run
immediately. Calls that are traced, transformed or watched stay PyTorch's, so that its compilers, caches and counters
see the operators that they know.
"""

import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock, active_count
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.nn.attention import SDPBackend

from clearhead.core.torch_state import transforms, watched
from clearhead.errors import DtypeError, RuleError, ShapeError
from clearhead.torch.sdpa import scaled_dot_product_attention

_PLAIN = (Tensor, torch.nn.Parameter)
_TRACED = "traced, transformed or watched"
_lock = Lock()
_counts: Counter[str] = Counter()  # how many calls clearhead or PyTorch computed, and why
_kept, _blocks = False, 0  # has `activate` been called, and how many `with active():` are open
_on = False
_fast_path = True  # PyTorch's own setting
_library: Library | None = None


def activate() -> None:
    """Replace `torch.nn.functional.scaled_dot_product_attention` on the CPU by clearhead's, whoever calls it.

    It stays so until `deactivate()`, in every thread of the process; activating twice is the same as once. It covers
    calls from Python, TorchScript and C++, with autograd and autocast; torch.nn.MultiheadAttention and
    torch.nn.TransformerEncoder lose their fast path, which stores all weights. PyTorch still computes calls inside
    torch.compile, torch.func or `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`, and those that clearhead refuses;
    `explain()` counts them by reason.

    PyTorch's conventions hold: is_causal aligns at the top left corner, a bool mask is True where a query may attend, a
    query that sees no key gives 0. Dropout zeroes other weights than PyTorch does from the same seed.

    >>> import torch, clearhead.torch
    >>> x = torch.eye(2)[None, None]
    >>> clearhead.torch.activate()
    >>> torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0, 0]
    tensor([1., 0.])
    >>> clearhead.torch.deactivate()
    """
    _turn(kept=True)


def deactivate() -> None:
    """Undo `activate()`: PyTorch computes its own attention again, except while a `with active():` is open.

    Does nothing if clearhead is not active. Graphs recorded before keep their gradients.

    >>> import clearhead.torch
    >>> clearhead.torch.deactivate()
    """
    _turn(kept=False)


@contextmanager
def active() -> Iterator[None]:
    """Call `activate()` for a block: when the last open block ends, even by an exception, the former state returns.

    Blocks may be nested, and may overlap in several threads; while any is open, clearhead is active in all threads.

    >>> import torch, clearhead.torch
    >>> x = torch.eye(2)[None, None]
    >>> with clearhead.torch.active():
    ...     output = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> clearhead.torch.explain()
    {'clearhead': 1}
    """
    _turn(blocks=1)
    try:
        yield
    finally:
        _turn(blocks=-1)


def explain() -> dict[str, int]:
    """Count the attention calls since the last activation: those that clearhead computed, and PyTorch's by reason.

    Keys are "clearhead", or "PyTorch: " and the reason why calls were left to it. Calls on other devices or with nested
    tensors are not counted.

    >>> import clearhead.torch
    >>> with clearhead.torch.active():
    ...     pass
    >>> clearhead.torch.explain()
    {}
    """
    return dict(_counts)


def _turn(*, kept: bool | None = None, blocks: int = 0) -> None:
    """Set `_kept`, add `blocks` to the open blocks, and turn clearhead on or off accordingly.

    PyTorch's dispatcher must not change while another thread calls it. So while there are other threads, the function
    stays installed and, if clearhead is not active, calls PyTorch's own.
    """
    global _kept, _blocks, _on, _fast_path, _library
    with _lock:
        _kept, _blocks = _kept if kept is None else kept, _blocks + blocks
        wanted, fast_path = _kept or _blocks > 0, torch.backends.mha
        if wanted and not _on:
            _counts.clear()
            _library = _library or _installed()
            _fast_path = fast_path.get_fastpath_enabled()
            fast_path.set_fastpath_enabled(False)
        elif _on and not wanted:
            fast_path.set_fastpath_enabled(_fast_path)
        if not wanted and active_count() == 1:
            _library = None  # PyTorch removes the function when its library is deleted
        _on = wanted


def _installed() -> Library:
    """Replace PyTorch's function by clearhead's."""
    library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*other operators may also be overridden", UserWarning)
        for key in ("AutogradCPU", "CPU"):  # the second is called in inference mode
            library.impl("scaled_dot_product_attention", _attend, key)  # type: ignore[no-untyped-call]
    return library


def _count(computed_by: str) -> None:
    with _lock:
        _counts[computed_by] += 1


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001  PyTorch's signature
    **named: Any,  # scale and enable_gqa
) -> Tensor:
    """aten::scaled_dot_product_attention."""
    inputs = query, key, value, attn_mask, dropout_p, is_causal
    if _on:
        why = _why_not(query, key, value, attn_mask)
        if not why:
            try:
                output = scaled_dot_product_attention(*inputs, **named)
            except (ShapeError, DtypeError, RuleError) as error:
                why = f"clearhead refuses it with a {type(error).__name__}"
            else:
                _count("clearhead")
                # no public name says which of its kernels PyTorch would take: the output of the fused one has the
                # strides of the query
                if query.is_contiguous() or torch._fused_sdp_choice(*inputs, **named) == SDPBackend.MATH.value:
                    return output
                return torch.empty_like(query).copy_(output)
        _count(f"PyTorch: {why}")
    theirs: Tensor = torch.ops.aten.scaled_dot_product_attention.default.decompose(*inputs, **named)
    return theirs


def _why_not(*tensors: Tensor | None) -> str:
    """Say why a call is left to PyTorch; "" if clearhead may compute it."""
    if watched() or transforms() or torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        return _TRACED
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]  # the switch of the CPU's fused operator too
        return "torch.nn.attention.sdpa_kernel leaves out FLASH_ATTENTION"
    if any(x is not None and type(x) not in _PLAIN for x in tensors):
        return _TRACED
    if any(x is not None and (x.device.type != "cpu" or x.layout != torch.strided) for x in tensors):
        return "not every tensor is a dense one on the CPU"
    return ""
