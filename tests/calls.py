"""Every public callable with valid arguments, and wrong values to put in place of an argument."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache, wraps
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

import clearhead as ch
from clearhead import nn
from clearhead.core.effects import EFFECTS
from clearhead.core.problem import Rules
from clearhead.core.statistics import Watched, askable
from clearhead.diagnosing.verdict import Diagnosis
from clearhead.distributed.sharded_matrix import ShardedTransposedMatrix
from clearhead.explaining import learning
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.why import Why
from clearhead.layers.layer import Layer
from clearhead.ops.matrix import TransposedMatrix
from clearhead.textbook.heads import heads_beside
from clearhead.textbook.trace import TokenTrace, Trace
from clearhead.textbook.trace_weights import WeightsTrace
from clearhead.textbook.why_scale import WhyScale, saturation, why_scale
from clearhead.watching.seen import Seen
from clearhead.watching.spans import Spans

RNG = np.random.default_rng(5)
FLAT = RNG.standard_normal((3, 4))
Q, K, V = (RNG.standard_normal((2, heads, length, 4)) for heads, length in ((2, 3), (1, 3), (1, 3)))
W = RNG.standard_normal((4, 4))
GROUPS = (np.array([0, 1, 1]), np.array([0, 0, 1]))


class Mute:
    """Even its repr raises."""

    def __repr__(self) -> str:
        raise ValueError("no words")


class Claims:
    """Claims to have a shape."""

    shape = "wide"
    ndim = 2


def generator() -> Iterator[int]:
    yield 1


def masked() -> Any:
    return np.ma.masked_array(FLAT, FLAT > 0)


# fmt: off
PLAIN: dict[str, Any] = {
    "None": None, "x": "x", "no text": "", "bytes": b"", "-1": -1, "0": 0, "1": 1, "7": 7, "1.5": 1.5, "nan": np.nan,
    "inf": np.inf, "-inf": -np.inf, "2**70": 2**70, "-2**70": -(2**70), "True": True, "False": False, "1j": 1j,
    "[]": [],
    "[[]]": [[]], "ragged": [1, [2]], "[None]": [None], "['x']": ["x"], "[2**70]": [2**70], "()": (), "(1, 2)": (1, 2),
    "(1, 2, 3)": (1, 2, 3), "('n', 3)": ("n", 3), "(-2, 2.5)": (-2, 2.5), "(True, 3)": (True, 3),
    "(2**70, 2**70)": (2**70,) * 2,
    "{}": {}, "{1: 2}": {1: 2}, "set": {1, 2}, "a type": int, "a function": generator, "...": ..., ":": slice(None),
    "a slice of texts": slice("a", "b"), "a slice of step 0": slice(None, None, 0), "range": range(3),
    "a path": Path("nowhere"),
    "a decimal": Decimal(1), "claims": Claims(), "mute": Mute(), "surrogates": "\ud800", "zero byte": "a\0b",
}
ARRAYS: dict[str, Any] = {
    "whole": np.ones((3, 4), int), "narrow": FLAT.astype(np.float32), "half": FLAT.astype(np.float16),
    "complex": FLAT + 0j, "objects": FLAT.astype(object), "texts": FLAT.astype(str), "truths": FLAT > 0,
    "fields": np.zeros((3, 4), [("a", "f8")]), "times": FLAT.astype("datetime64[s]"), "0-d": np.array(3.0),
    "no elements": np.zeros(0), "no rows": np.zeros((0, 4)), "no columns": np.zeros((3, 0)), "a row": np.ones(4),
    "three": np.ones(3), "five axes": np.ones((1, 1, 1, 3, 4)), "three axes": np.ones((2, 3, 4)), "four axes": Q,
    "turned": np.asfortranarray(FLAT), "a matrix": FLAT.view(np.matrix), "big-endian": FLAT.astype(">f8"),
    "long double": FLAT.astype(np.longdouble),
    "backwards": FLAT[::-1, ::-1], "nan array": np.full((3, 4), np.nan), "bfloat16": FLAT.astype(ml_dtypes.bfloat16),
    "many rows": np.broadcast_to(0.0, (2**40, 4)), "many columns": np.broadcast_to(0.0, (3, 2**40)),
    "many": np.broadcast_to(0, 2**40), "most": np.array([2**64 - 1] * 3, np.uint64), "np.int64": np.int64(2),
    "np.float32": np.float32(1), "np.bool": np.bool_(True), "np.str": np.str_("x"), "np.datetime": np.datetime64(1,
    "s"),
    "a tensor": torch.ones(3, 4), "a double tensor": torch.ones(3, 4, dtype=torch.float64),
    "0-d tensor": torch.tensor(2),
    "needs gradients": torch.ones(3, 4, dtype=torch.float64, requires_grad=True), "complex tensor": torch.ones(3,
    4) * 1j,
    "whole tensor": torch.ones(3, 4, dtype=torch.int64), "sparse": torch.eye(4)[:3].to_sparse(),
    "nowhere": torch.ones(3, 4, device="meta"), "float8": torch.ones(3, 4).to(torch.float8_e4m3fn),
}
# fmt: on


class Hostile:
    """It can neither be shown, nor counted, nor walked through."""

    def __repr__(self) -> str:
        raise ValueError("no words")

    def __iter__(self) -> Any:
        raise ValueError("no members")

    def __len__(self) -> int:
        raise ValueError("no length")


def nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


MADE: dict[str, Callable[[], Any]] = {
    "a generator": generator,
    "masked": masked,
    "object": object,
    "endless": lambda: itertools.repeat(1),
    "endless edits": lambda: itertools.repeat(ch.cut(keys=1)),
    "nested": nested,
    "lazy": lambda: torch.nn.LazyLinear(3).weight,
    "hostile": Hostile,
    "huge list": lambda: [0.5] * 10**6,
    "enormous": lambda: np.broadcast_to(np.float32(1), (2, 4, 2**40, 8)),
    "enormous tensor": lambda: torch.ones(1, 1, 1, 1).expand(2, 4, 2**40, 8),
}
WRONG: dict[str, Callable[[], Any]] = {**{n: lambda x=x: x for n, x in {**PLAIN, **ARRAYS}.items()}, **MADE}


@dataclass(frozen=True)
class Call:
    """A public callable with valid arguments."""

    call: Callable[..., Any]
    right: dict[str, Any] = field(default_factory=dict)
    options: tuple[str, ...] = ()  # further argument names that it takes

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that can be wrong: the names in the signature, and the rules or options behind `**`."""
        local = [p for p in signature(self.call).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return (*(p.name for p in local), *self.options)

    def __call__(self, wrong: dict[str, Any]) -> Any:
        inputs = {**self.right, **wrong}
        parameters = signature(self.call).parameters
        first = [n for n, p in parameters.items() if p.kind is Parameter.POSITIONAL_ONLY and n in inputs]
        return self.call(*(inputs.pop(name) for name in first), **inputs)


def methods(
    owner: Callable[[], Any], kind: type, right: dict[str, dict[str, Any]], of: tuple[str, ...] = (), **options: Any
) -> dict[str, Call]:
    """The public methods of a class, or those in `of`, each called on a fresh object."""
    names = [name for name in of or dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    names = [name for name in names if getattr(getattr(kind, name), "__module__", "").startswith("clearhead")]
    result = {}
    for name in [*names, *(n for n in right if n.startswith("__"))]:
        bound = getattr(owner(), name)
        result[f"{kind.__name__}.{name}"] = Call(bound, right.get(name, {}), options.get(name, ()))
    return result


def matrix() -> ch.AttentionMatrix:
    return ch.AttentionMatrix(Q, K, causal=True)


def cuts() -> ch.CauseMatrix:
    return matrix().cuts(V, Q)


def observed(sinks: Any = None) -> ch.Observation:
    return ch.AttentionMatrix(Q, K, sinks=sinks).observe(
        V, **dict.fromkeys(("logsumexp", "max_logit", "entropy", "distance"), True), top=2
    )


RULES = tuple(Rules.__annotations__)
LAYER = {"x": FLAT, "w_q": W, "w_k": W, "w_v": W}
PAGE = ("exact", "dtype", "batch", "beside", "language", "title", "each")
PATH = {"path": "/dev/null/nowhere.html"}
LOOKS = {"save": PAGE, "to_html": PAGE, "document": PAGE}


@cache
def public() -> dict[str, Call]:
    """Everything public that computes with NumPy alone."""
    qkv = {"q": FLAT, "k": FLAT, "v": FLAT}
    # fmt: off
    functions = {
        "attention": Call(ch.attention, qkv, RULES),
        "plan": Call(ch.plan, qkv, RULES),
        "AttentionMatrix": Call(lambda **inputs: ch.AttentionMatrix(**inputs).shape, {"q": FLAT, "k": FLAT},
                                ("q", "k", "engine", "logsumexp", "num_threads", *RULES)),
        "trace": Call(ch.trace, qkv, RULES),
        "trace_layer": Call(ch.trace_layer, LAYER, RULES),
        "trace_weights": Call(ch.trace_weights, {"weights": np.abs(FLAT[:, :3]), "v": FLAT}),
        "diagnose_weights": Call(ch.diagnose_weights, {"weights": np.abs(FLAT[:, :3]), "v": FLAT, "theirs": FLAT}),
        "diagnose": Call(ch.diagnose, {**qkv, "theirs": FLAT}, RULES),
        "diagnose_layer": Call(ch.diagnose_layer, {**LAYER, "w_o": W, "theirs": FLAT}, RULES),
        "shapes": Call(ch.shapes, qkv),
        "shapes of a layer": Call(ch.shapes, LAYER),
        "rollout": Call(ch.rollout, {"matrices": [matrix(), matrix()], "query": 0}),
        "explain": Call(ch.explain, {"text": "humpty dumpty"}),
        "why": Call(ch.why, {"text": "humpty dumpty"}),
        "load": Call(ch.load, {"path": "nowhere"}),
        "cut": Call(ch.cut, {"keys": 0}),
        "boost": Call(ch.boost, {"keys": 0, "by": 1.0}),
        "share": Call(ch.share, {"keys": 0, "at_least": 0.5}),
        "tempered": Call(ch.tempered, {"t": 2.0}),
        "off": Call(ch.off, {"heads": 0}),
        "scaled": Call(ch.scaled, {"by": 2.0}),
        "edits_to_json": Call(ch.edits_to_json, {"edits": [ch.cut(keys=0)]}),
        "edits_from_json": Call(ch.edits_from_json, {"text": "[]"}),
        "textbook.heads.heads_beside": Call(heads_beside, {"counts": [1, 2], **LAYER}),
        "textbook.why_scale.saturation": Call(saturation),
        "textbook.why_scale.why_scale": Call(why_scale),
        "explaining.learning.read": Call(learning.read, {"path": "nowhere"}),
    }
    trace = ch.trace(Q, K, V)
    return {
        **functions,
        **methods(
            matrix,
            ch.AttentionMatrix,
            {
                "top": {"k": 2}, "image": {"height": 2, "width": 2}, "part": {"batch": 0},
                "groups": {"query_groups": GROUPS[0], "key_groups": GROUPS[1]}, "save": PATH,
                "__getitem__": {"key": 0}, "__matmul__": {"v": V},
                "cut": {"keys": 0}, "boost": {"keys": 0, "by": 1.0}, "tempered": {"t": 2.0},
                "contributions": {"v": V}, "cuts": {"v": V, "g": Q},
            },
            **LOOKS, observe=askable(),
        ),
        **methods(lambda: matrix().T, TransposedMatrix, {"__getitem__": {"key": 0}, "__matmul__": {"g": Q}}),
        **methods(
            cuts, ch.CauseMatrix,
            {
                "top": {"k": 2}, "strongest": {"k": 2}, "image": {"height": 2, "width": 2},
                "groups": {"query_groups": GROUPS[0], "key_groups": GROUPS[1]},
                "spans": {"query_groups": GROUPS[0], "key_groups": GROUPS[1]},
                "__getitem__": {"key": 0}, "__matmul__": {"x": V},
            },
            observe=tuple(EFFECTS),
        ),
        **methods(
            observed, ch.Observation,
            {"merge_keys": {"other": observed()}, "merge_queries": {"other": observed()},
    "with_sinks": {"sinks": [0.0, 1.0]},
             "among": {"keys": 5}, "heads": {"chosen": 0}},
        ),
        **methods(lambda: trace, Trace, {"token": {"query": 0}, "save": PATH, "document": {"scene": None}}),
        **methods(lambda: ch.trace_weights(np.abs(FLAT[:, :3]), FLAT), WeightsTrace,
                  {"token": {"query": 0}, "save": PATH, "document": {"scene": None}}),
        **methods(lambda: trace.token(0), TokenTrace, {}),
        **methods(lambda: ch.diagnose(FLAT, FLAT, FLAT, FLAT), Diagnosis, {}),
        **methods(cache(lambda: ch.explain("humpty dumpty")), Explanation, {"save": PATH, "document": {}}),
        **methods(cache(lambda: ch.why("humpty dumpty")), Why, {"save": PATH}),
        **methods(cache(why_scale), WhyScale, {"save": PATH}),
        **methods(cache(learning.learning), learning.Learning,
                  {"save": PATH, "words": {"key": "learn", "language": "en"}}),
    }
    # fmt: on


def seen() -> Seen:
    result = ch.AttentionMatrix(Q, K).observe(V, logsumexp=True, entropy=True)
    layer = Layer("0", "h.0", 1, False, (0, 1), result, Q, K, V, {}, None, "", 0, lambda: Q)
    return Seen({"0": layer}, [["a", "b", "c"]], model="none")


def threads(count: Any) -> None:
    before = ch.get_num_threads()
    try:
        ch.set_num_threads(count)
        ch.attention(FLAT, FLAT, FLAT)
    finally:
        ch.set_num_threads(before)


def watched(**inputs: Any) -> None:
    with ch.watch(**inputs):
        pass


def changed(**inputs: Any) -> None:
    with ch.change(**inputs):
        inputs["model"](torch.tensor([[1, 2, 3]]))


@wraps(ch.testing.assert_attention)
def asserted(**inputs: Any) -> None:
    with suppress(AssertionError):  # the answer that the function is wrong
        ch.testing.assert_attention(**inputs)


@cache
def small_gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=9)).eval()


def alone(call: Callable[..., Any], inputs: dict[str, Any]) -> Any:
    """Run in a process group of one process."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return call(**inputs)
    finally:
        dist.destroy_process_group()


def sharded() -> ch.distributed.ShardedAttentionMatrix:
    return ch.distributed.ShardedAttentionMatrix(torch.from_numpy(Q), torch.from_numpy(K), causal=True)


def methods_alone(owner: Callable[[], Any], kind: type, right: dict[str, dict[str, Any]]) -> dict[str, Call]:
    """As `methods`, of objects that live in a process group: each call makes its own, in a group of one process."""

    def call(name: str) -> Callable[..., Any]:
        return lambda **inputs: alone(lambda **inner: getattr(owner(), name)(**inner), inputs)

    names = [name for name in dir(kind) if not name.startswith("_") and callable(getattr(kind, name))]
    names += [name for name in right if name.startswith("__")]
    taken = {name: tuple(signature(getattr(kind, name)).parameters)[1:] for name in names}
    return {f"{kind.__name__}.{name}": Call(call(name), right.get(name, {}), taken[name]) for name in names}


def made(kind: type, inputs: dict[str, Any]) -> None:
    """A layer, run once where it is small."""
    layer = kind(**inputs)
    weights = list(layer.parameters())
    if sum(p.numel() for p in weights) < 10**6 and all(p.device.type == "cpu" for p in weights):
        layer(torch.ones(1, 3, layer.d_model))


@cache
def in_frameworks() -> dict[str, Call]:
    """Public callables of the parts for PyTorch and Transformers."""
    x = torch.ones(1, 2, 3, 4)
    flat, layer = torch.from_numpy(FLAT), nn.MultiHeadAttention(8, 2)
    # fmt: off
    return {
        "set_num_threads": Call(threads, {"count": 1}),
        "watch": Call(watched, {"model": torch.nn.Linear(2, 2)},
                      (*list(signature(ch.watch).parameters)[:-1], *Watched.__annotations__)),
        "nn.MultiHeadAttention": Call(
            lambda **inputs: made(nn.MultiHeadAttention, inputs), {"d_model": 8, "num_heads": 2},
                                      tuple(signature(nn.MultiHeadAttention).parameters)),
        "nn.SingleHeadAttention": Call(
            lambda **inputs: made(nn.SingleHeadAttention, inputs), {"d_model": 8}, ("d_model",)),
        "nn.MultiHeadAttention.forward": Call(layer.forward, {"x": torch.ones(1, 3, 8)}),
        "nn.KVCache": Call(nn.KVCache, {"batch": 1, "kv_heads": 2, "d_k": 4, "d_v": 4}),
        "torch.scaled_dot_product_attention": Call(
            ch.torch.scaled_dot_product_attention, {"query": x, "key": x, "value": x}),
        "distributed.attention": Call(
            lambda **inputs: alone(ch.distributed.attention, inputs), {"q": flat, "k": flat, "v": flat},
            (*tuple(signature(ch.distributed.attention).parameters)[:-1], *RULES)),
        "distributed.ShardedAttentionMatrix": Call(
            lambda **inputs: alone(ch.distributed.ShardedAttentionMatrix, inputs), {"q": flat, "k": flat},
            (*tuple(signature(ch.distributed.ShardedAttentionMatrix).parameters)[:-1], *RULES)),
        **methods_alone(sharded, ch.distributed.ShardedAttentionMatrix, {
            "top": {"k": 2}, "image": {"height": 2, "width": 2},
            "groups": {"query_groups": GROUPS[0], "key_groups": GROUPS[1]},
            "contributions": {"v": torch.from_numpy(V)}, "cuts": {"v": torch.from_numpy(V), "g": torch.from_numpy(Q)},
            "__getitem__": {"key": 0}, "__matmul__": {"v": torch.from_numpy(V)}}),
        **methods_alone(
            lambda: sharded().cuts(torch.from_numpy(V), torch.from_numpy(Q)), ch.distributed.ShardedCauseMatrix,
            {
                "top": {"k": 2}, "strongest": {"k": 2}, "image": {"height": 2, "width": 2},
                "groups": {"query_groups": GROUPS[0], "key_groups": GROUPS[1]},
                "spans": {"query_groups": GROUPS[0], "key_groups": GROUPS[1]},
                "__getitem__": {"key": 0}, "__matmul__": {"x": torch.from_numpy(V)},
            },
        ),
        **methods_alone(lambda: sharded().T, ShardedTransposedMatrix, {
            "__getitem__": {"key": 0}, "__matmul__": {"g": torch.from_numpy(Q)}}),
        "distributed.plan": Call(
            lambda **inputs: alone(ch.distributed.plan, inputs), {"q": flat, "k": flat},
            (*tuple(signature(ch.distributed.plan).parameters)[:-1], *RULES)),
        "distributed.positions": Call(
            lambda **inputs: alone(ch.distributed.positions, inputs), {"length": 3}, ("length", "group", "layout")),
        "distributed.shard": Call(
            lambda **inputs: alone(ch.distributed.shard, inputs), {"x": x}, ("x", "dim", "group", "layout")),
        "distributed.unshard": Call(
            lambda **inputs: alone(ch.distributed.unshard, inputs), {"x": x}, ("x", "dim", "group", "layout")),
        "convert": Call(nn.convert, {"module": torch.nn.MultiheadAttention(8, 2)}),
        **methods(lambda: layer, nn.MultiHeadAttention, {"forward": {"x": torch.ones(1, 3, 8)},
            "from_torch": {"theirs": torch.nn.MultiheadAttention(8, 2)}}, of=("forward", "from_torch")),
        **methods(lambda: nn.KVCache(1, 2, 4, 4), nn.KVCache, {
            "append": {"k": x, "v": x},
            "reorder": {"order": torch.tensor([0])}, "crop": {"length": 0}}, of=("append", "reorder", "crop")),
        "jax.attention": Call(ch.jax.attention, {"q": FLAT, "k": FLAT, "v": FLAT}, RULES),
        "jax.observe": Call(ch.jax.observe, {"q": FLAT, "k": FLAT}, tuple(ch.jax.Named.__annotations__)),
        "testing.assert_attention": Call(
            asserted, {"fn": ch.attention, "examples": 1, "lengths": [3], "widths": [4]}, RULES),
        "change": Call(changed, {"model": small_gpt2(), "edits": [ch.cut(keys=0)]}),
        "like": Call(ch.like, {"seen": seen()}),
        "values_like": Call(ch.values_like, {"seen": seen()}),
        **methods(lambda: seen().spans([0, 1, 1]), Spans, {}),
        **methods(seen, Seen, {
            "head": {"layer": 0, "head": 0}, "layer": {"layer": 0}, "matrix": {"layer": 0}, "rollout": {"query": 0},
            "contributions": {"layer": 0}, "cuts": {"layer": 0}, "relevance": {"query": 0},
            "spans": {"groups": [0, 1, 1]}, "verify": {"edges": [], "run": lambda: 0.0},
            "save": PATH, "__getitem__": {"layer": 0}}, **LOOKS),
    }
    # fmt: on
