"""Reads arrays of NumPy, PyTorch and any library with DLPack, without a copy, and gives back the kind it was given."""

import sys
from collections.abc import Callable, Hashable
from typing import Any, cast

import ml_dtypes
import numpy as np

from clearhead.core.axes import Array
from clearhead.core.torch_state import carries_tangent, has_dual_level, plain, transforms
from clearhead.errors import DerivativeError, DtypeError

kernel: Any  # None where it cannot be imported
import_error = ""
try:
    from clearhead import _native as kernel  # type: ignore[no-redef]
except ImportError as error:
    kernel, import_error = None, str(error)
bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), bfloat16, np.dtype(np.float16))

Restore = Callable[[Array], Any]


class DeviceArray:
    """A tensor in a GPU's memory; engines for that GPU use its `tensor`, all others refuse it.

    For Triton's interpreter it wraps a tensor in the CPU's memory; its device is then "interpreter".
    """

    __array_ufunc__ = None  # NumPy must not compute with it: arithmetic belongs in kernels
    __slots__ = ("tensor",)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor

    @property
    def device(self) -> str:
        name = str(self.tensor.device)
        return "interpreter" if name == "cpu" else name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def ndim(self) -> int:
        return self.tensor.ndim

    @property
    def size(self) -> int:
        return self.tensor.numel()

    @property
    def dtype(self) -> np.dtype[Any]:
        name = str(self.tensor.dtype).removeprefix("torch.")
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> "DeviceArray":
        """Basic indexing, and integer arrays; a negative step copies, since PyTorch has no negative strides."""
        parts = key if isinstance(key, tuple) else (key,)
        if Ellipsis in [part for part in parts if part is Ellipsis]:
            place = next(place for place, part in enumerate(parts) if part is Ellipsis)
            count = sum(part is not None for part in parts) - 1
            parts = (*parts[:place], *[slice(None)] * (self.ndim - count), *parts[place + 1 :])
        tensor, axis = self.tensor, 0
        plain: list[Any] = []
        for part in parts:
            if isinstance(part, slice) and part.step is not None and part.step < 0:
                chosen = range(tensor.shape[axis])[part]
                tensor = tensor.flip(axis)
                last = tensor.shape[axis] - 1
                part = slice(last - chosen[0], last - chosen[-1] + 1, -chosen.step) if chosen else slice(0, 0)
            elif isinstance(part, np.ndarray):
                part = sys.modules["torch"].from_numpy(np.ascontiguousarray(part)).to(tensor.device)
            plain.append(part)
            axis += part is not None
        return DeviceArray(tensor[tuple(plain)])

    def __add__(self, other: "DeviceArray") -> "DeviceArray":
        return DeviceArray(self.tensor + other.tensor)

    def reshape(self, *shape: Any) -> "DeviceArray":
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        return DeviceArray(self.tensor.reshape(sizes))

    def swapaxes(self, first: int, second: int) -> "DeviceArray":
        return DeviceArray(self.tensor.transpose(first, second))

    def copy(self) -> "DeviceArray":
        return DeviceArray(self.tensor.clone())

    def astype(self, dtype: Any, *, copy: bool = True) -> "DeviceArray":
        return DeviceArray(self.tensor.to(getattr(sys.modules["torch"], np.dtype(dtype).name), copy=copy))


def as_array(x: Any, name: str, device: str | None = None) -> tuple[Array, Restore]:
    """View `x` as a NumPy array, or as a DeviceArray if it lies on another device, such as a GPU.

    name      what errors call it
    device    where it must lie, such as "cpu" or "cuda:0"; None accepts any device

    Returns the array, and a function that turns a result into the kind of array that `x` is. Raises DtypeError when `x`
    is no array, requires gradients while PyTorch records them, or lies on another device.
    """
    array, restore = _adopt(x, name)
    if device is not None and device_of(array) != device:
        raise DtypeError(
            f"{name} is on device {device_of(array)} but q is on device {device}.", f"{name}.to({device!r}) moves it."
        )
    return array, restore


def device_of(x: Array) -> str:
    """The device of an array that `as_array` returned: "cpu", "cuda:0", … or "interpreter" (Triton's, on the CPU)."""
    return x.device if isinstance(x, DeviceArray) else "cpu"


def _adopt(x: Any, name: str) -> tuple[Array, Restore]:
    if type(x) is np.ndarray or isinstance(x, DeviceArray):
        return cast("Array", x), same
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(
            f"{name} is a masked array, and clearhead would ignore its mask.",
            f"{name}.data has the numbers; masked keys are mask=~{name}.mask.any(-1)[..., None, :], True = may attend.",
        )
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray), same
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(torch, x, name), as_tensor
    if hasattr(x, "__dlpack__") and hasattr(x, "__array_namespace__"):
        library = x.__array_namespace__()
        return _from_dlpack(x, name), library.asarray
    given = "" if hasattr(x, "__array__") else ", dtype=np.float64"  # tables of pandas have a dtype, lists none
    raise DtypeError(
        f"{name} is a {type(x).__name__}: expected a NumPy array, a PyTorch tensor or an array that speaks DLPack.",
        f"np.asarray({name}{given}) makes one{given and ' from numbers in a list'}.",
    )


def torch_of(x: Any) -> Any:
    """The module torch where x is a tensor, else None."""
    torch = None if isinstance(x, np.ndarray) else sys.modules.get("torch")
    return torch if torch is not None and isinstance(x, torch.Tensor) else None


def autocast(x: Any) -> Any:
    """Cast as PyTorch's own attention does under autocast: float32 and narrower become autocast's dtype."""
    torch = torch_of(x)
    if torch is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if on else x


def as_rule_array(x: Any, name: str, device: str = "cpu") -> Array:
    """A rule's value as an array: left on `device` where it lies there, else in the CPU's memory.

    Numbers and lists are accepted too. Raises DtypeError for a ragged list, and as `as_array` does.
    """
    if isinstance(x, (int, float, bool, list, tuple, np.generic)):
        try:
            return np.asarray(x)
        except Exception as error:  # a ragged list, or a member of another library, which may raise anything
            raise DtypeError(f"{name} is no array of numbers: {error}") from None
    array = as_array(x, name)[0]
    return array if device_of(array) == device else on_cpu(array)


def as_host_array(x: Any, name: str) -> tuple[Array, Restore]:
    """As `as_array`, but copied into the CPU's memory; the returned function copies results back to x's device."""
    array, restore = as_array(x, name)
    return on_cpu(array), lambda result: restore(to_device_of(result, array))


def to_device_of(x: Array, like: Array) -> Array:
    """Copy x to the device of `like`; x itself where that is the CPU."""
    if not isinstance(like, DeviceArray):
        return x
    sent = to_torch(sys.modules["torch"], np.require(x, requirements=("C", "W"))).to(like.tensor.device)
    return cast("Array", DeviceArray(sent))


def on_cpu(x: Array) -> Array:
    """Copy a DeviceArray into the CPU's memory, waiting for its device; a NumPy array is returned as it is."""
    return _read(sys.modules["torch"], x.tensor.cpu()) if isinstance(x, DeviceArray) else x


def near(x: Any) -> Any:
    """Copy a tensor of a GPU, or each in a tuple, into the CPU's memory; anything else is returned as it is."""
    if isinstance(x, tuple):
        return tuple(map(near, x))
    return x.cpu() if torch_of(x) is not None and x.device.type != "meta" else x


def broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast x to this shape, as a view. Raises ValueError where it does not broadcast to it."""
    if x.shape == shape:
        return x
    if isinstance(x, DeviceArray):
        if np.broadcast_shapes(x.shape, shape) != shape:
            raise ValueError(f"{x.shape} does not broadcast to {shape}")
        return cast("Array", DeviceArray(x.tensor.expand(shape)))
    return np.broadcast_to(x, shape)


def unrepeated(x: Any, axes: int | None = None) -> Any:
    """Shrink to size 1 the axes along which an array is broadcast, of its first `axes` axes or of all.

    A tensor likewise; a DeviceArray is returned as it is.
    """
    if not isinstance(x, np.ndarray) and torch_of(x) is None:
        return x
    steps = x.strides if isinstance(x, np.ndarray) else x.stride()
    return x[(*(slice(1) if step == 0 else slice(None) for step in steps[:axes]), ...)]


def statistics_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype of statistics and of partial sums: float64 for float64, float32 for everything narrower."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def check_tensor(x: Any, name: str) -> None:
    """Raise DtypeError unless x is a dense PyTorch tensor whose numbers can be read.

    Nested, sparse, masked and distributed tensors and torch.jit.trace are refused. Raises DerivativeError where x
    carries a tangent of forward-mode differentiation. Under torch.compile nothing is checked.
    """
    torch = sys.modules["torch"]
    if torch.compiler.is_compiling():
        return
    usual = type(x) in (torch.Tensor, torch.nn.Parameter)
    if usual and x.layout == torch.strided and not (x.is_quantized or x.is_nested or torch.jit.is_tracing()):
        return
    if not isinstance(x, torch.Tensor):
        hint = _TRACE if type(x).__name__ == "Proxy" else f"torch.as_tensor({name})"  # FX's symbolic_trace
        raise DtypeError(f"{name} is a {type(x).__name__}: expected a PyTorch tensor.", hint)
    if torch.jit.is_tracing():
        raise DtypeError(f"torch.jit.trace would record results computed from {name} as constants.", _TRACE)
    what = _STRANGE.get(type(x).__name__, "quantised" if x.is_quantized else "")
    if x.is_nested or x.layout != torch.strided:
        what = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
    if what:
        raise DtypeError(f"{name} is {what}: expected a dense tensor of numbers.", _DENSE)


_STRANGE = {
    "DTensor": "a DTensor",
    "MaskedTensor": "a masked tensor, and its mask is not read",
    "UninitializedParameter": "a parameter that has no shape yet",
}
_TRACE = "use torch.export.export or torch.compile, which record attention as an operator."
_UNREAD = "move it to the CPU; where JAX traces, use jax.pure_callback; where torch.fx does, torch.export.export."
_DENSE = "to_dense(), dequantize(), get_data() and full_tensor() make one; pad a nested one, and give kv_lengths."


def same(array: Array) -> Array:
    """Return the array itself: what `as_array` returns to restore NumPy arrays."""
    return array


def key_of(q: Any, k: Any, v: Any) -> Hashable:
    """A key of the arrays' shapes and dtypes, equal for calls that agree in them; None if a closer look is needed."""
    kind = type(q)
    if type(k) is kind is np.ndarray:
        if v is None:
            return q.shape, k.shape, q.dtype, k.dtype
        return (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype) if type(v) is kind else None
    if kernel is None or kind is np.ndarray or not plain(q, k, k if v is None else v):
        return None
    key = kernel.signature(q, k, k if v is None else v)
    return key if v is not None or key is None else (key, None)


def numbers_of(x: Any) -> Array:
    """A NumPy array as it is, and the numbers of a plain tensor as one."""
    return x if type(x) is np.ndarray else _read(sys.modules["torch"], x.detach())


def as_tensor(array: Array) -> Any:
    """A tensor with the array's memory."""
    return to_torch(sys.modules["torch"], array)


def _from_torch(torch: Any, x: Any, name: str) -> Array:
    check_tensor(x, name)
    if has_dual_level() and not transforms() and carries_tangent(x):
        raise DerivativeError(
            f"{name} carries a tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad): this call has no "
            "forward-mode derivative.",
            "clearhead.attention, AttentionMatrix.observe and A @ v have one.",
        )
    if x.device.type == "meta":
        raise DtypeError(f"{name} is on device {x.device}: no engine here runs there.", f"{name}.cpu() moves it.")
    if x.requires_grad and torch.is_grad_enabled():
        raise DtypeError(
            f"{name} requires grad, and this call has no derivative.",
            f"{name}.detach(), or `with torch.no_grad():` around the call.",
        )
    try:
        return cast("Array", DeviceArray(x.detach())) if x.device.type != "cpu" else _read(torch, x.detach())
    except TypeError:
        raise DtypeError(f"{name} is {x.dtype}, which NumPy does not have.", f"{name}.float() converts it.") from None
    except RuntimeError as error:  # inside of torch.func, of many gradients at once, or a subclass
        raise DtypeError(
            f"{name} is a {type(x).__name__} whose numbers cannot be read: {error}",
            "inside torch.func, call only clearhead.attention, AttentionMatrix.observe, A @ v and A.T @ g; for many "
            "gradients at once, use torch.func.vjp with torch.func.vmap, or jacrev.",
        ) from None


def _read(torch: Any, x: Any) -> Array:
    if x.dtype == torch.bfloat16:  # NumPy has no bfloat16: reinterpret the same bits
        bits: Array = x.view(torch.int16).numpy()
        return bits.view(bfloat16)
    array: Array = x.resolve_conj().resolve_neg().numpy()
    return array


def to_torch(torch: Any, array: Array) -> Any:
    """A tensor that shares the array's memory (bfloat16 is copied where it is not contiguous)."""
    if isinstance(array, DeviceArray):
        return array.tensor
    if array.dtype == bfloat16:
        return torch.from_numpy(np.asarray(array, order="C").view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _from_dlpack(x: Any, name: str) -> Array:
    try:
        try:
            return np.from_dlpack(x)
        except (BufferError, RuntimeError, TypeError, ValueError):
            if not hasattr(x, "__array__"):
                raise
            return np.asarray(x)  # bfloat16, which NumPy's own DLPack reader does not know
    except Exception as error:  # a tracer of JAX or torch.fx may raise anything
        why = str(error).partition("\n")[0]
        raise DtypeError(f"{name} is a {type(x).__name__} whose numbers cannot be read: {why}", _UNREAD) from None
