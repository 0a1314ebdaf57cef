"""Ranks of the tests of sharded attention: outputs, statistics, bits, bytes, refusals and faults; see sharded.py."""

import os
import time
from collections.abc import Callable
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
from sharded import LAYOUTS, METHODS, Problem, close, compare_entries, cut, main, must_be_refused, must_raise, sizes_of

attention, Matrix = ch.distributed.attention, ch.distributed.ShardedAttentionMatrix
STATISTICS = ("output", "logsumexp", "max_logit", "entropy", "distance", "diagonal", "received", "peak")


def rules(rank: int, world: int, seed: int) -> None:
    """Outputs, statistics, products and weights of random problems, compared with those of one process."""
    rng = np.random.default_rng(seed)
    for _ in range(8):
        one = Problem(rng, rank, world)
        local = one.local
        output = attention(local["q"], local["k"], local["v"], **one.place, **one.here)
        close(output, one.of_queries(ch.attention(*one.whole.values(), **one.rules)), one.what)
        whole, matrix = one.matrices()
        n = one.n
        some = slice(int(rng.integers(0, n + 1)), int(rng.integers(0, n + 1)), int(rng.integers(1, 4)))
        for chosen in (slice(None), some):
            observed(one, whole, matrix, chosen)
        for pick in (np.s_[:], np.s_[:, 0]):
            g, u = (torch.from_numpy(rng.standard_normal((size, 2)))[pick] for size in (n, one.m))
            close(matrix.T @ one.of_queries(g, 0), one.of_keys(whole.T @ g), f"{one.what} transposed")
            close(matrix @ one.of_keys(u, 0), one.of_queries(whole @ u), f"{one.what} product")
        assert (matrix.shape, matrix.dtype, matrix.ndim, len(matrix)) == (whole.shape, whole.dtype, 4, 2)
        compare_entries(rng, matrix, whole[...], one.what)


def observed(one: Problem, whole: Any, matrix: Any, chosen: slice) -> None:
    """Compare every statistic of the chosen queries."""
    asked: dict[str, Any] = dict.fromkeys(STATISTICS[1:], True) | {"image": (3, 4), "top": 2}
    of_whole, of_shards = one.labels()
    seen = matrix.observe(one.local["v"], **asked, groups=of_shards, queries=chosen)
    truth = whole.observe(one.whole["v"], **asked, groups=of_whole, queries=chosen)
    rows = one.places(chosen)
    for name in (*STATISTICS, "image", "groups"):
        expected = getattr(truth, name)
        if name in ("received", "peak"):
            expected = one.of_keys(expected)
        elif name in STATISTICS:
            expected = expected[:, :, rows]
        close(getattr(seen, name), expected, f"{one.what} {chosen} {name}")
    close(seen.top.weights, truth.top.weights[:, :, rows], f"{one.what} {chosen} top")
    np.testing.assert_array_equal(seen.top.indices, truth.top.indices[:, :, rows], one.what)


def refused(rank: int, world: int, _seed: int) -> None:
    """Derivatives that are not there, and tensors that PyTorch splits itself: an error on every rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    x = torch.randn(1, world, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
    paths: dict[str, Callable[[Any], Any]] = {
        "peak": lambda one: one.peak(),
        "top": lambda one: one.observe(top=2, entropy=True),
        "max_logit": lambda one: one.max_logit(),
    }
    engine = engines.get("native")
    rows, engine.rows = engine.rows, break_down  # refused before any work
    for (name, path), method in zip(paths.items(), METHODS, strict=True):
        with forward_ad.dual_level():
            A = Matrix(*[forward_ad.make_dual(x, x)] * 2, method=method)
            must_raise(lambda: path(A), f"{name} has no forward-mode derivative here")  # noqa: B023
        dist.barrier()
    engine.rows = rows
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        must_raise(lambda: Matrix(x, x).T @ dual, "g carries a tangent")
        A = Matrix(dual, dual)
        for call in (lambda: A.T @ x, lambda: A[0], lambda: A.cuts(x, x), lambda: A.contributions(x, x)):
            must_raise(call, "q carries a tangent")
        duals = (dual, x if rank else dual, x)
        differ = "has tangents ['q'], but rank 0 has ['k', 'q']: they must be"
        must_raise(lambda: attention(*duals, timeout=20.0), differ)
    must_raise(lambda: torch.func.vmap(attention)(*[torch.stack([x, x])] * 3), "ranks cannot be mapped (torch.vmap)")
    must_raise(lambda: torch.func.grad(lambda y: Matrix(y, y).entropy().sum())(x), "q is inside torch.func")
    again = torch.func.grad(lambda z: torch.func.grad(lambda y: attention(y, y, y).square().sum())(z).square().sum())
    must_raise(lambda: torch.func.grad(lambda y: again(y).sum())(x), "attention has no third derivative here")
    whole = DTensor.from_local(x, init_device_mesh("cpu", (world,)), [Shard(2)], run_check=False)
    for call in (ch.attention, attention):
        must_raise(lambda: call(whole, whole, whole), "q is a DTensor: expected a plain tensor")  # noqa: B023
    must_raise(lambda: ch.attention(x, x, x, bias=whole), "bias is a DTensor: expected a plain tensor")
    changed = x.clone().requires_grad_() * 1
    output = attention(changed, changed, changed)
    changed.detach().mul_(2)
    must_raise(lambda: output.sum().backward(), "modified by an inplace operation")
    must_raise(
        lambda: attention(x, x, x, method="ulysses"),
        "unknown method `ulysses`. hint: Known: auto, gather, merge, ring.",
    )


def passes(_rank: int, _world: int, _seed: int) -> None:
    """A picture takes one pass over the keys, with a graph or without."""
    engine, calls = engines.get("portable"), []
    rows = engine.rows

    def counted(*arguments: Any) -> Any:
        calls.append(1)
        return rows(*arguments)

    engine.rows = counted
    for asked in (False, True):
        calls.clear()
        q = torch.ones(1, 2, 5, 4, requires_grad=asked)
        picture = Matrix(q, q, method="gather", engine="portable").image(2, 2)
        assert (len(calls), picture.requires_grad) == (1, asked)


def device(rank: int, world: int, _seed: int) -> None:
    """Tensors on a device, here treated so by Triton's interpreter: computed there, with results there."""
    rng, sizes = np.random.default_rng(5), sizes_of(21, world)
    whole = [torch.from_numpy(rng.standard_normal((1, 2, 21, 4))).requires_grad_() for _ in "qkv"]
    bias = torch.from_numpy(rng.random((1, 2, 21, 21)))
    truth = ch.attention(*whole, causal=True, sinks=torch.ones(2), bias=bias)
    truth.sum().backward()
    with torch.no_grad():
        A = ch.AttentionMatrix(*whole[:2], causal=True, sinks=torch.ones(2), bias=bias)
        entropy, received = A.entropy(), A.received()

    def part(x: torch.Tensor) -> torch.Tensor:
        return cut(x.detach(), 2, sizes, rank)

    rules_: dict[str, Any] = {"causal": True, "sinks": torch.ones(2), "bias": part(bias)}
    arrays._from_torch = lambda _torch, x, _name: DeviceArray(x.detach())  # read as tensors on a GPU are
    for method in ("gather", "ring"):
        leaves = [part(x).requires_grad_() for x in whole]
        output = attention(*leaves, method=method, **rules_)
        output.sum().backward()
        close(output.detach(), part(truth), method)
        for leaf, all_of_it in zip(leaves, whole, strict=True):
            close(leaf.grad, part(all_of_it.grad), method)
        matrix = Matrix(*[x.detach() for x in leaves[:2]], method=method, **rules_)
        assert isinstance(matrix._shards.engine, Remote)
        close(matrix.entropy(), part(entropy), method)
        close(matrix.received(), part(received), method)


def bits(rank: int, world: int, seed: int) -> None:
    """The same bits on every run; those of one process where one rank has all keys of a query."""
    rng, sizes = np.random.default_rng(seed), sizes_of(96, world)
    q, k, v = (torch.from_numpy(rng.standard_normal((1, 12, 96, 8))).float() for _ in range(3))
    for layout in LAYOUTS:
        whole = cut(ch.attention(q, k, v, causal=True), 2, sizes, rank, layout)
        local = [cut(x, 2, sizes, rank, layout).requires_grad_() for x in (q, k, v)]
        for method in METHODS:
            runs = []
            for _ in range(3):
                output = attention(*local, causal=True, method=method, layout=layout)
                runs.append((output, *torch.autograd.grad(output.square().sum(), local)))
            for again in runs[1:]:
                assert all(torch.equal(x, y) for x, y in zip(runs[0], again, strict=True)), method
            assert method != "gather" or torch.equal(runs[0][0], whole), (method, layout)


def exact(rank: int, world: int, seed: int) -> None:
    """The error of one process: at most 1.25 times that of PyTorch's fused kernel against float64, in every dtype."""
    torch.manual_seed(seed)
    fused = torch.nn.functional.scaled_dot_product_attention
    wide = [torch.randn(1, 12, n, 32, dtype=torch.float64) for n in (130, 700, 700)]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        whole = [x.to(dtype) for x in wide]
        truth = fused(*(x.double() for x in whole))
        theirs = (fused(*whole).double() - truth).square().mean()
        local = [cut(x, 2, sizes_of(x.shape[2], world), rank) for x in whole]
        for method in METHODS:
            output = attention(*local, method=method).double()
            ours = (output - cut(truth, 2, sizes_of(130, world), rank)).square().mean()
            assert ours.sqrt() <= 1.25 * theirs.sqrt(), (method, dtype, ours, theirs)


def received(*shards: torch.Tensor, **rules: Any) -> dict[int, int]:
    """Bytes of the messages that attention has this rank receive, by the rank they come from."""
    counts_: dict[int, int] = {}
    real = dist.P2POp

    def watched(how: Any, memory: torch.Tensor, peer: int, *more: Any) -> Any:
        if how is dist.irecv:
            counts_[peer] = counts_.get(peer, 0) + memory.numel() * memory.element_size()
        return real(how, memory, peer, *more)

    dist.P2POp = watched  # type: ignore[assignment,misc]
    try:
        attention(*shards, **rules)
    finally:
        dist.P2POp = real  # type: ignore[misc]
    return counts_


def windows(rank: int, world: int, _seed: int) -> None:
    """With a window, messages come only from the neighbour that holds the keys, however long the sequence is.

    Keys come from the previous rank; with merge, queries from the next and partial results from the previous.
    """
    before, after = ({rank - 1} if rank else set()), ({rank + 1} if rank + 1 < world else set())
    for method in METHODS:
        counted = [received(*[torch.zeros(1, 2, n, 8)] * 3, window=(16, 0), method=method) for n in (64, 256)]
        assert set(counted[0]) == set(counted[1]) == before | (after if method == "merge" else set()), (method, counted)
        if method == "gather":
            assert counted[0] == counted[1] == ({rank - 1: 16 * 2 * 2 * 8 * 4} if rank else {}), counted


def counts(rank: int, world: int, seed: int) -> None:
    """Each method receives the number of bytes that its plan predicts."""
    rng = np.random.default_rng(seed)
    for _ in range(4):
        sizes = (1 + rng.multinomial(40, rng.dirichlet(np.ones(world)))).tolist()
        shared = int(rng.integers(1, 3))
        q, k, v = (torch.ones(2, heads, sizes[rank], d) for heads, d in ((4, 8), (shared, 8), (shared, 4)))
        rules: Any = [{}, {"causal": True}, {"window": (int(rng.integers(9)), 3)}][int(rng.integers(3))]
        rules["layout"] = str(rng.choice(LAYOUTS))
        for name, one in (("mask", torch.ones(1, dtype=torch.bool)), ("bias", torch.ones(1))):
            if rng.random() < 0.4:
                lead = (int(rng.integers(1, 3)), (1, 4)[int(rng.integers(2))])
                rules[name] = one.expand(*lead, sizes[rank], sum(sizes))
        plan = ch.distributed.plan(q, k, v, **rules)
        for method, predicted in plan.bytes.items():
            most = torch.tensor([sum(received(q, k, v, method=method, **rules).values())])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            assert int(most) == predicted, (method, rules, sizes, int(most), predicted)
        assert plan.method == min(plan.bytes, key=plan.bytes.get)


def cutting(rank: int, world: int, seed: int) -> None:
    """Each shard holds the positions that `positions` gives, and all shards together are the whole."""
    x = torch.from_numpy(np.random.default_rng(seed).standard_normal((2, 13, 3)))
    for layout in LAYOUTS:
        shard = ch.distributed.shard(x, layout=layout)
        assert torch.equal(shard, x[:, ch.distributed.positions(13, layout=layout)])
        assert torch.equal(shard, cut(x, 1, sizes_of(13, world), rank, layout))
        assert torch.equal(ch.distributed.unshard(shard, layout=layout), x)


def decoding(rank: int, world: int, seed: int) -> None:
    """One new query on the last rank, keys on all ranks: partial results are merged."""
    rng = np.random.default_rng(seed)
    q, k, v = (torch.from_numpy(rng.standard_normal((2, 4, n, 8))) for n in (1, 50, 50))
    local = [cut(x, 2, sizes_of(50, world), rank) for x in (k, v)]
    new = q if rank == world - 1 else q[:, :, :0]
    for method in METHODS:
        output = attention(new, *local, causal=True, query_offset=49, method=method)
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

    def calling(q_of_last: Any, k_of_last: Any, rules: dict[str, Any]) -> Callable[[], Any]:
        tensors = (q_of_last, k_of_last, k_of_last) if last else (q, q, q)
        return lambda: attention(*tensors, **{"timeout": 20.0, **rules})

    must_be_refused(
        rank, world, [(calling(*pair, every | (one if last else {})), text) for *pair, every, one, text in calls]
    )
    matrix = Matrix(q, q, timeout=20.0)
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
        (lambda: attention(q, q, None if last else q, timeout=20.0), "was refused: v is a NoneType"),
        (lambda: ch.distributed.unshard(q, 9 if last else -2), "was refused: dim 9 is outside 0..3"),
        (lambda: ch.distributed.unshard(q.double() if last else q), "has dtype torch.float64, but rank 0 has torch.fl"),
    ]
    must_be_refused(rank, world, asked)


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
    words = ""
    q = torch.ones(1, 6, 8, 8, requires_grad=True)
    attention(q, q, q, engine="portable", method=method).sum().backward()  # the first call succeeds
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
        output = attention(q, q, q, timeout=limit, engine="portable", method=method)
        if kind == "forgets" and rank == wrong:
            return
        start = time.monotonic()
        output.sum().backward()
    except (ch.errors.DistributedError, MemoryError) as error:
        words = str(error)
    assert words, "an answer without one of the ranks"
    print("ended", time.time())
    if rank != wrong or kind == "late":
        assert time.monotonic() - start < 30, time.monotonic() - start  # the group's own timeout is 60 seconds
        holder = "rank 0, which holds the store, no longer answers"
        gone = wrong == 0 or rank == wrong  # the store's holder failed, or left before the late rank
        assert FAULTS[kind].format(wrong) in words or (gone and holder in words), words


def die(*_: Any) -> None:
    os._exit(0)


def stall(*_: Any) -> None:
    time.sleep(20)
    print("awake", time.time(), flush=True)
    raise ch.errors.DistributedError("awake again")


def break_down(*_: Any) -> None:
    raise MemoryError("no room")


if __name__ == "__main__":
    main()
