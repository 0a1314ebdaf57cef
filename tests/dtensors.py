"""Ranks of the tests of attention on DTensors: outputs, statistics, gradients, bits, messages and refusals.

`python dtensors.py SCENARIO,… RANKS SEED FILE`, started by test_dtensors.py, runs functions of this script.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from importlib import import_module
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing import start_processes

import clearhead as ch

FACTOR = 4.0  # as in slack.py
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "spans[2]")
ROWS = ("output", "logsumexp", "max_logit", "entropy", "distance", "diagonal")
BATCH, HEADS, QUERIES = range(3)  # axes of q
AXES = {  # of the rules' arrays, counted from the last: q's, or None
    "bias": (BATCH, HEADS, QUERIES, None),
    "mask": (BATCH, HEADS, QUERIES, None),
    "alibi_slopes": (HEADS,),
    "sinks": (HEADS,),
    "scale": (HEADS,),
    "kv_lengths": (BATCH,),
    "query_lengths": (BATCH,),
    "query_offset": (BATCH,),
    "query_segments": (BATCH, QUERIES),
    "kv_segments": (BATCH, None),
    "spans[0]": (BATCH, QUERIES),
    "spans[1]": (BATCH, None),
    "spans[2]": (BATCH, HEADS, None, None),
}


class Problem:
    """A random problem, whole and as DTensors: each axis of the mesh shards another axis of q, or none."""

    def __init__(self, rng: np.random.Generator, mesh: DeviceMesh, dtype: torch.dtype = torch.float64) -> None:
        self.rng, self.mesh = rng, mesh
        kv_heads, group = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        n, m = (int(rng.integers(1, 14)) for _ in "nm")
        m = n if rng.random() < 0.4 else m
        self.sizes = int(rng.integers(1, 4)), kv_heads * group, n, m
        batch, heads, *_ = self.sizes
        self.split = [int(axis) for axis in rng.permutation([BATCH, HEADS, QUERIES, -1])[: mesh.ndim]]
        shapes = {"q": (batch, heads, n, 4), "k": (batch, kv_heads, m, 4), "v": (batch, kv_heads, m, 3)}
        self.whole = {name: torch.from_numpy(rng.standard_normal(shape)).to(dtype) for name, shape in shapes.items()}
        self.rules = self._rules()
        self.placed = {"q": [Replicate() if axis < 0 else Shard(axis) for axis in self.split]}
        for name in "kv":
            self.placed[name] = [
                self._key_placement(axis, ranks) for axis, ranks in zip(self.split, mesh.shape, strict=True)
            ]

    def _key_placement(self, axis: int, ranks: int) -> Any:
        kv_heads = self.whole["k"].shape[1]
        cut = axis == HEADS and kv_heads != self.sizes[1] and kv_heads % ranks
        return Replicate() if axis < 0 or cut or self.rng.random() < 0.4 else Shard(axis)

    def _rules(self) -> dict[str, Any]:
        rng, (batch, heads, n, m) = self.rng, self.sizes
        normal = lambda *shape: torch.from_numpy(rng.standard_normal(shape))  # noqa: E731
        table = normal(batch, heads, 3, 4)
        table[..., 0, 1] = -torch.inf
        every: dict[str, Any] = {
            "causal": True,
            "window": (int(rng.integers(0, 9)), int(rng.integers(0, 9))),
            "query_offset": torch.from_numpy(rng.integers(-2, 5, batch)) if rng.random() < 0.5 else 3,
            "scale": rng.random(heads).tolist() if rng.random() < 0.5 else 0.7,
            "softcap": 1.5,
            "alibi_slopes": torch.from_numpy(rng.random(heads)),
            "kv_lengths": rng.integers(0, m + 1, batch),
            "query_lengths": torch.from_numpy(rng.integers(0, n + 1, batch)),
            "segments": (torch.from_numpy(rng.integers(0, 2, (batch, n))), rng.integers(0, 2, (batch, m))),
            "sinks": normal(heads),
            "mask": torch.from_numpy(rng.random((batch, heads, n, m)) < 0.8),
            "bias": normal(batch, heads, n, m),
            "spans": (rng.integers(-1, 3, (batch, n)), torch.from_numpy(rng.integers(-1, 4, m)), table),
        }
        rules = {name: value for name, value in every.items() if rng.random() < 0.4}
        if n != m and not {"causal", "window", "alibi_slopes"}.isdisjoint(rules):
            rules["query_offset"] = every["query_offset"]
        if "segments" in rules:
            rules["query_segments"], rules["kv_segments"] = rules.pop("segments")
        for name, part, value in [(f"spans[{i}]", i, x) for i, x in enumerate(rules.pop("spans", ()))]:
            rules[name] = value if part < 2 or rng.random() < 0.6 else value[:1, :1]
        for name in {"mask", "bias"} & rules.keys():  # shared by some batch items and heads
            rules[name] = rules[name][tuple(slice(0, 1 if rng.random() < 0.4 else None) for _ in "bh")]
        return rules

    def distributed(self, name: str, x: Any) -> Any:
        """A rule's tensor as a DTensor, with placements that go with q's."""
        axes = AXES[name][-x.ndim :]
        places: list[Any] = []
        for split in self.split:
            place = axes.index(split) if split in axes else None
            fits = place is not None and x.shape[place] == self.sizes[split] and self.rng.random() < 0.6
            places.append(Shard(place) if fits else Replicate())
        return distribute_tensor(x, self.mesh, places)

    def leaves(self, *, graph: bool) -> tuple[dict[str, Any], dict[str, Any]]:
        """q, k, v and the rules by name, whole and as DTensors; with `graph` those that can require gradients."""
        whole = {**self.whole, **self.rules}
        sharded = {name: distribute_tensor(x, self.mesh, self.placed[name]) for name, x in self.whole.items()}
        for name, x in self.rules.items():
            distributes = isinstance(x, torch.Tensor) and (
                self.rng.random() < 0.6 or (graph and name in DIFFERENTIABLE)
            )
            sharded[name] = self.distributed(name, x) if distributes else x
        if graph:
            for side in (whole, sharded):
                for name, x in side.items():
                    if name in DIFFERENTIABLE and isinstance(x, torch.Tensor):
                        side[name] = x.detach().clone().requires_grad_()
        return whole, sharded

    def __repr__(self) -> str:
        return f"{self.sizes}, {self.whole['k'].shape[1]} key heads, {self.placed}, {sorted(self.rules)}"


def called(arrays: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
    """q, k, v and the rules as keywords."""
    rules = {name: x for name, x in arrays.items() if name not in ("q", "k", "v") and not name.startswith("spans")}
    spans = tuple(arrays[name] for name in sorted(arrays) if name.startswith("spans"))
    return arrays["q"], arrays["k"], arrays["v"], {**rules, **({"spans": spans} if spans else {})}


def close(seen: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(np.asarray(seen), np.asarray(expected), rtol=1e-9, atol=1e-11, err_msg=what)


def meshes(world: int) -> list[DeviceMesh]:
    return [init_device_mesh("cpu", shape) for shape in [(world,), *([(2, world // 2)] if world == 4 else [])]]


def everything(_rank: int, world: int, seed: int) -> None:
    """Outputs, statistics and gradients of random problems are those of one process."""
    rng = np.random.default_rng(seed)
    for mesh in meshes(world):
        for turn in range(12):
            one = Problem(rng, mesh)
            whole, sharded = one.leaves(graph=turn % 3 > 0)
            compare(one, whole, sharded)


def compare(one: Problem, whole: dict[str, Any], sharded: dict[str, Any]) -> None:
    *_, n, m = one.sizes
    (q, k, v, rules), (q_, k_, v_, rules_) = called(whole), called(sharded)
    out, out_ = ch.attention(q, k, v, **rules), ch.attention(q_, k_, v_, **rules_)
    assert isinstance(out_, DTensor)
    assert out_.shape == out.shape, repr(one)
    close(out_.full_tensor().detach(), out.detach(), repr(one))
    graph = whole["q"].requires_grad
    labels = one.rng.integers(-1, 3, n), one.rng.integers(-1, 3, m)
    asked: dict[str, Any] = {**dict.fromkeys([*ROWS[1:], "received"], True), "top": 2, "groups": labels}
    asked |= {} if graph else {"peak": True}
    asked |= {} if QUERIES in one.split else {"image": (2, 3)}
    A, B = ch.AttentionMatrix(q, k, **rules), ch.AttentionMatrix(q_, k_, **rules_)
    assert (A.shape, A.dtype) == (B.shape, B.dtype)
    seen, seen_ = A.observe(v, **asked), B.observe(v_, **asked)
    assert (seen.queries, seen.keys) == (seen_.queries, seen_.keys)
    pairs = {name: (getattr(seen, name), getattr(seen_, name)) for name in ("output", *asked) if name != "top"}
    pairs["top"] = seen.top.weights, seen_.top.weights
    np.testing.assert_array_equal(seen.top.indices, seen_.top.indices.full_tensor(), repr(one))
    loss = loss_ = torch.zeros((), dtype=torch.float64)
    for name, (x, x_) in pairs.items():
        whole_ = x_.full_tensor()
        close(whole_.detach(), x.detach(), f"{name} of {one}")
        if name in ("received", "peak", "groups"):
            kinds = [Partial("max" if name == "peak" else "sum") if axis == QUERIES else None for axis in one.split]
            assert all(kind in (None, place) for kind, place in zip(kinds, x_.placements, strict=True)), x_.placements
        weigh = torch.from_numpy(one.rng.standard_normal(x.shape))
        finite = torch.isfinite(x.detach())
        loss = loss + (x.where(finite, 0) * weigh).sum()
        loss_ = loss_ + (whole_.where(finite, 0) * weigh).sum()
    if graph:
        loss.backward()
        loss_.backward()
        for name, x in whole.items():
            if isinstance(x, torch.Tensor) and x.requires_grad:
                assert sharded[name].grad.placements == sharded[name].placements, (name, one)
                close(sharded[name].grad.full_tensor(), x.grad, f"gradient of {name} of {one}")


def narrow(_rank: int, world: int, seed: int) -> None:
    """In narrower dtypes the output has the bits of one process; gradients and statistics its error."""
    rng, mesh = np.random.default_rng(seed), init_device_mesh("cpu", (world,))
    wide = [
        torch.from_numpy(rng.standard_normal((2, heads, n, 16)))
        for heads, n in ((2 * world, 50), (world, 70), (world, 70))
    ]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for axis in (BATCH, HEADS, QUERIES):
            results = []
            for each, place in ((dtype, [Shard(axis)]), (dtype, None), (torch.float64, None)):
                leaves = [x.to(dtype).to(each) for x in wide]
                leaves = [x if place is None else distribute_tensor(x, mesh, place) for x in leaves]
                leaves = [x.requires_grad_() for x in leaves]
                seen = ch.AttentionMatrix(*leaves[:2], causal=True, query_offset=3).observe(leaves[2], received=True)
                (seen.output.square().sum() + seen.received.square().sum()).backward()
                results.append([seen.output, seen.received, *(x.grad for x in leaves)])
            ours, one, truth = results
            ours = [x.full_tensor().detach() for x in ours]
            assert torch.equal(ours[0], one[0].detach()), (dtype, axis)
            for name, x, y, true in zip(("output", "received", *"qkv"), ours, one, truth, strict=True):
                error, usual = ((part.double() - true).abs().max().item() for part in (x, y.detach()))
                eps = torch.finfo(x.dtype).eps * true.abs().max().item()
                assert error <= FACTOR * (usual + eps), (dtype, axis, name, error, usual)


def messages(_rank: int, world: int, _seed: int) -> None:
    """Over batch and heads nothing is sent, forward and backward; over queries keys and values are gathered once."""
    mesh = init_device_mesh("cpu", (world,))
    q, k = torch.randn(world, 2 * world, 9, 4), torch.randn(world, world, 9, 4)
    for axis in (BATCH, HEADS):
        leaves = [distribute_tensor(x, mesh, [Shard(axis)]).requires_grad_() for x in (q, k, k)]
        with CommDebugMode() as sent:
            seen = ch.AttentionMatrix(*leaves[:2], causal=True).observe(leaves[2], received=True, image=(2, 2))
            (seen.output.to_local().sum() + seen.received.to_local().sum()).backward()
        assert sent.get_total_counts() == 0, sent.get_comm_counts()
    sides = [distribute_tensor(x, mesh, [Shard(QUERIES)]) for x in (q, k, k)]
    with CommDebugMode() as sent:
        ch.attention(*sides, causal=True)
    assert sent.get_total_counts() == 2 * (world > 1), sent.get_comm_counts()


def shapes(_rank: int, world: int, _seed: int) -> None:
    """Two and three axes, further batch axes, ranks without queries, one chosen part, edits, A @ v, plain drop-ins."""
    mesh = init_device_mesh("cpu", (world,))
    for lead in ((), (4,), (2, 3, 4)):
        whole = [torch.randn(*lead, n, 5, dtype=torch.float64) for n in (3, 6, 6)]
        for axis in range(len(lead) + 1):
            q, k, v = (distribute_tensor(x, mesh, [Shard(axis)]) for x in whole)
            rules: dict[str, Any] = {"causal": True, "query_offset": 3, "kv_lengths": torch.full(lead[:-1], 5)}
            A, B = ch.AttentionMatrix(*whole[:2], **rules), ch.AttentionMatrix(q, k, **rules)
            close((B @ v).full_tensor(), A @ whole[2], f"{lead} {axis}")
            close(B.received().full_tensor(), A.received(), f"{lead} {axis}")
            cut, cut_ = (x.cut(queries=[0], keys=[1]).boost(2, by=1.5).tempered(1.3) for x in (A, B))
            close(cut_.entropy().full_tensor(), cut.entropy(), f"{lead} {axis}")
            if axis < len(lead):
                seen, seen_ = (x.observe(queries=slice(1, 3), received=True, entropy=True) for x in (A, B))
                close(seen_.received.full_tensor(), seen.received, f"{lead} {axis}")
                close(seen_.entropy.full_tensor(), seen.entropy, f"{lead} {axis}")
    assert repr(B) == repr(A)
    local = torch.zeros(2, 2, dtype=torch.float64)
    waiting = DTensor.from_local(local, mesh, [Shard(0)]).redistribute(placements=[Replicate()], async_op=True)
    assert ch.attention(waiting, waiting, waiting).shape == (2 * world, 2)


def refused(rank: int, world: int, _seed: int) -> None:
    """What is not computed is refused by name, on every rank, before anything is sent."""
    mesh, other = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (1, world))
    x = torch.randn(2, 2, 4 * world, 4, dtype=torch.float64)
    on = lambda *places, x=x, mesh=mesh: distribute_tensor(x, mesh, places)  # noqa: E731
    over_batch, over_queries, replicated = on(Shard(0)), on(Shard(2)), on(Replicate())
    over_d, partial = on(Shard(3)), DTensor.from_local(x, mesh, [Partial()])
    twice, elsewhere = (on(one, one, mesh=other) for one in (Shard(2), Replicate()))
    heads, kv_head = (on(Shard(1), x=torch.zeros(2, n, 4, 4)) for n in (2 * world, 1))
    n = x.shape[2]
    bias = torch.zeros(2, 2, n, n, dtype=torch.float64)
    bias_over_keys = on(Shard(3), x=bias)
    A, graph = ch.AttentionMatrix(over_queries, over_queries), over_queries.clone().requires_grad_()
    attention, q = ch.attention, over_queries
    calls: list[tuple[Callable[[], Any], str]] = [
        (lambda: attention(over_d, q, q), "q is (Shard(dim=3),): expected each axis of the mesh to replicate q, or"),
        (lambda: attention(partial, q, q), "hint: q.redistribute(placements=[Shard(dim=2)])"),
        (lambda: attention(twice, q, q), "expected each axis of the mesh"),
        (lambda: attention(q, x, q), "k is a Tensor: expected a DTensor on q's mesh"),
        (lambda: attention(q, elsewhere, q), "k is on DeviceMesh"),
        (lambda: attention(q, q, partial), "v is (Partial(sum),) and q is (Shard(dim=2),): expected v to be (Sh"),
        (lambda: attention(replicated, q, q), "expected k to be (Replicate(),)."),
        (lambda: attention(over_batch, q, q), "k.redistribute(placements=[Shard(dim=0)])"),
        (lambda: attention(heads, kv_head, kv_head), "expected k to be (Replicate(),)."),
        (lambda: attention(x, x, x, bias=q), "bias is a DTensor: expected a dense tensor of numbers."),
        (lambda: attention(q, q, q, bias=bias_over_keys), "bias.redistribute(placements=[Shard(dim=2)])"),
        (lambda: attention(q, q, q, bias=bias.requires_grad_()), "bias requires grad and is no DTensor"),
        (lambda: A[0, 0, 1], "weights read by index: not computed for DTensors"),
        (lambda: A.T @ x, "A.T @ g: not computed for DTensors"),
        (lambda: A.cut_effects(q, q), "cuts: not computed for DTensors"),
        (lambda: A.image(2, 2), "image is not computed where q is sharded over queries"),
        (lambda: A.observe(queries=slice(2), entropy=True), "`queries` was given, but q is sharded over queries"),
        (lambda: ch.AttentionMatrix(graph, q).peak(), "peak has no derivative where q is sharded over queries"),
    ]
    refuse(calls)
    with forward_ad.dual_level():  # PyTorch refuses duals of DTensors itself
        dual = forward_ad.make_dual(bias.detach(), bias.detach())
        refuse([(lambda: attention(q, q, q, bias=dual), "bias carries a tangent")])
    uneven = torch.zeros(1, 1, 1 + rank, 4)
    shape = torch.Size([1, 1, world * (world + 1) // 2, 4])
    irregular = DTensor.from_local(uneven, mesh, [Shard(2)], shape=shape, stride=(shape[2] * 4, shape[2] * 4, 4, 1))
    if rank == 0:  # the other ranks are not waited for
        compiled = torch.compile(lambda y: attention(y, y, y), backend="eager")
        refuse([(lambda: compiled(q), "attention on DTensors is not compiled")], watched=False)
        uncompiled, y = torch.compile(lambda y: torch.compiler.disable(attention)(y, y, y), backend="eager"), over_batch
        assert torch.equal(uncompiled(y).to_local(), attention(y, y, y).to_local())
        refuse([(lambda: attention(irregular, irregular, irregular), "q has shape (1, 1, 1, 4) on this rank, of")])


def refuse(calls: list[tuple[Callable[[], Any], str]], *, watched: bool = True) -> None:
    for call, words in calls:
        said, sent = "", CommDebugMode()
        with sent if watched else nullcontext():  # a compiler takes no such modes
            try:
                call()
            except (ch.errors.ClearheadError, RuntimeError) as error:
                said = error.one_line() if isinstance(error, ch.errors.ClearheadError) else str(error)
        assert words in said, (words, said)
        assert sent.get_total_counts() == 0, words


def one_rank(rank: int, scenarios: str, world: int, seed: int, place: str) -> None:
    """Run one rank of a job."""
    torch.set_num_threads(1)
    ch.set_num_threads(1)
    wait = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{place}", rank=rank, world_size=world, timeout=wait)
    for name in scenarios.split(","):
        torch.manual_seed(seed)
        globals()[name](rank, world, seed)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    for module in ("torch._dynamo", "clearhead.engines.native", "clearhead.ops.torch_sharded"):
        import_module(module)  # what each rank would load
    names, ranks, seed, place = sys.argv[1:]
    start_processes(one_rank, (names, int(ranks), int(seed), place), nprocs=int(ranks), start_method="fork")
