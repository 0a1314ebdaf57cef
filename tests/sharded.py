"""What ranks of tests over process groups share: a random problem, whole and in shards, and how they are started.

`python sharded_x.py DIRECTORY SCENARIO,…/WORLD/SEED/… …`, started by ranks.py, runs functions of that script.
"""

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

import clearhead as ch

METHODS = ("gather", "ring", "merge")
LAYOUTS = ("contiguous", "zigzag")


def sizes_of(total: int, world: int) -> list[int]:
    """How many positions each rank holds where they hold equally many, but for one more on the first ones."""
    return [total // world + (rank < total % world) for rank in range(world)]


def cut(x: Any, axis: int, sizes: list[int], rank: int, layout: str = "contiguous") -> Any:
    """A rank's part of a whole array, from the documented meaning of a layout."""
    if layout == "contiguous":
        places = np.arange(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    else:
        lengths = [(size + 1) // 2 for size in sizes] + [size // 2 for size in reversed(sizes)]
        ends = np.cumsum(lengths)
        chunks = (rank, 2 * len(sizes) - 1 - rank)
        places = np.concatenate([np.arange(ends[i] - lengths[i], ends[i]) for i in chunks])
    if isinstance(x, torch.Tensor):
        return x.index_select(axis, torch.from_numpy(places))
    return np.take(x, places, axis)


class Problem:
    """A random problem, whole and as this rank's shards: any numbers of queries and keys on a rank, also none.

    whole, local   q, k and v
    rules, here    the rules of the whole, and this rank's part
    place          the layout, the method and a timeout, as keywords
    """

    def __init__(self, rng: np.random.Generator, rank: int, world: int, method: str = "") -> None:
        self.rng, self.rank, self.world = rng, rank, world
        self.layout, self.method = str(rng.choice(LAYOUTS)), method or str(rng.choice(METHODS))
        self.place: Any = {"layout": self.layout, "method": self.method, "timeout": 60.0}
        heads, group = int(rng.integers(1, 3)), int(rng.integers(1, 4))
        self.queries, self.keys = (
            rng.multinomial(int(rng.integers(0, 40)), rng.dirichlet(np.ones(world))).tolist() for _ in "qk"
        )
        if rng.random() < 0.5:
            self.keys = self.queries
        self.n, self.m = sum(self.queries), sum(self.keys)
        shapes = {"q": (2, heads * group, self.n, 4), "k": (2, heads, self.m, 4), "v": (2, heads, self.m, 3)}
        self.whole = {name: torch.from_numpy(rng.standard_normal(shape)) for name, shape in shapes.items()}
        self.rules = self._rules(2, heads * group)

    def _rules(self, batch: int, heads: int) -> dict[str, Any]:
        rng, n, m = self.rng, self.n, self.m
        table = torch.from_numpy(rng.standard_normal((batch, heads, 3, 4)))
        table[..., 0, 1] = -torch.inf
        every: dict[str, Any] = {
            "causal": True,
            "window": (int(rng.integers(0, 9)), int(rng.integers(0, 9))),
            "query_offset": int(rng.integers(0, 5)),
            "scale": rng.random(heads) if rng.random() < 0.5 else 0.7,
            "softcap": 1.5,
            "alibi_slopes": rng.random(heads),
            "kv_lengths": rng.integers(0, m + 1, batch),
            "query_lengths": rng.integers(0, n + 1, batch),
            "segments": (rng.integers(0, 2, (batch, n)), rng.integers(0, 2, (batch, m))),
            "sinks": torch.from_numpy(rng.standard_normal(heads)),
            "mask": rng.random((batch, heads, n, m)) < 0.8,
            "bias": torch.from_numpy(rng.standard_normal((batch, heads, n, m))),
            "spans": (rng.integers(-1, 3, (batch, n)), rng.integers(-1, 4, m), table[int(rng.integers(2))]),
        }
        rules = {name: value for name, value in every.items() if rng.random() < 0.35}
        if n != m and not {"causal", "window", "alibi_slopes"}.isdisjoint(rules):
            rules["query_offset"] = every["query_offset"]
        if "segments" in rules:
            rules["query_segments"], rules["kv_segments"] = rules.pop("segments")
        for name in {"mask", "bias"} & rules.keys():  # shared by some batch entries and heads
            rules[name] = rules[name][tuple(slice(0, 1 if rng.random() < 0.4 else None) for _ in "bh")]
        return rules

    @property
    def local(self) -> dict[str, Any]:
        return {name: self.of_queries(x) if name in ("q", "g") else self.of_keys(x) for name, x in self.whole.items()}

    @property
    def here(self) -> dict[str, Any]:
        parts: dict[str, Any] = dict(self.rules)
        for name in {"mask", "bias", "query_segments"} & parts.keys():
            parts[name] = self.of_queries(parts[name], -1 if name == "query_segments" else 2)
        if "kv_segments" in parts:
            parts["kv_segments"] = self.of_keys(parts["kv_segments"], -1)
        if "spans" in parts:
            of_queries, of_keys, table = parts["spans"]
            parts["spans"] = self.of_queries(of_queries, 1), self.of_keys(of_keys, 0), table
        return parts

    @property
    def what(self) -> str:
        return f"{self.method} {self.layout} {sorted(self.rules)} {self.queries} {self.keys}"

    def of_queries(self, x: Any, axis: int = 2) -> Any:
        return cut(x, axis % x.ndim, self.queries, self.rank, self.layout)

    def of_keys(self, x: Any, axis: int = 2) -> Any:
        return cut(x, axis % x.ndim, self.keys, self.rank, self.layout)

    def labels(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Random groups of queries and of keys, of the whole and of this rank."""
        queries, keys = (torch.from_numpy(self.rng.integers(-1, 3, total)) for total in (self.n, self.m))
        return (queries, keys), (self.of_queries(queries, 0), self.of_keys(keys, 0))

    def places(self, chosen: slice, rank: int | None = None, *, keys: bool = False) -> list[int]:
        """Which of the chosen queries, or keys, a rank has, in its shard's order."""
        sizes = self.keys if keys else self.queries
        held = cut(np.arange(sum(sizes)), 0, sizes, self.rank if rank is None else rank, self.layout).tolist()
        among = range(sum(sizes))[chosen]
        return [among.index(place) for place in held if place in among]

    def matrices(self) -> tuple[Any, Any]:
        """The attention matrix of one process, and that of shards."""
        local = self.local
        sharded = ch.distributed.ShardedAttentionMatrix(local["q"], local["k"], **self.place, **self.here)
        return ch.AttentionMatrix(self.whole["q"], self.whole["k"], **self.rules), sharded


def close(seen: Any, expected: Any, what: str) -> None:
    np.testing.assert_allclose(np.asarray(seen), np.asarray(expected), rtol=1e-9, atol=1e-11, err_msg=what)


def index(rng: np.random.Generator, size: int) -> Any:
    """An integer or a slice of any direction."""
    if size and rng.random() < 0.4:
        return int(rng.integers(-size, size))
    ends = [None if rng.random() < 0.3 else int(rng.integers(-size - 1, size + 2)) for _ in "ab"]
    return slice(*ends, int(rng.choice([-2, -1, 1, 2, 3])))


def compare_entries(rng: np.random.Generator, matrix: Any, dense: Any, what: str) -> None:
    """Compare entries by index, of the matrix and of its transpose."""
    dense = np.asarray(dense)
    for _ in range(3):
        key = tuple(index(rng, size) for size in dense.shape)
        assert matrix[key].shape == dense[key].shape, f"{what} {key}"
        close(matrix[key], dense[key], f"{what} {key}")
        key = (*key[:2], *key[:1:-1])
        close(matrix.T[key], dense.swapaxes(-1, -2)[key], f"{what} {key} transposed")


def words_of(call: Callable[[], Any]) -> str:
    """The error that a call raises, as one line; "" where it raises none."""
    try:
        call()
    except (ch.errors.ClearheadError, RuntimeError) as error:
        return error.one_line() if isinstance(error, ch.errors.ClearheadError) else str(error)
    return ""


def must_raise(call: Callable[[], Any], words: str) -> None:
    raised = words_of(call)
    assert words in raised, (words, raised)


def must_be_refused(rank: int, world: int, asked: list[tuple[Callable[[], Any], str]]) -> None:
    """The last rank asks with other arguments: its error says what is wrong, the others name rank and argument."""
    for ask, expected in asked:
        alone = rank == world - 1 and "was refused: " in expected
        must_raise(ask, expected.removeprefix("was refused: ") if alone else f"rank {world - 1} {expected}")


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
    output = os.open(place, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
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


def main() -> None:
    """Fork all ranks of all jobs, and wait for them; what each would load is loaded before, and starts no thread."""
    for name in (
        "torch._decomp.decompositions_for_jvp",
        "torch._dynamo",
        "clearhead.distributed",
        "clearhead.engines.native",
        "clearhead.ops.torch_graph",
    ):
        import_module(name)
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
