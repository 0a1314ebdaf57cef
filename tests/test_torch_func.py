"""Attention inside torch.func and on PyTorch's special tensors: correct, or refused with a library error."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call, grad, jacrev, vmap

import clearhead as ch
import clearhead.nn
from clearhead.errors import ClearheadError, DtypeError
from clearhead.torch import scaled_dot_product_attention as sdpa
from composed import by_math
from test_torch_op import normal

X = normal(3, 2, 4, 5)
MASK = normal(3, 4, 4, seed=1)


def loss(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    return lambda q, *rest: function(q, q, q, *rest, **options).square().sum()


TRANSFORMED: dict[str, Callable[[Any], Any]] = {  # beside those of composed.py
    "vmap over some, along any axis": lambda f: vmap(f, (0, None, 1), 2)(X, X[0], X.transpose(0, 1)),
    "vmap of vmap": lambda f: vmap(vmap(f))(X, X, X),
    "vmap over masks": lambda f: vmap(lambda m: f(X[0], X[0], X[0], m))(MASK > 0),
    "gradients of each sample": lambda f: vmap(grad(loss(f)))(X, MASK),
    "vmap of jacrev": lambda f: vmap(jacrev(lambda x: f(x, x, x)))(X[:, :1]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own function in its own transforms
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_torch_func_transforms_of_the_drop_in_equal_those_of_pytorchs(transformed: Callable[[Any], Any]):
    torch.testing.assert_close(transformed(sdpa), transformed(by_math))


RULES: dict[str, Any] = {
    "bias": normal(3, 2, 4, 4, seed=2), "sinks": normal(3, 2), "query_offset": torch.tensor([0, 1, -1]),
    "kv_lengths": torch.tensor([2, 4, 3]), "mask": normal(3, 2, 4, 4, seed=3) > -1,
    "alibi_slopes": normal(3, 2, seed=4),
}  # fmt: skip


@pytest.mark.parametrize("name", RULES)
def test_vmap_over_every_rule_and_observation(name: str):
    options: dict[str, Any] = {"causal": True, "window": (2, 0)}

    def seen(q: Tensor, k: Tensor, v: Tensor, rule: Any) -> list[Tensor]:
        lead = () if name == "bias" else (None,)  # with batch axes inside the mapped one, and without
        q, k, v = (x[lead] for x in (q, k, v)) if name == "kv_lengths" else (q, k, v)
        matrix = ch.AttentionMatrix(q, k, **options, **{name: rule[None] if name == "kv_lengths" else rule})
        result = matrix.observe(v, entropy=True, received=True, top=2, image=(2, 2), distance=True, peak=True)
        top = result.top
        assert top is not None
        parts = result.output, result.entropy, result.received, top.indices, result.image, result.distance, result.peak
        return [*parts, matrix @ v, matrix.T @ v]

    mapped = vmap(seen)(X, X + 1, X - 1, RULES[name])
    one_by_one = [seen(*each) for each in zip(X, X + 1, X - 1, RULES[name], strict=True)]
    for together, apart in zip(mapped, zip(*one_by_one, strict=True), strict=True):
        assert torch.equal(together, torch.stack(apart))


def test_a_scale_is_one_number_or_one_for_each_call():
    scale, scales = torch.tensor(0.3).double(), torch.tensor([0.3, 0.5, 0.7]).double()
    same = vmap(lambda x: ch.attention(x, x, x, scale=scale))(X)
    each = vmap(lambda x, scale: ch.attention(x, x, x, scale=scale))(X, scales)
    assert torch.equal(same, ch.attention(X, X, X, scale=scale.item()))
    assert torch.equal(each, torch.stack([ch.attention(x, x, x, scale=s) for x, s in zip(X, scales, strict=True)]))


def test_many_gradients_at_once_are_those_one_by_one():
    x = X.clone().requires_grad_()
    output = ch.attention(x, x, x, causal=True)
    inputs = normal(4, *X.shape, seed=5)
    together = torch.autograd.grad(output, x, inputs, is_grads_batched=True, retain_graph=True)[0]
    apart = [torch.autograd.grad(output, x, each, retain_graph=True)[0] for each in inputs]
    assert torch.equal(together, torch.stack(apart))


def test_gradients_of_each_sample_through_a_layer():
    layer = clearhead.nn.MultiHeadAttention(4, 2, causal=True, rotary=10.0, dtype=torch.float64)
    weights, inputs = dict(layer.named_parameters()), normal(3, 5, 4)

    def one(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(layer, weights, (x[None],)).square().sum()

    result = vmap(grad(one), in_dims=(None, 0))(weights, inputs)
    for place, x in enumerate(inputs):
        layer.zero_grad()
        layer(x[None]).square().sum().backward()
        for name, weight in layer.named_parameters():
            torch.testing.assert_close(result[name][place], weight.grad)


@pytest.mark.gate
def test_vmap_compiled():
    compiled = torch.compile(vmap(lambda x: sdpa(x, x, x)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), by_math(X, X, X))


def test_meta_tensors_give_shapes():
    q, k, v = (normal(2, h, n, d).to("meta") for h, n, d in ((4, 5, 3), (2, 6, 3), (2, 6, 7)))
    output = sdpa(q, k, v, enable_gqa=True)
    assert (output.shape, output.device.type, output.dtype) == ((2, 4, 5, 7), "meta", torch.float64)
    assert ch.AttentionMatrix(q, k).observe(top=2).top.weights.shape == (2, 4, 5, 2)  # type: ignore[union-attr]
    layer = clearhead.nn.MultiHeadAttention(8, 2, device="meta")
    assert layer(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)
    with pytest.raises(DtypeError, match=r"^k is on device cpu but q is on device meta"):
        ch.attention(q, X, v)


class Subclass(Tensor):
    """A user's subclass of Tensor."""


def nested(layout: torch.layout = torch.jagged) -> Tensor:
    return torch.nested.nested_tensor([normal(2, 4, 3), normal(2, 4, 3)], layout=layout)


LEAF = X.clone().requires_grad_()
ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "a nested tensor": (lambda: ch.attention(*(nested() for _ in "qkv")), "q is a nested tensor"),
    "an older nested tensor": (lambda: ch.attention(*(nested(torch.strided) for _ in "qkv")), "q is a nested tensor"),
    "nested in the drop-in": (lambda: sdpa(*(nested() for _ in "qkv")), "query is a nested tensor"),
    "nested keys": (lambda: ch.attention(X, nested(), X), "k is a nested tensor"),
    "torch.jit.trace": (lambda: traced(lambda x: ch.attention(x, x, x)), "torch.jit.trace would record"),
    "torch.jit.trace of the drop-in": (lambda: traced(lambda x: sdpa(x, x, x)), "torch.jit.trace would record"),
    "a trace with a graph": (lambda: traced(lambda x: ch.attention(x, x, x), LEAF), "torch.jit.trace would record"),
    "a trace under vmap": (lambda: vmap(lambda x: ch.trace(x, x, x).output)(X), "q is inside torch.func"),
    "a masked tensor": (
        lambda: ch.attention(*(masked() for _ in "qkv")),
        "q is a masked tensor, and a mask of its own is not read here",
    ),
}  # fmt: skip


def traced(function: Callable[[Tensor], Tensor], x: Tensor = X) -> Any:
    return torch.jit.trace(function, (x,), check_trace=False)


def masked() -> Any:
    from torch.masked import masked_tensor

    return masked_tensor(X, X > 0)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.filterwarnings("ignore:.*MaskedTensors is in prototype stage")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("call", "words"), ODD.values(), ids=ODD)
def test_unsupported_tensors_are_refused_by_name(call: Callable[[], Any], words: str):
    with pytest.raises(ClearheadError, match=f"^{words}"):
        call()


def test_a_tensor_subclass_is_accepted():
    x = X.as_subclass(Subclass)
    for result in (ch.attention(x, x, x), sdpa(x, x, x), ch.AttentionMatrix(x, x) @ x):
        torch.testing.assert_close(result.as_subclass(Tensor), sdpa(X, X, X))


def test_an_object_that_looks_like_a_jax_tracer_is_named(monkeypatch: pytest.MonkeyPatch):
    tracer = type("Tracer", (), {"shape": (2, 3)})
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(core=SimpleNamespace(Tracer=tracer)))  # type: ignore[arg-type]
    with pytest.raises(DtypeError, match=r"^q is traced by JAX"):
        ch.attention(tracer(), tracer(), tracer())
