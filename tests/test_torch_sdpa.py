"""The drop-in function against PyTorch's: its sample inputs, also under torch.func, random inputs, dropout, errors."""

import inspect
import re
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from clearhead.errors import ClearheadError
from clearhead.torch import scaled_dot_product_attention as ours
from composed import COMPOSED, by_math
from problems import examples, in_the_gate

theirs = F.scaled_dot_product_attention
DTYPES = [torch.float64, torch.float32, torch.bfloat16]
FACTOR = 4.0


def assert_as_exact(call: Any, inputs: tuple[Tensor, ...], ours: Tensor, yours: Tensor) -> None:
    """As close to a run in float64 as PyTorch's result is, up to the rounding of the multiplied numbers."""
    exact = call(*(x.double() if x.is_floating_point() else x for x in inputs))
    sizes = [x.abs().amax().item() for x in (*inputs[:3], exact) if x.numel()]
    off = (yours.double() - exact).abs().amax().item() if exact.numel() else 0.0
    widest = max(torch.finfo(x.dtype).eps for x in inputs if x.is_floating_point())
    eps = widest * np.prod([1 + size for size in sizes])
    torch.testing.assert_close(ours.double(), exact, rtol=0, atol=FACTOR * (off + eps))
    assert ours.shape == yours.shape
    assert ours.dtype == yours.dtype


def check(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, **options: Any) -> None:
    """Outputs and gradients of every float input, ours against theirs."""
    inputs = (query, key, value) if mask is None else (query, key, value, mask)
    results = []
    for function in (ours, theirs):
        leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
        output = function(*leaves, **options)
        floats = [x for x in leaves if x.is_floating_point()]
        grads = torch.autograd.grad(output.square().sum(), floats, allow_unused=True)
        results.append([output.detach(), *map(_or_zero, grads, floats)])
    assert_as_exact(lambda *x: theirs(*x, **options), inputs, results[0][0], results[1][0])
    for place, (actual, yours) in enumerate(zip(results[0][1:], results[1][1:], strict=True)):

        def derivative(*wide: Tensor, place: int = place) -> Tensor:
            leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in wide]
            floats = [x for x in leaves if x.is_floating_point()]
            result = torch.autograd.grad(theirs(*leaves, **options).square().sum(), floats, allow_unused=True)[place]
            return _or_zero(result, floats[place])

        assert_as_exact(derivative, inputs, actual, yours)


def _or_zero(grad: Tensor | None, x: Tensor) -> Tensor:
    return torch.zeros_like(x) if grad is None else grad


# The kinds of PyTorch's samples, with a mask the last, but smaller: a hessian has the square of all inputs' numbers.
SHAPES = [((2, 3, 2), (2, 6, 2)), ((2, 2, 3, 2), (2, 2, 6, 2)), ((2, 3, 2), (2, 2, 6, 2))]
SMALL = [*product(SHAPES, (True, False)), ((*SHAPES[1], (3, 6)), False)]
QUICK = {(0, name) for name in COMPOSED} | {(len(SMALL) - 1, "vmap of jvp of vjp"), (len(SMALL) - 1, "hessian")}
EACH = list(product(range(len(SMALL)), COMPOSED))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch imports what it deprecates
@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's function in its own transforms
@pytest.mark.parametrize("each", in_the_gate(EACH, *(one for one in EACH if one not in QUICK)), ids=str)
def test_composed_transforms_equal_those_of_pytorchs_math_path(each: tuple[int, str]):
    ((query, key, *mask), causal), name = SMALL[each[0]], each[1]
    tensors = [torch.randn(shape, dtype=torch.float64) for shape in (query, key, key, *mask)]
    result = COMPOSED[name](lambda *x: ours(*x, is_causal=causal), tensors)
    truth = COMPOSED[name](lambda *x: by_math(*x, is_causal=causal), tensors)
    torch.testing.assert_close(result, truth, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
def test_pytorchs_own_samples(dtype: torch.dtype):
    from torch.testing._internal.common_methods_invocations import op_db  # 2 s, which not every process need spend

    (op,) = (op for op in op_db if op.name == "nn.functional.scaled_dot_product_attention")
    seen = 0
    for sample in op.sample_inputs("cpu", dtype, requires_grad=False):
        options = dict(sample.kwargs)
        mask = options.pop("attn_mask", None)
        assert len(sample.args) == 2
        if options.get("dropout_p"):  # dropout zeroes different weights
            shapes = [function(sample.input, *sample.args, mask, **options).shape for function in (ours, theirs)]
            assert shapes[0] == shapes[1]
            continue
        check(sample.input, *sample.args, mask, **options)
        seen += 1
    assert seen > 5


@examples(0.3)
@given(data=st.data())
def test_random_inputs_agree_with_pytorch(data: st.DataObject):
    draw, size = data.draw, st.sampled_from((1, 2, 3, 5, 17))
    dtype = draw(st.sampled_from(DTYPES))
    lead = draw(st.lists(st.integers(1, 3), max_size=3))
    length, keys, d_k, d_v = (draw(size) for _ in range(4))
    gqa = len(lead) > 0 and draw(st.booleans())
    heads = lead[-1:] if not gqa else [lead[-1] * draw(st.integers(1, 3))]
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    def shared(full: list[int]) -> list[int]:
        return [n if draw(st.booleans()) else 1 for n in full]

    prefix = [*lead[:-1], *heads]
    query = normal(*prefix, length, d_k)
    kv = lead if gqa or draw(st.booleans()) else shared(lead)[draw(st.integers(0, len(lead))) :]
    key, value = normal(*kv, keys, d_k), normal(*kv, keys, d_v)
    full = [*prefix, length, keys]
    local = shared(full)[draw(st.integers(0, len(prefix))) :]
    wider = normal(*local).to(torch.promote_types(dtype, torch.float32))
    masks = None, normal(*local), wider, torch.rand(local, generator=generator) < 0.6
    mask = draw(st.sampled_from(masks))
    options: dict[str, Any] = {"enable_gqa": gqa, "scale": draw(st.sampled_from((None, 0.3, -1.0)))}
    if mask is None and draw(st.booleans()):
        options["is_causal"] = True
    check(query, key, value, mask, **options)


@pytest.mark.filterwarnings("ignore:Lower right causal bias")  # empty rows: NaN in PyTorch, 0 here
@pytest.mark.parametrize(("length", "keys"), [(3, 5), (5, 3), (4, 4)])
def test_causal_from_either_corner(length: int, keys: int):
    query, key = torch.randn(1, 2, length, 4), torch.randn(1, 2, keys, 4)
    for mask in (causal_lower_right(length, keys), causal_upper_left(length, keys)):
        actual, yours = (function(query, key, key, attn_mask=mask) for function in (ours, theirs))
        torch.testing.assert_close(actual, torch.nan_to_num(yours))
    above = torch.ones(length, keys, dtype=torch.bool).tril()
    assert torch.equal(ours(query, key, key, is_causal=True), ours(query, key, key, above))


@pytest.mark.parametrize(
    ("query", "key", "value"),
    [((2, 0, 4), (2, 3, 4), (2, 3, 4)), ((2, 3, 4), (2, 0, 4), (2, 0, 2)), ((2, 0, 4), (2, 0, 4), (2, 0, 4)),
     ((2, 3, 4), (2, 3, 4), (2, 3, 0)), ((2, 6, 3, 4), (2, 3, 5, 4), (2, 2, 5, 4))],
)  # fmt: skip
def test_axes_of_length_zero_and_other_heads_for_values(query: Any, key: Any, value: Any):
    check(*(torch.randn(shape) for shape in (query, key, value)), enable_gqa=len(query) == 4)


def test_an_empty_row_gives_zero():
    x, mask = torch.randn(3, 4), torch.tensor([[True], [False], [True]])
    check(x, x, x, mask.expand(3, 3))
    assert (ours(x, x, x, mask)[1] == 0).all()
    assert (ours(x, x, x, torch.where(mask, 0.0, -torch.inf))[1] == 0).all()


def test_the_signature_is_pytorchs():
    said = re.sub(r"\s+", " ", str(theirs.__doc__)).split(" -> ")[0]
    parameters = inspect.signature(ours).parameters.values()
    text = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters]
    assert said == f"scaled_dot_product_attention({', '.join(text)})"
    assert ours.__name__ == theirs.__name__


class TestDropout:
    def setup_method(self) -> None:
        torch.manual_seed(0)
        self.x = torch.randn(1, 2, 6, 8)
        self.eye = torch.eye(6).expand(1, 2, 6, 6)  # the identity as v makes the output the weights

    @pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.rand(6, 6) < 0.7}])
    def test_weights_are_zeroed_or_scaled(self, options: dict[str, Any]):
        whole = ours(self.x, self.x, self.eye, **options)
        some = ours(self.x, self.x, self.eye, dropout_p=0.25, **options)
        kept = some != 0
        assert (kept <= (whole != 0)).all()
        torch.testing.assert_close(some[kept], (whole / 0.75)[kept])

    def test_mean_and_rate_of_dropout_are_as_given(self):
        p, count = 0.3, 4000
        x, eye = (t.expand(count, *t.shape[1:]) for t in (self.x, self.eye))
        drawn, whole = ours(x, x, eye, dropout_p=p), ours(self.x, self.x, self.eye)[0]
        within = 6 * whole * np.sqrt(p / (1 - p) / count)  # six deviations of each weight's mean
        assert ((drawn.mean(0) - whole).abs() <= within).all()
        share = (drawn != 0).double().mean().item()
        assert abs(share - (1 - p)) <= 6 * np.sqrt(p * (1 - p) / drawn.numel())

    def test_dropout_draws_from_pytorchs_generator(self):
        torch.manual_seed(3)
        first = ours(self.x, self.x, self.x, dropout_p=0.5)
        assert not torch.equal(ours(self.x, self.x, self.x, dropout_p=0.5), first)
        torch.manual_seed(3)
        assert torch.equal(ours(self.x, self.x, self.x, dropout_p=0.5), first)
        assert (ours(self.x, self.x, self.x, dropout_p=1.0) == 0).all()

    @pytest.mark.parametrize("far", [-1e9, -3e38, 1e6])
    def test_dropout_under_a_mask_that_is_the_same_everywhere(self, far: float):
        mask, x, v = torch.full((1, 1), far), torch.zeros(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
        drawn = []
        for one in (mask, None):
            torch.manual_seed(0)
            drawn.append(ours(x, x, v, one, dropout_p=0.5))
        torch.testing.assert_close(*drawn)

    def test_gradients_of_dropout(self):
        q, k, v = (torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
        mask = torch.ones(4, 4, dtype=torch.bool)
        mask[1] = False

        def same_draw(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            torch.manual_seed(0)
            return ours(q, k, v, mask, dropout_p=0.6)

        assert (same_draw(q, k, v)[0].abs().sum(-1) == 0).any()
        assert torch.autograd.gradcheck(same_draw, (q, k, v), fast_mode=True)
        assert (torch.autograd.grad(ours(q, k, v, dropout_p=1.0).sum(), q)[0] == 0).all()


X = torch.randn(1, 2, 3, 4)
REFUSED: dict[str, tuple[Any, str]] = {
    "mask of whole numbers": (lambda f, x: f(x, X, X, torch.zeros(3, 3).int()), "attn_mask is torch.int32"),
    "mask of one axis": (lambda f, x: f(x, X, X, torch.zeros(3)), r"attn_mask has shape \(3,\)"),
    "mask of more batches": (lambda f, x: f(x, X, X, torch.zeros(2, 1, 3, 3)), r"attn_mask has shape \(2, 1, 3, 3\)"),
    "more than certain": (lambda f, x: f(x, X, X, dropout_p=1.5), "dropout_p is 1.5"),
    "causal twice": (
        lambda f, x: f(x, X, X, causal_upper_left(3, 3), is_causal=True),
        "attn_mask is a causal bias and",
    ),
    "other heads": (lambda f, x: f(x, X[:, :1].expand(1, 3, 3, 4), X), "the leading axes of query"),
    "groups that do not divide": (
        lambda f, x: f(x.repeat(1, 2, 1, 1), *(torch.randn(1, 3, 3, 4) for _ in "kv"), enable_gqa=True),
        "k has 3 heads but q has 4",
    ),
    "a vector": (lambda f, x: f(x[0, 0, 0], X[0, 0], X[0, 0]), "query has shape"),
    "mixed keys": (lambda f, x: f(x, X.double(), X), "key is torch.float64 but query is torch.float32"),
    "whole numbers": (lambda f, x: f(X.int(), X.int(), X.int()), "q is int32"),
    "other widths": (lambda f, x: f(x, torch.randn(1, 2, 3, 5), X), "q has d_k 4 but k has d_k 5"),
    "another device": (lambda f, x: f(x, X.to("meta"), X), "k is on device meta"),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_pytorch_refuses_is_refused(name: str, *, grad: bool):
    call, words = REFUSED[name]
    x = X.clone().requires_grad_(grad)
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        call(theirs, x)
    with pytest.raises(ClearheadError, match=f"^{words}"):
        call(ours, x)


@pytest.mark.parametrize("kind", ["bool", "float", "float that learns"])
@pytest.mark.parametrize("p", [0.0, 1e-30])
def test_a_mask_and_is_causal_go_together(kind: str, p: float):
    """As on PyTorch's CPU path: causal from the top left corner, combined with the mask."""
    query, key = torch.randn(1, 2, 4, 3, dtype=torch.float64), torch.randn(1, 2, 6, 3, dtype=torch.float64)
    mask = torch.rand(2, 4, 6) < 0.7 if kind == "bool" else torch.randn(2, 4, 6, dtype=torch.float64)
    mask = mask.requires_grad_() if "learns" in kind else mask
    corner = torch.ones(4, 6, dtype=torch.bool).tril()
    both = mask & corner if kind == "bool" else mask.masked_fill(~corner, -torch.inf)
    torch.testing.assert_close(
        ours(query, key, key, mask, p, is_causal=True), theirs(query, key, key, both).nan_to_num()
    )


@pytest.mark.filterwarnings("ignore:Lower right causal bias")
@pytest.mark.parametrize("made", [(3, 5), (8, 5), (5, 8), (9, 9)])
@pytest.mark.parametrize("variant", [causal_lower_right, causal_upper_left])
def test_a_causal_bias_of_other_lengths_is_refused(variant: Any, made: tuple[int, int]):
    x, words = torch.randn(1, 2, 8, 4), rf"^attn_mask is a causal bias for {made[0]} queries and {made[1]} keys"
    with pytest.raises(ClearheadError, match=words):
        ours(x, x, x, variant(*made))


@pytest.mark.gate
def test_compiled_with_numbers_that_follow_from_the_shape():
    def scaled(function: Any, x: Tensor) -> Tensor:
        return function(x, x, x, is_causal=True, scale=x.shape[-2] ** -0.5)

    compiled = torch.compile(scaled, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (4, 7, 9):
        x = torch.randn(2, length, 4)
        torch.testing.assert_close(compiled(ours, x), scaled(theirs, x))
