"""The contestants: each either sets a case up or says why it does not support it."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import clearhead as ch
from benchmarks.cases import Case
from clearhead import engines
from clearhead.bench.self_check import Call
from clearhead.core.arrays import bfloat16
from clearhead.core.axes import Array
from clearhead.core.call import describe
from clearhead.core.statistics import Wanted
from clearhead.derivatives.backward import gradients

NAMES = ("torch", "onnxruntime", "onnx-attention", "flex", "jax", "numpy")
_ASKED: dict[str, Any] = {"logsumexp": True, "max_logit": True, "entropy": True, "received": True, "top": 8}
Inputs = tuple[Array, Array, Array]
Setup = Callable[[Case, Inputs, int], Call | str]


def inputs(case: Case) -> Inputs:
    """Fresh random q, k, v of the case's dtype."""
    rng = np.random.default_rng(0)
    dtype = bfloat16 if case.dtype == "bfloat16" else np.dtype(case.dtype)
    heads = ((case.heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
    q, k, v = (rng.standard_normal((case.batch, *shape, case.d), dtype=np.float32).astype(dtype) for shape in heads)
    return q, k, v


def ours(case: Case, passed: Inputs, threads: int) -> Call:
    """clearhead through its public functions."""
    ch.set_num_threads(threads)
    q, k, v = passed
    rules = _rules(case)
    if case.kind == "observe":
        return lambda: ch.AttentionMatrix(q, k, **rules).observe(v, **_ASKED)
    if case.kind == "backward":
        return _our_backward(passed, rules)
    return lambda: ch.attention(q, k, v, **rules)


def _rules(case: Case) -> dict[str, Any]:
    rules: dict[str, Any] = {"causal": True} if case.causal else {}
    return rules if case.window is None else {**rules, "window": (case.window - 1, 0)}


def _used_matrix(case: Case, passed: Inputs, threads: int) -> Call | str:
    """clearhead again, on a matrix whose log-sum-exp is known."""
    ch.set_num_threads(threads)
    q, k, v = passed
    matrix = ch.AttentionMatrix(q, k, **_rules(case))
    matrix.logsumexp()
    return lambda: matrix.observe(v, **_ASKED)


def _our_backward(passed: Inputs, rules: Any) -> Call:
    """The gradients of q, k and v, from the saved results of a forward pass."""
    described = describe(*passed, rules)
    engine = engines.get(engines.choose(described.problem).engine)
    answers = engine.rows(described, Wanted(output=True, logsumexp=True))
    by = {"output": passed[0]}  # any upstream gradient will do
    return lambda: gradients(engine, described, answers, by)


def available() -> list[str]:
    """The peers that are installed."""
    needs = {"onnx-attention": "onnxruntime", "flex": "torch"}
    return [name for name in NAMES if find_spec(needs.get(name, name))]


def setup(name: str) -> Setup:
    """The function that sets a case up for this peer."""
    return {
        "torch": _torch,
        "onnxruntime": _onnxruntime,
        "onnx-attention": _onnx_attention,
        "flex": _flex,
        "jax": _jax,
        "numpy": _numpy,
        "materialised": _materialised,
        "used matrix": _used_matrix,
    }[name]


def differs(case: Case, ours: Call, theirs: Call) -> bool:
    """Whether a peer's output differs from ours by more than rounding; then it is not timed."""
    local, other = (_first(call()).astype(np.float64) for call in (ours, theirs))
    if local.size != other.size:
        return True
    loose = 1e-3 if case.dtype == "float32" else 5e-2
    outputs = [local.reshape(case.batch, case.heads, case.queries, -1)]
    outputs.append(local.reshape(outputs[0].shape).swapaxes(1, 2))  # some return (batch, queries, heads, d)
    return not any(np.allclose(x.reshape(-1), other.reshape(-1), atol=loose, rtol=loose) for x in outputs)


def _first(result: Any) -> Array:
    """The output, or the gradient of q, from what a contestant returns."""
    if isinstance(result, dict):
        result = result["q"]
    elif hasattr(result, "output"):
        result = result.output
    elif isinstance(result, (tuple, list)):
        result = result[0]
    return np.asarray(result.detach().float() if hasattr(result, "detach") else result)


def _tensors(passed: Inputs) -> Any:
    import torch

    def tensor(x: Array) -> Any:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == bfloat16 else torch.from_numpy(x)

    return [tensor(x) for x in passed]


def _torch_mask(case: Case) -> Any:
    import torch

    if case.window is None:
        return None
    i, j = torch.arange(case.queries)[:, None], torch.arange(case.keys)
    return (j <= i) & (j > i - case.window)


def _torch(case: Case, passed: Inputs, threads: int) -> Call | str:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    q, k, v = _tensors(passed)
    mask = _torch_mask(case)
    grouped = case.heads != case.kv_heads
    if case.kind == "backward":
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        output = scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=case.causal)
        return lambda: torch.autograd.grad(output, leaves, q, retain_graph=True)

    def call() -> object:
        with torch.no_grad():
            causal = case.causal and mask is None
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return call


def _materialised(case: Case, passed: Inputs, threads: int) -> Call | str:
    """The usual way to get statistics: the same ones, from stored weights."""
    import torch

    torch.set_num_threads(threads)
    q, k, v = _tensors(passed)

    def call() -> object:
        with torch.no_grad():
            scores = q @ k.transpose(-1, -2) * case.d**-0.5
            if case.causal:
                scores = scores.masked_fill(~torch.ones(case.queries, case.keys, dtype=torch.bool).tril(), -torch.inf)
            logsumexp, weights = scores.logsumexp(-1), scores.softmax(-1)
            entropy = torch.special.entr(weights).sum(-1)
            return weights @ v, logsumexp, scores.amax(-1), entropy, weights.sum(-2), weights.topk(8, -1)

    return call


def _onnxruntime(case: Case, passed: Inputs, threads: int) -> Call | str:
    if case.kind != "forward" or case.dtype != "float32" or case.heads != case.kv_heads or case.window:
        return "MultiHeadAttention is measured in float32 prefill only"
    from onnx import helper

    flat = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(case.batch, x.shape[2], -1) for x in passed]
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["o"],
        domain="com.microsoft",
        num_heads=case.heads,
        unidirectional=int(case.causal),
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return _onnx_session(node, flat, opsets, threads, ir_version=8)


def _onnx_attention(case: Case, passed: Inputs, threads: int) -> Call | str:
    """The Attention operator of the ONNX standard."""
    if case.kind != "forward" or case.dtype != "float32" or case.window:
        return "ONNX's Attention is measured in float32 prefill only"
    from onnx import helper

    node = helper.make_node("Attention", ["q", "k", "v"], ["o"], is_causal=int(case.causal))
    return _onnx_session(node, list(passed), [helper.make_opsetid("", 23)], threads, ir_version=11)


def _onnx_session(node: Any, arrays: list[Array], opsets: list[Any], threads: int, *, ir_version: int) -> Call:
    import onnxruntime
    from onnx import TensorProto, helper

    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in zip("qkv", arrays, strict=True)
    ]
    result = helper.make_tensor_value_info("o", TensorProto.FLOAT, arrays[0].shape)
    graph = helper.make_graph([node], "attention", values, [result])
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = dict(zip("qkv", arrays, strict=True))
    return lambda: session.run(None, feed)


def _numpy(case: Case, passed: Inputs, threads: int) -> Call | str:
    """The formula written plainly in NumPy."""
    del threads
    if case.group != "tiny":
        return "NumPy's formula is measured on tiny problems only"
    q, k, v = passed

    def call() -> object:
        scores = q @ k.swapaxes(-1, -2) * case.d**-0.5
        scores -= scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores)
        return weights / weights.sum(axis=-1, keepdims=True) @ v

    return call


def _flex(case: Case, passed: Inputs, threads: int) -> Call | str:
    if case.kind not in ("forward", "decode") or case.dtype != "float32":
        return "compiled FlexAttention is measured in float32 only"
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.set_num_threads(threads)
    q, k, v = _tensors(passed)
    mask = None
    if case.causal:
        window = case.window or case.keys

        def visible(b: Any, h: Any, i: Any, j: Any) -> Any:
            del b, h
            return (j <= i) & (j > i - window)

        mask = create_block_mask(visible, None, None, case.queries, case.keys, device="cpu")
    compiled = torch.compile(flex_attention)
    grouped = case.heads != case.kv_heads

    def call() -> object:
        with torch.no_grad():
            return compiled(q, k, v, block_mask=mask, enable_gqa=grouped)

    try:
        call()
    except Exception as error:
        return f"torch.compile failed: {type(error).__name__}"
    return call


def _jax(case: Case, passed: Inputs, threads: int) -> Call | str:
    del threads
    if case.kind not in ("forward", "decode"):
        return "JAX's attention is measured forward only"
    import jax

    q, k, v = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in passed)
    window = None if case.window is None else (case.window - 1, 0)
    compiled = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, local_window_size=window)
    )
    return lambda: compiled(q, k, v).block_until_ready()
