"""The portable engine's blocks: their sizes and order, and the places that their results are added to."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clearhead.core import definition, visibility
from clearhead.core.arrays import statistics_dtype
from clearhead.core.axes import Array, blocks
from clearhead.core.block import Block, BlockPlace, block_of
from clearhead.core.call import Call
from clearhead.core.definition import Matrix, Values
from clearhead.core.namespace import astype, beside, dtype_name, namespace, on_host, ranked, raw, take
from clearhead.core.observations import areas
from clearhead.core.problem import Problem
from clearhead.core.state import State, rounded

_ROWS = 128
_IN_CACHE, _ON_DEVICE = 1 << 18, 1 << 24  # how many weights a block has, on the CPU and on other devices
_FEWEST_ROWS = 4
_SHARED = 1024  # keys whose shares in pixels are computed at a time: for all keys they would be (pixels, keys)
_OF_KEYS = ("k", "v", "x of keys")  # the arrays along the keys; all others are along the rows


@dataclass(frozen=True, eq=False)
class PlacedBlock:
    """A block: its place among all rows and keys, its arrays, and where its sums belong."""

    problem: Problem
    arrays: dict[str, Any]  # of some heads of some batch entries, in the dtype of sums
    place: BlockPlace
    split: dict[str, Values] = field(
        default_factory=dict
    )  # the arrays split into finite and nonfinite values, once they are needed
    capped: Any = None  # scores after the softcap, if there is one

    @property
    def rows(self) -> tuple[slice, ...]:
        """The block's index into arrays (batch, heads, queries, …)."""
        return self.place[:3]

    @property
    def cols(self) -> tuple[slice, ...]:
        """The block's index into arrays (batch, heads, keys, …)."""
        return *self.place[:2], self.place.keys

    def get(self, name: str) -> Any:
        """Take this block's part of one of the arrays."""
        return self.arrays[name][:, :, self._along(name)]

    def values(self, name: str) -> Values:
        """The same part, split into its finite and its nonfinite values."""
        if name not in self.split:
            self.split[name] = definition.split(self.arrays[name])
        finite, others = self.split[name]
        along = self._along(name)
        return finite[:, :, along], None if others is None else others[:, :, along]

    def _along(self, name: str) -> slice:
        return self.place.keys if name in _OF_KEYS else self.place.rows

    def of_rows(self, x: Array) -> Any:
        """Take this block's part of numbers per query, (batch, heads, rows)."""
        return beside(raw(x)[self.rows], self.get("q"))

    def of_keys(self, x: Array) -> Any:
        """Take this block's part of numbers per key, (batch, heads, keys)."""
        return beside(raw(x)[self.cols], self.get("q"))

    def along(self) -> Any:
        """g_i·v_j, (batch, heads, rows, keys)."""
        return definition.product(self.get("g"), self.get("v").swapaxes(-1, -2))

    def among_all(self, places: Any) -> Any:
        """Turn indices of the block's keys into indices of all keys; -1 stays -1."""
        return namespace(places).where(places < 0, -1, places + self.place.keys.start)

    def add_to_keys(self, total: Any, x: Any) -> None:
        """Add x (batch, heads, keys, d) to the key heads of `total`, each of which serves several heads."""
        heads = _serving(self.place.heads, total.shape[1], self.problem.heads)
        few = heads.stop - heads.start
        here = total[self.place.batches, heads, self.place.keys]
        here += x.reshape(x.shape[0], few, x.shape[1] // few, *x.shape[2:]).sum(axis=2)

    def add_shared(self, total: Any, x: Any) -> None:
        """Add the block to `total`, summed over the axes along which it has size 1."""
        for axis, size in enumerate(total.shape):
            x = x.sum(axis=axis, keepdims=True) if size == 1 else x
        here = total[tuple(slice(None) if size == 1 else at for size, at in zip(total.shape, self.place, strict=False))]
        here += x

    def add_groups(self, total: Any, x: Any, query_labels: Array, key_labels: Array) -> None:
        """Add the block's sums between labels, (batch, queries) and (batch, keys), to `total`, as in `add_shared`."""
        labels = query_labels[self.place.batches, self.place.rows], key_labels[self.place.batches, self.place.keys]
        present = [np.unique(side[side >= 0]) for side in labels]
        if not all(map(len, present)):
            return
        left, right = (beside(definition.members(*each), x) for each in zip(present, labels, strict=True))
        x = definition.pooled(x, left, right)
        for axis in (0, 1):
            x = x.sum(axis=axis, keepdims=True) if total.shape[axis] == 1 else x
        here = total[tuple(slice(None) if n == 1 else at for n, at in zip(total.shape[:2], self.place, strict=False))]
        rows, cols = (beside(side, x) for side in present)
        here[:, :, rows[:, None], cols] += astype(x, dtype_name(total))

    def add_image(self, total: Any, x: Any, size: tuple[int, int]) -> None:
        """Add the block's shares in the pixels of a picture (batch, heads, height, width)."""
        problem, keys = self.problem, self.place.keys
        high, tall = areas(size[0], problem.queries, self.place.rows)
        for start in range(keys.start, keys.stop, _SHARED):
            stop = min(start + _SHARED, keys.stop)
            across, broad = areas(size[1], problem.keys, slice(start, stop))
            here = total[(*self.place[:2], high, across)]
            here += definition.pooled(x[..., start - keys.start : stop - keys.start], beside(tall, x), beside(broad, x))

    def keys_among_all(self, like: Any) -> Any:
        """The place of each key of the block among all keys."""
        return beside(np.arange(self.place.keys.start, self.place.keys.stop), like)

    def add_strongest(self, values: Any, places: Any, x: Any, hidden: Any) -> None:
        """Merge the block's effects into each head's list of the strongest, (batch, heads, k)."""
        lead = self.place[:2]
        rows = beside(np.arange(self.place.rows.start, self.place.rows.stop), x)[:, None]
        numbers = namespace(x).where(hidden, -1, rows * self.problem.keys + self.keys_among_all(x))
        flat = [y.reshape(*y.shape[:2], -1) for y in (x, numbers)]
        new = first(flat[0], flat[1], values.shape[-1])
        kept = values[lead], places[lead]
        both = [namespace(x).concatenate(pair, axis=-1) for pair in zip(kept, new, strict=True)]
        values[lead], places[lead] = first(both[0], both[1], values.shape[-1])


def first(values: Any, places: Any, count: int) -> tuple[Any, Any]:
    """The `count` values of largest magnitude along the last axis, and their places; the earlier one of equals.

    A place of -1 is unused: it comes last, with value 0. NaN is never listed.
    """
    xp = namespace(values)
    most = float(xp.finfo(values.dtype).max)  # an infinite effect is as strong as this
    by = xp.clip(abs(values), 0.0, most)
    ranks = ranked(xp.where((places < 0) | xp.isnan(by), -np.inf, by), count)[1]
    if not values.shape[-1]:
        return 0.0 * ranks, ranks
    chosen, at = (take(x, xp.clip(ranks, 0, None), -1) for x in (values, places))
    return xp.where(ranks < 0, 0.0, chosen), xp.where(ranks < 0, -1, at)


def matrices(
    call: Call, state: State | None = None, busy: str = "", **arrays: Array | None
) -> Iterator[tuple[PlacedBlock, Matrix]]:
    """Yield every block in which some query sees a key, with its matrix of weights.

    state    the rows' states over all keys; None computes them from the block, which then has all the rows' keys
    busy     the name of an array: skip blocks whose rows are zero in it
    arrays   further arrays that blocks need, (batch, heads or fewer, queries or keys, d)
    """
    most = _IN_CACHE if isinstance(call.q, np.ndarray) else _ON_DEVICE
    most //= 4 if "g" in arrays else 1  # effects take more
    usual = statistics_dtype(call.problem.dtype)
    tall = min(_ROWS, max(_FEWEST_ROWS, most // _reach(call.problem)), max(1, call.problem.queries))
    for of in _heads(call, arrays, max(1, most // (tall * _reach(call.problem)))):
        for rows in blocks(call.problem.queries, tall):
            if busy and not of.arrays[busy][:, :, rows].any():
                continue
            for part, block in _blocks(of, rows):
                capped = None
                for name, s in definition.steps(block):
                    capped = s if name == "capped" and block.softcap is not None else capped
                part, x = replace(part, capped=capped), block.sinks
                if isinstance(s, np.ndarray):
                    s = rounded(s, usual)
                if state is None:
                    yield part, Matrix(block, s, *definition.softmax(s, x, usual))
                else:
                    mine = State(*map(part.of_rows, state))
                    yield part, Matrix(block, s, mine, definition.weights(s, mine))


def _heads(call: Call, arrays: dict[str, Array | None], most: int) -> Iterator[PlacedBlock]:
    """Yield at most `most` pairs of batch entry and head, with all rows; batch entries go together if offsets agree."""
    problem = call.problem
    given = {"q": call.q, "k": call.k, **{name: x for name, x in arrays.items() if x is not None}}
    groups = {problem.heads // max(1, x.shape[1]) for x in given.values()}
    fits = (
        count
        for count in range(min(most, problem.heads), 0, -1)
        if not problem.heads % count and all(not count % group or not group % count for group in groups)
    )
    heads = next(fits, 1)
    rules = (problem.query_offset, problem.query_lengths, problem.kv_lengths)
    alike = all(x is None or bool((x == x[:1]).all()) for x in rules)
    wide = np.float64 if any(x.dtype == np.float64 for x in given.values()) else statistics_dtype(problem.dtype)
    dtype = np.float64 if isinstance(call.q, np.ndarray) else wide
    for batches in blocks(problem.batch, max(1, most // max(1, problem.heads)) if alike else 1):
        for chosen in blocks(problem.heads, heads):
            place = BlockPlace(batches, chosen, slice(0, problem.queries), slice(0, problem.keys))
            yield PlacedBlock(problem, {
                name: astype(raw(x)[batches, _serving(chosen, x.shape[1], problem.heads)], dtype)
                for name, x in given.items()
            }, place)  # fmt: skip


def _serving(heads: slice, few: int, all_heads: int) -> slice:
    """The slice of the `few` heads that serve these query heads."""
    start = heads.start * few // max(1, all_heads)
    return slice(start, max(start + 1, heads.stop * few // max(1, all_heads)))


def _reach(problem: Problem) -> int:
    """How many keys a block of rows may attend to, at most."""
    left, right = problem.reach
    return max(1, problem.keys if left is None or right is None else min(problem.keys, left + right + _ROWS))


def _blocks(of: PlacedBlock, rows: slice) -> Iterator[tuple[PlacedBlock, Block]]:
    """Yield the block of these rows with the keys from the first to the last that any row sees, if there are any."""
    problem, q, k = of.problem, of.arrays["q"][:, :, rows], of.arrays["k"]
    keys = visibility.key_span(problem, of.place.batches.start, rows)
    place = of.place._replace(rows=rows, keys=keys)
    if keys.start == keys.stop:
        return
    block = block_of(problem, place, q, k[:, :, keys])
    if any(x is not None for x in (block.mask, block.bias, block.kv_segments, block.span_table)):
        seen = visibility.visible(block)
        assert seen is not None
        found = np.flatnonzero(on_host(seen.any(axis=(0, 1, 2))))
        if not found.size:
            return
        if seen.shape[-1] > 1 and found[-1] - found[0] + 1 < seen.shape[-1]:  # skip the arithmetic of unseen ends
            seen = seen[..., found[0] : found[-1] + 1]
            place = place._replace(keys=slice(keys.start + int(found[0]), keys.start + int(found[-1]) + 1))
            block = block_of(problem, place, q, k[:, :, place.keys])
        block = replace(block, seen=seen)
    yield replace(of, place=place), block
