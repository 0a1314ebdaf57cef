"""Correct attention of many kinds, as people write it: none of them may be called a mistake.

A program takes a `Ready` and a generator for its details, and returns the output. It shares nothing with the library;
`draw(rng)` makes the problems, `activations(rng)` those of the shipped model.
"""

import math
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from clearhead.models.model import load
from wrong_rules import alibi, seen_by, spanned

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NEEDS = (
    *("causal", "softcap", "bias", "alibi", "scale", "mask", "padding", "segments", "window", "sinks", "spans"),
    *("query_lengths", "blind"),
)
SIZES = (0.0, 0.3, 1.0, 1.0, 1.0, 3.0, 10.0, 50.0, 300.0)  # of the queries: scores up to thousands
TEXTS = (
    "humpty dumpty sat on a wall, humpty dumpty had a great fall",
    "twinkle twinkle little star, how I wonder what you are",
    "jack and jill went up the hill to fetch a pail of water",
    "x",
)


@dataclass
class Ready:
    """A problem whose rules are ready for plain code; keys and values have one head for each query head."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    softcap: float | None
    added: torch.Tensor | None  # float64, (batch, heads, n, m)
    seen: torch.Tensor  # bool, (batch, heads, n, m)
    sinks: torch.Tensor | None  # float64, (1, heads, 1, 1)

    def to(self, dtype: torch.dtype) -> "Ready":
        return Ready(*(x.to(dtype) for x in (self.q, self.k, self.v)), *list(vars(self).values())[3:])

    @property
    def wider(self) -> "Ready":
        """The same in float32 where it is in a narrower dtype."""
        return self.to(self.q.dtype if self.q.dtype.itemsize > 2 else torch.float32)


def draw(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """Random inputs and rules."""
    needs = set(rng.choice(NEEDS, size=rng.integers(0, 3), replace=False).tolist())
    if needs & {"causal", "blind"}:
        needs -= {"window"}
    n = int(rng.choice([1, 2, 3, 5, 8, 13, 31, 33, 40, 65]))
    m = n if rng.random() < 0.5 else int(rng.choice([1, 2, 7, 16, 17, 40, 64, 130]))
    if needs & {"padding", "query_lengths"}:
        n, m = max(n, 7), max(m, 7)
    heads = int(rng.choice([1, 2, 4]))
    kv_heads = heads if rng.random() < 0.7 else 1
    d, d_v = int(rng.choice([1, 2, 8, 16, 64, 128])), int(rng.choice([1, 3, 8, 64]))
    dtype = DTYPES[int(rng.integers(4))]
    shapes = ((2, heads, n, d), (2, kv_heads, m, d), (2, kv_heads, m, d_v))
    q, k, v = (torch.tensor(rng.standard_normal(shape)) for shape in shapes)
    if rng.random() < 0.1:
        v = v + 100
    if rng.random() < 0.1:
        k = k + 3  # a common direction, as real keys have
    if rng.random() < 0.1:
        v = torch.ones_like(v)
    rules = rules_for(needs, rng, n, m, heads)
    return *(x.to(dtype) for x in (q * float(rng.choice(SIZES)), k, v)), rules


def rules_for(needs: set[str], rng: np.random.Generator, n: int, m: int, heads: int) -> dict[str, Any]:
    """Rules by the names of what is needed, for n queries and m keys."""
    rules: dict[str, Any] = {}
    if "causal" in needs or "blind" in needs:
        rules["causal"] = True
        rules["query_offset"] = m - n if "uneven" not in needs or rng.random() < 0.5 else 0
        if "blind" in needs:
            rules["query_offset"] = -3
    if "decode" in needs:
        rules["causal"], rules["query_offset"] = True, m - n
    if "masks" in needs:
        rules["mask"] = rng.random((2, 1, n, m)) < 0.6
        rules["mask"][..., 0] = True
    if "softcap" in needs:
        rules["softcap"] = 1.5
    if "bias" in needs:
        rules["bias"] = rng.standard_normal((heads, n, m)).astype(np.float32)
    if "alibi" in needs:
        rules["alibi_slopes"] = 0.3 / np.arange(1, heads + 1)
    if "spans" in needs:
        table = rng.standard_normal((heads, 4, 4)).astype(np.float32) * 2
        table[:, 1, 2] = -np.inf
        rules["spans"] = rng.integers(-1, 4, (2, n)), rng.integers(-1, 4, (2, m)), table
    if "scale" in needs:
        rules["scale"] = 0.31
    if "rotary" in needs:
        rules["rotary"] = 100.0
    if "mask" in needs:
        rules["mask"] = rng.random((n, m)) < 0.6
        rules["mask"][:, 0] = True
        rules["mask"][np.arange(min(n, m)), np.arange(min(n, m))] = True
    if "padding" in needs:
        rules["kv_lengths"] = np.array([m - 6, m - 3])
    if "query_lengths" in needs:
        rules["query_lengths"] = np.array([n - 6, n])
    if "segments" in needs:
        rules["query_segments"] = (np.arange(n) >= n // 2).astype(int)[None].repeat(2, 0)
        rules["kv_segments"] = (np.arange(m) >= m // 2).astype(int)[None].repeat(2, 0)
    if "window" in needs:
        rules["window"] = (4, 3)
        rules["query_offset"] = m - n
    if "sinks" in needs:
        rules["sinks"] = np.linspace(0.5, 1.5, heads)
    return rules


@cache
def _runs() -> list[Any]:
    model = load()
    return [run for text in TEXTS for run in model.run([token.id for token in model.tokenizer.tokens(text)]).layers]


def activations(rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Any]]:
    """The queries, keys and values of a layer of the shipped model."""
    runs = _runs()
    run, dtype = runs[int(rng.integers(len(runs)))], DTYPES[int(rng.integers(4))]
    q, k, v = (torch.tensor(np.asarray(x, np.float64))[None].to(dtype) for x in (run.q, run.k, run.v))
    return q, k, v, {"causal": True}


def ready(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rules: dict[str, Any]) -> Ready:
    """The rules as a mask and a bias: those that wrong code has, without a mistake."""
    (batch, heads, n, d), m = q.shape, k.shape[2]
    seen = seen_by(n, m, set(), rules, batch, heads, {"which": 0})
    added = torch.zeros(batch, heads, n, m, dtype=torch.float64)
    if "bias" in rules:
        added += torch.tensor(rules["bias"]).double()
    if "alibi_slopes" in rules:
        added -= alibi(n, m, rules, added.dtype, set())
    if "spans" in rules:
        added += spanned(rules, added)
        seen &= ~torch.isneginf(added)
        added = torch.where(seen, added, 0.0)
    sinks = torch.tensor(rules["sinks"])[None, :, None, None].double() if "sinks" in rules else None
    k, v = (x.repeat_interleave(heads // k.shape[1], 1) for x in (k, v))
    used = {"bias", "alibi_slopes", "spans"} & rules.keys()
    return Ready(q, k, v, rules.get("scale", d**-0.5), rules.get("softcap"), added if used else None, seen, sinks)


def scores(g: Ready, q: torch.Tensor | None = None, k: torch.Tensor | None = None, scale: float | None = None) -> Any:
    """q·kᵀ with scale, cap and what is added, in the dtype of q."""
    q, k = g.q if q is None else q, g.k if k is None else k
    s = q @ k.mT * (g.scale if scale is None else scale)
    return _after_scale(g, s)


def _after_scale(g: Ready, s: torch.Tensor) -> torch.Tensor:
    if g.softcap is not None:
        s = g.softcap * torch.tanh(s / g.softcap)
    return s if g.added is None else s + g.added.to(s.dtype)


def masked(g: Ready) -> torch.Tensor:
    """Scores with -inf where nothing may be seen."""
    return scores(g).masked_fill(~g.seen, -torch.inf)


def peak(s: torch.Tensor) -> torch.Tensor:
    """The largest score of each row; 0 where it sees nothing."""
    top = s.amax(-1, keepdim=True)
    return torch.where(torch.isneginf(top), 0, top)


def quotient(g: Ready, out: torch.Tensor, total: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Sums of values over sums of powers, to which the sinks are added; 0 where a row sees nothing."""
    if g.sinks is not None:
        total = torch.where(total > 0, total + torch.exp(g.sinks.to(total.dtype) - top), 0)
    return torch.where(total > 0, out / torch.where(total > 0, total, 1), 0).to(g.q.dtype)


def weigh(g: Ready, s: torch.Tensor, v: torch.Tensor | None = None) -> torch.Tensor:
    """Masked softmax and values; rows that see nothing are 0."""
    v = g.v if v is None else v
    s = s.masked_fill(~g.seen, -torch.inf)
    top = s.amax(-1, keepdim=True)
    if g.sinks is not None:
        top = torch.maximum(top, g.sinks.to(s.dtype))
    e = torch.exp(s - torch.where(torch.isneginf(top), 0, top))
    total = e.sum(-1, keepdim=True)
    if g.sinks is not None:
        total = total + torch.exp(g.sinks.to(s.dtype) - top)
    a = torch.where(g.seen.any(-1, keepdim=True), e / total, 0)
    return a.to(v.dtype) @ v


# ── programs ──


def naive(g: Ready, _: np.random.Generator) -> torch.Tensor:
    return weigh(g, scores(g))


def wide(g: Ready, rng: np.random.Generator) -> torch.Tensor:
    """Computed in a wider dtype, the output rounded."""
    return naive(g.to(torch.float64), rng).to(g.q.dtype)


def upcast(g: Ready, rng: np.random.Generator) -> torch.Tensor:
    """Narrow inputs computed in float32; the output stays wide."""
    return naive(g.wider, rng)


def softmax_in_float32(g: Ready, _: np.random.Generator) -> torch.Tensor:
    """As Transformers' eager attention: scores in the narrow dtype, the softmax in float32, weights rounded back."""
    s = scores(g).to(g.wider.q.dtype)
    if g.sinks is not None:
        return weigh(g, s).to(g.q.dtype)
    a = torch.softmax(s.masked_fill(~g.seen, -torch.inf), -1).to(g.q.dtype)
    return torch.nan_to_num(a) @ g.v


def one_by_one(g: Ready, rng: np.random.Generator) -> torch.Tensor:
    """Products summed strictly from left to right, or from right to left, in float32 or better."""
    wide = g.wider
    columns = list(range(wide.q.shape[3]))[:: 1 if rng.random() < 0.5 else -1]
    s = torch.zeros(*wide.q.shape[:3], wide.k.shape[2], dtype=wide.q.dtype)
    for c in columns:
        s = s + wide.q[..., c, None] * wide.k[..., None, :, c]
    return weigh(g, _after_scale(g, (s * g.scale).to(g.q.dtype)))


def scale_in_q(g: Ready, _: np.random.Generator) -> torch.Tensor:
    return weigh(g, scores(g, g.q * g.scale, scale=1.0))


def base_two(g: Ready, _: np.random.Generator) -> torch.Tensor:
    """exp2, with log2(e) in the scale where nothing else acts."""
    wide, turn = g.wider, math.log2(math.e)
    plain = g.softcap is None and g.added is None
    s = (wide.q @ wide.k.mT * (g.scale * turn) if plain else scores(wide) * turn).masked_fill(~g.seen, -torch.inf)
    e = torch.exp2(s - peak(s))
    return quotient(g, e @ wide.v, e.sum(-1, keepdim=True), peak(s) / turn)


def by_logsumexp(g: Ready, _: np.random.Generator) -> torch.Tensor:
    """exp(s - L), as a backward pass and `A[i, j]` do."""
    s = masked(g.wider)
    total = torch.logsumexp(s, -1, keepdim=True)
    if g.sinks is not None:
        total = torch.logaddexp(total, g.sinks.to(s.dtype))
    a = torch.where(g.seen, torch.exp(s - total), 0)
    return (a @ g.wider.v).to(g.q.dtype)


def filled(g: Ready, rng: np.random.Generator) -> torch.Tensor:
    """Hidden scores are a large negative number instead of -inf; rows that see nothing are set to 0."""
    s = scores(g)
    numbers = (-1e9, -1e30, torch.finfo(s.dtype).min) if s.dtype != torch.float16 else (torch.finfo(s.dtype).min,)
    fill = numbers[int(rng.integers(len(numbers)))]
    if g.sinks is not None or s.abs().max() > abs(fill) / 10:
        return weigh(g, s)
    s = s.masked_fill(~g.seen, fill)
    return torch.where(g.seen.any(-1, keepdim=True), torch.softmax(s, -1) @ g.v, 0)


def divided_last(g: Ready, _: np.random.Generator) -> torch.Tensor:
    """The sum divides the output, not the weights."""
    s = masked(g)
    e = torch.exp(s - peak(s))
    return quotient(g, e @ g.v, e.sum(-1, keepdim=True), peak(s))


def tiled(
    g: Ready, rng: np.random.Generator, *, lazy: bool = False, rounded: bool = False, backwards: bool = False
) -> torch.Tensor:
    """Online softmax over blocks of keys, sums in float32 or better."""
    s, v = masked(g.wider), g.wider.v
    block = int(rng.choice([1, 2, 3, 4, 7, 8, 16, 32, 64]))
    out = torch.zeros(*s.shape[:3], v.shape[3], dtype=s.dtype)
    total, top = torch.zeros(*s.shape[:3], 1, dtype=s.dtype), torch.full((*s.shape[:3], 1), -torch.inf, dtype=s.dtype)
    starts = list(range(0, s.shape[3], block))
    for start in starts[::-1] if backwards else starts:
        part = s[..., start : start + block]
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        if lazy:  # the old maximum does while the new one is not much larger
            new = torch.where(new - top < 5, top, new)
        safe = torch.where(torch.isneginf(new), 0, new)
        p, shrink = torch.exp(part - safe), torch.where(torch.isneginf(top), 0, torch.exp(top - safe))
        total = total * shrink + p.sum(-1, keepdim=True)
        p = p.to(g.q.dtype).to(s.dtype) if rounded else p  # tensor cores multiply narrow weights
        out, top = out * shrink + p @ v[:, :, start : start + block], new
    return quotient(g, out, total, top)


def split_keys(g: Ready, rng: np.random.Generator) -> torch.Tensor:
    """Outputs of spans of keys, merged by their log-sum-exp, as in split-key decoding."""
    s = masked(g.wider)
    parts, sums = [], []
    for span in torch.tensor_split(torch.arange(s.shape[3]), int(rng.integers(1, 6))):
        if len(span):
            parts.append(torch.nan_to_num(torch.softmax(s[..., span], -1)) @ g.wider.v[:, :, span])
            sums.append(torch.logsumexp(s[..., span], -1, keepdim=True))
    whole = torch.logsumexp(torch.stack(sums), 0)
    if g.sinks is not None:
        whole = torch.where(torch.isneginf(whole), whole, torch.logaddexp(whole, g.sinks.to(s.dtype)))
    shares = [torch.where(torch.isneginf(x), 0, torch.exp(x - whole)) for x in sums]
    return sum(share * part for share, part in zip(shares, parts, strict=True)).to(g.q.dtype)


def by_pytorch(g: Ready, rng: np.random.Generator) -> torch.Tensor:
    """PyTorch's own function, with an additive mask."""
    if g.sinks is not None or g.softcap is not None:
        return naive(g, rng)
    mask = torch.zeros(g.seen.shape, dtype=g.q.dtype) if g.added is None else g.added.to(g.q.dtype)
    mask = mask.masked_fill(~g.seen, -torch.inf)
    out = torch.nn.functional.scaled_dot_product_attention(g.q, g.k, g.v, attn_mask=mask, scale=g.scale)
    return torch.where(g.seen.any(-1, keepdim=True), out, 0)


PROGRAMS = {
    program.__name__: program
    for program in (
        *(naive, wide, upcast, softmax_in_float32, one_by_one),
        *(scale_in_q, base_two, by_logsumexp, filled, divided_last),
        *(tiled, split_keys, by_pytorch),
    )
} | {
    "tiled_backwards": partial(tiled, backwards=True),
    "tiled_lazily": partial(tiled, lazy=True),
    "tiled_with_narrow_weights": partial(tiled, rounded=True),
}
