"""Arrays in, arrays out: NumPy, PyTorch and whatever speaks DLPack, without a copy; you get back the kind you gave."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import ml_dtypes
import numpy as np

from clearhead.core.axes import Array
from clearhead.core.device_array import DeviceArray
from clearhead.errors import DerivativeError, DtypeError

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = (np.dtype(np.float64), np.dtype(np.float32), bfloat16, np.dtype(np.float16))

Restore = Callable[[Array], Any]


def as_array(x: Any, name: str, device: str | None = None) -> tuple[Array, Restore]:
    """View `x` as a NumPy array, or as a DeviceArray if it lies in a GPU's memory.

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
        return cast("Array", x), _same
    if isinstance(x, np.ma.MaskedArray):
        raise DtypeError(
            f"{name} is a masked array, and a mask of its own is not read here.",
            f"{name}.data has the numbers; masked keys are mask=~{name}.mask.any(-1)[..., None, :], True = may attend.",
        )
    if isinstance(x, np.ndarray):
        return x.view(np.ndarray), _same
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        return _from_torch(torch, x, name), _as_tensor
    if _traced_by_jax(x):
        raise DtypeError(
            f"{name} is traced by JAX (jax.jit, jax.grad, jax.vmap): its numbers cannot be read while JAX traces.",
            "clearhead.jax.attention and clearhead.jax.observe can be traced; call all else outside, on plain arrays.",
        )
    if hasattr(x, "__dlpack__") and hasattr(x, "__array_namespace__"):
        library = x.__array_namespace__()
        return _from_dlpack(x, name), library.asarray
    raise DtypeError(
        f"{name} is a {type(x).__name__}: expected a NumPy array, a PyTorch tensor or an array that speaks DLPack.",
        f"np.asarray({name}, dtype=np.float64) makes one from numbers in a list.",
    )


def library_of(x: Any) -> str:
    """Whose array it is: "torch", or "" for all others."""
    torch = None if isinstance(x, np.ndarray) else sys.modules.get("torch")
    return "torch" if torch is not None and isinstance(x, torch.Tensor) else ""


def graphed(q: Any, *others: Any) -> bool:
    """Must a call go through PyTorch's operators? Yes where PyTorch traces it, or keeps a graph for gradients."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(q, torch.Tensor):
        return False
    if torch.compiler.is_compiling() or type(q) not in (torch.Tensor, torch.nn.Parameter) or q.is_meta:
        return True
    if traced_by_fx():
        return True
    if torch._C._are_functorch_transforms_active():
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor
        if any(isinstance(x, torch.Tensor) and wrapped(x) for x in (q, *others)):
            return True
        if torch.autograd.forward_ad._current_level >= 0:
            return True  # torch.vmap cannot say whether a tensor carries a tangent
    elif torch.autograd.forward_ad._current_level >= 0 and any(_moving(torch, x) for x in (q, *others)):
        return True
    return bool(torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in (q, *others)))


def traced_by_fx() -> bool:
    """Does PyTorch's make_fx write down which operators run now? What is computed without one would be a constant."""
    c = sys.modules["torch"]._C
    return bool(c._len_torch_dispatch_stack() and c._get_dispatch_mode(c._TorchDispatchModeKey.PROXY) is not None)


def _moving(torch: Any, x: Any) -> bool:
    """Does a tensor carry a tangent of forward-mode differentiation?"""
    return isinstance(x, torch.Tensor) and torch.autograd.forward_ad.unpack_dual(x).tangent is not None


def autocast(x: Any) -> Any:
    """Cast as PyTorch's own attention does under autocast: float32 and narrower become autocast's dtype."""
    torch = None if isinstance(x, np.ndarray) else sys.modules.get("torch")
    if torch is None or not isinstance(x, torch.Tensor) or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return x.to(torch.get_autocast_dtype(device)) if on else x


def ungraphed() -> AbstractContextManager[Any]:
    """torch.no_grad() where PyTorch is loaded: for reading tensors that require grad when nothing is computed."""
    torch = sys.modules.get("torch")
    return nullcontext() if torch is None else torch.no_grad()


def as_rule_array(x: Any, name: str, device: str = "cpu") -> Array:
    """A rule's value as an array: left on `device` where it lies there, else in the CPU's memory.

    Numbers and lists are accepted too. Raises DtypeError for a ragged list, and as `as_array` does.
    """
    if isinstance(x, (int, float, bool, list, tuple, np.generic)):
        try:
            return np.asarray(x)
        except ValueError:
            raise DtypeError(f"{name} is a ragged list: its rows differ in length.") from None
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


def broadcast(x: Array, shape: tuple[int, ...]) -> Array:
    """Broadcast x to this shape, as a view. Raises ValueError where it does not broadcast to it."""
    if x.shape == shape:
        return x
    if isinstance(x, DeviceArray):
        if np.broadcast_shapes(x.shape, shape) != shape:
            raise ValueError(f"{x.shape} does not broadcast to {shape}")
        return cast("Array", DeviceArray(x.tensor.expand(shape)))
    return np.broadcast_to(x, shape)


def empty(like: Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An uninitialised array on the device of `like`."""
    if isinstance(like, DeviceArray):
        return cast("Array", DeviceArray(like.tensor.new_empty(shape)).astype(dtype))
    return np.empty(shape, dtype)


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
    if not usual and not isinstance(x, torch.Tensor):
        raise DtypeError(f"{name} is a {type(x).__name__}: expected a PyTorch tensor.", f"torch.as_tensor({name})")
    if torch.jit.is_tracing():
        raise DtypeError(
            f"torch.jit.trace would record what comes of {name} as a constant.",
            "torch.export.export records attention as an operator, and so does torch.compile.",
        )
    if x.is_nested:
        raise DtypeError(
            f"{name} is a nested tensor: expected a dense one.",
            "pad it (torch.nested.to_padded_tensor) and give kv_lengths and query_lengths, or join its parts and give "
            "query_segments and kv_segments.",
        )
    if x.layout != torch.strided:
        raise DtypeError(f"{name} has layout {x.layout}: expected a dense tensor.", f"{name}.to_dense() makes one.")
    if usual:
        return
    kinds = {"DTensor": "torch.distributed.tensor", "MaskedTensor": "torch.masked"}
    kind = next((one for one, home in kinds.items() if isinstance(x, getattr(sys.modules.get(home), one, ()))), "")
    if kind == "DTensor":
        raise DtypeError(
            f"{name} is a DTensor: expected a plain tensor.",
            f"{name}.to_local() is this rank's part; clearhead.distributed attends to sequences that lie in shards.",
        )
    if kind == "MaskedTensor":
        raise DtypeError(
            f"{name} is a masked tensor, and a mask of its own is not read here.",
            f"{name}.get_data() has the numbers; mask=… says who may attend to what, True = may attend.",
        )


def no_forward_mode(name: str) -> DerivativeError:
    """The error for a tensor that carries a tangent of forward-mode differentiation."""
    return DerivativeError(
        f"{name} carries a tangent (torch.func.jvp, jacfwd, torch.autograd.forward_ad): this call has no forward-mode "
        "derivative.",
        "clearhead.attention, AttentionMatrix.observe and A @ v have one.",
    )


def _traced_by_jax(x: Any) -> bool:
    tracer = getattr(getattr(sys.modules.get("jax"), "core", None), "Tracer", None)
    return tracer is not None and isinstance(x, tracer)


def _same(array: Array) -> Array:
    return array


def _as_tensor(array: Array) -> Any:
    return to_torch(sys.modules["torch"], array)


def _from_torch(torch: Any, x: Any, name: str) -> Array:
    check_tensor(x, name)
    transformed = torch._C._are_functorch_transforms_active()
    if torch.autograd.forward_ad._current_level >= 0 and not transformed and _moving(torch, x):
        raise no_forward_mode(name)
    if torch._C._functorch.is_functorch_wrapped_tensor(x):
        raise DtypeError(
            f"{name} is inside torch.func (vmap, grad, vjp, jacrev): its numbers cannot be read there.",
            "clearhead.attention, AttentionMatrix.observe, A @ v and A.T @ g can be called there; all else outside.",
        )
    if x.device.type not in ("cpu", "cuda"):
        raise DtypeError(f"{name} is on device {x.device}: no engine here runs there.", f"{name}.cpu() moves it.")
    if x.requires_grad and torch.is_grad_enabled():
        raise DtypeError(
            f"{name} requires grad, and nothing here keeps a graph for it.",
            f"{name}.detach(), or `with torch.no_grad():` around the call.",
        )
    try:
        return cast("Array", DeviceArray(x.detach())) if x.device.type == "cuda" else _read(torch, x.detach())
    except TypeError:
        raise DtypeError(f"{name} is {x.dtype}, which NumPy does not have.", f"{name}.float() converts it.") from None
    except RuntimeError as error:  # a tensor subclass
        if "Batching rule" in str(error):  # nothing else tells these tensors from others
            raise DtypeError(
                f"{name} holds many gradients at once (is_grads_batched=True, vectorize=True): one is expected.",
                "torch.func.vjp with torch.func.vmap, and torch.func.jacrev, compute many at once.",
            ) from None
        raise DtypeError(f"{name} is a {type(x).__name__} whose numbers cannot be read: {error}") from None


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
        return np.from_dlpack(x)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        if hasattr(x, "__array__"):  # bfloat16, which NumPy's own DLPack reader does not know
            return np.asarray(x)
        raise DtypeError(f"{name} could not be read through DLPack: {error}.", "is it in the CPU's memory?") from None
