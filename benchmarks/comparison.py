"""What attention functions can do, each cell tried: python -m benchmarks.comparison [--check | --write].

Writes the first table of docs/comparison.md. A cell is "yes" where the call below answers rightly, "no" where the
function has no way to ask, "wrong" where it answers something else, and "raises" where it says that it does not do
this. Libraries that need a GPU cannot be tried on a CPU; the page cites them.
"""

import argparse
import multiprocessing
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

import clearhead as ch
from benchmarks import kernels
from benchmarks.memory import peak

PAGE = Path(__file__).parent.parent / "docs" / "comparison.md"
BEGIN, END = "<!-- tried -->\n", "<!-- end of tried -->\n"
Cell = str | Callable[[], bool]

torch.manual_seed(0)
SHAPE = (2, 4, 24, 16)  # (batch, heads, queries = keys, d)
Q, K, V, DQ, DK, DV = (torch.randn(SHAPE, dtype=torch.float32) for _ in range(6))
SCORES = (Q @ K.mT / 4).double()
LOGSUMEXP = SCORES.logsumexp(-1)
WEIGHTS = SCORES.softmax(-1)
OUTPUT = WEIGHTS @ V.double()
NO = "no"


def close(computed: Any, right: torch.Tensor) -> bool:
    result = torch.from_numpy(np.array(computed)) if not isinstance(computed, torch.Tensor) else computed
    return bool(torch.allclose(result.double(), right, rtol=1e-3, atol=1e-4))


def plain(q: Any, k: Any, v: Any) -> Any:
    return (q @ k.mT / 4).softmax(-1) @ v


def tangent() -> torch.Tensor:
    result: torch.Tensor = torch.func.jvp(
        plain, tuple(x.double() for x in (Q, K, V)), tuple(x.double() for x in (DQ, DK, DV))
    )[1]
    return result


def penalty(f: Callable[..., Any]) -> torch.Tensor:
    """The gradient by q of the squared norm of the gradient by q of Σ o²."""
    q = Q.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(q, K, V).square().sum(), q, create_graph=True)
    (result,) = torch.autograd.grad(g.square().sum(), q)
    return result


def jaxs(x: torch.Tensor) -> jax.Array:
    """As JAX's function takes it: (batch, tokens, heads, d)."""
    return jnp.asarray(x.numpy().swapaxes(1, 2))


def ours(x: jax.Array) -> np.ndarray[Any, Any]:
    return np.asarray(x).swapaxes(1, 2)


def torchs(f: Callable[..., Any], backend: SDPBackend | None = None) -> dict[str, Cell]:
    """What is asked of any PyTorch function of (q, k, v)."""

    def within(call: Callable[[], bool]) -> Callable[[], bool]:
        def run() -> bool:
            if backend is None:
                return call()
            with sdpa_kernel(backend):
                return call()

        return run

    def mapped() -> bool:
        return close(torch.func.vmap(f)(Q[:, None], K[:, None], V[:, None])[:, 0], OUTPUT)

    return {
        "first derivatives": within(lambda: close(*_first(f))),
        "forward mode (jvp)": within(lambda: close(torch.func.jvp(f, (Q, K, V), (DQ, DK, DV))[1], tangent())),
        "second derivatives": within(lambda: close(penalty(f), penalty(plain).double())),
        "vmap": within(mapped),
    }


def _first(f: Callable[..., Any]) -> tuple[torch.Tensor, torch.Tensor]:
    results = []
    for one in (f, plain):
        q = Q.clone().requires_grad_()
        results.append(torch.autograd.grad(one(q, K, V).square().sum(), q)[0])
    return results[0], results[1].double()


def empty(f: Callable[..., Any]) -> Callable[[], bool]:
    """Query 3 sees no key."""

    def run() -> bool:
        mask = torch.ones(2, 4, 24, 24, dtype=torch.bool)
        mask[:, :, 3] = False
        return close(f(Q, K, V, mask=mask)[:, :, 3], torch.zeros(2, 4, 16, dtype=torch.float64))

    return run


def hidden_nan(f: Callable[..., Any]) -> Callable[[], bool]:
    """Key and value 23 are NaN, and nobody sees them."""

    def run() -> bool:
        mask = torch.ones(2, 4, 24, 24, dtype=torch.bool)
        mask[..., 23] = False
        k, v = K.clone(), V.clone()
        k[:, :, 23] = v[:, :, 23] = torch.nan
        return not bool(torch.as_tensor(np.array(f(Q, k, v, mask=mask))).isnan().any())

    return run


def numpys(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function of arrays, called with tensors."""
    return lambda q, k, v, **rules: f(
        *(x.numpy() for x in (q, k, v)), **{name: x.numpy() if hasattr(x, "numpy") else x for name, x in rules.items()}
    )


def clearheads() -> dict[str, Cell]:
    f, matrix = ch.attention, ch.AttentionMatrix(Q, K)
    seen = matrix.observe(V, logsumexp=True, max_logit=True, entropy=True, received=True, top=2)
    wide = ch.AttentionMatrix(Q, K, softcap=5.0)
    return torchs(f) | {
        "log-sum-exp with the output": lambda: close(seen.logsumexp, LOGSUMEXP),
        "largest logit": lambda: close(seen.max_logit, SCORES.amax(-1)),
        "entropy": lambda: close(seen.entropy, -(WEIGHTS * WEIGHTS.log()).sum(-1)),
        "what each key receives": lambda: close(seen.received, WEIGHTS.sum(-2)),
        "top-k weights and keys": lambda: close(seen.top.weights, WEIGHTS.topk(2).values),
        "any weight, later": lambda: close(matrix[0, 3, 5, :4], WEIGHTS[0, 3, 5, :4]),
        "softcap": lambda: close(wide @ V, (5 * (SCORES / 5).tanh()).softmax(-1) @ V.double()),
        "sinks": lambda: close(*_sinks(lambda q, k, v, s: ch.attention(q, k, v, sinks=s))),
        "window": lambda: close(f(Q, K, V, window=(3, 0)), _windowed()),
        "a query that sees no key gives 0": empty(f),
        "NaN that nobody may see stays unseen": hidden_nan(f),
    }


def _sinks(f: Callable[..., Any]) -> tuple[Any, torch.Tensor]:
    logits = torch.randn(4)
    whole = torch.cat([SCORES, logits.double()[None, :, None, None].expand(2, 4, 24, 1)], -1).softmax(-1)
    return f(Q, K, V, logits), whole[..., :-1] @ V.double()


def _windowed() -> torch.Tensor:
    place = torch.arange(24)
    seen = (place[:, None] >= place) & (place[:, None] - place <= 3)
    return SCORES.masked_fill(~seen, -torch.inf).softmax(-1) @ V.double()


def sdpa(backend: SDPBackend) -> dict[str, Cell]:
    call = kernels.sdpa(backend)
    f: Callable[..., Any] = torch.nn.functional.scaled_dot_product_attention
    place = torch.arange(24)
    seen = (place[:, None] >= place) & (place[:, None] - place <= 3)
    return torchs(f, backend) | dict.fromkeys(
        ("log-sum-exp with the output", "largest logit", "entropy", "what each key receives", "top-k weights and keys",
         "any weight, later", "softcap", "sinks"), NO
    ) | {
        "window": lambda: close(call(Q, K, V, mask=seen), _windowed()),
        "a query that sees no key gives 0": empty(call),
        "NaN that nobody may see stays unseen": hidden_nan(call),
    }  # fmt: skip


def flex() -> dict[str, Cell]:
    def aux(**wanted: bool) -> Any:
        return flex_attention(Q, K, V, return_aux=AuxRequest(**wanted))[1]

    def capped() -> bool:
        result = flex_attention(Q, K, V, score_mod=lambda s, *_: 5 * torch.tanh(s / 5))
        return close(result, (5 * (SCORES / 5).tanh()).softmax(-1) @ V.double())

    def windowed() -> bool:
        from torch.nn.attention.flex_attention import create_block_mask

        block = create_block_mask(lambda _, __, i, j: (i >= j) & (i - j <= 3), None, None, 24, 24, device="cpu")
        return close(flex_attention(Q, K, V, block_mask=block), _windowed())

    return torchs(flex_attention) | dict.fromkeys(
        ("entropy", "what each key receives", "top-k weights and keys", "any weight, later", "sinks"), NO
    ) | {
        "log-sum-exp with the output": lambda: close(aux(lse=True).lse, LOGSUMEXP),
        "largest logit": lambda: close(aux(max_scores=True).max_scores, SCORES.amax(-1)),
        "softcap": capped,
        "window": windowed,
        "a query that sees no key gives 0": empty(kernels.flex),
        "NaN that nobody may see stays unseen": hidden_nan(kernels.flex),
    }  # fmt: skip


def jax_builtin() -> dict[str, Cell]:
    f = jax.nn.dot_product_attention

    def call(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None
    ) -> np.ndarray[Any, Any]:
        result = f(jaxs(q), jaxs(k), jaxs(v), mask=None if mask is None else jnp.asarray(mask.numpy()))
        return ours(result)

    def forward() -> bool:
        result = jax.jvp(f, tuple(map(jaxs, (Q, K, V))), tuple(map(jaxs, (DQ, DK, DV))))[1]
        return close(ours(result), tangent())

    def slope(q: jax.Array) -> jax.Array:
        return jax.grad(lambda q: jnp.square(f(q, jaxs(K), jaxs(V))).sum())(q)

    def second() -> bool:
        result = jax.grad(lambda q: jnp.square(slope(q)).sum())(jaxs(Q))
        return close(ours(result), penalty(plain).double())

    def residual() -> bool:
        result = f(*map(jaxs, (Q, K, V)), return_residual=True)[1]
        return close(ours(result), LOGSUMEXP)

    return dict.fromkeys(
        ("largest logit", "entropy", "what each key receives", "top-k weights and keys", "any weight, later", "softcap",
         "sinks"), NO
    ) | {
        "log-sum-exp with the output": residual,
        "first derivatives": lambda: close(ours(slope(jaxs(Q))), _first(plain)[1]),
        "forward mode (jvp)": forward,
        "second derivatives": second,
        "vmap": lambda: close(ours(jax.vmap(f)(*(jaxs(x)[:, None] for x in (Q, K, V)))[:, 0]), OUTPUT),
        "window": lambda: close(ours(f(*map(jaxs, (Q, K, V)), local_window_size=(3, 0))), _windowed()),
        "a query that sees no key gives 0": empty(call),
        "NaN that nobody may see stays unseen": hidden_nan(call),
    }  # fmt: skip


def onnx(q: Any, k: Any, v: Any, **attributes: Any) -> Any:
    """Its Attention operator, with attributes that `kernels.onnx_attention` has no use for."""
    names = ("Q", "K", "V")
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["b", "h", "n", "d"]) for name in names]
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, None)
    node = helper.make_node("Attention", names, ["Y"], **attributes)
    graph = helper.make_graph([node], "one", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {name: x.numpy() for name, x in zip(names, (q, k, v), strict=True)})[0]


def onnx_runtime() -> dict[str, Cell]:
    call = numpys(kernels.onnx_attention)
    return dict.fromkeys(
        ("log-sum-exp with the output", "largest logit", "entropy", "what each key receives", "top-k weights and keys",
         "any weight, later", "sinks", "window", "first derivatives", "forward mode (jvp)", "second derivatives",
         "vmap"), NO
    ) | {
        "softcap": lambda: close(onnx(Q, K, V, softcap=5.0), (5 * (SCORES / 5).tanh()).softmax(-1) @ V.double()),
        "a query that sees no key gives 0": empty(call),
        "NaN that nobody may see stays unseen": hidden_nan(call),
    }  # fmt: skip


CALLS: dict[str, Callable[..., Any]] = {
    "clearhead": ch.attention,
    "SDPA, fused": kernels.sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA, math": kernels.sdpa(SDPBackend.MATH),
    "FlexAttention": flex_attention,
    "JAX": lambda q, k, v: jax.nn.dot_product_attention(jaxs(q), jaxs(k), jaxs(v)).block_until_ready(),
    "ONNX Runtime": numpys(kernels.onnx_attention),
}


def needed(name: str) -> float:
    """MiB that one call with 8,192 tokens takes at its peak, in a process of its own; the weights would be 256."""
    x = torch.randn(1, 1, 8192, 16)
    CALLS[name](*(x[:, :, :64],) * 3)
    before = peak()
    CALLS[name](x, x, x)
    return (peak() - before) / 2**20


def memory(name: str) -> str:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return "yes" if pool.apply(needed, (name,)) < 100 else "n² memory"


COLUMNS: dict[str, Callable[[], dict[str, Cell]]] = {
    "clearhead": clearheads,
    "SDPA, fused": lambda: sdpa(SDPBackend.FLASH_ATTENTION),
    "SDPA, math": lambda: sdpa(SDPBackend.MATH),
    "FlexAttention": flex,
    "JAX": jax_builtin,
    "ONNX Runtime": onnx_runtime,
}


def answered(cell: Cell) -> str:
    if isinstance(cell, str):
        return cell
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return "yes" if cell() else "wrong"
    except Exception:  # any error is an answer: it does not do that
        return "raises"


def table() -> str:
    results = {name: {row: answered(cell) for row, cell in column().items()} for name, column in COLUMNS.items()}
    head = f"| | {' | '.join(results)} |\n| --- |{' --- |' * len(results)}\n"
    for name, cells in results.items():
        cells["O(queries + keys) memory"] = memory(name)
    rows = (f"| {row} | {' | '.join(results[name][row] for name in results)} |\n" for row in results["clearhead"])
    tried = f"torch {version('torch')}, jax {version('jax')}, onnxruntime {version('onnxruntime')}, on a CPU:\n\n"
    return tried + head + "".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table into docs/comparison.md")
    parser.add_argument("--check", action="store_true", help="exit 1 where the page has another table")
    asked = parser.parse_args()
    made = table()
    print(made)
    if not (asked.write or asked.check):
        return 0
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    old, after = rest.split(END)
    if asked.write:
        PAGE.write_text(before + BEGIN + made + END + after, encoding="utf-8")
    return int(asked.check and old != made)


if __name__ == "__main__":
    sys.exit(main())
