"""Every public callable with valid arguments, and wrong values to put in place of an argument."""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from functools import cache, partial, wraps
from inspect import signature
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import clearhead as ch
import clearhead.vllm
from clearhead import nn
from clearhead.diagnosing.verdict import Diagnosis
from clearhead.explaining import learning
from clearhead.explaining.explanation import Explanation
from clearhead.explaining.head_steps import HeadSteps
from clearhead.ops.lazy_matrix import TransposedMatrix
from clearhead.textbook.sparse import sparse_patterns
from clearhead.textbook.trace import TokenTrace, Trace
from clearhead.textbook.why_scale import WhyScale, why_scale
from clearhead.watching.layer import Layer
from clearhead.watching.seen import Seen

RNG = np.random.default_rng(5)
FLAT = RNG.standard_normal((3, 4))
Q, K, V = (RNG.standard_normal((2, heads, length, 4)) for heads, length in ((2, 3), (1, 3), (1, 3)))
W = RNG.standard_normal((4, 4))


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
SIMPLE = (
    None, "x", "", b"", -1, 0, 1, 7, 1.5, np.nan, np.inf, -np.inf, 2**70, -(2**70), True, False, 1j, [], [[]], [1, [2]],
    [None], ["x"], [2**70], (), (1, 2), (1, 2, 3), ("n", 3), (-2, 2.5), (True, 3), (2**70,) * 2, {}, {1: 2}, {1, 2},
    ..., slice(None), slice("a", "b"), slice(None, None, 0), range(3), Path("nowhere"), Decimal(1), "\ud800", "a\0b",
)
PLAIN: dict[str, Any] = {
    **{repr(x): x for x in SIMPLE}, "a type": int, "a function": generator, "claims": Claims(), "mute": Mute(),
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
    right: dict[str, Any]

    @property
    def names(self) -> tuple[str, ...]:
        """The arguments that can be wrong: the names in the signature, and the rules or options behind `**`."""
        result: list[str] = []
        for one in signature(self.call).parameters.values():
            if one.kind is one.VAR_KEYWORD:
                result += [name for named in getattr(one.annotation, "__args__", ()) for name in named.__annotations__]
            elif one.kind is not one.VAR_POSITIONAL:
                result.append(one.name)
        return tuple(result)

    def __call__(self, wrong: dict[str, Any]) -> Any:
        inputs = {**self.right, **wrong}
        parameters = signature(self.call).parameters
        first = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_ONLY and n in inputs]
        return self.call(*(inputs.pop(name) for name in first), **inputs)


VALID: dict[str, Any] = {  # by the name of a parameter, for each that has no default
    **dict.fromkeys(("q", "k", "v", "x", "theirs"), FLAT), **dict.fromkeys(("w_q", "w_k", "w_v", "w_o"), W),
    **dict.fromkeys(("key", "keys", "query", "batch", "layer", "head", "chosen"), 0),
    **dict.fromkeys(("query_groups", "key_groups"), np.array([0, 1, 1])), "weights": np.abs(FLAT[:, :3]),
    "height": 2, "width": 2, "by": 1.0, "t": 2.0, "sinks": [0.0, 1.0], "text": "humpty dumpty",
    "path": "/dev/null/nowhere.html", "scene": None, "groups": [0, 1, 1], "edges": [], "run": lambda: 0.0,
    "d_model": 8, "num_heads": 2, "language": "en", "length": 3, "edits": [ch.cut(keys=0)],
}  # fmt: skip
ROW, COLUMN = {"k": 2, "v": V, "g": Q, "x": V, "keys": 0}, {"g": Q}


def of(call: Callable[..., Any], **right: Any) -> Call:
    """With valid arguments: those given where it takes them, and those of VALID for what has no default."""
    taken = signature(call).parameters.values()
    wanted = [p for p in taken if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    return Call(call, {p.name: VALID[p.name] for p in wanted if p.name not in right} | right)


def methods(owner: Callable[[], Any], kind: type, *chosen: str, **right: Any) -> dict[str, Call]:
    """The public methods of a class, or the chosen ones, each on a fresh object."""

    def call(name: str) -> Callable[..., Any]:
        def fresh(*inputs: Any, **named: Any) -> Any:
            return getattr(owner(), name)(*inputs, **named)

        function = getattr(kind, name)
        static = isinstance(inspect.getattr_static(kind, name), (staticmethod, classmethod))
        fresh.__signature__ = signature(function if static else partial(function, None))  # type: ignore[attr-defined]
        return fresh

    within = ("with_call", "effect_engine")  # called by other modules, with what they were given by the same matrix
    public = [name for name in dir(kind) if name not in within]
    public = [name for name in public if not name.startswith("_") or name in ("__getitem__", "__matmul__")]
    names = [name for name in chosen or public if callable(getattr(kind, name))]
    names = [name for name in names if getattr(getattr(kind, name), "__module__", "").startswith("clearhead")]
    calls = {name: call(name) for name in names}
    taken = {
        name: {key: x for key, x in right.items() if key in signature(one).parameters} for name, one in calls.items()
    }
    return {f"{kind.__name__}.{name}": of(one, **taken[name]) for name, one in calls.items()}


def matrix() -> ch.AttentionMatrix:
    return ch.AttentionMatrix(Q, K, causal=True)


@wraps(ch.AttentionMatrix, updated=())
def shaped(**inputs: Any) -> Any:
    return ch.AttentionMatrix(**inputs).shape


def observed() -> ch.Observation:
    return ch.AttentionMatrix(Q, K).observe(
        V, **dict.fromkeys(("logsumexp", "max_logit", "entropy", "distance"), True), top=2
    )


QKV = dict.fromkeys("qkv", FLAT)
LAYER = {"x": FLAT, "w_q": W, "w_k": W, "w_v": W}


@cache
def public() -> dict[str, Call]:
    """Everything public that computes with NumPy alone."""
    plain = "attention trace trace_layer trace_weights diagnose diagnose_layer diagnose_weights explain load load_model"
    plain += " boost tempered scaled"
    trace, shown = ch.trace(Q, K, V), cache(lambda: ch.explain("humpty dumpty").steps())
    return {
        **{name: of(getattr(ch, name)) for name in plain.split()},
        "plan": of(ch.plan, v=FLAT),
        "AttentionMatrix": of(shaped),
        "shapes": of(ch.shapes, **QKV),
        "shapes of a layer": of(ch.shapes, **LAYER),
        "rollout": of(ch.rollout, matrices=[matrix(), matrix()]),
        "cut": of(ch.cut, keys=0),
        "off": of(ch.off, heads=0),
        "textbook.sparse.sparse_patterns": of(sparse_patterns, n=12, width=3),
        "textbook.why_scale.why_scale": of(why_scale),
        "explaining.learning.read": of(learning.read),
        **methods(matrix, ch.AttentionMatrix, **ROW),
        **methods(lambda: matrix().T, TransposedMatrix, **COLUMN),
        **methods(lambda: matrix().cut_effects(V, Q), ch.EffectMatrix, **ROW),
        **methods(observed, ch.Observation, other=observed()),
        **methods(lambda: trace, Trace),
        **methods(lambda: trace.token(0), TokenTrace),
        **methods(lambda: ch.diagnose(FLAT, FLAT, FLAT, FLAT), Diagnosis),
        **methods(shown, HeadSteps),
        **methods(cache(lambda: ch.explain("humpty dumpty")), Explanation),
        **methods(cache(why_scale), WhyScale),
        **methods(cache(learning.learning), learning.Learning, key="learn"),
    }


def seen() -> Seen:
    result = ch.AttentionMatrix(Q, K).observe(V, logsumexp=True, entropy=True)
    layer = Layer("0", "h.0", (0, 1), result, {}, Q, K, V, derivative=lambda: Q)
    return Seen({"0": layer}, [["a", "b", "c"]], model="none")


def threads(count: Any) -> None:
    before = ch.get_num_threads()
    try:
        ch.set_num_threads(count)
        ch.attention(FLAT, FLAT, FLAT)
    finally:
        ch.set_num_threads(before)


@wraps(ch.watch)
def watched(**inputs: Any) -> None:
    with ch.watch(**inputs):
        pass


@wraps(ch.change)
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


def made(kind: type) -> Callable[..., None]:
    """A layer, run once where it is small."""

    @wraps(kind, updated=())
    def run(**inputs: Any) -> None:
        layer = kind(**inputs)
        weights = list(layer.parameters())
        if sum(p.numel() for p in weights) < 10**6 and all(p.device.type == "cpu" for p in weights):
            layer(torch.ones(1, 3, layer.d_model))

    return run


@cache
def in_frameworks() -> dict[str, Call]:
    """Public callables of the parts for PyTorch and Transformers."""
    x, layer = torch.ones(1, 2, 3, 4), nn.MultiHeadAttention(8, 2)
    ragged = {"query": x[0], "cu_seq_q": torch.tensor([0, 2]), "cu_seq_k": torch.tensor([0, 2])}
    theirs = torch.nn.MultiheadAttention(8, 2)
    return {
        "set_num_threads": of(threads, count=1),
        "watch": of(watched, model=torch.nn.Linear(2, 2)),
        "nn.MultiHeadAttention": of(made(nn.MultiHeadAttention)),
        "nn.KVCache": of(nn.KVCache, batch=1, kv_heads=2, d_k=4, d_v=4),
        "torch.scaled_dot_product_attention": of(ch.torch.scaled_dot_product_attention, query=x, key=x, value=x),
        "torch.varlen_attn": of(ch.torch.varlen_attn, key=x[0], value=x[0], **ragged),
        "torch.varlen_matrix": of(ch.torch.varlen_matrix, key=x[0], request=0, **ragged),
        "vllm.statistics": of(clearhead.vllm.statistics, request_id="7"),
        **methods(lambda: layer, nn.MultiHeadAttention, "forward", "from_torch", x=torch.ones(1, 3, 8), theirs=theirs),
        **methods(
            lambda: nn.KVCache(1, 2, 4, 4),
            nn.KVCache,
            "append",
            "crop",
            k=x,
            v=x,
            length=0,
        ),
        "testing.assert_attention": of(asserted, fn=ch.attention, examples=1, lengths=[3], widths=[4]),
        "change": of(changed, model=small_gpt2(), edits=[ch.cut(keys=0)]),
        "like": of(ch.like, seen=seen()),
        "values_like": of(ch.values_like, seen=seen()),
        **methods(seen, Seen),
        **methods(lambda: seen().layer("0"), Layer, "cut_effects"),
    }
