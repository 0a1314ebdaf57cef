"""The operators by which PyTorch computes attention on the CPU, computed by clearhead; activation.py installs them.

`scaled_dot_product_attention` itself is not a kernel. PyTorch's own checks its inputs and calls its fused operator, or,
where that cannot serve (dropout, a mask that requires grad, values of another width, axes that are not four), the math
path, which stores all weights. Ours computes the call, unless PyTorch's fused operator can serve and PyTorch records a
graph, or traces, transforms or watches the call: these know the fused operator, its shapes and its derivative.

`_scaled_dot_product_flash_attention_for_cpu` is that fused operator. In PyTorch's graphs, and in code that
torch.compile made, stands only its name, so that they run with clearhead while it is active and without it otherwise.

`_native_multi_head_attention` is the fast path of nn.MultiheadAttention and nn.TransformerEncoder in evaluation.
"""

from collections import Counter
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend

from clearhead.core.arrays import as_array, to_torch
from clearhead.core.axes import split_heads
from clearhead.core.call import Given
from clearhead.core.state import of_logsumexp
from clearhead.core.statistics import Wanted
from clearhead.core.torch_state import carries_tangent, has_dual_level, transforms, watched
from clearhead.derivatives.arguments import read
from clearhead.derivatives.function import Compute, answer, compute, gradients
from clearhead.errors import DtypeError, RuleError, ShapeError
from clearhead.ops.matrix import AttentionMatrix
from clearhead.torch.sdpa import scaled_dot_product_attention

_PLAIN = (Tensor, torch.nn.Parameter)
_WANTED = Wanted(output=True, logsumexp=True)

counts: Counter[str] = Counter()  # of calls, by who computed them and why
_lock = Lock()
_DIRECT = "scaled_dot_product_attention itself"
_FUSED = "the fused operator, in a graph or in compiled code"
_GRADIENT = "the fused operator's gradient"
_AGAIN = "the fused operator's gradient, to be differentiated again"
_FAST_PATH = "the fast path of nn.MultiheadAttention and nn.TransformerEncoder"
_TRACED = "traced, transformed or watched: what it becomes is counted where that runs"
_TRANSFORMS = frozenset(("Grad", "Jvp", "Vmap"))  # of torch.func


def _count(computed_by: str, reason: str) -> None:
    with _lock:
        counts[f"{computed_by}: {reason}"] += 1


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001  PyTorch's signature, as those below
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """aten::scaled_dot_product_attention."""
    inputs = query, key, value, attn_mask, dropout_p, is_causal
    named: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    why = _TRACED if _watched() else _why_not(query, key, value, attn_mask)
    if not why:
        try:
            # no public name says which of its kernels PyTorch would take on a CPU
            fusible = torch._fused_sdp_choice(*inputs, **named) != SDPBackend.MATH.value
            moving = has_dual_level() and any(map(carries_tangent, (query, key, value)))
            if fusible and _recorded(query, key, value) and not moving:
                return _pytorchs(inputs, named)  # counted in `fused`
            output = scaled_dot_product_attention(*inputs, **named)
        except (ShapeError, DtypeError, RuleError) as error:
            why = f"clearhead refuses it with a {type(error).__name__}"
        else:
            _count("clearhead", _DIRECT)
            return _strided_as(query, output) if fusible else output
    _count("PyTorch", why)
    return _pytorchs(inputs, named)


def transformed(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any) -> Any:
    """The same inside of torch.func's grad, vmap and jvp, before these take it apart."""
    mask = rest[0] if rest else named.get("attn_mask")
    if not _TRANSFORMS.issuperset(transforms()):
        return NotImplemented
    if watched() or _why_not(query, key, value, mask):
        return NotImplemented  # counted in `attend` or `fused`
    try:
        output = scaled_dot_product_attention(query, key, value, *rest, **named)
    except (ShapeError, DtypeError, RuleError):
        return NotImplemented
    _count("clearhead", _DIRECT)
    return output


def _pytorchs(inputs: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    output: Tensor = torch.ops.aten.scaled_dot_product_attention.default.decompose(*inputs, **named)
    return output


def _why_not(*tensors: Tensor | None) -> str:
    """Why a call is left to PyTorch; empty where clearhead may compute it."""
    if any(x is not None and x.is_nested for x in tensors):
        return "a nested tensor"
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]  # the switch of the CPU's fused operator too
        return "torch.nn.attention.sdpa_kernel leaves out FLASH_ATTENTION"
    if any(x is not None and type(x) not in _PLAIN for x in tensors):
        return _TRACED
    if any(x is not None and (x.device.type != "cpu" or x.layout != torch.strided) for x in tensors):
        return "not every tensor is a dense one on the CPU"
    return ""


def _watched() -> bool:
    """Does something around this call read or change the operators that PyTorch would run?"""
    return bool(watched() or transforms() or torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _recorded(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def _strided_as(query: Tensor, output: Tensor) -> Tensor:
    """The output with the strides that PyTorch's fused operator gives it, those of the query."""
    return output if query.is_contiguous() else torch.empty_like(query).copy_(output)


@torch.no_grad()  # PyTorch's autograd has its node above this operator already
def fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,  # noqa: FBT001
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """aten::_scaled_dot_product_flash_attention_for_cpu: the output, and the log-sum-exp, 0 where no key is seen."""
    del dropout_p  # PyTorch does not choose this operator with dropout
    made = answer(*read(Given(query, key, _rules(attn_mask, scale, is_causal=is_causal)), value))
    logsumexp = made["largest"] + made["log_sum"]
    if attn_mask is not None:
        logsumexp.masked_fill_(logsumexp == -torch.inf, 0.0)
    _count("clearhead", _FUSED)
    return _strided_as(query, made["output"]), logsumexp.transpose(1, 2).contiguous().transpose(1, 2)


@torch.no_grad()
def fused_backward(
    d_output: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,  # noqa: FBT001
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor | None, ...]:
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward: the gradients of query, key and value."""
    del dropout_p
    if d_output is None:  # nothing depends on the output
        return None, None, None
    rules = _rules(attn_mask, scale, is_causal=is_causal)
    made = _gradients(answer, d_output, (query, key, value), output, logsumexp, rules)
    _count("clearhead", _GRADIENT)
    return tuple(torch.empty_permuted(x.shape, (0, 2, 1, 3), dtype=x.dtype).copy_(x) for x in made)


def fused_backward_again(
    d_output: Tensor | None, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **named: Any
) -> Any:
    """The same gradients where PyTorch records a graph for them: as nodes that have derivatives."""
    output, logsumexp, _, is_causal = rest
    mask = named.get("attn_mask")
    if d_output is None or not _recorded(d_output, query, key, value):
        return NotImplemented
    if _watched() or _why_not(d_output, query, key, value, mask):
        return NotImplemented
    rules = _rules(mask, named.get("scale"), is_causal=is_causal)
    made = _gradients(compute, d_output, (query, key, value), output, logsumexp, rules)
    _count("clearhead", _AGAIN)
    return made


def _gradients(
    run: Compute, d_output: Tensor, inputs: tuple[Tensor, ...], output: Tensor, logsumexp: Tensor, rules: Any
) -> tuple[Tensor, ...]:
    """The gradients of query, key and value, answered by `run`.

    The rows' states are those of the log-sum-exp that PyTorch kept, or, where one number has no digits for them, new.
    """
    query, key, value = inputs
    task, x = read(Given(query, key, rules), value)
    with torch.no_grad():
        state = of_logsumexp(as_array(logsumexp, "logsumexp")[0])
        known = answer(task, x) if state is None else {n: to_torch(torch, one) for n, one in state._asdict().items()}
    result = gradients(run, task, x, {**known, "output": output}, {"output": d_output}, "qkv")
    return tuple(result[name] for name in "qkv")


def _rules(attn_mask: Tensor | None, scale: float | None, *, is_causal: bool) -> Any:
    rules: dict[str, Any] = {"scale": scale}
    if attn_mask is not None:
        rules["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return {**rules, "causal": True, "query_offset": 0} if is_causal else rules


@torch.no_grad()
def multi_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    qkv_weight: Tensor,
    qkv_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor | None = None,
    need_weights: bool = True,  # noqa: FBT001
    average_weights: bool = True,  # noqa: FBT001
    mask_type: int | None = None,
) -> tuple[Tensor, Tensor | None]:
    """aten::_native_multi_head_attention: projections, attention, W^O; inputs (batch, length, embed_dim).

    mask, nonzero = may not attend: (queries, keys), (batch, keys) if mask_type is 1, (batch, heads, queries, keys).
    """
    del embed_dim
    weights, biases = qkv_weight.chunk(3), qkv_bias.chunk(3)
    q, k, v = (
        split_heads(functional.linear(x, weight, bias), num_heads)
        for x, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    seen = None if mask is None else ~mask.bool()
    matrix = AttentionMatrix(q, k, mask=seen[:, None, None] if seen is not None and mask_type == 1 else seen)
    output = functional.linear((matrix @ v).transpose(1, 2).flatten(2), out_weight, out_bias)
    _count("clearhead", _FAST_PATH)
    if not need_weights:
        return output, None  # an undefined tensor, as PyTorch's
    weights_of_heads = matrix[...].to(query.dtype)
    return output, weights_of_heads.mean(1) if average_weights else weights_of_heads


OPERATORS = (  # name, function, and the dispatch key under which PyTorch calls it
    ("scaled_dot_product_attention", attend, "AutogradCPU"),
    ("scaled_dot_product_attention", attend, "CPU"),  # in inference mode
    ("scaled_dot_product_attention", transformed, "FuncTorchDynamicLayerFrontMode"),
    ("scaled_dot_product_attention", attend, "AutogradNestedTensor"),  # left to PyTorch, but counted
    ("scaled_dot_product_attention", attend, "NestedTensorCPU"),
    ("_scaled_dot_product_flash_attention_for_cpu", fused, "CPU"),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", fused_backward, "CPU"),
    ("_scaled_dot_product_flash_attention_for_cpu_backward", fused_backward_again, "AutogradCPU"),
    ("_native_multi_head_attention", multi_head, "CPU"),
)
NEED_KERNELS = (transformed, fused_backward_again)  # leave some calls to the kernels that PyTorch had in their place
