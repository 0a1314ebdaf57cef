"""Ranks of the tests of derivatives over process groups: `sharded_derivatives.py DIRECTORY SCENARIO/WORLD/SEED`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import clearhead as ch
from sharded import METHODS, Problem, close, cut, main, must_raise

Tensors = dict[str, Tensor]
Path = Callable[[Tensors], Tensors]
SEEN = ("logsumexp", "entropy", "distance", "diagonal", "received", "image", "groups")
PARTS = ("sinks", "table")  # of whose gradients each rank has a part


class Moved(Problem):
    """A random problem with a random direction, and random slopes of the ranks' losses by its answers."""

    def __init__(self, rng: np.random.Generator, rank: int, world: int, method: str) -> None:
        super().__init__(rng, rank, world, method)
        x = self.whole
        for entry, length in enumerate(self.rules.get("kv_lengths", ())):  # what no query sees may be any number
            x["k"][entry, :, length:], x["v"][entry, :, length:] = torch.nan, torch.inf
        x |= {name: self.rules.pop(name) for name in ("bias", "sinks") if name in self.rules}
        if "spans" in self.rules:
            x["table"] = self.rules["spans"][2].nan_to_num(0, 0, 0)
        self.along = {name: torch.from_numpy(rng.standard_normal(one.shape)) for name, one in x.items()}
        self.names = [name for name in SEEN if rng.random() < 0.4]
        self.values = bool(rng.random() < 0.5)
        self.some = slice(0, None, 2) if rng.random() < 0.3 else slice(None)
        self.groups = self.labels()
        self.shares = rng.dirichlet(np.ones(world))  # of the ranks in the loss of what is the same on all
        seen = [*self.names, *["seen"] * self.values]
        self.left_out = [[name for name in seen[1:] if rng.random() < 0.3] for _ in range(world)]  # of ranks' losses

    @property
    def what(self) -> str:
        asked = f"{self.names} {self.values} {self.some} without {self.left_out}"
        return f"{super().what} {asked} {sorted(self.whole)}"

    def held(self, whole: Tensors) -> Tensors:
        """This rank's parts of inputs."""
        parts = {name: self.of_keys(x) if name in "kv" else x for name, x in whole.items()}
        return parts | {name: self.of_queries(whole[name]) for name in ("q", "bias") if name in whole}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of an answer."""
        return whole if name in ("image", "groups") else whole[:, :, self.shown(name, self.rank)]

    def shown(self, name: str, rank: int) -> list[int]:
        """Where what a rank has of an answer lies in the whole answer."""
        if name == "received":
            return self.places(slice(None), rank, keys=True)
        return self.places(self.some if name in ("seen", *SEEN) else slice(None), rank)

    def losses(self, whole: Tensors) -> tuple[Tensors, Tensors]:
        """Random slopes of this rank's loss by its answers, and of the sum of all ranks' losses by the whole ones."""
        parts = {}
        for name, x in whole.items():
            kept = [name not in left_out for left_out in self.left_out]
            if name in ("image", "groups"):
                parts[name], whole[name] = x * self.shares[self.rank], x * (self.shares * kept).sum()
                continue
            parts[name] = self.part(name, x)
            for rank in np.flatnonzero(np.logical_not(kept)):
                x[:, :, self.shown(name, int(rank))] = 0
        return parts, whole

    def with_rules(self, rules: dict[str, Any], x: Tensors) -> dict[str, Any]:
        rules = rules | {name: x[name] for name in ("bias", "sinks") if name in x}
        return rules | ({"spans": (*rules["spans"][:2], x["table"])} if "table" in x else {})

    def paths(self, *, matrix: bool) -> tuple[Path, Path]:
        """Attention, or what is asked of its matrix, over shards and in one process."""

        def sharded(x: Tensors) -> Tensors:
            rules = self.place | self.with_rules(self.here, x)
            if not matrix:
                return {"output": ch.distributed.attention(x["q"], x["k"], x["v"], **rules)}
            A = ch.distributed.ShardedAttentionMatrix(x["q"], x["k"], **rules)
            answers = self.looked(A, x["v"], self.groups[1])
            return {name: y for name, y in answers.items() if name not in self.left_out[self.rank]}

        def alone(x: Tensors) -> Tensors:
            rules = self.with_rules(self.rules, x)
            if not matrix:
                return {"output": ch.attention(x["q"], x["k"], x["v"], **rules)}
            return self.looked(ch.AttentionMatrix(x["q"], x["k"], **rules), x["v"], self.groups[0])

        return sharded, alone

    def looked(self, A: Any, v: Tensor, labels: tuple[Tensor, ...]) -> Tensors:
        """A product and some statistics, by name; what an empty row has no number for is 0."""
        asked = {name: {"image": (3, 4), "groups": labels}.get(name, True) for name in self.names}
        seen = A.observe(v if self.values else None, queries=self.some, **asked)
        answers = {name: getattr(seen, name).nan_to_num(0, 0, 0) for name in self.names}
        return answers | {"product": A @ (v + 1)} | ({"seen": seen.output} if self.values else {})

    def same(self, seen: Tensors, expected: Tensors, what: str) -> None:
        """Compare this rank's part of inputs' gradients with that of the whole; of PARTS the ranks' sum."""
        for name, truth in self.held(expected).items():
            x = seen[name].detach().clone()
            if name in PARTS:
                dist.all_reduce(x)
            np.testing.assert_allclose(x, truth.detach(), rtol=1e-7, atol=1e-8, err_msg=f"{self.what} {what} {name}")


def leaves(x: Tensors) -> Tensors:
    return {name: one.detach().clone().requires_grad_() for name, one in x.items()}


def curved(answers: Tensors, up: Tensors) -> Tensor:
    """A loss of answers that is not linear in them."""
    each = [(x.sin() * up[name]).sum() for name, x in answers.items()]
    return sum(each[1:], each[0])


def penalty(f: Path, x: Tensors, up: Tensors, along: Tensors) -> tuple[Tensors, Tensors]:
    """The gradients of a curved loss, and those of a loss of these gradients; of PARTS it is linear."""
    x = leaves(x)
    first = dict(zip(x, torch.autograd.grad(curved(f(x), up), [*x.values()], create_graph=True), strict=True))
    parts = [(g * along[name] + (0 if name in PARTS else g.cos())).sum() for name, g in first.items()]
    second = torch.autograd.grad(sum(parts[1:], parts[0]), [*x.values()])
    return first, dict(zip(x, second, strict=True))


def of_dual(f: Path, x: Tensors, up: Callable[[Tensors], Tensors], along: Tensors) -> tuple[Tensors, Tensors, Tensors]:
    """The answers and their tangents, and the gradients of a loss of both."""
    x = leaves(x)
    with forward_ad.dual_level():
        duals = f({name: forward_ad.make_dual(x[name], along[name]) for name in x})
        pairs = {name: forward_ad.unpack_dual(y) for name, y in duals.items()}
        answers, moved = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
        weights = up(answers)
        loss = curved(answers, weights) + curved(moved, weights)
        return answers, moved, dict(zip(x, torch.autograd.grad(loss, [*x.values()]), strict=True))


def gradients(rank: int, world: int, seed: int) -> None:
    """Gradients of attention, of products and of statistics, compared with one process."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    for method in METHODS:
        for matrix in (False, True):
            one = Moved(rng, rank, world, method)
            sharded, alone = one.paths(matrix=matrix)
            x, local = leaves(one.whole), leaves(one.held(one.whole))
            answers = alone(x)
            parts, ups = one.losses({name: torch.randn_like(y) for name, y in answers.items()})
            sides = ((sharded(local), parts, local), (answers, ups, x))
            slopes = [torch.autograd.grad(curved(seen, up), [*side.values()]) for seen, up, side in sides]
            one.same(dict(zip(local, slopes[0], strict=True)), dict(zip(x, slopes[1], strict=True)), "gradient")


def gradient_tangents(f: Path, x: Tensors, up: Tensors, along: Tensors) -> Tensors:
    """The tangents of a curved loss's gradients: forward over reverse."""
    x = leaves(x)
    with forward_ad.dual_level():
        loss = curved(f({name: forward_ad.make_dual(x[name], along[name]) for name in x}), up)
        slopes = torch.autograd.grad(loss, [*x.values()], create_graph=True)
        return {name: forward_ad.unpack_dual(y).tangent for name, y in zip(x, slopes, strict=True)}


def both(rank: int, world: int, seed: int) -> None:
    """Forward mode, second order and their mixture of attention, products and statistics, compared with one process."""
    rng = np.random.default_rng(seed)
    for method in METHODS:
        for matrix in (False, True):
            one = Moved(rng, rank, world, method)
            compare(rng, one, *one.paths(matrix=matrix))


def compare(rng: np.random.Generator, one: Moved, sharded: Path, alone: Path) -> None:
    drawn: list[Tensors] = []  # this rank's slopes, and those of the whole

    def up(answers: Tensors) -> Tensors:
        drawn.extend(one.losses({name: torch.from_numpy(rng.standard_normal(x.shape)) for name, x in answers.items()}))
        return drawn[1]

    answers, moved, expected = of_dual(alone, one.whole, up, one.along)
    parts, ups = drawn
    local, along = one.held(one.whole), one.held(one.along)
    *seen, gradients_ = of_dual(sharded, local, lambda _: parts, along)
    for what, side, truth in (("value", seen[0], answers), ("tangent", seen[1], moved)):
        for name, x in side.items():
            part = one.part(name, truth[name]).detach()
            np.testing.assert_allclose(x.detach(), part, rtol=1e-7, atol=1e-8, err_msg=f"{one.what} {what} of {name}")
    one.same(gradients_, expected, "grad of forward mode")
    pairs = ((sharded, local, parts, along), (alone, one.whole, ups, one.along))
    one.same(*(gradient_tangents(*pair) for pair in pairs), "forward mode of gradient")
    if one.method == "merge" and "table" in local:
        must_raise(lambda: penalty(*pairs[0]), "has no derivative by method='merge'")
        dist.barrier()
        return
    firsts, seconds = zip(*(penalty(*pair) for pair in pairs), strict=True)
    one.same(*firsts, "gradient")
    one.same(*seconds, "gradient penalty")


def differing(rank: int, world: int, seed: int) -> None:
    """All ranks must give tangents of the same arguments; each is told which rank differs."""
    rng = np.random.default_rng(seed)
    x = {name: torch.from_numpy(rng.standard_normal((1, world, 4, 3))) for name in "qkv"}
    for method in METHODS:
        with forward_ad.dual_level():
            moving = {name: forward_ad.make_dual(x[name], x[name].cos()) for name in ("qv" if rank == 1 else "q")}
            call = lambda: ch.distributed.attention(*(x | moving).values(), method=method)  # noqa: B023, E731
            must_raise(call, "rank 1 has tangents ['q', 'v'], but rank 0 has ['q']")
        dist.barrier()


WAYS: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x, u, _: torch.func.jvp(f, (x,), (u,))[1],
    "grad": lambda f, x, _, up: torch.func.grad(loss_of(f, up))(x),
    "jvp of grad": lambda f, x, u, up: torch.func.jvp(torch.func.grad(loss_of(f, up)), (x,), (u,))[1],
    "grad of jvp": lambda f, x, u, up: torch.func.grad(loss_of(lambda y: torch.func.jvp(f, (y,), (u,))[1], up))(x),
    "hvp": lambda f, x, u, up: torch.autograd.functional.hvp(loss_of(f, up), x, u)[1],
    "jvp by two derivatives": lambda f, x, u, _: torch.autograd.functional.jvp(f, x, u)[1],
    "many gradients": lambda f, x, u, up: many(f, x, torch.stack([u, up])),
}


def loss_of(f: Callable[[Tensor], Tensor], up: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda y: (f(y).sin() * up).sum()


def many(f: Callable[[Tensor], Tensor], x: Tensor, grads: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (each,) = torch.autograd.grad(f(x), x, grads, is_grads_batched=True)
    return each.movedim(0, 1).flatten(0, 1)


def ways(rank: int, world: int, seed: int) -> None:
    """The ways to ask PyTorch for a derivative."""
    rng, sizes = np.random.default_rng(seed), [5 + other for other in range(world)]
    x, u, up = (torch.from_numpy(rng.standard_normal((1, world, sum(sizes), 4))) for _ in "xuv")
    local = [cut(one, 2, sizes, rank) for one in (x, u, up)]
    for method in METHODS:
        for name, way in WAYS.items():
            seen = way(lambda y: ch.distributed.attention(y, y, y, causal=True, method=method), *local)  # noqa: B023
            truth = way(lambda y: ch.attention(y, y, y, causal=True), x, u, up)
            close(seen, cut(truth, 2, sizes, rank), f"{method} {name}")


def narrow(rank: int, world: int, seed: int) -> None:
    """The error of one process in narrow dtypes, against float64."""
    rng, sizes = np.random.default_rng(seed), [60 + other for other in range(world)]
    wide = [torch.from_numpy(rng.standard_normal((1, 8, sum(sizes), 16))) for _ in range(6)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = [x.to(dtype) for x in wide]
        local = [cut(x, 2, sizes, rank) for x in whole]
        truth, alone = (
            cut(torch.func.jvp(ch.attention, tuple(x[:3]), tuple(x[3:]))[1].double(), 2, sizes, rank)
            for x in ([one.double() for one in whole], whole)
        )
        for method in METHODS:
            call = lambda *x: ch.distributed.attention(*x, method=method)  # noqa: B023, E731
            seen = torch.func.jvp(call, tuple(local[:3]), tuple(local[3:]))[1]
            assert seen.dtype == dtype
            errors = [(x.double() - truth).square().mean().sqrt() for x in (seen, alone)]
            assert errors[0] <= 1.5 * errors[1], (method, dtype, errors)


if __name__ == "__main__":
    main()
