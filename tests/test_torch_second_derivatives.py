"""Second derivatives and forward mode are refused on every path; everything else works as before."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch.autograd import functional as F

import clearhead as ch
import clearhead.nn
import clearhead.torch
from clearhead.errors import DerivativeError
from clearhead.ops.torch_arguments import Given, Options

X = torch.randn(1, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
torch.manual_seed(0)
LAYER = clearhead.nn.MultiHeadAttention(4, 2, dtype=torch.float64, sinks=True, rotary=10.0)
DROPPING = clearhead.nn.MultiHeadAttention(4, 2, dtype=torch.float64, dropout=0.5).train()
LABELS = torch.tensor([0, 1, 0, -1])
sdpa = clearhead.torch.scaled_dot_product_attention
operators = torch.ops.clearhead


def observed(name: str, asked: Any = True) -> Callable[[Tensor], Tensor]:
    def answer(x: Tensor) -> Tensor:
        seen = getattr(ch.AttentionMatrix(x, x).observe(**{name: asked}), name)
        return seen.weights if name == "top" else seen

    return answer


PATHS: dict[str, Callable[[Tensor], Tensor]] = {
    "attention": lambda x: ch.attention(x, x, x, causal=True),
    "a bias alone": lambda x: ch.attention(X, X, X, bias=x),
    "sinks alone": lambda x: ch.attention(X, X, X, sinks=x[0, :, 0, 0]),
    "values alone": lambda x: ch.attention(X, X, x),
    "A @ v": lambda x: ch.AttentionMatrix(x, x) @ x,
    "A.T @ g": lambda x: ch.AttentionMatrix(x, x).T @ x,
    **{name: observed(name) for name in ("logsumexp", "max_logit", "entropy", "distance", "received", "peak")},
    "top": observed("top", 2),
    "image": observed("image", (2, 3)),
    "groups": observed("groups", (LABELS, LABELS)),
    "operator": lambda x: operators.observe(x, x, x, *Given(), *Options("output logsumexp"))[0],
    "transposed operator": lambda x: operators.transposed(x, x, x, *Given())[0],
    "drop-in": lambda x: sdpa(x, x, x, is_causal=True),
    "drop-in, float mask": lambda x: sdpa(X, X, X, attn_mask=x),
    "drop-in, dropout": lambda x: sdpa(x, x, x, dropout_p=0.5),
    "layer": lambda x: LAYER(x[0]),
    "layer, dropout": lambda x: DROPPING(x[0]),
}
WAYS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "hessian": lambda f: F.hessian(lambda x: f(x).square().sum(), X),
    "hvp of what is linear": lambda f: F.hvp(lambda x: f(x).sum(), X, X),
    "vhp": lambda f: F.vhp(lambda x: f(x).sum(), X, X),
    "jvp by two derivatives": lambda f: F.jvp(f, X, X),
    "gradient penalty": lambda f: penalty(f),
    "a step of MAML": lambda f: maml(f),
    "torch.func.grad twice": lambda f: torch.func.grad(
        lambda x: torch.func.grad(lambda y: f(y).sum())(x).square().sum()
    )(X),
}


def penalty(f: Callable[[Tensor], Tensor]) -> None:
    """A loss of the gradient by the input, and the gradient of that loss by an earlier weight."""
    x, w = X.clone().requires_grad_(), torch.eye(4, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(f(x @ w).sum(), x, create_graph=True)
    g.square().sum().backward()


def maml(f: Callable[[Tensor], Tensor]) -> None:
    """The loss after a training step, and its gradient by the weights before the step."""
    w = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(w).sum(), w, create_graph=True)
    torch.autograd.grad(f(w - 0.1 * g).sum(), w)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_second_derivative_is_refused_every_time(
    path: Callable[[Tensor], Tensor], way: Callable[[Callable[[Tensor], Tensor]], Any], request: Any
):
    directly = "operator" in request.node.name and "func" in request.node.name
    refused = RuntimeError if directly else DerivativeError  # PyTorch itself refuses operators in torch.func.grad
    with pytest.raises(refused, match=r"setup_context" if directly else r"^attention has no second derivative here"):
        way(path)


@pytest.mark.parametrize("way", ["hvp of what is linear", "gradient penalty", "a step of MAML"])
def test_a_second_derivative_of_a_compiled_function_is_refused(way: str):
    compiled = torch.compile(PATHS["attention"], fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"second derivative|double backward"):
        WAYS[way](compiled)


@pytest.mark.parametrize("name", [name for name in PATHS if "dropout" not in name])
def test_a_first_derivative_with_a_graph_is_the_usual_one(name: str):
    path, x = PATHS[name], X.clone().requires_grad_()
    answer = path(x)
    (usual,) = torch.autograd.grad(answer.square().sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(answer.square().sum(), x, create_graph=True)
    assert torch.equal(usual, again)
    assert again.requires_grad
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)  # parts after attention can be differentiated again
    (by_w,) = torch.autograd.grad((answer * w**3).sum(), w, create_graph=True)
    (twice,) = torch.autograd.grad(by_w, w)
    torch.testing.assert_close(twice, 12 * answer.detach().sum())


def test_only_paths_through_the_gradient_are_refused():
    x, y = X.clone().requires_grad_(), X.clone().requires_grad_()
    loss = ch.attention(x, x, x).sum() + (y**3).sum()
    by_x, by_y = torch.autograd.grad(loss, (x, y), create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(by_y.sum(), y)[0], 6 * y.detach())
    with pytest.raises(DerivativeError):
        torch.autograd.grad(by_x.sum(), x)


torchs_own = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # it imports a module that it deprecates itself


@torchs_own
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", [name for name in PATHS if "operator" not in name])
def test_forward_mode_is_refused(name: str, *, grad: bool):
    path = PATHS[name]
    with forward_mode.dual_level(), pytest.raises(DerivativeError, match="carries a tangent"):
        path(forward_mode.make_dual(X.clone().requires_grad_(grad), X))
    with pytest.raises(DerivativeError, match="carries a tangent"):
        torch.func.jvp(path, (X,), (X,))
    if "dropout" not in name:  # PyTorch itself refuses that
        with pytest.raises(DerivativeError, match="carries a tangent"):
            torch.func.jacfwd(path)(X)


@torchs_own
@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks"])
def test_a_tangent_of_any_argument_is_named(name: str):
    given = {"q": X, "k": X, "v": X, "bias": X, "sinks": X[0, :, 0, 0]}
    with forward_mode.dual_level():
        given[name] = forward_mode.make_dual(given[name], given[name])
        with pytest.raises(DerivativeError, match=f"^{name} carries a tangent"):
            ch.attention(**given)  # type: ignore[arg-type]
        plain = {each: x.detach().clone() for each, x in given.items()}
        assert ch.attention(**plain).shape == X.shape  # type: ignore[arg-type]
