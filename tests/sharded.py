"""Ranks of tests over process groups: `python sharded.py DIRECTORY SCENARIO,…/WORLD/SEED/… …`; started by ranks.py."""

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import clearhead as ch
from clearhead import engines
from clearhead.core import arrays
from clearhead.core.device_array import DeviceArray
from clearhead.engines.remote import Remote

METHODS = ("gather", "ring", "ulysses", "merge")
PARTS = ("query_segments", "kv_segments", "mask", "bias")


def problem(
    rng: np.random.Generator, world: int
) -> tuple[dict[str, torch.Tensor], dict[str, Any], list[int], list[int]]:
    """Whole q, k, v and rules, and how many queries and keys each rank holds: any numbers, also none."""
    group, batch, d = int(rng.integers(1, 3)), 2, 4
    heads = world * int(rng.integers(1, 3))  # of keys, so that the zigzag layout can split them too
    if rng.random() < 0.3:
        heads, group = 1, world * group
    queries, keys = (rng.multinomial(int(rng.integers(0, 40)), rng.dirichlet(np.ones(world))).tolist() for _ in "qk")
    if rng.random() < 0.5:
        keys = queries
    n, m = sum(queries), sum(keys)
    sizes = {"q": (batch, heads * group, n, d), "k": (batch, heads, m, d), "v": (batch, heads, m, 3)}
    given = {name: torch.from_numpy(rng.standard_normal(size)) for name, size in sizes.items()}
    every: dict[str, Any] = {
        "causal": True,
        "window": (int(rng.integers(0, 9)), int(rng.integers(0, 9))),
        "query_offset": int(rng.integers(0, 5)),
        "scale": rng.random(heads * group) if rng.random() < 0.5 else 0.7,
        "softcap": 1.5,
        "alibi_slopes": rng.random(heads * group),
        "kv_lengths": rng.integers(0, m + 1, batch),
        "query_lengths": rng.integers(0, n + 1, batch),
        "segments": (rng.integers(0, 2, (batch, n)), rng.integers(0, 2, (batch, m))),
        "sinks": torch.from_numpy(rng.standard_normal(heads * group)),
        "mask": rng.random((batch, heads * group, n, m)) < 0.8,
        "bias": torch.from_numpy(rng.standard_normal((batch, heads * group, n, m))),
    }
    table = torch.from_numpy(rng.standard_normal((batch, heads * group, 3, 4)))
    table[..., 0, 1] = -torch.inf
    every["spans"] = (rng.integers(-1, 3, (batch, n)), rng.integers(-1, 4, m), table[int(rng.integers(2))])
    rules = {name: value for name, value in every.items() if rng.random() < 0.35}
    if n != m and ("causal" in rules or "window" in rules or "alibi_slopes" in rules):
        rules["query_offset"] = every["query_offset"]
    if "segments" in rules:
        rules["query_segments"], rules["kv_segments"] = rules.pop("segments")
    return given, rules, queries, keys


def cut(x: Any, axis: int, sizes: list[int], rank: int, layout: str) -> Any:
    """A rank's part of a whole array, from the documented meaning of a layout."""
    if layout == "contiguous":
        places = np.arange(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    else:
        lengths = [(size + 1) // 2 for size in sizes] + [size // 2 for size in reversed(sizes)]
        ends = np.cumsum(lengths)
        first, last = rank, 2 * len(sizes) - 1 - rank
        places = np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in (first, last)])
    if isinstance(x, torch.Tensor):
        return x.index_select(axis, torch.from_numpy(places))
    return np.take(x, places, axis)


def mine(rules: dict[str, Any], queries: list[int], keys: list[int], rank: int, layout: str) -> dict[str, Any]:
    found = dict(rules)
    for name in PARTS:
        if name in found:
            axis, sizes = (-1, keys) if name == "kv_segments" else (-1 if name == "query_segments" else 2, queries)
            found[name] = cut(found[name], axis % found[name].ndim, sizes, rank, layout)
    if "spans" in found:
        mine_, theirs, table = found["spans"]
        found["spans"] = cut(mine_, 1, queries, rank, layout), cut(theirs, 0, keys, rank, layout), table
    return found


def close(found: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-9, atol=1e-11, err_msg=what)


def rules(rank: int, world: int, seed: int) -> None:
    """Outputs, gradients and observations of random problems, compared with those of one process."""
    rng = np.random.default_rng(seed)
    for _ in range(8):
        given, told, queries, keys = problem(rng, world)
        layout, method = str(rng.choice(["contiguous", "zigzag"])), str(rng.choice(METHODS))
        up = torch.from_numpy(rng.standard_normal((*given["q"].shape[:3], 3)))
        what = f"{method} {layout} {sorted(told)} {queries} {keys}"
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        for name in ("mask", "bias"):
            if name in told:  # shared by some batch entries and heads
                told[name] = told[name][tuple(slice(0, 1 if rng.random() < 0.4 else None) for _ in "bh")]
        if "bias" in told:
            leaves["bias"] = told["bias"] = told["bias"].clone().requires_grad_()
        tables = [told["spans"][2].clone().requires_grad_() for _ in range(2)] if "spans" in told else []
        if tables:
            told["spans"] = *told["spans"][:2], tables[0]
        truth = ch.attention(leaves["q"], leaves["k"], leaves["v"], **told)
        (truth * up).sum().backward()
        own = {n: cut(x, 2, queries if n == "q" else keys, rank, layout).requires_grad_() for n, x in given.items()}
        place: dict[str, Any] = {"layout": layout, "method": method, "timeout": 60.0}
        here = mine(told, queries, keys, rank, layout)
        if tables:
            here["spans"] = *here["spans"][:2], tables[1]
        if "bias" in here:
            own["bias"] = here["bias"] = here["bias"].detach().requires_grad_()
        output = ch.distributed.attention(own["q"], own["k"], own["v"], **place, **here)
        close(output.detach(), cut(truth.detach(), 2, queries, rank, layout), what)
        (output * cut(up, 2, queries, rank, layout)).sum().backward()
        for name, x in own.items():
            sizes = keys if name in "kv" else queries
            close(x.grad, cut(leaves[name].grad, 2, sizes, rank, layout), f"{what} d{name}")
        if tables:
            total = tables[1].grad.clone()
            dist.all_reduce(total)
            close(total, tables[0].grad, f"{what} dspans")
        for rules_ in (told, here):
            if "spans" in rules_:
                rules_["spans"] = tuple(part.detach() if torch.is_tensor(part) else part for part in rules_["spans"])
            rules_.update({name: x.detach() for name, x in rules_.items() if name == "bias"})
        observed(given, told, {name: own[name] for name in "qkv"}, here, place, queries, keys, rank, what)


def observed(given, told, own, here, place, queries, keys, rank, what) -> None:  # type: ignore[no-untyped-def]
    """Every statistic, of all queries and of some, the picture, the products and weights by index."""
    rng, layout = np.random.default_rng(len(what)), place["layout"]
    asked: dict[str, Any] = {"logsumexp": True, "max_logit": True, "entropy": True, "distance": True, "received": True}
    asked |= {"peak": True, "image": (3, 4), "top": 2}
    q, k, v = (x.detach() for x in own.values())
    whole = ch.AttentionMatrix(given["q"], given["k"], **told)
    matrix = ch.distributed.ShardedAttentionMatrix(q, k, **place, **here)
    labels = [torch.from_numpy(rng.integers(-1, 3, sum(sizes))) for sizes in (queries, keys)]
    mine_labels = tuple(cut(x, 0, sizes, rank, layout) for x, sizes in zip(labels, (queries, keys), strict=True))
    n = sum(queries)
    some = slice(int(rng.integers(0, n + 1)), int(rng.integers(0, n + 1)), int(rng.integers(1, 4)))
    places = cut(np.arange(n), 0, queries, rank, layout)
    for chosen in (slice(None), some):
        seen = matrix.observe(v, **asked, groups=mine_labels, queries=chosen)
        truth = whole.observe(given["v"], **asked, groups=tuple(labels), queries=chosen)
        rows = [at for at, i in enumerate(range(n)[chosen]) if i in places]
        rows.sort(key=lambda at: np.flatnonzero(places == range(n)[chosen][at]))
        for name in ("output", "logsumexp", "max_logit", "entropy", "distance"):
            close(getattr(seen, name), getattr(truth, name)[:, :, rows], f"{what} {chosen} {name}")
        for name in ("received", "peak"):
            expected = cut(getattr(truth, name), 2, keys, rank, layout)
            close(getattr(seen, name), expected, f"{what} {chosen} {name}")
        for name in ("image", "groups"):
            close(getattr(seen, name), getattr(truth, name), f"{what} {chosen} {name}")
        close(seen.top.weights, truth.top.weights[:, :, rows], f"{what} {chosen} top")
        np.testing.assert_array_equal(seen.top.indices, truth.top.indices[:, :, rows], what)
    g, u = (torch.from_numpy(rng.standard_normal((size, 2))) for size in (n, sum(keys)))
    for pick in (np.s_[:], np.s_[:, 0]):
        at_rows, at_keys = cut(g, 0, queries, rank, layout)[pick], cut(u, 0, keys, rank, layout)[pick]
        close(matrix.T @ at_rows, cut(whole.T @ g[pick], 2, keys, rank, layout), f"{what} transposed")
        close(matrix @ at_keys, cut(whole @ u[pick], 2, queries, rank, layout), f"{what} product")
    assert (matrix.shape, matrix.dtype, matrix.ndim, len(matrix)) == (whole.shape, whole.dtype, 4, 2)
    for _ in range(3):
        key = tuple(index(rng, size) for size in whole.shape)
        close(matrix[key], whole[key], f"{what} {key}")
        assert matrix[key].shape == whole[key].shape, f"{what} {key}"
        key = (*key[:2], *key[:1:-1])
        close(matrix.T[key], whole.T[key], f"{what} {key} transposed")


def graph(rank: int, world: int, seed: int) -> None:
    """Gradients of losses of the observations, compared with those of one process."""
    rng = np.random.default_rng(seed)
    for _ in range(8):
        given, told, queries, keys = problem(rng, world)
        layout, method = str(rng.choice(["contiguous", "zigzag"])), str(rng.choice(METHODS))
        n, m, place = sum(queries), sum(keys), {"layout": layout, "method": method, "timeout": 60.0}
        leaves = {name: x.clone().requires_grad_() for name, x in given.items()}
        own = {name: cut(x, 2, queries if name == "q" else keys, rank, layout) for name, x in given.items()}
        here = mine(told, queries, keys, rank, layout)
        for name, x in told.items():
            if name in ("bias", "sinks"):
                leaves[name] = told[name] = x.clone().requires_grad_()
                own[name] = here[name] = here[name].clone()
        for x in own.values():
            x.requires_grad_()
        chosen = slice(None) if rng.random() < 0.5 else slice(0, n, 2)
        rows = [
            at for at, i in enumerate(range(n)[chosen]) if i in (places := cut(np.arange(n), 0, queries, rank, layout))
        ]
        rows.sort(key=lambda at: np.flatnonzero(places == range(n)[chosen][at]))
        every = ("entropy", "logsumexp", "distance", "own", "received", "image", "groups")
        names = [x for x in every if rng.random() < 0.4]
        asked: dict[str, Any] = dict.fromkeys(names, True) | ({"image": (3, 4)} if "image" in names else {})
        labels = [torch.from_numpy(rng.integers(-1, 3, size)) for size in (n, m)]
        own_labels = tuple(cut(x, 0, sizes, rank, layout) for x, sizes in zip(labels, (queries, keys), strict=True))
        values = bool(rng.random() < 0.7) or not names
        what = f"{method} {layout} {names} {values} {chosen} {sorted(told)} {queries} {keys}"
        matrices = (
            (ch.AttentionMatrix(leaves["q"], leaves["k"], **told), leaves, labels, 1),
            (ch.distributed.ShardedAttentionMatrix(own["q"], own["k"], **place, **here), own, own_labels, world),
        )
        found = []
        for matrix, arrays_, groups, _ in matrices:
            if "groups" in names:
                asked["groups"] = tuple(groups)
            found.append(matrix.observe(arrays_["v"] if values else None, queries=chosen, **asked))
        losses: list[Any] = [0.0, 0.0]
        for name in (*names, *(("output",) if values else ())):
            whole, part = (getattr(one, name) for one in found)
            up = torch.from_numpy(rng.standard_normal(whole.shape))
            mine_up = up / world
            if name == "received":
                mine_up = cut(up, 2, keys, rank, layout)
            elif name not in ("image", "groups"):
                mine_up = up[:, :, rows]
            for at, (answer, weight) in enumerate(((whole, up), (part, mine_up))):
                losses[at] = losses[at] + (torch.where(weight == 0, 0.0, answer).nan_to_num(0, 0, 0) * weight).sum()
        for loss in losses:
            loss.backward()
        for name, x in own.items():
            expected = leaves[name].grad
            assert (x.grad is None) == (expected is None) == (name == "v" and not values), f"{what} d{name}"
            if expected is None or x.grad is None or name == "sinks":
                continue
            expected = cut(expected, 2, keys if name in "kv" else queries, rank, layout)
            np.testing.assert_allclose(x.grad, expected, rtol=1e-7, atol=1e-9, err_msg=f"{what} d{name}")
        if "sinks" in own:
            total = own["sinks"].grad.clone()
            dist.all_reduce(total)
            np.testing.assert_allclose(total, leaves["sinks"].grad, rtol=1e-7, atol=1e-9, err_msg=f"{what} dsinks")


def refused(rank: int, world: int, _seed: int) -> None:
    """Derivatives that are not there, and tensors that PyTorch splits itself: an error on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    x = torch.randn(1, world, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))

    def matrix(x: torch.Tensor, method: Any) -> Any:
        return ch.distributed.ShardedAttentionMatrix(x, x, method=method)

    paths: dict[str, Callable[[Any], Any]] = {
        "peak": lambda one: one.peak(),
        "top": lambda one: one.observe(top=2, entropy=True),
        "max_logit": lambda one: one.max_logit(),
    }
    engine = engines.get("native")
    rows, engine.rows = engine.rows, break_down  # refused before any work
    for (name, path), method in zip(paths.items(), METHODS, strict=False):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, x)
            must_raise(lambda: path(matrix(dual, method)), f"{name} has no forward-mode derivative here")  # noqa: B023
        dist.barrier()
    engine.rows = rows
    attend = ch.distributed.attention
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        must_raise(lambda: matrix(x, "ring").T @ dual, "g carries a tangent")
        moving = matrix(dual, "ring")
        for call in (
            lambda: moving.T @ x,
            lambda: moving[0],
            lambda: moving.cuts(x, x),
            lambda: moving.contributions(x, x),
        ):
            must_raise(call, "q carries a tangent")
        duals = (dual, x if rank else dual, x)
        must_raise(lambda: attend(*duals, timeout=20.0), "has tangents ['q'], but rank 0 has ['k', 'q']: they must be")
    must_raise(lambda: torch.func.vmap(attend)(*[torch.stack([x, x])] * 3), "over ranks cannot be mapped (torch.vmap)")
    must_raise(lambda: torch.func.grad(lambda y: matrix(y, "ring").entropy().sum())(x), "q is inside torch.func")
    again = torch.func.grad(lambda z: torch.func.grad(lambda y: attend(y, y, y).square().sum())(z).square().sum())
    must_raise(lambda: torch.func.grad(lambda y: again(y).sum())(x), "attention has no third derivative here")
    whole = DTensor.from_local(x, init_device_mesh("cpu", (world,)), [Shard(2)], run_check=False)
    for call in (ch.attention, ch.distributed.attention):
        must_raise(lambda: call(whole, whole, whole), "q is a DTensor: expected a plain tensor")  # noqa: B023
    must_raise(lambda: ch.attention(x, x, x, bias=whole), "bias is a DTensor: expected a plain tensor")
    leaf = x.clone().requires_grad_()
    changed = leaf * 1
    output = ch.distributed.attention(changed, changed, changed)
    changed.detach().mul_(2)
    must_raise(lambda: output.sum().backward(), "modified by an inplace operation")


def must_raise(call: Callable[[], Any], words: str) -> None:
    told = ""
    try:
        call()
    except (ch.errors.ClearheadError, RuntimeError) as error:
        told = str(error)
    assert words in told, (words, told)


def passes(rank: int, world: int, _seed: int) -> None:
    """A picture takes one pass over the keys, with a graph or without."""
    engine, calls = engines.get("portable"), 0
    rows = engine.rows

    def counted(*given: Any) -> Any:
        nonlocal calls
        calls += 1
        return rows(*given)

    engine.rows = counted
    for asked in (False, True):
        calls = 0
        q = torch.ones(1, 2, 5, 4, requires_grad=asked)
        matrix = ch.distributed.ShardedAttentionMatrix(q, q, method="gather", engine="portable")
        picture = matrix.image(2, 2)
        assert (calls, picture.requires_grad) == (1, asked)


def device(rank: int, world: int, _seed: int) -> None:
    """Tensors on a device, here treated so by Triton's interpreter: computed there, with results there."""
    rng = np.random.default_rng(5)
    given = {name: torch.from_numpy(rng.standard_normal((1, 2, 21, 4))) for name in "qkv"}
    told: dict[str, Any] = {
        "causal": True,
        "sinks": torch.ones(2),
        "bias": torch.from_numpy(rng.random((1, 2, 21, 21))),
    }
    whole = [x.clone().requires_grad_() for x in given.values()]
    truth = ch.attention(*whole, **told)
    truth.sum().backward()
    entropy, received = (
        getattr(ch.AttentionMatrix(given["q"], given["k"], **told), n)() for n in ("entropy", "received")
    )
    sizes = [21 // world + (one < 21 % world) for one in range(world)]
    own = {name: cut(x, 2, sizes, rank, "contiguous") for name, x in given.items()}
    told = mine(told, sizes, sizes, rank, "contiguous")
    arrays._from_torch = lambda _torch, x, _name: DeviceArray(x.detach())  # read as tensors on a GPU are
    for method in ("gather", "ring"):
        leaves = [x.clone().requires_grad_() for x in own.values()]
        output = ch.distributed.attention(*leaves, method=method, **told)
        output.sum().backward()
        close(output.detach(), cut(truth.detach(), 2, sizes, rank, "contiguous"), method)
        for leaf, all_of_it in zip(leaves, whole, strict=True):
            close(leaf.grad, cut(all_of_it.grad, 2, sizes, rank, "contiguous"), method)
        matrix = ch.distributed.ShardedAttentionMatrix(own["q"], own["k"], method=method, **told)
        assert isinstance(matrix._shards.engine, Remote)
        close(matrix.entropy(), cut(entropy, 2, sizes, rank, "contiguous"), method)
        close(matrix.received(), cut(received, 2, sizes, rank, "contiguous"), method)


def index(rng: np.random.Generator, size: int) -> Any:
    """An integer or a slice of any direction."""
    if size and rng.random() < 0.4:
        return int(rng.integers(-size, size))
    ends = [None if rng.random() < 0.3 else int(rng.integers(-size - 1, size + 2)) for _ in "ab"]
    return slice(*ends, int(rng.choice([-2, -1, 1, 2, 3])))


def bits(rank: int, world: int, seed: int) -> None:
    """The same bits on every run; those of one process where one rank has all keys of a query."""
    rng = np.random.default_rng(seed)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 12, 96, 8))).float() for _ in range(3))
    sizes = [96 // world + (r < 96 % world) for r in range(world)]
    for layout in ("contiguous", "zigzag"):
        whole = cut(ch.attention(q, k, v, causal=True), 2, sizes, rank, layout)
        own = [cut(x, 2, sizes, rank, layout).requires_grad_() for x in (q, k, v)]
        for method in METHODS:
            found = []
            for _ in range(3):
                output = ch.distributed.attention(*own, causal=True, method=method, layout=layout)
                found.append((output, *torch.autograd.grad(output.square().sum(), own)))
            for again in found[1:]:
                assert all(torch.equal(x, y) for x, y in zip(found[0], again, strict=True)), method
            if method in ("gather", "ulysses"):
                assert torch.equal(found[0][0], whole), (method, layout)


def exact(rank: int, world: int, seed: int) -> None:
    """The error of one process: at most 1.25 times that of PyTorch's fused kernel against float64, in every dtype."""
    torch.manual_seed(seed)
    wide = [torch.randn(1, 12, n, 32, dtype=torch.float64) for n in (130, 700, 700)]
    sizes = [[n // world + (r < n % world) for r in range(world)] for n in (130, 700, 700)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = [x.to(dtype) for x in wide]
        truth = torch.nn.functional.scaled_dot_product_attention(*(x.double() for x in whole))
        theirs = (torch.nn.functional.scaled_dot_product_attention(*whole).double() - truth).square().mean()
        own = [cut(x, 2, size, rank, "contiguous") for x, size in zip(whole, sizes, strict=True)]
        for method in METHODS:
            output = ch.distributed.attention(*own, method=method).double()
            ours = (output - cut(truth, 2, sizes[0], rank, "contiguous")).square().mean()
            assert ours.sqrt() <= 1.25 * theirs.sqrt(), (method, dtype, ours, theirs)


def received(*shards: torch.Tensor, **rules: Any) -> dict[int, int]:
    """Bytes of the messages that attention has this rank receive, by the rank they come from."""
    found: dict[int, int] = {}
    real = dist.P2POp

    def watched(how: Any, memory: torch.Tensor, peer: int, *more: Any) -> Any:
        if how is dist.irecv:
            found[peer] = found.get(peer, 0) + memory.numel() * memory.element_size()
        return real(how, memory, peer, *more)

    dist.P2POp = watched  # type: ignore[assignment,misc]
    try:
        ch.distributed.attention(*shards, **rules)
    finally:
        dist.P2POp = real  # type: ignore[misc]
    return found


def windows(rank: int, world: int, seed: int) -> None:
    """With a window, messages come only from the neighbour that holds the keys, however long the sequence is."""
    for method in ("gather", "ring", "merge"):
        counted = []
        for own in (64, 256):
            q = torch.zeros(1, 2, own, 8)
            counted.append(received(q, q, q, window=(16, 0), method=method))
        assert set(counted[0]) == set(counted[1]) == neighbours(rank, method, world), (method, counted)
        if method == "gather":
            assert counted[0] == counted[1] == ({rank - 1: 16 * 2 * 2 * 8 * 4} if rank else {}), counted


def neighbours(rank: int, method: str, world: int) -> set[int]:
    """Keys come from the previous rank; with merge, queries from the next and partial results from the previous."""
    before, after = ({rank - 1} if rank else set()), ({rank + 1} if rank + 1 < world else set())
    return before | after if method == "merge" else before


def counts(rank: int, world: int, seed: int) -> None:
    """Each method receives the number of bytes that its plan predicts."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        sizes = (1 + rng.multinomial(40, rng.dirichlet(np.ones(world)))).tolist()
        shared = (1, world)[int(rng.integers(2))]
        q, k, v = (torch.ones(2, heads, sizes[rank], d) for heads, d in ((2 * world, 8), (shared, 8), (shared, 4)))
        rules: Any = [{}, {"causal": True}, {"window": (int(rng.integers(9)), 3)}][int(rng.integers(3))]
        rules["layout"] = str(rng.choice(["contiguous", "zigzag"]))
        for name, one in (("mask", torch.ones(1, dtype=torch.bool)), ("bias", torch.ones(1))):
            if rng.random() < 0.4:
                lead = (int(rng.integers(1, 3)), (1, 2 * world)[int(rng.integers(2))])
                rules[name] = one.expand(*lead, sizes[rank], sum(sizes))
        plan = ch.distributed.plan(q, k, v, **rules)
        for method, told in plan.bytes.items():
            found = received(q, k, v, method=method, **rules)
            most = torch.tensor([sum(found.values())])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            assert int(most) == told, (method, rules, sizes, int(most), told)
        assert plan.method == min(plan.bytes, key=plan.bytes.get)


def cutting(rank: int, world: int, seed: int) -> None:
    """Each shard holds the positions that `positions` gives, and all shards together are the whole."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 13, 3)))
    for layout in ("contiguous", "zigzag"):
        own = ch.distributed.shard(x, layout=layout)
        assert torch.equal(own, x[:, ch.distributed.positions(13, layout=layout)])
        assert torch.equal(own, cut(x, 1, [13 // world + (r < 13 % world) for r in range(world)], rank, layout))
        assert torch.equal(ch.distributed.unshard(own, layout=layout), x)


def decoding(rank: int, world: int, seed: int) -> None:
    """One new query on the last rank, keys on all ranks: partial results are merged."""
    rng = np.random.default_rng(seed)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, 4, n, 8))) for n in (1, 50, 50))
    sizes = [50 // world + (r < 50 % world) for r in range(world)]
    own = [cut(x, 2, sizes, rank, "contiguous") for x in (k, v)]
    new = q if rank == world - 1 else q[:, :, :0]
    for method in ("gather", "ring", "merge"):
        output = ch.distributed.attention(new, *own, causal=True, query_offset=49, method=method)
        close(output, ch.attention(q, k, v)[:, :, : new.shape[2]], method)


def differently(rank: int, world: int, _seed: int) -> None:
    """The last rank calls with other arguments: its error says what is wrong, the others name rank and argument."""
    last = rank == world - 1
    q, n = torch.zeros(1, 2, 4, 8), 4 * world
    rows, bias = {"mask": np.ones((4, n), bool)}, {"bias": np.zeros((4, n), np.float32)}
    spans = [0] * 4, [1] * 4, np.zeros((1, 2))
    # q and k of the last rank, the rules of all ranks, the rules of the last rank, its error
    calls: list[tuple[Any, Any, dict[str, Any], dict[str, Any], str]] = [
        (q, torch.zeros(1, 2, 4, 6), {}, {}, "was refused: q has d_k 8 but k has d_k 6"),
        (q[:, :1], q[:, :1], {}, {}, "has q's shape without its length [1, 1, 8], but rank 0 has [1, 2, 8]"),
        (q.double(), q.double(), {}, {}, "has dtype torch.float64, but rank 0 has torch.float32"),
        (q, q, {}, {"causal": True}, "has causal True, but rank 0 has None"),
        (q, q, {"scale": 0.5}, {"scale": 0.25}, "has scale 0.25, but rank 0 has 0.5"),
        (q, q, {"sinks": torch.zeros(2)}, {"sinks": torch.ones(2)}, "has sinks [1.0, 1.0], but rank 0 has [0.0, 0.0]"),
        (q, q, {}, {"causual": True}, "was refused: unknown rule `causual`"),
        (q, q, {}, {"scale": torch.ones(2, requires_grad=True)}, "was refused: scale requires grad, and has no deriva"),
        (q, q, {"scale": [0.5, 0.2]}, {"scale": [0.5, 0.1]}, "has scale [0.5, 0.1], but rank 0 has [0.5, 0.2]"),
        (q, q, {}, {"spans": spans}, "has spans given, but rank 0 has not given"),
        (q, q, {"spans": spans}, {"spans": (*spans[:2], np.ones((1, 2)))}, "has span_table [1.0, 1.0"),
        (q, q, {"spans": spans}, {"spans": ([5] * 4, *spans[1:])}, "was refused: spans[0], the query labels, goes up"),
        (q.numpy(), q.numpy(), {}, {}, "was refused: q is a ndarray: expected a PyTorch tensor"),
        (q, q, {}, {"timeout": -1.0}, "was refused: timeout is -1: expected seconds"),
        (q, q, {}, {"layout": "zigzag"}, "has layout zigzag, but rank 0 has contiguous"),
        (q, q, {"method": "ring"}, {"method": "gather"}, "has method gather, but rank 0 has ring"),
        (q, q, {"engine": "portable"}, {"engine": None}, "has engine None, but rank 0 has portable"),
        (q, q, {}, rows, "has mask given, but rank 0 has not given"),
        (q, q, rows, {"mask": np.ones((3, n), bool)}, "was refused: mask has shape (3, "),
        (q, q, rows, {"mask": np.ones((2, 1, n), bool)}, "has mask's batches and heads [1, 2], but rank 0 has [1, 1]"),
        (q, q, bias, {"bias": np.zeros((4, n))}, "has bias's dtype float64, but rank 0 has float32"),
    ]

    def check(told: str, expected: str) -> None:
        own_error = last and "was refused: " in expected
        wanted = expected.removeprefix("was refused: ") if own_error else f"rank {world - 1} {expected}"
        assert wanted in told, (wanted, told)

    for own_q, own_k, rules_of_all, rules_of_last, expected in calls:
        given = rules_of_all | (rules_of_last if last else {})
        tensors = (own_q, own_k, own_k) if last else (q, q, q)
        told = ""
        try:
            ch.distributed.attention(*tensors, **{"timeout": 20.0, **given})
        except ch.errors.ClearheadError as error:
            told = error.one_line()
        check(told, expected)
    matrix = ch.distributed.ShardedAttentionMatrix(q, q, timeout=20.0)
    many, texts = torch.zeros(()).expand(4, 2**40), slice("a", None)
    asked: list[tuple[Callable[[], Any], str]] = [
        (lambda: matrix.observe(entropy=last), "has entropy True, but rank 0 has False"),
        (lambda: matrix.observe(entropy=1 if last else True), "was refused: entropy is 1: expected True or False."),
        (lambda: matrix[0, 0, int(last)], "has index [0, 0, 1, range(0, "),
        (lambda: matrix[0, 0, 99 if last else 0], "was refused: index 99 is outside axis 2"),
        (lambda: matrix.T[0, 0, 99 if last else 0], "was refused: index 99 is outside axis 2"),
        (lambda: matrix @ q[..., : 4 if last else 8], "has v's width 4, but rank 0 has 8"),
        (lambda: matrix.T @ q[0, 0, : 3 if last else 4], "was refused: g has shape (3, 8)"),
        (lambda: matrix.T @ (many if last else q), "was refused: Aᵀ·g of shape (1, 2, 4, 1099511627776) would take"),
        (lambda: matrix @ (many if last else q), "was refused: the output of (batch 1, heads 2, queries 4, keys 4)"),
        (lambda: matrix.observe(queries=texts if last else slice(2)), "was refused: queries is slice('a', None, None)"),
        (lambda: matrix.top(2**70 if last else 2), "was refused: top=1,180,591,620,717,411,303,424 of (batch 1, "),
        (lambda: matrix.image(2, 2**40 if last else 2), "was refused: image=(2, 1099511627776) of (batch 1, "),
        (lambda: ch.distributed.attention(q, q, None if last else q, timeout=20.0), "was refused: v is a NoneType"),
        (lambda: ch.distributed.unshard(q, 9 if last else -2), "was refused: dim 9 is outside 0..3"),
        (lambda: ch.distributed.unshard(q.double() if last else q), "has dtype torch.float64, but rank 0 has torch.fl"),
    ]
    for ask, expected in asked:
        told = ""
        try:
            ask()
        except ch.errors.ClearheadError as error:
            told = error.one_line()
        check(told, expected)


FAULTS = {  # the fault on one rank, and the error on the others
    "absent": "rank {} did not call within 8 s",
    "late": "rank {} did not call within 8 s",
    "dies": "rank {} no longer answers",
    "stalls": "rank {} no longer answers",
    "breaks": "rank {} failed in attention: MemoryError('no room')",
    "breaks_early": "attention, backward: rank {0} did not call within 8 s; rank {0} failed in attention: Memory",
    "forgets": "attention, backward: rank {} did not call within 8 s",
    "dies_backward": "rank {} no longer answers",
}
# Seconds, where the error does not name them. A third, at most 10, is for reports, which are late on a busy machine.
PATIENCE = {"dies": 30.0, "dies_backward": 30.0, "breaks": 30.0, "stalls": 12.0}


def fault(rank: int, world: int, seed: int, kind: str, method: str) -> None:
    """One rank fails: all ranks end with an error within the timeout that names the rank."""
    limit, wrong = PATIENCE.get(kind, 8.0), seed % world
    told = ""
    q = torch.ones(1, 6, 8, 8, requires_grad=True)
    ch.distributed.attention(q, q, q, engine="portable", method=method).sum().backward()  # the first call succeeds
    if rank == wrong:
        engine = engines.get("portable")
        if kind == "absent":
            return
        if kind in ("dies", "stalls", "breaks", "breaks_early"):
            engine.rows = {"dies": die, "stalls": stall, "breaks": break_down, "breaks_early": break_down}[kind]
        if kind == "dies_backward":
            engine.gradients = die
        if kind == "late":
            time.sleep(limit + 2)
    start = time.monotonic()
    try:
        output = ch.distributed.attention(q, q, q, timeout=limit, engine="portable", method=method)
        if kind == "forgets" and rank == wrong:
            return
        start = time.monotonic()
        output.sum().backward()
    except (ch.errors.DistributedError, MemoryError) as error:
        told = str(error)
    assert told, "an answer without one of the ranks"
    print("ended", time.time())
    if rank != wrong or kind == "late":
        assert time.monotonic() - start < 30, time.monotonic() - start  # the group's own timeout is 60 seconds
        holder = "rank 0, which holds the store, no longer answers"
        gone = wrong == 0 or rank == wrong  # the store's holder failed, or left before the late rank
        assert FAULTS[kind].format(wrong) in told or (gone and holder in told), told


def die(*_: Any) -> None:
    os._exit(0)


def stall(*_: Any) -> None:
    time.sleep(20)
    print("awake", time.time(), flush=True)
    raise ch.errors.DistributedError("awake again")


def break_down(*_: Any) -> None:
    raise MemoryError("no room")


def meeting_place(file: Path, rank: int, world: int, wait: timedelta) -> dist.TCPStore:
    """Rank 0 opens the store at a free port and writes the port into a file."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=wait)
        unfinished = file.with_suffix(".new")
        unfinished.write_text(str(store.port))
        unfinished.rename(file)
        return store
    while not file.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(file.read_text()), world, is_master=False, timeout=wait)


def one_rank(job: str, rank: int, place: Path) -> None:
    """Run one rank of a job; its output goes to a file and ends with "well" if all went well."""
    scenarios, world, seed, *more = job.split("/")
    told = os.open(place, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(told, stream)
    torch.set_num_threads(1)
    ch.set_num_threads(1)
    wait = timedelta(seconds=60)
    store = meeting_place(place.with_suffix(".port"), rank, int(world), wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=int(world), timeout=wait)
    for name in scenarios.split(","):
        getattr(sys.modules["__main__"], name)(rank, int(world), int(seed), *more)
    print("well", flush=True)
    if scenarios != "fault":
        dist.barrier()
        dist.destroy_process_group()


def load() -> None:
    """Load what every rank would load for itself, and none of it starts a thread."""
    for name in (
        "torch._decomp.decompositions_for_jvp",
        "torch._dynamo",
        "clearhead.distributed",
        "clearhead.engines.native",
        "clearhead.ops.torch_graph",
    ):
        import_module(name)


def main() -> None:
    """Fork all ranks of all jobs, and wait for them."""
    load()
    directory, *jobs = sys.argv[1:]
    for number, job in enumerate(jobs):
        for rank in range(int(job.split("/")[1])):
            if os.fork() == 0:
                return one_rank(job, rank, Path(directory) / f"{number}.{rank}")
    while True:
        try:
            os.wait()
        except ChildProcessError:
            return None


if __name__ == "__main__":
    main()
