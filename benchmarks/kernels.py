"""What `clearhead.testing` finds in other libraries' attention: python -m benchmarks.kernels prints the table.

Each cell is ten problems of one kind, from seeds 0 to 9; the libraries are called as they document it.
"""

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from typing import Any

import jax
import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import clearhead as ch
from clearhead.core.axes import Array
from clearhead.testing import KINDS, assert_attention

SEEDS = range(10)
BASE: dict[str, Any] = {"widths": (16, 64, 40), "grouped": False}
ROWS: dict[str, dict[str, Any]] = {kind: BASE | {"kinds": [kind], "mask": True} for kind in KINDS}
_USUAL = BASE | {"kinds": ["usual"]}
ROWS |= {
    "causal, as many queries as keys": _USUAL | {"causal": True},
    "causal, query_offset=0": _USUAL | {"causal": True, "query_offset": 0, "lengths": (7, 16, 33)},
    "causal, query_offset=keys - queries": _USUAL
    | {"causal": True, "query_offset": lambda n, m: m - n, "lengths": (7, 16, 33)},
    "grouped heads": _USUAL | {"grouped": True},
    "d_v differs from d_k": _USUAL | {"widths": ((40, 24),)},
    "bfloat16": _USUAL | {"mask": True, "dtypes": ["bfloat16"]},
    "float16": _USUAL | {"mask": True, "dtypes": ["float16"]},
    "gradients": _USUAL | {"mask": True, "gradients": True},
    "gradients with empty rows": BASE | {"kinds": ["empty rows"], "mask": True, "gradients": True},
}
_ONNX = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "bfloat16": TensorProto.BFLOAT16}


def sdpa(backend: SDPBackend) -> Callable[..., Any]:
    def call(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, **_: Any) -> Any:
        with sdpa_kernel(backend):
            grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}
            return torch.nn.functional.scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=causal, **grouped
            )

    return call


def flex(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, query_offset: int = 0) -> Any:
    """Uncompiled: the same arithmetic without its generated kernel."""
    sizes = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    block = None
    if mask is not None:
        block = create_block_mask(lambda b, h, i, j: mask[b, h, i, j], *sizes, device="cpu")
    elif causal:
        block = create_block_mask(lambda _, __, i, j: i + query_offset >= j, *sizes, device="cpu")
    return flex_attention(q, k, v, block_mask=block, enable_gqa=q.shape[1] != k.shape[1])


def jax_attention(q: Any, k: Any, v: Any, mask: Any = None, causal: bool = False, **_: Any) -> Any:
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=causal)


def onnx_attention(q: Array, k: Array, v: Array, mask: Any = None, causal: bool = False, **_: Any) -> Array:
    inputs = {"Q": q, "K": k, "V": v} | ({} if mask is None else {"attn_mask": mask})
    model = session("Attention", "", tuple(inputs), str(q.dtype), 4, (("is_causal", int(causal)),))
    return np.asarray(model.run(None, inputs)[0])


def onnx_multi_head(q: Array, k: Array, v: Array, mask: Any = None, causal: bool = False, **_: Any) -> Array:
    """The contributed operator: heads side by side, and a bias of 0 and -inf as the mask."""
    inputs = {
        name: np.ascontiguousarray(x.swapaxes(1, 2)).reshape(len(x), x.shape[2], -1)
        for name, x in (("query", q), ("key", k), ("value", v))
    }
    names: tuple[str, ...] = ("query", "key", "value")
    if mask is not None:
        inputs["attention_bias"] = np.where(mask, 0.0, -np.inf).astype(q.dtype)
        names = (*names, "", "", "attention_bias")
    attributes = (("num_heads", q.shape[1]), ("unidirectional", int(causal)))
    model = session("MultiHeadAttention", "com.microsoft", names, str(q.dtype), 3, attributes)
    out = np.asarray(model.run(None, inputs)[0])
    return out.reshape(*out.shape[:2], q.shape[1], -1).swapaxes(1, 2)


@cache
def session(
    operator: str, domain: str, names: tuple[str, ...], dtype: str, axes: int, attributes: tuple[tuple[str, int], ...]
) -> Any:
    """A model of one operator; sizes are free."""
    declared = []
    for name in filter(None, names):
        kind = TensorProto.BOOL if name == "attn_mask" else _ONNX[dtype]
        count = 4 if name in ("attn_mask", "attention_bias") else axes
        declared.append(helper.make_tensor_value_info(name, kind, [f"{name}{axis}" for axis in range(count)]))
    node = helper.make_node(operator, list(names), ["Y"], domain=domain, **dict(attributes))
    result = helper.make_tensor_value_info("Y", _ONNX[dtype], None)
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(helper.make_graph([node], "g", declared, [result]), opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


PEERS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "clearhead": (ch.attention, {"arrays": "torch"}),
    "SDPA, math": (sdpa(SDPBackend.MATH), {"arrays": "torch"}),
    "SDPA, flash": (sdpa(SDPBackend.FLASH_ATTENTION), {"arrays": "torch"}),
    "flex_attention": (flex, {"arrays": "torch"}),
    "JAX": (jax_attention, {"arrays": "jax", "layout": "bnhd"}),
    "onnxruntime Attention": (onnx_attention, {}),
    "onnxruntime MultiHeadAttention": (onnx_multi_head, {}),
}


def cell(peer: str, row: str) -> tuple[str, str]:
    """What the first failure is about, and its message."""
    fn, how = PEERS[peer]
    options = ROWS[row] | how
    if options.get("gradients") and options.get("arrays") != "torch":
        return "·", ""
    for seed in SEEDS:
        try:
            assert_attention(fn, **options, seed=seed, smallest=False)
        except AssertionError as error:
            shown = str(error)
            kind = "raises" if " raised " in shown else "NaN" if "NaN or infinite" in shown else "wrong"
            return f"**{kind}**", shown
    return "right", ""


def table(peers: list[str], rows: list[str]) -> Iterator[str]:
    yield "| | " + " | ".join(peers) + " |"
    yield "| --- |" + " --- |" * len(peers)
    for row in rows:
        yield f"| {row} | " + " | ".join(cell(peer, row)[0] for peer in peers) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--why", nargs=2, metavar=("PEER", "ROW"), help="the first failure's message of one cell")
    why = parser.parse_args().why
    warnings.simplefilter("ignore")
    if why:
        print(cell(*why)[1])
        return 0
    print(", ".join(f"{name} {version(name)}" for name in ("torch", "jax", "onnxruntime")) + "\n")
    for line in table(list(PEERS), list(ROWS)):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
