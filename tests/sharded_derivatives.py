"""Ranks of the tests of derivatives over process groups: `sharded_derivatives.py DIRECTORY SCENARIO/WORLD/SEED`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import forward_ad

import clearhead as ch
from sharded import METHODS, close, cut, main, mine, must_raise, problem

Tensors = dict[str, Tensor]
Path = Callable[[Tensors], Tensors]
SEEN = ("logsumexp", "entropy", "distance", "own", "received", "image", "groups")
PARTS = ("sinks", "table")  # of whose gradients each rank has a part


class Problem:
    """A random problem, whole and as this rank's shards, with a random direction."""

    def __init__(self, rng: np.random.Generator, rank: int, world: int, method: str) -> None:
        given, told, self.queries, self.keys = problem(rng, world)
        self.rank, self.method, self.layout = rank, method, str(rng.choice(["contiguous", "zigzag"]))
        for name in ("mask", "bias"):
            if name in told:  # shared by some batch entries and heads
                told[name] = told[name][tuple(slice(0, 1 if rng.random() < 0.4 else None) for _ in "bh")]
        if "kv_lengths" in told:  # what no query sees may be any number
            for at, length in enumerate(told["kv_lengths"]):
                given["k"][at, :, length:], given["v"][at, :, length:] = torch.nan, torch.inf
        given |= {name: told.pop(name) for name in ("bias", "sinks") if name in told}
        if "spans" in told:
            given["table"] = told["spans"][2].nan_to_num(0, 0, 0)
        self.told, self.given = told, given
        self.here = mine(told, self.queries, self.keys, rank, self.layout)
        self.along = {name: torch.from_numpy(rng.standard_normal(x.shape)) for name, x in given.items()}
        self.place: Any = {"method": method, "layout": self.layout, "timeout": 60.0}
        self.names = [name for name in SEEN if rng.random() < 0.4]
        self.values = bool(rng.random() < 0.5)
        self.some = slice(0, None, 2) if rng.random() < 0.3 else slice(None)
        self.labels = [torch.from_numpy(rng.integers(-1, 3, sum(sizes))) for sizes in (self.queries, self.keys)]
        self.shares = rng.dirichlet(np.ones(world))  # of the ranks in the loss of what is the same on all
        seen = [*self.names, *["seen"] * self.values]
        self.left_out = [[name for name in seen[1:] if rng.random() < 0.3] for _ in range(world)]  # of ranks' losses
        asked = f"{self.names} {self.values} {self.some} without {self.left_out}"
        self.what = f"{method} {self.layout} {asked} {sorted(told)} {sorted(given)} {self.queries} {self.keys}"

    def own(self, whole: Tensors) -> Tensors:
        """This rank's parts of inputs."""
        sizes = dict.fromkeys("kv", self.keys) | dict.fromkeys(("q", "bias"), self.queries)
        return {n: cut(x, 2, sizes[n], self.rank, self.layout) if n in sizes else x for n, x in whole.items()}

    def part(self, name: str, whole: Tensor) -> Tensor:
        """This rank's part of an answer."""
        if name in ("image", "groups"):
            return whole
        return whole[:, :, self.places(name, self.rank)]

    def places(self, name: str, rank: int) -> list[int]:
        """The queries or keys, among those that an answer is about, that a rank has, in its shard's order."""
        sizes = self.keys if name == "received" else self.queries
        places = cut(np.arange(sum(sizes)), 0, sizes, rank, self.layout).tolist()
        some = self.some if name in {"seen", *SEEN} - {"received"} else slice(None)
        chosen = range(sum(sizes))[some]
        return [chosen.index(place) for place in places if place in chosen]

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
                x[:, :, self.places(name, int(rank))] = 0
        return parts, whole

    def rules(self, told: dict[str, Any], x: Tensors) -> dict[str, Any]:
        found = told | {name: x[name] for name in ("bias", "sinks") if name in x}
        return found | ({"spans": (*told["spans"][:2], x["table"])} if "table" in x else {})

    def whole(self, x: Tensors) -> Tensors:
        return {"output": ch.attention(x["q"], x["k"], x["v"], **self.rules(self.told, x))}

    def sharded(self, x: Tensors) -> Tensors:
        here = self.rules(self.here, x)
        return {"output": ch.distributed.attention(x["q"], x["k"], x["v"], **self.place, **here)}

    def looked(self, A: Any, v: Tensor, labels: list[Tensor]) -> Tensors:
        """A product and some statistics, by name; what an empty row has no number for is 0."""
        asked = {name: {"image": (3, 4), "groups": tuple(labels)}.get(name, True) for name in self.names}
        seen = A.observe(v if self.values else None, queries=self.some, **asked)
        found = {name: getattr(seen, name).nan_to_num(0, 0, 0) for name in self.names}
        return found | {"product": A @ (v + 1)} | ({"seen": seen.output} if self.values else {})

    def whole_matrix(self, x: Tensors) -> Tensors:
        return self.looked(ch.AttentionMatrix(x["q"], x["k"], **self.rules(self.told, x)), x["v"], self.labels)

    def sharded_matrix(self, x: Tensors) -> Tensors:
        made = ch.distributed.ShardedAttentionMatrix(x["q"], x["k"], **self.place, **self.rules(self.here, x))
        sides = zip(self.labels, (self.queries, self.keys), strict=True)
        found = self.looked(made, x["v"], [cut(x, 0, sizes, self.rank, self.layout) for x, sizes in sides])
        return {name: y for name, y in found.items() if name not in self.left_out[self.rank]}

    def same(self, found: Tensors, expected: Tensors, what: str) -> None:
        """Compare this rank's part of inputs' gradients with that of the whole; of PARTS the ranks' sum."""
        for name, truth in self.own(expected).items():
            x = found[name].detach().clone()
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
        found = f({name: forward_ad.make_dual(x[name], along[name]) for name in x})
        pairs = {name: forward_ad.unpack_dual(y) for name, y in found.items()}
        answers, moved = ({name: pair[side] for name, pair in pairs.items()} for side in (0, 1))
        weights = up(answers)
        loss = curved(answers, weights) + curved(moved, weights)
        return answers, moved, dict(zip(x, torch.autograd.grad(loss, [*x.values()]), strict=True))


def gradient_tangents(f: Path, x: Tensors, up: Tensors, along: Tensors) -> Tensors:
    """The tangents of a curved loss's gradients: forward over reverse."""
    x = leaves(x)
    with forward_ad.dual_level():
        loss = curved(f({name: forward_ad.make_dual(x[name], along[name]) for name in x}), up)
        found = torch.autograd.grad(loss, [*x.values()], create_graph=True)
        return {name: forward_ad.unpack_dual(y).tangent for name, y in zip(x, found, strict=True)}


def both(rank: int, world: int, seed: int) -> None:
    """Forward mode, second order and their mixture of attention, compared with one process."""
    rng = np.random.default_rng(seed)
    for method in METHODS:
        one = Problem(rng, rank, world, method)
        compare(rng, one, one.sharded, one.whole)


def matrices(rank: int, world: int, seed: int) -> None:
    """The same of products and statistics of the matrix."""
    rng = np.random.default_rng(seed)
    for method in METHODS:
        one = Problem(rng, rank, world, method)
        compare(rng, one, one.sharded_matrix, one.whole_matrix)


def compare(rng: np.random.Generator, one: Problem, sharded: Path, whole: Path) -> None:
    drawn: list[Tensors] = []  # this rank's slopes, and those of the whole

    def up(answers: Tensors) -> Tensors:
        drawn.extend(one.losses({name: torch.from_numpy(rng.standard_normal(x.shape)) for name, x in answers.items()}))
        return drawn[1]

    answers, moved, expected = of_dual(whole, one.given, up, one.along)
    parts, ups = drawn
    own, along = one.own(one.given), one.own(one.along)
    *seen, found = of_dual(sharded, own, lambda _: parts, along)
    for what, side, truth in (("value", seen[0], answers), ("tangent", seen[1], moved)):
        for name, x in side.items():
            part = one.part(name, truth[name]).detach()
            np.testing.assert_allclose(x.detach(), part, rtol=1e-7, atol=1e-8, err_msg=f"{one.what} {what} of {name}")
    one.same(found, expected, "grad of forward mode")
    found, expected = gradient_tangents(sharded, own, parts, along), gradient_tangents(whole, one.given, ups, one.along)
    one.same(found, expected, "forward mode of gradient")
    refused = {"ulysses": {"sinks", "table"}, "merge": {"table"}}.get(one.method, set()) & own.keys()
    if refused:
        must_raise(lambda: penalty(sharded, own, parts, along), f"has no derivative by method='{one.method}'")
        dist.barrier()
        return
    firsts, seconds = zip(penalty(sharded, own, parts, along), penalty(whole, one.given, ups, one.along), strict=True)
    one.same(*firsts, "gradient")
    one.same(*seconds, "gradient penalty")


def differing(rank: int, world: int, seed: int) -> None:
    """All ranks must give tangents of the same arguments; each is told which rank differs."""
    rng = np.random.default_rng(seed)
    x = {name: torch.from_numpy(rng.standard_normal((1, world, 4, 3))) for name in "qkv"}
    for method in METHODS:
        with forward_ad.dual_level():
            moving = {name: forward_ad.make_dual(x[name], x[name].cos()) for name in ("qv" if rank == 1 else "q")}
            given = [*(x | moving).values()]
            must_raise(
                lambda: ch.distributed.attention(*given, method=method),  # noqa: B023
                "rank 1 has tangents ['q', 'v'], but rank 0 has ['q']",
            )
        dist.barrier()


WAYS: dict[str, Callable[..., Any]] = {
    "jvp": lambda f, x, u, _: torch.func.jvp(f, (x,), (u,))[1],
    "grad": lambda f, x, _, up: torch.func.grad(lambda y: (f(y).sin() * up).sum())(x),
    "jvp of grad": lambda f, x, u, up: torch.func.jvp(torch.func.grad(lambda y: (f(y).sin() * up).sum()), (x,), (u,))[
        1
    ],
    "grad of jvp": lambda f, x, u, up: torch.func.grad(lambda y: (torch.func.jvp(f, (y,), (u,))[1].sin() * up).sum())(
        x
    ),
    "hvp": lambda f, x, u, up: torch.autograd.functional.hvp(lambda y: (f(y).sin() * up).sum(), x, u)[1],
    "jvp by two derivatives": lambda f, x, u, _: torch.autograd.functional.jvp(f, x, u)[1],
    "many gradients": lambda f, x, u, up: many(f, x, torch.stack([u, up])),
}


def many(f: Callable[[Tensor], Tensor], x: Tensor, grads: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(f(x), x, grads, is_grads_batched=True)
    return found.movedim(0, 1).flatten(0, 1)


def ways(rank: int, world: int, seed: int) -> None:
    """The ways to ask PyTorch for a derivative."""
    rng = np.random.default_rng(seed)
    sizes = [5 + other for other in range(world)]
    x, u, up = (torch.from_numpy(rng.standard_normal((1, world, sum(sizes), 4))) for _ in "xuv")
    own = [cut(one, 2, sizes, rank, "contiguous") for one in (x, u, up)]
    for method in METHODS:
        for name, way in WAYS.items():
            found = way(lambda y: ch.distributed.attention(y, y, y, causal=True, method=method), *own)  # noqa: B023
            truth = way(lambda y: ch.attention(y, y, y, causal=True), x, u, up)
            close(found, cut(truth, 2, sizes, rank, "contiguous"), f"{method} {name}")


def narrow(rank: int, world: int, seed: int) -> None:
    """The error of one process in narrow dtypes, against float64."""
    rng = np.random.default_rng(seed)
    sizes = [60 + other for other in range(world)]
    wide = [torch.from_numpy(rng.standard_normal((1, 8, sum(sizes), 16))) for _ in range(6)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = [x.to(dtype) for x in wide]
        own = [cut(x, 2, sizes, rank, "contiguous") for x in whole]
        truth, alone = (
            torch.func.jvp(ch.attention, tuple(x[:3]), tuple(x[3:]))[1].double()
            for x in ([one.double() for one in whole], whole)
        )
        for method in METHODS:
            call = lambda *x: ch.distributed.attention(*x, method=method)  # noqa: B023, E731
            found = torch.func.jvp(call, tuple(own[:3]), tuple(own[3:]))[1]
            assert found.dtype == dtype
            expected, usual = (cut(x, 2, sizes, rank, "contiguous") for x in (truth, alone))
            errors = [(x.double() - expected).square().mean().sqrt() for x in (found, usual)]
            assert errors[0] <= 1.5 * errors[1], (method, dtype, errors)


if __name__ == "__main__":
    main()
