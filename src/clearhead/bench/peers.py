"""The contestants: for each a way to set a case up, or a reason why it cannot take it."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np

import clearhead as ch
from clearhead.arrays import bfloat16
from clearhead.axes import Array
from clearhead.bench.cases import Case
from clearhead.bench.measure import Call

NAMES = ("torch", "onnxruntime", "flex", "jax")
Inputs = tuple[Array, Array, Array]
Setup = Callable[[Case, Inputs, int], Call | str]


def inputs(case: Case) -> Inputs:
    """Fresh random q, k, v of the case's dtype."""
    rng = np.random.default_rng(0)
    dtype = bfloat16 if case.dtype == "bfloat16" else np.dtype(case.dtype)
    heads = ((case.heads, case.queries), (case.kv_heads, case.keys), (case.kv_heads, case.keys))
    q, k, v = (rng.standard_normal((case.batch, *shape, case.d), dtype=np.float32).astype(dtype) for shape in heads)
    return q, k, v


def ours(case: Case, given: Inputs, threads: int) -> Call:
    """Our own library, through its public call."""
    ch.set_num_threads(threads)
    q, k, v = given
    rules: dict[str, Any] = {"causal": True} if case.causal else {}
    if case.window is not None:
        rules["window"] = (case.window - 1, 0)
    if case.kind == "observe":
        asked: dict[str, Any] = {"logsumexp": True, "max_logit": True, "entropy": True, "received": True, "top": 8}
        return lambda: ch.AttentionMatrix(q, k, **rules).observe(v, **asked)
    return lambda: ch.attention(q, k, v, **rules)


def available() -> list[str]:
    """The peers that are installed."""
    needs = {"torch": "torch", "onnxruntime": "onnxruntime", "flex": "torch", "jax": "jax"}
    return [name for name in NAMES if find_spec(needs[name])]


def setup(name: str) -> Setup:
    """How a peer takes a case."""
    return {"torch": _torch, "onnxruntime": _onnxruntime, "flex": _flex, "jax": _jax, "materialised": _materialised}[
        name
    ]


def _tensors(given: Inputs) -> Any:
    import torch

    def tensor(x: Array) -> Any:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if x.dtype == bfloat16 else torch.from_numpy(x)

    return [tensor(x) for x in given]


def _torch_mask(case: Case) -> Any:
    import torch

    if case.window is None:
        return None
    i, j = torch.arange(case.queries)[:, None], torch.arange(case.keys)
    return (j <= i) & (j > i - case.window)


def _torch(case: Case, given: Inputs, threads: int) -> Call | str:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    torch.set_num_threads(threads)
    q, k, v = _tensors(given)
    mask = _torch_mask(case)
    grouped = case.heads != case.kv_heads

    def call() -> object:
        with torch.no_grad():
            causal = case.causal and mask is None
            return scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=grouped)

    return call


def _materialised(case: Case, given: Inputs, threads: int) -> Call | str:
    """Looking the old way: the same statistics from weights that are stored."""
    import torch

    torch.set_num_threads(threads)
    q, k, v = _tensors(given)

    def call() -> object:
        with torch.no_grad():
            scores = q @ k.transpose(-1, -2) * case.d**-0.5
            if case.causal:
                scores = scores.masked_fill(~torch.ones(case.queries, case.keys, dtype=torch.bool).tril(), -torch.inf)
            logsumexp, weights = scores.logsumexp(-1), scores.softmax(-1)
            entropy = torch.special.entr(weights).sum(-1)
            return weights @ v, logsumexp, scores.amax(-1), entropy, weights.sum(-2), weights.topk(8, -1)

    return call


def _onnxruntime(case: Case, given: Inputs, threads: int) -> Call | str:
    if case.kind != "forward" or case.dtype != "float32" or case.heads != case.kv_heads or case.window:
        return "MultiHeadAttention is measured in float32 prefill only"
    import onnxruntime
    from onnx import TensorProto, helper

    flat = [np.ascontiguousarray(x.swapaxes(1, 2)).reshape(case.batch, x.shape[2], -1) for x in given]
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
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(
        helper.make_graph([node], "attention", values, [result]), opset_imports=opsets, ir_version=8
    )
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feed = dict(zip("qkv", flat, strict=True))
    return lambda: session.run(None, feed)


def _flex(case: Case, given: Inputs, threads: int) -> Call | str:
    if case.kind == "observe" or case.dtype != "float32":
        return "compiled FlexAttention is measured in float32 only"
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.set_num_threads(threads)
    q, k, v = _tensors(given)
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


def _jax(case: Case, given: Inputs, threads: int) -> Call | str:
    del threads
    if case.kind == "observe":
        return "it has no statistics"
    import jax

    q, k, v = (jax.numpy.asarray(x.swapaxes(1, 2)) for x in given)
    window = None if case.window is None else (case.window - 1, 0)
    compiled = jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, local_window_size=window)
    )
    return lambda: compiled(q, k, v).block_until_ready()
