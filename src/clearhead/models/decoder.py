"""Runs a decoder of any family in NumPy, in float32, with this library's attention.

One layer is norm → attention → W^O (→ norm) → added → norm → MLP (→ norm) → added. Everything but attention acts on
each token alone, so `before` and `after` take (…, tokens, d_model).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, TypeVar

import numpy as np

from clearhead.changing.applying import EditedCall, acts, edited
from clearhead.changing.edits import Edit
from clearhead.core.axes import Array, blocks
from clearhead.core.call import describe
from clearhead.core.problem import Problem
from clearhead.engines import native
from clearhead.models.families import Angles, Config, norm_back, normed, turned
from clearhead.models.mlp import Inner, mlp, mlp_back, one, one_back
from clearhead.models.protocol import Each, LayerRun
from clearhead.models.weights import Weights
from clearhead.ops.attention import attention
from clearhead.watching.places import Place, Text

T = TypeVar("T")
Turns = list[dict[str, Angles]]  # the angles of tokens by layer, and by part "q", "k" and "v"
Shared = dict[int, tuple[Array, Array]] | list[tuple[Array, Array]]  # keys and values by the number of their layer
Room = tuple[Array, Array, Problem | None]  # a layer's keys and values, (kv_heads, room, d_k); see `_at_once`
_BLOCK = 1024  # tokens that an MLP computes at a time
LONG = 2**25  # a text is long if its residual stream, over all layers, has more numbers than this
_STORED = 6  # for a long text, the stream is stored before every sixth layer
np.empty(2**24, np.uint8)  # freed at once: from then on glibc keeps so much freed memory, which is slow to get again


@dataclass(frozen=True, eq=False, slots=True)
class Decoder:
    """The sizes and weights of a decoder, and its forward pass."""

    config: Config
    weights: Weights

    def embedded(self, ids: Sequence[int] | Array, start: int = 0) -> Array:
        """Return the first layer's input, (tokens, d_model); the first token is at position `start`."""
        rows = self.normed("token_embd_norm", self.weights.rows("token_embd.weight", ids) * self.config.embedding_scale)
        if "position_embd.weight" in self.weights:
            rows = rows + self.weights["position_embd.weight"][start : start + len(ids)]
        return rows

    def normed(self, name: str, x: Array, upstream: Array | None = None) -> Array:
        """Apply the norm of this name to x, or return x unchanged if the model has no such norm.

        Queries and keys, (…, heads, tokens, d_k), are normed head by head, or all heads together (OLMo 2).
        upstream   the derivative by the result; then the derivative by x is returned
        """
        weight = self.weights.get(f"{name}.weight")
        if weight is None:
            return x if upstream is None else upstream
        together = len(weight) != x.shape[-1]
        rows = join(x) if together else x
        if upstream is None:
            made = normed(rows, weight, self.weights.get(f"{name}.bias"), self.config)
        else:
            made = norm_back(rows, weight, join(upstream) if together else upstream, self.config)
        return split(made, x.shape[-1]) if together else made

    def rules(self, number: int) -> dict[str, Any]:
        """Return a layer's score rules as `attention` takes them, without the default scale 1/√d_k."""
        rules: dict[str, Any] = {"causal": True}
        window, scale = self.config.windows[number], self.config.scale
        if window is not None:
            rules["window"] = (window - 1, None)
        if scale != self.config.sizes[number].d_k ** -0.5:
            rules["scale"] = scale
        if self.config.softcap is not None:
            rules["softcap"] = self.config.softcap
        if self.config.slopes:
            rules["alibi_slopes"] = np.array(self.config.slopes, np.float32)
        if (sinks := self.weights.get(f"blk.{number}.attn_sinks.weight")) is not None:
            rules["sinks"] = sinks
        return rules

    def turns(self, places: Array) -> Turns:
        """Return the angles for these positions by layer and part; layers with the same rotation share them."""
        ropes = {id(rope): rope for rope in self.config.ropes}
        made = {key: rope.angles(places) if rope else dict.fromkeys("qkv") for key, rope in ropes.items()}
        return [made[id(rope)] for rope in self.config.ropes]

    def before(
        self, number: int, hidden: Array, turns: dict[str, Angles], shared: Shared
    ) -> tuple[Array, Array, Array, Array, dict[str, Array]]:
        """Compute x, the input of a layer's projections, and its queries, keys and values, (…, heads, tokens, d_k).

        For derivatives it also returns the projections by part, "q", "k" and "v", before norms and rotation. A layer
        that reads another layer's keys and values projects queries only.
        hidden   (…, tokens, d_model), the residual stream before the layer
        turns    these tokens' angles in this layer
        shared   these tokens' keys and values by layer, at least those that this layer reads
        """
        x, size = self.normed(f"blk.{number}.attn_norm", hidden), self.config.sizes[number]
        parts = "qkv" if size.source == number else "q"
        made = {part: split(self.weights.linear(x, f"blk.{number}.attn_{part}"), size.d_k) for part in parts}
        if (clip := self.config.clip) is not None:
            made = {part: np.clip(each, -clip, clip) for part, each in made.items()}
        q, *kv = [self.placed(number, part, projected, turns[part]) for part, projected in made.items()]
        k, v = kv or shared[size.source]
        return x, q, k, v, made

    def placed(self, number: int, part: str, x: Array, angles: Angles, upstream: Array | None = None) -> Array:
        """Norm and rotate a projection; with `upstream`, the derivative by the result, return the derivative by x."""
        name, last = f"blk.{number}.attn_{part}_norm", self.config.normed_last
        if upstream is None:
            return self.normed(name, turned(x, angles)) if last else turned(self.normed(name, x), angles)
        back = None if angles is None else np.stack([angles[0], -angles[1]])
        if last:
            return turned(self.normed(name, turned(x, angles), upstream), back)
        return self.normed(name, x, turned(upstream, back))

    def mixed(self, number: int, heads: Array) -> Array:
        """Apply W^O to the heads' outputs, (…, heads, tokens, d_k), which gives (…, tokens, d_model)."""
        return self.weights.linear(join(heads), f"blk.{number}.attn_output")

    def after(self, number: int, hidden: Array, output: Array, given: Array, inner: Inner | None = None) -> Array:
        """Return the residual stream after a layer; given are that before it, attention's output and its `inputs`."""
        made = self.added(number, hidden, output, inner)
        if self.config.d_input:
            more = one(self.weights, self.config, number, ".input", made, given)
            made = made + self.normed(f"blk.{number}.post_norm", more)
        scale = self.scale(number)
        return made if scale == 1 else made * scale

    def added(self, number: int, hidden: Array, output: Array, inner: Inner | None = None) -> Array:
        """Add attention and the MLP to the residual stream; what Gemma 4 adds besides is in `after`."""
        scale, more = self.config.added_scale, self.normed(f"blk.{number}.post_attention_norm", output)
        middle = hidden + (more if scale == 1 else scale * more)
        output = in_blocks(partial(self.mlp, number, inner=inner), hidden if self.config.parallel else middle)
        more = self.normed(f"blk.{number}.post_ffw_norm", output)
        return middle + (more if scale == 1 else scale * more)

    def scale(self, number: int) -> float:
        """Return the factor by which a layer multiplies the residual stream at its end."""
        scale = self.weights.get(f"blk.{number}.layer_output_scale.weight")
        return 1.0 if scale is None else float(scale[0])

    def inputs(self, ids: Sequence[int] | Array, upstream: Array | None = None) -> Array:
        """Return each layer's input beside the residual stream (Gemma 4), (tokens, layers, d_input).

        It is (norm(W·e/√d_model) + t·√d_input)/√2, with e the token's embedding and t its embedding for the layer.
        upstream   the derivative by the result; then the derivative by e, (…, tokens, d_model), is returned
        """
        name, shape = "per_layer_model_proj.weight", (len(ids), self.config.layers, self.config.d_input)
        if not self.config.d_input:
            return np.zeros(shape, self.weights.dtype)
        made = self.weights.product(self.embedded(ids) * self.config.d_model**-0.5, name).reshape(shape)
        if upstream is not None:
            by_made = self.normed("per_layer_proj_norm", made, upstream * 0.5**0.5)
            by_made = by_made.reshape(*by_made.shape[:-2], -1)
            return self.weights.product(by_made, name, back=True) * self.config.d_model**-0.5
        tokens = self.weights.rows("per_layer_token_embd.weight", ids).reshape(shape) * self.config.d_input**0.5
        return (self.normed("per_layer_proj_norm", made) + tokens) * 0.5**0.5

    def mlp(self, number: int, source: Array, inner: Inner | None = None) -> Array:
        """Apply a layer's norm and MLP to the residual stream, (…, tokens, d_model); a norm of the output follows."""
        return mlp(self.weights, self.config, number, self.normed(f"blk.{number}.ffn_norm", source), inner)

    def mlp_back(self, number: int, inner: Inner, source: Array, upstream: Array) -> Array:
        """Return the derivative by the stream that the MLP reads, (tokens, d_model), through the MLP alone."""
        norm, behind = f"blk.{number}.ffn_norm", f"blk.{number}.post_ffw_norm"
        by_output = self.config.added_scale * upstream
        if f"{behind}.weight" in self.weights:  # else the output is not needed
            by_output = self.normed(behind, self.mlp(number, source), by_output)
        by_x = mlp_back(self.weights, self.config, number, self.normed(norm, source), by_output, inner)
        return self.normed(norm, source, by_x)

    def end_back(
        self, number: int, hidden: Array, output: Array, given: Array, upstream: Array
    ) -> tuple[Array, Array | float]:
        """Differentiate `after`: return the derivatives by the result of `added` and by `given`."""
        upstream = upstream * self.scale(number)
        if not self.config.d_input:
            return upstream, 0.0
        which = self.weights, self.config, number, ".input", self.added(number, hidden, output)
        by_output = self.normed(f"blk.{number}.post_norm", one(*which, given), upstream)
        by_made, by_given = one_back(*which, by_output, given)
        return upstream + by_made, by_given

    def layer(
        self,
        number: int,
        hidden: Array,
        turns: dict[str, Angles],
        shared: Shared,
        edits: Sequence[Edit],
        past: tuple[Array, Array] | None = None,
    ) -> LayerRun:
        """Compute one layer's attention; `after` makes the residual stream after the layer from its output.

        hidden   (tokens, d_model), the residual stream before the layer; with `past`, of the last tokens only
        turns, shared   as in `before`
        past     the earlier tokens' keys and values, each (kv_heads, earlier tokens, d_k)
        """
        first = 0 if past is None else past[0].shape[1]
        x, q, k, v = self.before(number, hidden, turns, shared)[:4]
        rules = self.rules(number)
        if past is not None:
            rules["query_offset"] = first
            k, v = (np.concatenate([old, new], axis=1) for old, new in zip(past, (k, v), strict=True))
        if acting := acting_edits(edits, number, self.config.layers) if edits else []:
            call = edited(EditedCall(q[None], k[None], v[None], rules), acting, place_of(number, q, k))
            heads, rules = call.output()[0], call.whole_rules()
        else:
            heads = attention(q, k, v, **rules)
        letters = {"attn_q": "b_q", "attn_k": "b_k", "attn_v": "b_v", "attn_output": "b_o"}
        biases = frozenset(b for part, b in letters.items() if f"blk.{number}.{part}.bias" in self.weights)
        through = "{}" if self.config.clip is None else "clip({})"
        through = f"norm({through})" if f"blk.{number}.attn_q_norm.weight" in self.weights else through
        if self.config.ropes[number] is not None:
            through = through.replace("{}", "RoPE({})") if self.config.normed_last else f"RoPE({through})"
        output = self.mixed(number, heads)
        return LayerRun(x, q, k, v, heads, output, rules, biases, through, x is not hidden)

    def logits(self, hidden: Array, *, capped: bool = True) -> Array:
        """Compute logits, (…, vocabulary), from the residual stream after the last layer, (…, d_model).

        capped   cap them, c·tanh(logit/c), if the model does; False leaves them uncapped
        """
        made = self.weights.product(self.normed("output_norm", hidden), self.unembedding)
        bias, cap = self.weights.get("output.bias"), self.config.logit_softcap
        made = made if bias is None else made + bias
        made = made if self.config.logit_scale == 1 else made * self.config.logit_scale
        return made if cap is None or not capped else cap * np.tanh(made / cap)

    @property
    def unembedding(self) -> str:
        """The name of the matrix that makes logits of the residual stream."""
        return "token_embd.weight" if self.config.tied else "output.weight"

    def extended(self, ids: Sequence[int], start: int, kept: Sequence[Room]) -> Array:
        """Run these tokens, the first at position `start`, and return the logits after the last, (vocabulary,).

        kept   from `room`: each layer's keys and values are read before `start` and written from there on
        """
        hidden, inputs, stop = self.embedded(ids, start), self.inputs(ids), start + len(ids)
        shared, turns = [(k[:, start:stop], v[:, start:stop]) for k, v, _ in kept], self.turns(np.arange(start, stop))
        for number, (keys, values, problem) in enumerate(kept):
            heads, angles = None, turns[number]
            if problem is not None and len(ids) == 1:
                q, k, v = self.before(number, hidden, dict.fromkeys("qkv"), shared)[1:4]
                by = None if angles["k"] is None else angles["k"][:, 0]
                heads = native.step(problem, q, k, v, (keys, values), start, by)
            if heads is None:
                q, k, v = self.before(number, hidden, angles, shared)[1:4]
                keys[:, start:stop], values[:, start:stop] = k, v
                if number + 1 == len(kept):  # in the last layer only the last token is needed
                    q, hidden, inputs = q[:, -1:], hidden[-1:], inputs[-1:]
                rules = self.rules(number) | {"query_offset": stop - q.shape[1]}
                heads = attention(q, keys[:, :stop], values[:, :stop], **rules)
            hidden = self.after(number, hidden, self.mixed(number, heads), inputs[:, number])
        return self.logits(hidden[-1])

    def room(self, tokens: int) -> list[Room]:
        """Allocate the key-value cache of `extended` for so many tokens."""
        made, dtype = list[Room](), self.weights.dtype
        for number, size in enumerate(self.config.sizes):
            own = [np.empty((size.kv_heads, tokens, size.d_k), dtype) for _ in "kv"]
            keys, values = made[size.source][:2] if size.source < number else own
            made.append((keys, values, self._at_once(number, keys)))
        return made

    def _at_once(self, number: int, keys: Array) -> Problem | None:
        """Describe the attention of a new token for `native.step`, or return None if that lacks what the layer does."""
        config, size, rope = self.config, self.config.sizes[number], self.config.ropes[number]
        lacks = config.slopes or config.normed_last or size.source != number or keys.dtype != np.float32
        lacks = lacks or len(keys[0]) > (config.windows[number] or len(keys[0]))
        if lacks or (rope is not None and (rope.warming or 2 * len(rope.rates) != size.d_k)):
            return None
        rules: Any = self.rules(number) | {"causal": False, "window": None}  # the last token sees all
        problem = describe(np.empty((config.heads, 1, size.d_k), keys.dtype), keys[:, :1], None, rules).problem
        return problem if native.usable(problem) else None


def of_logits(decoder: Decoder, hidden: Array, upstream: Array) -> Array:
    """Differentiate the logits: return the derivative by `hidden`, the stream after the last layer, (…, rows, d_model).

    upstream   (…, rows, vocabulary), the derivative by these rows' logits
    """
    config, by_raw = decoder.config, np.asarray(upstream, hidden.dtype)
    if config.logit_softcap is not None:
        capped = decoder.logits(hidden) / config.logit_softcap
        by_raw = by_raw * (1 - capped * capped)
    some = np.flatnonzero(by_raw.reshape(-1, by_raw.shape[-1]).any(axis=0))
    if len(some) < by_raw.shape[-1] // 8:
        direction = by_raw[..., some] @ decoder.weights.rows(decoder.unembedding, some)
    else:
        direction = decoder.weights.product(by_raw, decoder.unembedding, back=True)
    return decoder.normed("output_norm", hidden, direction * config.logit_scale)


def in_blocks(function: Callable[..., Array], *arrays: Array) -> Array:
    """Apply a function to blocks of rows, (…, tokens, d): its intermediate results are wider than the rows."""
    if arrays[0].shape[-2] <= _BLOCK:
        return function(*arrays)
    made = [function(*(x[..., block, :] for x in arrays)) for block in blocks(arrays[0].shape[-2], _BLOCK)]
    return np.concatenate(made, axis=-2)


def split(x: Array, d_k: int) -> Array:
    """Reshape (…, tokens, heads·d_k) to (…, heads, tokens, d_k)."""
    return x.reshape(*x.shape[:-1], -1, d_k).swapaxes(-3, -2)


def join(x: Array) -> Array:
    """Reshape (…, heads, tokens, d_k) to (…, tokens, heads·d_k)."""
    turned_back = x.swapaxes(-3, -2)
    return turned_back.reshape(*turned_back.shape[:-2], -1)


class OnDemand(Sequence[T]):
    """A sequence whose items are computed when they are read."""

    def __init__(self, count: int, compute: Callable[[int], T]) -> None:
        self._count, self._compute = count, compute

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        numbers = range(self._count)[place]
        return self._compute(numbers) if isinstance(numbers, int) else list(map(self._compute, numbers))


def is_long(numbers: int) -> bool:
    """Check whether a text is long: its residual stream before all layers has this many numbers."""
    return numbers > LONG


def stream(step: Callable[[int, Array], Array], first: Array, layers: int, each: Each = iter) -> Sequence[Array]:
    """Compute the residual stream before each layer and after the last; `each` iterates over the layers.

    step   makes the stream after a layer from the layer's number and the stream before it
    For a long text, the layers between two stored ones are computed again when read; the latest few are kept.
    """
    stored, hidden, long = {0: first}, first, is_long(first.size * layers)
    for number in each(range(layers)):
        hidden = step(number, hidden)
        if not long or (number + 1) % _STORED == 0 or number + 1 == layers:
            stored[number + 1] = hidden
    if not long:
        return list(stored.values())

    @lru_cache(maxsize=1)
    def between(start: int) -> list[Array]:
        made = [stored[start]]
        for layer in range(start, min(start + _STORED, layers) - 1):
            made.append(step(layer, made[-1]))
        return made

    def before(number: int) -> Array:
        return stored[number] if number in stored else between(number - number % _STORED)[number % _STORED]

    return OnDemand(layers + 1, before)


# ── edits of attention in one layer ──


def acting_edits(edits: Sequence[Edit], layer: int, layers: int) -> list[Edit]:
    """Return the edits that act in this layer."""
    return [edit for edit in edits if edit.acts_in(str(layer), choices(layer, layers))]


def may_act(edit: Edit, layers: Sequence[LayerRun]) -> bool:
    """Can an edit, given by position, change a run: does one of its queries see one of its keys in some head?"""
    return any(
        acts(edit, (1, len(run.q), run.q.shape[1], run.k.shape[1]), run.rules, place_of(number, run.q, run.k))
        for number, run in enumerate(layers)
        if acting_edits([edit], number, len(layers))
    )


def place_of(layer: int, q: Array, k: Array) -> Place:
    """Describe where a layer attends: q (heads, queries, d_k) are the last tokens of k (kv_heads, keys, d_k)."""
    queries, keys = q.shape[1], k.shape[1]
    text = Text(keys)
    return Place(str(layer), range(keys - queries, keys), range(keys), text, text)


def choices(layer: int, layers: int) -> set[str]:
    """Return the two names of a layer in `layers=`: its number, and its number counted from the end."""
    return {str(layer), str(layer - layers)}
