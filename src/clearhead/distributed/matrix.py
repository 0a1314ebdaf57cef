"""The attention matrix of a sharded sequence: statistics of own queries and own keys, pictures of the whole."""

from dataclasses import replace
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from clearhead.arrays import adopt, plain, statistics_dtype, to_torch
from clearhead.axes import WEIGHTS, Array, named
from clearhead.distributed.call import restored
from clearhead.distributed.choice import BY_ROWS, Method, choose
from clearhead.distributed.exchange import total
from clearhead.distributed.layouts import Layout
from clearhead.distributed.ranks import Ranks
from clearhead.distributed.shards import Shards, read
from clearhead.distributed.ulysses import ByHeads
from clearhead.errors import ShapeError
from clearhead.observations import Observation, Top, Wanted, areas, observation, wanted
from clearhead.problem import Rules


class ShardedAttentionMatrix:
    """The weights of a sequence that lies in shards, (…, heads, all queries, all keys); never stored, never gathered.

    q (…, heads, own queries, d_k), k (…, kv_heads, own keys, d_k); group, layout, method, timeout and rules as in
    `clearhead.distributed.attention`. Every method is called by all ranks. Row statistics are those of own queries,
    column statistics those of own keys, pictures and sums between groups those of the whole, the same on every rank.
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        *,
        group: Any = None,
        layout: Layout = "contiguous",
        method: Method = "auto",
        timeout: float | None = None,
        engine: str | None = None,
        **rules: Unpack[Rules],
    ) -> None:
        ranks, what = Ranks.of(group, timeout), "ShardedAttentionMatrix"
        self._shards = read(what, q, k, None, rules, ranks, layout=layout, method=method, engine=engine)
        self._method = choose(self._shards, method).method
        self._known: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """(…, heads, all queries, all keys)."""
        return (*self._shards.prefix, self._shards.whole.queries, self._shards.whole.keys)

    def __repr__(self) -> str:
        return (
            f"ShardedAttentionMatrix{named(self.shape, WEIGHTS)} on {self._shards.ranks.world} ranks by {self._method}"
        )

    def __matmul__(self, v: Tensor) -> Tensor:
        """A·v for own values v (…, kv_heads, own keys, d_v): own queries' outputs, without a graph."""
        output: Tensor = self.observe(v).output
        return output

    def logsumexp(self) -> Tensor:
        """See `AttentionMatrix.logsumexp`; of own queries, (…, heads, own queries), as are all row statistics here."""
        return self._give(self._logsumexp().copy())

    def max_logit(self) -> Any:
        return self.observe(max_logit=True).max_logit

    def entropy(self) -> Any:
        return self.observe(entropy=True).entropy

    def distance(self) -> Any:
        return self.observe(distance=True).distance

    def top(self, k: int) -> Top | None:
        """The k strongest keys of each own query, by position in the whole sequence."""
        return self.observe(top=k).top

    def received(self) -> Any:
        """What each own key receives from all queries, (…, heads, own keys)."""
        return self.observe(received=True).received

    def peak(self) -> Any:
        return self.observe(peak=True).peak

    def image(self, height: int, width: int) -> Any:
        """The whole matrix as a picture, the same on every rank."""
        return self.observe(image=(height, width)).image

    def groups(self, query_groups: Any, key_groups: Any) -> Any:
        """Mass between labelled spans of the whole; labels of own queries and own keys, (own,) or (…, own)."""
        return self.observe(groups=(query_groups, key_groups)).groups

    def observe(self, v: Tensor | None = None, **asked: Any) -> Observation:
        """Everything asked for, together, as `AttentionMatrix.observe`; rows and columns are this rank's own."""
        image, groups = asked.pop("image", None), asked.pop("groups", None)
        want = wanted(self._shards.whole, {**asked, "image": image})
        shards = self._shards if v is None else self._with_values(adopt(v.detach(), "v")[0])
        rows = replace(want, output=v is not None, logsumexp=True, received=False, peak=False, image=None)
        found: dict[str, Array] = {}
        if rows != Wanted(logsumexp=True) or self._known is None:
            found = self._rows(shards, rows)
            self._known = found["logsumexp"]
        if not want.logsumexp:
            found.pop("logsumexp", None)
        else:
            found["logsumexp"] = self._known
        if want.received or want.peak:
            found |= self._columns(replace(want, image=None))
        if want.image is not None:
            found["image"] = self._image(*want.image)
        if groups is not None:
            found["groups"] = self._groups(*groups)
        answers = {name: self._give(array) for name, array in found.items()}
        return observation(answers, self._shards.q.shape[2], self._shards.k.shape[2])

    def _logsumexp(self) -> Array:
        if self._known is None:
            self._known = self._rows(self._shards, Wanted(logsumexp=True))["logsumexp"]
        return self._known

    def _give(self, array: Array) -> Tensor:
        tensor: Tensor = to_torch(torch, np.ascontiguousarray(restored(self._shards, array)))
        return tensor

    def _with_values(self, v: Array) -> Shards:
        shards = self._shards
        expected = (*shards.k.shape[:3], v.shape[-1])
        if v.reshape(-1).size != np.prod(expected) or v.shape[-2] != shards.k.shape[2]:
            raise ShapeError(
                f"v has shape {v.shape}: expected own values (…, kv_heads, own keys {shards.k.shape[2]}, d_v)."
            )
        return replace(shards, v=v.reshape(expected))

    def _rows(self, shards: Shards, want: Wanted) -> dict[str, Array]:
        if self._method in BY_ROWS:
            found: dict[str, Array] = BY_ROWS[self._method].attend(shards, want)
            return found
        by_heads = ByHeads(shards)
        return {name: by_heads.to_rows(x, shards.query_pieces) for name, x in by_heads.attend(want).items()}

    def _columns(self, want: Wanted) -> dict[str, Array]:
        shards, logsumexp = self._shards, self._logsumexp()
        if self._method in BY_ROWS:
            return BY_ROWS[self._method].columns(shards, logsumexp, want)
        by_heads = ByHeads(shards)
        asked = Wanted(received=want.received, peak=want.peak)
        final = by_heads.to_heads(logsumexp[..., None], shards.query_pieces)[..., 0]
        found = shards.engine.columns(by_heads.problem, by_heads.q, by_heads.k, final, asked)
        return {name: by_heads.to_rows(x, shards.key_pieces) for name, x in found.items()}

    def _image(self, height: int, width: int) -> Array:
        """Rows' means of A·(keys' shares in the pixels): what own queries add, and the sum over ranks."""
        shards = self._shards
        values = np.zeros((shards.k.shape[2], width))
        for at, keys in shards.own_keys():
            if keys:
                pixels, shares = areas(width, shards.whole.keys, slice(keys.start, keys.stop))
                values[at, pixels] = shares.T
        mixed = self._mixed(np.broadcast_to(values, (shards.whole.batch, *values.shape)))
        picture = np.zeros((*mixed.shape[:2], height, width))
        for at, rows in shards.own_rows():
            if rows:
                pixels, shares = areas(height, shards.whole.queries, slice(rows.start, rows.stop))
                picture[:, :, pixels] += shares @ mixed[:, :, at]
        whole = total(shards.ranks, "sum of pictures", picture)
        return whole.astype(statistics_dtype(shards.whole.dtype))

    def _groups(self, query_groups: Any, key_groups: Any) -> Array:
        shards = self._shards
        labels = []
        for name, given, size in (("query_groups", query_groups, 2), ("key_groups", key_groups, 2)):
            own = (shards.q if name == "query_groups" else shards.k).shape[size]
            array = plain(given, name)
            if array.shape[-1:] != (own,):
                raise ShapeError(f"{name} has shape {array.shape}: expected one label per own position, ({own},).")
            labels.append(np.broadcast_to(array, (*shards.prefix[:-1], own)).reshape(shards.whole.batch, own))
        mine = {"counts": [int(side.max(initial=-1)) + 1 for side in labels]}
        everybody = shards.ranks.agree("groups", mine)
        counts = [max(other["counts"][side] for other in everybody) for side in (0, 1)]
        members = [
            (side[..., None] == np.arange(count)).astype(np.float64) for side, count in zip(labels, counts, strict=True)
        ]
        mixed = self._mixed(members[1])
        return total(shards.ranks, "sum of groups", members[0][:, None].swapaxes(-1, -2) @ mixed).astype(
            statistics_dtype(shards.whole.dtype)
        )

    def _mixed(self, values: Array) -> Array:
        """A·values for own values (batch, own keys, columns), the same for all heads; not rounded to a half."""
        shards = self._shards
        dtype = statistics_dtype(shards.whole.dtype)
        shape = (*shards.k.shape[:3], values.shape[-1])
        wide = replace(
            shards,
            whole=replace(shards.whole, dtype=dtype),
            q=shards.q.astype(dtype, copy=False),
            k=shards.k.astype(dtype, copy=False),
            v=np.broadcast_to(values[:, None], shape).astype(dtype),
        )
        return self._rows(wide, Wanted(output=True, logsumexp=True))["output"].astype(np.float64)
