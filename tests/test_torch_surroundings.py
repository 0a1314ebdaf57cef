"""Derivatives among PyTorch's other tools: checks, compilers, saved tensors, autocast, maps over heads; examples."""

import sys
from collections.abc import Callable
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jvp, vjp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import clearhead as ch
from clearhead import engines
from clearhead.errors import DerivativeError, DtypeError
from composed import by_math
from error_texts import passes_of
from problems import of_tiers
from seeds import fresh

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch imports what it deprecates
Call = Callable[..., Any]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.from_numpy(np.asarray(fresh().standard_normal(shape))).to(dtype)


def attend(x: Tensor) -> Tensor:
    return ch.attention(x, x, x, causal=True)


def plain(x: Tensor) -> Tensor:
    return by_math(x, x, x, is_causal=True)


def second(f: Call, x: Tensor, around: Call = lambda f, x: f(x)) -> Tensor:
    """The gradient of a gradient penalty."""
    x = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(around(f, x).square().sum(), x, create_graph=True)
    return torch.autograd.grad(first.square().sum(), x)[0]


HEADS: dict[str, dict[str, tuple[int, ...]]] = {
    "one head": {"q": (3, 2), "k": (4, 2), "v": (4, 3), "bias": (3, 4), "sinks": (1,), "alibi_slopes": (1,)},
    "a head without an axis": {"q": (3, 2), "k": (4, 2), "v": (4, 3), "bias": (4,), "sinks": (), "alibi_slopes": ()},
    "heads": {
        "q": (4, 3, 2), "k": (2, 4, 2), "v": (2, 4, 3), "bias": (4, 1, 4), "sinks": (4,), "alibi_slopes": (4,),
        "scale": (4,),
    },
    "more axes": {
        "q": (2, 1, 4, 3, 2), "k": (2, 1, 2, 4, 2), "v": (2, 1, 2, 4, 3), "bias": (1, 4, 3, 4), "sinks": (4,),
        "alibi_slopes": (4,), "scale": (4,),
    },
}  # fmt: skip
EVERY = ("q", "k", "v", "bias", "sinks", "alibi_slopes", "scale")


MAPPED = [("scale",), ("q",), ("sinks",), ("alibi_slopes",), ("bias", "sinks"), EVERY]
MAPPED += [("k", "bias"), ("bias",), ("v",), ("q", "k", "v", "bias")]


@pytest.mark.parametrize("mapped", of_tiers(MAPPED[:2], MAPPED[2:], every=2), ids=str)
@pytest.mark.parametrize("shapes", HEADS.values(), ids=HEADS)
def test_mapped_numbers_of_heads_give_the_bits_of_single_calls(
    shapes: dict[str, tuple[int, ...]], mapped: tuple[str, ...]
):
    mapped = tuple(name for name in mapped if name in shapes) or ("sinks",)
    inputs = {name: normal(*((3,) if name in mapped else ()), *shape).float() for name, shape in shapes.items()}
    axes = {name: 0 if name in mapped else None for name in inputs}

    def answers(each: dict[str, Tensor]) -> tuple[Any, ...]:
        rest = {name: x for name, x in each.items() if name not in ("q", "k", "v")}
        matrix = ch.AttentionMatrix(each["q"], each["k"], **rest)
        seen = matrix.observe(each["v"], entropy=True, received=True)
        return seen.output, seen.entropy, seen.received, matrix.T @ each["q"]

    def one(each: dict[str, Tensor]) -> Any:
        """The results, their gradients, and these along a direction."""
        moving = {name: x for name, x in each.items() if name not in ("alibi_slopes", "scale")}

        def gradients(moving: dict[str, Tensor]) -> Any:
            result, back = vjp(lambda moving: answers({**each, **moving}), moving)
            return result, back(result)[0]

        return jvp(gradients, (moving,), (moving,))

    apart = [one({name: x[place] if name in mapped else x for name, x in inputs.items()}) for place in range(3)]
    together = vmap(one, (axes,))(inputs)
    leaves = torch.utils._pytree.tree_leaves
    for place, each in enumerate(apart):
        for ours, theirs in zip(leaves(together[0]), leaves(each[0]), strict=True):
            assert torch.equal(ours[place], theirs)
        for ours, theirs in zip(leaves(together[1]), leaves(each[1]), strict=True):
            torch.testing.assert_close(ours[place], theirs)


@pytest.mark.parametrize("shapes", HEADS.values(), ids=HEADS)
def test_a_mapped_axis_is_computed_in_one_call(shapes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch):
    x = [normal(3, *shapes[name]) for name in ("q", "k", "v", "bias")]
    sinks = normal(*shapes["sinks"])

    def gradients(*x: Tensor) -> Any:
        results, back = vjp(lambda q, k, v, bias: ch.attention(q, k, v, bias=bias, sinks=sinks), *x)
        return back(results)

    calls = passes_of(engines.get("native"), monkeypatch, "rows", "gradients")
    vmap(gradients)(*x)
    assert calls == ["rows", "gradients"]


def test_no_calls_have_no_results():
    x, sinks = torch.empty(0, 2, 4, 3), torch.empty(0, 2)
    assert vmap(lambda x, s: ch.attention(x, x, x, sinks=s))(x, sinks).shape == x.shape


def saved_elsewhere(f: Call, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return f(x)


AROUND: dict[str, Call] = {
    "a checkpoint": lambda f, x: checkpoint(f, x, use_reentrant=False),
    "save_on_cpu": saved_elsewhere,
}


@pytest.mark.parametrize("around", AROUND)
def test_second_derivatives_through(around: str):
    x = normal(1, 2, 4, 3)
    torch.testing.assert_close(second(attend, x, AROUND[around]), second(plain, x))


def test_an_input_changed_in_place_is_noticed():
    q, k, v = (normal(1, 2, 6, 4).requires_grad_() for _ in "qkv")
    bias = normal(6, 6)
    for changed in (k, bias):
        output = ch.attention(q, k, v, bias=bias)
        with torch.no_grad():
            changed.add_(1.0)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_tangents_of_any_strides_and_none_that_are_complex():
    x = normal(1, 2, 4, 3)
    for along in (normal(1, 4, 3, 2).permute(0, 3, 1, 2), normal(1, 1, 1, 1).expand(1, 2, 4, 3), torch._neg_view(x)):
        torch.testing.assert_close(jvp(attend, (x,), (along,))[1], jvp(plain, (x,), (along,))[1])
    with pytest.raises(DtypeError, match=r"^q is complex64"):
        jvp(attend, (x.cfloat(),), (x.cfloat(),))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_second_derivatives_under_autocast(dtype: torch.dtype):
    x = normal(1, 2, 8, 8).float()

    def cast(f: Call, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return f(x).float()

    result, truth = second(attend, x, cast), second(plain, x.double())
    assert (result - truth).norm() <= 20 * torch.finfo(dtype).eps * truth.norm()


@pytest.mark.parametrize("shape", [(1, 2, 0, 4), (0, 2, 4, 4), (1, 2, 4, 0)], ids=str)
def test_derivatives_of_nothing(shape: tuple[int, ...]):
    x = torch.empty(shape, dtype=torch.float64)
    for result in (jvp(attend, (x,), (x,))[1], grad(lambda x: jvp(attend, (x,), (x,))[1].sum())(x), second(attend, x)):
        assert result.shape == x.shape


TRANSFORMED: dict[str, Call] = {
    "jvp": lambda x: jvp(attend, (x,), (x + 1,))[1],
    "grad": grad(lambda x: attend(x).square().sum()),
    "grad of grad": grad(lambda x: grad(lambda x: attend(x).square().sum())(x).square().sum()),
    "jacfwd": jacfwd(attend),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch tries to compile parts of what it left uncompiled
@pytest.mark.parametrize("name", of_tiers([], TRANSFORMED, every=2))
def test_a_compiler_leaves_transforms_alone_or_refuses(name: str):
    torch.compiler.reset()
    x = normal(1, 2, 4, 3)
    torch.testing.assert_close(torch.compile(TRANSFORMED[name], backend="aot_eager")(x), TRANSFORMED[name](x))
    torch.compiler.reset()  # forgets what was left uncompiled
    with pytest.raises(Exception, match="a compiler traces attention inside torch"):
        torch.compile(TRANSFORMED[name], backend="aot_eager", fullgraph=True)(x)


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_compiled_attention_never_drops_a_tangent():
    """PyTorch decides whether it runs what it compiled, which refuses, or runs the function anew, uncompiled."""
    torch.compiler.reset()
    x, compiled = normal(1, 2, 4, 3), torch.compile(attend, backend="aot_eager")
    torch.testing.assert_close(compiled(x), attend(x))
    with forward_ad.dual_level():
        moving = forward_ad.make_dual(x, normal(1, 2, 4, 3))
        try:
            result = compiled(moving)
        except DerivativeError as error:
            assert "carries a tangent" in str(error)  # noqa: PT017
        else:
            torch.testing.assert_close(forward_ad.unpack_dual(result), forward_ad.unpack_dual(attend(moving)))


def test_make_fx_records_attention_and_refuses_its_transforms():
    x, other = normal(1, 2, 4, 3), normal(1, 2, 4, 3)
    torch.testing.assert_close(make_fx(attend)(x)(other), attend(other))
    for name in ("jvp", "grad"):
        with pytest.raises(DerivativeError, match=r"^a compiler traces attention inside torch"):
            make_fx(TRANSFORMED[name])(x)
    with pytest.raises(DerivativeError, match=r"^a compiler traces attention inside torch"):
        torch.func.linearize(attend, x)


FOLDER = Path(__file__).parents[1] / "examples/derivatives"


def example(name: str) -> Any:
    result = util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert result is not None
    assert result.loader is not None
    module = util.module_from_spec(result)
    result.loader.exec_module(module)
    return module


@pytest.mark.gate
@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py")))
def test_the_example_runs(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "argv", [name, "--steps", "4"])
    example(name).main()
    assert "nan" not in capsys.readouterr().out
