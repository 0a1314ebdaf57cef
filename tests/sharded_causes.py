"""Ranks of the tests of effects over process groups: `python sharded_causes.py DIRECTORY SCENARIO,…/WORLD/SEED …`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import clearhead as ch
from clearhead.core import arrays, reference
from clearhead.core.device_array import DeviceArray
from clearhead.core.problem import describe
from sharded import METHODS, close, cut, index, main, mine, problem


class Problem:
    """A random problem with values and g, whole and as this rank's shards, and the effects of one process."""

    def __init__(self, rng: np.random.Generator, rank: int, world: int, method: str) -> None:
        self.rng, self.rank = rng, rank
        given, told, self.queries, self.keys = problem(rng, world)
        given["q"] *= float(rng.choice([1, 20]))  # weights near 1
        for name in ("mask", "bias"):
            if name in told:  # shared by some batch entries and heads
                told[name] = told[name][tuple(slice(0, 1 if rng.random() < 0.4 else None) for _ in "bh")]
        if rng.random() < 0.3:  # a value head for each query head
            given["v"] = torch.from_numpy(rng.standard_normal((*given["q"].shape[:2], sum(self.keys), 3)))
        if rng.random() < 0.5:  # pieces that see no key of some ranks
            told |= {"causal": True, "query_offset": told.get("query_offset", 0)}
        self.layout, self.method = str(rng.choice(["contiguous", "zigzag"])), method
        self.what = f"{self.method} {self.layout} {sorted(told)} {self.queries} {self.keys}"
        self.told, self.given = told, given
        given["g"] = torch.from_numpy(rng.standard_normal((*given["q"].shape[:3], 3)))
        self.output = torch.from_numpy(rng.standard_normal((3 * given["q"].shape[1], 5)))
        self.whole = ch.AttentionMatrix(given["q"], given["k"], **told)
        sizes = {"q": self.queries, "k": self.keys, "v": self.keys, "g": self.queries}
        self.own = {name: cut(x, 2, sizes[name], rank, self.layout) for name, x in given.items()}
        here = mine(told, self.queries, self.keys, rank, self.layout)
        place: dict[str, Any] = {"layout": self.layout, "method": self.method, "timeout": 60.0}
        self.matrix = ch.distributed.ShardedAttentionMatrix(self.own["q"], self.own["k"], **place, **here)

    def pairs(self) -> list[tuple[Any, Any, np.ndarray]]:
        """Matrices of effects over shards and of one process, and the reference's, (batch, heads, queries, keys)."""
        (q, k, v, g), own = self.given.values(), self.own
        one = describe(q, k, None, self.told)
        book = reference.attend(one.problem, one.q, one.k)
        numbers = one.problem, book, v.numpy(), g.numpy()
        found = [
            (self.matrix.cuts(own["v"], own["g"]), self.whole.cuts(v, g), reference.cuts(*numbers)),
            (self.matrix.contributions(own["v"], own["g"]), self.whole.contributions(v, g),
             reference.contributions(*numbers)),
        ]  # fmt: skip
        output = self.output if self.rng.random() < 0.5 else None
        norms = self.whole.contributions(v, output=output)
        found.append((self.matrix.contributions(own["v"], output=output), norms, norms[...].numpy()))
        return found

    def of_queries(self, x: Any) -> Any:
        return cut(x, 2, self.queries, self.rank, self.layout)

    def of_keys(self, x: Any) -> Any:
        return cut(x, 2, self.keys, self.rank, self.layout)


def causes(rank: int, world: int, seed: int) -> None:
    """Every answer about random problems, compared with the dense reference and with one process."""
    rng = np.random.default_rng(seed)
    for method in METHODS:
        one = Problem(rng, rank, world, method)
        for found, whole, dense in one.pairs():
            _observed(one, found, whole, dense)
            _products(one, found, dense)
            for _ in range(2):
                key = tuple(index(rng, size) for size in whole.shape)
                assert found[key].shape == whole[key].shape
                close(found[key], dense[key], f"{one.what} {found.kind} {key}")
                key = (*key[:2], *key[:1:-1])
                close(found.T[key], dense.swapaxes(-1, -2)[key], f"{one.what} {found.kind} {key} transposed")


def _observed(one: Problem, found: Any, whole: Any, dense: np.ndarray) -> None:
    rng, what = one.rng, f"{one.what} {found.kind}"
    assert (found.shape, found.dtype, found.ndim, len(found)) == (whole.shape, whole.dtype, 4, 2)
    labels = [rng.integers(-1, 3, (2, sum(one.queries))), rng.integers(-1, 4, sum(one.keys))]
    each = zip(labels, (one.queries, one.keys), strict=True)
    own_labels = [cut(x, x.ndim - 1, sizes, one.rank, one.layout) for x, sizes in each]
    order, k, size = str(rng.choice(["magnitude", "largest", "smallest"])), int(rng.integers(1, 9)), (3, 4)
    asked: dict[str, Any] = {"by_key": True, "by_query": True, "top": k, "strongest": 5 * k, "image": size}
    seen = found.observe(**asked, order=order, groups=tuple(own_labels))
    truth = whole.observe(**asked, order=order, groups=tuple(labels))
    close(seen.by_key, one.of_keys(dense.sum(axis=2)), f"{what} by_key")
    close(seen.by_query, one.of_queries(dense.sum(axis=3)), f"{what} by_query")
    close(found.by_query(), seen.by_query, f"{what} by_query alone")
    close(seen.groups, truth.groups, f"{what} groups")
    for part in ("mean", "largest"):
        close(getattr(seen.image, part), getattr(truth.image, part), f"{what} image {part}")
        close(getattr(found.image(7, 5), part), getattr(whole.image(7, 5), part), f"{what} image {part} alone")
    close(seen.top.values, one.of_queries(truth.top.values), f"{what} top {order}")
    _lie_at(seen.top, one.of_queries(truth.top.indices), one.of_queries(dense), f"{what} top {order}")
    close(seen.strongest.value, truth.strongest.value, f"{what} strongest")
    places = [x.numpy() for x in seen.strongest[:4]]
    close(dense[tuple(places)], seen.strongest.value, f"{what} where the strongest lie")
    assert len({*zip(*places, strict=True)}) == len(places[0]), what
    if found.kind == "cut":
        close(found.spans(*own_labels), whole.spans(*labels), f"{what} spans")


def _lie_at(top: Any, truth: np.ndarray, dense: np.ndarray, what: str) -> None:
    """The values listed lie at the keys listed, of which none is listed twice."""
    places = top.indices.numpy()
    np.testing.assert_array_equal(places < 0, truth < 0, what)
    if dense.shape[-1]:
        close(np.where(places < 0, 0, np.take_along_axis(dense, np.maximum(places, 0), -1)), top.values, what)
    chosen = np.sort(places, axis=-1)
    assert not ((chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)).any(), what


def _products(one: Problem, found: Any, dense: np.ndarray) -> None:
    group = dense.shape[1] // one.given["k"].shape[1]
    x, y = (one.rng.standard_normal((2, heads, n, 2)) for heads, n in (
        (one.given["k"].shape[1], sum(one.keys)), (dense.shape[1], sum(one.queries)),
    ))  # fmt: skip
    product = dense @ np.repeat(x, group, axis=1)
    close(found @ torch.from_numpy(one.of_keys(x)), one.of_queries(product), f"{one.what} {found.kind} product")
    turned = one.of_keys(dense.swapaxes(-1, -2) @ y)
    close(found.T @ torch.from_numpy(one.of_queries(y)), turned, f"{one.what} {found.kind} transposed")
    shared = torch.ones(one.own["k"].shape[2], dtype=torch.float64)
    close(found @ shared, one.of_queries(dense.sum(axis=3)), f"{one.what} {found.kind} vector")


def dtypes(rank: int, world: int, seed: int) -> None:
    """Mixed dtypes are computed in the widest; float32 keeps the digits of a cut whose weight is all but 1."""
    rng = np.random.default_rng(seed)
    n = 5 * world
    q, k, v, g = (torch.from_numpy(rng.standard_normal((2, n, 4))) for _ in range(4))
    own = [cut(x, 1, [5] * world, rank, "contiguous") for x in (q, k, v, g)]
    for method in METHODS[:2] + METHODS[3:]:
        halves = [x.half() for x in (q, k)]
        A = ch.distributed.ShardedAttentionMatrix(own[0].half(), own[1].half(), method=method)
        found, truth = A.cuts(own[2], own[3]), ch.AttentionMatrix(*halves).cuts(v, g)
        assert found.dtype == np.float64
        close(found[...], truth[...], method)
    logits = torch.zeros(n).double()
    logits[rng.integers(n)] = 60.0
    value, ones = torch.from_numpy(rng.standard_normal(n)), torch.ones(1, 1, dtype=torch.float64)
    truth = ch.AttentionMatrix(ones, logits[:, None], scale=1).cuts(value[:, None], ones)[...]
    mine_, of_keys = (slice(None) if rank == 0 else slice(0)), slice(5 * rank, 5 * rank + 5)
    for method in METHODS[:2] + METHODS[3:]:
        A = ch.distributed.ShardedAttentionMatrix(
            ones[mine_].float(), logits[of_keys, None].float(), scale=1, method=method
        )
        found = A.cuts(value[of_keys, None].float(), ones[mine_].float())
        assert found.dtype == np.float32
        np.testing.assert_allclose(found[...], truth, rtol=1e-3, atol=1e-4, err_msg=method)


def graphs(rank: int, world: int, _seed: int) -> None:
    """Effects of tensors that require grad carry no graph, and are the same on every rank and every time."""
    q = torch.from_numpy(np.random.default_rng(rank).standard_normal((world, 6, 4))).requires_grad_()
    for method in METHODS:
        E = ch.distributed.ShardedAttentionMatrix(q, q, method=method).cuts(q, q)
        again = ch.distributed.ShardedAttentionMatrix(q, q, method=method).cuts(q, q)
        assert not any(x.requires_grad for x in (E.by_key(), E[...], E @ q, E.T @ q))
        for one, other in zip(E.strongest(9), again.strongest(9), strict=True):
            assert torch.equal(one, other)
        texts: list[Any] = [None] * world
        torch.distributed.all_gather_object(texts, str([x.tolist() for x in (*E.strongest(9), *E.image(3, 3))]))
        assert len({*texts}) == 1, texts


def device(rank: int, world: int, seed: int) -> None:
    """Tensors on a device, here treated so by Triton's interpreter: effects are computed there."""
    rng = np.random.default_rng(seed)
    q, k, v, g = (torch.from_numpy(rng.standard_normal((1, 2, 9, 4))) for _ in range(4))
    labels = [0] * 9, [0, 1, 1] * 3
    E = ch.AttentionMatrix(q, k, causal=True).cuts(v, g)
    truth = [*E.top(2), *E.image(2, 2), E.by_key(), E.groups(*labels), E.spans(*labels), E @ v, E.T @ g, E[...]]
    sizes = [9 // world + (one < 9 % world) for one in range(world)]
    own = [cut(x, 2, sizes, rank, "contiguous") for x in (q, k, v, g)]
    mine_labels = [cut(np.array(x), 0, sizes, rank, "contiguous") for x in labels]
    parts = [cut(x, 2, sizes, rank, "contiguous") if at in (0, 1, 4, 7, 8) else x for at, x in enumerate(truth)]
    arrays._from_torch = lambda _torch, x, _name: DeviceArray(x.detach())  # read as tensors on a GPU are
    for method in ("ring", "merge"):
        A = ch.distributed.ShardedAttentionMatrix(own[0], own[1], causal=True, method=method)
        E = A.cuts(own[2], own[3])
        found = [*E.top(2), *E.image(2, 2), E.by_key(), E.groups(*mine_labels), E.spans(*mine_labels)]
        found += [E @ own[2], E.T @ own[3], E[...]]
        assert A.contributions(own[2], output=torch.ones(8, 3).double()).by_key().shape == own[1].shape[:3]
        for at, (one, part) in enumerate(zip(found, parts, strict=True)):
            close(one, part, f"{method} {at}")


def differently(rank: int, world: int, _seed: int) -> None:
    """The last rank asks with other arguments: its error says what is wrong, the others name rank and argument."""
    last = rank == world - 1
    q = torch.ones(1, 2, 4, 8)
    A = ch.distributed.ShardedAttentionMatrix(q, q, timeout=20.0)
    E, C = A.cuts(q, q), A.contributions(q, q)
    rows = [0] * 4
    asked: list[tuple[Callable[[], Any], str]] = [
        (lambda: A.cuts(q, q[..., : 4 if last else 8]), "was refused: g has 4 columns but v has d_v 8"),
        (lambda: A.cuts(q, q[:, : 1 if last else 2]), "was refused: g has shape (1, 1, 4, 8)"),
        (lambda: A.cuts(q.numpy().tolist() if last else q, q), "was refused: v is a list"),
        (lambda: A.cuts(q.double() if last else q, q), "has effects' dtype float64, but rank 0 has float32"),
        (lambda: A.cuts(*[q[..., : 4 if last else 8]] * 2), "has v's width 4, but rank 0 has 8"),
        (lambda: A.contributions(q, None if last else q), "has kind norm, but rank 0 has contribution"),
        (lambda: A.contributions(q, output=torch.full((16, 3), float(last))), "has output (16, 3) "),
        (lambda: A.contributions(q, None if not last else q, output=torch.ones(16, 3)), "was refused: output is given"),
        (lambda: A.contributions(q, output=torch.ones(3 if last else 16, 3)), "was refused: output has shape (3, 3)"),
        (lambda: E.observe(by_key=last), "has by_key True, but rank 0 has False"),
        (lambda: E.top(2, "smallest" if last else "largest"), "has order smallest, but rank 0 has largest"),
        (lambda: E.top(2, "weakest" if last else "largest"), "was refused: order is 'weakest'"),
        (lambda: E.strongest(0 if last else 1), "was refused: strongest is 0"),
        (lambda: E.strongest(1 + last), "has strongest 2, but rank 0 has 1"),
        (lambda: E.observe(**{"received" if last else "by_key": True}), "was refused: unknown effect `received`"),
        (lambda: E.image(2, 2**40 if last else 2), "was refused: image of shape (1, 2, 2, 1099511627776)"),
        (lambda: E.groups(rows, rows[: 3 if last else 4]), "was refused: key_groups has shape (3,)"),
        (lambda: E.spans(rows, rows[: 3 if last else 4]), "was refused: key_groups has shape (3,)"),
        (lambda: (C if last else E).spans(rows, rows), "was refused: spans are of cuts"),
        (lambda: E[0, 0, int(last)], "has index [0, 0, 1, range(0, "),
        (lambda: E.T[0, 0, 99 if last else 0], "was refused: index 99 is outside axis 2"),
        (lambda: E @ q[..., : 4 if last else 8], "has x's width 4, but rank 0 has 8"),
        (lambda: E @ (q.double() if last else q), "has x's dtype float64, but rank 0 has float32"),
        (lambda: E.T @ q[0, 0, : 3 if last else 4], "was refused: x has shape (3, 8)"),
    ]
    for ask, expected in asked:
        told = ""
        try:
            ask()
        except ch.errors.ClearheadError as error:
            told = error.one_line()
        refused = last and "was refused: " in expected
        wanted = expected.removeprefix("was refused: ") if refused else f"rank {world - 1} {expected}"
        assert wanted in told, (wanted, told)
    for what in (lambda: E.T.sum(), lambda: np.sum(E)):
        try:
            what()
        except TypeError:
            continue
        raise AssertionError("a sum that nobody answers")
    close(E.by_query(), E[...].sum(dim=-1)[:, :, 4 * rank : 4 * rank + 4], "after errors")


if __name__ == "__main__":
    main()
