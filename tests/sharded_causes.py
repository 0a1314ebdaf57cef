"""Ranks of the tests of effects over process groups: `python sharded_causes.py DIRECTORY SCENARIO,…/WORLD/SEED …`."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import clearhead as ch
from clearhead.core import arrays, reference
from clearhead.core.device_array import DeviceArray
from clearhead.core.problem import describe
from sharded import METHODS, Problem, close, compare_entries, cut, main, must_be_refused, sizes_of

Matrix = ch.distributed.ShardedAttentionMatrix


class Caused(Problem):
    """A random problem with g, and the effects of one process."""

    def __init__(self, rng: np.random.Generator, rank: int, world: int, method: str) -> None:
        super().__init__(rng, rank, world, method)
        self.whole["q"] *= float(rng.choice([1, 20]))  # weights near 1
        heads = self.whole["q"].shape[1]
        if rng.random() < 0.3:  # a value head for each query head
            self.whole["v"] = torch.from_numpy(rng.standard_normal((2, heads, self.m, 3)))
        if rng.random() < 0.5:  # pieces that see no key of some ranks
            self.rules |= {"causal": True, "query_offset": self.rules.get("query_offset", 0)}
        self.whole["g"] = torch.from_numpy(rng.standard_normal((2, heads, self.n, 3)))
        self.output = torch.from_numpy(rng.standard_normal((3 * heads, 5)))

    def pairs(self) -> list[tuple[Any, Any, np.ndarray]]:
        """Matrices of effects over shards and of one process, and the reference's, (batch, heads, queries, keys)."""
        (q, k, v, g), local = self.whole.values(), self.local
        whole, matrix = self.matrices()
        one = describe(q, k, None, self.rules)
        numbers = one.problem, reference.attend(one.problem, one.q, one.k), v.numpy(), g.numpy()
        output = self.output if self.rng.random() < 0.5 else None
        norms = whole.contributions(v, output=output)
        v_here, g_here = local["v"], local["g"]
        return [
            (matrix.cuts(v_here, g_here), whole.cuts(v, g), reference.cuts(*numbers)),
            (matrix.contributions(v_here, g_here), whole.contributions(v, g), reference.contributions(*numbers)),
            (matrix.contributions(v_here, output=output), norms, norms[...].numpy()),
        ]


def causes(rank: int, world: int, seed: int) -> None:
    """Every answer about random problems, compared with the dense reference and with one process."""
    rng = np.random.default_rng(seed)
    for method in METHODS:
        one = Caused(rng, rank, world, method)
        for seen, whole, dense in one.pairs():
            _observed(one, seen, whole, dense)
            _products(one, seen, dense)
            compare_entries(rng, seen, dense, f"{one.what} {seen.kind}")


def _observed(one: Caused, E: Any, whole: Any, dense: np.ndarray) -> None:
    rng, what = one.rng, f"{one.what} {E.kind}"
    assert (E.shape, E.dtype, E.ndim, len(E)) == (whole.shape, whole.dtype, 4, 2)
    labels = rng.integers(-1, 3, (2, one.n)), rng.integers(-1, 4, one.m)
    labels_here = one.of_queries(labels[0], -1), one.of_keys(labels[1], -1)
    order, k = str(rng.choice(["magnitude", "largest", "smallest"])), int(rng.integers(1, 9))
    asked: dict[str, Any] = {"by_key": True, "by_query": True, "top": k, "strongest": 5 * k, "image": (3, 4)}
    seen = E.observe(**asked, order=order, groups=labels_here)
    truth = whole.observe(**asked, order=order, groups=labels)
    close(seen.by_key, one.of_keys(dense.sum(axis=2)), f"{what} by_key")
    close(seen.by_query, one.of_queries(dense.sum(axis=3)), f"{what} by_query")
    close(E.by_query(), seen.by_query, f"{what} by_query alone")
    close(seen.groups, truth.groups, f"{what} groups")
    for part in ("mean", "largest"):
        close(getattr(seen.image, part), getattr(truth.image, part), f"{what} image {part}")
        close(getattr(E.image(7, 5), part), getattr(whole.image(7, 5), part), f"{what} image {part} alone")
    close(seen.top.values, one.of_queries(truth.top.values), f"{what} top {order}")
    _lie_at(seen.top, one.of_queries(truth.top.indices), one.of_queries(dense), f"{what} top {order}")
    close(seen.strongest.value, truth.strongest.value, f"{what} strongest")
    places = [x.numpy() for x in seen.strongest[:4]]
    close(dense[tuple(places)], seen.strongest.value, f"{what} where the strongest lie")
    assert len({*zip(*places, strict=True)}) == len(places[0]), what
    if E.kind == "cut":
        close(E.spans(*labels_here), whole.spans(*labels), f"{what} spans")


def _lie_at(top: Any, truth: np.ndarray, dense: np.ndarray, what: str) -> None:
    """The values listed lie at the keys listed, of which none is listed twice."""
    places = top.indices.numpy()
    np.testing.assert_array_equal(places < 0, truth < 0, what)
    if dense.shape[-1]:
        close(np.where(places < 0, 0, np.take_along_axis(dense, np.maximum(places, 0), -1)), top.values, what)
    chosen = np.sort(places, axis=-1)
    assert not ((chosen[..., 1:] == chosen[..., :-1]) & (chosen[..., 1:] >= 0)).any(), what


def _products(one: Caused, E: Any, dense: np.ndarray) -> None:
    heads, kv_heads = dense.shape[1], one.whole["k"].shape[1]
    x, y = (one.rng.standard_normal((2, *shape, 2)) for shape in ((kv_heads, one.m), (heads, one.n)))
    product = dense @ np.repeat(x, heads // kv_heads, axis=1)
    close(E @ torch.from_numpy(one.of_keys(x)), one.of_queries(product), f"{one.what} {E.kind} product")
    turned = one.of_keys(dense.swapaxes(-1, -2) @ y)
    close(E.T @ torch.from_numpy(one.of_queries(y)), turned, f"{one.what} {E.kind} transposed")
    ones = torch.ones(one.local["k"].shape[2], dtype=torch.float64)
    close(E @ ones, one.of_queries(dense.sum(axis=3)), f"{one.what} {E.kind} vector")


def dtypes(rank: int, world: int, seed: int) -> None:
    """Mixed dtypes are computed in the widest; float32 keeps the digits of a cut whose weight is all but 1."""
    rng, n = np.random.default_rng(seed), 5 * world
    q, k, v, g = (torch.from_numpy(rng.standard_normal((2, n, 4))) for _ in range(4))
    local = [cut(x, 1, [5] * world, rank) for x in (q, k, v, g)]
    truth = ch.AttentionMatrix(q.half(), k.half()).cuts(v, g)[...]
    for method in METHODS:
        E = Matrix(local[0].half(), local[1].half(), method=method).cuts(*local[2:])
        assert E.dtype == np.float64
        close(E[...], truth, method)
    logits = torch.zeros(n).double()
    logits[rng.integers(n)] = 60.0
    value, ones = torch.from_numpy(rng.standard_normal(n)), torch.ones(1, 1, dtype=torch.float64)
    truth = ch.AttentionMatrix(ones, logits[:, None], scale=1).cuts(value[:, None], ones)[...]
    here, of_keys = ones[: 1 - min(rank, 1)].float(), slice(5 * rank, 5 * rank + 5)
    for method in METHODS:
        E = Matrix(here, logits[of_keys, None].float(), scale=1, method=method).cuts(value[of_keys, None].float(), here)
        assert E.dtype == np.float32
        np.testing.assert_allclose(E[...], truth, rtol=1e-3, atol=1e-4, err_msg=method)


def graphs(rank: int, world: int, _seed: int) -> None:
    """Effects of tensors that require grad carry no graph, and are the same on every rank and every time."""
    q = torch.from_numpy(np.random.default_rng(rank).standard_normal((world, 6, 4))).requires_grad_()
    for method in METHODS:
        E, again = (Matrix(q, q, method=method).cuts(q, q) for _ in "ab")
        assert not any(x.requires_grad for x in (E.by_key(), E[...], E @ q, E.T @ q))
        for one, other in zip(E.strongest(9), again.strongest(9), strict=True):
            assert torch.equal(one, other)
        texts: list[Any] = [None] * world
        torch.distributed.all_gather_object(texts, str([x.tolist() for x in (*E.strongest(9), *E.image(3, 3))]))
        assert len({*texts}) == 1, texts


def device(rank: int, world: int, seed: int) -> None:
    """Tensors on a device, here treated so by Triton's interpreter: effects are computed there."""
    rng, sizes = np.random.default_rng(seed), sizes_of(9, world)
    q, k, v, g = (torch.from_numpy(rng.standard_normal((1, 2, 9, 4))) for _ in range(4))
    labels = [0] * 9, [0, 1, 1] * 3
    E = ch.AttentionMatrix(q, k, causal=True).cuts(v, g)
    truth = [*E.top(2), *E.image(2, 2), E.by_key(), E.groups(*labels), E.spans(*labels), E @ v, E.T @ g, E[...]]
    local = [cut(x, 2, sizes, rank) for x in (q, k, v, g)]
    labels_here = [cut(np.array(x), 0, sizes, rank) for x in labels]
    parts = [cut(x, 2, sizes, rank) if place in (0, 1, 4, 7, 8) else x for place, x in enumerate(truth)]
    arrays._from_torch = lambda _torch, x, _name: DeviceArray(x.detach())  # read as tensors on a GPU are
    for method in ("ring", "merge"):
        A = Matrix(*local[:2], causal=True, method=method)
        E = A.cuts(*local[2:])
        seen = [*E.top(2), *E.image(2, 2), E.by_key(), E.groups(*labels_here), E.spans(*labels_here)]
        seen += [E @ local[2], E.T @ local[3], E[...]]
        assert A.contributions(local[2], output=torch.ones(8, 3).double()).by_key().shape == local[1].shape[:3]
        for place, (one, part) in enumerate(zip(seen, parts, strict=True)):
            close(one, part, f"{method} {place}")


def differently(rank: int, world: int, _seed: int) -> None:
    """The last rank asks with other arguments: its error says what is wrong, the others name rank and argument."""
    last = rank == world - 1
    q = torch.ones(1, 2, 4, 8)
    A = Matrix(q, q, timeout=20.0)
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
    must_be_refused(rank, world, asked)
    close(E.by_query(), E[...].sum(dim=-1)[:, :, 4 * rank : 4 * rank + 4], "after errors")


if __name__ == "__main__":
    main()
