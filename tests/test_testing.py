"""`clearhead.testing.assert_attention`: right functions pass; wrong ones, such as cheats, fail and are explained."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.rules import RULES
from clearhead.errors import DtypeError, RuleError, UnknownNameError
from clearhead.testing import KINDS, assert_attention
from clearhead.testing.drawing import planned, rule_values
from programs import python
from seeds import fresh


def attend(q: Any, k: Any, v: Any, mask: Any = None, spread: Any = None) -> Any:
    """Attention in NumPy, step by step."""
    group = q.shape[1] // k.shape[1]
    k, v = ((spread or (lambda x: np.repeat(x, group, axis=1)))(x) for x in (k, v))
    s = q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]).astype(q.dtype)
    s = s if mask is None else np.where(mask, s, q.dtype.type(-np.inf))
    e = np.exp(s - s.max(-1, keepdims=True, initial=q.dtype.type(-1e30)))
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total).astype(q.dtype) @ v


def remembered(key: Callable[..., Any]) -> Any:
    """A function that returns an earlier result for inputs with the same key."""
    kept: dict[Any, Any] = {}

    def kernel(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        place = key(q, k, v)
        if place not in kept:
            kept[place] = attend(q, k, v, mask), q, k, v
        return kept[place][0].copy()

    return kernel


def stale_mask() -> Any:
    """Keep the first mask of each shape."""
    kept: dict[Any, Any] = {}
    return lambda q, k, v, mask=None: attend(
        q, k, v, None if mask is None else kept.setdefault(mask.shape, mask.copy())
    )


def buffers(many: int) -> Any:
    """Write the results of a shape into the same arrays, as many as these, in turn."""
    kept: dict[Any, Any] = {}
    calls = itertools.count()

    def kernel(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        result = attend(q, k, v, mask)
        place = result.shape, next(calls) % many
        kept.setdefault(place, result)[...] = result
        return kept[place]

    return kernel


def overwrites(name: str) -> Any:
    """Right, but one of the inputs is 0 afterwards."""

    def kernel(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        result = attend(q, k, v, mask)
        {"q": q, "k": k, "v": v, "mask": mask}[name][...] = 0
        return result

    return kernel


def first_keys_for_all(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Read the keys of the first sequence for all."""
    return attend(q, np.broadcast_to(k[:1], k.shape), np.broadcast_to(v[:1], v.shape), mask)


def in_memory_order(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Read q, k and v in the order in which their numbers lie in memory."""
    return attend(*(x.ravel("K").reshape(x.shape) for x in (q, k, v)), mask)


def alternates() -> Any:
    """Leave out every second column of the values, the others in the next call."""
    calls = itertools.count()
    return lambda q, k, v, mask=None: attend(q, k, v * (np.arange(v.shape[-1]) % 2 == next(calls) % 2), mask)


def nan_rows(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """Give NaN for a query that sees no key."""
    result = attend(q, k, v, mask)
    return result if mask is None else np.where(mask.any(-1, keepdims=True), result, np.float32(np.nan))


def half_a_derivative(q: Any, k: Any, v: Any) -> Any:
    """Right, but half of the keys' derivative is missing."""
    return sdpa(q, 0.5 * k + 0.5 * k.detach(), v)


def sdpa(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
    """PyTorch's own, which gives 0 for a query that sees no key."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


def shapes(q: Any, k: Any, v: Any) -> Any:
    return q.shape, k.shape, v.shape


def beginnings(q: Any, k: Any, v: Any) -> Any:
    return (*shapes(q, k, v), *(x.ravel()[:4].tobytes() for x in (q, k, v)))


CHEATS: dict[str, tuple[Any, str, dict[str, Any]]] = {  # the function, what must be said, and options
    "result cached by shape": (remembered(shapes), "a cache: it uses the result .* by their shape", {}),
    "result cached by first numbers": (remembered(beginnings), "a cache: it uses the result", {}),
    "result cached by id": (remembered(lambda *x: tuple(map(id, x))), "a cache: it uses the result .* address", {}),
    "mask cached by shape": (stale_mask(), "a cache: it uses mask", {"mask": True}),
    "shared buffer": (buffers(1), "an earlier result changed .* a buffer that it keeps", {}),
    "two buffers in turn": (buffers(2), "an earlier result changed .* a buffer that it keeps", {}),
    "q overwritten": (overwrites("q"), "it writes into its inputs: q changed", {}),
    "k overwritten": (overwrites("k"), "it writes into its inputs: k changed", {}),
    "v overwritten": (overwrites("v"), "it writes into its inputs: v changed", {}),
    "mask overwritten": (overwrites("mask"), "it writes into its inputs: mask changed", {"mask": True}),
    "float16 returned": (lambda *x, **m: attend(*x, **m).astype(np.float16), "it returns float16 where float32", {}),
    "mask ignored": (lambda q, k, v, mask: attend(q, k, v), "the mask is ignored", {"mask": True}),
    "mask ignored for large sizes": (
        lambda q, k, v, mask=None: attend(q, k, v, mask if k.shape[2] < 512 else None),
        "(?s)with keys below 1\\d\\d\\d are right.*the mask is ignored",
        {"mask": True, "kinds": ["usual", "many keys"], "lengths": None},
    ),
    "contiguous only": (in_memory_order, "problems without strides are right", {"kinds": ["usual", "strides"]}),
    "batch 1 only": (first_keys_for_all, "problems with batch below 2 are right", {}),
    "equal heads only": (
        lambda q, k, v, mask=None: attend(q, k, v, mask, lambda x: np.tile(x, (1, q.shape[1] // x.shape[1], 1, 1))),
        "grouped keys are tiled, not repeated",
        {"kinds": ["usual"], "lengths": (16, 33)},
    ),
    "NaN in empty rows": (
        nan_rows,
        "problems without empty rows are right",
        {"mask": True, "kinds": ["usual", "empty rows"]},
    ),
    "wrong gradients": (
        half_a_derivative,
        "(?s)numbers of the dk are wrong.*its derivatives are not",
        {"arrays": "torch", "gradients": True},
    ),
    "not deterministic": (alternates(), "it is not deterministic", {}),
}
RIGHT: dict[str, tuple[Any, dict[str, Any]]] = {
    "clearhead": (ch.attention, {}),
    "NumPy": (attend, {}),
    "PyTorch": (sdpa, {"arrays": "torch", "gradients": True}),
}


SMALL = {"lengths": (1, 2, 3, 7, 16, 33), "examples": 20}
FEW = {"lengths": (1, 7, 16, 33), "widths": (16,), "examples": 24, "kinds": set(KINDS) - {"NaN behind the mask"}}


def failing(fn: Any, **options: Any) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_attention(fn, **options)
    return str(caught.value)


@pytest.mark.parametrize(("cheat", "words", "options"), CHEATS.values(), ids=CHEATS)
def test_a_cheat_is_caught_and_named(cheat: Any, words: str, options: dict[str, Any]):
    assert re.search(words, failing(cheat, **{**FEW, **options}))


@pytest.mark.parametrize(("fn", "options"), RIGHT.values(), ids=RIGHT)
def test_a_right_function_passes(fn: Any, options: dict[str, Any]):
    assert_attention(fn, optional=["mask"], **{**FEW, **options})


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_librarys_own_attention_passes_under_all_rules(dtype: str):
    assert_attention(ch.attention, optional=list(RULES), dtypes=[dtype], **SMALL)


def test_a_number_below_the_smallest_of_float16_may_be_zero():
    assert_attention(ch.attention, optional=list(RULES), dtypes=["float16"], **{**SMALL, "examples": [1960087894]})


@pytest.mark.parametrize(
    ("does", "kind", "mask"),
    [("no maximum", "large scores", None), ("reads hidden values", "NaN behind the mask", True)],
)
def test_each_kind_finds_its_mistake(does: str, kind: str, mask: Any):
    def kernel(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        s = q @ k.swapaxes(-1, -2) / np.float32(q.shape[-1] ** 0.5)
        s = s if mask is None else np.where(mask, s, -np.inf)
        e = np.exp(s if does == "no maximum" else s - s.max(-1, keepdims=True, initial=-1e30))
        return (e / e.sum(-1, keepdims=True) @ v).astype(q.dtype)

    shown = failing(kernel, kinds=[kind], mask=mask, grouped=False, **SMALL)
    assert f"the smallest: {kind} ({KINDS[kind]})" in shown
    assert "NaN or infinite" in shown


def test_a_failure_says_how_far_off_and_how_to_repeat_it():
    def kernel(q, k, v, causal):
        return ch.attention(q, k, v, scale=1.0, causal=causal)

    options: dict[str, Any] = {"causal": True, "kinds": ["usual"], "lengths": (7, 16, 33)}
    shown = failing(kernel, **options)
    assert re.search(
        r"given: q \(batch \d, heads \d+, queries \d+, d_k \d+\), k .*, float32\nrules: causal=True", shown
    )
    assert re.search(r"wrong, by up to \S+ times what rounding in float32 explains \(4 pass\)", shown)
    assert "first wrong number: batch 0, head 0, query 1, column 0: yours" in shown
    assert "scale" in shown.split("what ch.diagnose says")[1]
    seed = int(re.findall(r"examples=\[(\d+)\]$", shown)[0])
    again = failing(kernel, **options, examples=[seed])
    assert again.splitlines()[1:6] == shown.splitlines()[1:6]


def test_a_failure_says_what_the_right_problems_have_in_common():
    def kernel(q, k, v, causal=False, mask=None):
        return ch.attention(q, k, v, causal=causal, mask=mask) + (q.shape[2] >= 16)

    shown = failing(kernel, optional=["causal", "mask"], **(SMALL | {"examples": 60}))
    assert re.search(r"all \d+ problems with queries below 16 are right", shown)


def test_what_a_function_raises_is_reported_and_chained():
    def kernel(q, k, v):
        raise NotImplementedError("odd sizes")

    with pytest.raises(AssertionError, match="first call: it raised NotImplementedError: odd sizes") as caught:
        assert_attention(kernel, **SMALL)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    for wrong, words in (((lambda q, k, v: v[:, :1, :1]), "the result has shape"), (lambda *_: (1, 2), "is a tuple")):
        assert words in failing(wrong, lengths=(7,), widths=(8,), examples=3)


def test_a_narrower_result_passes_where_it_is_declared():
    narrow = lambda *inputs: attend(*inputs).astype(np.float16)  # noqa: E731
    assert_attention(narrow, dtypes=[("float32", "float16")], **SMALL)
    assert_attention(lambda *x: attend(*(y.astype(np.float32) for y in x)), dtypes=["float16", "bfloat16"], **SMALL)


@pytest.mark.parametrize("arrays", ["numpy", "torch"])
def test_each_kind_of_array(arrays: str):
    seen = set()

    def kernel(q, k, v, mask):
        seen.add(type(q).__module__.split(".")[0])
        return ch.attention(q, k, v, mask=mask)

    assert_attention(kernel, mask=True, arrays=arrays, lengths=(1, 7, 9), examples=9)
    assert seen == {arrays}


def test_a_rule_may_be_a_value_or_a_function_of_the_sizes():
    seen = []

    def kernel(q, k, v, **rules):
        seen.append((q.shape[2], k.shape[2], rules))
        return ch.attention(q, k, v, **rules)

    assert_attention(kernel, causal=True, scale=0.3, query_offset=lambda n, m: m - n, **SMALL)
    assert all(rules == {"causal": True, "scale": 0.3, "query_offset": m - n} for n, m, rules in seen)
    assert any(n != m for n, m, _ in seen)
    seen.clear()
    assert_attention(kernel, causal=True, **SMALL)
    assert all(n == m for n, m, _ in seen)


def test_gradients_are_compared_too():
    assert_attention(ch.attention, optional=list(RULES), arrays="torch", gradients=True, lengths=(1, 7, 33), examples=9)

    options: dict[str, Any] = {"arrays": "torch", "gradients": True, "lengths": (7, 33), "examples": 5}
    cut = lambda q, k, v: ch.attention(*(x.detach() for x in (q, k, v)))  # noqa: E731
    assert "does not require grad" in failing(cut, **options)


def test_every_rule_can_be_drawn():
    drawn: Any = {"kinds": ("usual",), "dtypes": ((np.dtype(np.float32),) * 2,), "lengths": None, "widths": ((8, 8),)}
    plan = planned(0, rules={}, optional=tuple(RULES), grouped=True, **drawn)
    assert rule_values(fresh(), plan).keys() == RULES.keys()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fn": 3}, DtypeError, "fn is 3"),
        ({"casual": True}, UnknownNameError, "did you mean `causal`?"),
        ({"optional": ["maks"]}, UnknownNameError, "did you mean `mask`?"),
        ({"kinds": ["usal"]}, UnknownNameError, "did you mean `usual`?"),
        ({"kinds": ["empty rows"]}, RuleError, "no problem is left to draw"),
        ({"dtypes": ["float8"]}, UnknownNameError, "Known: bfloat16, float16, float32, float64"),
        ({"dtypes": np.float32}, UnknownNameError, "Known: bfloat16, float16, float32, float64"),
        ({"arrays": "tensorflow"}, UnknownNameError, "Known: cuda, numpy, torch"),
        pytest.param(
            {"arrays": "cuda"}, RuleError, "no CUDA device here", marks=pytest.mark.skipif("torch.cuda.is_available()")
        ),
        ({"gradients": True}, RuleError, "only tensors have gradients"),
        ({"examples": 0}, RuleError, "examples is 0"),
    ],
)
def test_bad_arguments_are_refused_before_the_function_is_called(options: dict[str, Any], error: type, words: str):
    with pytest.raises(error, match=re.escape(words)):
        assert_attention(**{"fn": pytest.fail, **options})


def test_one_name_or_number_stands_for_a_list_of_it():
    drawn: list[Any] = []

    def mine(q: Any, k: Any, v: Any, **rules: Any) -> Any:
        drawn.append((q.dtype.name, q.shape[2:], *rules))
        return ch.attention(q, k, v, **rules)

    assert_attention(mine, kinds="usual", dtypes="float64", optional="scale", lengths=5, widths=8, examples=20)
    assert set(drawn) == {("float64", (5, 8)), ("float64", (5, 8), "scale")}


def test_the_kit_needs_numpy_only():
    program = "import sys, clearhead as ch; ch.testing.assert_attention(ch.attention, examples=3); print(*sys.modules)"
    assert not {"torch", "jax", "hypothesis", "pytest"} & set(python(program).split())


def test_consecutive_seeds_draw_every_kind():
    seen = []

    def kernel(q, k, v, **rules):
        seen.append(q.shape)
        return ch.attention(q, k, v, **rules)

    start = int(fresh().integers(2**31))
    assert_attention(kernel, mask=True, lengths=(1, 9), examples=range(start, start + len(KINDS)))
    assert len(seen) == 3 * len(KINDS)
