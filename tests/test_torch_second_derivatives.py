"""Forward mode and second derivatives on every path, against PyTorch through the plain formulas."""

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor
from torch.autograd import functional as F

import clearhead as ch
import clearhead.torch
from clearhead.errors import DerivativeError, RuleError
from composed import COMPOSED
from problems import in_the_gate

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # PyTorch imports what it deprecates
X = torch.randn(1, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
PIXELS = torch.tensor([[0.75, 0.25, 0, 0], [0, 0.5, 0.5, 0], [0, 0, 0.25, 0.75]], dtype=torch.float64)
sdpa = clearhead.torch.scaled_dot_product_attention
Path = Callable[[Tensor], Tensor]


def weights(q: Tensor, k: Tensor, bias: Any = 0.0, *, causal: bool = False) -> Tensor:
    """The plain formula."""
    scores = q @ k.transpose(-1, -2) / 2 + bias
    if causal:
        scores = scores.masked_fill(~torch.ones(4, 4).tril().bool(), -torch.inf)
    return scores.softmax(-1)


def observed(name: str, asked: Any = True) -> Path:
    def answer(x: Tensor) -> Tensor:
        seen = getattr(ch.AttentionMatrix(x, x).observe(**{name: asked}), name)
        return seen.weights if name == "top" else seen

    return answer


PATHS: dict[str, tuple[Path, Path]] = {  # ours, and the plain formula; test_gradients.py has all inputs and statistics
    "attention": (lambda x: ch.attention(x, x, x, causal=True), lambda x: weights(x, x, causal=True) @ x),
    "A @ v for all heads": (lambda x: ch.AttentionMatrix(x, x) @ x[0, 0], lambda x: weights(x, x) @ x[0, 0]),
    "A.T @ g": (lambda x: ch.AttentionMatrix(x, x).T @ x, lambda x: weights(x, x).transpose(-1, -2) @ x),
    "A.T @ g for all heads": (
        lambda x: ch.AttentionMatrix(x, x).T @ x[0, 0, :, 0],
        lambda x: weights(x, x).transpose(-1, -2) @ x[0, 0, :, 0],
    ),
    "entropy": (observed("entropy"), lambda x: -(weights(x, x) * weights(x, x).log()).sum(-1)),
    "image": (
        observed("image", (3, 2)),
        lambda x: PIXELS @ weights(x, x) @ torch.eye(2).double().repeat_interleave(2, 0) / 2,
    ),
    "drop-in, float mask": (lambda x: sdpa(X, X, X, attn_mask=x), lambda x: weights(X, X, x) @ X),
}


def penalty(f: Path) -> Tensor:
    """A loss of the gradient by the input, and the gradient of that loss by an earlier weight."""
    x, w = X.clone().requires_grad_(), torch.eye(4, dtype=torch.float64, requires_grad=True)
    (g,) = torch.autograd.grad(f(x @ w).square().sum(), x, create_graph=True)
    return torch.autograd.grad(g.square().sum(), w)[0]


def maml(f: Path) -> Tensor:
    """The loss after a training step, and its gradient by the weights before the step."""
    w = X.clone().requires_grad_()
    (g,) = torch.autograd.grad(f(w).square().sum(), w, create_graph=True)
    return torch.autograd.grad(f(w - 0.1 * g).sum(), w)[0]


def dual(f: Path) -> Tensor:
    with forward_mode.dual_level():
        return forward_mode.unpack_dual(f(forward_mode.make_dual(X, X + 1))).tangent


def backward_of_dual(f: Path) -> Tensor:
    x = X.clone().requires_grad_()
    with forward_mode.dual_level():
        primal, tangent = forward_mode.unpack_dual(f(forward_mode.make_dual(x, X + 1)))
        return torch.autograd.grad(primal.square().sum() + tangent.square().sum(), x)[0]


BY_FUNC = ("grad of grad", "hessian", "jvp", "jvp of vjp", "vjp of jvp", "jacfwd")  # as torch.func composes them
WAYS: dict[str, Callable[[Path], Any]] = {
    "hvp of what is linear": lambda f: F.hvp(lambda x: f(x).sum(), X, X + 1)[1],
    "gradient penalty": penalty,
    "a step of MAML": maml,
    **{name: lambda f, name=name: COMPOSED[name](f, [X]) for name in BY_FUNC},
    "jacfwd of vmap": lambda f: torch.func.jacfwd(torch.func.vmap(f))(X[None]),
    "grad of jvp": lambda f: torch.func.grad(
        lambda x: torch.func.jvp(f, (x,), (X + 1,))[1].square().sum() + f(x).square().sum()
    )(X),
    "vmap of grad of jvp": lambda f: torch.func.vmap(
        torch.func.grad(lambda x: torch.func.jvp(f, (x,), (X + 1,))[1].square().sum())
    )(torch.stack([X, X - 1])),
    "forward_ad": dual,
    "backward of forward_ad": backward_of_dual,
}


QUICK = ("a step of MAML", "hessian", "vmap of grad of jvp")
EACH = list(product(PATHS, WAYS))  # most of them are slow together
SLOW = [(path, way) for path, way in EACH if path != "attention" and way not in QUICK]


@pytest.mark.parametrize("each", in_the_gate(EACH, *SLOW), ids=str)
def test_every_derivative_of_every_path(each: tuple[str, str]):
    (ours, plain), way = PATHS[each[0]], WAYS[each[1]]
    truth = WAYS["grad of jvp"] if way is backward_of_dual else way  # PyTorch's own softmax fails in it
    torch.testing.assert_close(way(ours), truth(plain), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("way", [WAYS[way] for way in QUICK], ids=QUICK)
@pytest.mark.parametrize(("name", "asked"), [("max_logit", True), ("peak", True), ("top", 2)])
def test_what_jumps_between_keys_has_no_such_derivative(name: str, asked: Any, way: Callable[[Path], Any]):
    with pytest.raises(DerivativeError, match=rf"^{name}.* has no (forward-mode|second) derivative here"):
        way(observed(name, asked))


def by_steps(f: Path) -> Tensor:
    """A fourth derivative in plain autograd."""
    x = X.clone().requires_grad_()
    result = f(x).square().sum()
    for _ in range(4):
        (gradient,) = torch.autograd.grad(result, x, create_graph=True)
        result = gradient.sin().sum()
    return gradient


def third(f: Path) -> Path:
    """The gradient of a number that depends on every entry of the gradient of another such number."""
    grad = torch.func.grad
    return grad(lambda x: grad(lambda y: grad(lambda z: f(z).square().sum())(y).sin().sum())(x).sin().sum())


HIGHER: dict[str, Callable[[Path], Any]] = {
    "grad of grad of grad": lambda f: third(f)(X),
    "jvp of jvp": lambda f: torch.func.jvp(lambda x: torch.func.jvp(f, (x,), (X + 1,))[1], (X,), (X - 1,)),
    "four times in autograd": by_steps,
}


@pytest.mark.parametrize(
    "each",
    in_the_gate(HIGHER_OF := list(product(PATHS, HIGHER)), *[(p, w) for p, w in HIGHER_OF if p != "attention"]),
    ids=str,
)
def test_derivatives_of_third_and_higher_order(each: tuple[str, str]):
    (ours, plain), way = PATHS[each[0]], HIGHER[each[1]]
    torch.testing.assert_close(way(ours), way(plain), rtol=1e-7, atol=1e-9)


@pytest.mark.gate
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # PyTorch's, of any function given no leaf
@pytest.mark.parametrize("way", ["hvp of what is linear", "gradient penalty", "a step of MAML"])
def test_a_second_derivative_of_a_compiled_function_is_refused(way: str):
    compiled = torch.compile(PATHS["attention"][0], fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match=r"second derivative|double backward"):
        WAYS[way](compiled)


@pytest.mark.parametrize("name", PATHS)
def test_a_first_derivative_with_a_graph_is_the_usual_one(name: str):
    path, x = PATHS[name][0], X.clone().requires_grad_()
    answer = path(x)
    (usual,) = torch.autograd.grad(answer.square().sum(), x, retain_graph=True)
    (again,) = torch.autograd.grad(answer.square().sum(), x, create_graph=True)
    assert torch.equal(usual, again)
    assert again.requires_grad
    w = torch.tensor(2.0, dtype=torch.float64, requires_grad=True)  # parts after attention can be differentiated again
    (by_w,) = torch.autograd.grad((answer * w**3).sum(), w, create_graph=True)
    (twice,) = torch.autograd.grad(by_w, w)
    torch.testing.assert_close(twice, 12 * answer.detach().sum())


def test_rules_and_functions_without_a_derivative_are_refused():
    with forward_mode.dual_level(), pytest.raises(DerivativeError, match="carries a tangent"):
        ch.trace(forward_mode.make_dual(X, X), X, X)
    slopes = torch.tensor([0.1, 0.2], dtype=torch.float64)
    with pytest.raises(RuleError, match="alibi_slopes"):
        torch.func.jvp(lambda s: ch.attention(X, X, X, alibi_slopes=s), (slopes,), (slopes,))
