"""Attention inside PyTorch: autograd, the operator checks, torch.compile, torch.export, autocast, devices, refusals."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import clearhead as ch
from clearhead import engines
from clearhead.derivatives.arguments import Task
from clearhead.errors import ClearheadError, DtypeError, RuleError
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
    [pytest.param(one, id=name, marks=[pytest.mark.gate] * (name == "output")) for name, one in REQUESTS.items()],
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


def everything(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
    matrix = ch.AttentionMatrix(q, k, causal=True, query_offset=0, window=(3, None), sinks=sinks)
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
            leaves = [normal(2, h, length, 3, grad=True, seed=h) for h in (4, 2, 2)] + [normal(4, grad=True)]
            result = function(*leaves)
            sum(x.square().sum() for x in result if x.is_floating_point()).backward()
            results.append([*result, *(leaf.grad for leaf in leaves)])
        for ours, theirs in zip(*results, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.gate  # this runs a C++ compiler
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a warning of PyTorch itself
def test_compiled_by_the_default_backend():
    q, k, v = qkv(torch.float32, grad=False)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ch.attention(q * 2, k, v).relu()

    assert torch.equal(torch.compile(layer, fullgraph=True)(q, k, v), layer(q, k, v))


def test_an_exported_program_gives_the_same_output():
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, ...]:
            return everything(q, k, v, sinks)

    inputs = (normal(2, 4, 5, 3), normal(2, 2, 5, 3), normal(2, 2, 5, 3), normal(4))
    length = torch.export.Dim("length", min=2, max=99)
    shapes = (*({2: length} for _ in range(3)), {})
    program = torch.export.export(Model(), inputs, dynamic_shapes=shapes)
    more = (normal(2, 4, 9, 3), normal(2, 2, 9, 3), normal(2, 2, 9, 3), normal(4))
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


def test_without_a_graph_the_same_matrix_can_be_read_by_index_and_planned():
    q, k, v = qkv()
    matrix = ch.AttentionMatrix(q, k)
    with torch.no_grad():
        assert torch.equal(matrix[0, 1, 2:], ch.AttentionMatrix(q, k)[0, 1, 2:])
        assert torch.equal(matrix.T[0, 1, 2:], matrix[0, 1].mT[2:])
        assert np.asarray(matrix).shape == matrix.shape
    assert str(ch.plan(q, k, v)) == str(ch.plan(q.detach(), k.detach(), v.detach()))


def test_inputs_are_read_in_place(monkeypatch: pytest.MonkeyPatch):
    """Every array that an engine receives shares memory with the tensor it came from."""
    seen: list[int] = []
    engine = engines.get(ch.plan(*qkv(torch.bfloat16)[:2]).engine)
    rows = engine.rows

    def watched(inputs: Any, want: Any) -> Any:
        seen.extend(x.__array_interface__["data"][0] for x in (inputs.q, inputs.k, inputs.v))
        return rows(inputs, want)

    monkeypatch.setattr(engine, "rows", watched)
    for grad in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            inputs = qkv(dtype, grad=grad)
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_(grad) for x in inputs)
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
        pytest.param(lambda: np.asarray(matrix.T[0]), RuleError, "weights read by index have no derivative"),
    ]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "words"), refusals())
def test_what_a_graph_cannot_have_is_refused(call: Any, error: type[ClearheadError], words: str):
    with pytest.raises(error, match=f"^({words})"):
        call()
