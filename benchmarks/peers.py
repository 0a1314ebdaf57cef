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

NAMES = ("torch", "onnxruntime")
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


def _our_backward(passed: Inputs, rules: Any) -> Call:
    """The gradients of q, k and v, from the saved results of a forward pass."""
    described = describe(*passed, rules)
    engine = engines.get(engines.choose(described.problem).engine)
    answers = engine.rows(described, Wanted(output=True, logsumexp=True))
    by = {"output": passed[0]}  # any upstream gradient will do
    return lambda: gradients(engine, described, answers, by)


def available() -> list[str]:
    """The peers that are installed."""
    return [name for name in NAMES if find_spec(name)]


def setup(name: str) -> Setup:
    """The function that sets a case up for this peer."""
    return {"torch": _torch, "onnxruntime": _onnxruntime, "materialised": _materialised}[name]


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
    import onnxruntime
    from onnx import TensorProto, helper

    flat = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(case.batch, x.shape[2], -1) for x in passed]
    node = helper.make_node(
        "MultiHeadAttention",
        ["q", "k", "v"],
        ["o"],
        domain="com.microsoft",
        num_heads=case.heads,
        unidirectional=int(case.causal),
    )
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, x.shape) for name, x in zip("qkv", flat, strict=True)
    ]
    result = helper.make_tensor_value_info("o", TensorProto.FLOAT, flat[0].shape)
    graph = helper.make_graph([node], "attention", values, [result])
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = dict(zip("qkv", flat, strict=True))
    return lambda: session.run(None, feed)
