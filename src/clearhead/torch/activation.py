"""Switches PyTorch's attention on the CPU to clearhead and back, for the whole process."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock, active_count
from typing import Any

import torch
from torch.library import Library
from torch.nn import attention

from clearhead.torch.calls import Calls, counted, forget
from clearhead.torch.operators import NEED_KERNELS, OPERATORS

_NAME = "clearhead"  # in torch.nn.attention.list_flash_attention_impls()
_REGISTRY = hasattr(attention, "register_flash_attention_impl")  # of PyTorch 2.13, not of 2.4
_KERNELS = hasattr(torch.library, "get_kernel")  # likewise: what PyTorch had in an operator's place


def activate() -> None:
    """Make `torch.nn.functional.scaled_dot_product_attention` clearhead's on the CPU, whoever calls it.

    It stays so until `deactivate()`, in every thread of the process; activating twice is the same as once. Calls from
    Python, from TorchScript and from C++ are covered, with autograd, autocast, torch.func and torch.compile; so is the
    fast path of torch.nn.MultiheadAttention and torch.nn.TransformerEncoder. What clearhead does not take is PyTorch's
    as before, and `explain()` says what and why: other devices, nested tensors, calls inside
    of `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    PyTorch's conventions hold: is_causal counts from the top left corner, a bool mask is True where a query may attend,
    a query that sees no key gives 0. Dropout draws other weights than PyTorch from the same seed.

    Where PyTorch has torch.nn.attention.activate_flash_attention_impl, clearhead is registered there as "clearhead".

    >>> import torch, clearhead.torch
    >>> x = torch.eye(2)[None, None]
    >>> clearhead.torch.activate()
    >>> torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[0, 0, 0]
    tensor([1., 0.])
    >>> clearhead.torch.deactivate()
    """
    _switch.turn(kept=True)


def deactivate() -> None:
    """Undo `activate()`: PyTorch's attention is its own again, except inside of a `with active():` that has not ended.

    Where clearhead is not active, nothing happens. Graphs recorded before have their gradients all the same.

    >>> import clearhead.torch
    >>> clearhead.torch.deactivate()
    """
    _switch.turn(kept=False)


@contextmanager
def active() -> Iterator[None]:
    """`activate()` for a block: when the last such block ends, also by an exception, all is as it was before.

    Blocks may be nested, and may overlap in several threads; while one of them lasts, clearhead is active in all.

    >>> import torch, clearhead.torch
    >>> x = torch.eye(2)[None, None]
    >>> with clearhead.torch.active():
    ...     output = torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> print(clearhead.torch.explain())
    clearhead is not active.
    clearhead, 1 call: scaled_dot_product_attention itself.
        float32, query (1, 1, 2, 2), key (1, 1, 2, 2), value (1, 1, 2, 2)
    """
    _switch.turn(blocks=1)
    try:
        yield
    finally:
        _switch.turn(blocks=-1)


def explain() -> Calls:
    """Which attention calls clearhead computed and which PyTorch, since clearhead was last activated, and why.

    Returns Calls: `active`, and `routes`, one for each reason, with the number of calls and the latest four
    different shapes. It prints as a list. Calls that never reach the CPU's operators, as on other devices, are not
    counted.

    >>> import clearhead.torch
    >>> clearhead.torch.explain().active
    False
    """
    return Calls(_switch.on, counted())


class _Switch:
    """Whether clearhead is active, by `activate` or in blocks; PyTorch's registry holds it and calls `remove`.

    PyTorch's dispatcher must not change while another thread calls it. So the operators stay installed where there are
    other threads, and while clearhead is not active they call what PyTorch had there before.
    """

    def __init__(self) -> None:
        self.lock = RLock()
        self.kept = False
        self.blocks = 0
        self.library: Library | None = None
        self.on = False

    def turn(self, *, kept: bool | None = None, blocks: int = 0) -> None:
        """Turn clearhead on or off, as `kept` and the number of blocks, `blocks` more now, say."""
        with self.lock:
            self.kept = self.kept if kept is None else kept
            self.blocks += blocks
            self._update()

    def _update(self) -> None:
        wanted = self.kept or self.blocks > 0
        if wanted == self.on:
            return
        registered = attention.current_flash_attention_impl() if _REGISTRY else "no registry"
        if wanted and registered is None:
            kept = self.kept
            attention.activate_flash_attention_impl(_NAME)  # calls `activated`
            self.kept = kept
        elif wanted:  # PyTorch lists one implementation at a time, and has another: both serve, on different devices
            self.install()
        elif registered == _NAME:
            attention.restore_flash_attention_impl()  # calls `remove`
        else:
            self.remove()

    def activated(self) -> "_Switch":
        """What torch.nn.attention.activate_flash_attention_impl("clearhead") calls."""
        with self.lock:
            self.kept = True
            self.install()
        return self

    def install(self) -> None:
        forget()
        if self.library is None:
            chosen = OPERATORS if _KERNELS else [one for one in OPERATORS if one[1] not in NEED_KERNELS]
            kernels = [(name, key, self.switched(name, function, key)) for name, function, key in chosen]
            self.library = Library("aten", "IMPL")  # type: ignore[no-untyped-call]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "(?s).*other operators may also be overridden", UserWarning)
                for name, key, kernel in kernels:
                    self.library.impl(  # type: ignore[no-untyped-call]
                        name, kernel, key, **({"with_keyset": True} if _KERNELS else {})
                    )
        self.on = True

    def switched(self, name: str, function: Callable[..., Any], key: str) -> Callable[..., Any]:
        """A kernel that calls the function while clearhead is active, and otherwise what PyTorch has in its place.

        Of NEED_KERNELS a function answers NotImplemented where PyTorch's is to be called.
        """
        if not _KERNELS:
            return function
        operator = getattr(torch.ops.aten, name).default
        composite = operator.has_kernel_for_dispatch_key(torch.DispatchKey.CompositeImplicitAutograd)
        if composite and function not in NEED_KERNELS:
            return lambda _, *args, **named: (function if self.on else operator.decompose)(*args, **named)
        theirs = torch.library.get_kernel(operator, key).call_boxed

        def kernel(keys: Any, *args: Any, **named: Any) -> Any:
            result = function(*args, **named) if self.on else NotImplemented
            return theirs(keys, *args, **named) if result is NotImplemented else result

        return kernel

    def remove(self) -> None:
        """Turn clearhead off. PyTorch takes the operators out when their library is gone."""
        with self.lock:
            self.kept = self.on = False
            if active_count() == 1 or not _KERNELS:
                self.library = None


_switch = _Switch()
if _REGISTRY:
    attention.register_flash_attention_impl(_NAME, register_fn=_switch.activated)
