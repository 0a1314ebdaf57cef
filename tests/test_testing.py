"""`clearhead.testing.assert_attention`: right functions pass, wrong ones fail with what is needed to find out why."""

import re
from typing import Any

import numpy as np
import pytest
import torch

import clearhead as ch
from clearhead.core.rules import RULES
from clearhead.errors import DtypeError, RuleError, ShapeError, UnknownNameError
from clearhead.testing import KINDS, assert_attention
from clearhead.testing.drawing import RULE_DRAWS
from programs import python
from seeds import fresh

SMALL = {"lengths": (1, 2, 3, 7, 16, 33), "examples": 20}


def plain(does: str = "") -> Any:
    """Attention in NumPy, right or with one mistake."""

    def kernel(q, k, v, mask=None, causal=False):
        group = q.shape[1] // k.shape[1]
        spread = np.tile if does == "tiled" else np.repeat
        k, v = ((np.tile(x, (1, group, 1, 1)) if spread is np.tile else np.repeat(x, group, axis=1)) for x in (k, v))
        seen = np.ones((*q.shape[:3], k.shape[2]), bool)
        if mask is not None:
            seen &= mask
        if causal:
            seen &= np.tri(*seen.shape[-2:], dtype=bool)
        if does == "memory":  # takes it for granted that the arrays are contiguous
            flat = q.base if q.base is not None and q.base.shape != q.shape else q
            q = flat.reshape(q.shape)
        if does == "last keys":
            seen[..., k.shape[2] // 16 * 16 :] &= k.shape[2] < 64
        s = q @ k.swapaxes(-1, -2) / float(q.shape[-1] ** 0.5)
        s = np.where(seen, s, -1e4 if does == "fills" else -np.inf)
        with np.errstate(all="ignore"):
            top = 0.0 if does == "no maximum" else s.max(-1, keepdims=True, initial=-1e30)
            e = np.exp(s - top)
            a = e / e.sum(-1, keepdims=True)
            if does not in ("NaN rows", "fills"):
                a = np.where(seen.any(-1, keepdims=True), a, 0)
            if does != "reads hidden values":
                v = np.where(seen.any((1, 2))[:, None, :, None], v, 0)
            return (a.astype(q.dtype) @ v).astype(q.dtype)

    return kernel


def plain_tensor(q, k, v, mask=None, **_):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_the_librarys_own_attention_passes_under_all_rules(dtype: str):
    assert_attention(ch.attention, optional=list(RULES), dtypes=[dtype], **SMALL)


def test_plain_attention_passes():
    fn = plain()
    kinds = set(KINDS) - {"NaN behind the mask"}  # NaN in a hidden key is NaN in its score: 0 · NaN
    assert_attention(fn, mask=True, optional=["causal"], kinds=kinds, **SMALL)
    assert_attention(fn, optional=["causal"], **SMALL)


@pytest.mark.parametrize(
    ("does", "kind", "options", "words"),
    [
        ("no maximum", "large scores", {}, "NaN or infinite"),
        ("no maximum", "scores far below zero", {}, "NaN or infinite"),
        ("NaN rows", "empty rows", {"mask": True}, "NaN or infinite"),
        ("fills", "empty rows", {"mask": True}, ""),
        ("reads hidden values", "NaN behind the mask", {"mask": True}, "NaN or infinite"),
        ("tiled", "usual", {"lengths": (16, 33)}, ""),
        ("last keys", "many keys", {}, ""),
        ("memory", "strides", {"lengths": (7, 16), "widths": (16,)}, ""),
    ],
)
def test_each_kind_finds_its_mistake(does: str, kind: str, options: dict[str, Any], words: str):
    with pytest.raises(AssertionError) as caught:
        assert_attention(plain(does), kinds=[kind], **{"causal": None, **options})
    shown = str(caught.value)
    assert f"The kind of problem: {kind} ({KINDS[kind]})." in shown
    assert words in shown


def test_a_failure_says_what_was_given_how_far_off_and_how_to_repeat_it():
    def kernel(q, k, v, causal):
        return ch.attention(q, k, v, scale=1.0, causal=causal)

    with pytest.raises(AssertionError) as caught:
        assert_attention(kernel, causal=True, kinds=["usual"], lengths=(7, 16, 33), dtypes=["float32"])
    shown = str(caught.value)
    assert re.search(
        r"given: q \(batch \d, heads \d+, queries \d+, d_k \d+\), k .*, float32\nrules: causal=True", shown
    )
    assert re.search(r"by up to \S+: \S+ times the error of a plain run in float32 \(\S+\), where 4 times pass", shown)
    assert "first wrong number: batch 0, head 0, query 1, column 0: yours" in shown
    assert "scale" in shown.split("what ch.diagnose says")[1]
    seed = int(re.findall(r"seed=(\d+)$", shown)[0])
    with pytest.raises(AssertionError) as again:
        assert_attention(kernel, causal=True, kinds=["usual"], lengths=(7, 16, 33), seed=seed)
    assert str(again.value) == shown


@pytest.mark.gate
def test_a_failing_problem_is_made_smaller():
    def kernel(q, k, v, causal=False, mask=None):
        return ch.attention(q, k, v, causal=causal, mask=mask) + (q.shape[2] >= 5)

    with pytest.raises(AssertionError) as caught:
        assert_attention(kernel, optional=["causal", "mask"], widths=(8, 32), examples=100)
    small = str(caught.value).split("the smallest problem")[1]
    assert "q (batch 1, heads 1, queries 5, d_k 8), k (batch 1, kv_heads 1, keys 1, d_k 8)" in small
    assert "rules: none" in small or "rules: mask" in small


def test_what_a_function_raises_is_reported_and_chained():
    def kernel(q, k, v):
        raise NotImplementedError("odd sizes")

    with pytest.raises(AssertionError, match="it raised NotImplementedError: odd sizes") as caught:
        assert_attention(kernel)
    assert isinstance(caught.value.__cause__, NotImplementedError)
    for wrong, words in (((lambda q, k, v: v[:, :1, :1]), "the result has shape"), (lambda *_: (1, 2), "is a tuple")):
        with pytest.raises(AssertionError, match=words):
            assert_attention(wrong, lengths=(7,), widths=(8,))


@pytest.mark.parametrize("layout", ["bhnd", "bnhd"])
@pytest.mark.parametrize("arrays", ["numpy", "torch", pytest.param("jax", marks=pytest.mark.gate)])
def test_each_kind_of_array_in_each_layout(arrays: str, layout: str):
    seen = set()

    def kernel(q, k, v, mask):
        seen.add(type(q).__module__.split(".")[0])
        arrays_ = [x.swapaxes(1, 2) for x in (q, k, v)] if layout == "bnhd" else [q, k, v]
        out = ch.attention(*arrays_, mask=mask)
        return out.swapaxes(1, 2) if layout == "bnhd" else out

    kinds = set(KINDS) - {"many keys"}
    assert_attention(kernel, mask=True, arrays=arrays, layout=layout, kinds=kinds, lengths=(1, 7, 9), examples=12)
    assert seen == {{"numpy": "numpy", "torch": "torch", "jax": "jaxlib"}[arrays]}


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

    def stops(q, k, v):
        return plain_tensor(q, k, v) + 0 * k.sum() + (plain_tensor(q, k.detach(), v) - plain_tensor(q, k, v))

    with pytest.raises(AssertionError, match="numbers of the dk are wrong"):
        assert_attention(stops, arrays="torch", gradients=True, lengths=(7, 33), kinds=["usual"])
    with pytest.raises(AssertionError, match="its backward pass raised"):
        assert_attention(lambda q, k, v: ch.attention(*(x.detach() for x in (q, k, v))), arrays="torch", gradients=True)


def test_an_input_that_the_function_overwrites_is_not_ours():
    def kernel(q, k, v):
        q *= np.float32(k.shape[-1] ** -0.5)
        return ch.attention(q, k, v, scale=1.0)

    assert_attention(kernel, **SMALL)


def test_every_rule_can_be_drawn():
    assert RULE_DRAWS.keys() == RULES.keys()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"casual": True}, UnknownNameError, "did you mean `causal`?"),
        ({"optional": "causal"}, RuleError, "expected a list of names"),
        ({"optional": ["maks"]}, UnknownNameError, "did you mean `mask`?"),
        ({"kinds": ["usal"]}, UnknownNameError, "did you mean `usual`?"),
        ({"kinds": ["empty rows"]}, RuleError, "allow none of the kinds"),
        ({"dtypes": ["float8"]}, UnknownNameError, "Known: bfloat16, float16, float32, float64"),
        ({"arrays": "tensorflow"}, UnknownNameError, "Known: jax, numpy, torch"),
        ({"layout": "bhdn"}, UnknownNameError, "did you mean"),
        ({"gradients": True}, RuleError, "only tensors have them"),
        ({"lengths": ()}, ShapeError, "no sizes to draw from"),
        ({"widths": ((1, 2, 3),)}, ShapeError, "no sizes to draw from"),
        ({"lengths": (0,)}, RuleError, "a size is 0"),
        ({"examples": 0}, RuleError, "examples is 0"),
        ({"seed": -1}, RuleError, "seed is -1"),
        ({"mask": np.ones((3, 3), bool)}, RuleError, "its size differs from problem to problem"),
    ],
)
def test_bad_arguments_are_refused_before_the_function_is_called(options: dict[str, Any], error: type, words: str):
    with pytest.raises(error, match=re.escape(words)):
        assert_attention(pytest.fail, **options)


def test_what_is_no_function_is_refused():
    with pytest.raises(DtypeError, match="fn is 3"):
        assert_attention(3)


def test_the_kit_needs_numpy_only():
    program = "import sys, clearhead as ch; ch.testing.assert_attention(ch.attention, examples=3); print(*sys.modules)"
    assert not {"torch", "jax", "hypothesis", "pytest"} & set(python(program).split())


def test_consecutive_seeds_draw_every_kind():
    seen = []

    def kernel(q, k, v, **rules):
        seen.append(q.shape)
        return ch.attention(q, k, v, **rules)

    start = int(fresh().integers(2**31))
    for seed in range(start, start + len(KINDS)):
        assert_attention(kernel, mask=True, lengths=(1, 9), seed=seed)
    assert len(seen) == len(KINDS)
