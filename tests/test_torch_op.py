"""Attention inside PyTorch: autograd, operator checks, compilers, export, autocast, devices, torch.func, refusals."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import jacrev, vmap
from torch.nn import functional as F

import clearhead as ch
import clearhead.nn
from clearhead import engines
from clearhead.derivatives.arguments import Task
from clearhead.engines import native
from clearhead.errors import ClearheadError, DtypeError, RuleError
from clearhead.torch import scaled_dot_product_attention as sdpa
from composed import by_math
from problems import of_tiers

F64 = torch.float64


def normal(*shape: int, dtype: torch.dtype = F64, grad: bool = False, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(hash((seed, *shape)) % 2**31)
    return torch.randn(shape, generator=generator, dtype=F64).to(dtype).requires_grad_(grad)


def qkv(dtype: torch.dtype = F64, *, grad: bool = True, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Two batches, grouped heads, five queries, six keys."""
    shapes = (2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 2)
    q, k, v = (normal(*shape, dtype=dtype, grad=grad, seed=seed + i) for i, shape in enumerate(shapes))
    return q, k, v


@pytest.mark.parametrize("queries", [slice(2, 3), slice(-2, None), slice(None, None, -2), slice(4, 1, -1), slice(0, 0)])
@pytest.mark.parametrize("shape", [(6,), (1, 6), (5, 1), (2, 1, 5, 6), (), (1, 4, 1, 1)])
def test_gradients_of_observations_of_some_queries(queries: slice, shape: tuple[int, ...]):
    q, k, v = qkv()
    bias = normal(*shape, grad=True)

    def losses(seen: Any, place: slice) -> Tensor:
        return (seen.output[:, :, place] ** 2).sum() + (seen.entropy[:, :, place] ** 2).sum()

    leaves, matrix = (q, k, v, bias), ch.AttentionMatrix(q, k, bias=bias)
    result = torch.autograd.grad(losses(matrix.observe(v, entropy=True, queries=queries), slice(None)), leaves)
    rows = list(range(5)[queries])
    expected = torch.autograd.grad(losses(matrix.observe(v, entropy=True), rows), leaves)
    for ours, theirs, leaf in zip(result, expected, leaves, strict=True):
        assert ours.shape == leaf.shape
        torch.testing.assert_close(ours, theirs)


ALL = {
    "logsumexp": True, "max_logit": True, "entropy": True, "distance": True, "top": 2, "received": True, "peak": True,
    "image": (2, 3), "groups": (torch.tensor([0, 1, 0, -1, 2]), torch.tensor([0, 1, 0, -1, 1, 1])),
}  # fmt: skip


def flat(seen: Any) -> list[Tensor]:
    names = ("output", "logsumexp", "max_logit", "entropy", "distance", "received", "peak", "image", "groups")
    return [getattr(seen, name) for name in names if getattr(seen, name) is not None] + list(seen.top or ())


@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("queries", [slice(None), slice(3, 0, -2)])
def test_a_graph_changes_no_bit(dtype: torch.dtype, queries: slice):
    rules = {"alibi_slopes": [0.1, 0.2, 0.3, 0.4], "sinks": np.ones(4), "kv_lengths": [5, 3], "bias": 0.1, "scale": 1}
    kept, plain = (ch.AttentionMatrix(*qkv(dtype, grad=grad)[:2], **rules) for grad in (True, False))
    seen = [matrix.observe(qkv(dtype)[2].detach(), **ALL, queries=queries) for matrix in (kept, plain)]
    for ours, theirs in zip(*(flat(each) for each in seen), strict=True):
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert (seen[0].queries, seen[0].keys) == (seen[1].queries, seen[1].keys)
    assert seen[0].logsumexp.requires_grad
    v, g = qkv(dtype, grad=False)[2], normal(2, 4, 5, 3, dtype=dtype)
    assert torch.equal(kept @ v, plain @ v)
    assert torch.equal(kept.T @ g, plain.T @ g)
    assert (kept.shape, kept.ndim, len(kept), kept.dtype) == (plain.shape, plain.ndim, len(plain), plain.dtype)
    assert (repr(kept), repr(kept.T), kept.T.shape) == (repr(plain), repr(plain.T), plain.T.shape)


REQUESTS = {
    "output": Task("output largest log_sum"),
    "statistics": Task(
        "output largest log_sum entropy received top_weights top_indices image", top=2, height=2, width=3
    ),
    "some": Task("output largest log_sum entropy", start=1, stop=4, step=2),
}


def check_operator(task: Task, **x: Tensor) -> None:
    torch.library.opcheck(torch.ops.clearhead.observe.default, ([*x.values()], " ".join(x), *task))


@pytest.mark.parametrize(
    "asked",
    [pytest.param(one, id=name, marks=[pytest.mark.gate] * (name != "some")) for name, one in REQUESTS.items()],
)
def test_the_operator_passes_opcheck(asked: Task):
    grad = asked.step is None  # bfloat16 gradients differ by a rounding between runs that sum in different orders
    dtype = torch.bfloat16 if asked.step else torch.float32
    bias, sinks = normal(5, 1, dtype=dtype, grad=grad), normal(4, grad=grad)
    q, k, v = qkv(dtype, grad=grad)
    check_operator(asked._replace(causal=True, query_offset=1), q=q, k=k, v=v, bias=bias, sinks=sinks)


def test_the_operator_passes_opcheck_for_products_and_gradients():
    q, k, v = qkv()
    check_operator(Task("product"), q=q, k=k, g=normal(2, 4, 5, 2, grad=True), bias=normal(6, grad=True))
    q, k, v, bias = (x.detach() for x in (q, k, v, normal(6)))
    seen = ch.AttentionMatrix(q, k, bias=bias).observe(v, logsumexp=True)
    known = {"known:largest": seen.largest, "known:log_sum": seen.log_sum, "known:output": seen.output}
    by = {"by:output": torch.ones_like(seen.output)}
    check_operator(Task("q k v bias"), q=q, k=k, v=v, bias=bias, **known, **by)


def everything(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, table: Tensor) -> tuple[Tensor, ...]:
    labels = torch.arange(q.shape[2]) // 2 - 1  # the first two have none
    rules: dict[str, Any] = {"sinks": sinks, "spans": (labels, labels, table), "scale": torch.arange(1.0, 5.0)}
    matrix = ch.AttentionMatrix(q, k, causal=True, query_offset=0, window=(3, None), **rules)
    seen = matrix.observe(v, entropy=True, received=True, logsumexp=True, top=2)
    assert seen.top is not None
    mixed = matrix.T.__matmul__(q)  # a compiler traces `@` of tensors only
    return seen.output, seen.entropy, seen.received, seen.top.indices, mixed, ch.attention(q, k, v, scale=0.5)


@pytest.mark.parametrize("dynamic", of_tiers((), (False, True)))
def test_compiled_forward_and_backward(*, dynamic: bool):
    compiled = torch.compile(everything, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for length in (5, 7) if dynamic else (5,):
        results = []
        for function in (everything, compiled):
            leaves = [normal(2, h, length, 3, grad=True, seed=h) for h in (4, 2, 2)]
            leaves += [normal(4, grad=True), normal(4, 3, 3, grad=True)]
            result = function(*leaves)
            sum(x.square().sum() for x in result if x.is_floating_point()).backward()
            results.append([*result, *(leaf.grad for leaf in leaves)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of PyTorch itself
def test_compiled_by_the_default_backend():
    q, k, v = qkv(torch.float32, grad=False)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:  # of products: others wait for a C++ compiler
        out = ch.attention(q @ q.mT @ q, k, v)
        return out @ out.mT

    assert torch.equal(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v))


def test_an_exported_program_gives_the_same_output():
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, table: Tensor) -> tuple[Tensor, ...]:
            return everything(q, k, v, sinks, table)

    inputs = (normal(2, 4, 5, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 3), normal(4), normal(4, 9, 9))
    length = torch.export.Dim("length", min=2, max=99)
    shapes = (*({2: length} for _ in range(3)), {}, {})
    program = torch.export.export(Model(), inputs, dynamic_shapes=shapes)
    more = (normal(2, 4, 9, 3), normal(2, 2, 9, 3), normal(2, 2, 9, 3), *inputs[3:])
    for passed in (inputs, more):
        for ours, theirs in zip(program.module()(*passed), everything(*passed), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, F64])
def test_autocast_acts_as_in_pytorch(dtype: torch.dtype, *, grad: bool):
    q, k, v = (normal(1, 2, 5, 4, dtype=dtype, grad=grad, seed=i) for i in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        theirs, ours = F.scaled_dot_product_attention(q, k, v), ch.attention(q, k, v)
        assert ours.dtype == theirs.dtype == (F64 if dtype == F64 else torch.bfloat16)
        mixed = ch.AttentionMatrix(q, k.bfloat16() if dtype != F64 else k)
        assert torch.equal(mixed @ v, ours)
        assert torch.equal(mixed.observe(v).output, ours)
        assert ch.plan(q, k, v).engine
    if grad:
        ours.float().sum().backward()
        assert q.grad is not None
        assert q.grad.dtype == dtype
    with torch.autocast("cpu", torch.bfloat16, enabled=False):
        assert ch.attention(q, k, v).dtype == dtype


def test_without_a_graph_the_same_matrix_is_read_and_planned():
    q, k, v = qkv()
    matrix = ch.AttentionMatrix(q, k)
    with torch.no_grad():
        assert torch.equal(matrix[0, 1, 2:], ch.AttentionMatrix(q, k)[0, 1, 2:])
        assert np.asarray(matrix).shape == matrix.shape
    assert str(ch.plan(q, k, v)) == str(ch.plan(q.detach(), k.detach(), v.detach()))


def test_inputs_are_read_in_place(monkeypatch: pytest.MonkeyPatch):
    """Every array that an engine receives shares memory with the tensor it came from.

    Of shapes that an earlier call had, the kernel would read the tensors themselves, and `rows` nothing.
    """
    seen: list[int] = []
    engine = engines.get(ch.plan(*qkv(torch.bfloat16)[:2]).engine)
    rows = engine.rows

    def watched(inputs: Any, want: Any) -> Any:
        seen.extend(x.__array_interface__["data"][0] for x in (inputs.q, inputs.k, inputs.v))
        return rows(inputs, want)

    monkeypatch.setattr(engine, "rows", watched)
    monkeypatch.setattr(native, "output", lambda *_, **__: None)
    for learns in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = qkv(dtype, grad=learns)
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_(learns) for x in inputs)
            seen.clear()
            ch.AttentionMatrix(q, k) @ v
            assert seen == [x.data_ptr() for x in (q, k, v)]


def refusals() -> list[Any]:
    q, k, v = qkv()
    meta, slopes, matrix = k.to("meta"), normal(4, grad=True), ch.AttentionMatrix(*qkv()[:2])
    return [
        pytest.param(lambda: ch.attention(q, meta, v), DtypeError, "k is on device meta but q is on device cpu"),
        pytest.param(lambda: matrix @ v.to("meta"), DtypeError, "v is on device meta but q is on device cpu"),
        pytest.param(lambda: ch.attention(q, k, v, sinks=slopes.to("meta")), DtypeError, "sinks is on device meta"),
        pytest.param(lambda: ch.attention(q, k, v, alibi_slopes=slopes).sum().backward(), RuleError, "alibi_slopes"),
        pytest.param(lambda: matrix[0], RuleError, "weights read by index have no derivative"),
        pytest.param(lambda: np.asarray(matrix[0]), RuleError, "weights read by index have no derivative"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), refusals())
def test_what_a_graph_cannot_have_is_refused(call: Any, error: type[ClearheadError], words: str):
    with pytest.raises(error, match=f"^({words})"):
        call()


X = normal(3, 2, 4, 5)


TRANSFORMED: dict[str, Callable[[Any], Any]] = {  # beside those of composed.py
    "vmap over some, along any axis": lambda f: vmap(f, (0, None, 1), 2)(X, X[0], X.transpose(0, 1)),
    "vmap of vmap": lambda f: vmap(vmap(f))(X, X, X),
    "vmap of jacrev": lambda f: vmap(jacrev(lambda x: f(x, x, x)))(X[:, :1]),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # PyTorch's own function in its own transforms
@pytest.mark.parametrize("transformed", TRANSFORMED.values(), ids=TRANSFORMED)
def test_transforms_of_the_drop_in_equal_those_of_pytorchs(transformed: Callable[[Any], Any]):
    torch.testing.assert_close(transformed(sdpa), transformed(by_math))


RULES: dict[str, Any] = {
    "bias": normal(3, 2, 4, 4, seed=2), "sinks": normal(3, 2),
    "scale": torch.tensor([0.3, 0.5, 0.7]).double(), "query_offset": torch.tensor([0, 1, -1]),
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


@pytest.mark.gate
def test_vmap_compiled():
    compiled = torch.compile(vmap(lambda x: sdpa(x, x, x)), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(X), by_math(X, X, X))


def test_meta_tensors_give_shapes():
    q, k, v = (normal(2, h, n, d).to("meta") for h, n, d in ((4, 5, 3), (2, 6, 3), (2, 6, 7)))
    some: list[dict[str, Any]] = [{"query_offset": 1, "causal": True}, {"sinks": [1.0] * 4}, {"kv_lengths": [2, 2]}]
    for each in some:
        assert ch.attention(q, k, v, **each).shape == (2, 4, 5, 7)
    output = sdpa(q, k, v, enable_gqa=True)
    assert (output.shape, output.device.type, output.dtype) == ((2, 4, 5, 7), "meta", torch.float64)
    assert ch.AttentionMatrix(q, k).observe(top=2).top.weights.shape == (2, 4, 5, 2)  # type: ignore[union-attr]
    layer = clearhead.nn.MultiHeadAttention(8, 2, device="meta")
    assert layer(torch.empty(2, 3, 8, device="meta")).shape == (2, 3, 8)
    with pytest.raises(DtypeError, match=r"^k is on device cpu but q is on device meta"):
        ch.attention(q, X, v)
    with torch.no_grad(), pytest.raises(RuleError, match="the meta device"):
        ch.AttentionMatrix(q, k)[0]
    with pytest.raises(RuleError, match="the meta device"):
        ch.AttentionMatrix(q, k).observe(groups=([0] * 5, [0] * 6))


class Subclass(Tensor):
    """A user's subclass of Tensor."""


def nested() -> Tensor:
    return torch.nested.nested_tensor([normal(2, 4, 3), normal(2, 4, 3)], layout=torch.jagged)


ODD: dict[str, tuple[Callable[[], Any], str]] = {
    "a nested tensor": (lambda: ch.attention(*(nested() for _ in "qkv")), "q is a nested tensor"),
    "nested in the drop-in": (lambda: sdpa(*(nested() for _ in "qkv")), "query is a nested tensor"),
    "torch.jit.trace": (lambda: traced(lambda x: ch.attention(x, x, x)), "torch.jit.trace would record"),
    "a trace under vmap": (lambda: vmap(lambda x: ch.trace(x, x, x).output)(X), "q is a Tensor whose numbers"),
    "a masked tensor": (lambda: ch.attention(*(masked() for _ in "qkv")), "q is a masked tensor, and its mask is not"),
}  # fmt: skip


def traced(function: Callable[[Tensor], Tensor]) -> Any:
    return torch.jit.trace(function, (X,), check_trace=False)


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
